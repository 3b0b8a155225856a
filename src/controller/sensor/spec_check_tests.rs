//! Tests of the checks of specs, step by step: each step is one check.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, Response};
use futures::FutureExt;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::client::Body;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use strum::IntoEnumIterator;
use tokio::sync::watch;

use super::children::{ChildKind, ObservedChild};
use super::pod::SensorPodSettings;
use super::reconcile::reconcile;
use super::registry::{SensorRegistry, SensorSetup};
use super::spec_checks::SpecCheckQueue;
use crate::api::{Agent, NamespacedName, Sensor};
use crate::controller::delivery_relay::DeliveryRelay;
use crate::controller::pod_sessions::{LivePod, PodSessions};
use crate::controller::runtime::{EventSink, ReconcileMetrics, Requeue};
use crate::link::messages::{Directives, LoopTotals};
use crate::link::sensor_messages::SensorTerms;
use crate::link::server::{PodIdentity, PodKind};
use crate::telemetry::metrics::Metrics;

/// The Sensors of a leader that has no API server, and the pods of Agents.
struct Leader {
    sensors: SensorRegistry,
    loops: Arc<PodSessions>,
}

impl Leader {
    /// Has an Agent `a` with a pod in each of these namespaces.
    fn new(namespaces: &[&str]) -> Self {
        let loops = Arc::new(PodSessions::new().0);
        let no_server = tower::service_fn(|_: Request<Body>| async {
            Err::<Response<Body>, _>(std::io::Error::other("there is no API server"))
        });
        let sensors = SensorRegistry::new(SensorSetup {
            client: Client::new(no_server, "n"),
            watch_namespaces: Vec::new(),
            workers: 1,
            loops: Arc::clone(&loops),
            relay: Arc::new(DeliveryRelay::new(Duration::from_secs(5)).0),
            pods: SensorPodSettings::default(),
            ca_bundle: watch::channel(String::new()).1,
            published: watch::Sender::default(),
            events: EventSink::new().0,
            reconciles: ReconcileMetrics::new(Arc::new(Metrics::new().unwrap()), "sensor", 1),
            clock: Arc::new(Timestamp::now),
        });
        let leader = Self { sensors, loops };
        for namespace in namespaces {
            let object = json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
                "metadata": {"namespace": namespace, "name": "a", "uid": format!("{namespace}-a")},
                "spec": {"model": {"api": "Scripted", "name": "m"}},
            });
            let agent: Agent = serde_json::from_value(object).unwrap();
            leader.sensors.agent_seen(&agent);
            let (key, pod) = (agent_of(namespace), pod());
            leader
                .loops
                .expect_pod((&key, "uid"), pod, LoopTotals::default(), Directives::default());
        }
        let agents: BTreeSet<_> = namespaces.iter().map(|namespace| agent_of(namespace)).collect();
        leader.sensors.agents_listed(None, &agents);
        leader
    }

    /// A leader that has listed these Sensors.
    fn listed(namespaces: &[&str], sensors: &[Sensor]) -> Self {
        let leader = Self::new(namespaces);
        for sensor in sensors {
            leader.sensors.seen(sensor.clone());
        }
        leader
            .sensors
            .listed(None, &sensors.iter().map(NamespacedName::of).collect());
        leader
    }

    /// Generations of the Sensors that the pod of a namespace's Agent is to run. `None`: it keeps those that it runs.
    fn runs(&self, namespace: &str) -> Option<Vec<(String, i64)>> {
        let (_, directives) = self
            .loops
            .attach(&agent_of(namespace), &pod(), Timestamp::now())
            .unwrap();
        let terms: Option<Vec<SensorTerms>> = directives.borrow().sensors.clone();
        Some(terms?.into_iter().map(|terms| (terms.name, terms.generation)).collect())
    }

    /// One check, which finds nothing wrong: whose it was.
    fn step(&self) -> Option<(String, String)> {
        let sensor = self.sensors.next_unchecked()?;
        self.sensors.spec_checked(&sensor, None);
        let key = NamespacedName::of(sensor.as_ref());
        Some((key.namespace, key.name))
    }

    /// Names of the Sensors whose reconcile was asked for since the last look.
    fn requested(&self) -> BTreeSet<String> {
        let next = || self.next_request().now_or_never();
        std::iter::from_fn(next).map(|key| key.name).collect()
    }

    /// The next Sensor whose reconcile is asked for.
    async fn next_request(&self) -> NamespacedName {
        let key = self.sensors.queue.next().await.unwrap();
        self.sensors.queue.finish(key.clone(), Requeue::AwaitChange);
        key
    }

    fn is_pending(&self, name: &str) -> bool {
        let state = self.sensors.lock();
        state.index.sensor(&key("n", name)).unwrap().is_pending()
    }
}

