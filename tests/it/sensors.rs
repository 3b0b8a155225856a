//! The reconciler of Sensors as a whole: against the in-process API server in paused time, and against a real one.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use agentloop::api::sensor::{SensorStatus, SensorTotals};
use agentloop::api::status::{LoopState, LoopUsage};
use agentloop::api::{Agent, NamespacedName, Sensor, crd};
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::pod_sessions::{LivePod, PodSessions};
use agentloop::controller::runtime::{EventSink, ReconcileMetrics};
use agentloop::controller::sensor::pod::SensorPodSettings;
use agentloop::controller::sensor::{SensorRegistry, SensorSetup};
use agentloop::link::messages::{Directives, LoopReport, LoopTotals};
use agentloop::link::sensor_messages::{LastEvent, SensorReport, SensorTerms};
use agentloop::telemetry::metrics::Metrics;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Config, ResourceExt};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::clusters::control_plane;
use crate::support::harness::{ControllerHarness, NAMESPACE, agent_key, in_state};

const SENSORS: &str = "agentloop.dev/sensors";
/// The other end of a relay.
type Said = tokio::sync::mpsc::UnboundedReceiver<agentloop::api::NamespacedName>;
const WRITE: &str = "patch agentloop.dev/sensors/status";

fn clock(name: &str, spec: &Value) -> Value {
    let mut whole = json!({"agentNames": ["coast"], "source": {"schedule": {"cron": "*/5 * * * *"}}});
    for (field, value) in spec.as_object().unwrap() {
        whole[field] = value.clone();
    }
    json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
        "metadata": {"name": name, "namespace": NAMESPACE}, "spec": whole,
    })
}

fn put(harness: &ControllerHarness, name: &str, spec: &Value) -> Sensor {
    serde_json::from_value(harness.server.put(SENSORS, clock(name, spec))).unwrap()
}

fn status(harness: &ControllerHarness, name: &str) -> SensorStatus {
    let sensor: Sensor = serde_json::from_value(harness.server.get(SENSORS, NAMESPACE, name).unwrap()).unwrap();
    sensor.status.unwrap_or_default()
}

/// Status and reason of a condition.
fn says(status: &SensorStatus, type_: &str) -> (String, String) {
    let held = status.conditions.iter().find(|held| held.type_ == type_);
    held.map_or_else(Default::default, |held| (held.status.clone(), held.reason.clone()))
}

fn is(status: &str, reason: &str) -> (String, String) {
    (status.into(), reason.into())
}

/// What the pod of an Agent is to run.
fn terms_of(harness: &ControllerHarness, agent: &str) -> Vec<SensorTerms> {
    let loops = &harness.running().loops;
    let (_, directives) = loops
        .attach(&agent_key(agent), &harness.live_pod(agent), (harness.clock)())
        .unwrap();
    let directives = directives.borrow().clone();
    directives.sensors.expect("not decided")
}

fn names(terms: &[SensorTerms]) -> Vec<&str> {
    terms.iter().map(|terms| terms.name.as_str()).collect()
}

fn report(sensor: &Sensor, events: i64) -> SensorReport {
    SensorReport {
        uid: sensor.uid().unwrap(),
        generation: sensor.metadata.generation.unwrap(),
        totals: SensorTotals {
            events,
            ..SensorTotals::default()
        },
        last: (events > 0).then(|| LastEvent {
            at: Timestamp::from_second(1_800_000_000 + events).unwrap(),
            id: format!("tick-{events}"),
        }),
        consecutive_failures: 0,
        failure: None,
        next_attempt_at: None,
    }
}

/// What the pod of an Agent says of its Sensors.
fn say(harness: &ControllerHarness, agent: &str, sensors: Vec<SensorReport>) {
    let report = LoopReport {
        sensors,
        ..in_state(LoopState::Running)
    };
    harness.report(agent, report, LoopUsage::default());
}

