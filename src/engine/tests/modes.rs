//! The interface of the modes, tested with a second, tiny mode: whatever is not about the mode works as in any other.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::goal::goal;
use super::tasks::{at_work, mode};
use super::work::{tools, wants};
use super::*;
use crate::modes::countdown::RUNTIME;
use agentloop_api::status::LoopOutcome;
use agentloop_api::task::TaskOutcome;

fn countdown(turns: u32) -> EngineSettings {
    EngineSettings {
        mode: ModeSettings::Countdown { turns },
        ..settings()
    }
}

/// What the mode keeps: completed and failed turns.
fn counts(driver: &Driver) -> (u32, u32) {
    let saved = serde_json::to_value(&driver.saved).unwrap();
    let number = |name: &str| serde_json::from_value(saved["countdown"][name].clone()).unwrap();
    (number("completed"), number("failed"))
}

#[rstest]
#[case(0)]
#[case(1)]
#[case(3)]
fn a_mode_has_its_own_first_messages_and_its_own_end(#[case] turns: u32) {
    let mut driver = Driver::started(countdown(turns));
    for turn in 1..=turns {
        let left = turns - turn + 1;
        assert_eq!(driver.observed(), format!("Turn {turn}: {left} to go. "));
        assert!(matches!(&*driver.prompt[0], Message::System { text } if text.ends_with(RUNTIME)));
        assert_eq!(driver.offered, ["finish"]);
        driver.turn();
    }
    assert_eq!(driver.state(), LoopState::Stopped);
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
    assert!(driver.stopped);
    let turns = usize::try_from(turns).unwrap();
    assert_eq!(driver.notes(RecordKind::TurnStarted).len(), turns);
    assert_eq!(driver.notes(RecordKind::TurnCompleted), vec!["continue"; turns]);
}

#[test]
fn its_tool_ends_the_turn_and_the_loop() {
    let mut driver = Driver::started(countdown(5));
    driver.answer(calls("finish", r#"{"now": true}"#));
    assert_eq!(driver.result(), "finish takes no arguments");
    assert_eq!(driver.state(), LoopState::Running);
    driver.answer(calls("finish", "{}"));
    assert_eq!(driver.result(), "Finished.");
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
    assert_eq!(driver.notes(RecordKind::TurnCompleted), ["shutdown"]);
}

#[test]
fn its_tool_waits_for_the_other_calls_of_the_answer_and_for_their_success() {
    let mut driver = Driver::with_tools(countdown(5));
    driver.answer(wants(&["files__write", "finish"]));
    assert_eq!(driver.state(), LoopState::Running);
    let text = "disk full".into();
    driver.end(1, ToolOutcome::Failed { text });
    assert_eq!(
        driver.result(),
        "Not yet: another call of this answer failed. Look at its result first, then finish again."
    );
    driver.answer(wants(&["finish", "files__write", "finish"]));
    driver.done(2, "written");
    assert_eq!(driver.result(), "Finished.");
    let replaced = "Replaced by a later finish in the same answer.";
    let is_replaced = |message: &Arc<Message>| matches!(&**message, Message::Tool { text, .. } if text == replaced);
    assert!(driver.transcript.iter().any(is_replaced));
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
}

#[test]
fn tools_of_other_modes_are_unknown_and_a_source_cannot_use_the_name_of_a_mode_tool() {
    let mut driver = Driver::started(countdown(5));
    let mut offered = tools();
    offered.push(ToolSpec {
        name: "finish".into(),
        ..offered[0].clone()
    });
    driver.offer(offered);
    driver.turn();
    assert_eq!(driver.offered.iter().filter(|name| *name == "finish").count(), 1);
    driver.answer(calls("yield", "{}"));
    assert!(driver.result().contains("unknown tool yield"), "{}", driver.result());
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["UnknownTool"]);
}

#[test]
fn guardrails_and_pauses_hold_it() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 2,
        ..countdown(3)
    });
    driver.turn();
    driver.turn();
    assert_eq!(driver.reasons(), [PauseReason::MaxConsecutiveTurns]);
    driver.pass(seconds(59));
    assert_eq!(driver.in_flight, None);
    driver.pass(seconds(1));
    driver.feed(EngineInput::LinkLost);
    driver.fail(FailureKind::LinkLost);
    assert_eq!(driver.reasons(), [PauseReason::LinkLost]);
    driver.pass(seconds(600));
    assert_eq!(driver.in_flight, None);
    driver.feed(EngineInput::LinkBack);
    driver.turn();
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
}