fn pod() -> LivePod {
    LivePod {
        uid: "p".into(),
        epoch: 1,
    }
}

fn agent_of(namespace: &str) -> NamespacedName {
    NamespacedName::new(namespace, "a")
}

fn key(namespace: &str, name: &str) -> NamespacedName {
    NamespacedName::new(namespace, name)
}

fn sensor(namespace: &str, name: &str, generation: i64, spec: &Value) -> Sensor {
    let mut whole = json!({"agentNames": ["a"], "source": {"schedule": {"cron": "* * * * *"}}});
    for (field, value) in spec.as_object().unwrap() {
        whole[field] = value.clone();
    }
    serde_json::from_value(json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
        "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-of-{name}"), "generation": generation},
        "spec": whole,
    }))
    .unwrap()
}

/// A spec that differs from that of other numbers in what is checked.
fn text(number: i64) -> Value {
    json!({"notification": {"text": number.to_string()}})
}

fn generations(names: &[(&str, i64)]) -> Vec<(String, i64)> {
    names.iter().map(|(name, of)| ((*name).into(), *of)).collect()
}

#[tokio::test]
async fn three_hundred_sensors_of_one_namespace_delay_that_of_another_by_one_check() {
    let mut all: Vec<Sensor> = (0..300)
        .map(|number| sensor("many", &format!("s-{number}"), 1, &text(number)))
        .collect();
    all.push(sensor("n", "s", 1, &json!({})));
    let leader = Leader::listed(&["many", "n"], &all);
    assert_eq!(leader.runs("n"), None);
    assert!(leader.step().is_some_and(|(namespace, _)| namespace == "many"));
    assert_eq!(leader.step(), Some(("n".into(), "s".into())));
    assert_eq!(leader.runs("n"), Some(generations(&[("s", 1)])));
    // One that comes later waits no longer.
    leader.sensors.seen(sensor("n", "t", 1, &json!({})));
    assert!(leader.step().is_some_and(|(namespace, _)| namespace == "many"));
    assert_eq!(leader.step(), Some(("n".into(), "t".into())));
    let rest = std::iter::from_fn(|| leader.step()).count();
    assert_eq!(rest, 298, "each is checked once");
    assert_eq!(leader.runs("many").unwrap().len(), 300);
}

#[test]
fn each_namespace_has_one_check_in_turn_and_each_sensor_waits_once() {
    let mut queue = SpecCheckQueue::default();
    for (namespace, name) in [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("a", "1"), ("c", "1")] {
        queue.push(key(namespace, name));
    }
    let mut next = || {
        let key = queue.pop()?;
        // A tenant that adds as fast as its Sensors are checked gains no turn.
        if key.namespace == "b" && key.name.as_str() < "4" {
            queue.push(self::key("b", &(key.name.parse::<u8>().unwrap() + 1).to_string()));
        }
        Some(key.namespace + &key.name)
    };
    let order: Vec<_> = std::iter::from_fn(&mut next).collect();
    assert_eq!(order, ["a1", "b1", "c1", "a2", "b2", "a3", "b3", "b4"]);
    assert_eq!(queue.pop(), None);
    queue.push(key("a", "1"));
    assert_eq!(queue.pop(), Some(key("a", "1")), "it may wait again");
}

#[tokio::test]
async fn a_new_leader_has_listed_all_while_checks_are_pending_and_changes_nothing_before() {
    let all: Vec<Sensor> = (0..3)
        .map(|number| sensor("n", &format!("s-{number}"), 1, &text(number)))
        .collect();
    let leader = Leader::listed(&["n"], &all);
    assert!(leader.sensors.lock().index.is_whole("n"));
    assert!(leader.sensors.pod_namespaces().is_some());
    assert_eq!(leader.sensors.names(&agent_of("n")).len(), 3);
    assert_eq!(leader.runs("n"), None, "its pod keeps what a former leader told it");
    // A reconcile would write a status; here there is no server that would take it.
    let pass = reconcile(&leader.sensors, &key("n", "s-0")).await;
    assert!(pass.is_ok(), "{pass:?}");
    leader.requested();
    leader.step().unwrap();
    assert_eq!(
        leader.requested(),
        ["s-0".to_owned()].into(),
        "it has its own pass then"
    );
    assert_eq!(leader.runs("n"), None);
    let pass = reconcile(&leader.sensors, &key("n", "s-0")).await;
    assert!(pass.is_err(), "its status is written");
    leader.step().unwrap();
    leader.step().unwrap();
    assert_eq!(
        leader.runs("n"),
        Some(generations(&[("s-0", 1), ("s-1", 1), ("s-2", 1)]))
    );
}

