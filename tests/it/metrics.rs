//! Tests of the metrics: names and types, what a scrape holds, how much it holds, and the page about it.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use agentloop::api::amount::Amount;
use agentloop::api::budget::AgentBudget;
use agentloop::api::{NamespacedName, Sensor};
use agentloop::controller::agent::{AgentsView, ReconcileObserver};
use agentloop::controller::gates::webhook::initialize_webhook_metrics;
use agentloop::controller::history::initialize_history_metrics;
use agentloop::controller::leadership::election::LEASE_NAME;
use agentloop::controller::link_service::initialize_refusal_metrics;
use agentloop::controller::pod_sessions::{LivePod, PodSessions};
use agentloop::controller::reconcile_metrics::MetricsObserver;
use agentloop::controller::runtime::{ReconcileErrorKind, ReconcileResult};
use agentloop::link::messages::{Directives, LoopTotals, PodReport, TelemetryLoss};
use agentloop::telemetry::budget_collector::{BudgetCollector, SpentBudget};
use agentloop::telemetry::families::{PerObject, TakeSnapshot};
use agentloop::telemetry::http::{self, Readiness};
use agentloop::telemetry::metrics::Metrics;
use agentloop::telemetry::registry::{self, MetricKind, MetricSource};
use agentloop::telemetry::requests::CountRequests;
use agentloop::telemetry::sensor_collector::SensorCollector;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tower::{Layer, Service, ServiceExt};

use crate::support::agents::{agent, view};
use crate::support::clusters::has;
use agentloop::api::usage_counts::GuardrailTrip;

/// A controller in full swing: a reconcile of each kind, a request, a budget, these Agents.
pub async fn controller(agents: AgentsView) -> (Arc<Metrics>, Readiness) {
    controller_with(agents, PerObject::Full).await
}

async fn controller_with(agents: AgentsView, level: PerObject) -> (Arc<Metrics>, Readiness) {
    let metrics = Arc::new(Metrics::new().unwrap());
    let budgets = BudgetCollector::new(cache(spent), level);
    metrics.add(Arc::new(budgets));
    metrics.add(Arc::new(SensorCollector::new(cache(|| vec![ticking()]), level)));
    let _queue = metrics.queues.of("agent");
    initialize_refusal_metrics(&metrics);
    initialize_webhook_metrics(&metrics);
    initialize_history_metrics(&metrics);
    metrics.leader.with_label_values(&[LEASE_NAME]).set(1);
    let readiness = Readiness::waiting("the caches to fill");
    let (loops, view) = (heard(), Arc::new(OnceLock::new()));
    let report = MetricsObserver::new(metrics.clone(), view, loops.clone(), readiness.clone(), 8, level);
    agents.for_each(|agent| report.agent_seen(agent));
    report.agents(agents);
    measured(&loops);
    for how in [
        ReconcileResult::Success,
        ReconcileResult::RequeueAfter,
        ReconcileResult::Error(ReconcileErrorKind::Timeout),
    ] {
        report.started();
        report.finished(how, Duration::from_millis(3));
    }
    report.started();
    for status in [200, 409] {
        let answer = tower::service_fn(move |_: Request<()>| async move {
            Ok::<_, std::io::Error>(Response::builder().status(status).body(()).unwrap())
        });
        let mut counted = CountRequests::new(&metrics, "api:443".into()).layer(answer);
        counted.call(Request::new(())).await.unwrap();
    }
    let silence = tower::service_fn(|_: Request<()>| async { Err::<Response<()>, _>(std::io::Error::other("down")) });
    let mut counted = CountRequests::new(&metrics, "api:443".into()).layer(silence);
    assert!(counted.call(Request::new(())).await.is_err());
    (metrics, readiness)
}

/// A cache with these objects.
fn cache<T: 'static>(objects: fn() -> Vec<T>) -> TakeSnapshot<T> {
    Box::new(move || Box::new(move |visit| objects().iter().for_each(visit)))
}

/// The Agent x and its pod.
fn speaker() -> (NamespacedName, LivePod) {
    let pod = LivePod {
        uid: "p".into(),
        epoch: 1,
    };
    (NamespacedName::new("team-a", "x"), pod)
}

