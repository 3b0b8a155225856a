//! The exporter against collectors that accept, refuse, hang, or do not exist.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Instant;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode as Status};
use axum::response::{IntoResponse, Response as Reply};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use pretty_assertions::assert_eq;
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use super::*;
use crate::content::{ContentAttribute, MAX_CONTENT};
use crate::ids::TurnName;
use crate::received::MAX_RECEIVED;
use crate::span_sink::encode;
use crate::spans::tests::{agent, attributes};

/// What a collector does with a request.
#[derive(Clone, Copy, Debug)]
enum Act {
    Accept,
    Answer(u16),
    Hang,
    Reject(i64),
}

#[derive(Clone)]
struct Collector(Arc<CollectorParts>);

struct CollectorParts {
    address: SocketAddr,
    /// What it does with the next requests; afterwards it accepts.
    acts: Mutex<Vec<Act>>,
    seen: Mutex<Vec<(HeaderMap, ExportTraceServiceRequest)>>,
    changed: Notify,
}

async fn collect(State(collector): State<Collector>, headers: HeaderMap, body: Bytes) -> Reply {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    let parts = &collector.0;
    parts.seen.lock().unwrap().push((headers, request));
    parts.changed.notify_waiters();
    let act = {
        let mut acts = parts.acts.lock().unwrap();
        if acts.is_empty() { Act::Accept } else { acts.remove(0) }
    };
    match act {
        Act::Accept => Status::OK.into_response(),
        Act::Answer(status) => Status::from_u16(status).unwrap().into_response(),
        Act::Hang => std::future::pending().await,
        Act::Reject(rejected_spans) => {
            let partial_success = Some(ExportTracePartialSuccess {
                rejected_spans,
                error_message: "canary".into(),
            });
            ExportTraceServiceResponse { partial_success }
                .encode_to_vec()
                .into_response()
        }
    }
}

impl Collector {
    async fn start(acts: &[Act]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let collector = Self(Arc::new(CollectorParts {
            address: listener.local_addr().unwrap(),
            acts: Mutex::new(acts.to_vec()),
            seen: Mutex::default(),
            changed: Notify::new(),
        }));
        let router = Router::new()
            .route("/v1/traces", post(collect))
            .with_state(collector.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        collector
    }

    fn settings(&self, more: &[(&str, &str)]) -> TraceSettings {
        settings(self.0.address, more)
    }

    async fn until_seen(&self, requests: usize) {
        let wait = async {
            loop {
                let changed = self.0.changed.notified();
                if self.0.seen.lock().unwrap().len() >= requests {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait)
            .await
            .expect("too few requests");
    }

    /// Number of spans in each request.
    fn sizes(&self) -> Vec<usize> {
        let seen = self.0.seen.lock().unwrap();
        let size = |request: &ExportTraceServiceRequest| request.resource_spans[0].scope_spans[0].spans.len();
        seen.iter().map(|(_, request)| size(request)).collect()
    }

    fn spans(&self) -> Vec<Span> {
        let seen = self.0.seen.lock().unwrap();
        let resources = seen.iter().flat_map(|(_, request)| &request.resource_spans);
        let scopes = resources.flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }
}

fn settings(address: SocketAddr, more: &[(&str, &str)]) -> TraceSettings {
    // The binary does this at its start; another test may have been first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let base = format!("http://{address}");
    let read = TraceSettings::from_variables(|name| match name {
        "OTEL_EXPORTER_OTLP_ENDPOINT" => Some(base.clone()),
        "OTEL_BSP_SCHEDULE_DELAY" if more.iter().all(|(key, _)| *key != name) => Some("1".into()),
        _ => more
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned()),
    });
    read.unwrap().unwrap()
}

fn span(turn: i64) -> Span {
    let turn = TurnName {
        agent: "uid",
        member: 0,
        turn,
    };
    Span {
        trace_id: turn.trace_id(),
        span_id: turn.root_id(),
        name: "s".into(),
        ..Span::default()
    }
}

fn dropped(sink: &SpanSink) -> u64 {
    sink.dropped().get()
}

fn origin() -> TelemetryOrigin {
    TelemetryOrigin::agent(&agent())
}

const SECONDS: Duration = Duration::from_secs(10);

#[tokio::test]
async fn spans_arrive_with_the_resource_and_the_headers() {
    let collector = Collector::start(&[]).await;
    let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t");
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&[headers])), &origin());
    sink.push(span(1));
    collector.until_seen(1).await;
    export.finish(SECONDS).await;
    let seen = collector.0.seen.lock().unwrap();
    let (headers, request) = &seen[0];
    assert_eq!(headers["content-type"], "application/x-protobuf");
    assert_eq!(headers["authorization"], "Bearer t");
    let spans = &request.resource_spans[0];
    let resource = attributes(&spans.resource.as_ref().unwrap().attributes);
    assert_eq!(resource[0], ("service.name".into(), "agentloop".into()));
    assert_eq!(spans.scope_spans[0].spans, [span(1)]);
}

