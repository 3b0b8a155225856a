//! Mode `Goal`: confidence checks, and what a person decides.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::goal::{ended, finish, goal};
use super::*;
use crate::RecordDetail;
use crate::modes::goal::GoalSettings;
use agentloop_api::goal::GoalEnd;
use agentloop_api::status::{GateKind, LoopOutcome};

fn every(steps: u32) -> impl FnOnce(&mut GoalSettings) {
    move |goal| goal.confidence_every = steps
}

/// A loop whose confidence is too low.
pub(super) fn doubtful() -> Driver {
    let mut driver = Driver::with_goal(goal(every(1)));
    driver.answer(says("Not yet."));
    driver.answer(says(r#"{"confidence": 49}"#));
    driver
}

/// A loop that has had three equal errors in a row.
pub(super) fn looping() -> Driver {
    let mut driver = Driver::with_goal(goal(|_| {}));
    for path in ["a", "b", "c"] {
        driver.failed_attempt(path, "no");
        if path != "c" {
            driver.next_timer();
        }
    }
    driver
}

fn answer_gate(driver: &mut Driver, approved: bool) {
    let gate = driver.engine.view().gates.remove(0);
    driver.feed(EngineInput::GateAnswered(EngineGateAnswer {
        gate: gate.gate.id,
        arguments: gate.arguments,
        approved,
        by: Some("ann".into()),
    }));
}

#[test]
fn the_confidence_is_checked_after_its_interval_of_steps_and_not_before() {
    let mut driver = Driver::with_goal(goal(every(3)));
    for _ in 0..2 {
        for step in 1..=3 {
            assert_eq!(driver.purpose, CallPurpose::Turn, "step {step}");
            driver.answer(says("Not yet."));
            if step < 3 {
                driver.next_timer();
            }
        }
        assert_eq!(driver.purpose, CallPurpose::Confidence);
        driver.answer(says(r#"{"confidence": 50}"#));
        assert_eq!(
            (driver.reasons(), driver.goal_view().last_confidence),
            (vec![], Some(50))
        );
        driver.next_timer();
    }
}

#[test]
fn the_agent_can_request_a_check_and_the_question_has_its_reason_and_the_last_steps() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.failed_attempt("a", "no such file");
    driver.next_timer();
    driver.answer(calls("request_confidence_check", r#"{"reason": "the sky is cloudy"}"#));
    assert_eq!((driver.purpose, driver.offered.len()), (CallPurpose::Confidence, 0));
    let asked = driver.observed();
    for part in [
        "Count the stars.",
        "use no telescope",
        "1 of 20 steps are used. Unmet criteria: text.",
        "- step 1, attempt 1: error: no such file; the agent wrote: It did not work.",
        "The agent requested this check: the sky is cloudy",
    ] {
        assert!(asked.contains(part), "{part}: {asked}");
    }
    driver.answer(says(r#"{"confidence": 80}"#));
    driver.next_timer();
    assert!(driver.observed().starts_with("Step 2 of 20"), "{}", driver.observed());
}

#[test]
fn a_low_confidence_opens_a_gate_and_an_approval_continues_the_loop() {
    let mut driver = doubtful();
    assert_eq!(driver.reasons(), [PauseReason::LowConfidence]);
    let view = driver.engine.view();
    assert_eq!((view.state, view.gates.len()), (LoopState::Paused, 1));
    let open = &view.gates[0];
    assert_eq!(
        (open.gate.kind, &*open.gate.id, &*open.tool),
        (GateKind::LowConfidence, "goal-e1-1", "goal")
    );
    assert_eq!(
        view.reasons[0].message,
        "after 1 of 20 steps the confidence that the goal will be reached is 49 %, below 50 % \
         (goal.confidence.thresholdPercent); the loop waits for an approval to continue (gate goal-e1-1)"
    );
    assert_eq!(driver.notes(RecordKind::GateOpened), ["goal-e1-1 LowConfidence"]);
    let detail = |driver: &Driver, kind| {
        driver
            .journal
            .iter()
            .rfind(|record| record.kind == kind)
            .unwrap()
            .detail
    };
    assert_eq!(
        detail(&driver, RecordKind::GateOpened),
        RecordDetail::Escalated(GateKind::LowConfidence)
    );
    try_everything_but(&mut driver, true);
    driver.feed(EngineInput::GateAnswered(EngineGateAnswer {
        gate: "goal-e1-1".into(),
        arguments: "another".into(),
        approved: true,
        by: None,
    }));
    assert_eq!(driver.reasons(), [PauseReason::LowConfidence]);
    answer_gate(&mut driver, true);
    assert_eq!(driver.notes(RecordKind::GateResolved), ["goal-e1-1 approved by ann"]);
    assert_eq!(detail(&driver, RecordKind::GateResolved), RecordDetail::None);
    assert_eq!(driver.reasons(), []);
    driver.next_timer();
    assert!(driver.observed().starts_with("Step 2 of 20"), "{}", driver.observed());
    driver.answer(finish("done"));
    assert_eq!(
        ended(&driver),
        (Some(LoopOutcome::Completed), Some(GoalEnd::CriteriaMet))
    );
}

#[rstest]
#[case::confidence(doubtful(), GoalEnd::LowConfidence)]
#[case::repetition(looping(), GoalEnd::LoopDetected)]
fn a_denial_escalates(#[case] mut driver: Driver, #[case] end: GoalEnd) {
    let opened = *driver.notes(RecordKind::GateOpened).last().unwrap();
    assert_eq!(opened, format!("goal-e1-1 {end}"), "the cause is what ends the loop");
    answer_gate(&mut driver, false);
    let closed = driver
        .journal
        .iter()
        .rfind(|record| record.kind == RecordKind::GateResolved);
    assert!(matches!(closed.unwrap().detail, RecordDetail::NotApproved(_)));
    assert_eq!(ended(&driver), (Some(LoopOutcome::Escalated), Some(end)));
    assert!(driver.stopped && driver.engine.view().gates.is_empty());
}

#[rstest]
#[case::confidence(doubtful(), GoalEnd::LowConfidence)]
#[case::repetition(looping(), GoalEnd::LoopDetected)]
fn a_gate_that_expires_escalates_and_not_before(#[case] mut driver: Driver, #[case] end: GoalEnd) {
    driver.pass(seconds(3599));
    assert_eq!(ended(&driver), (None, None));
    driver.pass(seconds(1));
    assert_eq!(ended(&driver), (Some(LoopOutcome::Escalated), Some(end)));
}

#[rstest]
#[case(r#"{"confidence": "high"}"#)]
#[case("I am quite sure.")]
fn an_answer_that_cannot_be_read_opens_a_gate(#[case] answer: &str) {
    let mut driver = Driver::with_goal(goal(every(1)));
    driver.answer(says("Not yet."));
    driver.answer(says(answer));
    assert_eq!(driver.reasons(), [PauseReason::LowConfidence]);
    assert_eq!(driver.notes(RecordKind::QuestionFailed), ["Confidence: Unreadable"]);
    assert_eq!(driver.goal_view().last_confidence, None);
}

#[test]
fn no_answer_opens_a_gate() {
    let mut driver = Driver::with_goal(goal(every(1)));
    driver.answer(says("Not yet."));
    driver.fail(FailureKind::BadResponse);
    assert_eq!(driver.reasons(), [PauseReason::LowConfidence]);
}

#[test]
fn the_time_of_a_gate_does_not_count_towards_the_timeout() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.confidence_every = 1;
        goal.timeout = seconds(60);
    }));
    driver.answer(says("Not yet."));
    driver.answer(says(r#"{"confidence": 0}"#));
    driver.pass(seconds(600));
    answer_gate(&mut driver, true);
    assert_eq!(ended(&driver), (None, None));
    driver.pass(seconds(60));
    driver.answer(says("Not yet."));
    assert_eq!(ended(&driver), (Some(LoopOutcome::Failed), Some(GoalEnd::Timeout)));
}

#[test]
fn an_approved_loop_may_err_again_and_is_detected_again() {
    let mut driver = looping();
    assert_eq!(driver.engine.view().gates[0].gate.kind, GateKind::Escalated);
    answer_gate(&mut driver, true);
    for path in ["d", "e", "f"] {
        assert_eq!(driver.reasons(), []);
        if driver.in_flight.is_none() {
            driver.next_timer();
        }
        driver.failed_attempt(path, "no");
    }
    assert_eq!(driver.reasons(), [PauseReason::Escalated]);
}

#[test]
fn a_loop_of_calls_opens_a_gate_instead_of_a_forced_sleep() {
    let mut driver = Driver::with_goal(EngineSettings {
        loop_detection: detection(DetectionMode::Enforce),
        max_calls_per_turn: 1000,
        ..goal(|_| {})
    });
    for _ in 0..20 {
        if driver.notes(RecordKind::LoopDetected).len() >= 3 {
            break;
        }
        driver.answer(calls("files__read", &json!({"path": "a"}).to_string()));
        if !driver.running().is_empty() {
            driver.done(1, "the same");
        }
    }
    assert_eq!(
        driver.notes(RecordKind::LoopDetected),
        ["RepeatedCall: Nudged", "RepeatedCall: Denied", "RepeatedCall: Paused"]
    );
    assert_eq!(driver.reasons(), [], "the turn may end in peace");
    let detected = driver.engine.view().detected.unwrap().message;
    assert!(
        detected.ends_with(": a person decides after the current step whether the loop continues"),
        "{detected}"
    );
    driver.answer(says("I am stuck."));
    assert_eq!(driver.reasons(), [PauseReason::Escalated]);
    answer_gate(&mut driver, false);
    assert_eq!(
        ended(&driver),
        (Some(LoopOutcome::Escalated), Some(GoalEnd::LoopDetected))
    );
}

#[test]
fn a_gate_outlives_a_restart_and_an_agent_of_another_mode_has_none() {
    let mut driver = doubtful();
    driver.restart(2);
    assert_eq!(driver.reasons(), [PauseReason::LowConfidence]);
    assert_eq!(driver.engine.view().gates[0].gate.id, "goal-e1-1");
    driver.settings = settings();
    driver.restart(3);
    assert_eq!((driver.reasons(), driver.engine.view().gates.len()), (vec![], 0));
    assert_eq!(driver.notes(RecordKind::GateResolved), ["goal-e1-1 withdrawn"]);
}
