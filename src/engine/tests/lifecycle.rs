//! Start, stop, restart, and what a loop looks like from outside.

use super::*;
use agentloop_api::status::LoopOutcome;
use agentloop_api::usage_counts::LoopCounts;

#[test]
fn test_loop_starts_and_is_running() {
    let mut driver = Driver::fresh(settings());
    assert_eq!(driver.state(), LoopState::Stopped);
    driver.start(1);
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(
        driver.notes(RecordKind::Transition),
        ["Stopped -> Starting", "Starting -> Running"]
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
    assert!(
        driver
            .observed()
            .starts_with("Turn 1, 2026-01-01T00:00:00Z: the loop starts.")
    );
}

#[test]
fn a_drain_stops_after_the_call_in_flight_and_the_next_pod_continues() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Drain,
    });
    assert_eq!(driver.state(), LoopState::Stopping);
    assert!(!driver.stopped);
    driver.answer(says("done"));
    assert!(driver.stopped);
    assert_eq!(driver.state(), LoopState::Stopped);
    assert_eq!(driver.engine.view().outcome, None);
    assert_eq!(driver.engine.view().counts.turns, 1);
    driver.restart(2);
    driver.pass(seconds(1));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn a_drain_that_times_out_cancels_the_call_and_the_next_pod_requests_the_same_one() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Drain,
    });
    driver.feed(EngineInput::DrainEnded);
    assert!(driver.stopped);
    assert_eq!(driver.cancelled[0].to_string(), "t1c1a1");
    driver.restart(2);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
    assert_eq!(driver.notes(RecordKind::CallStarted).len(), 1);
}

#[test]
fn a_suspension_cancels_the_call_at_once_and_reports_why_the_loop_is_stopped() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    assert!(driver.stopped);
    assert_eq!(driver.cancelled.len(), 1);
    assert_eq!(driver.state(), LoopState::Stopped);
    assert_eq!(driver.reasons(), [PauseReason::SuspendedBySpec]);
    driver.restart(2);
    assert_eq!(driver.reasons(), []);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
}

#[test]
fn a_suspend_while_draining_cuts_the_call() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Drain,
    });
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    assert!(driver.stopped);
    assert_eq!(driver.cancelled.len(), 1);
}

#[test]
fn a_turn_stops_between_two_calls_and_continues_in_the_next_pod() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Drain,
    });
    driver.answer(calls("shell", "{}"));
    assert!(driver.stopped);
    assert_eq!(driver.engine.view().counts.turns, 0);
    driver.restart(2);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    assert_eq!(driver.prompt.len(), 4);
}

#[test]
fn a_fenced_loop_writes_nothing_and_ignores_all_input() {
    let mut driver = Driver::started(settings());
    let lines = driver.journal.len();
    driver.feed(EngineInput::Stop {
        cause: StopCause::Fenced,
    });
    assert!(driver.stopped);
    assert_eq!(driver.cancelled.len(), 1);
    assert_eq!(driver.state(), LoopState::Stopped);
    let call = driver.cancelled[0];
    for input in [
        EngineInput::Answered {
            call,
            answer: says("late"),
        },
        EngineInput::Timer,
        EngineInput::LinkLost,
        EngineInput::WakeRequested { token: "1".into() },
    ] {
        assert_eq!(driver.feed(input), []);
    }
    assert_eq!(driver.journal.len(), lines);
}

#[test]
fn a_loop_suspended_before_its_start_makes_no_call_and_reports_the_reason() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Drain,
    });
    driver.feed(EngineInput::DrainEnded);
    driver.engine = Engine::restore(settings(), driver.saved.clone(), driver.transcript.clone());
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    assert!(driver.stopped);
    assert_eq!(driver.reasons(), [PauseReason::SuspendedBySpec]);
    assert_eq!(driver.issued.len(), 1);
    driver.restart(2);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
}

#[test]
fn a_fenced_loop_would_save_the_same_state_as_last() {
    let mut driver = Driver::started(settings());
    driver.fail(FailureKind::Interrupted);
    let call = driver.in_flight.take().unwrap();
    driver.feed(EngineInput::Failed {
        call,
        failure: failure(FailureKind::Fenced),
    });
    assert_eq!(driver.engine.snapshot(), driver.saved);
}

#[test]
fn a_call_that_is_refused_as_fenced_stops_the_loop_in_the_same_way() {
    let mut driver = Driver::started(settings());
    let call = driver.in_flight.take().unwrap();
    let effects = driver.feed(EngineInput::Failed {
        call,
        failure: failure(FailureKind::Fenced),
    });
    assert!(driver.stopped);
    assert!(!effects.iter().any(|effect| matches!(effect, EngineEffect::Record(_))));
}

