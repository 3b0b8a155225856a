//! Agents in a cache, as the controller has them, without an API server.
#![allow(dead_code)]

use std::sync::Arc;

use agentloop::controller::agent::AgentsView;
use agentloop::controller::budget::presenter::BudgetPresenter;
use agentloop::controller::budget::{BudgetLedger, LedgerSetup};
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::pod_sessions::PodSessions;
use agentloop::controller::runtime::{EventSink, ReconcileMetrics, WallClock};
use agentloop::controller::sensor::SensorRegistry;
use agentloop::controller::sensor::pod::SensorPodSettings;
use agentloop::telemetry::metrics::Metrics;
use jiff::Timestamp;
use kube::Client;
use kube::runtime::reflector;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};

/// A ledger that receives Agents, and watches and writes nothing.
pub fn idle_ledger(client: Client, loops: &Arc<PodSessions>) -> Arc<BudgetLedger> {
    Arc::new(BudgetLedger::new(LedgerSetup {
        client,
        policy: agentloop::controller::policy::PlatformPolicy::default(),
        namespace: "agentloop-system".into(),
        watch_namespaces: Vec::new(),
        loops: loops.clone(),
        presentation: Arc::new(BudgetPresenter::new("agentloop-system", EventSink::new().0)),
        metrics: Arc::new(Metrics::new().unwrap()),
        wall: Timestamp::now(),
    }))
}

/// Sensors without a watch until they are run.
pub fn idle_sensors(
    client: Client,
    image: &str,
    (loops, relay): (&Arc<PodSessions>, &Arc<DeliveryRelay>),
    clock: WallClock,
) -> Arc<SensorRegistry> {
    Arc::new(SensorRegistry::new(agentloop::controller::sensor::SensorSetup {
        client,
        watch_namespaces: Vec::new(),
        workers: 1,
        loops: loops.clone(),
        relay: relay.clone(),
        pods: SensorPodSettings {
            image: image.into(),
            ..SensorPodSettings::default()
        },
        ca_bundle: tokio::sync::watch::channel("CA one".to_owned()).1,
        published: tokio::sync::watch::Sender::default(),
        events: EventSink::new().0,
        reconciles: ReconcileMetrics::new(Arc::new(Metrics::new().unwrap()), "sensor", 1),
        clock,
    }))
}

/// A small valid Agent with this status.
pub fn agent(namespace: &str, name: &str, status: &Value) -> Value {
    json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "Agent",
        "metadata": {
            "namespace": namespace, "name": name, "uid": format!("uid-of-{name}"), "generation": 3,
            "creationTimestamp": "2026-01-02T03:04:05Z",
        },
        "spec": {"instructions": "Be brief.", "model": {"api": "Scripted", "name": "small"}},
        "status": status,
    })
}

/// A cache that holds these objects.
pub fn view(agents: &[Value]) -> AgentsView {
    let (store, mut writer) = reflector::store();
    for agent in agents {
        writer.apply_watcher_event(&Event::Apply(serde_json::from_value(agent.clone()).unwrap()));
    }
    AgentsView::new(vec![store])
}
