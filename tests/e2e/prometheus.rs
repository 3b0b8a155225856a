//! Debian's Prometheus scrapes the controller, and its own linter finds nothing.

use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::budgets;
use super::cluster::{self, Namespace, shared};
use crate::support::http;

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
    let prometheus = Prometheus::start(&format!("{address}:{}", cluster::metrics_port(&leader)));
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
    assert_eq!(
        prometheus.until_value("count(up == 0) or vector(0)"),
        "0",
        "every scrape worked"
    );
}

#[test]
fn every_panel_of_the_dashboard_shows_something_of_a_running_agent_its_budget_and_its_sensor() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "dashboard");
    let limits = json!({
        "tokens": 10_000_000, "inputTokens": 9_000_000, "outputTokens": 9_000_000, "calls": 100_000, "costUSD": "100.00",
    });
    let spec = json!({"selector": {}, "limits": limits, "window": {"rolling": {"seconds": 3600}}});
    namespace.kubectl.apply(&budgets::manifest("shown", &spec));
    let turn = json!({"text": "hello", "usage": {"inputTokens": 900, "outputTokens": 100}, "yield": {"sleep": 1}});
    namespace.kubectl.apply(&script("plan", &json!({"turns": [turn]})));
    let mut model = scripted("plan");
    model["price"] = json!({"inputPerMillion": "10.00", "outputPerMillion": "50.00"});
    let agent = Agent::apply(&namespace, "scraped", &model, &json!({}));
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
    let _others = others.map(|(name, plan, spec)| Agent::apply(&namespace, name, &scripted(plan), &spec));
    // Only then is there a moment of the last event to show.
    let ticked = "jsonpath={.status.lastEventTime}";
    namespace.kubectl.wait("sensors.agentloop.dev/ticks", ticked, 150);

    let leader = cluster::leader(&cluster.system);
    let address = leader["status"]["podIP"].as_str().expect("the leader has an address");
    let prometheus = Prometheus::start(&format!("{address}:{}", cluster::metrics_port(&leader)));
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/agentloop/dashboards");
    let ns = namespace.kubectl.namespace();
    let mut empty = Vec::new();
    for board in std::fs::read_dir(folder).expect("the boards") {
        let text = std::fs::read_to_string(board.expect("a file").path()).expect("a board");
        let board: Value = serde_json::from_str(&text).expect("JSON");
        for panel in board["panels"].as_array().expect("panels") {
            let title = panel["title"].as_str().expect("a title");
            let targets = panel["targets"].as_array().into_iter().flatten();
            let queries = targets.map(|target| query(target["expr"].as_str().expect("a query"), ns));
            let queries: Vec<String> = queries.collect();
            if !queries.is_empty() && !WITHOUT_DATA.contains(&title) {
                empty.push((format!("{}: {title}", board["title"]), queries));
            }
        }
    }
    assert!(empty.len() >= 60, "{} panels", empty.len());
    let deadline = Instant::now() + Duration::from_secs(90);
    while !empty.is_empty() && Instant::now() < deadline {
        empty.retain(|(_, queries)| !prometheus.has_any(queries));
        // Prometheus scrapes once a second; it tells nobody when.
        std::thread::park_timeout(Duration::from_millis(200));
    }
    assert!(empty.is_empty(), "panels without data: {empty:#?}");
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
}

#[test]
fn promtool_finds_nothing_wrong_with_the_metrics_page() {
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

/// A Prometheus of this test, on loopback; ends with its value.
struct Prometheus {
    child: Child,
    address: String,
    _data: tempfile::TempDir,
}

/// Panels that show something only once tools of a server have run, which no Agent here has, or with a database.
const WITHOUT_DATA: [&str; 3] = [
    "Duration of tool runs",
    "Tool calls by outcome",
    "Database last answered",
];

/// A query of a board with values for its variables.
fn query(text: &str, namespace: &str) -> String {
    let text = text.replace("$namespace", namespace).replace("$job", "honest");
    let text = ["$agent", "$budget", "$sensor", "$instance"]
        .iter()
        .fold(text, |text, variable| text.replace(variable, ".+"));
    let text = text.replace("$__rate_interval", "30s").replace("$__range", "1m");
    assert!(!text.contains('$'), "a variable without a value: {text}");
    text
}

impl Prometheus {
    /// Scrapes one target twice: as the documentation asks for, and with Prometheus' own defaults.
    fn start(target: &str) -> Self {
        let data = tempfile::tempdir().expect("a temporary directory");
        let scrape = |job: &str, honor: bool| json!({"job_name": job, "honor_labels": honor, "static_configs": [{"targets": [target], "labels": {"namespace": "scraper"}}]});
        let config = json!({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape("honest", true), scrape("plain", false)]});
        let file = data.path().join("prometheus.yml");
        std::fs::write(&file, config.to_string()).expect("the configuration can be written");
        let address = free_address();
        let child = Self::command(&file, &data.path().join("tsdb"), &address)
            .spawn()
            .expect("prometheus is installed");
        Self {
            child,
            address,
            _data: data,
        }
    }

    fn command(config: &Path, data: &Path, address: &str) -> Command {
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", data.display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// The value of a query that gives one sample, once there is one.
    fn until_value(&self, query: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = self.query(query);
            let results = answer["data"]["result"].as_array().cloned().unwrap_or_default();
            if let [only] = results.as_slice() {
                return only["value"][1].as_str().expect("a sample has a value").to_owned();
            }
            assert!(Instant::now() < deadline, "{query} gave {answer}");
            // Prometheus scrapes once a second; it tells nobody when.
            std::thread::park_timeout(Duration::from_millis(200));
        }
    }

    /// Whether one of the queries gives any samples.
    fn has_any(&self, queries: &[String]) -> bool {
        queries.iter().any(|query| {
            let answer = self.query(query);
            answer["data"]["result"]
                .as_array()
                .is_some_and(|samples| !samples.is_empty())
        })
    }

    /// Waits until a query gives any samples.
    fn until_some(&self, what: &str, query: &str) {
        let deadline = Instant::now() + Duration::from_secs(90);
        while !self.has_any(&[query.to_owned()]) {
            assert!(Instant::now() < deadline, "{what} shows nothing: {query}");
            // Prometheus scrapes once a second; it tells nobody when.
            std::thread::park_timeout(Duration::from_millis(200));
        }
    }

    fn query(&self, query: &str) -> Value {
        let listens = std::net::TcpStream::connect(&self.address).is_ok();
        let form = format!("query={}", percent(query));
        let path = "/api/v1/query";
        let answer =
            listens.then(|| http::request(&self.address, "POST", path, "application/x-www-form-urlencoded", &form));
        answer
            .and_then(|(_, body)| serde_json::from_str(&body).ok())
            .unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    listener.local_addr().expect("it is bound").to_string()
}

fn percent(text: &str) -> String {
    text.bytes()
        .fold(String::new(), |all, byte| all + &format!("%{byte:02X}"))
}
