//! Tests of the condition `LoopDetected` and of the effect of a detected loop on the status.

use super::events;
use super::gateway_loop_detection::LoopFinding;
use super::intent::{Intent, RestReason};
use super::status_tests::{Case, held, reported, row};
use crate::api::AgentStatus;
use crate::api::condition::{ConditionType, GatewaySign, LoopSign, find};
use crate::api::status::{LoopOutcome, LoopState, PauseReason};
use crate::controller::kstatus::KstatusVerdict;
use crate::controller::pod_sessions::ReceivedReport;
use crate::link::messages::DetectedLoop;

fn looping(sign: LoopSign) -> ReceivedReport {
    let mut last_report = held(LoopState::Paused, PauseReason::LoopDetected);
    let report = last_report.report.loop_.as_mut().unwrap();
    report.resumes_at = report.reasons[0].until;
    report.detected = Some(DetectedLoop {
        sign,
        message: "what was seen and what followed".into(),
    });
    last_report
}

#[test]
fn a_detected_loop_is_a_condition_and_needs_no_person_while_it_is_only_forced_to_sleep() {
    let mut case = Case {
        last_report: Some(looping(LoopSign::Cycle)),
        enforce: true,
        ..Case::default()
    };
    let status = case.status();
    let named = |status: &AgentStatus, type_| {
        let condition = find(&status.conditions, type_).unwrap();
        (condition.status.clone(), condition.reason.clone())
    };
    let is = |status: &str, reason: &str| (status.to_owned(), reason.to_owned());
    assert_eq!(named(&status, ConditionType::LoopDetected), is("True", "Cycle"));
    assert_eq!(named(&status, ConditionType::Ready), is("True", "LoopDetected"));
    assert!(find(&status.conditions, ConditionType::Stalled).is_none());
    // Reported without a pause: the loop is running.
    let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
    (report.state, report.resumes_at) = (LoopState::Running, None);
    report.reasons.clear();
    assert_eq!(named(&case.status(), ConditionType::Ready), is("True", "LoopRunning"));
    assert_eq!(named(&case.status(), ConditionType::LoopDetected), is("True", "Cycle"));
    // Without a report the condition is kept; a report without a detected loop clears it.
    case.old = status;
    case.last_report = None;
    assert_eq!(named(&case.status(), ConditionType::LoopDetected), is("True", "Cycle"));
    case.last_report = Some(reported(LoopState::Running));
    assert_eq!(
        named(&case.status(), ConditionType::LoopDetected),
        is("False", "Inactive")
    );
}

#[test]
fn a_gateway_finding_is_cleared_when_it_no_longer_holds_even_without_reports_of_the_worker() {
    let case = Case {
        finding: Some(LoopFinding {
            sign: GatewaySign::RepeatedRequest,
            message: "detected from the gateway's counters: the same request".into(),
        }),
        ..Case::default()
    };
    let old = case.status();
    let case = Case {
        old,
        last_report: None,
        ..Case::default()
    };
    let status = case.status();
    assert_eq!(
        find(&status.conditions, ConditionType::LoopDetected).unwrap().status,
        "False"
    );
}

#[test]
fn a_loop_ended_by_detection_needs_a_person_and_keeps_its_reason() {
    let mut ended = looping(LoopSign::RepeatedError);
    let report = ended.report.loop_.as_mut().unwrap();
    (report.state, report.outcome) = (LoopState::Stopped, Some(LoopOutcome::Failed));
    report.reasons.clear();
    let recording = Case {
        last_report: Some(ended),
        intent: Intent::RecordOutcome,
        ..Case::default()
    };
    let old = recording.status();
    assert_eq!(old.r#loop.as_ref().unwrap().outcome, Some(LoopOutcome::Failed));
    let notices = events::from_status(&AgentStatus::default(), &old);
    assert!(
        notices
            .iter()
            .any(|notice| notice.warning && notice.reason == "LoopDetected")
    );
    let resting = Case {
        old,
        intent: Intent::Rest(RestReason::Completed),
        pod: None,
        last_report: None,
        ..Case::default()
    };
    row(&resting, KstatusVerdict::Failed, LoopState::Stopped, "Failed");
    let status = resting.status();
    let held = find(&status.conditions, ConditionType::LoopDetected).unwrap();
    assert_eq!((held.status.as_str(), held.reason.as_str()), ("True", "RepeatedError"));
    assert_eq!(
        find(&status.conditions, ConditionType::Ready).unwrap().message,
        held.message
    );
}
