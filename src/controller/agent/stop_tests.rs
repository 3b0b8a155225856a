//! Tests of an orderly stop of the reconciler.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceRequirements;
use kube::Client;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{AgentsView, ReconcileObserver, ReconcilerParts, ReconcilerSettings, run};
use crate::api::{Agent, NamespacedName};
use crate::api_server::object_key::{AGENTS, EVENTS};
use crate::api_server::{ApiServer, ObjectKey, ObjectStore, ServerHooks};
use crate::controller::budget::presenter::BudgetPresenter;
use crate::controller::budget::{BudgetLedger, LedgerSetup};
use crate::controller::delivery_relay::DeliveryRelay;
use crate::controller::pod_sessions::PodSessions;
use crate::controller::policy::PlatformPolicy;
use crate::controller::runtime::events::{publish, recorder};
use crate::controller::runtime::{EventSink, ReconcileMetrics, ReconcileResult, WallClock};
use crate::controller::sensor::pod::SensorPodSettings;
use crate::controller::sensor::{SensorRegistry, SensorSetup};
use crate::link::pod::AgentEgress;
use crate::telemetry::metrics::Metrics;

/// Gives the stop signal as soon as a reconcile has started.
struct StopsAtStart(CancellationToken);

impl ReconcileObserver for StopsAtStart {
    fn started(&self) {
        self.0.cancel();
    }
    fn finished(&self, _: ReconcileResult, _: Duration) {}
    fn agents(&self, _: AgentsView) {}
    fn agent_seen(&self, _: &Agent) {}
    fn agent_deleted(&self, _: &NamespacedName) {}
    fn agents_listed(&self, _: Option<&str>, _: &BTreeSet<NamespacedName>) {}
}

struct NoHooks;

impl ServerHooks for NoHooks {}

fn settings() -> ReconcilerSettings {
    ReconcilerSettings {
        image: "agentloop:test".into(),
        image_pull_policy: None,
        link_url: "https://link:8443".into(),
        egress: AgentEgress::default(),
        controller_namespace: "system".into(),
        watch_namespaces: Vec::new(),
        gateway_resources: ResourceRequirements::default(),
        worker_resources: ResourceRequirements::default(),
        gateway_environment: Vec::new(),
        workers: 1,
        policy: PlatformPolicy::default(),
    }
}

/// The inputs of a reconciler that stops during its first reconcile.
fn parts(client: &Client, clock: &WallClock, events: EventSink) -> ReconcilerParts {
    let (loops, changed) = PodSessions::new();
    let loops = Arc::new(loops);
    let metrics = Arc::new(Metrics::new().unwrap());
    let shutdown = CancellationToken::new();
    let budgets = BudgetLedger::new(LedgerSetup {
        client: client.clone(),
        policy: PlatformPolicy::default(),
        namespace: "system".into(),
        watch_namespaces: Vec::new(),
        loops: loops.clone(),
        presentation: Arc::new(BudgetPresenter::new("system", EventSink::new().0)),
        metrics: metrics.clone(),
        wall: clock(),
    });
    let sensors = SensorRegistry::new(SensorSetup {
        client: client.clone(),
        watch_namespaces: Vec::new(),
        workers: 1,
        loops: loops.clone(),
        relay: Arc::new(DeliveryRelay::new(Duration::from_secs(5)).0),
        pods: SensorPodSettings::default(),
        ca_bundle: watch::channel("CA".to_owned()).1,
        published: watch::Sender::default(),
        events: EventSink::new().0,
        reconciles: ReconcileMetrics::new(metrics.clone(), "sensor", 1),
        clock: clock.clone(),
    });
    ReconcilerParts {
        client: client.clone(),
        settings: settings(),
        loops,
        budgets: Arc::new(budgets),
        sensors: Arc::new(sensors),
        changed,
        ca_bundle: watch::channel("CA".to_owned()).1,
        published: watch::Sender::default(),
        observer: Arc::new(StopsAtStart(shutdown.clone())),
        metrics,
        clock: clock.clone(),
        events,
        shutdown,
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_of_a_reconcile_that_runs_when_the_stop_comes_is_published() {
    let clock: WallClock = Arc::new(|| Timestamp::constant(1_800_000_000, 0));
    let store = Arc::new(ObjectStore::in_memory(clock.clone()));
    let agent = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"namespace": "ns", "name": "a"},
        "spec": {"instructions": "i", "model": {"api": "Scripted", "name": "m"}, "suspend": true},
    });
    store.create(ObjectKey::new(AGENTS, "ns", "a"), agent).unwrap();
    let client = ApiServer::new(store.clone(), Arc::new(NoHooks)).client();
    let (events, queue) = EventSink::new();
    // As the leader does: the publisher ends after the reconciler.
    let finished = CancellationToken::new();
    let reconciler = async {
        run(parts(&client, &clock, events)).await;
        finished.cancel();
    };
    let publisher = publish(recorder(client.clone(), "agentloop-0".into()), queue, finished.clone());
    tokio::join!(reconciler, publisher);
    let (_, sent) = store.list(EVENTS, "ns");
    let reasons: Vec<_> = sent.iter().map(|(_, event)| &event["reason"]).collect();
    assert_eq!(reasons, ["Suspended"]);
}