#[tokio::test]
async fn an_edit_is_in_effect_once_it_is_checked_and_the_former_generation_until_then() {
    let leader = Leader::listed(&["n"], &[sensor("n", "s", 1, &text(1))]);
    leader.step().unwrap();
    leader.sensors.seen(sensor("n", "s", 2, &text(2)));
    assert_eq!(leader.runs("n"), Some(generations(&[("s", 1)])));
    let second = leader.sensors.next_unchecked().unwrap();
    leader.sensors.spec_checked(&second, Some("spec: why".into()));
    assert_eq!(leader.runs("n"), Some(generations(&[("s", 2)])));
    let problem = |leader: &Leader| {
        let state = leader.sensors.lock();
        let known = state.index.sensor(&key("n", "s")).unwrap();
        known.problem().map(str::to_owned)
    };
    assert_eq!(problem(&leader).as_deref(), Some("spec: why"));
    // Taken back: that was checked before, but not last.
    leader.sensors.seen(sensor("n", "s", 3, &text(1)));
    assert!(leader.is_pending("s"));
    leader.step().unwrap();
    assert_eq!(
        (leader.runs("n"), problem(&leader)),
        (Some(generations(&[("s", 3)])), None)
    );
}

#[tokio::test]
async fn an_edit_during_a_check_is_judged_by_the_newer_generation() {
    let leader = Leader::listed(&["n"], &[sensor("n", "s", 1, &text(1))]);
    let first = leader.sensors.next_unchecked().unwrap();
    leader.sensors.seen(sensor("n", "s", 2, &text(2)));
    leader.sensors.spec_checked(&first, Some("spec: of the first".into()));
    assert!(leader.is_pending("s"));
    assert_eq!(leader.runs("n"), None, "nothing of it was ever in effect");
    let second = leader.sensors.next_unchecked().unwrap();
    assert_eq!(second.metadata.generation, Some(2));
    leader.sensors.spec_checked(&second, None);
    assert_eq!(leader.runs("n"), Some(generations(&[("s", 2)])));
    assert_eq!(leader.sensors.next_unchecked(), None);
}

#[tokio::test]
async fn the_check_of_a_deleted_sensor_is_dropped() {
    let all = ["s", "t", "u"].map(|name| sensor("n", name, 1, &json!({})));
    let leader = Leader::listed(&["n"], &all);
    let running = leader.sensors.next_unchecked().unwrap();
    leader.sensors.remove_sensor(&key("n", "s"));
    leader.sensors.remove_sensor(&key("n", "t"));
    // Made again under the name of the one whose check runs.
    let mut again = sensor("n", "s", 1, &json!({}));
    again.metadata.uid = Some("another".into());
    leader.sensors.seen(again);
    leader
        .sensors
        .spec_checked(&running, Some("spec: of the deleted one".into()));
    assert!(leader.is_pending("s"));
    let mut ends = sensor("n", "u", 2, &json!({}));
    ends.metadata.deletion_timestamp = serde_json::from_value(json!("2026-11-22T14:00:00Z")).unwrap();
    leader.sensors.seen(ends);
    let left = std::iter::from_fn(|| leader.step()).collect::<Vec<_>>();
    assert_eq!(left, [("n".to_owned(), "s".to_owned())]);
    assert_eq!(leader.runs("n"), Some(generations(&[("s", 1)])));
}

