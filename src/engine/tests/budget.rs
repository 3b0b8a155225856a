//! Calls that a budget refuses: what holds the loop, what releases it, and that nothing is lost meanwhile.

use super::*;
use crate::pauses::budget::{PROBE_DELAY, PROBE_INTERVAL, PROBE_TIMEOUT};

/// The refusals that end when there is room, and the reason of each.
const FOR_ROOM: [(FailureKind, PauseReason); 7] = [
    (FailureKind::BudgetExhausted, PauseReason::BudgetExhausted),
    (FailureKind::TokensPerHour, PauseReason::TokensPerHour),
    (FailureKind::TotalTokens, PauseReason::TotalTokens),
    (FailureKind::TotalCost, PauseReason::TotalCost),
    (FailureKind::CallExceedsLimit, PauseReason::CallExceedsLimit),
    (FailureKind::BudgetAsk, PauseReason::BudgetAsk),
    (FailureKind::BudgetUnavailable, PauseReason::BudgetUnavailable),
];
/// Those that a person ends.
const FOR_A_PERSON: [(FailureKind, PauseReason); 2] = [
    (FailureKind::BoundViolated, PauseReason::BoundViolated),
    (FailureKind::LoopDetected, PauseReason::LoopDetected),
];

fn until(driver: &Driver, wait: i64, kind: FailureKind) -> CallFailure {
    CallFailure {
        resumes_at: Some(driver.now + seconds(wait)),
        ..failure(kind)
    }
}

pub(super) fn revision(revision: u64) -> BudgetState {
    BudgetState {
        revision,
        ..BudgetState::default()
    }
}

fn change(driver: &mut Driver, budget: BudgetState) {
    driver.feed(EngineInput::BudgetChanged { budget });
}

/// Inputs that end no refusal.
fn try_everything_else(driver: &mut Driver) {
    driver.feed(EngineInput::WakeRequested { token: "w".into() });
    driver.feed(happens("chat"));
    driver.feed(EngineInput::LinkBack);
    driver.feed(EngineInput::Timer);
    let same = driver.budget.clone();
    change(driver, same);
}

fn resume(driver: &mut Driver, token: &str) {
    driver.feed(EngineInput::ResumeRequested { token: token.into() });
}

/// A loop in the second call of its second turn, so that there is something to lose.
fn in_a_turn() -> Driver {
    let mut driver = Driver::started(settings());
    driver.turn();
    driver.answer(calls("shell", "{}"));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a1");
    driver
}

#[test]
fn a_refused_call_holds_the_loop_until_its_moment_and_not_longer_and_survives_a_restart() {
    for (kind, reason) in FOR_ROOM {
        let mut driver = in_a_turn();
        let before = driver.transcript.clone();
        let refusal = until(&driver, 600, kind);
        let moment = refusal.resumes_at;
        driver.fail_with(refusal);
        assert_eq!((driver.state(), driver.reasons()), (LoopState::Paused, vec![reason]));
        assert_eq!(driver.engine.view().reasons[0].message, "what to do");
        assert_eq!(driver.engine.view().resumes_at, moment);
        assert_eq!(driver.acknowledged.last().unwrap().to_string(), "t2c2a1");
        try_everything_else(&mut driver);
        resume(&mut driver, "r");
        driver.pass(seconds(599));
        driver.restart(1);
        assert_eq!((driver.reasons(), driver.in_flight), (vec![reason], None));
        assert_eq!(driver.engine.view().resumes_at, moment);
        driver.pass(seconds(1));
        assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
        assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2", "the same call");
        assert_eq!(driver.transcript, before, "nothing is lost");
        let view = driver.engine.view();
        assert_eq!((view.consecutive_errors, view.last_error), (0, None), "no failure");
    }
}

#[test]
fn the_end_of_a_pause_during_a_turn_is_not_reported_in_the_next_turn() {
    let mut driver = in_a_turn();
    driver.fail_with(until(&driver, 600, FailureKind::TokensPerHour));
    driver.pass(seconds(600));
    assert_eq!(driver.reasons(), vec![]);
    driver.turn();
    assert_eq!(driver.in_flight.unwrap().to_string(), "t3c1a1");
    assert!(!driver.observed().contains("is over"), "{}", driver.observed());
}

#[test]
fn refusals_use_up_no_attempts_and_count_as_no_error() {
    let mut driver = in_a_turn();
    for _ in 0..50 {
        let refusal = until(&driver, 60, FailureKind::BudgetExhausted);
        driver.fail_with(refusal);
        driver.pass(seconds(60));
    }
    for _ in 0..4 {
        driver.fail(FailureKind::Interrupted);
    }
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a55");
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    driver.fail(FailureKind::Interrupted);
    assert_eq!(
        driver.reasons(),
        [PauseReason::ModelUnreachable],
        "the fifth failure shows"
    );
}

