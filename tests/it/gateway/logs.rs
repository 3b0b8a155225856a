//! Logs of a real gateway and a real worker over OTLP: what arrives at a collector beside the traces, and what a collector
//! that is unavailable costs.

use std::time::Duration;

use agentloop::otlp::{LogLine, LogSink};
use agentloop::support::hash::hex;
use agentloop::worker::gateway_client::GatewayClient;
use jiff::Timestamp;
use pretty_assertions::assert_eq;
use tokio_util::sync::CancellationToken;

use super::harness::{GatewayHarness, url};
use super::traces::{WorkerProcess, check_canary, named, traced_with, two_turns, worker_log};
use crate::support::clusters;
use crate::support::otlp::{Collector, ReceivedLine, Receiver, attribute, is_root};
use crate::support::ports::free_port;

const LOGS: [(&str, &str); 2] = [("OTEL_LOGS_EXPORTER", "otlp"), ("OTEL_BLRP_SCHEDULE_DELAY", "20")];

fn is_event(line: &ReceivedLine, event: &str) -> bool {
    attribute(&line.record.attributes, "event").is_some_and(|name| name == event)
}

#[tokio::test]
async fn a_real_collector_receives_log_lines_of_gateway_and_worker_with_the_trace_of_their_turn() {
    if !clusters::has("otelcol") {
        return;
    }
    let receiver = Receiver::start().await;
    let collector = Collector::start(receiver.address).await;
    let harness = traced_with(collector.port, &LOGS).await;
    let _worker = WorkerProcess::start(&harness);
    harness.provider.release();
    let spans = receiver.until("two turns", two_turns).await;
    let root = spans.iter().find(|span| is_root(span)).unwrap();
    let call = named(&spans, "chat m")[0];
    let run = named(&spans, "execute_tool hub__write")[0];
    // Of the worker: its events, with the spans of their turn, call and run.
    let begun = receiver
        .until_line("the turn begins", |line| is_event(line, "autonomy:turn_started"))
        .await;
    assert_eq!(begun.of("agentloop.component"), "worker");
    assert_eq!(begun.of("agentloop.agent.name"), "a");
    assert_eq!(begun.of("service.name"), "agentloop");
    assert_eq!(begun.of("deployment.environment.name"), "test");
    assert_eq!(
        (begun.target.as_str(), begun.message().as_str()),
        ("agentloop::worker::events", "journal")
    );
    assert_eq!(
        (begun.record.severity_number, begun.record.severity_text.as_str()),
        (9, "INFO")
    );
    assert_eq!(
        (&begun.record.trace_id, &begun.record.span_id),
        (&root.trace_id, &root.span_id)
    );
    assert_eq!(attribute(&begun.record.attributes, "turn").unwrap(), "1");
    assert_eq!(attribute(&begun.record.attributes, "traceId"), None);
    let intent = receiver
        .until_line("the tool runs", |line| is_event(line, "tool:intent"))
        .await;
    assert_eq!(
        (&intent.record.trace_id, &intent.record.span_id),
        (&run.trace_id, &run.span_id)
    );
    // Of the gateway: the call, whose span the gateway exports.
    let is_call = |line: &ReceivedLine| {
        let id = attribute(&line.record.attributes, "call");
        line.message() == "call answered" && id == attribute(&call.attributes, "agentloop.call")
    };
    let answered = receiver.until_line("the call is answered", is_call).await;
    assert_eq!(answered.of("agentloop.component"), "gateway");
    assert_eq!(
        (&answered.record.trace_id, &answered.record.span_id),
        (&call.trace_id, &call.span_id)
    );
    check_canary(&receiver, &harness);
    // Nothing is exported that the text does not say.
    let (texts, id) = (
        format!("{}{}", worker_log(&harness), harness.log()),
        hex(&root.trace_id),
    );
    for line in receiver.lines() {
        let quoted = serde_json::to_string(&line.message()).unwrap();
        assert!(texts.contains(&quoted), "{quoted}");
        // Nor does the HTTP client of the export have its lines exported, which it logs here.
        let of_library = attribute(&line.record.attributes, "log.target").unwrap_or_default();
        for silent in ["agentloop_otlp", "reqwest", "hyper"] {
            assert!(!line.target.starts_with(silent), "{}", line.target);
            assert!(!of_library.starts_with(silent), "{of_library}");
        }
    }
    assert!(texts.contains("starting new connection"), "{texts}");
    assert!(harness.log().contains(&id), "{}", harness.log());
}