#[tokio::test(start_paused = true)]
async fn a_schedule_reaches_its_receivers_pod_and_what_it_does_reaches_its_status() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    assert_eq!(terms_of(&harness, "coast"), [], "decided: none");
    let pod = harness.live_pod("coast");
    let sensor = put(&harness, "clock", &json!({}));
    harness.settle().await;
    let terms = terms_of(&harness, "coast");
    assert_eq!(names(&terms), ["clock"]);
    assert_eq!(terms[0].uid, sensor.uid().unwrap());
    assert_eq!(says(&status(&harness, "clock"), "Connected"), is("Unknown", "Starting"));
    let raw = harness.server.get(SENSORS, NAMESPACE, "clock").unwrap();
    assert_eq!(
        (&raw["status"]["events"], &raw["status"]["errors"]),
        (&json!(0), &json!(0))
    );

    say(&harness, "coast", vec![report(&sensor, 0)]);
    harness.settle().await;
    assert_eq!(says(&status(&harness, "clock"), "Connected"), is("True", "Listening"));
    assert_eq!(says(&status(&harness, "clock"), "Ready"), is("True", "Listening"));
    say(&harness, "coast", vec![report(&sensor, 2)]);
    harness.pass(16).await;
    let written = status(&harness, "clock");
    assert_eq!(
        (written.totals.events, written.last_delivery_id.as_deref()),
        (2, Some("tick-2"))
    );

    // A changed spec goes to the pod that is there.
    put(&harness, "clock", &json!({"suspend": true}));
    harness.settle().await;
    assert!(terms_of(&harness, "coast")[0].spec.suspend);
    assert_eq!(
        says(&status(&harness, "clock"), "Suspended"),
        is("True", "SuspendedBySpec")
    );
    harness.server.delete(SENSORS, NAMESPACE, "clock");
    harness.settle().await;
    assert_eq!(terms_of(&harness, "coast"), []);
    assert_eq!(harness.live_pod("coast"), pod, "all of this in one pod");
}

#[tokio::test(start_paused = true)]
async fn an_invalid_sensor_names_field_and_fix_and_listens_once_it_is_corrected() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    put(
        &harness,
        "clock",
        &json!({"updates": [{"field": "hour", "value": "payload.(("}]}),
    );
    harness.settle().await;
    let refused = status(&harness, "clock");
    assert_eq!(says(&refused, "Accepted"), is("False", "InvalidSpec"));
    assert_eq!(says(&refused, "Stalled"), is("True", "InvalidSpec"));
    let message = &refused
        .conditions
        .iter()
        .find(|held| held.type_ == "Accepted")
        .unwrap()
        .message;
    assert!(message.starts_with("spec.updates[0].value"), "{message}");
    assert!(terms_of(&harness, "coast")[0].spec.suspend, "it does not listen");
    put(
        &harness,
        "clock",
        &json!({"updates": [{"field": "hour", "value": "payload.scheduledTime"}]}),
    );
    harness.settle().await;
    assert_eq!(says(&status(&harness, "clock"), "Accepted"), is("True", "Accepted"));
    assert_eq!(says(&status(&harness, "clock"), "Stalled"), is("", ""));
    assert!(!terms_of(&harness, "coast")[0].spec.suspend);
}