#[tokio::test]
async fn closing_exports_what_is_queued_in_batches() {
    let collector = Collector::start(&[]).await;
    let limits = [
        ("OTEL_BSP_SCHEDULE_DELAY", "3600000"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2"),
    ];
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&limits)), &origin());
    (1..=3).for_each(|turn| sink.push(span(turn)));
    export.finish(SECONDS).await;
    assert_eq!(collector.sizes(), [2, 1]);
}

#[tokio::test]
async fn a_temporary_failure_is_retried_and_another_is_not() {
    let collector = Collector::start(&[Act::Answer(503), Act::Accept, Act::Answer(400)]).await;
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&[])), &origin());
    sink.push(span(1));
    collector.until_seen(2).await;
    assert_eq!(dropped(&sink), 0);
    sink.push(span(2));
    collector.until_seen(3).await;
    export.finish(SECONDS).await;
    assert_eq!((collector.sizes(), dropped(&sink)), (vec![1, 1, 1], 1));
}

#[test]
fn a_server_can_ask_for_more_time_than_the_backoff_and_not_for_less() {
    let backoff = Duration::from_secs(2);
    for (asked, wait) in [
        (None, 2),
        (Some(0), 2),
        (Some(1), 2),
        (Some(2), 2),
        (Some(3), 3),
        (Some(300), 300),
    ] {
        let asked = asked.map(Duration::from_secs);
        assert_eq!(wait_of(asked, backoff), Duration::from_secs(wait), "{asked:?}");
    }
}

#[tokio::test]
async fn rejected_spans_are_counted() {
    let collector = Collector::start(&[Act::Reject(2)]).await;
    let limits = [("OTEL_BSP_SCHEDULE_DELAY", "3600000")];
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&limits)), &origin());
    (1..=3).for_each(|turn| sink.push(span(turn)));
    export.finish(SECONDS).await;
    assert_eq!((collector.sizes(), dropped(&sink)), (vec![3], 2));
}

/// The exporter holds one batch of one span; the queue has room for two more.
#[tokio::test]
async fn a_hanging_collector_costs_the_queue_and_no_time() {
    let collector = Collector::start(&[Act::Hang; 9]).await;
    let limits = [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "2"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1"),
    ];
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&limits)), &origin());
    sink.push(span(1));
    collector.until_seen(1).await;
    sink.push(span(2));
    sink.push(span(3));
    assert_eq!(dropped(&sink), 0);
    sink.push(span(4));
    assert_eq!(dropped(&sink), 1);
    let started = Instant::now();
    export.finish(Duration::from_millis(50)).await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn an_unreachable_collector_costs_the_queue_and_no_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings = settings(listener.local_addr().unwrap(), &[("OTEL_BSP_MAX_QUEUE_SIZE", "2")]);
    drop(listener);
    let (sink, export) = ExportTask::of_spans(Some(settings), &origin());
    let started = Instant::now();
    (1..=100).for_each(|turn| sink.push(span(turn)));
    assert!(dropped(&sink) >= 96, "{}", dropped(&sink));
    export.finish(SECONDS).await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_worker_sends_as_many_spans_as_fit_a_message() {
    let collector = Collector::start(&[]).await;
    let limits = [
        ("OTEL_BSP_SCHEDULE_DELAY", "3600000"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2048"),
    ];
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&limits)), &origin());
    assert!(sink.push_received(&encode(vec![span(1); MAX_RECEIVED]), 0));
    assert_eq!(dropped(&sink), 0);
    assert!(sink.push_received(&encode(vec![span(1); MAX_RECEIVED + 1]), 3));
    // One, and three that the worker had dropped.
    assert_eq!(dropped(&sink), 4);
    export.finish(SECONDS).await;
    assert_eq!(collector.sizes(), [2 * MAX_RECEIVED]);
}

