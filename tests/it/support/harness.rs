//! A whole reconciler against the in-process API server, under paused time: minutes pass in milliseconds.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agentloop::api::status::{LoopState, LoopUsage};
use agentloop::api::{Agent, NamespacedName};
use agentloop::controller::agent::{AgentsView, ReconcileObserver, ReconcilerParts, ReconcilerSettings, run};
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::pod_sessions::{LivePod, PodSessions};
use agentloop::controller::runtime::{EventRecorder, EventSink, ReconcileResult, WallClock, publish};
use agentloop::controller::sensor::SensorRegistry;
use agentloop::link::messages::{LoopReport, PodReport};
use agentloop::telemetry::metrics::Metrics;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::agents::{idle_ledger, idle_sensors};
use super::api_server::ApiServer;

pub const NAMESPACE: &str = "team-a";
pub const AGENTS: &str = "agentloop.dev/agents";

/// Counts reconciles.
#[derive(Default)]
pub struct Counting {
    pub finished: Mutex<Vec<ReconcileResult>>,
    pub view: Mutex<AgentsView>,
}

impl ReconcileObserver for Counting {
    fn started(&self) {}
    fn finished(&self, how: ReconcileResult, _: Duration) {
        self.finished.lock().unwrap().push(how);
    }
    fn agents(&self, agents: AgentsView) {
        *self.view.lock().unwrap() = agents;
    }
    fn agent_seen(&self, _: &Agent) {}
    fn agent_deleted(&self, _: &NamespacedName) {}
    fn agents_listed(&self, _: Option<&str>, _: &BTreeSet<NamespacedName>) {}
}

/// Server, controller, and a stand-in for kubelet and gateways.
pub struct ControllerHarness {
    pub server: ApiServer,
    pub clock: WallClock,
    pub settings: ReconcilerSettings,
    pub controller: Option<Controller>,
}

/// One life of the controller.
pub struct Controller {
    pub loops: Arc<PodSessions>,
    pub sensors: Arc<SensorRegistry>,
    pub relay: Arc<DeliveryRelay>,
    said: Mutex<Option<mpsc::UnboundedReceiver<NamespacedName>>>,
    pub observer: Arc<Counting>,
    pub bundle: watch::Sender<String>,
    pub published: watch::Sender<String>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

pub fn settings() -> ReconcilerSettings {
    ReconcilerSettings {
        image: "agentloop:test".into(),
        image_pull_policy: None,
        link_url: "https://agentloop-link.agentloop-system.svc:8443".into(),
        egress: agentloop::link::pod::AgentEgress::default(),
        controller_namespace: "agentloop-system".into(),
        policy: agentloop::controller::policy::PlatformPolicy::default(),
        watch_namespaces: Vec::new(),
        gateway_resources: resources("32Mi"),
        worker_resources: resources("64Mi"),
        image_pull_secrets: Vec::new(),
        gateway_environment: Vec::new(),
        otlp_ca_secret: None,
        workers: 4,
    }
}

fn resources(memory: &str) -> ResourceRequirements {
    serde_json::from_value(json!({ "requests": { "cpu": "10m", "memory": memory } })).unwrap()
}

impl ControllerHarness {
    /// A server with a controller that has filled its stores.
    pub async fn start() -> Self {
        let mut harness = Self::without_controller();
        harness.boot().await;
        harness
    }

    pub fn without_controller() -> Self {
        let base: Timestamp = "2026-11-22T14:00:00Z".parse().unwrap();
        let origin = tokio::time::Instant::now();
        let clock: WallClock = Arc::new(move || base + origin.elapsed());
        Self {
            server: ApiServer::new(clock.clone()),
            clock,
            settings: settings(),
            controller: None,
        }
    }

