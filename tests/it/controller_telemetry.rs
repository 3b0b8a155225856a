//! What a controller exports over OTLP: traces of its reconciles, its metrics and its log, and nothing by default.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use agentloop::controller::leadership::election::LEASE_NAME;
use opentelemetry_proto::tonic::metrics::v1::AggregationTemporality;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;
use tempfile::TempDir;

use crate::support::api_server::ApiServer;
use crate::support::clusters;
use crate::support::otlp::{Collector, Receiver, attribute};
use crate::support::ports::free_port;

/// In the instructions of the Agent, and in the headers of the collector.
const CANARY: &str = "canary";

/// A controller as a process of its own, with an API server in memory that has one Agent.
struct ControllerProcess {
    child: Child,
    directory: TempDir,
    metrics: u16,
    server: ApiServer,
}

impl ControllerProcess {
    /// A controller that leads without election.
    async fn start(variables: &[(&str, &str)]) -> Self {
        Self::start_with(&["--leader-elect=false"], variables).await
    }

    async fn start_with(flags: &[&str], variables: &[(&str, &str)]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = ApiServer::new(Arc::new(jiff::Timestamp::now));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = server.router();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        server.put("agentloop.dev/agents", agent());
        let own = json!({"name": "agentloop-7", "namespace": "system"});
        server.put(
            "/pods",
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": {"containers": []}}),
        );
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("kubeconfig"), kubeconfig(address).to_string()).unwrap();
        let metrics = free_port();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("controller")
            .args(flags)
            .arg(format!("--metrics-address=127.0.0.1:{metrics}"))
            .arg(format!("--probe-address=127.0.0.1:{}", free_port()))
            .arg(format!("--link-address=127.0.0.1:{}", free_port()))
            .env_clear()
            .env("KUBECONFIG", directory.path().join("kubeconfig"))
            .env("AGENTLOOP_IMAGE", "agentloop:test")
            .env("POD_NAME", "agentloop-7")
            .env("POD_NAMESPACE", "system")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self {
            child,
            directory,
            metrics,
            server,
        }
    }

    /// Waits until the process has ended without a signal.
    async fn ended(&mut self) -> std::process::ExitStatus {
        let deadline = tokio::time::Instant::now() + Duration::from_mins(1);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(tokio::time::Instant::now() < deadline, "it never ends: {}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// What a scraper reads that asks for this type.
    async fn scrape(&self, accept: &str) -> String {
        let url = format!("http://127.0.0.1:{}/metrics", self.metrics);
        let request = reqwest::Client::new().get(url).header("accept", accept);
        request.send().await.unwrap().text().await.unwrap()
    }

    /// Waits until a line of a scrape is as it should be.
    async fn until_scraped(&self, what: &str, wanted: impl Fn(&str) -> bool) {
        let deadline = tokio::time::Instant::now() + Duration::from_mins(1);
        loop {
            let text = match reqwest::get(format!("http://127.0.0.1:{}/metrics", self.metrics)).await {
                Ok(response) => response.text().await.unwrap(),
                Err(_) => String::new(),
            };
            if text.lines().any(&wanted) {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "never {what}: {}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for ControllerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn agent() -> serde_json::Value {
    let model = json!({"api": "OpenAIChat", "name": "m", "baseUrl": "https://models.example.com/v1",
        "apiKeySecretRef": {"name": "key", "key": "key"}});
    let spec = json!({"instructions": format!("Be {CANARY}."), "storage": {"ephemeral": true}, "model": model});
    let metadata = json!({"name": "watcher", "namespace": "team-a", "uid": "uid-7"});
    let status = json!({
        "loop": {"state": "Sleeping", "epoch": 1, "turn": 12, "lastTurnTime": "2026-11-22T14:00:00Z"},
        "usage": {"turns": 12},
    });
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": metadata, "spec": spec, "status": status})
}

fn kubeconfig(address: SocketAddr) -> serde_json::Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    })
}

#[tokio::test]
async fn a_real_collector_receives_reconciles_metrics_and_log_lines_of_the_controller() {
    if !clusters::has("otelcol") {
        return;
    }
    let receiver = Receiver::start().await;
    let collector = Collector::start(receiver.address).await;
    let endpoint = format!("http://127.0.0.1:{}", collector.port);
    let headers = format!("authorization=Bearer%20{CANARY}");
    let controller = ControllerProcess::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ("OTEL_EXPORTER_OTLP_HEADERS", &headers),
        ("OTEL_LOGS_EXPORTER", "otlp"),
        ("OTEL_METRICS_EXPORTER", "otlp"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "100"),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "20"),
    ])
    .await;
    let spans = receiver
        .until("a reconcile", |spans| {
            spans.iter().any(|span| span.name == "reconcile agent")
        })
        .await;
    let span = spans.iter().find(|span| span.name == "reconcile agent").unwrap();
    assert_eq!(
        (span.kind(), span.parent_span_id.len(), span.trace_id.len()),
        (SpanKind::Internal, 0, 16)
    );
    let of_span = |key: &str| attribute(&span.attributes, key).unwrap();
    assert_eq!(of_span("agentloop.object.namespace"), "team-a");
    // That is the namespace of the resource.
    assert_eq!(attribute(&span.attributes, "k8s.namespace.name"), None);
    assert_eq!(of_span("agentloop.object.name"), "watcher");
    assert!(!of_span("agentloop.reconcile.result").is_empty());
    let resource = receiver.received()[0].request.resource_spans[0]
        .resource
        .clone()
        .unwrap();
    let of_resource = |key: &str| attribute(&resource.attributes, key).unwrap();
    let ids = ["k8s.namespace.name", "service.instance.id"].map(of_resource);
    assert_eq!(ids, ["system", "agentloop-7"]);

    let line = receiver
        .until_line("a line of the start", |line| {
            line.message() == "starting the controller"
        })
        .await;
    assert_eq!(line.of("agentloop.component"), "controller");
    assert!(controller.log().contains("starting the controller"));

    // A total of the status, whose start is unknown, and an instrument that began with the process.
    let (resource, turns) = receiver.until_metric("agentloop_agent_turns_total", |_| true).await;
    assert_eq!(attribute(&resource, "k8s.pod.name").unwrap(), "agentloop-7");
    let Some(Data::Sum(sum)) = &turns.data else {
        panic!("{turns:?}")
    };
    let point = &sum.data_points[0];
    let cumulative: i32 = AggregationTemporality::Cumulative.into();
    assert_eq!((sum.is_monotonic, sum.aggregation_temporality), (true, cumulative));
    assert_eq!(
        (point.value, point.start_time_unix_nano),
        (Some(Value::AsDouble(12.0)), 0)
    );
    let label = |key: &str| attribute(&point.attributes, key).unwrap();
    assert_eq!(
        (label("namespace"), label("agent")),
        ("team-a".into(), "watcher".into())
    );
    let seconds = "controller_runtime_reconcile_time_seconds";
    let has_exemplar = |metric: &opentelemetry_proto::tonic::metrics::v1::Metric| match &metric.data {
        Some(Data::Histogram(histogram)) => histogram.data_points.iter().any(|point| !point.exemplars.is_empty()),
        other => panic!("{other:?}"),
    };
    let (_, took) = receiver.until_metric(seconds, has_exemplar).await;
    assert_eq!(took.unit, "s");
    let Some(Data::Histogram(histogram)) = &took.data else {
        panic!("{took:?}")
    };
    let point = histogram
        .data_points
        .iter()
        .find(|point| !point.exemplars.is_empty())
        .unwrap();
    assert!(point.start_time_unix_nano > 0 && point.bucket_counts.len() == point.explicit_bounds.len() + 1);
    let traced = point.exemplars[0].trace_id.clone();
    receiver
        .until("the reconcile of the exemplar", |spans| {
            spans.iter().any(|span| span.trace_id == traced)
        })
        .await;

    // The scrape has the same, with exemplars only in OpenMetrics: also that of the newest turn, derived from its names.
    let open = controller.scrape("application/openmetrics-text").await;
    let exemplar = |name: &str| {
        open.lines()
            .find(|line| line.starts_with(name) && line.contains("# {trace_id="))
            .is_some()
    };
    assert!(exemplar("agentloop_agent_turns_total{") && exemplar(seconds), "{open}");
    assert!(!controller.scrape("text/plain").await.contains("trace_id="));
    for text in receiver.others() {
        assert!(!text.contains(CANARY), "{text}");
    }
    for received in receiver.received() {
        assert!(!String::from_utf8_lossy(&received.body).contains(CANARY));
    }
    assert!(!controller.log().contains(CANARY), "{}", controller.log());
}

