//! Tests of the conditions of a silent pod.

use pretty_assertions::assert_eq;

use super::*;

fn listening() -> Case {
    let report = SensorPodReport {
        report: report(3),
        pending_deliveries: 0,
    };
    let own = Owned {
        last_report: Some(report),
        ..Owned::default()
    };
    let mut case = Case {
        own: Some(own),
        ..Case::default()
    };
    case.write();
    assert_eq!(case.reason(ConditionType::Ready), is("True", "Listening"));
    case
}

fn pod(pod: serde_json::Value) -> PodState {
    PodState::of(&serde_json::from_value(pod).unwrap())
}

#[test]
fn a_pod_without_reports_is_unknown_until_it_reports_again() {
    let mut case = listening();
    let own = case.own.as_mut().unwrap();
    own.pod = Some(pod(
        serde_json::json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
    ));
    own.silent = true;
    let before = case.old.clone();
    let silent = case.write();
    assert_eq!(case.reason(ConditionType::Connected), is("Unknown", "Silent"));
    assert_eq!(case.reason(ConditionType::Ready), is("False", "Silent"));
    assert_eq!(case.reason(ConditionType::Reconciling), is("True", "Silent"));
    assert_eq!(event_reasons(&before, &silent), ["Silent"]);
    // The node lost contact with the cluster: the pod is no longer ready.
    case.own.as_mut().unwrap().pod = Some(pod(serde_json::json!({"status": {}})));
    assert_eq!(case.reason(ConditionType::Connected), is("Unknown", "Silent"));
    case.own.as_mut().unwrap().silent = false;
    assert_eq!(event_reasons(&silent, &case.write()), ["Recovered"]);
}

#[test]
fn a_pod_on_a_lost_node_reports_what_a_person_can_do() {
    let mut case = listening();
    let own = case.own.as_mut().unwrap();
    own.pod = Some(pod(
        serde_json::json!({"metadata": {"deletionTimestamp": "2026-11-22T13:00:00Z"}, "status": {}}),
    ));
    assert_eq!(
        case.reason(ConditionType::Connected),
        is("True", "Listening"),
        "it may terminate in order"
    );
    case.own.as_mut().unwrap().silent = true;
    let (status, reason, message) = case.says(ConditionType::Connected);
    assert_eq!((status.as_str(), reason.as_str()), ("False", "NodeLost"));
    assert!(message.contains("node.kubernetes.io/out-of-service"), "{message}");
}

#[test]
fn a_pod_that_does_not_return_is_an_error_and_a_new_one_is_only_starting() {
    let creating = || Some(pod(serde_json::json!({"status": {}})));
    let mut case = listening();
    let own = case.own.as_mut().unwrap();
    (own.last_report, own.pod) = (None, creating());
    assert_eq!(
        case.reason(ConditionType::Connected),
        is("True", "Listening"),
        "pods come and go"
    );
    case.own.as_mut().unwrap().silent = true;
    let (status, reason, message) = case.says(ConditionType::Connected);
    assert_eq!((status.as_str(), reason.as_str()), ("Unknown", "Silent"));
    assert!(message.contains("clock-sensor-0 is not ready"), "{message}");
    case.own.as_mut().unwrap().pod = None;
    assert!(
        case.says(ConditionType::Connected)
            .2
            .contains("StatefulSet clock-sensor")
    );
    case.old = SensorStatus::default();
    case.own.as_mut().unwrap().pod = creating();
    assert_eq!(case.reason(ConditionType::Connected), is("Unknown", "Starting"));
}

#[test]
fn a_condition_for_an_older_spec_keeps_its_generation_and_is_not_ready_for_the_new_one() {
    let mut case = listening();
    let connected = find(&case.old.conditions, ConditionType::Connected).unwrap().clone();
    for held in &mut case.old.conditions {
        held.observed_generation = Some(1);
    }
    let of_before = case.own.as_mut().unwrap().last_report.take();
    let status = case.status();
    let held = find(&status.conditions, ConditionType::Connected).unwrap();
    assert_eq!((held.status.as_str(), held.observed_generation), ("True", Some(1)));
    assert_eq!(case.reason(ConditionType::Ready), is("False", "Starting"));
    assert_eq!(case.reason(ConditionType::Reconciling), is("True", "Starting"));
    case.own.as_mut().unwrap().last_report = of_before;
    let status = case.status();
    assert_eq!(find(&status.conditions, ConditionType::Connected), Some(&connected));
    assert_eq!(case.reason(ConditionType::Ready), is("True", "Listening"));
}
