//! Tests of the plan: what follows from an observation, without an API server.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::apply::AppliedSteps;
use super::children::{AppliedChild, SensorChildren};
use super::conditions::{SECRET_NOT_FOUND, SECRET_UNUSABLE, SILENT};
use super::decide::{RelayStep, SensorPlan, decide};
use super::index::{CheckedSensor, IndexedSensor};
use super::objects;
use super::observe::ObservedSensor;
use super::pod::{self, EDIT, HASH, SensorPodSettings, SpecEdit};
use super::publish::Publication;
use super::reconcile_state::{PodHealth, SensorReconcileState};
use super::rollout::ReplacementQueue;
use super::secrets::SecretLookup;
use super::snapshot::SensorSnapshot;
use crate::api::{NamespacedName, Sensor};
use crate::controller::delivery_relay::{REPORT_TIMEOUT, SensorSession};
use crate::controller::runtime::pod_state::PodState;
use crate::controller::runtime::status_writer::LastStatus;

fn now() -> Timestamp {
    "2026-11-22T14:00:00Z".parse().unwrap()
}

fn sensor() -> Sensor {
    let webhook = json!({"scheme": "GitHub", "secretKeyRef": {"name": "hook", "key": "key"}});
    serde_json::from_value(json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
        "metadata": {"name": "s", "namespace": "n", "uid": "u", "generation": 2},
        "spec": {"agentNames": ["a"], "source": {"webhook": webhook}},
    }))
    .unwrap()
}

fn settings(image: &str) -> SensorPodSettings {
    SensorPodSettings {
        image: image.into(),
        ..SensorPodSettings::default()
    }
}

/// The `StatefulSet` as an earlier controller with this image applied it.
fn applied_set(image: &str) -> AppliedChild {
    let sensor = sensor();
    let (mut set, hash): (StatefulSet, String) = pod::hashed(pod::stateful_set(&sensor, &settings(image)));
    set.metadata.uid = Some("set".into());
    set.annotations_mut().insert(HASH.into(), hash);
    set.annotations_mut().insert(EDIT.into(), SpecEdit::of(&sensor).text());
    AppliedChild::of(&set)
}

fn pod(ready: &str) -> PodState {
    let pod: Value = json!({
        "metadata": {"name": "s-sensor-0", "uid": "pod", "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s-sensor", "uid": "set", "controller": true},
        ]},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    });
    PodState::of(&serde_json::from_value(pod).unwrap())
}

/// A checked webhook whose objects are to be created.
fn snapshot() -> SensorSnapshot {
    let (at, object) = (Instant::now(), Arc::new(sensor()));
    let mut known = IndexedSensor::new(Arc::clone(&object), None);
    known.checked = Some(CheckedSensor { object, problem: None });
    SensorSnapshot {
        key: NamespacedName::new("n", "s"),
        now: now(),
        at,
        known,
        receivers: Vec::new(),
        absent: Vec::new(),
        agents: BTreeSet::new(),
        memory: SensorReconcileState::new("u", now(), at),
        last: LastStatus::default(),
        children: Some(SensorChildren::default()),
        session: None,
        turns: ReplacementQueue::since(at),
    }
}

/// A checked webhook whose pod runs.
fn running() -> SensorSnapshot {
    SensorSnapshot {
        children: Some(SensorChildren {
            set: Some(applied_set("old")),
            pod: Some(pod("True")),
            ..SensorChildren::default()
        }),
        ..snapshot()
    }
}

fn found(key_problem: Option<&str>) -> SecretLookup {
    SecretLookup::Found {
        keys: vec!["key".into()],
        key_problem: key_problem.map(Into::into),
    }
}

fn observed(snapshot: SensorSnapshot, secret: SecretLookup) -> ObservedSensor {
    ObservedSensor {
        snapshot,
        secrets: Some(vec![secret]),
    }
}

fn plan(observed: &ObservedSensor) -> SensorPlan {
    decide(observed, objects::steps(&observed.snapshot, &settings("new")))
}

