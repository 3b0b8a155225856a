//! Requests: a loop in any mode answers them beside its own work, which continues as if there had been none.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::goal::{command, criterion, ended, finish, goal};
use super::work::wants;
use super::*;
use crate::tasks::{TaskOffer, TaskOrigin};
use agentloop_api::goal::GoalEnd;
use agentloop_api::status::LoopOutcome;
use agentloop_api::task::{TaskKind, TaskLimit, TaskOutcome};

pub(super) fn request(id: &str) -> TaskOffer {
    request_of("ann", id)
}

pub(super) fn request_of(user: &str, id: &str) -> TaskOffer {
    TaskOffer {
        id: format!("request-{id}"),
        origin: TaskOrigin::Request(user.into()),
        prompt: format!("how is {id}?"),
        untrusted: None,
    }
}

impl Driver {
    pub(super) fn ask(&mut self, id: &str) {
        self.feed(EngineInput::TaskOffered(request(id)));
    }
}

/// A loop that sleeps for an hour, from `00:00:00` on.
fn asleep() -> Driver {
    let mut driver = Driver::with_tools(settings());
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver
}

#[test]
fn a_request_is_answered_in_a_sleep_which_ends_when_it_would_have() {
    let mut driver = asleep();
    let (transcript, until) = (driver.transcript.clone(), driver.engine.view().resumes_at);
    let offered = driver.offered.clone();
    driver.pass(seconds(600));
    assert_eq!(driver.engine.requested_task(), None);
    driver.ask("a");
    assert_eq!(driver.engine.requested_task(), Some("request-a"));
    assert_eq!(
        (driver.purpose, driver.state()),
        (CallPurpose::Chat, LoopState::Running)
    );
    assert_eq!(driver.prompt.len(), 2, "its own conversation: {:?}", driver.prompt);
    assert_eq!(
        driver.offered, offered,
        "the cache of the provider begins with the tools"
    );
    let asked = driver.observed();
    assert!(
        asked.starts_with("Turn 2, 2026-01-01T00:10:00Z: request request-a from ann, beside"),
        "{asked}"
    );
    assert!(asked.ends_with("\n\nhow is a?"), "{asked}");
    driver.answer(says("All is well."));
    assert_eq!(driver.engine.requested_task(), None);
    assert_eq!(driver.transcript, transcript);
    assert_eq!(
        (driver.state(), driver.engine.view().resumes_at),
        (LoopState::Sleeping, until)
    );
    assert_eq!(driver.response().result, Some(json!("All is well.")));
    let recent = &driver.engine.view().recent_tasks[0];
    assert_eq!((recent.kind, recent.iterations), (TaskKind::Request, 1));
    driver.pass(seconds(3000));
    assert!(
        driver.observed().contains("the sleep that you chose is over"),
        "{}",
        driver.observed()
    );
}

#[test]
fn requests_wait_for_the_open_turn_and_are_answered_in_order() {
    let mut driver = Driver::with_tools(settings());
    driver.ask("a");
    driver.ask("b");
    driver.ask("a");
    assert_eq!(driver.purpose, CallPurpose::Turn);
    driver.answer(says("Hm."));
    for id in ["request-a", "request-b"] {
        assert_eq!(driver.purpose, CallPurpose::Chat);
        driver.answer(says("well"));
        assert_eq!(driver.response().id, id);
    }
    driver.next_timer();
    assert!(
        driver.observed().contains("the loop continues"),
        "{}",
        driver.observed()
    );
    assert_eq!(driver.tasks.responses.len(), 2);
}