#[tokio::test(start_paused = true)]
async fn an_agent_created_later_receives_and_its_failures_are_also_in_its_own_condition() {
    let harness = ControllerHarness::start_with_sensors().await;
    let sensor = put(&harness, "clock", &json!({}));
    harness.settle().await;
    assert_eq!(says(&status(&harness, "clock"), "Ready"), is("True", "NoReceiver"));
    harness.bring_up("coast", &json!({})).await;
    assert_eq!(names(&terms_of(&harness, "coast")), ["clock"]);
    let mut failing = report(&sensor, 0);
    failing.failure = Some("spec.updates[0].value names a field that is not in what came".into());
    say(&harness, "coast", vec![failing]);
    harness.pass(6).await;
    assert_eq!(
        says(&status(&harness, "clock"), "Connected"),
        is("False", "SensorFailing")
    );
    assert_eq!(
        harness.condition("coast", "SensorsHealthy"),
        Some(is("False", "SensorFailing"))
    );
    assert_eq!(harness.ready("coast").0, "True", "the loop goes on");
    say(&harness, "coast", vec![report(&sensor, 1)]);
    harness.pass(16).await;
    assert_eq!(says(&status(&harness, "clock"), "Ready"), is("True", "Listening"));
    assert_eq!(
        harness.condition("coast", "SensorsHealthy"),
        Some(is("True", "Healthy"))
    );
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_the_controller_writes_nothing_and_counts_nothing_twice() {
    let mut harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    let sensor = put(&harness, "clock", &json!({}));
    harness.settle().await;
    say(&harness, "coast", vec![report(&sensor, 3)]);
    harness.pass(60).await;
    assert_eq!(status(&harness, "clock").totals.events, 3);
    harness.shut_down().await;
    harness.server.take_writes();
    harness.boot_with_sensors().await;
    harness.pass(60).await;
    say(&harness, "coast", vec![report(&sensor, 3)]);
    harness.pass(60).await;
    let writes = harness.server.take_writes();
    assert!(!writes.contains(&WRITE.to_owned()), "{writes:?}");
    say(&harness, "coast", vec![report(&sensor, 4)]);
    harness.pass(60).await;
    assert_eq!(status(&harness, "clock").totals.events, 4);
}

#[tokio::test(start_paused = true)]
async fn five_hundred_sensors_at_rest_write_nothing_and_busy_ones_once_in_fifteen_seconds() {
    let harness = ControllerHarness::start_with_sensors().await;
    harness.bring_up("coast", &json!({})).await;
    let sensors: Vec<Sensor> = (0..500)
        .map(|number| put(&harness, &format!("s-{number}"), &json!({})))
        .collect();
    harness.pass(30).await;
    say(
        &harness,
        "coast",
        sensors.iter().map(|sensor| report(sensor, 0)).collect(),
    );
    harness.pass(60).await;
    harness.server.take_calls();
    for _ in 0..40 {
        say(
            &harness,
            "coast",
            sensors.iter().map(|sensor| report(sensor, 0)).collect(),
        );
        harness.pass(15).await;
    }
    assert_eq!(harness.server.take_writes(), [""; 0]);

    for events in 1..=60 {
        say(&harness, "coast", vec![report(&sensors[7], events)]);
        harness.pass(1).await;
    }
    harness.pass(15).await;
    let writes = harness.server.take_writes();
    assert!((4..=6).contains(&writes.len()), "{writes:?}");
    assert!(writes.iter().all(|write| write == WRITE), "{writes:?}");
    assert_eq!(status(&harness, "s-7").totals.events, 60);
}

pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..200 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("not within 20 s: {what}");
}

#[tokio::test]
async fn a_real_api_server_keeps_what_a_sensor_did() {
    on_a_real_server(real).await;
}

/// Runs a test in a namespace of its own of a real API server that has the definitions.
pub async fn on_a_real_server(test: impl AsyncFnOnce(&Client, &str, &CancellationToken)) {
    let Some(kubeconfig) = control_plane() else { return };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .unwrap();
    let client = Client::try_from(config).unwrap();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in crd::all() {
        let (name, params) = (definition.name_any(), PatchParams::apply("agentloop-tests").force());
        definitions
            .patch(&name, &params, &Patch::Apply(&definition))
            .await
            .unwrap();
        let established = await_condition(definitions.clone(), &name, conditions::is_crd_established());
        established.await.unwrap();
    }
    let mut object = Namespace::default();
    object.metadata.generate_name = Some("sensor-".into());
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = namespaces
        .create(&PostParams::default(), &object)
        .await
        .unwrap()
        .name_any();
    let stop = CancellationToken::new();
    test(&client, &namespace, &stop).await;
    stop.cancel();
    namespaces
        .delete(&namespace, &DeleteParams::background())
        .await
        .unwrap();
}