/// What the gateway of the Agent x said.
fn heard() -> Arc<PodSessions> {
    let (loops, _) = PodSessions::new();
    let (agent, pod) = speaker();
    loops.expect_pod(
        (&agent, "uid"),
        pod.clone(),
        LoopTotals::default(),
        Directives::default(),
    );
    let mut report = PodReport {
        epoch: 1,
        ..PodReport::default()
    };
    report.budget.refused_calls = 5;
    report.telemetry_loss = TelemetryLoss { spans: 3, logs: 2 };
    loops.report(&agent, &pod, report, jiff::Timestamp::UNIX_EPOCH).unwrap();
    Arc::new(loops)
}

/// What its pod measured before and after the first report of its worker.
fn measured(loops: &PodSessions) {
    let (agent, pod) = speaker();
    for count in [7, 9] {
        let mut report = loops.newest_report(&agent).unwrap();
        report.call_durations = serde_json::from_value(json!([
            {"model": "small", "counts": {"buckets": [count], "sumMicroseconds": 1000 * count}},
            {"model": "unheard-of", "counts": {"buckets": [count]}},
        ]))
        .unwrap();
        let (one, two) = (json!({"buckets": [count]}), json!({"buckets": [0, count]}));
        let of_loop = json!({"durations": {"turns": two, "toolRuns": one, "approvals": {"denied": two}}});
        report.loop_ = Some(serde_json::from_value(of_loop).unwrap());
        loops.report(&agent, &pod, report, jiff::Timestamp::UNIX_EPOCH).unwrap();
    }
}

/// An AgentBudget with all kinds of limits, and one with a limit of tokens.
fn spent() -> Vec<SpentBudget> {
    let all = json!({"tokens": 1000, "inputTokens": 900, "outputTokens": 800, "calls": 70, "costMicroUSD": 2_500_000});
    vec![budget("all", &all), budget("some", &json!({"tokens": 1000}))]
}

/// An AgentBudget whose status has everything.
fn budget(name: &str, limits: &Value) -> SpentBudget {
    let condition = |kind: &str, status: &str| {
        json!({
            "type": kind, "status": status, "reason": "Because", "message": "secret words",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        })
    };
    let budget = json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "AgentBudget",
        "metadata": {"namespace": "team-a", "name": name, "uid": format!("uid-of-{name}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"limits": {"tokens": 1000, "costUSD": "2.50"}, "window": {"rolling": {"seconds": 3600}}},
        "status": {
            "conditions": [condition("Ready", "True"), condition("NearLimit", "False"), condition("example.com/F", "True")],
            "window": {"resetsAt": "2026-01-02T04:00:00Z"},
            "limits": limits,
            "used": {"tokens": 100, "costMicroUSD": 250_000, "calls": 7},
            "reserved": {"tokens": 300, "costMicroUSD": 1_000_000},
            "remaining": {"tokens": 600, "costMicroUSD": 1_250_000},
            "agents": 3,
            "ledger": {"epoch": 8, "watermark": "2026-01-02T03:04:05Z", "nextLease": 12},
        },
    });
    SpentBudget {
        object: Arc::new(serde_json::from_value::<AgentBudget>(budget).unwrap()),
        spent: Amount {
            tokens: 5000,
            cost: 750_000,
            calls: 9,
            ..Amount::ZERO
        },
    }
}

/// A Sensor whose status has everything.
fn ticking() -> Sensor {
    let condition = |kind: &str, status: &str| {
        json!({
            "type": kind, "status": status, "reason": "Because", "message": "secret words",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        })
    };
    let sensor = json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "Sensor",
        "metadata": {"namespace": "team-a", "name": "clock", "uid": "uid-of-clock"},
        "spec": {"agentNames": ["x"], "suspend": true, "source": {"schedule": {"cron": "0 8 * * 1-5"}}},
        "status": {
            "type": "Schedule",
            "conditions": [condition("Ready", "True"), condition("Connected", "Unknown"), condition("example.com/F", "True")],
            "lastEventTime": "2026-01-02T03:04:05.678Z", "lastDeliveryId": "secret words",
            "events": 9, "updates": 18, "notifications": 4, "filtered": 3, "dropped": 2, "refused": 6, "errors": 1,
            "receivers": [{"uid": "uid-of-x", "name": "x", "events": 9}], "pendingDeliveries": 5,
        },
    });
    serde_json::from_value(sensor).unwrap()
}

