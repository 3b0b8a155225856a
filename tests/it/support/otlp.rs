//! A receiver of OTLP over HTTP, what it received, and a real collector in front of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::metrics::v1::{Metric, ResourceMetrics};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::ports::free_port;

/// Longest wait for spans.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

pub struct Receiver {
    pub address: SocketAddr,
    received: Arc<watch::Sender<Vec<Received>>>,
    lines: Arc<watch::Sender<Vec<ReceivedLine>>>,
    exports: Arc<watch::Sender<Vec<ResourceMetrics>>>,
    /// Logs and metrics as they came.
    others: Arc<Mutex<Vec<Bytes>>>,
}

/// One line of a log.
#[derive(Clone, Debug)]
pub struct ReceivedLine {
    pub resource: Vec<KeyValue>,
    pub target: String,
    pub record: LogRecord,
}

impl ReceivedLine {
    /// An attribute of the resource as text.
    pub fn of(&self, key: &str) -> String {
        attribute(&self.resource, key).unwrap()
    }

    /// The message.
    pub fn message(&self) -> String {
        match self.record.body.as_ref().unwrap().value.as_ref() {
            Some(Value::StringValue(text)) => text.clone(),
            other => panic!("{other:?}"),
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Received {
    pub headers: HeaderMap,
    pub body: Bytes,
    pub request: ExportTraceServiceRequest,
}

async fn receive(
    State(received): State<Arc<watch::Sender<Vec<Received>>>>,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    let request = ExportTraceServiceRequest::decode(body.clone()).unwrap();
    received.send_modify(|all| {
        all.push(Received { headers, body, request });
    });
    StatusCode::OK
}

fn lines(request: ExportLogsServiceRequest) -> Vec<ReceivedLine> {
    let of_resource = |logs: ResourceLogs| {
        let resource = logs.resource.unwrap().attributes;
        let of_scope = move |logs: ScopeLogs| {
            let (resource, target) = (resource.clone(), logs.scope.unwrap().name);
            logs.log_records.into_iter().map(move |record| ReceivedLine {
                resource: resource.clone(),
                target: target.clone(),
                record,
            })
        };
        logs.scope_logs.into_iter().flat_map(of_scope)
    };
    request.resource_logs.into_iter().flat_map(of_resource).collect()
}

impl Receiver {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::new(watch::Sender::default());
        let (said, exported) = (Arc::new(watch::Sender::default()), Arc::new(watch::Sender::default()));
        let others: Arc<Mutex<Vec<Bytes>>> = Arc::default();
        let (to_said, to_exported) = (Arc::clone(&said), Arc::clone(&exported));
        let (kept, also_kept) = (Arc::clone(&others), Arc::clone(&others));
        let receive_logs = move |body: Bytes| async move {
            let request = ExportLogsServiceRequest::decode(body.clone()).unwrap();
            kept.lock().unwrap().push(body);
            to_said.send_modify(|all: &mut Vec<_>| all.extend(lines(request)));
        };
        let receive_metrics = move |body: Bytes| async move {
            let request = ExportMetricsServiceRequest::decode(body.clone()).unwrap();
            also_kept.lock().unwrap().push(body);
            to_exported.send_modify(|all: &mut Vec<_>| all.extend(request.resource_metrics));
        };
        let router = Router::new()
            .route("/v1/traces", post(receive))
            .with_state(Arc::clone(&received))
            .route("/v1/logs", post(receive_logs))
            .route("/v1/metrics", post(receive_metrics));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self {
            address,
            received,
            lines: said,
            exports: exported,
            others,
        }
    }

    /// All requests of logs and metrics, as text.
    pub fn others(&self) -> Vec<String> {
        let others = self.others.lock().unwrap();
        others
            .iter()
            .map(|body| String::from_utf8_lossy(body).into_owned())
            .collect()
    }

    /// The lines so far.
    pub fn lines(&self) -> Vec<ReceivedLine> {
        self.lines.borrow().clone()
    }

    /// Waits until there is a line as it should be.
    pub async fn until_line(&self, what: &str, wanted: impl Fn(&ReceivedLine) -> bool) -> ReceivedLine {
        let mut received = self.lines.subscribe();
        let reached = received.wait_for(|all| all.iter().any(&wanted));
        let Ok(lines) = tokio::time::timeout(WAIT_TIMEOUT, reached).await else {
            let messages: Vec<_> = self.lines().iter().map(ReceivedLine::message).collect();
            panic!("never {what}: {messages:?}")
        };
        lines.unwrap().iter().find(|line| wanted(line)).unwrap().clone()
    }

    /// Waits until the metric of this name is exported, and returns the newest.
    pub async fn until_metric(&self, name: &str, wanted: impl Fn(&Metric) -> bool) -> (Vec<KeyValue>, Metric) {
        let find = |all: &Vec<ResourceMetrics>| {
            let mut newest = all.iter().rev().flat_map(|exported| {
                let resource = exported.resource.as_ref().unwrap().attributes.clone();
                let metrics = exported.scope_metrics.iter().flat_map(|scope| &scope.metrics);
                metrics.map(move |metric| (resource.clone(), metric.clone()))
            });
            newest.find(|(_, metric)| metric.name == name && wanted(metric))
        };
        let mut received = self.exports.subscribe();
        let reached = received.wait_for(|all| find(all).is_some());
        let reached = tokio::time::timeout(WAIT_TIMEOUT, reached).await;
        let all = reached.unwrap_or_else(|_| panic!("never {name}")).unwrap();
        find(&all).unwrap()
    }

    pub fn received(&self) -> Vec<Received> {
        self.received.borrow().clone()
    }

    /// Waits until the spans are as they should be, each once.
    pub async fn until(&self, what: &str, wanted: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        let mut received = self.received.subscribe();
        let reached = received.wait_for(|all| wanted(&spans(all)));
        let Ok(received) = tokio::time::timeout(WAIT_TIMEOUT, reached).await else {
            let labels: Vec<_> = spans(&self.received()).iter().map(label).collect();
            panic!("never {what}: {labels:?}")
        };
        spans(&received.unwrap())
    }
}

/// All spans by their ids, in the order of their start.
fn spans(received: &[Received]) -> Vec<Span> {
    let resources = received.iter().flat_map(|received| &received.request.resource_spans);
    let all = resources
        .flat_map(|resource| &resource.scope_spans)
        .flat_map(|scope| &scope.spans);
    let by_id: BTreeMap<_, _> = all.map(|span| (span.span_id.clone(), span.clone())).collect();
    let mut spans: Vec<_> = by_id.into_values().collect();
    spans.sort_by_key(|span| (span.start_time_unix_nano, span.parent_span_id.len()));
    spans
}

/// Name and turn, for messages of tests.
pub fn label(span: &Span) -> String {
    format!("{} {:02x?}", span.name, &span.trace_id[..2])
}

/// Whether it is the span of a turn.
pub fn is_root(span: &Span) -> bool {
    span.parent_span_id.is_empty()
}

/// An attribute as text.
pub fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|pair| pair.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        Value::BoolValue(value) => Some(value.to_string()),
        Value::ArrayValue(list) => {
            let texts = list.values.iter().map(|value| match &value.value {
                Some(Value::StringValue(text)) => text.as_str(),
                other => panic!("{other:?}"),
            });
            Some(texts.collect::<Vec<_>>().join(","))
        }
        other @ (Value::DoubleValue(_)
        | Value::KvlistValue(_)
        | Value::BytesValue(_)
        | Value::StringValueStrindex(_)) => panic!("{other:?}"),
    }
}