#[tokio::test]
async fn the_controller_works_without_its_collector_and_counts_lost_telemetry() {
    let endpoint = format!("http://127.0.0.1:{}", free_port());
    let controller = ControllerProcess::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ("OTEL_LOGS_EXPORTER", "otlp"),
        ("OTEL_METRICS_EXPORTER", "otlp"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "100"),
        // At the default level, there are hardly more lines than the queue and a batch hold.
        ("RUST_LOG", "debug"),
        ("OTEL_BLRP_MAX_QUEUE_SIZE", "1"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "1"),
        ("OTEL_BSP_SCHEDULE_DELAY", "1"),
    ])
    .await;
    for signal in ["metrics", "logs"] {
        let series = format!("agentloop_telemetry_dropped_total{{signal=\"{signal}\"}} ");
        let counted = |line: &str| line.strip_prefix(&series).is_some_and(|value| value != "0");
        controller.until_scraped(signal, counted).await;
    }
    let reconciled = |line: &str| {
        let value = line.strip_prefix("controller_runtime_reconcile_total{controller=\"agent\",result=\"success\"} ");
        value.is_some_and(|value| value != "0")
    };
    let requeued = |line: &str| {
        let value =
            line.strip_prefix("controller_runtime_reconcile_total{controller=\"agent\",result=\"requeue_after\"} ");
        value.is_some_and(|value| value != "0")
    };
    controller
        .until_scraped("a reconcile", |line| reconciled(line) || requeued(line))
        .await;
    for signal in ["logs", "metrics"] {
        let warnings = controller.log().matches(&format!("failed to export {signal}")).count();
        assert_eq!(warnings, 1, "{}", controller.log());
    }
}