#[tokio::test]
async fn series_of_a_sensor_match_its_spec_and_status() {
    let (metrics, _) = controller(view(&[])).await;
    let text = metrics.text();
    assert!(!text.contains("secret words"), "no free text in metrics");
    let got: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("agentloop_sensor_"))
        .collect();
    insta::assert_snapshot!("series_of_a_sensor", got.join("\n"));
}

/// An Agent whose status has everything.
pub fn busy(name: &str) -> Value {
    let condition = |kind: &str, status: &str| {
        json!({
            "type": kind, "status": status, "reason": "Because", "message": "secret words",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        })
    };
    let gate = |id: &str, at: &str| json!({"id": id, "kind": "LowConfidence", "tool": "goal", "argumentsHash": "h", "openedAt": at});
    let used = json!({
        "model": "small", "calls": 12, "unknownCalls": 1, "inputTokens": 100, "outputTokens": 50,
        "cacheReadTokens": 20, "reasoningTokens": 7,
        "cacheWriteTokens": 30, "estimatedCalls": 1, "costMicroUSD": 2_500_000,
    });
    let mut usage = used.clone();
    usage["turns"] = json!(11);
    usage["toolCalls"] = json!(9);
    usage["actions"] = json!(4);
    usage["deniedToolCalls"] = json!(2);
    usage["failedTurns"] = json!(3);
    usage["tasks"] = json!({"completed": 6, "failed": 1, "limitReached": 2});
    usage["byModel"] = json!([used]);
    usage["byTool"] = json!([{"tool": "files__read", "ok": 5, "error": 2, "denied": 1, "unavailable": 1, "unknown": 1,
            "timed": 8, "milliseconds": 12_500}]);
    usage["guardrailTrips"] = json!([
        {"guardrail": "LoopDetected", "action": "warn", "count": 3},
        {"guardrail": "OfALaterVersion", "action": "warn", "count": 3},
    ]);
    let mut busy = agent(
        "team-a",
        name,
        &json!({
            "observedGeneration": 2,
            "conditions": [condition("Ready", "False"), condition("Accepted", "True"), condition("PodReady", "Unknown"),
                condition("Suspended", "False"),
                {"type": "LoopDetected", "status": "True", "reason": "Cycle", "message": "secret words",
                    "lastTransitionTime": "2026-01-02T03:04:05Z"},
                condition("example.com/Foreign", "True")],
            "loop": {"state": "Paused", "reasons": ["ProviderRateLimit"], "outcome": "Cancelled", "turn": 12, "waitingTasks": 3,
                "lastTurnTime": "2026-01-02T03:04:06Z"},
            "gates": [gate("a", "2026-01-02T03:04:08Z"), gate("b", "2026-01-02T03:04:07Z")],
            "usage": usage,
            "lastError": {"at": "2026-01-02T03:04:05Z", "kind": "Timeout", "message": "secret words"},
        }),
    );
    busy["spec"]["suspend"] = json!(true);
    busy
}

/// The families of a scrape: name → (type, help, label names of its samples).
fn families(text: &str) -> BTreeMap<String, (String, String, BTreeSet<String>)> {
    let mut families: BTreeMap<String, (String, String, BTreeSet<String>)> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap();
            current = name.into();
            families.entry(current.clone()).or_default().1 = help.into();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            families.entry(current.clone()).or_default().0 = kind.rsplit(' ').next().unwrap().into();
        } else {
            let labels = line
                .split_once('{')
                .map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
            let names = labels
                .split("\",")
                .filter_map(|label| label.split_once('='))
                .map(|(name, _)| name.to_owned());
            families.entry(current.clone()).or_default().2.extend(names);
        }
    }
    families
}

fn series(text: &str) -> BTreeMap<&str, f64> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect()
}

