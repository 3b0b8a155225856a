//! From every state: SIGTERM, a suspension and a newer pod stop the loop cleanly, and a wake request acts only on a
//! sleep.

use strum::IntoEnumIterator;

use super::*;
use agentloop_api::agent::LimitedResource;
use agentloop_api::status::LoopOutcome;

/// A loop that this reason holds.
fn held_by(reason: PauseReason) -> Driver {
    let mut driver = Driver::started(EngineSettings {
        rate_limits: vec![rates::limit(LimitedResource::LLMCalls, 40, 60)],
        ..settings()
    });
    match reason {
        PauseReason::SuspendedBySpec => {
            let cause = StopCause::Suspend;
            driver.feed(EngineInput::Stop { cause });
        }
        PauseReason::ProviderRateLimit => {
            driver.fail_with(CallFailure {
                retry_after_milliseconds: Some(60_000),
                ..failure(FailureKind::RateLimited)
            });
        }
        PauseReason::ModelUnreachable => {
            driver.fail_with(CallFailure {
                retry_after_milliseconds: Some(60_000),
                ..failure(FailureKind::Unreachable)
            });
        }
        PauseReason::AuthenticationFailed => drop(driver.fail(FailureKind::AuthenticationFailed)),
        PauseReason::QuotaExceeded => drop(driver.fail(FailureKind::QuotaExceeded)),
        PauseReason::ModelRefused => {
            driver.refused_turn();
            driver.next_timer();
            driver.refused_turn();
        }
        PauseReason::MaxConsecutiveTurns => {
            driver = Driver::started(EngineSettings {
                max_consecutive_turns: 1,
                ..settings()
            });
            driver.turn();
        }
        PauseReason::ActionsPerMinute => {
            driver = Driver::with_tools(EngineSettings {
                actions_per_minute: 1,
                ..settings()
            });
            driver.answer(work::wants(&["files__write", "files__write"]));
            driver.done(1, "written");
        }
        PauseReason::ToolCallNeedsApproval => driver = approvals::waiting(),
        PauseReason::UnknownOutcome => driver = approvals::of_unknown_outcome(),
        PauseReason::LowConfidence => driver = goal_gates::doubtful(),
        PauseReason::Escalated => driver = goal_gates::looping(),
        PauseReason::RateWindow => (0..40).for_each(|_| driver.turn()),
        PauseReason::OutsideActiveHours => {
            driver = Driver::started(EngineSettings {
                active_hours: Some(hours("UTC", "08:00", "23:00")),
                ..settings()
            });
        }
        PauseReason::ConsecutiveErrors => {
            driver.failed_turn();
            for _ in 0..4 {
                driver.next_timer();
                driver.failed_turn();
            }
        }
        PauseReason::ConsecutiveToolFailures => {
            driver = Driver::with_tools(EngineSettings {
                max_consecutive_tool_failures: Some(1),
                ..settings()
            });
            driver.answer(work::wants(&["files__read"]));
            driver.end(1, ToolOutcome::Failed { text: "no".into() });
        }
        PauseReason::CrashLoop => (0..3).for_each(|_| {
            driver.restart(1);
        }),
        PauseReason::LinkLost => {
            driver.feed(EngineInput::LinkLost);
        }
        PauseReason::BudgetExhausted
        | PauseReason::TokensPerHour
        | PauseReason::TotalTokens
        | PauseReason::TotalCost
        | PauseReason::CallExceedsLimit
        | PauseReason::BudgetAsk
        | PauseReason::BudgetUnavailable
        | PauseReason::BoundViolated
        | PauseReason::LoopDetected => {
            let kind = FailureKind::iter().find(|kind| kind.as_ref() == reason.as_ref());
            driver.fail(kind.unwrap());
        }
    }
    assert_eq!(driver.reasons(), [reason]);
    driver
}

