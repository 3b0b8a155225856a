//! Agents that were scaled to zero, and requests to stop one.

use super::*;
use crate::controller::runtime::names;

#[test]
fn an_agent_scaled_to_zero_is_ready_and_explains_what_starts_it() {
    let mut last_report = reported(LoopState::Stopped);
    last_report.report.loop_.as_mut().unwrap().outcome = Some(LoopOutcome::ScaledToZero);
    let case = Case {
        last_report: Some(last_report),
        intent: Intent::Rest(RestReason::Completed),
        ..Case::default()
    };
    let status = case.status();
    let ready = find(&status.conditions, ConditionType::Ready).unwrap();
    assert_eq!((&*ready.status, &*ready.reason), ("True", "ScaledToZero"));
    assert!(ready.message.ends_with("the next task starts it"), "{}", ready.message);
    assert_eq!(events::from_status(&Case::default().status(), &status), []);
}

#[test]
fn a_stop_of_an_agent_that_was_scaled_to_zero_ends_it_although_tasks_may_wait() {
    let mut last_report = reported(LoopState::Stopped);
    last_report.report.loop_.as_mut().unwrap().outcome = Some(LoopOutcome::ScaledToZero);
    let mut case = Case {
        last_report: Some(last_report),
        intent: Intent::Rest(RestReason::Completed),
        ..Case::default()
    };
    let outcome = |status: &AgentStatus| status.r#loop.as_ref().unwrap().outcome;
    let stop = |status: &AgentStatus| status.last_handled_requests.clone().and_then(|handled| handled.stop);
    case.old = case.status();
    assert_eq!(outcome(&case.old), Some(LoopOutcome::ScaledToZero));

    let mut agent = agent(false);
    agent.metadata.annotations = Some([(names::STOP.to_owned(), "s".to_owned())].into());
    for why in ["recorded", "the last report is older", "without a report"] {
        case.old = case.status_of(&agent);
        let found = (outcome(&case.old), stop(&case.old));
        assert_eq!(found, (Some(LoopOutcome::Cancelled), Some("s".into())), "{why}");
        if why == "the last report is older" {
            case.last_report = None;
        }
    }

    // It was started and scaled to zero again: the request does not count twice.
    case.old.r#loop.as_mut().unwrap().outcome = Some(LoopOutcome::ScaledToZero);
    assert_eq!(outcome(&case.status_of(&agent)), Some(LoopOutcome::ScaledToZero));
}