#[test]
fn a_changed_budget_is_tried_at_once_and_the_reason_is_removed_when_the_call_succeeds() {
    for (kind, reason) in FOR_ROOM {
        let mut driver = in_a_turn();
        let refusal = until(&driver, 600, kind);
        driver.fail_with(refusal);
        change(&mut driver, revision(2));
        assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2");
        assert_eq!(driver.reasons(), [reason], "not known yet");
        driver.answer(says("well"));
        assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
        assert_eq!(driver.engine.view().counts.turns, 2);
    }
}

#[test]
fn a_call_that_is_not_refused_in_time_counts_as_admitted() {
    let mut driver = in_a_turn();
    let refusal = until(&driver, 600, FailureKind::BudgetExhausted);
    driver.fail_with(refusal);
    change(&mut driver, revision(2));
    driver.pass(PROBE_TIMEOUT - seconds(1));
    assert_eq!(driver.reasons(), [PauseReason::BudgetExhausted]);
    driver.pass(seconds(1));
    assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2");
}

#[test]
fn a_budget_that_changes_and_still_refuses_shows_one_pause_and_not_two() {
    let mut driver = in_a_turn();
    let refusal = until(&driver, 600, FailureKind::BudgetExhausted);
    driver.fail_with(refusal.clone());
    let transitions = driver.notes(RecordKind::Transition).len();
    for number in 1..5 {
        change(&mut driver, revision(number));
        driver.fail_with(refusal.clone());
        assert_eq!(driver.in_flight, None);
    }
    assert_eq!(driver.notes(RecordKind::Transition).len(), transitions);
    assert_eq!(driver.engine.view().resumes_at, refusal.resumes_at);
}

#[test]
fn the_limit_that_refused_last_is_named() {
    let mut driver = in_a_turn();
    driver.fail(FailureKind::BudgetAsk);
    change(&mut driver, revision(1));
    driver.fail(FailureKind::TotalCost);
    assert_eq!(driver.reasons(), [PauseReason::TotalCost]);
}

#[test]
fn where_others_hold_the_room_the_call_is_tried_again_and_where_a_person_must_act_it_is_not() {
    for (kind, probed) in [
        (FailureKind::BudgetExhausted, true),
        (FailureKind::TokensPerHour, true),
        (FailureKind::BudgetUnavailable, true),
        (FailureKind::TotalTokens, false),
        (FailureKind::TotalCost, false),
        (FailureKind::CallExceedsLimit, false),
        (FailureKind::BudgetAsk, false),
    ] {
        let mut driver = in_a_turn();
        driver.fail(kind);
        assert_eq!(
            driver.engine.view().resumes_at,
            None,
            "it is a guess, and nothing to show"
        );
        driver.pass(PROBE_INTERVAL - seconds(1));
        assert_eq!(driver.in_flight, None);
        driver.pass(seconds(1));
        assert_eq!(driver.in_flight.is_some(), probed, "{kind}");

        let mut driver = in_a_turn();
        change(
            &mut driver,
            BudgetState {
                held: true,
                ..BudgetState::default()
            },
        );
        driver.fail(kind);
        driver.pass(seconds(100_000));
        assert_eq!(driver.in_flight, None, "{kind}");
    }
}

#[test]
fn a_budget_that_changed_during_the_call_is_tried_again_soon() {
    let mut driver = in_a_turn();
    change(&mut driver, revision(1));
    let refusal = until(&driver, 600, FailureKind::TotalTokens);
    driver.fail_with(refusal.clone());
    assert_eq!(driver.reasons(), [PauseReason::TotalTokens]);
    driver.pass(PROBE_DELAY);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2");
    driver.fail_with(refusal);
    driver.pass(seconds(500));
    assert_eq!(driver.in_flight, None, "this refusal refers to the current budget");
}

#[test]
fn a_budget_that_changed_while_no_worker_ran_is_tried_by_the_next_one() {
    let mut driver = in_a_turn();
    driver.fail(FailureKind::TotalTokens);
    driver.restart(1);
    assert_eq!(driver.in_flight, None);
    driver.budget = revision(3);
    driver.restart(1);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2");
    assert_eq!(driver.reasons(), [PauseReason::TotalTokens]);
    driver.restart(1);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2", "under the same id");
    driver.answer(says("well"));
    assert_eq!(driver.reasons(), []);
}

#[test]
fn a_probe_without_a_link_does_not_count_as_tried() {
    let mut driver = in_a_turn();
    let refusal = until(&driver, 600, FailureKind::BudgetExhausted);
    driver.fail_with(refusal);
    change(&mut driver, revision(1));
    driver.fail(FailureKind::LinkLost);
    assert_eq!(driver.reasons(), [PauseReason::LinkLost, PauseReason::BudgetExhausted]);
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a3");
    driver.fail(FailureKind::Unreachable);
    assert_eq!(driver.reasons(), [], "it was made, and failed for another reason");
}

