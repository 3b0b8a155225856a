//! Mode `Goal`: requests that wait while a step is checked. They come after the check; if its judge cannot be reached for long,
//! one comes in between, and the check starts over.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::approvals::gated_tools;
use super::goal::{command, criterion, ended, goal, judged, shell};
use super::*;
use crate::retry::QUICK_ATTEMPTS;
use agentloop_api::goal::GoalEnd;

/// The judge fails so often, with the waits in between.
fn fail_judge(driver: &mut Driver, times: u32) {
    for _ in 0..times {
        while driver.in_flight.is_none() {
            driver.next_timer();
        }
        assert_eq!(driver.purpose, CallPurpose::Judge);
        driver.fail(FailureKind::Unreachable);
    }
}

fn next_call(driver: &mut Driver) -> CallPurpose {
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    driver.purpose
}

#[rstest]
#[case::retried(QUICK_ATTEMPTS - 1, CallPurpose::Judge)]
#[case::paused(QUICK_ATTEMPTS, CallPurpose::Chat)]
fn a_request_interrupts_a_check_only_once_the_outage_of_its_judge_pauses_the_loop(
    #[case] failures: u32,
    #[case] next: CallPurpose,
) {
    let mut driver = judged();
    driver.ask("a");
    fail_judge(&mut driver, failures);
    assert_eq!(driver.in_flight, None);
    assert_eq!(next_call(&mut driver), next);
}

