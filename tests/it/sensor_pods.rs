//! Sensors with a pod of their own: what the controller makes for them, and what their pods say, in paused time against
//! the in-process API server.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use agentloop::api::sensor::{SensorStatus, SensorTotals};
use agentloop::api::{NamespacedName, Sensor};
use agentloop::controller::pod_sessions::PodSessions;
use agentloop::link::deliveries::{SensorDirectives, SensorPodReport};
use agentloop::link::messages::RefusalCode;
use agentloop::link::sensor_messages::{LastEvent, SensorReport};
use agentloop::link::server::{PodIdentity, PodKind};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::sensors::{on_a_real_server, sensors_of, until};
use crate::support::harness::{ControllerHarness, NAMESPACE, agent_key};

const SENSORS: &str = "agentloop.dev/sensors";
const SETS: &str = "apps/statefulsets";
const SERVICES: &str = "/services";

fn source_of(kind: &str) -> Value {
    match kind {
        "webhook" => json!({"webhook": {"scheme": "GitHub", "secretKeyRef": {"name": "hooks", "key": "main"}}}),
        "poll" => json!({"poll": {"http": {"url": "https://example.com/prices"}}}),
        "closed" => json!({"poll": {"http": {"url": "https://example.com", "headersSecretRef": {"name": "keys"}}}}),
        _ => json!({"schedule": {"cron": "* * * * *"}}),
    }
}

fn put(harness: &ControllerHarness, name: &str, source: &str, spec: &Value) -> Sensor {
    let mut whole = json!({"agentNames": ["coast"], "source": source_of(source)});
    for (field, value) in spec.as_object().unwrap() {
        whole[field] = value.clone();
    }
    // What is there goes first: a merge would leave the old source beside the new one.
    let kinds = ["schedule", "poll", "stream", "webhook"];
    for kind in kinds {
        let kept = whole["source"].get(kind).is_some();
        if !kept && harness.server.get(SENSORS, NAMESPACE, name).is_some() {
            whole["source"][kind] = Value::Null;
        }
    }
    let object = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
        "metadata": {"name": name, "namespace": NAMESPACE}, "spec": whole,
    });
    serde_json::from_value(harness.server.put(SENSORS, object)).unwrap()
}

fn put_secret(harness: &ControllerHarness, name: &str, key: &str) {
    harness.server.put(
        "/secrets",
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: "czNjcjN0"}}),
    );
}

fn status(harness: &ControllerHarness, name: &str) -> SensorStatus {
    let sensor: Sensor = serde_json::from_value(harness.server.get(SENSORS, NAMESPACE, name).unwrap()).unwrap();
    sensor.status.unwrap_or_default()
}

fn says(harness: &ControllerHarness, name: &str, type_: &str) -> (String, String) {
    let status = status(harness, name);
    let held = status.conditions.iter().find(|held| held.type_ == type_);
    held.map_or_else(Default::default, |held| (held.status.clone(), held.reason.clone()))
}

fn is(status: &str, reason: &str) -> (String, String) {
    (status.into(), reason.into())
}

fn set(harness: &ControllerHarness, name: &str) -> Option<Value> {
    harness.server.get(SETS, NAMESPACE, &format!("{name}-sensor"))
}

fn service(harness: &ControllerHarness, name: &str) -> Option<Value> {
    harness.server.get(SERVICES, NAMESPACE, &format!("{name}-webhook"))
}

/// What the cluster does for a set: its pod is there and runs. The pod's uid.
fn run_pod(harness: &ControllerHarness, name: &str, owner: &str) -> PodIdentity {
    let container = json!({
        "name": "sensor", "image": "agentloop:test", "imageID": "", "ready": true, "restartCount": 0,
        "state": {"running": {"startedAt": "2026-11-22T14:00:00Z"}},
    });
    let pod = harness.server.put(
        "/pods",
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": format!("{name}-sensor-0"), "namespace": NAMESPACE, "labels": {"agentloop.dev/sensor": name},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": owner, "controller": true}],
            },
            "spec": {"containers": []},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [container]},
        }),
    );
    PodIdentity {
        namespace: NAMESPACE.into(),
        name: format!("{name}-sensor-0"),
        uid: pod["metadata"]["uid"].as_str().unwrap().into(),
        kind: PodKind::Sensor,
    }
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap().into()
}