#[test]
fn a_probe_without_a_link_is_not_admitted_by_a_timeout() {
    let mut driver = in_a_turn();
    driver.fail_with(until(&driver, 600, FailureKind::BudgetExhausted));
    change(&mut driver, revision(1));
    driver.fail(FailureKind::LinkLost);
    driver.feed(EngineInput::LinkLost);
    driver.pass(PROBE_TIMEOUT);
    assert_eq!(driver.reasons(), [PauseReason::LinkLost, PauseReason::BudgetExhausted]);
}

#[test]
fn a_refusal_that_needs_a_person_is_cleared_by_a_resume_request_once_per_token() {
    for (kind, reason) in FOR_A_PERSON {
        let mut driver = in_a_turn();
        let refusal = until(&driver, 10, kind);
        driver.fail_with(refusal.clone());
        assert_eq!(driver.engine.view().resumes_at, None);
        try_everything_else(&mut driver);
        change(&mut driver, revision(5));
        driver.pass(seconds(100_000));
        driver.restart(2);
        assert_eq!((driver.reasons(), driver.in_flight), (vec![reason], None));
        resume(&mut driver, "1");
        assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2");
        driver.fail_with(refusal);
        resume(&mut driver, "1");
        assert_eq!(driver.reasons(), [reason]);
        resume(&mut driver, "2");
        assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
    }
}

pub(super) fn stops() -> BudgetState {
    BudgetState {
        revision: 1,
        held: true,
        stop: Some("raise spec.limits".into()),
        ..BudgetState::default()
    }
}

#[test]
fn a_stopping_budget_cancels_the_call_in_flight_and_the_loop_continues_once_there_is_room() {
    let mut driver = in_a_turn();
    let before = driver.transcript.clone();
    change(&mut driver, stops());
    assert_eq!(driver.cancelled[0].to_string(), "t2c2a1");
    assert_eq!(
        (driver.state(), driver.reasons()),
        (LoopState::Stopped, vec![PauseReason::BudgetExhausted])
    );
    assert_eq!(driver.engine.view().reasons[0].message, "raise spec.limits");
    assert!(!driver.stopped, "the process stays");
    try_everything_else(&mut driver);
    resume(&mut driver, "r");
    driver.pass(seconds(1_000_000));
    driver.restart(1);
    assert_eq!(driver.state(), LoopState::Stopped);
    assert_eq!(driver.in_flight, None);
    change(&mut driver, revision(2));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c2a2");
    assert_eq!(driver.transcript, before);
    driver.answer(says("well"));
    assert_eq!(driver.state(), LoopState::Running);
    let view = driver.engine.view();
    assert_eq!((view.consecutive_errors, view.last_error), (0, None));
}

#[test]
fn a_call_cancelled_by_the_gateway_before_the_worker_received_the_reason_is_no_failure() {
    for kind in [FailureKind::BudgetExhausted, FailureKind::Cancelled] {
        let mut driver = in_a_turn();
        driver.now += seconds(1);
        if kind == FailureKind::Cancelled {
            // The worker was notified, but the gateway had already cancelled the call.
            let call = driver.in_flight.unwrap();
            driver.engine.state.budget = stops();
            driver.feed(EngineInput::Failed {
                call,
                failure: failure(kind),
            });
        } else {
            driver.fail(kind);
            change(&mut driver, stops());
            driver.fail(kind);
        }
        assert_eq!(driver.state(), LoopState::Stopped, "{kind}");
        assert_eq!(driver.engine.view().last_error, None);
    }
}

