//! A day of five Agents: this test stands in for kubelet and gateways, and reports for the Agents each second.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

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
use crate::support::dashboards::{BoardQuery, EVERYTHING, queries};
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

/// Works, and has an error now and then. What alerts are about stays just below their thresholds; in the evening its loop ends.
const CLERK: AgentId = ("shop", "clerk");
/// When the clerk has a gate, in seconds: twenty minutes of the day, while the alert needs thirty.
const SHORT_GATE: Range<u64> = 10..30;
/// Its budget is exhausted, and its gateway knows no time at which there is room again. It is two hours old, and so are its calls of
/// unknown usage.
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
    /// By how many seconds the clock of the API server is behind.
    behind: Arc<AtomicU32>,
    sessions: Arc<PodSessions>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    controller: JoinHandle<()>,
}

impl Day {
    async fn begin() -> Self {
        let behind = Arc::new(AtomicU32::new(0));
        let clock = behind.clone();
        let server = ApiServer::new(Arc::new(move || {
            Timestamp::now() - SECOND * clock.load(Ordering::Relaxed)
        }));
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
            behind,
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
            let mut object = json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
                "metadata": {"name": name, "namespace": namespace, "labels": {"agent": name}}, "spec": spec,
            });
            if agent == MISER {
                object["status"] = json!({"usage": report_of(MISER, 1)["usage"]});
                self.behind.store(2 * 3600, Ordering::Relaxed);
            }
            self.server.put(AGENTS, object);
            self.behind.store(0, Ordering::Relaxed);
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
        self.report_with(time, &json!({}));
    }

    /// In the evening, the loop of the clerk has ended.
    fn report_end(&self, time: Duration) {
        self.report_with(time, &json!({"state": "Stopped", "outcome": "Completed"}));
    }

    /// What kubelet and gateways do, where the loop of the clerk differs by this.
    fn report_with(&self, time: Duration, of_clerk: &Value) {
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
            let mut report = report_of(agent, time.as_secs());
            if agent == CLERK {
                let told = report["loop"].as_object_mut().unwrap();
                told.insert("sensors".into(), json!([self.events_of("ticks", time.as_secs())]));
                told.extend(of_clerk.as_object().unwrap().clone());
            }
            let mut report: PodReport = serde_json::from_value(report).unwrap();
            report.epoch = live.epoch;
            let (key, now) = (NamespacedName::new(namespace, name), Timestamp::now());
            // The controller may not expect this pod yet.
            if self.sessions.attach(&key, &live, now).is_ok() {
                self.sessions.report(&key, &live, report, now).unwrap();
            }
        }
    }

    /// What the pod of its Agent reports about a Sensor.
    fn events_of(&self, sensor: &str, second: u64) -> Value {
        let sensor = self.server.get("agentloop.dev/sensors", CLERK.0, sensor).unwrap();
        json!({
            "uid": sensor["metadata"]["uid"], "generation": sensor["metadata"]["generation"],
            "totals": {"events": second, "updates": second, "notifications": second},
            "last": {"at": Timestamp::now(), "id": second.to_string()},
        })
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
            "usage": usage(1, &json!({"unknownCalls": 2})), "budget": {"refusedCalls": second},
        }),
        _ => report_of_clerk(second),
    }
}