/// From nothing to a pod that may speak.
async fn bring_up(harness: &ControllerHarness, name: &str, source: &str) -> (Sensor, PodIdentity) {
    let sensor = put(harness, name, source, &json!({}));
    harness.settle().await;
    let pod = run_pod(harness, name, &uid(&set(harness, name).expect("no set")));
    harness.settle().await;
    (sensor, pod)
}

fn directives_of(harness: &ControllerHarness, pod: &PodIdentity) -> SensorDirectives {
    harness.running().relay.attach(pod).unwrap().borrow().clone()
}

fn report(sensor: &Sensor, events: i64) -> SensorPodReport {
    SensorPodReport {
        report: SensorReport {
            uid: sensor.uid().unwrap(),
            generation: sensor.metadata.generation.unwrap(),
            totals: SensorTotals {
                events,
                ..SensorTotals::default()
            },
            last: (events > 0).then(|| LastEvent {
                at: Timestamp::from_millisecond(1_800_000_000_123 + events * 1000).unwrap(),
                id: format!("event-{events}"),
            }),
            consecutive_failures: 0,
            failure: None,
            next_attempt_at: None,
        },
        pending_deliveries: 0,
    }
}

fn say(harness: &ControllerHarness, pod: &PodIdentity, report: SensorPodReport) {
    harness.running().relay.report(pod, report).unwrap();
}

#[tokio::test(start_paused = true)]
async fn objects_of_a_webhook_are_created_once_and_deleted_when_it_becomes_a_schedule() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    put_secret(&harness, "hooks", "main");
    harness.server.take_writes();
    let sensor = put(&harness, "hook", "webhook", &json!({}));
    harness.settle().await;
    let made = harness.server.take_writes();
    for object in ["serviceaccounts", "services", "apps/statefulsets", "networkpolicies"] {
        let wrote = made.iter().filter(|write| write.ends_with(object)).count();
        assert_eq!(wrote, 1, "{object}: {made:?}");
    }
    let policy = || {
        harness
            .server
            .get("networking.k8s.io/networkpolicies", NAMESPACE, "hook-sensor")
    };
    for object in [
        set(&harness, "hook").unwrap(),
        service(&harness, "hook").unwrap(),
        policy().unwrap(),
    ] {
        let owner = &object["metadata"]["ownerReferences"][0];
        assert_eq!(owner["uid"], json!(sensor.uid().unwrap()));
        assert_eq!(owner["controller"], true);
    }
    // Neither pod of this test reports again: both are reported as silent, once.
    harness.pass(120).await;
    let mut silent = harness.server.take_writes();
    silent.sort();
    assert_eq!(
        silent,
        [
            "patch agentloop.dev/agents/status",
            "patch agentloop.dev/sensors/status"
        ]
    );
    harness.pass(60).await;
    assert_eq!(harness.server.take_writes(), [""; 0], "at rest");

    // Receivers alone change nothing in the cluster; a rule does.
    put(&harness, "hook", "webhook", &json!({"agentNames": ["coast", "other"]}));
    harness.settle().await;
    let writes = harness.server.take_writes();
    assert!(
        writes.iter().all(|write| write.ends_with("sensors/status")),
        "{writes:?}"
    );
    put(&harness, "hook", "webhook", &json!({"limits": {"perMinute": 7}}));
    harness.settle().await;
    assert!(harness.server.take_writes().contains(&"patch apps/statefulsets".into()));

    put(&harness, "hook", "schedule", &json!({}));
    harness.pass(6).await;
    assert_eq!(
        (set(&harness, "hook"), service(&harness, "hook"), policy()),
        (None, None, None)
    );
    assert_eq!(status(&harness, "hook").r#type.unwrap().as_ref(), "Schedule");
    put(&harness, "hook", "poll", &json!({}));
    harness.settle().await;
    assert!(set(&harness, "hook").is_some() && service(&harness, "hook").is_none());
}

#[tokio::test(start_paused = true)]
async fn deleted_objects_are_recreated_and_all_are_deleted_with_the_sensor() {
    let harness = ControllerHarness::start_with_sensors().await;
    put_secret(&harness, "hooks", "main");
    let (_, pod) = bring_up(&harness, "hook", "webhook").await;
    harness.server.delete(SERVICES, NAMESPACE, "hook-webhook");
    harness.settle().await;
    assert!(service(&harness, "hook").is_some());
    let before = uid(&set(&harness, "hook").unwrap());
    harness.server.delete(SETS, NAMESPACE, "hook-sensor");
    harness.settle().await;
    assert_ne!(uid(&set(&harness, "hook").unwrap()), before);
    harness.server.delete(SENSORS, NAMESPACE, "hook");
    harness.settle().await;
    assert_eq!((set(&harness, "hook"), service(&harness, "hook")), (None, None));
    let refusal = harness.running().relay.attach(&pod).unwrap_err();
    assert_eq!(refusal.code, RefusalCode::NotLeading);
}

