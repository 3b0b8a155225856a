//! What a sensor pod exports over OTLP: the lines of its log, and nothing by default.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Stdio;
use std::time::Duration;

use agentloop::link::pod::CONFIG_ENV;
use pretty_assertions::assert_eq;
use serde_json::json;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::support::otlp::Receiver;
use crate::support::ports::free_port;

/// In the headers of the collector.
const CANARY: &str = "canary";
/// Longest wait for a process.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A sensor pod as a process of its own, with a webhook and without a controller.
struct SensorProcess {
    child: Child,
    directory: TempDir,
}

impl SensorProcess {
    fn start(variables: &[(&str, &str)]) -> Self {
        let webhook = json!({"scheme": "GitHub", "secretKeyRef": {"name": "hooks", "key": "main"}});
        let spec = json!({"agentNames": ["a"], "source": {"webhook": webhook}});
        let config = json!({
            "namespace": "team-a", "linkUrl": format!("https://127.0.0.1:{}", free_port()),
            "terms": {"uid": "uid-7", "name": "bell", "generation": 1, "spec": spec},
        });
        let directory = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("sensor")
            .arg("--outbox-dir")
            .arg(directory.path())
            .arg(format!("--webhook-address=127.0.0.1:{}", free_port()))
            .arg(format!("--health-socket=@agentloop-sensor-telemetry-{}", free_port()))
            .env_clear()
            .env(CONFIG_ENV, config.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    async fn until_logged(&self, text: &str) {
        let deadline = tokio::time::Instant::now() + WAIT_TIMEOUT;
        while !self.log().contains(text) {
            assert!(tokio::time::Instant::now() < deadline, "never {text}: {}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// SIGTERM, as the kubelet sends it. Returns once the process has ended.
    async fn stop(&mut self) {
        let pid = self.child.id().unwrap().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().await.unwrap();
        assert!(sent.success());
        let ended = tokio::time::timeout(WAIT_TIMEOUT, self.child.wait()).await;
        assert!(ended.unwrap().unwrap().success(), "{}", self.log());
    }
}

#[tokio::test]
async fn a_sensor_pod_exports_the_lines_of_its_log_up_to_the_last_one() {
    let receiver = Receiver::start().await;
    let endpoint = format!("http://{}", receiver.address);
    let headers = format!("authorization=Bearer%20{CANARY}");
    let mut sensor = SensorProcess::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ("OTEL_EXPORTER_OTLP_HEADERS", &headers),
        ("OTEL_LOGS_EXPORTER", "otlp"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "20"),
        ("OTEL_RESOURCE_ATTRIBUTES", "agentloop.sensor.name=forged,region=x"),
    ]);
    let line = receiver
        .until_line("a line of the start", |line| line.message() == "listening")
        .await;
    let of = ["agentloop.component", "agentloop.sensor.name", "agentloop.sensor.uid"].map(|key| line.of(key));
    assert_eq!(of, ["sensor", "bell", "uid-7"]);
    let of = ["k8s.namespace.name", "service.name", "region"].map(|key| line.of(key));
    assert_eq!(of, ["team-a", "agentloop", "x"]);
    sensor.stop().await;
    receiver
        .until_line("the last line", |line| line.message() == "ended")
        .await;
    let log = sensor.log();
    for line in receiver.lines() {
        assert!(log.contains(&line.message()), "{}: {log}", line.message());
    }
    assert!(receiver.received().is_empty(), "no traces");
    for text in receiver.others().into_iter().chain([log]) {
        assert!(!text.contains(CANARY), "{text}");
    }
}

#[tokio::test]
async fn an_endpoint_alone_has_a_sensor_pod_export_nothing() {
    let receiver = Receiver::start().await;
    let endpoint = format!("http://{}", receiver.address);
    let mut sensor = SensorProcess::start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]);
    sensor.until_logged("listening").await;
    sensor.stop().await;
    assert!(receiver.received().is_empty() && receiver.others().is_empty());
}

#[tokio::test]
async fn an_unavailable_collector_delays_neither_the_work_nor_the_end_of_a_sensor_pod() {
    let endpoint = format!("http://127.0.0.1:{}", free_port());
    let mut sensor = SensorProcess::start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ("OTEL_LOGS_EXPORTER", "otlp"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "1"),
        ("OTEL_BLRP_MAX_QUEUE_SIZE", "1"),
    ]);
    sensor.until_logged("listening").await;
    sensor.until_logged("failed to export logs").await;
    sensor.stop().await;
    assert_eq!(
        sensor.log().matches("failed to export logs").count(),
        1,
        "{}",
        sensor.log()
    );
}
