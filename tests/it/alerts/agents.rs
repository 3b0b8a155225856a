//! A day of five Agents: this test stands in for kubelet and gateways, and reports for the Agents each second.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use agentloop::api::NamespacedName;
use agentloop::controller::embedded::{self, EmbeddedOptions};
use agentloop::controller::leadership::election::LEASE_NAME;
use agentloop::controller::pod_sessions::{LivePod, PodSessions};
use agentloop::controller::sensor::pod::SensorPodSettings;
use agentloop::link::messages::PodReport;
use agentloop::telemetry::http::{HttpLimits, SCRAPE_WAIT, metrics as scrapes, serve};
use agentloop::telemetry::metrics::Metrics;
use agentloop::telemetry::registry;
use agentloop::telemetry::requests::CountRequests;
use axum::Router;
use axum::routing::get;
use jiff::Timestamp;
use kube::Client;
use pretty_assertions::assert_eq;
use regex::Regex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::Layer;

use super::{AgentId, Fired, SECOND, fast_rules, look, missing, pod_status, unexpected, usage};
use crate::support::api_server::ApiServer;
use crate::support::clusters::has;
use crate::support::harness::{self, AGENTS};
use crate::support::prometheus::Prometheus;

/// When the crawler begins to spend, and its guardrails to trip: what it had before counts for no alert.
const TROUBLE: Duration = Duration::from_secs(20);
/// When the worker of the crawler begins to crash. Its tool errors have been reported by then.
const CRASH: Duration = Duration::from_secs(44);
/// The longest day. It takes a good minute where the machine has time.
const MAX_WAIT: Duration = Duration::from_secs(160);
/// The longest wait for the alert about a controller that is gone.
const NIGHT: Duration = Duration::from_mins(1);

/// Works, and has an error now and then.
const CLERK: AgentId = ("shop", "clerk");
/// Its budget is exhausted, and its gateway knows no time at which there is room again.
const MISER: AgentId = ("shop", "miser");
/// Waits for an approval.
const ASKER: AgentId = ("shop", "asker");
/// Is awake without a turn; its tasks pile up, and its Sensor has no pod.
const WAITER: AgentId = ("shop", "waiter");
/// Its tools fail, it repeats itself and spends; then its worker crashes.
const CRAWLER: AgentId = ("lab", "crawler");
const ALL: [AgentId; 5] = [CLERK, MISER, ASKER, WAITER, CRAWLER];

/// The controller and what it works on.
struct Day {
    server: ApiServer,
    sessions: Arc<PodSessions>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    controller: JoinHandle<()>,
}

impl Day {
    async fn begin() -> Self {
        let server = ApiServer::new(Arc::new(Timestamp::now));
        let metrics = Arc::new(Metrics::new().unwrap());
        let counted = CountRequests::new(&metrics, "api:443".into()).layer(server.router());
        let (sessions, changed) = PodSessions::new();
        let sessions = Arc::new(sessions);
        let stop = CancellationToken::new();
        let options = EmbeddedOptions {
            client: Client::new(counted, "default"),
            settings: harness::settings(),
            sensor_pods: SensorPodSettings {
                image: "agentloop:test".into(),
                ..SensorPodSettings::default()
            },
            listener: TcpListener::bind("127.0.0.1:0").await.unwrap(),
            loops: (sessions.clone(), changed),
            metrics: metrics.clone(),
        };
        let ends = stop.clone();
        let controller = tokio::spawn(async move { Box::pin(embedded::run(options, ends)).await.unwrap() });
        let day = Self {
            server,
            sessions,
            metrics,
            stop,
            controller,
        };
        day.put_budget("coins", 10);
        day.put_budget("purse", 9);
        day.put_sensor(
            "feed",
            WAITER,
            &json!({"stream": {"url": "https://feed.example.com/events"}}),
        );
        day.put_sensor("ticks", CLERK, &json!({"schedule": {"cron": "0 8 * * *"}}));
        day
    }