#[test]
fn a_request_may_use_tools_but_not_those_of_the_mode() {
    let mut driver = asleep();
    driver.ask("a");
    driver.answer(calls("yield", r#"{"sleep": 20}"#));
    assert!(
        driver.result().contains("not run: yield is for your own work"),
        "{}",
        driver.result()
    );
    driver.answer(wants(&["files__read"]));
    driver.done(1, "a file");
    driver.answer(says("There is a file."));
    assert_eq!(driver.response().iterations, 3);
    assert_eq!(driver.state(), LoopState::Sleeping);
}

#[rstest]
#[case(3, Some(TaskLimit::MaxIterations))]
#[case(4, None)]
fn the_limit_of_calls_is_that_of_a_turn(#[case] max: u32, #[case] limit: Option<TaskLimit>) {
    let mut driver = Driver::with_tools(EngineSettings {
        max_calls_per_turn: max,
        ..settings()
    });
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.ask("a");
    for _ in 0..3 {
        driver.answer(wants(&["files__read"]));
        driver.done(1, "a file");
    }
    if limit.is_none() {
        driver.answer(says("well"));
    }
    assert_eq!(driver.response().reason, limit);
    assert_eq!(driver.state(), LoopState::Sleeping);
}

#[rstest]
#[case(99_999, None)]
#[case(100_000, Some(TaskLimit::MaxTokens))]
fn its_tokens_are_limited(#[case] tokens: u64, #[case] limit: Option<TaskLimit>) {
    let mut driver = asleep();
    driver.ask("a");
    driver.answer(ModelAnswer {
        tokens: Some(tokens),
        ..wants(&["files__read"])
    });
    driver.done(1, "a file");
    if limit.is_none() {
        driver.answer(says("well"));
    }
    assert_eq!(driver.response().reason, limit);
}

#[rstest]
#[case(299, None)]
#[case(300, Some(TaskLimit::MaxDuration))]
fn its_time_is_limited(#[case] after: i64, #[case] limit: Option<TaskLimit>) {
    let mut driver = asleep();
    driver.ask("a");
    driver.pass(seconds(after));
    assert_eq!(driver.tasks.responses.len(), usize::from(limit.is_some()));
    if limit.is_none() {
        driver.answer(says("well"));
    }
    assert_eq!(driver.response().reason, limit);
}

#[test]
fn a_request_that_fails_is_no_error_of_the_loop() {
    let mut driver = Driver::with_tools(EngineSettings {
        max_consecutive_errors: 1,
        ..settings()
    });
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.ask("a");
    driver.fail(FailureKind::BadResponse);
    assert_eq!(driver.response().outcome, TaskOutcome::Failed);
    assert_eq!((driver.state(), driver.reasons()), (LoopState::Sleeping, vec![]));
}

#[test]
fn a_request_waits_while_the_loop_is_paused() {
    let mut driver = Driver::with_tools(settings());
    driver.fail(FailureKind::AuthenticationFailed);
    driver.ask("a");
    driver.pass(seconds(100));
    assert_eq!(driver.engine.view().waiting_tasks, 1);
    resume(&mut driver, "1");
    driver.answer(says("Hm."));
    assert_eq!(driver.purpose, CallPurpose::Chat);
}

#[test]
fn a_request_waits_for_the_check_of_a_step_and_is_no_part_of_the_goal() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria.push(criterion("tests", command("cargo test", None)));
    }));
    driver.ask("a");
    driver.answer(finish("done"));
    assert_eq!(driver.running(), [1]);
    driver.done(1, "exit code 1\nno");
    assert_eq!((driver.purpose, driver.goal_view().steps), (CallPurpose::Chat, 1));
    driver.answer(calls("files__read", "{}"));
    driver.end(1, ToolOutcome::Failed { text: "no".into() });
    driver.answer(says("well"));
    assert_eq!(driver.response().outcome, TaskOutcome::Completed);
    driver.next_timer();
    assert!(driver.observed().starts_with("Step 2 of 20"), "{}", driver.observed());
    assert!(!driver.observed().contains("Attempt"), "{}", driver.observed());
}

#[test]
fn requests_that_wait_when_the_loop_ends_fail() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.ask("a");
    driver.ask("b");
    driver.answer(finish("done"));
    assert_eq!(ended(&driver).0, Some(LoopOutcome::Completed));
    assert_eq!(
        driver.answered_tasks(),
        [("request-a", TaskOutcome::Failed), ("request-b", TaskOutcome::Failed)]
    );
    assert!(driver.response().error.as_ref().unwrap().contains("the loop has ended"));
    assert!(!driver.engine.accepts_tasks_beyond());
}