#[test]
fn names_types_and_help_follow_the_rules_of_prometheus() {
    let mut names = BTreeSet::new();
    for metric in registry::ALL {
        let name = metric.name;
        assert!(names.insert(name), "{name} is there twice");
        let known = [
            "agentloop_",
            "controller_runtime_",
            "leader_election_",
            "rest_client_",
            "process_",
            "workqueue_",
        ];
        assert!(known.iter().any(|prefix| name.starts_with(prefix)), "{name}: prefix");
        assert_eq!(
            metric.kind == MetricKind::Counter,
            name.ends_with("_total"),
            "{name}: only counters end with _total"
        );
        assert!(
            metric.help.ends_with('.') && metric.help.len() > 20,
            "{name}: a sentence of help"
        );
        for label in metric.labels {
            assert!(
                !["run", "session", "turn", "uid", "pod", "user", "error", "message"].contains(label),
                "{name}: {label}"
            );
        }
        for (object, source) in [
            ("agent", MetricSource::Agents),
            ("budget", MetricSource::Budgets),
            ("sensor", MetricSource::Sensors),
            ("", MetricSource::Namespaces),
        ] {
            if source == MetricSource::Namespaces {
                assert_eq!(
                    name.starts_with("agentloop_namespace_"),
                    metric.source == source,
                    "{name}"
                );
                continue;
            }
            let about_one = metric.labels.starts_with(&["namespace", object]);
            assert_eq!(about_one, metric.source == source, "{name}");
        }
    }
}

#[tokio::test]
async fn a_scrape_holds_every_metric_of_the_registry_and_nothing_else() {
    let (metrics, _) = controller(view(&[busy("x")])).await;
    let scraped = families(&metrics.text());
    let want: BTreeMap<_, _> = registry::ALL
        .iter()
        .map(|metric| {
            let kind: &str = metric.kind.into();
            let mut labels: BTreeSet<String> = metric.labels.iter().map(ToString::to_string).collect();
            if metric.kind == MetricKind::Histogram {
                labels.insert("le".into());
            }
            (
                metric.name.to_owned(),
                (kind.to_owned(), metric.help.to_owned(), labels),
            )
        })
        .collect();
    assert_eq!(scraped, want);
}

#[tokio::test]
async fn series_of_an_agent_match_its_spec_and_status() {
    let (metrics, _) = controller(view(&[busy("x")])).await;
    let text = metrics.text();
    assert!(!text.contains("secret words"), "no free text in metrics");
    let got: Vec<String> = text
        .lines()
        .filter(|line| line.starts_with("agentloop_agent_"))
        .map(Into::into)
        .collect();
    insta::assert_snapshot!("series_of_an_agent", got.join("\n"));
}

#[tokio::test]
async fn series_of_a_budget_match_its_status_for_limited_kinds() {
    let (metrics, _) = controller(view(&[])).await;
    let text = metrics.text();
    assert!(!text.contains("secret words"), "no free text in metrics");
    let got: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("agentloop_budget_"))
        .collect();
    insta::assert_snapshot!("series_of_a_budget", got.join("\n"));
}

