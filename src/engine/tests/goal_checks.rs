//! Mode `Goal`: what may happen around a check of the criteria: an edit, a limit, a false answer, a clock that is set back, a
//! deferred run.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::approvals::gated_tools;
use super::budget::{revision, stops};
use super::goal::{command, criterion, ended, finish, goal, judge, judged, shell, tests_and_sense};
use super::goal_gates::doubtful;
use super::work::wants;
use super::*;
use crate::modes::goal::{CriterionCheck, GoalSettings, JudgeCheck};
use agentloop_api::goal::{GoalEnd, QuestionModel};
use agentloop_api::status::LoopOutcome;

const MET: (Option<LoopOutcome>, Option<GoalEnd>) = (Some(LoopOutcome::Completed), Some(GoalEnd::CriteriaMet));

/// The command that runs has printed this.
fn checked(driver: &mut Driver, text: &str) {
    let run = driver.running.values().next().unwrap().id;
    driver.feed(EngineInput::ToolFinished {
        run,
        outcome: ToolOutcome::Done { text: text.into() },
        artifacts: ResultArtifacts::default(),
    });
}

/// The spec is edited. In the same pod, so that only the edit matters.
fn edit(driver: &mut Driver, change: impl FnOnce(&mut GoalSettings)) {
    driver.settings = goal(|goal| {
        tests_and_sense(goal);
        change(goal);
    });
    driver.restart(1);
}