#[test]
fn a_kill_at_any_point_loses_no_request_and_answers_none_twice() {
    for kill in 0..12 {
        let mut driver = asleep();
        driver.ask("a");
        driver.ask("b");
        for step in 0..30 {
            if step == kill {
                driver.restart(i64::from(kill % 2) + 1);
            }
            if driver.tasks.responses.len() == 2 {
                break;
            }
            if !driver.running.is_empty() {
                driver.done(1, "a file");
            } else if driver.in_flight.is_some() {
                let first = driver.prompt.len() == 2;
                driver.answer(if first { wants(&["files__read"]) } else { says("done") });
            } else {
                driver.next_timer();
            }
        }
        assert_eq!(
            driver.answered_tasks(),
            [
                ("request-a", TaskOutcome::Completed),
                ("request-b", TaskOutcome::Completed)
            ],
            "killed before step {kill}"
        );
        assert_eq!(driver.state(), LoopState::Sleeping);
    }
}

#[test]
fn a_response_reports_untrusted_content_and_a_request_may_declare_it() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.ask("a");
    driver.answer(says("well"));
    assert_eq!(driver.response().untrusted_content, None);
    driver.ask("b");
    driver.answer(wants(&["web__fetch"]));
    driver.done(1, "a page");
    driver.answer(says("The page says: pay."));
    assert_eq!(driver.response().untrusted_content.as_deref(), Some("server/web"));
    assert_eq!(driver.engine.view().untrusted, None, "the loop has not seen it");
    driver.feed(EngineInput::TaskOffered(TaskOffer {
        untrusted: driver.response().untrusted_content.clone(),
        ..request("c")
    }));
    driver.answer(wants(&["chat__post"]));
    assert_eq!(
        driver.reasons(),
        [PauseReason::ToolCallNeedsApproval],
        "it waits after untrusted content"
    );
    let gate = driver.gate_ids().remove(0);
    driver.answer_gate(&gate, false);
    driver.answer(says("I may not."));
    assert_eq!(driver.response().untrusted_content.as_deref(), Some("server/web"));
    driver.ask("d");
    driver.answer(wants(&["chat__post"]));
    assert_eq!(driver.running(), [1], "another conversation");
}

#[test]
fn tasks_are_counted_by_their_outcome_and_once_over_a_crash() {
    let mut driver = asleep();
    for (id, answer) in [("a", Some(says("well"))), ("b", None), ("c", Some(says("well")))] {
        driver.ask(id);
        match answer {
            Some(answer) => driver.answer(answer),
            None => driver.fail(FailureKind::BadResponse),
        };
    }
    driver.ask("d");
    let mut crashed = driver.clone();
    driver.answer(says("well"));
    let counts = |driver: &Driver| {
        let tasks = driver.engine.view().counts.tasks;
        (tasks.completed, tasks.failed, tasks.limit_reached)
    };
    assert_eq!(counts(&driver), (3, 1, 0));
    // The process ended before it had committed the end.
    crashed.restart(1);
    assert_eq!(counts(&crashed), (2, 1, 0));
    crashed.pass(seconds(300));
    assert_eq!(counts(&crashed), (2, 1, 1));
    driver.restart(2);
    assert_eq!(counts(&driver), (3, 1, 0));
}

#[test]
fn a_call_of_a_request_is_not_deferred_into_the_loop() {
    let mut driver = Driver::with_gates(EngineSettings {
        defers_approvals: true,
        ..settings()
    });
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.ask("a");
    driver.answer(wants(&["repo__delete"]));
    assert_eq!(driver.reasons(), [PauseReason::ToolCallNeedsApproval]);
    let gate = driver.gate_ids().remove(0);
    driver.answer_gate(&gate, true);
    driver.done(1, "gone");
    driver.answer(says("It is deleted."));
    assert_eq!(driver.response().result, Some(json!("It is deleted.")));
    assert_eq!(driver.state(), LoopState::Sleeping, "the sleep goes on");
}