fn policy(harness: &ControllerHarness, name: &str) -> Option<Value> {
    let name = format!("{name}-sensor");
    harness
        .server
        .get("networking.k8s.io/networkpolicies", NAMESPACE, &name)
}

/// A webhook that listens and is at rest.
async fn quiet_webhook() -> ControllerHarness {
    let harness = ControllerHarness::start_with_sensors().await;
    put_secret(&harness, "hooks", "main");
    bring_up(&harness, "hook", "webhook").await;
    // Its pod never reports, and is reported as silent.
    harness.pass(60).await;
    harness.server.take_writes();
    harness
}

/// A user changes an object of the webhook.
async fn change(harness: &ControllerHarness, resource: &str, name: &str, change: &Value) {
    let mut object = change.clone();
    object["metadata"]["name"] = name.into();
    object["metadata"]["namespace"] = NAMESPACE.into();
    harness.server.put(resource, object);
    harness.settle().await;
}

const POLICIES: &str = "networking.k8s.io/networkpolicies";

#[tokio::test(start_paused = true)]
async fn foreign_changes_of_owned_fields_are_reverted_and_additional_fields_are_kept() {
    let harness = quiet_webhook().await;
    let own = |harness: &ControllerHarness| {
        let objects = [set(harness, "hook"), service(harness, "hook"), policy(harness, "hook")];
        objects.map(|object| object.unwrap()["spec"].clone())
    };
    let before = own(&harness);
    change(&harness, SETS, "hook-sensor", &json!({"spec": {"replicas": 0}})).await;
    change(&harness, POLICIES, "hook-sensor", &json!({"spec": {"ingress": [{}]}})).await;
    let elsewhere = json!({"spec": {"selector": {"agentloop.dev/sensor": "another"}}});
    change(&harness, SERVICES, "hook-webhook", &elsewhere).await;
    assert_eq!(own(&harness), before);
    let mended = [
        "patch apps/statefulsets",
        "patch networking.k8s.io/networkpolicies",
        "patch /services",
    ];
    assert_eq!(harness.server.take_writes(), mended);
    // A restart by hand, the mark of another tool, a status: none of it is what we applied.
    let restart =
        json!({"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}});
    change(&harness, SETS, "hook-sensor", &restart).await;
    change(
        &harness,
        SERVICES,
        "hook-webhook",
        &json!({"metadata": {"labels": {"team": "blue"}}}),
    )
    .await;
    change(&harness, SETS, "hook-sensor", &json!({"status": {"replicas": 1}})).await;
    harness.pass(60).await;
    assert_eq!(harness.server.take_writes(), [""; 0], "at rest");
}

#[tokio::test(start_paused = true)]
async fn repeated_foreign_changes_are_reverted_every_half_a_minute() {
    let harness = quiet_webhook().await;
    for replicas in 0..60 {
        change(
            &harness,
            SETS,
            "hook-sensor",
            &json!({"spec": {"replicas": replicas * 2}}),
        )
        .await;
        harness.pass(1).await;
    }
    let writes = harness.server.take_writes().len();
    assert!((2..=3).contains(&writes), "{writes}");
    harness.pass(31).await;
    assert_eq!(set(&harness, "hook").unwrap()["spec"]["replicas"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_mutation_by_a_webhook_during_the_apply_is_no_change() {
    let mut harness = ControllerHarness::start_with_sensors().await;
    harness.server.mutate(
        SETS,
        json!({"metadata": {"labels": {"mesh": "on"}}, "spec": {"replicas": 2}}),
    );
    put_secret(&harness, "hooks", "main");
    bring_up(&harness, "hook", "webhook").await;
    harness.pass(60).await;
    harness.server.take_writes();
    harness.pass(120).await;
    assert_eq!(harness.server.take_writes(), [""; 0], "at rest");
    // A change by a user is one, and is corrected once.
    change(&harness, SETS, "hook-sensor", &json!({"spec": {"replicas": 0}})).await;
    harness.pass(60).await;
    assert_eq!(harness.server.take_writes(), ["patch apps/statefulsets"]);
    assert_eq!(set(&harness, "hook").unwrap()["spec"]["replicas"], 2);
    harness.shut_down().await;
    harness.boot_with_sensors().await;
    harness.pass(60).await;
    assert_eq!(sets_written(&harness), 0);
}

#[tokio::test(start_paused = true)]
async fn changes_made_without_a_leader_are_reverted_by_the_next_leader() {
    let mut harness = quiet_webhook().await;
    harness.shut_down().await;
    change(&harness, SETS, "hook-sensor", &json!({"spec": {"replicas": 0}})).await;
    harness.server.take_writes();
    harness.boot_with_sensors().await;
    assert_eq!(
        (
            sets_written(&harness),
            set(&harness, "hook").unwrap()["spec"]["replicas"].clone()
        ),
        (1, json!(1))
    );
    harness.pass(60).await;
    assert_eq!(sets_written(&harness), 0);
}

#[tokio::test(start_paused = true)]
async fn an_absent_secret_is_a_condition_and_no_pod_is_created_until_it_exists() {
    let harness = ControllerHarness::start_with_sensors().await;
    put(&harness, "hook", "webhook", &json!({}));
    put(&harness, "page", "closed", &json!({}));
    harness.settle().await;
    for (name, field) in [
        ("hook", "spec.source.webhook.secretKeyRef: Secret hooks does not exist"),
        (
            "page",
            "spec.source.poll.http.headersSecretRef: Secret keys does not exist",
        ),
    ] {
        assert_eq!(says(&harness, name, "Accepted"), is("False", "SecretNotFound"));
        assert_eq!(says(&harness, name, "Stalled"), is("True", "SecretNotFound"));
        let status = status(&harness, name);
        let accepted = status.conditions.iter().find(|held| held.type_ == "Accepted").unwrap();
        assert!(accepted.message.starts_with(field), "{}", accepted.message);
        assert_eq!((set(&harness, name), service(&harness, name)), (None, None));
    }
    put_secret(&harness, "hooks", "another");
    harness.pass(31).await;
    let message = &status(&harness, "hook").conditions[0].message;
    assert!(message.contains("has no key main"), "{message}");
    assert_eq!(set(&harness, "hook"), None);
    put_secret(&harness, "hooks", "main");
    put_secret(&harness, "keys", "Authorization");
    harness.pass(31).await;
    for name in ["hook", "page"] {
        assert!(set(&harness, name).is_some(), "{name}");
        assert_eq!(says(&harness, name, "Accepted"), is("True", "Accepted"));
        // Nothing starts a pod here, so none has spoken for half a minute.
        assert_eq!(says(&harness, name, "Ready"), is("False", "Silent"));
        assert_eq!(says(&harness, name, "Stalled"), is("", ""));
    }
}

#[tokio::test(start_paused = true)]
async fn only_the_pod_of_the_set_is_authenticated_and_it_receives_the_list_of_receivers() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    let (sensor, pod) = bring_up(&harness, "page", "poll").await;
    let directives = directives_of(&harness, &pod);
    let terms = directives.terms.unwrap();
    assert_eq!((terms.uid, terms.generation), (sensor.uid().unwrap(), 1));
    let receivers = directives.receivers.unwrap();
    assert_eq!((receivers.len(), receivers[0].name.as_str()), (1, "coast"));
    assert_eq!(receivers[0].uid, harness.agent("coast").uid().unwrap());
    // The worker does not run it as well.
    let (_, level) = harness
        .running()
        .loops
        .attach(&agent_key("coast"), &harness.live_pod("coast"), (harness.clock)())
        .unwrap();
    assert_eq!(level.borrow().sensors, Some(Vec::new()));

    // Another Agent comes; one goes.
    harness.bring_up("other", &json!({})).await;
    put(&harness, "page", "poll", &json!({"agentNames": ["coast", "other"]}));
    harness.settle().await;
    assert_eq!(directives_of(&harness, &pod).receivers.unwrap().len(), 2);
    harness.server.delete("agentloop.dev/agents", NAMESPACE, "coast");
    harness.settle().await;
    assert_eq!(directives_of(&harness, &pod).receivers.unwrap()[0].name, "other");

    // A pod with the label and the name that is not of the set, as a user could make it.
    harness.server.delete("/pods", NAMESPACE, "page-sensor-0");
    let forged = run_pod(&harness, "page", "uid-of-nobody");
    harness.settle().await;
    assert!(harness.running().relay.attach(&forged).is_err());
}

#[tokio::test(start_paused = true)]
async fn the_pod_of_a_suspended_sensor_continues_its_deliveries_and_accepts_no_events() {
    let harness = ControllerHarness::start_with_sensors().await;
    let (_, pod) = bring_up(&harness, "page", "poll").await;
    put(&harness, "page", "poll", &json!({"suspend": true}));
    harness.settle().await;
    assert!(directives_of(&harness, &pod).terms.unwrap().spec.suspend);
    assert!(set(&harness, "page").is_some());
    assert_eq!(says(&harness, "page", "Connected"), is("False", "SuspendedBySpec"));
    put(&harness, "page", "poll", &json!({"suspend": false}));
    harness.settle().await;
    assert!(!directives_of(&harness, &pod).terms.unwrap().spec.suspend);
}

#[tokio::test(start_paused = true)]
async fn a_rule_that_cannot_be_used_stops_the_ear_and_not_the_deliveries() {
    let harness = ControllerHarness::start_with_sensors().await;
    let (_, pod) = bring_up(&harness, "page", "poll").await;
    let before = set(&harness, "page").unwrap();
    put(
        &harness,
        "page",
        "poll",
        &json!({"updates": [{"field": "a", "value": "payload.(("}], "task": {"prompt": "payload.(("}}),
    );
    harness.settle().await;
    assert_eq!(says(&harness, "page", "Accepted"), is("False", "InvalidSpec"));
    let terms = directives_of(&harness, &pod).terms.unwrap();
    assert!(terms.spec.suspend && terms.spec.updates.is_empty() && terms.spec.task.is_none());
    assert_eq!(
        set(&harness, "page").unwrap(),
        before,
        "the pod is not replaced by one that could not start"
    );
    put(
        &harness,
        "page",
        "poll",
        &json!({"updates": [{"field": "a", "value": "payload"}], "task": null}),
    );
    harness.settle().await;
    let terms = directives_of(&harness, &pod).terms.unwrap();
    assert!(!terms.spec.suspend && terms.spec.updates.len() == 1);
}

#[tokio::test(start_paused = true)]
async fn an_object_of_another_owner_is_reported_and_not_changed() {
    let harness = ControllerHarness::start_with_sensors().await;
    let theirs = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "page-sensor", "namespace": NAMESPACE},
        "spec": {"replicas": 3},
    });
    let theirs = harness.server.put(SETS, theirs);
    put(&harness, "page", "poll", &json!({}));
    harness.settle().await;
    assert_eq!(says(&harness, "page", "Connected"), is("False", "NameTaken"));
    assert_eq!(says(&harness, "page", "Stalled"), is("True", "NameTaken"));
    assert_eq!(set(&harness, "page").unwrap(), theirs);
    harness.server.delete(SETS, NAMESPACE, "page-sensor");
    harness.pass(31).await;
    assert!(set(&harness, "page").is_some_and(|ours| ours["spec"]["replicas"] == 1));
    assert_eq!(says(&harness, "page", "Connected"), is("Unknown", "Starting"));
}

fn image(harness: &ControllerHarness, name: &str) -> String {
    let set = set(harness, name).unwrap();
    set["spec"]["template"]["spec"]["containers"][0]["image"]
        .as_str()
        .unwrap()
        .into()
}

/// How many of these have the image of the present controller.
fn renewed(harness: &ControllerHarness, names: &[&str]) -> usize {
    let new = |name: &&&str| image(harness, name) == harness.settings.image;
    names.iter().filter(new).count()
}

/// The next controller, of this image.
async fn upgrade(harness: &mut ControllerHarness, image: &str) {
    harness.shut_down().await;
    harness.settings.image = image.into();
    harness.server.take_writes();
    harness.boot_with_sensors().await;
}

fn sets_written(harness: &ControllerHarness) -> usize {
    let writes = harness.server.take_writes();
    writes.iter().filter(|write| write.ends_with(SETS)).count()
}

#[tokio::test(start_paused = true)]
async fn a_new_image_replaces_one_pod_after_the_other_and_an_edit_includes_it() {
    let mut harness = ControllerHarness::start_with_sensors().await;
    let names = ["s-0", "s-1", "s-2", "s-3", "s-4", "s-5"];
    for name in names {
        bring_up(&harness, name, "poll").await;
    }
    put(&harness, "down", "poll", &json!({}));
    harness.settle().await;
    let edit = json!({"limits": {"perMinute": 7}});
    put(&harness, "s-4", "poll", &json!({"agentNames": ["other"]}));
    harness.settle().await;
    harness.shut_down().await;
    put(&harness, "s-5", "poll", &edit);
    harness.settings.image = "agentloop:next".into();
    harness.server.take_writes();
    harness.boot_with_sensors().await;
    assert_eq!(
        (sets_written(&harness), renewed(&harness, &["s-5"])),
        (1, 1),
        "the edit"
    );
    harness.pass(55).await;
    assert_eq!(
        sets_written(&harness),
        0,
        "the rollout of the controller may not be over"
    );
    harness.pass(5).await;
    assert_eq!(
        (sets_written(&harness), renewed(&harness, &["down"])),
        (2, 1),
        "one, and what does not run anyway"
    );
    for all in 3..=4 {
        harness.pass(5).await;
        assert_eq!((sets_written(&harness), renewed(&harness, &names)), (1, all));
    }
    let waiting = |name: &&str| image(&harness, name) != harness.settings.image;
    put(&harness, names.into_iter().find(waiting).unwrap(), "poll", &edit);
    harness.settle().await;
    assert_eq!(
        (sets_written(&harness), renewed(&harness, &names)),
        (1, 5),
        "an edit goes at once"
    );
    harness.pass(10).await;
    assert_eq!((sets_written(&harness), renewed(&harness, &names)), (1, 6));
    harness.pass(60).await;
    assert_eq!(sets_written(&harness), 0, "at rest");
}

#[tokio::test(start_paused = true)]
async fn old_and_new_controllers_that_lead_in_turn_replace_no_pod_back_and_forth() {
    let mut harness = ControllerHarness::start_with_sensors().await;
    for name in ["a", "b"] {
        bring_up(&harness, name, "poll").await;
    }
    let mut written = 0;
    for _ in 0..3 {
        for image in ["agentloop:next", "agentloop:test"] {
            upgrade(&mut harness, image).await;
            harness.pass(45).await;
            written += sets_written(&harness);
        }
    }
    assert_eq!(written, 0);
    upgrade(&mut harness, "agentloop:next").await;
    harness.pass(63).await;
    assert_eq!(renewed(&harness, &["a", "b"]), 1);
    // The next one continues with what is left.
    upgrade(&mut harness, "agentloop:next").await;
    harness.pass(63).await;
    assert_eq!((sets_written(&harness), renewed(&harness, &["a", "b"])), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn five_hundred_idle_pods_cause_no_writes_and_a_busy_one_causes_one_in_fifteen_seconds() {
    let mut harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    let names: Vec<String> = (0..500).map(|number| format!("s-{number}")).collect();
    let sensors: Vec<Sensor> = names
        .iter()
        .map(|name| put(&harness, name, "poll", &json!({})))
        .collect();
    harness.pass(30).await;
    let run = |name: &String| run_pod(&harness, name, &uid(&set(&harness, name).unwrap()));
    let pods: Vec<PodIdentity> = names.iter().map(run).collect();
    harness.pass(2).await;
    let all_say = |harness: &ControllerHarness| {
        for (sensor, pod) in sensors.iter().zip(&pods) {
            say(harness, pod, report(sensor, 0));
        }
    };
    for _ in 0..4 {
        all_say(&harness);
        harness.pass(15).await;
    }
    assert_eq!(says(&harness, "s-499", "Ready"), is("True", "Listening"));
    harness.server.take_calls();
    for _ in 0..20 {
        all_say(&harness);
        harness.pass(15).await;
    }
    assert_eq!(harness.server.take_writes(), [""; 0]);

    for events in 1..=60 {
        say(&harness, &pods[7], report(&sensors[7], events));
        if events % 15 == 0 {
            let others = sensors.iter().zip(&pods).filter(|(_, pod)| **pod != pods[7]);
            others.for_each(|(sensor, pod)| say(&harness, pod, report(sensor, 0)));
        }
        harness.pass(1).await;
    }
    harness.pass(15).await;
    let writes = harness.server.take_writes();
    assert!((4..=6).contains(&writes.len()), "{writes:?}");
    assert_eq!(status(&harness, "s-7").totals.events, 60);

    harness.shut_down().await;
    harness.server.take_calls();
    harness.boot_with_sensors().await;
    harness.pass(10).await;
    for _ in 0..7 {
        all_say_again(&harness, &sensors, &pods);
        harness.pass(15).await;
    }
    let writes = harness.server.take_writes();
    assert!(
        !writes
            .iter()
            .any(|write| write.contains("sensors") || write.contains("sets")),
        "{writes:?}"
    );
    assert_eq!(status(&harness, "s-7").totals.events, 60, "counted once");
}

fn all_say_again(harness: &ControllerHarness, sensors: &[Sensor], pods: &[PodIdentity]) {
    for (number, (sensor, pod)) in sensors.iter().zip(pods).enumerate() {
        say(harness, pod, report(sensor, if number == 7 { 60 } else { 0 }));
    }
}

#[tokio::test(start_paused = true)]
async fn the_report_of_its_pod_and_the_reason_for_a_failing_pod_reach_the_status() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    let (sensor, pod) = bring_up(&harness, "page", "poll").await;
    say(&harness, &pod, report(&sensor, 3));
    harness.pass(16).await;
    let written = status(&harness, "page");
    assert_eq!(says(&harness, "page", "Ready"), is("True", "Listening"));
    assert_eq!((written.totals.events, written.r#type.unwrap().as_ref()), (3, "Poll"));
    assert_eq!(written.last_event_time.unwrap().as_millisecond(), 1_800_000_003_000);
    assert_eq!((written.pending_deliveries, written.url), (Some(0), None));
    assert_eq!(
        harness.condition("coast", "SensorsHealthy"),
        Some(is("True", "Healthy"))
    );
    let mut failing = report(&sensor, 3);
    failing.pending_deliveries = 2;
    failing.report.failure = Some("the page answers 503".into());
    failing.report.consecutive_failures = 2;
    say(&harness, &pod, failing);
    harness.pass(6).await;
    assert_eq!(says(&harness, "page", "Connected"), is("False", "SensorFailing"));
    assert_eq!(says(&harness, "page", "Reconciling"), is("True", "SensorFailing"));
    let written = status(&harness, "page");
    assert_eq!((written.consecutive_failures, written.pending_deliveries), (2, Some(2)));
    assert_eq!(
        harness.condition("coast", "SensorsHealthy"),
        Some(is("False", "SensorFailing"))
    );
    assert_eq!(harness.ready("coast").0, "True", "the loop goes on");
    let crash = json!({
        "metadata": {"name": "page-sensor-0", "namespace": NAMESPACE},
        "status": {"conditions": [], "containerStatuses": [{
            "name": "sensor", "image": "i", "imageID": "", "ready": false, "restartCount": 4,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        }]},
    });
    harness.server.put("/pods", crash);
    harness.pass(6).await;
    assert_eq!(says(&harness, "page", "Connected"), is("False", "CrashLooping"));
    say(&harness, &pod, report(&sensor, 4));
    let well = json!({
        "metadata": {"name": "page-sensor-0", "namespace": NAMESPACE},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": []},
    });
    harness.server.put("/pods", well);
    harness.pass(6).await;
    assert_eq!(says(&harness, "page", "Ready"), is("True", "Listening"));
    harness.pass(6).await;
    assert_eq!(
        harness.condition("coast", "SensorsHealthy"),
        Some(is("True", "Healthy"))
    );
    let name = NamespacedName::new(NAMESPACE, "page");
    assert!(harness.running().relay.session(&name).unwrap().last_report.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_page_that_stays_as_it_is_costs_no_write_for_five_minutes() {
    let harness = ControllerHarness::start_with_sensors().await;
    let (sensor, pod) = bring_up(&harness, "page", "poll").await;
    say(&harness, &pod, report(&sensor, 1));
    harness.pass(30).await;
    harness.server.take_writes();
    let look = |looks: i64| {
        let mut again = report(&sensor, 1);
        again.report.totals.filtered = looks;
        say(&harness, &pod, again);
    };
    for looks in 1..=50 {
        look(looks);
        harness.pass(5).await;
    }
    assert_eq!(harness.server.take_writes(), [""; 0], "250 s");
    for looks in 51..=62 {
        look(looks);
        harness.pass(5).await;
    }
    assert_eq!(harness.server.take_writes().len(), 1);
    assert!(status(&harness, "page").totals.filtered >= 50);
}

#[tokio::test(start_paused = true)]
async fn a_webhook_reports_its_url_and_an_ephemeral_outbox_is_not_durable() {
    let harness = ControllerHarness::start_with_sensors().await;
    put_secret(&harness, "hooks", "main");
    bring_up(&harness, "hook", "webhook").await;
    let url = status(&harness, "hook").url;
    assert_eq!(url.as_deref(), Some("http://hook-webhook.team-a.svc/"));
    assert_eq!(says(&harness, "hook", "Durable"), is("True", "Durable"));
    put(&harness, "lost", "poll", &json!({"storage": {"ephemeral": true}}));
    harness.settle().await;
    assert_eq!(says(&harness, "lost", "Durable"), is("False", "EphemeralOutbox"));
    harness
        .bring_up("coast", &json!({"storage": {"ephemeral": true}}))
        .await;
    harness.pass(6).await;
    assert_eq!(says(&harness, "hook", "Durable"), is("False", "EphemeralReceiver"));
}

#[tokio::test]
async fn a_real_cluster_accepts_the_objects_and_their_edits_and_deletes_them_all() {
    Box::pin(on_a_real_server(real)).await;
}

async fn real(client: &Client, namespace: &str, stop: &CancellationToken) {
    let (loops, _changed) = PodSessions::new();
    let (sensors, said) = sensors_of(client, namespace, &Arc::new(loops));
    sensors.agents_listed(Some(namespace), &[].into());
    tokio::spawn(sensors.clone().run(said, stop.clone()));
    let api: Api<Sensor> = Api::namespaced(client.clone(), namespace);
    let sets: Api<StatefulSet> = Api::namespaced(client.clone(), namespace);
    let services: Api<Service> = Api::namespaced(client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let object = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": "hook", "namespace": namespace},
        "spec": {"agentNames": ["coast"], "source": source_of("webhook")},
    });
    let made: Sensor = serde_json::from_value(object).unwrap();
    api.create(&PostParams::default(), &made).await.unwrap();
    let reason = async |type_: &str, reason: &str| {
        let status = api.get("hook").await.unwrap().status.unwrap_or_default();
        let held = status.conditions.into_iter().find(|held| held.type_ == type_)?;
        (held.reason == reason).then_some(held.message)
    };
    until("the Secret is missed", async || {
        reason("Accepted", "SecretNotFound").await
    })
    .await;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let secret = json!({"metadata": {"name": "hooks"}, "stringData": {"main": "s3cr3t"}});
    let secret: Secret = serde_json::from_value(secret).unwrap();
    secrets.create(&PostParams::default(), &secret).await.unwrap();
    // The cluster makes the pod: it takes what we made, and nothing of it is against the rules of `restricted`.
    let pod = until("the pod", async || pods.get_opt("hook-sensor-0").await.unwrap()).await;
    assert_eq!(
        services.get("hook-webhook").await.unwrap().spec.unwrap().ports.unwrap()[0].port,
        80
    );
    let before = sets.get("hook-sensor").await.unwrap();
    until("nothing more is accepted", async || {
        reason("Accepted", "Accepted").await
    })
    .await;

    let edit = json!({"spec": {"limits": {"perMinute": 7}}});
    let edited = api
        .patch("hook", &PatchParams::default(), &Patch::Merge(&edit))
        .await
        .unwrap();
    assert_eq!(edited.metadata.generation, Some(2));
    until("another pod", async || {
        let now = pods.get_opt("hook-sensor-0").await.unwrap()?;
        (now.uid() != pod.uid() && now.metadata.deletion_timestamp.is_none()).then_some(())
    })
    .await;
    let after = sets.get("hook-sensor").await.unwrap();
    assert_eq!(after.uid(), before.uid(), "the same set");

    // Receivers alone write nothing in the cluster.
    let edit = json!({"spec": {"agentNames": ["coast", "other"]}});
    api.patch("hook", &PatchParams::default(), &Patch::Merge(&edit))
        .await
        .unwrap();
    until("the edit is looked at", async || {
        let status = api.get("hook").await.unwrap().status?;
        (status.observed_generation == Some(3)).then_some(())
    })
    .await;
    let spec = |set: &StatefulSet| set.metadata.generation;
    assert_eq!(spec(&sets.get("hook-sensor").await.unwrap()), spec(&after));

    let edit = json!({"spec": {"source": {"webhook": null, "schedule": {"cron": "0 8 * * *"}}}});
    api.patch("hook", &PatchParams::default(), &Patch::Merge(&edit))
        .await
        .unwrap();
    until("all is taken away", async || {
        let gone = sets.get_opt("hook-sensor").await.unwrap().is_none()
            && services.get_opt("hook-webhook").await.unwrap().is_none();
        gone.then_some(())
    })
    .await;
    api.delete("hook", &DeleteParams::default()).await.unwrap();
}