/// The Sensors of a namespace, and what their pods say.
pub fn sensors_of(client: &Client, namespace: &str, loops: &Arc<PodSessions>) -> (Arc<SensorRegistry>, Said) {
    let (relay, said) = DeliveryRelay::new(Duration::from_secs(5));
    let sensors = Arc::new(SensorRegistry::new(SensorSetup {
        client: client.clone(),
        watch_namespaces: vec![namespace.into()],
        workers: 4,
        loops: loops.clone(),
        relay: Arc::new(relay),
        pods: SensorPodSettings {
            image: "agentloop:test".into(),
            ..SensorPodSettings::default()
        },
        ca_bundle: tokio::sync::watch::channel("CA".to_owned()).1,
        published: tokio::sync::watch::Sender::default(),
        events: EventSink::new().0,
        reconciles: ReconcileMetrics::new(Arc::new(Metrics::new().unwrap()), "sensor", 4),
        clock: Arc::new(Timestamp::now),
    }));
    (sensors, said)
}

async fn real(client: &Client, namespace: &str, stop: &CancellationToken) {
    let (loops, _changed) = PodSessions::new();
    let loops = Arc::new(loops);
    let (sensors, said) = sensors_of(client, namespace, &loops);
    let agent: Agent = serde_json::from_value(json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"name": "coast", "namespace": namespace, "uid": "u"},
        "spec": {"model": {"api": "Scripted", "name": "m"}, "storage": {"ephemeral": true}},
    }))
    .unwrap();
    let key = NamespacedName::new(namespace, "coast");
    let pod = LivePod {
        uid: "p".into(),
        epoch: 1,
    };
    sensors.agent_seen(&agent);
    sensors.agents_listed(Some(namespace), &[key.clone()].into());
    loops.expect_pod((&key, "uid"), pod.clone(), LoopTotals::default(), Directives::default());
    let (_, directives) = loops.attach(&key, &pod, Timestamp::now()).unwrap();
    tokio::spawn(sensors.clone().run(said, stop.clone()));

    let api: Api<Sensor> = Api::namespaced(client.clone(), namespace);
    let mut object = clock("clock", &json!({}));
    object["metadata"]["namespace"] = json!(namespace);
    let made = api
        .create(&PostParams::default(), &serde_json::from_value(object).unwrap())
        .await
        .unwrap();
    until("the pod is told", async || {
        let directives = directives.borrow();
        directives
            .sensors
            .as_ref()
            .is_some_and(|all| all.len() == 1)
            .then_some(())
    })
    .await;
    let read = async |type_: &str, status: &str| {
        let sensor = api.get("clock").await.unwrap();
        let written = sensor.status.clone().unwrap_or_default();
        (says(&written, type_).0 == status).then_some(written)
    };
    let first = until("it is looked at", async || read("Accepted", "True").await).await;
    assert_eq!(says(&first, "Durable"), is("False", "EphemeralReceiver"));
    sensors.report_received(&key, &[report(&made, 7)]);
    let running = until("it listens", async || read("Connected", "True").await).await;
    assert_eq!((running.totals.events, running.receivers.len()), (7, 1));
    let patch = json!({"spec": {"signals": [{"name": "never", "when": "payload.["}]}});
    api.patch("clock", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    let refused = until("it is refused", async || read("Accepted", "False").await).await;
    assert_eq!((refused.totals.events, refused.observed_generation), (7, Some(2)));
    api.delete("clock", &DeleteParams::default()).await.unwrap();
    until("the pod is told of the end", async || {
        directives
            .borrow()
            .sensors
            .as_ref()
            .is_some_and(Vec::is_empty)
            .then_some(())
    })
    .await;
}