    /// Starts a controller.
    pub async fn boot(&mut self) {
        let (loops, changed) = PodSessions::new();
        let loops = Arc::new(loops);
        let observer = Arc::new(Counting::default());
        let (bundle, ca_bundle) = watch::channel("CA one".to_owned());
        let published = watch::Sender::default();
        let shutdown = CancellationToken::new();
        let (relay, said) = DeliveryRelay::new(Duration::from_secs(5));
        let relay = Arc::new(relay);
        let sensors = idle_sensors(
            self.server.client(),
            &self.settings.image,
            (&loops, &relay),
            self.clock.clone(),
        );
        let budgets = idle_ledger(self.server.client(), &loops);
        tokio::spawn(budgets.clone().run(shutdown.clone()));
        let (events, queue) = EventSink::new();
        // It ends with the reconciler, which has the only sink.
        let recorder = EventRecorder::new(
            self.server.client(),
            "agentloop-0".into(),
            Metrics::new().unwrap().dropped_events,
        );
        tokio::spawn(publish(recorder, queue, CancellationToken::new()));
        let task = tokio::spawn(run(ReconcilerParts {
            client: self.server.client(),
            settings: self.settings.clone(),
            loops: loops.clone(),
            budgets,
            sensors: sensors.clone(),
            changed,
            ca_bundle,
            published: published.clone(),
            observer: observer.clone(),
            metrics: Arc::new(Metrics::new().unwrap()),
            clock: self.clock.clone(),
            events,
            shutdown: shutdown.clone(),
        }));
        self.controller = Some(Controller {
            loops,
            sensors,
            relay,
            said: Mutex::new(Some(said)),
            observer,
            bundle,
            published,
            shutdown,
            task,
        });
        self.pass(1).await;
    }

    /// The same, with Sensors.
    pub async fn start_with_sensors() -> Self {
        let mut harness = Self::without_controller();
        harness.boot_with_sensors().await;
        harness
    }

    /// Starts a controller that reconciles Sensors too.
    pub async fn boot_with_sensors(&mut self) {
        self.boot().await;
        let controller = self.running();
        let said = controller.said.lock().unwrap().take().unwrap();
        let run = controller.sensors.clone().run(said, controller.shutdown.clone());
        tokio::spawn(run);
        self.settle().await;
    }

    /// Ends the controller as a rolling update does.
    pub async fn shut_down(&mut self) {
        let controller = self.controller.take().unwrap();
        controller.shutdown.cancel();
        controller.task.await.unwrap();
    }

    /// Ends the controller in the middle of what it does.
    pub async fn kill(&mut self) {
        let controller = self.controller.take().unwrap();
        controller.task.abort();
        assert!(controller.task.await.unwrap_err().is_cancelled());
        controller.shutdown.cancel();
    }

    pub fn running(&self) -> &Controller {
        self.controller.as_ref().unwrap()
    }