/// A loop in every possible state, with a name.
fn everywhere() -> Vec<(String, Driver)> {
    let asleep = || {
        let mut driver = Driver::started(settings());
        driver.answer(calls("yield", r#"{"sleep": 600}"#));
        driver
    };
    let changed = |change: fn(&mut Driver)| {
        let mut driver = Driver::started(settings());
        change(&mut driver);
        driver
    };
    let drain = |driver: &mut Driver| {
        let cause = StopCause::Drain;
        driver.feed(EngineInput::Stop { cause });
    };
    let mut all = vec![
        ("never started".to_owned(), Driver::fresh(settings())),
        ("in a call".to_owned(), Driver::started(settings())),
        (
            "between two turns".to_owned(),
            changed(|driver| drop(driver.answer(says("hm")))),
        ),
        (
            "before a retry".to_owned(),
            changed(|driver| drop(driver.fail(FailureKind::Unreachable))),
        ),
        ("after a failed turn".to_owned(), changed(Driver::failed_turn)),
        ("asleep".to_owned(), asleep()),
        ("stopping".to_owned(), changed(drain)),
        (
            "stopped".to_owned(),
            changed(|driver| {
                driver.answer(says("hm"));
                let cause = StopCause::Drain;
                driver.feed(EngineInput::Stop { cause });
            }),
        ),
        (
            "completed".to_owned(),
            changed(|driver| drop(driver.answer(calls("yield", r#"{"mode": "shutdown"}"#)))),
        ),
    ];
    let mut paused_asleep = asleep();
    paused_asleep.feed(EngineInput::LinkLost);
    all.push(("asleep under a pause".to_owned(), paused_asleep));
    all.extend(PauseReason::iter().map(|reason| (format!("held by {reason}"), held_by(reason))));
    let states: std::collections::BTreeSet<LoopState> = all.iter().map(|(_, driver)| driver.state()).collect();
    // Starting lasts for one input only.
    assert_eq!(states.len(), LoopState::iter().count() - 1, "{states:?}");
    all
}

#[test]
fn test_agent_shutdown_and_every_other_stop_ends_cleanly_from_every_state() {
    for cause in [StopCause::Drain, StopCause::Suspend, StopCause::Fenced] {
        for (name, mut driver) in everywhere() {
            let (calls, journal) = (driver.issued.len(), driver.journal.len());
            let in_flight = driver.in_flight;
            driver.feed(EngineInput::Stop { cause });
            if cause == StopCause::Drain && in_flight.is_some() {
                assert_eq!(driver.state(), LoopState::Stopping, "{name}");
                assert!(
                    !driver.stopped && driver.in_flight == in_flight,
                    "{name}: the call may finish"
                );
                driver.feed(EngineInput::DrainEnded);
            }
            assert!(driver.stopped, "{name}, {cause:?}");
            assert_eq!(driver.state(), LoopState::Stopped, "{name}, {cause:?}");
            assert_eq!((driver.in_flight, driver.timer), (None, None), "{name}, {cause:?}");
            assert!(
                cause != StopCause::Fenced || driver.journal.len() == journal,
                "{name}: fenced, and it wrote"
            );
            driver.pass(SignedDuration::from_hours(48));
            driver.feed(EngineInput::Timer);
            try_everything_but(&mut driver, true);
            assert_eq!(driver.issued.len(), calls, "{name}, {cause:?}");
            assert_eq!(driver.state(), LoopState::Stopped, "{name}, {cause:?}");
        }
    }
}

#[test]
fn the_next_pod_continues_from_every_drained_state() {
    for (name, mut driver) in everywhere() {
        let turn = driver.engine.view().turn;
        let held: Vec<PauseReason> = driver.reasons();
        let cause = StopCause::Drain;
        driver.feed(EngineInput::Stop { cause });
        driver.feed(EngineInput::DrainEnded);
        driver.restart(2);
        assert_ne!(driver.state(), LoopState::Stopped, "{name}");
        assert!(driver.engine.view().turn <= turn + 1, "{name}");
        for reason in held {
            let gone = [PauseReason::SuspendedBySpec, PauseReason::LinkLost].contains(&reason);
            assert_eq!(driver.reasons().contains(&reason), !gone, "{name}");
        }
    }
}

#[test]
fn a_shutdown_of_the_agents_own_ends_the_loop_whatever_holds_it_meanwhile() {
    for input in [
        None,
        Some(EngineInput::LinkLost),
        Some(EngineInput::Stop {
            cause: StopCause::Drain,
        }),
    ] {
        let mut driver = Driver::started(settings());
        input.map(|input| driver.feed(input));
        driver.answer(calls("yield", r#"{"mode": "shutdown"}"#));
        let view = driver.engine.view();
        assert_eq!(
            (view.state, view.outcome),
            (LoopState::Stopped, Some(LoopOutcome::Completed))
        );
        assert!(driver.stopped);
    }
}

#[test]
fn a_wake_request_acts_on_a_sleeping_loop_and_on_no_other() {
    for (name, mut driver) in everywhere() {
        let before = (driver.state(), driver.reasons(), driver.issued.len());
        driver.feed(EngineInput::WakeRequested { token: "w".into() });
        let after = (driver.state(), driver.reasons(), driver.issued.len());
        if name == "asleep" {
            assert_eq!((after.0, after.2), (LoopState::Running, before.2));
        } else {
            assert_eq!(after, before, "{name}");
        }
    }
}
