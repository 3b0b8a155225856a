//! Debian's Prometheus scrapes the controller, and its own linter finds nothing.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::approvals;
use super::budgets;
use super::cluster::{self, Namespace, shared};
use super::toolbox::write;
use crate::support::dashboards::queries;
use crate::support::prometheus::Prometheus;

#[test]
fn prometheus_scrapes_the_controller_and_answers_queries_with_and_without_honor_labels() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "prometheus");
    namespace.kubectl.apply(&script(
        "plan",
        &json!({"turns": [{"text": "hello"}, {"yield": {"sleep": 3600}}]}),
    ));
    let agent = Agent::apply(&namespace, "scraped", &scripted("plan"), &json!({}));
    agent.until_state("Sleeping", 90);
    let tokens = agent.until("tokens", 60, |agent| {
        agent["status"]["usage"]["outputTokens"].as_i64().filter(|&n| n > 0)
    });

    let leader = cluster::leader(&cluster.system);
    let address = leader["status"]["podIP"].as_str().expect("the leader has an address");
    let prometheus = scrape_twice(&format!("{address}:{}", cluster::metrics_port(&leader)));
    let ns = namespace.kubectl.namespace();
    let state = format!("agentloop_agent_loop_state{{job=\"honest\",namespace=\"{ns}\",state=\"Sleeping\"}}");
    assert_eq!(prometheus.until_value(&state), "1");
    let all = format!("count(agentloop_agent_loop_state{{job=\"honest\",namespace=\"{ns}\"}})");
    assert_eq!(prometheus.until_value(&all), "1", "only the present state");
    let output =
        |label: &str| format!("agentloop_agent_tokens_total{{{label}=\"{ns}\",type=\"output\",agent=\"scraped\"}}");
    assert_eq!(
        prometheus.until_value(&output("job=\"honest\",namespace")),
        tokens.to_string()
    );
    // Without honor_labels Prometheus puts its own target label first and renames ours.
    assert_eq!(
        prometheus.until_value(&output("job=\"plain\",exported_namespace")),
        tokens.to_string()
    );
    let reconciles = "sum(controller_runtime_reconcile_total{job=\"honest\",controller=\"agent\"}) > bool 0";
    assert_eq!(prometheus.until_value(reconciles), "1");
    // A scrape has a second, which a busy machine may need for itself.
    prometheus.until_some("every target at once", "min(up) == 1");
}

#[test]
fn every_query_of_the_dashboards_shows_something_of_a_running_agent_its_budget_and_its_sensor() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "dashboard");
    let limits = json!({
        "tokens": 10_000_000, "inputTokens": 9_000_000, "outputTokens": 9_000_000, "calls": 100_000, "costUSD": "100.00",
    });
    let spec = json!({"selector": {}, "limits": limits, "window": {"rolling": {"seconds": 3600}}});
    namespace.kubectl.apply(&budgets::manifest("shown", &spec));
    // Only a window that ends at a known time has it to show while there is room.
    let monthly = json!({"calendar": {"period": "Monthly", "timeZone": "UTC"}});
    let spec = json!({"selector": {}, "limits": {"calls": 100_000}, "window": monthly});
    namespace.kubectl.apply(&budgets::manifest("monthly", &spec));
    let usage = json!({"inputTokens": 900, "outputTokens": 100});
    let turns = json!([
        {"text": "hello", "usage": usage, "toolCalls": [write("note.txt", "hello")]},
        {"text": "noted", "usage": usage, "yield": {"sleep": 1}},
    ]);
    namespace.kubectl.apply(&script("plan", &json!({"turns": turns})));
    let agent = Agent::apply(&namespace, "scraped", &priced("plan"), &files("Never"));
    agent.until_turns(1, 120);
    let sensor = json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "Sensor",
        "metadata": {"name": "ticks"},
        "spec": {"agentNames": ["scraped"], "source": {"schedule": {"cron": "* * * * *"}}},
    });
    namespace.kubectl.apply(&sensor.to_string());
    // One that answers a task, and one that reaches a limit.
    namespace
        .kubectl
        .apply(&script("says", &json!({"turns": [{"text": "on"}]})));
    let others = [
        (
            "clerk",
            "says",
            json!({"mode": "Task", "task": {"prompt": "What is due?"}}),
        ),
        ("runner", "says", json!({"guardrails": {"maxConsecutiveTurns": 2}})),
    ];
    let _others = others.map(|(name, plan, spec)| Agent::apply(&namespace, name, &priced(plan), &spec));
    ask_and_end(&namespace);
    // Only then is there a moment of the last event to show.
    let ticked = "jsonpath={.status.lastEventTime}";
    namespace.kubectl.wait("sensors.agentloop.dev/ticks", ticked, 150);

    let leader = cluster::leader(&cluster.system);
    let address = leader["status"]["podIP"].as_str().expect("the leader has an address");
    let prometheus = scrape_twice(&format!("{address}:{}", cluster::metrics_port(&leader)));
    let ns = namespace.kubectl.namespace();
    let mut empty = queries(&[
        ("$controller_namespace", "scraper"),
        ("$namespace", ns),
        ("$agent", ".+"),
        ("$budget", ".+"),
        ("$sensor", ".+"),
        ("$job", "honest"),
        ("$instance", ".+"),
        ("$__rate_interval", "30s"),
        ("$__interval", "5s"),
        ("$__range", "1m"),
    ]);
    empty.retain(|query| WITHOUT_DATA.iter().all(|(place, _)| query.place != *place));
    assert!(empty.len() >= 100, "{} queries", empty.len());
    let deadline = Instant::now() + Duration::from_secs(90);
    while !empty.is_empty() && Instant::now() < deadline {
        empty.retain(|query| !prometheus.has_any(&query.query));
        // Prometheus scrapes once a second, without announcing it.
        std::thread::park_timeout(Duration::from_millis(200));
    }
    assert!(empty.is_empty(), "queries without data: {empty:#?}");
    // What must not only be there, but be more than nothing while the Agent spends.
    for metric in [
        "used_tokens",
        "used_usd",
        "limit_tokens",
        "limit_usd",
        "spent_tokens_total",
        "spent_usd_total",
        "leases_total",
        "ledger_writes_total",
    ] {
        let query = format!("min(agentloop_budget_{metric}{{namespace=\"{ns}\"}}) > 0");
        prometheus.until_some(metric, &query);
    }
    // Panels that are never empty.
    let ended = format!("agentloop_agent_loop_outcome{{namespace=\"{ns}\",agent=\"asker\",outcome=\"Completed\"}}");
    prometheus.until_some("the outcome", &ended);
    let approvals =
        format!("agentloop_namespace_approval_wait_seconds_count{{namespace=\"{ns}\",decision=\"Approved\"}}");
    prometheus.until_some("the approval", &format!("{approvals} > 0"));
}