/// A real collector that passes on to a receiver what it gets.
pub struct Collector {
    host: String,
    pub port: u16,
    process: Child,
}

impl Collector {
    /// On loopback.
    pub async fn start(to: SocketAddr) -> Self {
        Self::start_on("127.0.0.1", to).await
    }

    /// On an address of this machine.
    pub async fn start_on(host: &str, to: SocketAddr) -> Self {
        let port = free_port();
        let config = format!(
            "yaml:receivers: {{otlp: {{protocols: {{http: {{endpoint: '{host}:{port}'}}}}}}}}\n\
             exporters: {{otlp_http: {{endpoint: 'http://{to}', compression: none, sending_queue: {{enabled: false}}}}}}\n\
             service: {{telemetry: {{metrics: {{level: none}}}}, \
             pipelines: {{traces: {{receivers: [otlp], exporters: [otlp_http]}}, \
             logs: {{receivers: [otlp], exporters: [otlp_http]}}, \
             metrics: {{receivers: [otlp], exporters: [otlp_http]}}}}}}"
        );
        let process = Command::new("otelcol")
            .args(["--config", &config])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut collector = Self {
            host: host.to_owned(),
            port,
            process,
        };
        collector.until_it_listens().await;
        collector
    }

    async fn until_it_listens(&mut self) {
        let deadline = tokio::time::Instant::now() + WAIT_TIMEOUT;
        while tokio::net::TcpStream::connect((self.host.as_str(), self.port))
            .await
            .is_err()
        {
            assert_eq!(self.process.try_wait().unwrap(), None, "the collector ended");
            assert!(tokio::time::Instant::now() < deadline, "the collector does not listen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