#[test]
fn a_request_that_waits_for_a_retry_is_answered_after_the_check() {
    let mut driver = judged();
    fail_judge(&mut driver, 1);
    driver.ask("a");
    assert_eq!(next_call(&mut driver), CallPurpose::Judge);
    driver.answer(says(r#"{"met": false}"#));
    assert_eq!((driver.purpose, driver.goal_view().steps), (CallPurpose::Chat, 1));
}

#[test]
fn a_check_that_a_request_has_interrupted_starts_over_so_that_nothing_counts_that_was_met_before() {
    let mut driver = judged();
    driver.ask("a");
    driver.ask("b");
    fail_judge(&mut driver, QUICK_ATTEMPTS);
    assert_eq!(next_call(&mut driver), CallPurpose::Chat);
    driver.answer(says("I have removed a test."));
    assert_eq!(
        (driver.running(), driver.goal_view().steps),
        (vec![1], 0),
        "the command runs again, before the next request"
    );
    driver.done(1, "exit code 1\nno");
    assert_eq!(driver.goal_view().steps, 1, "its judge would not decide");
    assert_eq!(next_call(&mut driver), CallPurpose::Turn);
    assert!(driver.observed().starts_with("Step 2 of 20"), "{}", driver.observed());
    assert!(
        driver.observed().contains("Unmet criteria: tests"),
        "{}",
        driver.observed()
    );
}

#[test]
fn a_check_with_a_request_in_each_pause_completes_once_its_judge_answers() {
    let mut driver = judged();
    for id in ["a", "b", "c"] {
        driver.ask(id);
    }
    fail_judge(&mut driver, QUICK_ATTEMPTS);
    for _ in 0..2 {
        assert_eq!(next_call(&mut driver), CallPurpose::Chat);
        driver.answer(says("well"));
        driver.done(1, "exit code 0\nok");
        fail_judge(&mut driver, 1);
    }
    assert_eq!(next_call(&mut driver), CallPurpose::Chat);
    driver.answer(says("well"));
    driver.done(1, "exit code 0\nok");
    driver.ask("d");
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(ended(&driver).1, Some(GoalEnd::CriteriaMet));
}

#[test]
fn a_restart_keeps_what_a_pause_of_a_check_allows() {
    let mut driver = judged();
    fail_judge(&mut driver, QUICK_ATTEMPTS);
    driver.restart(1);
    driver.ask("a");
    assert_eq!(next_call(&mut driver), CallPurpose::Chat);
    driver.restart(1);
    driver.answer(says("well"));
    assert_eq!(driver.running(), [1]);
}

#[test]
fn a_request_waits_for_the_retry_of_a_confidence_check() {
    let mut driver = Driver::with_goal(goal(|goal| goal.confidence_every = 1));
    driver.answer(says("Not yet."));
    driver.fail(FailureKind::Unreachable);
    driver.ask("a");
    assert_eq!(next_call(&mut driver), CallPurpose::Confidence);
    driver.answer(says(r#"{"confidence": 90}"#));
    assert_eq!(driver.purpose, CallPurpose::Chat);
}

#[test]
fn a_request_precedes_a_command_that_waits_for_a_deferred_run_and_all_is_checked_afterwards() {
    let mut driver = Driver::fresh(EngineSettings {
        defers_approvals: true,
        ..goal(|goal| {
            goal.criteria = vec![
                criterion("build", command("cargo build", None)),
                criterion("tests", command("cargo test", None)),
            ];
        })
    });
    driver.offer(gated_tools().into_iter().chain([shell()]).collect());
    driver.start(1);
    driver.answer(super::work::wants(&["repo__delete"]));
    driver.answer(says("The code is written."));
    let commands = |driver: &Driver| -> Vec<String> {
        let runs = driver.running.values().filter(|run| run.name == "toolbox__shell");
        runs.map(|run| run.arguments["command"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(commands(&driver), ["cargo build"]);
    driver.answer_gate("e1-t1c1r1", true);
    driver.ask("a");
    let build = driver
        .running
        .values()
        .find(|run| run.name == "toolbox__shell")
        .unwrap()
        .id;
    driver.feed(EngineInput::ToolFinished {
        run: build,
        outcome: ToolOutcome::Done {
            text: "exit code 0\nok".into(),
        },
        artifacts: ResultArtifacts::default(),
    });
    assert_eq!((commands(&driver), driver.purpose), (Vec::new(), CallPurpose::Chat));
    driver.answer(says("well"));
    let deferred = driver.running.values().next().unwrap().id;
    driver.feed(EngineInput::ToolFinished {
        run: deferred,
        outcome: ToolOutcome::Done { text: "gone".into() },
        artifacts: ResultArtifacts::default(),
    });
    assert_eq!(commands(&driver), ["cargo build"], "the check has started over");
}

#[test]
fn the_time_of_a_request_open_before_a_restart_does_not_extend_that_of_the_goal() {
    let mut driver = Driver::with_goal(goal(|goal| goal.timeout = seconds(60)));
    driver.ask("a");
    driver.answer(says("Not yet."));
    assert_eq!(driver.purpose, CallPurpose::Chat);
    driver.pass(seconds(50));
    driver.feed(EngineInput::StopRequested { token: "now:1".into() });
    driver.restart(2);
    assert_eq!(driver.purpose, CallPurpose::Chat);
    driver.pass(seconds(5));
    driver.answer(says("well"));
    assert_eq!(next_call(&mut driver), CallPurpose::Turn);
    driver.pass(seconds(59));
    assert_eq!(ended(&driver).1, None);
    driver.pass(seconds(1));
    driver.answer(says("Not yet."));
    assert_eq!(ended(&driver).1, Some(GoalEnd::Timeout));
}

#[test]
fn a_clock_that_was_set_back_during_a_request_changes_neither_its_time_nor_that_of_the_goal() {
    let mut driver = Driver::with_goal(goal(|goal| goal.timeout = seconds(60)));
    driver.ask("a");
    driver.answer(says("Not yet."));
    driver.pass(seconds(50));
    driver.feed(EngineInput::Timer);
    driver.now -= seconds(31_536_000);
    driver.feed(EngineInput::Timer);
    driver.pass(seconds(50));
    driver.answer(says("well"));
    let request = driver.engine.view().recent_tasks.remove(0);
    assert_eq!(request.completed_at.duration_since(request.started_at), seconds(100));
    assert_eq!(next_call(&mut driver), CallPurpose::Turn);
    driver.pass(seconds(60));
    driver.answer(says("Not yet."));
    assert_eq!(ended(&driver).1, Some(GoalEnd::Timeout));
}