    fn put_agents(&self) {
        for namespace in ["shop", "lab"] {
            let script = json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script", "namespace": namespace},
                "data": {"turns": "turns:\n- text: done\n"},
            });
            self.server.put("/configmaps", script);
        }
        for agent in ALL {
            let (namespace, name) = agent;
            let source = json!({"configMapKeyRef": {"name": "script", "key": "turns"}});
            let mut spec = json!({
                "model": {"api": "Scripted", "name": "demo", "scripted": source}, "instructions": "Be brief.",
            });
            if agent == WAITER {
                spec["mode"] = json!("Task");
                spec["task"] = json!({"prompt": "What is due?"});
            }
            let object = json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
                "metadata": {"name": name, "namespace": namespace, "labels": {"agent": name}}, "spec": spec,
            });
            self.server.put(AGENTS, object);
        }
    }

    /// A budget of ten calls, of which an earlier leader has counted `used`. Only the exhausted one holds the miser.
    fn put_budget(&self, name: &str, used: i64) {
        let now = Timestamp::now();
        let window = json!({"rolling": {"seconds": 86_400}});
        let holds = if used == 10 { MISER.1 } else { "nobody" };
        let mut limits = json!({"calls": 10});
        if name == "purse" {
            let others = json!({"tokens": 900, "inputTokens": 900, "outputTokens": 900, "costUSD": "9.00"});
            limits
                .as_object_mut()
                .unwrap()
                .extend(others.as_object().unwrap().clone());
        }
        let budget = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"selector": {"matchLabels": {"agent": holds}}, "limits": limits, "window": window},
            "status": {"ledger": {
                "epoch": 1, "watermark": now, "window": window, "nextLease": 1,
                "buckets": [{"start": now, "amount": {"calls": used}}],
            }},
        });
        self.server.put("agentloop.dev/agentbudgets", budget);
    }

    fn put_sensor(&self, name: &str, (namespace, agent): AgentId, source: &Value) {
        let sensor = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": name, "namespace": namespace},
            "spec": {"agentNames": [agent], "source": source},
        });
        self.server.put("agentloop.dev/sensors", sensor);
    }

    /// What kubelet and gateways do, at this time of the day.
    fn report(&self, time: Duration) {
        for agent in ALL {
            let (namespace, name) = agent;
            let Some(pod) = self.server.get("/pods", namespace, name) else {
                continue;
            };
            let crashes = agent == CRAWLER && time >= CRASH;
            if pod["status"]["phase"] != "Running" || crashes {
                self.server.put("/pods", pod_status(agent, crashes));
            }
            if crashes {
                continue;
            }
            let epoch = pod["metadata"]["annotations"]["agentloop.dev/epoch"].as_str();
            let live = LivePod {
                uid: pod["metadata"]["uid"].as_str().unwrap().into(),
                epoch: epoch.unwrap().parse().unwrap(),
            };
            let mut report: PodReport = serde_json::from_value(report_of(agent, time.as_secs())).unwrap();
            report.epoch = live.epoch;
            let (key, now) = (NamespacedName::new(namespace, name), Timestamp::now());
            // The controller may not expect this pod yet.
            if self.sessions.attach(&key, &live, now).is_ok() {
                self.sessions.report(&key, &live, report, now).unwrap();
            }
        }
    }

    /// Suspends an Agent.
    fn suspend(&self, (namespace, name): AgentId) {
        let change = json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"suspend": true}});
        self.server.put(AGENTS, change);
    }

    async fn end(self) {
        self.stop.cancel();
        self.controller.await.unwrap();
    }
}

