//! The guardrails decide about a history as they do about the loop that made it.

use pretty_assertions::assert_eq;

use super::*;
use crate::OutcomeKind;
use crate::replay::{GuardrailReplay, ReplayedPause};
use agentloop_api::agent::LimitedResource;

/// Runs turns without tools until the loop is held, and asks about each of its calls.
fn both_held(settings: EngineSettings) -> (Option<ReplayedPause>, ReplayedPause) {
    let mut driver = Driver::started(settings.clone());
    let mut replay = GuardrailReplay::new(settings);
    let mut replayed = None;
    while driver.in_flight.is_some() {
        assert_eq!(replay.holds_call(driver.now), None);
        replay.count_call(driver.now);
        driver.answer(ModelAnswer {
            tokens: Some(10),
            ..says("hm")
        });
        replay.count_tokens(10, driver.now);
        replayed = replay.complete_turn(None, driver.now);
        driver.pass(SignedDuration::from_millis(100));
    }
    let held = &driver.engine.view().reasons[0];
    let real = ReplayedPause {
        reason: held.reason,
        until: held.until.unwrap(),
    };
    (replayed.or_else(|| replay.holds_call(driver.now)), real)
}

#[test]
fn a_pause_has_the_same_reason_and_end() {
    let limited = |resource, amount| EngineSettings {
        rate_limits: vec![rates::limit(resource, amount, 60)],
        ..settings()
    };
    for settings in [
        limited(LimitedResource::LLMCalls, 3),
        limited(LimitedResource::LLMTokens, 25),
        EngineSettings {
            max_consecutive_turns: 2,
            ..settings()
        },
    ] {
        let (replayed, real) = both_held(settings);
        assert_eq!(replayed, Some(real));
    }
}

#[test]
fn a_turn_ends_at_its_limit_of_calls_and_not_before() {
    let replay = GuardrailReplay::new(EngineSettings {
        max_calls_per_turn: 3,
        ..settings()
    });
    assert_eq!(
        [0, 2, 3, 4].map(|calls| replay.ends_turn(calls)),
        [false, false, true, true]
    );
}

#[test]
fn an_action_beyond_the_limit_holds_calls_until_there_is_room_for_it() {
    let mut replay = GuardrailReplay::new(EngineSettings {
        actions_per_minute: 2,
        ..settings()
    });
    let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let at = |second: i64| start + seconds(second);
    assert_eq!((replay.run_action(at(0)), replay.run_action(at(10))), (None, None));
    let pause = replay.run_action(at(20)).unwrap();
    assert_eq!((pause.reason, pause.until), (PauseReason::ActionsPerMinute, at(60)));
    assert_eq!(replay.holds_call(at(59)), Some(pause));
    assert_eq!(replay.holds_call(at(60)), None);
    // Two of the last minute: those of the seconds 10 and 60.
    assert!(replay.run_action(at(61)).is_some());
}

#[test]
fn failed_tool_runs_in_a_row_lead_to_a_cool_down_and_a_success_ends_the_row() {
    let mut replay = GuardrailReplay::new(EngineSettings {
        max_consecutive_tool_failures: Some(2),
        ..settings()
    });
    let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let mut run = |outcome| {
        replay
            .end_tool_run("files__read", outcome, now)
            .map(|pause| pause.reason)
    };
    assert_eq!(run(OutcomeKind::Error), None);
    assert_eq!(run(OutcomeKind::Ok), None);
    assert_eq!(run(OutcomeKind::Error), None);
    assert_eq!(run(OutcomeKind::Unknown), Some(PauseReason::ConsecutiveToolFailures));
}