#[test]
fn failed_turns_are_retried_with_the_delays_of_the_loop_and_reported_to_the_mode() {
    let mut driver = Driver::started(countdown(1));
    for failed in 1..=4 {
        driver.failed_turn();
        assert_eq!(counts(&driver), (0, failed));
        assert_eq!(driver.engine.view().consecutive_errors, failed);
        assert_eq!(driver.next_timer(), SignedDuration::from_millis(100_i64 << failed));
    }
    driver.failed_turn();
    assert_eq!(driver.reasons(), [PauseReason::ConsecutiveErrors]);
    driver.pass(seconds(60));
    driver.refused_turn();
    assert_eq!(counts(&driver), (0, 6));
    driver.pass(seconds(1));
    driver.turn();
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
}

#[test]
fn the_state_of_a_mode_outlives_the_process_until_the_loop_restarts() {
    let mut driver = Driver::started(countdown(3));
    driver.turn();
    driver.restart(1);
    driver.turn();
    driver.restart(2);
    assert_eq!(counts(&driver), (2, 0));
    driver.turn();
    assert_eq!(driver.state(), LoopState::Stopped);
    driver.restart(2);
    assert!(driver.stopped, "the same pod does not start it again");
    driver.restart(3);
    assert_eq!(driver.observed(), "Turn 4: 3 to go. ");
}

#[test]
fn the_state_of_another_mode_on_the_same_volume_is_not_used() {
    let mut driver = Driver::started(settings());
    driver.answer(calls("yield", r#"{"sleep": 600}"#));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.settings = countdown(1);
    driver.restart(2);
    driver.next_timer();
    assert_eq!(driver.observed(), "Turn 2: 1 to go. ");
    assert_eq!(driver.offered, ["finish"]);
    driver.settings = settings();
    driver.restart(3);
    let saved = serde_json::to_value(&driver.saved).unwrap();
    assert_eq!(saved["countdown"], json!(null));
    assert_eq!(saved["sleep"], json!(null));
}

#[test]
fn a_task_begun_before_the_mode_changed_is_answered_and_the_agents_own_turns_follow() {
    let mut driver = at_work(mode());
    driver.settings = settings();
    driver.restart(2);
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    driver.answer(says("42"));
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Completed)]);
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    assert!(driver.observed().starts_with("Turn 2"), "{}", driver.observed());
    assert!(driver.offered.contains(&"yield".to_owned()));
}

#[rstest]
#[case("finish", r#"{"result": "done"}"#, "finish")]
#[case("request_confidence_check", r#"{"reason": "stuck"}"#, "check confidence")]
fn a_turn_that_ends_with_a_tool_of_its_former_mode_is_followed_by_the_next_one(
    #[case] tool: &str,
    #[case] arguments: &str,
    #[case] note: &str,
) {
    let mut driver = Driver::with_goal(goal(|_| ()));
    let mut answer = wants(&["files__read", tool]);
    answer.tool_calls[1].arguments = arguments.into();
    driver.answer(answer);
    driver.settings = settings();
    driver.restart(1);
    driver.done(1, "read");
    assert_eq!(driver.notes(RecordKind::TurnCompleted), [note]);
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    assert!(driver.observed().starts_with("Turn 2"), "{}", driver.observed());
    assert_eq!(driver.state(), LoopState::Running);
}