#[test]
fn a_pod_older_than_the_journal_is_fenced() {
    let mut driver = Driver::started(settings());
    driver.restart(5);
    let lines = driver.journal.len();
    driver.restart(4);
    assert!(driver.stopped);
    assert_eq!(driver.in_flight, None);
    assert_eq!(driver.journal.len(), lines);
}

#[test]
fn test_agent_shutdown_ends_the_loop_cleanly_and_a_restarted_container_leaves_it_so() {
    let mut driver = Driver::started(settings());
    driver.answer(calls("yield", r#"{"mode": "shutdown"}"#));
    assert!(driver.stopped);
    assert_eq!(driver.state(), LoopState::Stopped);
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
    assert_eq!(
        driver.notes(RecordKind::Transition)[2..],
        ["Running -> Stopping", "Stopping -> Stopped"]
    );
    driver.restart(1);
    assert!(driver.stopped);
    assert_eq!(driver.in_flight, None);
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
    driver.restart(2);
    assert_eq!(driver.engine.view().outcome, None);
    driver.pass(seconds(1));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn a_stop_of_a_stopped_loop_is_answered_at_once() {
    let mut driver = Driver::fresh(settings());
    assert_eq!(
        driver.feed(EngineInput::Stop {
            cause: StopCause::Drain
        }),
        [EngineEffect::Stopped]
    );
}

#[test]
fn a_new_journal_continues_from_the_last_turn_known_to_the_controller() {
    let mut driver = Driver::fresh(settings());
    let counts = LoopCounts {
        turns: 40,
        tool_calls: 9,
        actions: 3,
        ..LoopCounts::default()
    };
    let known = KnownTotals {
        turn: 41,
        counts: Box::new(counts.clone()),
    };
    driver.start_with(7, known);
    assert_eq!(driver.engine.view().counts, counts);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t42c1a1");
    driver.answer(says("done"));
    assert_eq!(driver.engine.view().counts.turns, 41);
}

#[test]
fn a_call_open_at_a_crash_is_requested_again_under_the_same_id_without_a_second_intent() {
    let mut driver = Driver::started(settings());
    driver.restart(1);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
    assert_eq!(driver.notes(RecordKind::CallStarted).len(), 1);
    driver.answer(says("kept"));
    assert_eq!(driver.acknowledged.len(), 1);
    assert_eq!(driver.engine.view().counts.turns, 1);
}

#[test]
fn a_late_answer_of_another_call_means_nothing() {
    let mut driver = Driver::started(settings());
    let late = driver.in_flight.unwrap();
    driver.fail(FailureKind::Interrupted);
    let open = driver.in_flight.unwrap();
    assert_eq!(open.to_string(), "t1c1a2");
    assert_eq!(
        driver.feed(EngineInput::Answered {
            call: late,
            answer: says("late")
        }),
        []
    );
    assert_eq!(driver.in_flight, Some(open));
}

#[test]
fn since_moves_with_the_state_and_not_with_the_reasons() {
    let mut driver = Driver::started(settings());
    driver.pass(seconds(5));
    driver.feed(EngineInput::LinkLost);
    let since = driver.engine.view().since;
    assert_eq!(since, Some(driver.now));
    driver.pass(seconds(5));
    driver.fail_with(CallFailure {
        retry_after_milliseconds: Some(60_000),
        ..failure(FailureKind::RateLimited)
    });
    assert_eq!(
        driver.reasons(),
        [PauseReason::ProviderRateLimit, PauseReason::LinkLost]
    );
    assert_eq!(driver.engine.view().since, since);
    assert_eq!(
        driver.engine.view().resumes_at,
        None,
        "the end of a lost link is not known"
    );
    assert_eq!(
        *driver.notes(RecordKind::Transition).last().unwrap(),
        "Paused (LinkLost) -> Paused (ProviderRateLimit, LinkLost)"
    );
}

#[test]
fn a_clock_that_is_set_back_neither_delays_the_next_turn_nor_repeats_one() {
    let mut driver = Driver::started(settings());
    driver.answer(says("done"));
    driver.now = "2025-01-01T00:00:00Z".parse().unwrap();
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.in_flight, None);
    driver.pass(SignedDuration::from_millis(100));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
    assert_eq!(driver.issued.len(), 2);
}