#[tokio::test]
async fn an_agent_never_visited_has_its_counters_at_zero_and_no_state() {
    let (metrics, _) = controller(view(&[agent("team-a", "x", &json!({}))])).await;
    let text = metrics.text();
    let series = series(&text);
    let id = r#"agent="x",model="small",namespace="team-a""#;
    for (name, want) in [
        (format!(r#"agentloop_agent_tokens_total{{{id},type="output"}}"#), 0.0),
        (format!("agentloop_agent_calls_total{{{id}}}"), 0.0),
        (
            r#"agentloop_agent_status_condition{agent="x",namespace="team-a",condition="Ready",status="unknown"}"#
                .into(),
            1.0,
        ),
        (
            r#"agentloop_namespace_agents{namespace="team-a",state="None"}"#.into(),
            1.0,
        ),
    ] {
        let found = series.iter().find(|(key, _)| same_series(key, &name));
        assert_eq!(found.map(|(_, value)| *value), Some(want), "{name}");
    }
    assert!(!text.contains("agentloop_agent_loop_state"), "{text}");
}

/// Whether two series have the same name and labels, in any order.
fn same_series(left: &str, right: &str) -> bool {
    let parts = |series: &str| -> BTreeSet<String> { series.split(['{', ',', '}']).map(Into::into).collect() };
    parts(left) == parts(right)
}

#[tokio::test]
async fn durations_are_counted_by_namespace_under_the_labels_of_the_spec() {
    let (metrics, _) = controller(view(&[busy("x")])).await;
    let text = metrics.text();
    // The calls before the first report of this pod are unknown, unlike those of a model that it had not used.
    for line in [
        r#"call_duration_seconds_count{namespace="team-a",model="small"} 9"#,
        r#"call_duration_seconds_count{namespace="team-a",model="other"} 9"#,
        r#"call_duration_seconds_sum{namespace="team-a",model="small"} 0.009"#,
        r#"turn_duration_seconds_count{namespace="team-a",mode="Continuous"} 2"#,
        r#"tool_call_duration_seconds_count{namespace="team-a"} 2"#,
        r#"approval_wait_seconds_count{namespace="team-a",decision="Denied"} 2"#,
        r#"approval_wait_seconds_count{namespace="team-a",decision="Expired"} 0"#,
    ] {
        let line = format!("agentloop_namespace_{line}");
        assert!(text.lines().any(|found| found == line), "{line}");
    }
}

#[tokio::test]
async fn a_deleted_agent_leaves_no_series_behind() {
    use kube::runtime::{reflector, watcher::Event};
    let (store, mut writer) = reflector::store();
    let object = serde_json::from_value(busy("x")).unwrap();
    writer.apply_watcher_event(&Event::Apply(object));
    let (metrics, _) = controller(AgentsView::new(vec![store])).await;
    assert!(metrics.text().contains("agentloop_agent_info"));
    let object = serde_json::from_value(busy("x")).unwrap();
    writer.apply_watcher_event(&Event::Delete(object));
    assert!(!metrics.text().contains("agentloop_agent_"));
    // The sum of the namespace, which does not have its 11 turns from before this process, stays.
    let text = metrics.text();
    assert!(
        text.contains("agentloop_namespace_turns_total{namespace=\"team-a\",outcome=\"Completed\"} 0\n"),
        "{text}"
    );
}

/// A healthy Agent with one model that has used two tools.
fn healthy(name: &str) -> Value {
    let condition = |kind: &str, status: &str| {
        json!({
            "type": kind, "status": status, "reason": "Because", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        })
    };
    let used = json!({"model": "small", "calls": 12, "inputTokens": 100, "outputTokens": 50});
    let mut usage = used.clone();
    usage["turns"] = json!(11);
    usage["byModel"] = json!([used]);
    usage["byTool"] = json!([
        {"tool": "files__read", "ok": 5, "timed": 5, "milliseconds": 12_500},
        {"tool": "files__write", "ok": 2, "timed": 2, "milliseconds": 500},
    ]);
    let conditions = ["Ready", "Accepted", "PodReady", "ModelAvailable", "SensorsHealthy"];
    let mut conditions: Vec<_> = conditions.iter().map(|kind| condition(kind, "True")).collect();
    conditions.push(condition("RateLimited", "False"));
    let status = json!({
        "observedGeneration": 3, "conditions": conditions, "usage": usage,
        "loop": {"state": "Sleeping", "turn": 12, "lastTurnTime": "2026-01-02T03:04:05Z"},
    });
    agent("team-a", name, &status)
}

#[tokio::test]
async fn a_thousand_healthy_agents_have_as_many_series_as_the_formula_yields_at_each_level() {
    let agents: Vec<Value> = (0..1000).map(|number| healthy(&format!("agent-{number}"))).collect();
    // info, created, two generations; state, last turn; five conditions; turns, tool calls, refused calls; calls, four types of
    // tokens and cost of one model; of each of two tools one outcome and its time.
    let full = 4 + 2 + 5 + 3 + 6 + 2 * 2;
    assert_eq!(full, 24);
    // info, state; five conditions; tokens and cost.
    let minimal = 2 + 5 + 5;
    for (level, each) in [
        (PerObject::Full, full),
        (PerObject::Minimal, minimal),
        (PerObject::Disabled, 0),
    ] {
        let (metrics, _) = controller_with(view(&agents), level).await;
        let text = metrics.text();
        let count = |prefix: &str| text.lines().filter(|line| line.starts_with(prefix)).count();
        // No gateway has reported here, so refused calls are absent.
        let without_report = if level == PerObject::Full { each - 1 } else { each };
        assert_eq!(count("agentloop_agent_"), 1000 * without_report, "{level:?}");
        // Of five kinds of limits in one budget and one in the other: limit, reserved, spent and used. Time of creation, Agents, leases,
        // writes, reset and a condition.
        let budget = match level {
            PerObject::Full => 6 * 4 + 2 * 6,
            PerObject::Minimal => 6 * 3 + 2,
            PerObject::Disabled => 0,
        };
        assert_eq!(count("agentloop_budget_"), budget, "{level:?}");
        let sensor = match level {
            PerObject::Full => 13,
            PerObject::Minimal => 1 + 2,
            PerObject::Disabled => 0,
        };
        assert_eq!(count("agentloop_sensor_"), sensor, "{level:?}");
        // Agents by state; approvals, calls, cost, refused calls; outcomes of turns, tasks and tools; types of tokens.
        let namespace = 7 + GuardrailTrip::all().count() + 4 + 2 + 3 + 5 + 4;
        assert_eq!(count("agentloop_namespace_"), namespace, "{level:?}");
        let all = text.lines().filter(|line| !line.starts_with('#')).count();
        let own = all - 1000 * without_report - budget - sensor - namespace;
        assert!(
            own < 130,
            "{own} series of the controller itself, however many Agents there are"
        );
    }
}

#[tokio::test]
async fn promtool_reports_no_problems() {
    let (metrics, _) = controller(view(&[busy("x")])).await;
    if !has("promtool") {
        return;
    }
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool
        .stdin
        .take()
        .unwrap()
        .write_all(metrics.text().as_bytes())
        .unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert_eq!(
        (String::from_utf8_lossy(&said).as_ref(), output.status.success()),
        ("", true)
    );
}

#[tokio::test]
async fn probes_report_pending_conditions_and_metrics_are_served_as_text() {
    let (metrics, readiness) = controller(view(&[])).await;
    let peer = IpAddr::from([127, 0, 0, 1]);
    let app =
        http::probes(readiness.clone()).merge(http::metrics(metrics, http::SCRAPE_WAIT).layer(axum::Extension(peer)));
    let get = async |path: &str| {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        let (head, body) = response.into_parts();
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
    };
    readiness.set(Some("the caches to fill"));
    let (status, _, body) = get("/readyz").await;
    assert_eq!(
        (status, body.as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, "waiting for the caches to fill\n")
    );
    assert_eq!(get("/healthz").await.0, StatusCode::OK);
    readiness.set(None);
    assert_eq!(get("/readyz").await.0, StatusCode::OK);
    let (status, headers, body) = get("/metrics").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let build = body
        .lines()
        .find(|line| line.starts_with("agentloop_build_info{"))
        .unwrap();
    assert!(build.contains("rustc=\"1.") && build.ends_with(" 1"), "{build}");
}

#[test]
fn every_query_of_the_dashboards_uses_metrics_of_the_registry_and_their_labels() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/agentloop/dashboards");
    let mut asked = BTreeSet::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let board: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!((&board["schemaVersion"], &board["id"]), (&json!(39), &Value::Null));
        assert!(
            board["uid"]
                .as_str()
                .is_some_and(|uid| !uid.is_empty() && uid.len() <= 40)
        );
        assert!(board.get("__inputs").is_none(), "provisioning knows no inputs");
        let panels: Vec<_> = board["panels"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|panel| panel["type"] != "row")
            .collect();
        let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_i64().unwrap()).collect();
        assert_eq!(ids.len(), panels.len(), "ids of panels");
        for panel in &panels {
            let title = panel["title"].as_str().unwrap();
            assert!(
                panel["description"].as_str().is_some_and(|text| text.ends_with('.')),
                "{title}: description"
            );
            assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{title}: unit");
            for target in panel["targets"].as_array().unwrap() {
                for place in [&panel["datasource"], &target["datasource"]] {
                    assert_eq!(*place, json!({"type": "prometheus", "uid": "${datasource}"}), "{title}");
                }
                asked.extend(check_query(title, target["expr"].as_str().unwrap()));
            }
        }
        for variable in board["templating"]["list"].as_array().unwrap() {
            if variable["type"] == "query" {
                asked.extend(check_query("a variable", variable["query"]["query"].as_str().unwrap()));
            }
        }
        for annotation in board["annotations"]["list"].as_array().unwrap() {
            check_query("an annotation", annotation["expr"].as_str().unwrap());
        }
    }
    let missing: Vec<&str> = registry::ALL
        .iter()
        .map(|metric| metric.name)
        .filter(|name| !asked.contains(name))
        .collect();
    assert!(missing.is_empty(), "no panel shows {missing:?}");
}

