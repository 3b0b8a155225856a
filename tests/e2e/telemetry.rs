//! Telemetry as the chart sets it up: a real collector receives traces, logs and metrics of the controller, a gateway and
//! a worker, and the API server says who may read `/metrics`.

use std::net::SocketAddr;

use pretty_assertions::assert_eq;
use serde_json::json;

use super::agents::{Agent, script, scripted};
use super::cluster::{self, Namespace, RELEASE, SYSTEM, SettingsGuard, alone};
use crate::metrics_tls::client;
use crate::support::clusters::host_for_pods;
use crate::support::kubectl::Kubectl;
use crate::support::otlp::{Collector, ReceivedLine, Receiver, is_root};

/// Answers of the model, which are in no telemetry.
const CANARY: &str = "canary-answer";

#[test]
fn the_release_exports_to_a_collector_and_shows_metrics_to_authorized_accounts_only() {
    let Some(cluster) = alone() else { return };
    let host = host_for_pods();
    let runtime = cluster::runtime();
    let receiver = runtime.block_on(Receiver::start());
    let collector = runtime.block_on(Collector::start_on(&host, receiver.address));
    let settings = format!(
        "telemetry.otlp.endpoint=http://{host}:{},telemetry.otlp.logs=true,telemetry.otlp.metrics=true,\
         telemetry.otlp.metricsIntervalSeconds=1,metrics.authentication=Token",
        collector.port
    );
    let _settings = SettingsGuard::start(&cluster.system, &settings);

    let namespace = Namespace::new(&cluster.system, "telemetry");
    namespace.kubectl.apply(&script(
        "plan",
        &json!({"turns": [{"text": CANARY, "delayMilliseconds": 300}]}),
    ));
    let agent = Agent::apply(&namespace, "observed", &scripted("plan"), &json!({}));
    agent.until_turns(3, 60);
    runtime.block_on(exported(&receiver));
    let texts = receiver.others().join("\n");
    assert!(!texts.contains(CANARY), "a text of a model is in logs or metrics");
    let traces = receiver.received();
    let is_in_traces = traces
        .iter()
        .any(|received| String::from_utf8_lossy(&received.body).contains(CANARY));
    assert!(!is_in_traces, "a text of a model is in traces");

    runtime.block_on(scraped(&cluster.system, &namespace));
}

/// Waits until there are traces of a turn and of a reconcile, logs of each component, and metrics.
async fn exported(receiver: &Receiver) {
    receiver
        .until("a turn with its call", |spans| {
            let is_call = |root: &[u8]| {
                spans
                    .iter()
                    .any(|span| span.parent_span_id == root && span.name.starts_with("chat "))
            };
            let mut turns = spans.iter().filter(|span| span.name == "invoke_agent observed");
            turns.any(|turn| is_root(turn) && is_call(&turn.span_id))
        })
        .await;
    receiver
        .until("a reconcile", |spans| {
            spans.iter().any(|span| span.name == "reconcile agent")
        })
        .await;
    let is_of = |line: &ReceivedLine, component: &str| line.of("agentloop.component") == component;
    for component in ["controller", "gateway", "worker"] {
        receiver
            .until_line(&format!("a line of a {component}"), |line| is_of(line, component))
            .await;
    }
    receiver.until_metric("agentloop_agent_turns_total", |_| true).await;
}

/// What accounts of the namespace get of the leader's metrics: one that the role of the chart is bound to, and others.
async fn scraped(system: &Kubectl, namespace: &Namespace) {
    let kubectl = &namespace.kubectl;
    let binding = kubectl.namespace();
    let role = format!("--clusterrole={RELEASE}-metrics-reader");
    let subject = format!("--serviceaccount={}:reader", kubectl.namespace());
    for name in ["reader", "stranger"] {
        kubectl.ok(&["create", "serviceaccount", name]);
    }
    kubectl.ok(&["create", "clusterrolebinding", binding, &role, &subject]);
    let token = |name: &str| kubectl.ok(&["create", "token", name]).trim().to_owned();
    let leader = cluster::leader(system);
    let port = u16::try_from(cluster::metrics_port(&leader)).unwrap();
    let ip = leader["status"]["podIP"].as_str().unwrap().parse().unwrap();
    let map = system
        .get("configmap", "agentloop-metrics-ca")
        .expect("the CA is published");
    let _ = rustls::crypto::ring::default_provider().install_default();
    let service = format!("{RELEASE}-metrics.{SYSTEM}.svc");
    let client = client(
        map["data"]["ca.crt"].as_str().unwrap(),
        &service,
        SocketAddr::new(ip, port),
    );
    let scrape = async |token: Option<String>| {
        let request = client.get(format!("https://{service}/metrics"));
        let request = match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    for (whose, token, status) in [
        ("no token", None, 401),
        ("an unknown token", Some("invalid".to_owned()), 401),
        ("stranger", Some(token("stranger")), 403),
        ("reader", Some(token("reader")), 200),
    ] {
        let (answer, page) = scrape(token).await;
        assert_eq!(answer, status, "{whose}: {page}");
        assert_eq!(page.contains("agentloop_build_info"), status == 200, "{whose}: {page}");
    }
    kubectl.ok(&["delete", "clusterrolebinding", binding]);
}