#[test]
fn a_secret_that_cannot_be_used_keeps_every_object_back() {
    let plan_with = |secret| plan(&observed(snapshot(), secret));
    let good = plan_with(found(None));
    assert!(good.objects.set.is_some() && good.objects.service.is_some() && good.objects.policy.is_some());
    assert_eq!(good.obstacle, None);
    for (secret, reason) in [
        (SecretLookup::Absent, SECRET_NOT_FOUND),
        (found(Some("is empty")), SECRET_UNUSABLE),
    ] {
        let held = plan_with(secret);
        assert!(!held.objects.applies());
        assert_eq!(held.obstacle.unwrap().reason, reason);
        assert!(held.reports_status);
    }
}

#[test]
fn a_spec_that_waits_for_its_check_changes_neither_objects_nor_status_and_its_pod_delivers() {
    let mut snapshot = running();
    snapshot.known = IndexedSensor::new(Arc::new(sensor()), None);
    assert!(snapshot.known.is_pending());
    let plan = plan(&observed(snapshot, found(None)));
    assert!(!plan.objects.applies() && !plan.reports_status);
    assert!(matches!(&plan.relay, RelayStep::Expect { pod_uid, .. } if pod_uid == "pod"));
}

#[test]
fn a_running_pod_waits_for_its_turn_with_a_place_in_the_queue() {
    let early = plan(&observed(running(), found(None)));
    assert!(early.objects.set.is_none() && early.objects.reserves_turn && !early.objects.takes_turn);
    let wait = early.objects.recheck.unwrap();
    let mut later = running();
    later.at += wait;
    let later = plan(&observed(later, found(None)));
    assert!(later.objects.set.is_some() && later.objects.takes_turn);
    let mut idle = running();
    idle.children.as_mut().unwrap().pod = None;
    let idle = plan(&observed(idle, found(None)));
    assert!(
        idle.objects.set.is_none() && !idle.objects.reserves_turn,
        "nothing to queue for"
    );
}

#[test]
fn a_running_pod_waits_in_the_queue_for_another_template_of_the_chart_too() {
    let with = |settings: &SensorPodSettings| {
        let observed = observed(running(), found(None));
        decide(&observed, objects::steps(&observed.snapshot, settings)).objects
    };
    let mut settings = settings("old");
    let same = with(&settings);
    // A new leader applies what is current once, which replaces no pod.
    assert!(same.set.is_some_and(|set| set.corrects) && !same.reserves_turn);
    settings.template.priority_class_name = Some("low".into());
    let other = with(&settings);
    assert!(other.set.is_none() && other.reserves_turn && !other.takes_turn);
}

#[test]
fn the_session_of_an_earlier_pod_does_not_affect_the_health_of_the_expected_pod() {
    let session = |uid: &str| SensorSession {
        pod_uid: uid.into(),
        last_report: None,
        silent: true,
    };
    let health = |uid: &str| {
        let mut snapshot = running();
        snapshot.session = Some(session(uid));
        let observed = observed(snapshot, found(None));
        Publication::of(&observed, &plan(&observed), &AppliedSteps::default()).pod_health
    };
    assert_eq!(health("an earlier pod"), PodHealth::Healthy);
    assert!(matches!(health("pod"), PodHealth::Failing(_)), "{SILENT}");
}

#[test]
fn a_pod_that_never_came_up_is_silent_after_as_long_as_one_that_stopped_reporting() {
    let health = |waited: Duration| {
        let mut snapshot = running();
        snapshot.children.as_mut().unwrap().set = None;
        snapshot.last.status.conditions = vec![crate::api::condition::condition(
            crate::api::condition::ConditionType::Connected,
            true,
            "Listening",
            "",
            None,
            now(),
        )];
        snapshot.at = snapshot.memory.since + waited;
        let observed = observed(snapshot, found(None));
        Publication::of(&observed, &plan(&observed), &AppliedSteps::default()).pod_health
    };
    assert_eq!(
        health(REPORT_TIMEOUT.saturating_sub(Duration::from_millis(1))),
        PodHealth::Healthy
    );
    assert!(matches!(health(REPORT_TIMEOUT), PodHealth::Failing(_)));
}