/// The metrics that a query names: each is in the registry, has the labels that are asked of it, and counters are only
/// looked at as rates.
fn check_query(place: &str, query: &str) -> BTreeSet<&'static str> {
    let mut asked = BTreeSet::new();
    let word = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let prefixes = [
        "agentloop_",
        "workqueue_",
        "controller_runtime_",
        "rest_client_",
        "leader_election_",
        "process_",
    ];
    let places = prefixes.iter().flat_map(|prefix| query.match_indices(prefix));
    for (at, _) in places.filter(|(at, _)| !query[..*at].ends_with(word)) {
        let name: String = query[at..].chars().take_while(|one| word(*one)).collect();
        let metric = registry::ALL.iter().find(|metric| match metric.kind {
            MetricKind::Summary | MetricKind::Histogram => ["_bucket", "_sum", "_count"]
                .iter()
                .any(|end| name.strip_suffix(end) == Some(metric.name)),
            MetricKind::Counter | MetricKind::Gauge => metric.name == name,
        });
        let metric = metric.unwrap_or_else(|| panic!("{place}: no metric is called {name}"));
        asked.insert(metric.name);
        let leads = format!("name=\"{LEASE_NAME}\"");
        assert!(
            name != registry::LEADER.name || query.contains(&leads),
            "{place}: {query}"
        );
        let rest = &query[at + name.len()..];
        let selector = rest
            .strip_prefix('{')
            .map_or("", |rest| rest.split('}').next().unwrap());
        for part in selector.split(',').filter(|part| !part.is_empty()) {
            let label: String = part.chars().take_while(|one| word(*one)).collect();
            // Prometheus adds the labels of the target.
            assert!(
                metric.labels.contains(&label.as_str()) || ["namespace", "job", "instance"].contains(&label.as_str()),
                "{place}: {name} has no label {label}"
            );
        }
        // Annotations compare a count with what it was.
        if metric.kind != MetricKind::Gauge && place != "an annotation" {
            let before = &query[..at];
            let rated = ["rate(", "increase("].iter().any(|function| before.ends_with(function));
            // Of the highest value of all replicas.
            let of_highest = ["rate((max by (", "increase((max by ("].into_iter();
            let mut labels = of_highest.filter_map(|start| Some(before.rsplit_once(start)?.1));
            let rated = rated || labels.any(|labels| labels.find(')') == labels.len().checked_sub(3));
            assert!(rated, "{place}: {name} only grows; ask for its rate");
        }
    }
    assert!(!asked.is_empty(), "{place}: {query} asks for nothing of ours");
    asked
}

#[test]
fn the_reference_page_matches_the_registry() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/metrics.md");
    if std::env::var_os("AGENTLOOP_GENERATE").is_some() {
        std::fs::create_dir_all(std::path::Path::new(path).parent().unwrap()).unwrap();
        std::fs::write(path, registry::reference()).unwrap();
    }
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(
        page,
        registry::reference(),
        "write it anew: AGENTLOOP_GENERATE=1 cargo test --test it reference_page"
    );
}
