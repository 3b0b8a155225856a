//! Deferred calls: the loop continues while a call waits for an approval, and learns of its end.

use pretty_assertions::assert_eq;

use super::super::deferred::{MAX_DEFERRED, MAX_DEFERRED_BYTES, is_deferred_result};
use super::approvals::gated_tools;
use super::work::{unknown, wants};
use super::*;
use crate::pauses::budget::PROBE_INTERVAL;

fn deferring() -> EngineSettings {
    EngineSettings {
        defers_approvals: true,
        ..settings()
    }
}

/// A loop whose call waits while it continues; its second model call is in flight.
fn deferred(tool: &str) -> Driver {
    let mut driver = Driver::with_gates(deferring());
    driver.answer(wants(&[tool]));
    driver
}

impl Driver {
    /// The state block of the next turn.
    fn next_state_block(&mut self) -> &str {
        self.pass(seconds(1));
        self.block.as_deref().unwrap_or_default()
    }
}

/// The same; the loop sleeps for an hour.
fn asleep(tool: &str) -> Driver {
    let mut driver = deferred(tool);
    driver.answer(calls("yield", r#"{"sleep": 3000, "reason": "it takes a while"}"#));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver
}

#[test]
fn the_loop_continues_and_the_result_of_a_deferred_call_reports_that_it_waits() {
    let driver = deferred("repo__delete");
    assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
    assert_eq!(
        (driver.running(), driver.gate_ids()),
        (vec![], vec!["e1-t1c1r1".into()])
    );
    assert!(
        is_deferred_result(driver.result()) && driver.result().contains("waiting for an approval"),
        "{}",
        driver.result()
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
}

#[test]
fn without_the_rule_the_loop_is_paused() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["repo__delete"]));
    assert_eq!(driver.state(), LoopState::Paused);
}