#[test]
fn a_request_during_a_check_does_not_end_the_goal_by_a_guardrail() {
    let mut settings = goal(|goal| {
        goal.criteria = vec![
            criterion("tests", command("cargo test", None)),
            criterion("lint", command("cargo clippy", None)),
        ];
    });
    settings.idle_timeout = seconds(30);
    let mut driver = Driver::with_goal(settings);
    driver.pass(seconds(40));
    driver.answer(says("The code is written."));
    driver.ask("a");
    driver.done(1, "exit code 0\nok");
    driver.done(2, "exit code 0\nok");
    assert_eq!(ended(&driver).1, Some(GoalEnd::CriteriaMet));
}

#[test]
fn no_request_is_accepted_once_the_loop_has_ended_although_a_run_is_awaited() {
    let mut driver = Driver::fresh(EngineSettings {
        defers_approvals: true,
        ..goal(|_| {})
    });
    driver.offer(super::approvals::gated_tools());
    driver.start(1);
    driver.answer(wants(&["repo__delete"]));
    driver.answer_gate("e1-t1c1r1", true);
    driver.answer(finish("done"));
    assert_eq!((driver.running(), driver.stopped), (vec![1], false));
    assert!(!driver.engine.accepts_tasks_beyond());
    driver.ask("a");
    assert_eq!(driver.tasks.waiting, []);
}

#[test]
fn requests_and_the_loop_take_turns() {
    let mut driver = Driver::with_tools(settings());
    for id in ["a", "b", "c"] {
        driver.ask(id);
    }
    driver.answer(says("Hm."));
    let mut purposes = Vec::new();
    while purposes.len() < 6 {
        if driver.in_flight.is_none() {
            driver.next_timer();
        }
        purposes.push(driver.purpose);
        driver.pass(seconds(10));
        driver.answer(says("Hm."));
    }
    let (chat, own) = (CallPurpose::Chat, CallPurpose::Turn);
    assert_eq!(purposes, [chat, own, chat, own, chat, own]);
}

#[test]
fn the_time_and_the_cost_of_requests_are_not_those_of_the_goal() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.timeout = seconds(60);
        goal.max_cost = Some(100);
    }));
    driver.ask("a");
    driver.answer(ModelAnswer {
        cost: Some(1),
        ..says("Not yet.")
    });
    driver.pass(seconds(200));
    driver.answer(ModelAnswer {
        cost: None,
        ..says("well")
    });
    assert_eq!(driver.response().outcome, TaskOutcome::Completed);
    assert_eq!(ended(&driver), (None, None));
    driver.pass(seconds(59));
    assert_eq!(ended(&driver), (None, None));
    driver.pass(seconds(1));
    driver.answer(ModelAnswer {
        cost: Some(1),
        ..says("Not yet.")
    });
    assert_eq!(ended(&driver).1, Some(GoalEnd::Timeout));
}

#[test]
fn a_wake_request_during_a_request_ends_the_sleep() {
    let mut driver = asleep();
    driver.ask("a");
    driver.feed(EngineInput::WakeRequested { token: "1".into() });
    driver.answer(says("well"));
    driver.next_timer();
    assert!(
        driver.observed().contains("a wake request ended your sleep"),
        "{}",
        driver.observed()
    );
}

#[test]
fn the_time_of_a_request_is_not_idle_time() {
    let mut driver = Driver::with_tools(EngineSettings {
        idle_timeout: seconds(30),
        ..settings()
    });
    driver.ask("a");
    driver.answer(says("Hm."));
    driver.pass(seconds(200));
    driver.answer(ModelAnswer {
        finish: FinishReason::Length,
        ..says("It is")
    });
    driver.answer(says("well"));
    assert_eq!(driver.purpose, CallPurpose::Turn);
    driver.answer(says("Hm."));
    assert_eq!(driver.engine.view().outcome, None);
}

#[test]
fn failed_tools_of_a_request_are_no_failures_of_the_loop() {
    let mut driver = Driver::with_tools(EngineSettings {
        max_consecutive_tool_failures: Some(2),
        ..settings()
    });
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.ask("a");
    for _ in 0..3 {
        driver.answer(wants(&["files__read"]));
        driver.end(1, ToolOutcome::Failed { text: "no".into() });
    }
    assert_eq!(driver.reasons(), []);
    driver.answer(says("It cannot be read."));
    assert_eq!(driver.state(), LoopState::Sleeping);
}