#[tokio::test]
async fn traces_that_are_not_sampled_are_not_queued() {
    let collector = Collector::start(&[]).await;
    let sampler = ("OTEL_TRACES_SAMPLER", "always_off");
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&[sampler])), &origin());
    sink.push(span(1));
    export.finish(SECONDS).await;
    assert_eq!((collector.sizes(), dropped(&sink)), (vec![], 0));
}

#[tokio::test]
async fn without_settings_nothing_is_kept() {
    let (sink, export) = ExportTask::of_spans(None, &origin());
    assert!(!sink.is_on());
    sink.push(span(1));
    assert!(sink.push_received(&encode(vec![span(1)]), 0));
    export.finish(SECONDS).await;
}

const CAPTURE: &str = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT";

/// A span with two attributes of content of this many bytes each, and another one.
fn span_with_content(bytes: usize) -> Span {
    let mut span = span(1);
    span.attributes.push(crate::resource::text("agentloop.run", "t1c1r1"));
    ContentAttribute::ToolArguments.add_to(&mut span, "x".repeat(bytes));
    ContentAttribute::ToolResult.add_to(&mut span, "x".repeat(bytes));
    span
}

#[tokio::test]
async fn without_the_variable_texts_of_a_worker_are_removed() {
    for value in ["", "false", "NO_CONTENT", "EVENT_ONLY", "yes"] {
        let collector = Collector::start(&[]).await;
        let (sink, export) = ExportTask::of_spans(Some(collector.settings(&[(CAPTURE, value)])), &origin());
        assert!(!sink.takes_content(), "{value}");
        assert!(sink.push_received(&encode(vec![span_with_content(9)]), 0));
        // Nor is there room for them.
        assert!(sink.push_received(&encode(vec![span_with_content(MAX_CONTENT)]), 0));
        assert_eq!(dropped(&sink), 1);
        export.finish(SECONDS).await;
        let keys: Vec<_> = collector.spans()[0]
            .attributes
            .iter()
            .map(|pair| pair.key.clone())
            .collect();
        assert_eq!(keys, ["agentloop.run"], "{value}");
    }
}

#[tokio::test]
async fn with_the_variable_texts_are_exported_up_to_their_bound() {
    for value in ["true", "True", "SPAN_ONLY", "span_and_event"] {
        let collector = Collector::start(&[]).await;
        let (sink, export) = ExportTask::of_spans(Some(collector.settings(&[(CAPTURE, value)])), &origin());
        assert!(sink.takes_content(), "{value}");
        assert!(sink.push_received(&encode(vec![span_with_content(MAX_CONTENT)]), 0));
        export.finish(SECONDS).await;
        assert_eq!((collector.spans()[0].attributes.len(), dropped(&sink)), (3, 0));
    }
    assert_eq!(span_with_content(MAX_CONTENT + 1).attributes.len(), 1);
}

#[tokio::test]
async fn spans_of_a_worker_are_read_back_and_those_that_are_too_long_are_dropped() {
    let collector = Collector::start(&[]).await;
    let (sink, export) = ExportTask::of_spans(Some(collector.settings(&[])), &origin());
    assert!(!sink.push_received(b"no message", 0));
    let long = Span {
        name: "x".repeat(16 * 1024),
        ..span(3)
    };
    assert!(sink.push_received(&encode(vec![span(1), long, span(2)]), 0));
    assert_eq!(dropped(&sink), 1);
    export.finish(SECONDS).await;
    assert_eq!(collector.sizes(), [2]);
}
