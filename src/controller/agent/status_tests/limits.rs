//! Conditions of limits, and the Events when they begin to apply.

use super::*;

#[test]
fn failed_tool_runs_have_a_condition_and_an_event_of_their_own() {
    let step = |old: &AgentStatus, last_report| {
        let case = Case {
            old: old.clone(),
            last_report,
            ..Case::default()
        };
        case.status()
    };
    let condition = |status: &AgentStatus, type_| {
        let found = find(&status.conditions, type_)?;
        Some((found.status.clone(), found.reason.clone()))
    };
    let is = |status: &str, reason: &str| Some((status.to_owned(), reason.to_owned()));
    let calm = Case::default().status();
    assert_eq!(condition(&calm, ConditionType::ToolFailureLimitReached), None);
    let paused = step(
        &calm,
        Some(held(LoopState::Paused, PauseReason::ConsecutiveToolFailures)),
    );
    let shown = is("True", "ConsecutiveToolFailures");
    assert_eq!(condition(&paused, ConditionType::ToolFailureLimitReached), shown);
    assert_eq!(condition(&paused, ConditionType::ErrorLimitReached), None);
    let message = "why; resumes at 2026-11-22T14:05:00Z".to_owned();
    assert_eq!(
        events::from_status(&calm, &paused),
        [KubeEvent::warning("ToolFailureLimitReached", "Pause", message)]
    );
    let silent = step(&paused, None);
    assert_eq!(condition(&silent, ConditionType::ToolFailureLimitReached), shown);
    assert_eq!(events::from_status(&paused, &silent), []);
    let over = step(&silent, Some(reported(LoopState::Running)));
    assert_eq!(
        condition(&over, ConditionType::ToolFailureLimitReached),
        is("False", "Inactive")
    );
    let other = step(&over, Some(held(LoopState::Paused, PauseReason::ConsecutiveErrors)));
    assert_eq!(
        condition(&other, ConditionType::ErrorLimitReached),
        is("True", "ConsecutiveErrors")
    );
    assert_eq!(
        condition(&other, ConditionType::ToolFailureLimitReached),
        is("False", "Inactive")
    );
}

#[test]
fn the_end_of_active_hours_causes_one_normal_event() {
    let old = Case::default().status();
    let closed = Case {
        last_report: Some(held(LoopState::Paused, PauseReason::OutsideActiveHours)),
        ..Case::default()
    };
    let new = closed.status();
    let condition = find(&new.conditions, ConditionType::OutsideActiveHours).unwrap();
    assert_eq!(condition.message, "why; resumes at 2026-11-22T14:05:00Z");
    let notices = events::from_status(&old, &new);
    assert_eq!(
        notices,
        [KubeEvent::normal(
            "OutsideActiveHours",
            "Pause",
            condition.message.clone()
        )]
    );
    assert_eq!(events::from_status(&new, &new), []);
}