#[tokio::test]
async fn the_pod_of_a_sensor_delivers_while_its_spec_waits_for_a_check() {
    let page = |number: i64| {
        let mut spec = text(number);
        spec["source"] = json!({"poll": {"http": {"url": "https://example.com/"}}});
        sensor("n", "s", number, &spec)
    };
    let leader = Leader::listed(&["n"], &[page(1)]);
    let owned = |uid: &str, (version, kind): (&str, &str), of: &str| {
        let owner = json!({"apiVersion": version, "kind": kind, "name": "x", "uid": of, "controller": true});
        json!({"metadata": {"uid": uid, "ownerReferences": [owner]}})
    };
    let set: StatefulSet =
        serde_json::from_value(owned("set", ("agentloop.dev/v1alpha1", "Sensor"), "uid-of-s")).unwrap();
    let pod: Pod = serde_json::from_value(owned("pod", ("apps/v1", "StatefulSet"), "set")).unwrap();
    for kind in ChildKind::iter() {
        let seen = match kind {
            ChildKind::Set => Some(ObservedChild::set(&set)),
            ChildKind::Pod => Some(ObservedChild::pod(&pod)),
            ChildKind::Service | ChildKind::Policy => None,
        };
        let present = seen.map(|seen| (key("n", "s"), seen)).into_iter().collect();
        leader.sensors.children_listed(kind, None, present);
    }
    let identity = PodIdentity {
        namespace: "n".into(),
        name: "s-sensor-0".into(),
        uid: "pod".into(),
        kind: PodKind::Sensor,
    };
    let told = async || {
        reconcile(&leader.sensors, &key("n", "s")).await.unwrap();
        let directives = leader.sensors.setup.relay.attach(&identity).unwrap();
        directives.borrow().clone()
    };
    let first = told().await;
    assert_eq!(first.terms, None, "it goes by what a former leader told it");
    assert_eq!(first.receivers.unwrap()[0].name, "a");
    leader.step().unwrap();
    leader.sensors.seen(page(2));
    assert_eq!(told().await.terms.unwrap().generation, 1);
}

#[tokio::test]
async fn an_edit_of_a_field_that_is_not_checked_needs_no_check() {
    let leader = Leader::listed(&["n"], &[sensor("n", "s", 1, &text(1))]);
    leader.step().unwrap();
    let mut suspended = text(1);
    (suspended["suspend"], suspended["agentNames"]) = (json!(true), json!(["a", "b"]));
    leader.sensors.seen(sensor("n", "s", 2, &suspended));
    assert_eq!(
        leader.runs("n"),
        Some(generations(&[("s", 2)])),
        "it is suspended at once"
    );
    // The status of the Sensor was written.
    leader.sensors.seen(sensor("n", "s", 2, &suspended));
    assert!(!leader.is_pending("s"));
    assert_eq!(leader.step(), None);
}

#[tokio::test]
async fn checks_run_by_themselves_and_their_verdicts_arrive() {
    let broken = json!({"notification": {"text": "payload.(("}});
    let leader = Leader::listed(&["n"], &[sensor("n", "s", 1, &broken)]);
    leader.requested();
    let run = leader.sensors.check_specs();
    let verdict = async {
        // Both those that waited before the run, and those that come while it has nothing to do.
        assert_eq!(leader.next_request().await, key("n", "s"));
        leader.sensors.seen(sensor("n", "t", 1, &json!({})));
        assert_eq!(leader.next_request().await, key("n", "t"), "it was seen");
        assert_eq!(leader.next_request().await, key("n", "t"), "it was checked");
    };
    tokio::select! {
        () = run => {}
        ended = tokio::time::timeout(Duration::from_secs(30), verdict) => ended.unwrap(),
    }
    let state = leader.sensors.lock();
    let problem = |name| state.index.sensor(&key("n", name)).unwrap().problem();
    assert!(problem("s").is_some_and(|problem| problem.starts_with("spec.notification.text")));
    assert_eq!(problem("t"), None);
    assert!(!state.index.sensor(&key("n", "t")).unwrap().is_pending());
}

#[tokio::test]
async fn sensors_that_are_seen_while_others_are_checked_are_all_checked() {
    const SENSORS: usize = 5_000;
    let leader = Leader::new(&[]);
    let (sensors, name) = (&leader.sensors, |number: usize| format!("s-{number}"));
    let checked = std::thread::scope(|scope| {
        let watch = scope.spawn(move || {
            for number in 0..SENSORS {
                sensors.seen(sensor("n", &name(number), 1, &json!({})));
                // The status of the one before was written, perhaps while its check ended.
                sensors.seen(sensor("n", &name(number.saturating_sub(1)), 1, &json!({})));
            }
        });
        let mut checked = 0;
        while !watch.is_finished() {
            checked += usize::from(leader.step().is_some());
        }
        checked
    });
    let rest = std::iter::from_fn(|| leader.step()).count();
    let pending: Vec<_> = (0..SENSORS)
        .filter(|number| leader.is_pending(&name(*number)))
        .collect();
    assert!(pending.is_empty(), "never checked: {pending:?}");
    assert_eq!(checked + rest, SENSORS, "each is checked once");
}