/// What the gateway of an Agent reports in a second of the day.
fn report_of(agent: AgentId, second: u64) -> Value {
    let trouble = second.saturating_sub(TROUBLE.as_secs());
    match agent {
        CRAWLER => json!({
            "loop": {
                "state": "Running", "turn": second, "turns": second, "toolCalls": 10 * second,
                "byTool": [{
                    "tool": "files__read", "ok": second, "error": 9 * second, "timed": second, "milliseconds": 50 * second,
                }],
                "guardrailTrips": [{"guardrail": "LoopDetected", "action": "deny", "count": trouble.min(6)}],
                "detected": {"sign": "RepeatedError", "message": "the same error"},
            },
            "usage": usage(second, &json!({
                "costMicroUSD": 400_000 * trouble, "unknownCalls": trouble.min(3), "estimatedCalls": trouble.min(1), "reasoningTokens": 5 * second,
            })),
        }),
        ASKER => json!({
            "loop": {
                "state": "Paused", "reasons": [{"reason": "ToolCallNeedsApproval", "message": "g1"}], "turn": 4, "turns": 2, "failedTurns": 1, "deniedToolCalls": 1,
                "gates": [{
                    "id": "g1", "kind": "ToolCallNeedsApproval", "tool": "files__write", "argumentsHash": "aa",
                    "openedAt": "2026-01-02T03:04:05Z",
                }],
            },
            "usage": usage(3, &json!({})),
        }),
        WAITER => json!({"loop": {"state": "Running", "waitingTasks": 12}}),
        MISER => json!({
            "loop": {"state": "Paused", "reasons": [{"reason": "BudgetExhausted", "message": "no room"}], "turn": 1, "turns": 1},
            "usage": usage(1, &json!({})), "budget": {"refusedCalls": second},
        }),
        _ => json!({
            "loop": {
                "state": "Running", "turn": second, "turns": second, "toolCalls": second, "actions": 1,
                "byTool": [{"tool": "files__read", "ok": 20 * second, "error": 1, "timed": second, "milliseconds": 50}],
                "durations": {"turns": {"buckets": [second]}, "toolRuns": {"buckets": [second]}},
            },
            "usage": usage(second, &json!({"costMicroUSD": 10_000 * second})),
            "callDurations": [{"model": "demo", "counts": {"buckets": [second]}}],
        }),
    }
}

/// Serves /metrics on loopback until it is ended.
struct Endpoint {
    address: String,
    task: JoinHandle<()>,
}

impl Endpoint {
    async fn serve(metrics: &Arc<Metrics>) -> Self {
        Self::of(scrapes(metrics.clone(), SCRAPE_WAIT)).await
    }

    /// Each scrape finds a process that has started since the one before.
    async fn serve_restarts(metrics: Arc<Metrics>) -> Self {
        let start = Regex::new(r"(?m)^process_start_time_seconds .*$").unwrap();
        let starts = Arc::new(AtomicU64::new(1_700_000_000));
        let text = move || {
            let started = format!("process_start_time_seconds {}", starts.fetch_add(1, Ordering::Relaxed));
            let text = start.replace(&metrics.text(), started).into_owned();
            async move { ([("content-type", "text/plain; version=0.0.4")], text) }
        };
        Self::of(Router::new().route("/metrics", get(text))).await
    }

    async fn of(router: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let task = tokio::spawn(async move {
            serve(listener, router, HttpLimits::default()).await;
        });
        Self { address, task }
    }

    fn target(&self, namespace: &str) -> Value {
        json!({"targets": [self.address], "labels": {"namespace": namespace}})
    }
}

/// What fires while the controllers are scraped.
pub(super) const DAY: [(&str, &str); 16] = [
    ("AgentloopAgentApprovalPending", "asker shop"),
    ("AgentloopAgentGuardrailTripping", "crawler LoopDetected lab"),
    ("AgentloopAgentLoopDetected", "crawler lab"),
    ("AgentloopAgentNoProgress", "waiter shop"),
    ("AgentloopAgentNotReady", "crawler lab"),
    ("AgentloopAgentStalled", "miser shop"),
    ("AgentloopAgentToolErrorsHigh", "crawler lab"),
    ("AgentloopAgentUsageUnknown", "crawler lab"),
    ("AgentloopBudgetExhausted", "coins shop"),
    ("AgentloopBudgetNearLimit", "purse shop"),
    ("AgentloopOperatorNoLeader", "agentloop-canary"),
    ("AgentloopOperatorNotReady", "agentloop-blind"),
    ("AgentloopOperatorRestarting", "agentloop-crashing"),
    ("AgentloopSensorNotReady", "shop feed"),
    ("AgentloopSpendRateHigh", "lab"),
    ("AgentloopTasksPilingUp", "waiter shop"),
];
pub(super) const DOWN: (&str, &str) = ("AgentloopOperatorDown", "agentloop-system");