#[tokio::test]
async fn logs_are_exported_only_if_configured() {
    let receiver = Receiver::start().await;
    let mut harness = traced_with(receiver.address.port(), &[]).await;
    let session = harness.session().await;
    assert!(session.traces && !session.logs);
    let _worker = WorkerProcess::start(&harness);
    harness.provider.release();
    receiver.until("two turns", two_turns).await;
    assert!(receiver.lines().is_empty() && receiver.others().is_empty());
    // The endpoint for logs alone is not enough, and traces can be off.
    let receiver = Receiver::start().await;
    let mut harness = GatewayHarness::new().await;
    let base = format!("http://{}", receiver.address);
    harness.environment = vec![("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", format!("{base}/v1/logs"))];
    harness.start().await;
    assert!(!harness.session().await.logs);
    let request = harness.worker.post(url("/v1/logs")).body("no message");
    // What is not exported is not read.
    assert_eq!(request.send().await.unwrap().status(), 204);
    let mut harness = GatewayHarness::new().await;
    harness.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", base),
        ("OTEL_TRACES_EXPORTER", "none".into()),
        ("OTEL_LOGS_EXPORTER", "otlp".into()),
        ("OTEL_BLRP_SCHEDULE_DELAY", "20".into()),
    ];
    harness.start().await;
    let session = harness.session().await;
    assert!(session.logs && !session.traces);
    let attached = receiver
        .until_line("the gateway attaches", |line| line.message() == "attached")
        .await;
    assert!(attached.record.trace_id.is_empty());
    assert!(receiver.received().is_empty());
}

#[tokio::test]
async fn without_its_collector_lines_are_counted_and_calls_continue() {
    let endpoint = format!("http://127.0.0.1:{}", free_port());
    let mut harness = GatewayHarness::new().await;
    harness.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        ("OTEL_TRACES_EXPORTER", "none".into()),
        ("OTEL_LOGS_EXPORTER", "otlp".into()),
        ("OTEL_BLRP_SCHEDULE_DELAY", "1".into()),
        ("OTEL_BLRP_MAX_QUEUE_SIZE", "2".into()),
        // Lines of the HTTP client about a failed export would follow each other forever if they were exported.
        ("RUST_LOG", "debug".into()),
    ];
    harness.start().await;
    for call in 1..=5 {
        let (status, _) = harness.ask(&format!("t1c{call}a1")).await;
        assert_eq!(status, 200, "{}", harness.log());
    }
    let lost = harness
        .controller
        .until("lines are lost", |report| report.telemetry_loss.logs > 0)
        .await;
    assert_eq!(lost.telemetry_loss.spans, 0);
    assert_eq!(harness.log().matches("failed to export logs").count(), 1);
    harness.terminate();
    let ended = tokio::time::timeout(Duration::from_secs(20), harness.exited()).await;
    assert!(ended.unwrap().success(), "{}", harness.log());
}

/// A message has up to 128 lines and a megabyte. What is refused once would be refused again.
#[tokio::test]
async fn lines_of_a_worker_that_the_gateway_refuses_are_counted_once_and_not_sent_again() {
    let receiver = Receiver::start().await;
    let mut harness = GatewayHarness::new().await;
    harness.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", receiver.address)),
        ("OTEL_LOGS_EXPORTER", "otlp".into()),
        ("OTEL_BLRP_SCHEDULE_DELAY", "20".into()),
    ];
    harness.start().await;
    let lines = LogSink::with_capacity("worker", 999);
    let push = |count: usize, message: &str| {
        for _ in 0..count {
            lines.push(LogLine {
                at: Timestamp::now(),
                level: tracing::Level::INFO,
                target: "t",
                message: message.into(),
                fields: Vec::new(),
                trace: (Vec::new(), Vec::new()),
            });
        }
    };
    push(128, &"x".repeat(8 * 1024));
    push(1, "the last line");
    let (worker, closing) = (
        GatewayClient::new(&harness.path("gateway.sock")).unwrap(),
        CancellationToken::new(),
    );
    let sending = tokio::spawn(worker.run_logs(lines.clone(), closing.clone()));
    receiver
        .until_line("the last line", |line| line.message() == "the last line")
        .await;
    // A call makes the gateway report soon.
    let (status, _) = harness.ask("t1c1a1").await;
    assert_eq!(status, 200, "{}", harness.log());
    let report = harness.until_counted(1, 0).await;
    assert_eq!((report.telemetry_loss.logs, report.telemetry_loss.spans), (128, 0));
    let is_long = |line: &ReceivedLine| line.message().starts_with("xxx");
    assert!(!receiver.lines().iter().any(is_long));

    // Somewhat shorter, they are one message that is accepted.
    push(128, &"x".repeat(7 * 1024));
    receiver.until_line("a long line", is_long).await;
    closing.cancel();
    sending.await.unwrap();
    assert_eq!(lines.dropped().get(), 0);
    let (status, _) = harness.ask("t1c2a1").await;
    assert_eq!(status, 200, "{}", harness.log());
    assert_eq!(harness.until_counted(2, 0).await.telemetry_loss.logs, 128);
}
