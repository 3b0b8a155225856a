//! Tests of what the status says of open gates, and of the untrusted content because of which they are open.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::intent::{Intent, RestReason};
use super::status_tests::{Case, now, reported};
use crate::api::condition::{ConditionType, find};
use crate::api::status::{Gate, GateKind, LoopState, PauseReason, UntrustedContent};
use crate::link::messages::HeldReason;

fn content() -> UntrustedContent {
    UntrustedContent {
        since: Time(now()),
        source: "server/web".into(),
    }
}

/// An Agent whose model has been shown untrusted content, with this source for its open gate.
fn waiting(source: Option<&str>) -> Case {
    let mut last_report = reported(LoopState::Running);
    let report = last_report.report.loop_.as_mut().unwrap();
    report.untrusted_content = Some(content());
    report.gates = vec![Gate {
        id: "e1-t1c2r1".into(),
        kind: GateKind::ToolCallNeedsApproval,
        tool: "mail__send".into(),
        arguments_hash: "5f0c".into(),
        opened_at: Time(now()),
        expires_at: Some(Time(now() + SignedDuration::from_hours(1))),
        untrusted_content_source: source.map(Into::into),
    }];
    Case {
        last_report: Some(last_report),
        ..Case::default()
    }
}

#[test]
fn only_a_gate_caused_by_untrusted_content_names_it() {
    let message = |source| {
        let status = waiting(source).status();
        assert_eq!(status.gates[0].untrusted_content_source.as_deref(), source);
        find(&status.conditions, ConditionType::ApprovalPending)
            .unwrap()
            .message
            .clone()
    };
    let because = message(Some("server/web"));
    let expected = "the call of mail__send waits for an approval, since the model has been shown untrusted content of \
                    server/web (gate e1-t1c2r1)";
    assert!(because.starts_with(expected), "{because}");
    let plain = message(None);
    assert!(
        plain.starts_with("the call of mail__send waits for an approval (gate e1-t1c2r1)"),
        "{plain}"
    );
}

#[test]
fn a_gate_for_definitions_names_the_server_and_how_to_answer_while_the_loop_runs() {
    let mut case = waiting(None);
    let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
    report.gates = vec![Gate {
        id: "tools-files-e1-1".into(),
        kind: GateKind::ToolDefinitionsChanged,
        tool: "files".into(),
        arguments_hash: "5f0c".into(),
        opened_at: Time(now()),
        expires_at: None,
        untrusted_content_source: None,
    }];
    let status = case.status();
    let pending = find(&status.conditions, ConditionType::ApprovalPending).unwrap();
    assert_eq!((&*pending.status, &*pending.reason), ("True", "ToolDefinitionsChanged"));
    let message = &pending.message;
    assert!(
        message.starts_with("the tool server files has changed or added tools"),
        "{message}"
    );
    let command = "agentloop.dev/approve=tools-files-e1-1:5f0c agentloop.dev/approved-by=<your user name>";
    assert!(message.contains(command), "{message}");
    assert_eq!(status.r#loop.unwrap().state, LoopState::Running);
    let ready = find(&status.conditions, ConditionType::Ready).unwrap();
    assert_eq!((&*ready.status, &*ready.reason), ("True", "LoopRunning"));
    // The condition ends with the gate.
    case.old = case.status();
    case.last_report = Some(reported(LoopState::Running));
    let status = case.status();
    let pending = find(&status.conditions, ConditionType::ApprovalPending).unwrap();
    assert_eq!(pending.status, "False");
}

#[test]
fn the_condition_explains_how_to_answer_the_blocking_gate_among_several() {
    let mut case = waiting(None);
    let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
    report.gates.push(Gate {
        id: "goal-e1-1".into(),
        kind: GateKind::LowConfidence,
        tool: "goal".into(),
        arguments_hash: "77ab".into(),
        ..report.gates[0].clone()
    });
    report.reasons = vec![HeldReason {
        reason: PauseReason::LowConfidence,
        until: None,
        message: "the confidence is low (gate goal-e1-1)".into(),
    }];
    let status = case.status();
    let message = &find(&status.conditions, ConditionType::ApprovalPending)
        .unwrap()
        .message;
    assert!(message.contains("To approve gate goal-e1-1: "), "{message}");
    assert!(message.contains("agentloop.dev/approve=goal-e1-1:77ab"), "{message}");
    assert!(message.ends_with("; 1 more gate is in status.gates"), "{message}");
}

#[test]
fn untrusted_content_stays_in_the_status_until_a_report_has_none() {
    let mut case = waiting(None);
    let shown = |case: &Case| case.status().r#loop.unwrap().untrusted_content;
    assert_eq!(shown(&case), Some(content()));
    // It outlives the pod, and a suspension.
    case.old = case.status();
    case.last_report = None;
    assert_eq!(shown(&case), Some(content()));
    case.pod = None;
    case.suspend = true;
    case.intent = Intent::Rest(RestReason::Suspended);
    assert_eq!(shown(&case), Some(content()));
    // A report without any clears it.
    case.last_report = Some(reported(LoopState::Running));
    assert_eq!(shown(&case), None);
}