#[tokio::test(flavor = "multi_thread")]
async fn a_day_of_five_agents_fires_the_alerts_of_their_fates_and_none_for_the_healthy_one() {
    if !has("prometheus") {
        return;
    }
    let day = Day::begin().await;
    let main = Endpoint::serve(&day.metrics).await;
    // Other releases in the same Prometheus: one waits for the Lease, one cannot list all objects, and one restarts all the time.
    let release = |leads: i64, filled: i64| {
        let metrics = Arc::new(Metrics::new().unwrap());
        metrics.leader.with_label_values(&[LEASE_NAME]).set(leads);
        metrics.caches_filled.set(filled);
        metrics
    };
    let other = Endpoint::serve(&release(0, 0)).await;
    let blind = Endpoint::serve(&release(1, 0)).await;
    let crashing = Endpoint::serve_restarts(release(1, 1)).await;
    let targets = [
        main.target("agentloop-system"),
        other.target("agentloop-canary"),
        blind.target("agentloop-blind"),
        crashing.target("agentloop-crashing"),
    ];
    let config = json!([{"job_name": "agentloop", "honor_labels": true, "static_configs": targets}]);
    let mut prometheus = Prometheus::start(&config);
    tokio::task::block_in_place(|| {
        prometheus.until_some("all releases", "count(up == 1) == 4");
        prometheus.load_rules(&fast_rules());
    });
    // Until now there was no report for them, however long Prometheus took to start: that is no lack of progress.
    day.put_agents();

    let (began, mut fired) = (Instant::now(), Fired::new());
    let mut ticks = tokio::time::interval(SECOND);
    while began.elapsed() < MAX_WAIT && !missing(&fired, &DAY).is_empty() {
        ticks.tick().await;
        day.report(began.elapsed());
        tokio::task::block_in_place(|| look(&prometheus, &mut fired, began.elapsed()));
    }
    assert_eq!(missing(&fired, &DAY), [], "fired: {fired:#?}");
    day.suspend(CLERK);
    let suspended = r#"agentloop_agent_spec_suspended{namespace="shop",agent="clerk"}"#;
    tokio::task::block_in_place(|| {
        assert_eq!(prometheus.until_value(suspended), "1");
        assert_families(&prometheus);
    });

    // The release is gone, while the others are still scraped.
    main.task.abort();
    let dusk = Instant::now();
    while dusk.elapsed() < NIGHT && !missing(&fired, &[DOWN]).is_empty() {
        ticks.tick().await;
        day.report(began.elapsed());
        tokio::task::block_in_place(|| look(&prometheus, &mut fired, began.elapsed()));
    }
    day.end().await;
    for endpoint in [other, blind, crashing] {
        endpoint.task.abort();
    }
    let expected: Vec<_> = DAY.into_iter().chain([DOWN]).collect();
    assert_eq!(missing(&fired, &expected), [], "fired: {fired:#?}");
    assert_eq!(unexpected(&fired, &expected), [], "fired: {fired:#?}");
}

/// That Prometheus has every family of the registry. No loop ends and no Sensor has an event on this day, and no gateway
/// fails to export.
fn assert_families(prometheus: &Prometheus) {
    let answer = prometheus.get("/api/v1/label/__name__/values");
    let names: BTreeSet<String> = serde_json::from_value(answer["data"].clone()).unwrap();
    let is_there = |name: &str| {
        let names_of = ["", "_count"].map(|suffix| format!("{name}{suffix}"));
        names_of.iter().any(|name| names.contains(name))
    };
    let all = registry::ALL.iter().map(|metric| metric.name);
    let missing: Vec<_> = all.filter(|name| !is_there(name)).collect();
    assert_eq!(
        missing,
        [
            "agentloop_agent_dropped_telemetry_total",
            "agentloop_agent_loop_outcome",
            "agentloop_sensor_last_event_timestamp_seconds"
        ]
    );
}