fn report_of_clerk(second: u64) -> Value {
    let gate = json!({
        "id": "g2", "kind": "ToolCallNeedsApproval", "tool": "files__write", "argumentsHash": "bb",
        "openedAt": "2026-01-02T03:04:05Z",
    });
    let gates = if SHORT_GATE.contains(&second) {
        vec![gate]
    } else {
        vec![]
    };
    let closed = u64::from(second >= SHORT_GATE.end);
    let trouble = second.saturating_sub(TROUBLE.as_secs());
    json!({
        "loop": {
            "state": "Running", "turn": second, "turns": second, "toolCalls": second, "actions": 1, "waitingTasks": 9,
            "tasks": {"completed": second},
            "byTool": [{"tool": "files__read", "ok": 20 * second, "error": 1, "timed": second, "milliseconds": 50}],
            "guardrailTrips": [
                {"guardrail": "LoopDetected", "action": "deny", "count": trouble.min(4)},
                {"guardrail": "LoopDetected", "action": "warn", "count": trouble},
            ],
            "gates": gates,
            "durations": {
                "turns": {"buckets": [second]}, "toolRuns": {"buckets": [second]},
                "approvals": {"approved": {"buckets": [closed]}},
            },
        },
        "usage": usage(second, &json!({"costMicroUSD": 10_000 * second})),
        "callDurations": [{"model": "demo", "counts": {"buckets": [second]}}],
        "telemetryLoss": {"spans": second, "logs": 1},
    })
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

/// What the day ends with.
const EVENING: [(&str, &str); 2] = [
    (
        "a suspension",
        r#"agentloop_agent_spec_suspended{namespace="shop",agent="asker"}"#,
    ),
    (
        "an end",
        r#"agentloop_agent_loop_outcome{namespace="shop",agent="clerk",outcome="Completed"}"#,
    ),
];
/// What comes as close to an alert as it can without one: nine tasks of ten, four trips of five besides warnings, twenty minutes of
/// thirty, and calls of unknown usage more than an hour ago. No alert about these Agents is expected.
const NEAR_MISSES: [(&str, &str); 4] = [
    (
        "AgentloopTasksPilingUp",
        r#"max_over_time(agentloop_agent_waiting_tasks{agent="clerk"}[5m]) == 9"#,
    ),
    (
        "AgentloopAgentGuardrailTripping",
        r#"max_over_time(namespace_agent_guardrail:agentloop_agent_guardrail_trips:increase1h{agent="clerk"}[5m]) == 4"#,
    ),
    (
        "AgentloopAgentApprovalPending",
        r#"count_over_time(ALERTS{alertname="AgentloopAgentApprovalPending",agent="clerk",alertstate="pending"}[5m]) > 10"#,
    ),
    (
        "AgentloopAgentUsageUnknown",
        r#"namespace_agent:agentloop_agent_unknown_calls:increase1h{agent="miser"} == 0"#,
    ),
];

/// Queries of dashboards for which this day has nothing, and why.
const WITHOUT_DATA: [(&str, &str); 6] = [
    ("agentloop / Budgets: Time to exhaustion A", NO_LEASES),
    ("agentloop / Budgets: Time to exhaustion B", NO_LEASES),
    ("agentloop / Budgets: Time to exhaustion C", NO_LEASES),
    ("agentloop / Budgets: Time to exhaustion D", NO_LEASES),
    ("agentloop / Budgets: Time to exhaustion E", NO_LEASES),
    (
        "agentloop / Operator: Database last answered A",
        "there is no database; see the tests of histories",
    ),
];
const NO_LEASES: &str = "gateways take no leases, so that nothing of a budget is spent";

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

    let (began, morning, mut fired) = (Instant::now(), SystemTime::now(), Fired::new());
    let mut ticks = tokio::time::interval(SECOND);
    while began.elapsed() < MAX_WAIT && !missing(&fired, &DAY).is_empty() {
        ticks.tick().await;
        day.report(began.elapsed());
        tokio::task::block_in_place(|| look(&prometheus, &mut fired, began.elapsed()));
    }
    assert_eq!(missing(&fired, &DAY), [], "fired: {fired:#?}");
    day.suspend(ASKER);
    day.report_end(began.elapsed());
    tokio::task::block_in_place(|| {
        for (what, query) in EVENING {
            prometheus.until_some(what, query);
        }
        for (alert, query) in NEAR_MISSES {
            prometheus.until_some(alert, query);
        }
        assert_families(&prometheus);
        assert_panels(&prometheus, morning);
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

/// That Prometheus has every family of the registry.
fn assert_families(prometheus: &Prometheus) {
    let answer = prometheus.get("/api/v1/label/__name__/values");
    let names: BTreeSet<String> = serde_json::from_value(answer["data"].clone()).unwrap();
    let is_there = |name: &str| {
        let names_of = ["", "_count"].map(|suffix| format!("{name}{suffix}"));
        names_of.iter().any(|name| names.contains(name))
    };
    let all = registry::ALL.iter().map(|metric| metric.name);
    let missing: Vec<_> = all.filter(|name| !is_there(name)).collect();
    assert_eq!(missing, [""; 0]);
}

/// That each query of each panel of the dashboards has a number at some time of the day; what shows the present, in the evening.
fn assert_panels(prometheus: &Prometheus, morning: SystemTime) {
    let queries = queries(&EVERYTHING);
    assert!(queries.len() >= 100, "{} queries", queries.len());
    let has_data = |query: &BoardQuery| {
        if query.is_instant {
            prometheus.has_number(&query.query)
        } else {
            prometheus.has_number_since(&query.query, morning)
        }
    };
    let empty = queries
        .iter()
        .filter(|query| !has_data(query))
        .map(|query| query.place.as_str());
    let empty: BTreeSet<_> = empty.collect();
    let expected = BTreeSet::from(WITHOUT_DATA.map(|(place, _)| place));
    assert_eq!(empty, expected, "queries without data");
}