#[test]
fn an_approved_deferred_call_runs_and_its_end_wakes_the_loop_and_is_reported_once() {
    let mut driver = asleep("repo__delete");
    driver.pass(seconds(100));
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!((driver.running(), driver.gate_ids()), (vec![1], vec![]));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.done(1, "gone\nfor \"good\"");
    assert_eq!(driver.state(), LoopState::Running);
    let told = driver.next_state_block();
    assert!(
        told.contains("your call of repo__delete that waited for an approval has ended"),
        "{told}"
    );
    assert!(told.contains(r#"result: gone\nfor \"good\""#), "{told}");
    assert!(
        driver
            .observed()
            .contains("a notification of high priority ended your sleep")
    );
    assert_eq!(driver.outcomes(), ["Ok"]);
    assert!(driver.engine.view().untrusted.is_none());
    driver.turn();
    assert_eq!(driver.next_state_block(), "");
    assert_eq!(driver.notes(RecordKind::GateResolved), ["e1-t1c1r1 approved by ann"]);
}

#[test]
fn an_end_during_a_turn_is_reported_in_the_next_turn_even_if_the_model_chose_to_sleep() {
    let mut driver = deferred("repo__delete");
    driver.answer_gate("e1-t1c1r1", true);
    driver.done(1, "gone");
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    driver.answer(calls("yield", r#"{"sleep": 3000}"#));
    assert_eq!(driver.state(), LoopState::Running);
    let told = driver.next_state_block();
    assert!(told.contains("result: gone"), "{told}");
}

#[test]
fn a_failed_turn_does_not_lose_its_notifications() {
    let mut driver = asleep("repo__delete");
    driver.answer_gate("e1-t1c1r1", true);
    driver.done(1, "gone");
    assert!(driver.next_state_block().contains("result: gone"));
    driver.failed_turn();
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    // The turn after one that was refused shows no notification.
    driver.turn();
    let told = driver.next_state_block();
    assert!(told.contains("result: gone"), "{told}");
}

#[test]
fn denied_and_expired_calls_are_reported_and_not_run() {
    for (denied, note, text) in [
        (true, "e1-t1c1r1 denied", "a person denied this call"),
        (false, "e1-t1c1r1 expired", "this call was not approved in time"),
    ] {
        let mut driver = asleep("repo__delete");
        if denied {
            driver.answer_gate("e1-t1c1r1", false);
        } else {
            driver.settings.idle_timeout = SignedDuration::MAX;
            driver.pass(seconds(3001));
            driver.answer(calls("yield", r#"{"sleep": 3000}"#));
            driver.pass(seconds(598));
            assert_eq!(driver.gate_ids(), ["e1-t1c1r1"]);
            driver.pass(seconds(1));
        }
        assert_eq!((driver.state(), driver.gate_ids()), (LoopState::Running, vec![]));
        assert_eq!(
            (driver.sent.len(), driver.notes(RecordKind::GateResolved)),
            (0, vec![note])
        );
        let told = driver.next_state_block();
        assert!(told.contains(text), "{told}");
    }
}

#[test]
fn a_deferred_run_is_alone() {
    // A run of the turn is under way: the approved one follows it.
    let mut driver = Driver::with_gates(deferring());
    driver.answer(wants(&["repo__delete", "mail__send", "mail__send"]));
    assert_eq!(driver.running(), [2]);
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [2]);
    driver.done(2, "sent");
    assert_eq!(driver.running(), [1]);
    driver.done(1, "gone");
    assert_eq!(driver.running(), [3]);
    // The next call's run waits for the deferred one.
    let mut driver = deferred("repo__delete");
    driver.answer_gate("e1-t1c1r1", true);
    driver.answer(wants(&["mail__send"]));
    assert_eq!(driver.running().len(), 1);
    driver.done(1, "gone");
    assert_eq!(driver.running(), [1]);
    assert_eq!(
        driver.lines(RecordKind::ToolIntent).last().unwrap().run.to_string(),
        "t1c2r1"
    );
}

#[test]
fn the_same_call_is_not_deferred_twice() {
    let mut driver = deferred("repo__delete");
    driver.answer(wants(&["repo__delete"]));
    assert_eq!(driver.gate_ids(), ["e1-t1c1r1"]);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["AlreadyDeferred"]);
    assert_eq!(driver.notes(RecordKind::GateOpened), ["e1-t1c1r1 ToolPolicy"]);
}

#[test]
fn a_gate_of_a_deferred_call_outlives_the_process_and_the_crash_of_its_run_is_an_unknown_outcome() {
    for epoch in [1, 2] {
        let mut driver = asleep("repo__delete");
        driver.restart(epoch);
        assert_eq!(driver.gate_ids(), ["e1-t1c1r1"]);
        driver.answer_gate("e1-t1c1r1", true);
        assert_eq!(driver.running(), [1]);
        driver.restart(epoch);
        assert_eq!((driver.running(), driver.gate_ids()), (vec![], vec![]));
        assert_eq!(driver.outcomes(), ["Unknown"]);
        let told = driver.next_state_block();
        assert!(told.contains("outcome unknown"), "{told}");
    }
}

#[test]
fn an_approval_that_was_not_used_before_an_edit_is_out_of_date() {
    let mut driver = asleep("repo__delete");
    driver.feed(EngineInput::LinkLost);
    driver.answer_gate("e1-t1c1r1", true);
    assert!(driver.running().is_empty());
    driver.settings.spec = 7;
    driver.restart(2);
    assert_eq!((driver.running(), driver.sent.len()), (vec![], 0));
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["Outdated"]);
}

#[test]
fn an_approval_is_valid_for_five_minutes_of_a_pause_and_no_longer() {
    for (pause, runs) in [(300, 1), (301, 0)] {
        let mut driver = asleep("repo__delete");
        driver.feed(EngineInput::LinkLost);
        driver.answer_gate("e1-t1c1r1", true);
        driver.pass(seconds(pause));
        driver.feed(EngineInput::LinkBack);
        assert_eq!(driver.running().len(), runs, "{pause} s");
    }
}

#[test]
fn an_approved_call_waits_for_the_end_of_a_pause_or_for_its_next_probe() {
    for has_end in [true, false] {
        let mut driver = deferred("repo__delete");
        driver.fail_with(CallFailure {
            resumes_at: has_end.then_some(driver.now + PROBE_INTERVAL),
            ..failure(FailureKind::BudgetExhausted)
        });
        driver.answer_gate("e1-t1c1r1", true);
        driver.pass(PROBE_INTERVAL - seconds(1));
        assert_eq!((driver.state(), driver.running()), (LoopState::Paused, vec![]));
        driver.pass(seconds(1));
        assert_eq!(driver.running(), [1]);
    }
}

#[test]
fn a_repetition_after_an_unknown_outcome_waits_while_the_loop_continues() {
    let mut driver = deferred("bank__pay");
    driver.answer_gate("e1-t1c1r1", true);
    driver.end(1, unknown());
    assert_eq!(driver.gate_ids(), ["e1-t1c1r1-try2"]);
    assert_eq!(driver.engine.view().gates[0].gate.kind.as_ref(), "UnknownOutcome");
    driver.answer_gate("e1-t1c1r1-try2", true);
    assert_eq!(driver.running(), [1]);
    driver.done(1, "paid");
    assert_eq!(driver.outcomes(), ["Unknown", "Ok"]);
    driver.turn();
    let told = driver.next_state_block();
    assert!(told.contains("result: paid"), "{told}");
}

#[test]
fn eight_calls_are_deferred_and_the_loop_waits_for_the_ninth() {
    for (calls, state) in [
        (MAX_DEFERRED, LoopState::Running),
        (MAX_DEFERRED + 1, LoopState::Paused),
    ] {
        let mut driver = Driver::with_gates(deferring());
        let mut answer = wants(&vec!["repo__delete"; calls]);
        for (number, call) in answer.tool_calls.iter_mut().enumerate() {
            call.arguments = format!(r#"{{"path":"{number}"}}"#);
        }
        driver.answer(answer);
        assert_eq!((driver.state(), driver.gate_ids().len()), (state, calls));
        // With room again, the last one is deferred too.
        driver.answer_gate("e1-t1c1r1", false);
        assert_eq!(driver.state(), LoopState::Running);
    }
}

#[test]
fn arguments_of_64_kib_in_total_are_deferred_and_the_loop_waits_for_a_byte_more() {
    for (more, state) in [(0, LoopState::Running), (1, LoopState::Paused)] {
        let mut driver = Driver::with_gates(deferring());
        let mut answer = wants(&["repo__delete", "repo__delete"]);
        let bare = r#"{"path":""}"#.len();
        let half = MAX_DEFERRED_BYTES / 2;
        for (call, bytes) in answer.tool_calls.iter_mut().zip([half - 1, half + 1 + more]) {
            call.arguments = format!(r#"{{"path":"{}"}}"#, "x".repeat(bytes - bare));
        }
        driver.answer(answer);
        assert_eq!(driver.state(), state, "{more}");
    }
}

#[test]
fn a_result_is_shortened_and_makes_the_content_untrusted() {
    let mut driver = Driver::fresh(deferring());
    let untrusted = |spec| ToolSpec { trusted: false, ..spec };
    driver.offer(gated_tools().into_iter().map(untrusted).collect());
    driver.start(1);
    driver.answer(wants(&["vault__read"]));
    driver.answer(calls("yield", r#"{"sleep": 3000}"#));
    driver.answer_gate("e1-t1c1r1", true);
    assert!(driver.engine.view().untrusted.is_none());
    driver.done(1, &"x".repeat(10_000));
    let told = driver.next_state_block();
    assert!(told.contains("left out") && !told.contains(&"x".repeat(2000)), "{told}");
    assert_eq!(driver.engine.view().untrusted.unwrap().source, "server/vault");
}

#[test]
fn the_end_of_the_loop_closes_the_gates() {
    let mut driver = deferred("repo__delete");
    driver.answer(calls("yield", r#"{"mode": "shutdown"}"#));
    assert_eq!(driver.state(), LoopState::Stopped);
    assert_eq!((driver.gate_ids(), driver.sent.len()), (vec![], 0));
    assert_eq!(driver.notes(RecordKind::GateResolved), ["e1-t1c1r1 superseded"]);
}

#[test]
fn approved_calls_run_while_the_loop_waits_at_the_gate_of_another_one() {
    let mut driver = Driver::with_gates(deferring());
    let mut answer = wants(&["repo__delete"; MAX_DEFERRED + 1]);
    for (number, call) in answer.tool_calls.iter_mut().enumerate() {
        call.arguments = format!(r#"{{"path":"{number}"}}"#);
    }
    driver.answer(answer);
    assert_eq!(driver.state(), LoopState::Paused);
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1]);
    driver.done(1, "gone");
    // There is room for the ninth.
    assert_eq!(
        (driver.state(), driver.gate_ids().len()),
        (LoopState::Running, MAX_DEFERRED)
    );
}

#[test]
fn an_approved_call_is_not_out_of_date_because_other_tools_run() {
    let mut driver = Driver::with_gates(deferring());
    driver.answer(wants(&["repo__delete", "mail__send"]));
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [2]);
    driver.pass(seconds(400));
    driver.done(2, "sent");
    assert_eq!(driver.running(), [1]);
}

#[test]
fn an_approved_call_does_not_wait_for_the_rest_of_a_long_batch() {
    let mut driver = Driver::with_gates(deferring());
    driver.answer(wants(&["repo__delete", "mail__send", "mail__send", "mail__send"]));
    driver.answer_gate("e1-t1c1r1", true);
    driver.done(2, "sent");
    assert_eq!(driver.running(), [1]);
    driver.done(1, "gone");
    assert_eq!(driver.running(), [3]);
}

#[test]
fn a_long_deferred_run_does_not_make_the_calls_that_wait_for_it_out_of_date() {
    let mut driver = deferred("repo__delete");
    driver.answer_gate("e1-t1c1r1", true);
    driver.answer(wants(&["mail__send"]));
    driver.pass(seconds(400));
    driver.done(1, "gone");
    assert_eq!(driver.running(), [1]);
    assert!(driver.notes(RecordKind::ToolDenied).is_empty());
}

#[test]
fn equal_calls_of_one_answer_are_not_both_deferred() {
    let mut driver = Driver::with_gates(deferring());
    driver.answer(wants(&["repo__delete", "repo__delete"]));
    assert_eq!(driver.gate_ids(), ["e1-t1c1r1"]);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["AlreadyDeferred"]);
}

#[test]
fn the_end_of_a_deferred_call_is_not_dropped_for_notifications_of_sensors() {
    let mut driver = Driver::with_gates(deferring());
    driver.answer(wants(&["repo__delete"]));
    driver.answer_gate("e1-t1c1r1", true);
    driver.done(1, "gone");
    for number in 0..300 {
        driver.feed(events::notified(super::super::notifications::Notification {
            id: format!("n{number}"),
            source: "sensor/prices".into(),
            priority: super::super::notifications::NotificationPriority::High,
            text: "news".into(),
            at: driver.now,
        }));
    }
    driver.answer(says("well"));
    assert!(driver.next_state_block().contains("result: gone"));
}