#[test]
fn a_sleeping_loop_is_not_disturbed_by_its_budget() {
    let mut driver = Driver::started(settings());
    driver.answer(calls("yield", r#"{"sleep": 100}"#));
    change(&mut driver, stops());
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.pass(seconds(99));
    change(&mut driver, revision(9));
    assert_eq!((driver.state(), driver.in_flight), (LoopState::Sleeping, None));
    driver.pass(seconds(1));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn a_suspended_loop_with_a_spent_budget_is_suspended_and_remembers_the_budget() {
    let mut driver = in_a_turn();
    driver.fail(FailureKind::TotalTokens);
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    assert_eq!(
        driver.reasons(),
        [PauseReason::SuspendedBySpec, PauseReason::TotalTokens]
    );
    driver.restart(2);
    assert_eq!(driver.reasons(), [PauseReason::TotalTokens]);
}

#[test]
fn a_clock_that_was_set_back_neither_brings_room_earlier_nor_keeps_a_probe_waiting() {
    let mut driver = in_a_turn();
    let refusal = until(&driver, 40 * 86_400, FailureKind::BudgetExhausted);
    let moment = refusal.resumes_at;
    driver.fail_with(refusal);
    driver.now -= seconds(5);
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.engine.view().resumes_at, moment, "the leader's clock counts");

    let mut driver = in_a_turn();
    driver.fail(FailureKind::BudgetExhausted);
    driver.now -= seconds(100_000);
    driver.feed(EngineInput::Timer);
    driver.pass(PROBE_INTERVAL);
    assert!(driver.in_flight.is_some());
}

#[test]
fn a_call_larger_than_a_limit_compacts_half_of_the_history_and_the_loop_continues() {
    let mut driver = Driver::started(settings());
    change(
        &mut driver,
        BudgetState {
            tokens: Some(20_000),
            ..BudgetState::default()
        },
    );
    for _ in 0..20 {
        driver.answer(says(&"x".repeat(1000)));
        driver.pass(seconds(1));
    }
    let before = driver.transcript.len();
    driver.fail(FailureKind::CallExceedsLimit);
    assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
    assert_eq!(
        (driver.in_flight.unwrap().to_string(), driver.purpose),
        ("t21c1a2".into(), CallPurpose::Compaction)
    );
    driver.answer(says("All was well."));
    assert_eq!(
        (driver.in_flight.unwrap().to_string(), driver.purpose),
        ("t21c2a1".into(), CallPurpose::Turn)
    );
    assert!(driver.transcript.len() < before * 6 / 10, "{}", driver.transcript.len());
    assert!(driver.transcript.len() > before * 4 / 10, "{}", driver.transcript.len());
    for _ in 0..10 {
        if driver.in_flight.is_some() {
            driver.fail(FailureKind::CallExceedsLimit);
        }
    }
    assert_eq!(
        driver.reasons(),
        [PauseReason::CallExceedsLimit],
        "once the history is not why, a person must act"
    );
    assert!(driver.transcript.len() > 1, "what is left does no harm");
}

#[test]
fn a_limit_that_no_call_fits_into_costs_no_history() {
    for tokens in [None, Some(0), Some(50)] {
        let mut driver = Driver::started(settings());
        for _ in 0..20 {
            driver.turn();
        }
        let before = driver.transcript.clone();
        change(
            &mut driver,
            BudgetState {
                tokens,
                ..BudgetState::default()
            },
        );
        driver.fail(FailureKind::CallExceedsLimit);
        assert_eq!(driver.reasons(), [PauseReason::CallExceedsLimit]);
        assert_eq!(driver.transcript, before);
    }
}

/// A gateway that bounds a call as the real one does: by the previous bill and one token per byte of new text.
struct Meter {
    limit: usize,
    prompt: Vec<Arc<Message>>,
    bill: usize,
    refused: usize,
}

impl Meter {
    fn bytes(messages: &[Arc<Message>]) -> usize {
        let bytes = messages
            .iter()
            .map(|message| serde_json::to_string(&**message).unwrap().len());
        bytes.sum()
    }

    /// Whether the prompt and a short answer fit into a whole limit.
    fn lets_through(&mut self, prompt: &[Arc<Message>]) -> bool {
        let known = prompt
            .iter()
            .zip(&self.prompt)
            .take_while(|(new, old)| new == old)
            .count();
        let whole = known == self.prompt.len() && known > 0;
        let new = Self::bytes(&prompt[if whole { known } else { 0 }..]);
        let bound = if whole { self.bill + new } else { new };
        if bound + 256 > self.limit {
            self.refused += 1;
            return false;
        }
        self.prompt = prompt.to_vec();
        self.bill = Self::bytes(prompt) / 4;
        true
    }
}

#[test]
fn a_limit_smaller_than_the_window_never_ends_a_loop_whose_turns_fit() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 10_000,
        ..settings()
    });
    let mut meter = Meter {
        limit: 20_000,
        prompt: Vec::new(),
        bill: 0,
        refused: 0,
    };
    change(
        &mut driver,
        BudgetState {
            revision: 1,
            tokens: Some(20_000),
            ..BudgetState::default()
        },
    );
    for turn in 0..500 {
        while !meter.lets_through(&driver.prompt.clone()) {
            driver.fail(FailureKind::CallExceedsLimit);
            assert_eq!(driver.reasons(), [], "turn {turn}");
        }
        if turn % 100 == 50 {
            // The gateway restarts and knows no bill.
            meter.prompt = Vec::new();
        }
        driver.answer(says(&"x".repeat(700)));
        driver.pass(seconds(1));
    }
    let summaries = driver.notes(RecordKind::Compacted).len();
    assert!(summaries > 5, "{summaries}");
    let completed = usize::try_from(driver.engine.view().counts.turns).unwrap();
    assert_eq!(completed + summaries, 500);
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    assert!((1..100).contains(&meter.refused), "{}", meter.refused);
}