#[test]
fn an_answer_to_a_question_before_an_edit_does_not_count_and_the_new_question_is_sent() {
    let mut driver = judged();
    edit(&mut driver, |goal| {
        goal.criteria[1] = criterion(
            "sense",
            CriterionCheck::Judge(JudgeCheck {
                question: "is it short?".into(),
                model: QuestionModel::Main,
            }),
        );
    });
    if driver.purpose == CallPurpose::Judge && driver.in_flight.is_some() {
        // The call that was open is completed.
        driver.answer(says(r#"{"met": true}"#));
    }
    assert_eq!(ended(&driver), (None, None));
    checked(&mut driver, "exit code 0\nok");
    assert_eq!(driver.purpose, CallPurpose::Judge);
    assert!(driver.observed().contains("is it short?"), "{}", driver.observed());
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!((ended(&driver), driver.goal_view().steps), (MET, 1));
}

#[test]
fn an_edit_of_a_criterion_that_was_met_makes_the_check_begin_again() {
    let mut driver = judged();
    edit(&mut driver, |goal| {
        goal.criteria[0] = criterion("tests", command("cargo test --release", None));
    });
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(ended(&driver), (None, None));
    let run = driver.running.values().next().unwrap();
    assert_eq!(run.arguments["command"], json!("cargo test --release"));
    checked(&mut driver, "exit code 1\nno");
    assert_eq!((ended(&driver), driver.goal_view().steps), ((None, None), 1));
}

#[test]
fn an_edit_that_leaves_the_criteria_alone_leaves_their_check_alone() {
    let mut driver = judged();
    edit(&mut driver, |goal| goal.max_steps = 7);
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!((ended(&driver), driver.goal_view().steps), (MET, 1));
}

#[rstest]
#[case::same(false)]
#[case::another(true)]
fn a_goal_that_was_met_under_a_pause_is_met_unless_its_criteria_were_edited(#[case] edited: bool) {
    let mut driver = judged();
    driver.feed(EngineInput::LinkLost);
    driver.answer(says(r#"{"met": true}"#));
    driver.feed(EngineInput::BudgetChanged { budget: stops() });
    driver.settings = goal(|goal| {
        tests_and_sense(goal);
        if edited {
            goal.criteria[0] = criterion("tests", command("cargo test --release", None));
        }
    });
    driver.restart(2);
    driver.feed(EngineInput::BudgetChanged { budget: revision(2) });
    assert_eq!(ended(&driver) == MET, !edited);
}

#[test]
fn a_run_whose_command_was_edited_has_an_outcome() {
    let mut driver = Driver::with_goal(goal(tests_and_sense));
    driver.answer(finish("done"));
    edit(&mut driver, |goal| {
        goal.criteria[0] = criterion("tests", command("cargo test --release", None));
    });
    assert_eq!(driver.outcomes(), ["Unknown"]);
    let run = driver.running.values().next().unwrap();
    assert_eq!(run.arguments["command"], json!("cargo test --release"));
}

#[rstest]
#[case::complete(FinishReason::Stop, true)]
#[case::cut(FinishReason::Length, false)]
#[case::refused(FinishReason::Refused, false)]
fn an_answer_that_is_not_complete_is_no_verdict(#[case] finish: FinishReason, #[case] counts: bool) {
    let mut driver = judged();
    driver.answer(ModelAnswer {
        finish,
        ..says(r#"{"met": true}"#)
    });
    assert_eq!(ended(&driver) == MET, counts);
}

/// A loop with a command and this limit, at which it is once its step has ended.
fn at_limit(limit: impl FnOnce(&mut EngineSettings)) -> Driver {
    let mut settings = goal(|goal| goal.criteria = vec![criterion("tests", command("cargo test", None))]);
    limit(&mut settings);
    let mut driver = Driver::with_goal(settings);
    driver.pass(seconds(40));
    driver.answer(ModelAnswer {
        cost: Some(100),
        ..says("The code is written.")
    });
    driver
}

fn limits(change: impl FnOnce(&mut GoalSettings)) -> impl FnOnce(&mut EngineSettings) {
    move |settings| {
        if let ModeSettings::Goal(goal) = &mut settings.mode {
            change(goal);
        }
    }
}

#[rstest]
#[case::cost(at_limit(limits(|goal| goal.max_cost = Some(100))), LoopOutcome::Failed, Some(GoalEnd::CostLimit))]
#[case::time(at_limit(limits(|goal| goal.timeout = seconds(40))), LoopOutcome::Failed, Some(GoalEnd::Timeout))]
#[case::idle(at_limit(|settings| settings.idle_timeout = seconds(30)), LoopOutcome::Idle, None)]
fn a_limit_ends_the_loop_after_the_check_of_the_step_and_not_before(
    #[case] mut driver: Driver,
    #[case] outcome: LoopOutcome,
    #[case] end: Option<GoalEnd>,
) {
    let mut met = driver.clone();
    met.done(1, "exit code 0\nok");
    assert_eq!(ended(&met), MET);
    driver.done(1, "exit code 1\nno");
    assert_eq!(ended(&driver), (Some(outcome), end));
}

#[test]
fn a_confidence_check_does_not_delay_the_end_by_a_guardrail() {
    let mut settings = goal(|goal| goal.confidence_every = 1);
    settings.idle_timeout = seconds(30);
    let mut driver = Driver::with_goal(settings);
    driver.pass(seconds(40));
    driver.answer(says("Not yet."));
    assert_eq!(ended(&driver), (Some(LoopOutcome::Idle), None));
}

#[rstest]
#[case::another_result(["12", "13", "14", "15", "16", "17"], false)]
#[case::same_result(["12"; 6], true)]
fn steps_that_hand_in_another_result_without_text_are_no_loop(#[case] results: [&str; 6], #[case] is_loop: bool) {
    let mut driver = Driver::with_goal(EngineSettings {
        loop_detection: detection(DetectionMode::Enforce),
        ..goal(|_| {})
    });
    for result in results {
        if driver.in_flight.is_none() {
            driver.next_timer();
        }
        driver.answer(finish(result));
        if !driver.reasons().is_empty() {
            break;
        }
    }
    assert_eq!(driver.reasons() == [PauseReason::Escalated], is_loop);
}

#[rstest]
#[case(60, true)]
#[case(61, false)]
fn a_clock_that_was_set_back_leaves_the_timeout_as_long_as_it_was(#[case] timeout: i64, #[case] is_over: bool) {
    let mut driver = Driver::with_goal(goal(|goal| goal.timeout = seconds(timeout)));
    driver.pass(seconds(58));
    driver.failed_attempt("a", "no");
    driver.now -= seconds(1000);
    driver.feed(EngineInput::Timer);
    driver.next_timer();
    assert_eq!(ended(&driver).1 == Some(GoalEnd::Timeout), is_over);
}

#[test]
fn a_clock_that_was_set_back_leaves_the_wait_before_an_attempt_as_long_as_it_was() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.failed_attempt("a", "no");
    driver.now -= seconds(1000);
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.next_timer(), seconds(2));
    assert_eq!(driver.purpose, CallPurpose::Turn);
}

#[test]
fn the_time_at_a_gate_is_known_although_the_clock_was_set_back() {
    let mut driver = doubtful();
    driver.pass(seconds(600));
    driver.now -= seconds(1000);
    driver.feed(EngineInput::Timer);
    let id = driver.gate_ids().remove(0);
    driver.pass(seconds(100));
    driver.answer_gate(&id, true);
    // 3,600 s of the loop's own time are left, since 700 s were the gate's.
    driver.pass(seconds(3599));
    driver.answer(says("Not yet."));
    assert_eq!(ended(&driver), (None, None));
}

/// A loop in mode `Goal` with a deferred call, which continues.
fn deferring(change: impl FnOnce(&mut GoalSettings)) -> Driver {
    deferring_call("repo__delete", change)
}

fn deferring_call(tool: &str, change: impl FnOnce(&mut GoalSettings)) -> Driver {
    let mut driver = Driver::fresh(EngineSettings {
        defers_approvals: true,
        ..goal(change)
    });
    driver.offer(gated_tools().into_iter().chain([shell()]).collect());
    driver.start(1);
    driver.answer(wants(&[tool]));
    driver
}

#[test]
fn an_approved_call_does_not_wait_for_the_answer_to_a_gate_of_the_goal() {
    let mut driver = deferring(|goal| goal.confidence_every = 1);
    driver.answer(says("Not yet."));
    driver.answer(says(r#"{"confidence": 1}"#));
    assert_eq!(driver.reasons(), [PauseReason::LowConfidence]);
    let ids = driver.gate_ids();
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1], "it was approved by itself");
    let of_goal = ids.iter().find(|id| id.starts_with("goal-")).unwrap();
    driver.answer_gate(of_goal, false);
    assert!(!driver.stopped, "its outcome is awaited");
    driver.done(1, "gone");
    assert_eq!(ended(&driver).1, Some(GoalEnd::LowConfidence));
    assert_eq!((driver.stopped, driver.outcomes()), (true, vec!["Ok"]));
}

#[test]
fn a_command_waits_for_the_end_of_a_deferred_run() {
    let mut driver = deferring(tests_and_sense);
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1]);
    driver.answer(says("The code is written."));
    assert_eq!(driver.running.len(), 1, "no other run beside it");
    driver.done(1, "gone");
    let run = driver.running.values().next().unwrap();
    assert_eq!(run.name, "toolbox__shell");
}

/// The check begins while the deferred call waits.
fn checks_beside(tool: &str, second: CriterionCheck) -> Driver {
    let mut driver = deferring_call(tool, |goal| {
        goal.criteria = vec![
            criterion("tests", command("cargo test", None)),
            criterion("second", second),
        ];
    });
    driver.answer(finish("done"));
    driver
}

/// What the command that runs is to do.
fn command_line(driver: &Driver) -> Option<&serde_json::Value> {
    driver.running.values().next()?.arguments.get("command")
}

#[test]
fn an_action_in_the_middle_of_a_check_makes_it_start_over() {
    let mut driver = checks_beside("repo__delete", command("cargo clippy", None));
    driver.answer_gate("e1-t1c1r1", true);
    checked(&mut driver, "exit code 0\nok");
    assert_eq!(
        command_line(&driver),
        None,
        "the deferred run comes before the second command"
    );
    driver.done(1, "gone");
    assert_eq!(command_line(&driver), Some(&json!("cargo test")));
    checked(&mut driver, "exit code 1\nno");
    checked(&mut driver, "exit code 0\nok");
    assert_eq!((ended(&driver), driver.goal_view().steps), ((None, None), 1));
}

#[test]
fn a_read_only_call_does_not_affect_a_check() {
    let mut driver = checks_beside("vault__read", command("cargo clippy", None));
    driver.answer_gate("e1-t1c1r1", true);
    checked(&mut driver, "exit code 0\nok");
    driver.done(1, "seen");
    assert_eq!(command_line(&driver), Some(&json!("cargo clippy")));
}

#[rstest]
#[case::while_it_runs(false)]
#[case::after_it(true)]
fn the_answer_of_a_judge_called_before_an_action_does_not_count(#[case] after: bool) {
    let mut driver = checks_beside("repo__delete", judge());
    checked(&mut driver, "exit code 0\nok");
    assert_eq!(driver.purpose, CallPurpose::Judge);
    driver.answer_gate("e1-t1c1r1", true);
    if after {
        driver.done(1, "gone");
    }
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(ended(&driver), (None, None));
    if !after {
        driver.done(1, "gone");
    }
    assert_eq!(command_line(&driver), Some(&json!("cargo test")));
    checked(&mut driver, "exit code 0\nok");
    assert_eq!(driver.purpose, CallPurpose::Judge);
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!((ended(&driver), driver.goal_view().steps), (MET, 1));
}

#[test]
fn criteria_that_were_met_in_different_checks_are_to_be_met_in_one() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria.push(criterion("tests", command("cargo test", None)));
    }));
    driver.answer(finish("done"));
    driver.done(1, "exit code 1\nno");
    driver.next_timer();
    driver.answer(says("Now the tests pass."));
    driver.done(1, "exit code 0\nok");
    driver.next_timer();
    assert!(
        driver.observed().contains(
            "\nAll criteria were met at their last check, but not in the same one: call finish with the complete result.\n"
        ),
        "{}",
        driver.observed()
    );
}