/// A scripted model with a price, which a budget in USD needs.
fn priced(plan: &str) -> Value {
    let mut model = scripted(plan);
    model["price"] = json!({"inputPerMillion": "10.00", "outputPerMillion": "50.00"});
    model
}

/// The built-in tools for files, with this rule for their approval.
fn files(approval: &str) -> Value {
    json!({"tools": {"builtin": ["Files"], "approval": {"default": approval}}})
}

/// An Agent that asks for an approval, gets it, and ends.
fn ask_and_end(namespace: &Namespace) {
    let turns = json!([
        {"text": "I write.", "toolCalls": [write("note.txt", "hello")]},
        {"yield": {"mode": "shutdown", "reason": "it is written"}},
    ]);
    namespace.kubectl.apply(&script("asks", &json!({"turns": turns})));
    let agent = Agent::apply(namespace, "asker", &priced("asks"), &files("Always"));
    let gate = agent.until("a gate", 120, |agent| approvals::gates(agent).first().cloned());
    let text = |field: &str| gate[field].as_str().expect("a text").to_owned();
    let approval = format!("{}:{}", text("id"), text("argumentsHash"));
    approvals::answer(&agent, &[("approve", approval), ("approved-by", "admin".to_owned())]);
    agent.until("an end", 120, |agent| {
        (agent["status"]["loop"]["outcome"] == "Completed").then_some(())
    });
}

#[test]
fn promtool_reports_no_problems_of_the_metrics_page() {
    let Some(cluster) = shared() else { return };
    let page = cluster::metrics(&cluster.system);
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool is installed (package prometheus)");
    promtool
        .stdin
        .take()
        .expect("stdin is piped")
        .write_all(page.as_bytes())
        .expect("promtool reads");
    let output = promtool.wait_with_output().expect("promtool ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.trim().is_empty(),
        "promtool check metrics: {said}"
    );
}

/// Queries that have no data here, and why.
const WITHOUT_DATA: [(&str, &str); 5] = [
    ("agentloop / Operator: Database last answered A", "there is no database"),
    ("agentloop / Agent: Pause reasons B", "no Agent repeats itself"),
    (
        "agentloop / Agent: Tokens by type B",
        "a scripted model does not reason",
    ),
    (
        "agentloop / Agent: Calls refused or not billed exactly B",
        "each call reports its usage",
    ),
    (
        "agentloop / Agent: Calls refused or not billed exactly C",
        "no call is cut",
    ),
];

/// Scrapes one target twice: as the documentation asks for, and with Prometheus' own defaults.
fn scrape_twice(target: &str) -> Prometheus {
    let scrape = |job: &str, honor: bool| json!({"job_name": job, "honor_labels": honor, "static_configs": [{"targets": [target], "labels": {"namespace": "scraper"}}]});
    Prometheus::start(&json!([scrape("honest", true), scrape("plain", false)]))
}