#[tokio::test]
async fn without_variables_the_controller_exports_nothing() {
    let receiver = Receiver::start().await;
    let own = format!("http://{}/v1/logs", receiver.address);
    // An endpoint alone asks for traces only, and one of a signal for nothing else.
    let controller = ControllerProcess::start(&[("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", &own)]).await;
    let seen = |line: &str| line.starts_with("agentloop_agent_turns_total{") && line.ends_with(" 12");
    controller.until_scraped("the Agent", seen).await;
    assert!(receiver.received().is_empty() && receiver.others().is_empty());
    let open = controller.scrape("application/openmetrics-text").await;
    assert!(!open.contains("trace_id="), "{open}");
}

/// What is exported after the lead was lost would be taken for what is, although another leader acts.
#[rstest]
#[case::told_to_end(false)]
#[case::another_holds_the_lease(true)]
#[tokio::test]
async fn queued_telemetry_is_exported_at_an_orderly_end_and_none_once_the_lead_is_lost(#[case] is_lost: bool) {
    let receiver = Receiver::start().await;
    let endpoint = format!("http://{}", receiver.address);
    // Longer than the test: everything is queued until the end.
    let never = "3600000";
    // With the default times of the Lease, which a busy machine can keep.
    let mut controller = ControllerProcess::start_with(
        &[],
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
            ("OTEL_LOGS_EXPORTER", "otlp"),
            ("OTEL_METRICS_EXPORTER", "otlp"),
            ("OTEL_METRIC_EXPORT_INTERVAL", never),
            ("OTEL_BSP_SCHEDULE_DELAY", never),
            ("OTEL_BLRP_SCHEDULE_DELAY", never),
        ],
    )
    .await;
    let reconciled = |line: &str| line.starts_with("agentloop_agent_turns_total{") && line.ends_with(" 12");
    controller.until_scraped("the Agent", reconciled).await;
    if is_lost {
        let metadata = json!({"name": LEASE_NAME, "namespace": "system"});
        let taken = json!({"metadata": metadata, "spec": {"holderIdentity": "another"}});
        controller.server.put("coordination.k8s.io/leases", taken);
    } else {
        let pid = controller.child.id().to_string();
        assert!(Command::new("kill").arg(pid).status().unwrap().success());
    }
    let status = controller.ended().await;
    assert_eq!(status.success(), !is_lost, "{}", controller.log());
    assert_eq!(
        controller.log().contains("lost leadership"),
        is_lost,
        "{}",
        controller.log()
    );
    let (spans, others) = (receiver.received().len(), receiver.others().len());
    if is_lost {
        assert_eq!((spans, others), (0, 0), "{}", controller.log());
    } else {
        assert!(
            spans > 0 && others > 1,
            "{spans} of spans, {others} of metrics and lines"
        );
    }
}
