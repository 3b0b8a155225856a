//! The order of what ends a loop: of two ends that hold at once, the first one counts.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::resources::ResourceTracker;
use agentloop_api::AgentSpec;

const LIMIT: i64 = 60;

/// A loop in which nothing holds that ends it, in a goal with all limits.
fn running() -> GoalState {
    GoalState {
        started_at: Some(Timestamp::UNIX_EPOCH),
        steps: 9,
        cost: 99,
        ..GoalState::default()
    }
}

/// Makes hold what ends the loop so.
fn hold(state: &mut GoalState, end: GoalEnd) {
    match end {
        GoalEnd::CriteriaMet => state.met = true,
        GoalEnd::LoopDetected => state.denied = Some(GateKind::Escalated),
        GoalEnd::CallsDenied => {
            state.denied = Some(GateKind::Escalated);
            state.because = EscalationCause::Denials("repo__delete".into());
        }
        GoalEnd::LowConfidence => state.denied = Some(GateKind::LowConfidence),
        GoalEnd::Timeout => state.started_at = state.started_at.map(|at| time_math::before(at, seconds(1))),
        GoalEnd::CostLimit => state.cost += 1,
        GoalEnd::StepLimit => state.steps += 1,
    }
}

fn seconds(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

fn settings() -> EngineSettings {
    let spec: AgentSpec = serde_json::from_value(json!({
        "mode": "Goal",
        "instructions": "Count.",
        "model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"},
        "goal": {
            "description": "Count the stars.",
            "acceptanceCriteria": [{"name": "number", "regex": "[0-9]+ stars"}],
            "maxSteps": 10,
            "timeoutSeconds": LIMIT,
            "maxCostUSD": "0.0001",
        },
    }))
    .unwrap();
    EngineSettings::try_from(&spec).unwrap()
}

/// What ends the loop one second before its time is over.
fn end_of(state: &GoalState) -> Option<GoalEnd> {
    state.end(&ModeContext {
        now: time_math::after(Timestamp::UNIX_EPOCH, seconds(LIMIT - 1)),
        settings: &settings(),
        used: &ResourceTracker::default(),
        next_turn: None,
        wake_events: None,
        silent_servers: &[],
        next_task: None,
        last_failure: None,
    })
}

#[rstest]
fn each_end_ends_the_loop_alone_and_one_less_does_not(
    #[values(
        GoalEnd::CriteriaMet,
        GoalEnd::LoopDetected,
        GoalEnd::CallsDenied,
        GoalEnd::LowConfidence,
        GoalEnd::Timeout,
        GoalEnd::CostLimit,
        GoalEnd::StepLimit
    )]
    end: GoalEnd,
) {
    let mut state = running();
    assert_eq!(end_of(&state), None);
    hold(&mut state, end);
    assert_eq!(end_of(&state), Some(end));
}

/// A person answers one gate at a time, so that only one of the three denials holds: each of them is between the others' neighbors.
#[rstest]
#[case(GoalEnd::CriteriaMet, GoalEnd::LoopDetected)]
#[case(GoalEnd::CriteriaMet, GoalEnd::CallsDenied)]
#[case(GoalEnd::CriteriaMet, GoalEnd::LowConfidence)]
#[case(GoalEnd::LoopDetected, GoalEnd::Timeout)]
#[case(GoalEnd::CallsDenied, GoalEnd::Timeout)]
#[case(GoalEnd::LowConfidence, GoalEnd::Timeout)]
#[case(GoalEnd::Timeout, GoalEnd::CostLimit)]
#[case(GoalEnd::CostLimit, GoalEnd::StepLimit)]
fn the_first_of_two_simultaneous_ends_counts(#[case] first: GoalEnd, #[case] second: GoalEnd) {
    for order in [[first, second], [second, first]] {
        let mut state = running();
        for end in order {
            hold(&mut state, end);
        }
        assert_eq!(end_of(&state), Some(first), "both hold: {order:?}");
    }
}

#[rstest]
#[case(GoalEnd::Timeout)]
#[case(GoalEnd::CostLimit)]
fn a_check_under_way_is_completed_before_a_limit_of_time_or_cost_ends_the_loop(#[case] end: GoalEnd) {
    let mut state = running();
    hold(&mut state, end);
    state.validation = Some(Validation::default());
    assert_eq!(end_of(&state), None);
}