    /// Lets time pass, in small steps so that everything gets its turn.
    pub async fn pass(&self, seconds: u64) {
        for _ in 0..seconds * 4 {
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    /// Lets everything that is ready happen, in next to no time.
    pub async fn settle(&self) {
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Applies a scripted Agent whose script exists.
    pub fn apply(&self, name: &str, spec: &Value) {
        self.put_script();
        let mut whole = json!({
            "model": { "api": "Scripted", "name": "demo", "scripted": { "configMapKeyRef": { "name": "script", "key": "turns" } } },
            "instructions": "Watch the coast.",
        });
        overlay(&mut whole, spec);
        self.server.put(
            AGENTS,
            json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
                "metadata": { "name": name, "namespace": NAMESPACE }, "spec": whole,
            }),
        );
    }

    pub fn put_script(&self) {
        let script = "turns:\n- text: done\n";
        self.put_config_map("script", "turns", script);
    }

    pub fn put_config_map(&self, name: &str, key: &str, text: &str) {
        self.server.put(
            "/configmaps",
            json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name, "namespace": NAMESPACE }, "data": { key: text } }),
        );
    }

    pub fn annotate(&self, name: &str, key: &str, value: &str) {
        self.server.put(
            AGENTS,
            json!({ "metadata": { "name": name, "namespace": NAMESPACE, "annotations": { key: value } } }),
        );
    }

    pub fn pod(&self, name: &str) -> Option<Value> {
        self.server.get("/pods", NAMESPACE, name)
    }

    pub fn agent(&self, name: &str) -> Agent {
        serde_json::from_value(self.server.get(AGENTS, NAMESPACE, name).unwrap()).unwrap()
    }

    pub fn status(&self, name: &str) -> agentloop::api::AgentStatus {
        self.agent(name).status.unwrap_or_default()
    }

    pub fn state(&self, name: &str) -> LoopState {
        self.status(name).r#loop.unwrap().state
    }

    /// `True`, `False`, `Unknown`, or nothing; and the reason.
    pub fn condition(&self, name: &str, type_: &str) -> Option<(String, String)> {
        let conditions = self.status(name).conditions;
        let found = conditions.into_iter().find(|condition| condition.type_ == type_)?;
        Some((found.status, found.reason))
    }

    pub fn ready(&self, name: &str) -> (String, String) {
        self.condition(name, "Ready").unwrap()
    }

    /// What a kubelet does: the pod gets a node and its containers run.
    pub fn run_pod(&self, name: &str) {
        let container = |container: &str| {
            json!({ "name": container, "image": "agentloop:test", "imageID": "", "ready": true,
            "restartCount": 0, "state": { "running": { "startedAt": "2026-11-22T14:00:00Z" } } })
        };
        self.server.put(
            "/pods",
            json!({
                "metadata": { "name": name, "namespace": NAMESPACE },
                "spec": { "nodeName": "node-1" },
                "status": {
                    "phase": "Running", "startTime": "2026-11-22T14:00:00Z",
                    "conditions": [{ "type": "Ready", "status": "True" }],
                    "initContainerStatuses": [container("gateway")], "containerStatuses": [container("worker")],
                },
            }),
        );
    }

    pub fn live_pod(&self, name: &str) -> LivePod {
        let pod = self.pod(name).unwrap();
        LivePod {
            uid: pod["metadata"]["uid"].as_str().unwrap().into(),
            epoch: pod["metadata"]["annotations"]["agentloop.dev/epoch"]
                .as_str()
                .unwrap()
                .parse()
                .unwrap(),
        }
    }

    /// What a gateway does: it attaches and reports. Panics when it is refused.
    pub fn report(&self, name: &str, report: LoopReport, usage: LoopUsage) {
        self.say(
            name,
            PodReport {
                loop_: Some(report),
                usage,
                ..PodReport::default()
            },
        );
    }

    pub fn say(&self, name: &str, report: PodReport) {
        let (key, pod, now) = (agent_key(name), self.live_pod(name), (self.clock)());
        let loops = &self.running().loops;
        loops.attach(&key, &pod, now).unwrap();
        loops.report(&key, &pod, report, now).unwrap();
    }

    /// From nothing to a running loop.
    pub async fn bring_up(&self, name: &str, spec: &Value) {
        self.apply(name, spec);
        self.settle().await;
        self.come_up(name).await;
    }

    /// The pod that is there starts and reports.
    pub async fn come_up(&self, name: &str) {
        self.run_pod(name);
        self.settle().await;
        self.report(name, in_state(LoopState::Running), LoopUsage::default());
        self.settle().await;
    }
}

pub fn agent_key(name: &str) -> NamespacedName {
    NamespacedName::new(NAMESPACE, name)
}

pub fn in_state(state: LoopState) -> LoopReport {
    LoopReport {
        state,
        ..LoopReport::default()
    }
}

fn overlay(old: &mut Value, new: &Value) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in new {
                if value.is_null() {
                    old.remove(key);
                } else {
                    overlay(old.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (old, new) => *old = new.clone(),
    }
}
