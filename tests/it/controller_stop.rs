//! An orderly stop of the reconciler of Agents.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use agentloop::api::{Agent, NamespacedName};
use agentloop::controller::agent::{AgentsView, ReconcileObserver, ReconcilerParts, run};
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::pod_sessions::PodSessions;
use agentloop::controller::runtime::{EventRecorder, EventSink, ReconcileResult, WallClock, publish};
use agentloop::telemetry::metrics::Metrics;
use jiff::Timestamp;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::support::agents::{idle_ledger, idle_sensors};
use crate::support::api_server::ApiServer;
use crate::support::harness::{self, AGENTS};

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

#[tokio::test(start_paused = true)]
async fn an_event_of_a_reconcile_that_runs_at_the_stop_is_published() {
    let clock: WallClock = Arc::new(|| Timestamp::constant(1_800_000_000, 0));
    let server = ApiServer::new(clock.clone());
    let agent = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"namespace": "ns", "name": "a"},
        "spec": {"instructions": "i", "model": {"api": "Scripted", "name": "m"}, "suspend": true},
    });
    server.put(AGENTS, agent);
    let (loops, changed) = PodSessions::new();
    let loops = Arc::new(loops);
    let relay = Arc::new(DeliveryRelay::new(Duration::from_secs(5)).0);
    let (events, queue) = EventSink::new();
    let shutdown = CancellationToken::new();
    let parts = ReconcilerParts {
        client: server.client(),
        settings: harness::settings(),
        loops: loops.clone(),
        budgets: idle_ledger(server.client(), &loops),
        sensors: idle_sensors(server.client(), "agentloop:test", (&loops, &relay), clock.clone()),
        changed,
        ca_bundle: watch::channel("CA".to_owned()).1,
        published: watch::Sender::default(),
        observer: Arc::new(StopsAtStart(shutdown.clone())),
        metrics: Arc::new(Metrics::new().unwrap()),
        clock,
        events,
        shutdown,
    };
    // As the leader does: the publisher ends after the reconciler.
    let finished = CancellationToken::new();
    let reconciler = async {
        run(parts).await;
        finished.cancel();
    };
    let recorder = EventRecorder::new(
        server.client(),
        "agentloop-0".into(),
        Metrics::new().unwrap().dropped_events,
    );
    tokio::join!(reconciler, publish(recorder, queue, finished.clone()));
    let sent = server.list("events.k8s.io/events");
    let reasons: Vec<_> = sent.iter().map(|event| event["reason"].clone()).collect();
    assert_eq!(reasons, ["Suspended"]);
}
