//! The export of spans: a bounded queue, and a task that sends it in batches.
//!
//! Nothing waits for it. A collector that cannot be reached, hangs or refuses costs memory up to the queue's bound and one
//! warning; spans for which there is no room are dropped and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agentloop_support::backoff::{Backoff, jitter};
use agentloop_support::text::{first_chars, root_cause};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use prost::bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::sampler::TraceSampler;
use crate::settings::TraceSettings;
use crate::spans::{AgentIdentity, resource, resource_spans};

const PROTOBUF: &str = "application/x-protobuf";
const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_mins(1));
/// Largest response that is read: it is about spans that the collector rejected.
const MOST_RESPONSE: u64 = 64 * 1024;
/// Spans that one message of a worker may have; the rest is dropped.
const MOST_RECEIVED: usize = 1_024;

/// Encodes spans without a resource, which the gateway adds.
#[must_use]
pub fn encode(spans: Vec<Span>) -> Vec<u8> {
    let request = ExportTraceServiceRequest {
        resource_spans: vec![resource_spans(None, spans)],
    };
    request.encode_to_vec()
}

/// Decodes the spans of a worker. `None`: this is no such message.
#[must_use]
pub fn decode(bytes: &[u8]) -> Option<Vec<Span>> {
    let request = ExportTraceServiceRequest::decode(bytes).ok()?;
    let scopes = request.resource_spans.into_iter().flat_map(|spans| spans.scope_spans);
    Some(scopes.flat_map(|scope| scope.spans).collect())
}

/// Takes spans for export, or discards them.
#[derive(Clone, Debug, Default)]
pub struct SpanSink(Option<SinkParts>);

#[derive(Clone, Debug)]
struct SinkParts {
    queue: mpsc::Sender<Span>,
    sampler: TraceSampler,
    dropped: Arc<AtomicU64>,
}

impl SpanSink {
    /// Whether spans are exported at all.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Queues a span, unless its trace is not sampled. Drops it if the queue is full.
    pub fn push(&self, span: Span) {
        let Some(parts) = &self.0 else { return };
        if parts.sampler.samples(&span.trace_id) && parts.queue.try_send(span).is_err() {
            parts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Queues the spans of a worker.
    pub fn push_received(&self, spans: Vec<Span>) {
        let Some(parts) = &self.0 else { return };
        let excess = spans.len().saturating_sub(MOST_RECEIVED);
        let excess = u64::try_from(excess).unwrap_or(u64::MAX);
        parts.dropped.fetch_add(excess, Ordering::Relaxed);
        spans.into_iter().take(MOST_RECEIVED).for_each(|span| self.push(span));
    }
}

/// The task that exports.
pub struct SpanExport {
    closing: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl SpanExport {
    /// Starts the export of an Agent's spans, if there are settings.
    #[must_use]
    pub fn start(settings: Option<TraceSettings>, agent: &AgentIdentity) -> (SpanSink, Self) {
        let closing = CancellationToken::new();
        let off = |closing| (SpanSink::default(), Self { closing, task: None });
        let Some(settings) = settings else {
            return off(closing);
        };
        let client = match client(&settings) {
            Ok(client) => client,
            Err(error) => {
                tracing::warn!(
                    cause = cause(&error),
                    "no traces are exported: the HTTP client failed to start"
                );
                return off(closing);
            }
        };
        let (queue, spans) = mpsc::channel(settings.queue);
        let dropped = Arc::new(AtomicU64::new(0));
        let sink = SinkParts {
            queue,
            sampler: settings.sampler,
            dropped: Arc::clone(&dropped),
        };
        let exporter = TraceExporter {
            resource: resource(&settings.resource, agent),
            settings,
            client,
            closing: closing.clone(),
            dropped,
            is_failing: false,
        };
        let task = Some(tokio::spawn(exporter.run(spans)));
        (SpanSink(Some(sink)), Self { closing, task })
    }

    /// Exports what is queued, for at most so long, and ends.
    pub async fn finish(mut self, within: Duration) {
        self.closing.cancel();
        if let Some(task) = &mut self.task {
            // What is not exported by then is lost.
            let _ = tokio::time::timeout(within, task).await;
        }
    }
}

impl Drop for SpanExport {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// A client that follows no redirects: they could disclose a header.
fn client(settings: &TraceSettings) -> reqwest::Result<Client> {
    let builder = Client::builder()
        .user_agent(USER_AGENT)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(settings.timeout)
        .default_headers(settings.headers.clone());
    match settings.endpoint.scheme() {
        "https" => builder,
        // Plain HTTP needs no roots, and none may be installed.
        _ => builder.tls_certs_only([]),
    }
    .build()
}

struct TraceExporter {
    settings: TraceSettings,
    client: Client,
    resource: Resource,
    closing: CancellationToken,
    dropped: Arc<AtomicU64>,
    /// Whether the last batch failed: only the first of them is logged.
    is_failing: bool,
}

/// Why a batch was not accepted.
struct ExportFailure {
    cause: String,
    /// Whether the same batch may be accepted later.
    is_temporary: bool,
    /// How long the collector asks to wait.
    retry_after: Option<Duration>,
}

impl ExportFailure {
    fn temporary(cause: String) -> Self {
        Self {
            cause,
            is_temporary: true,
            retry_after: None,
        }
    }

    fn rejected(spans: u64) -> Self {
        Self {
            is_temporary: false,
            ..Self::temporary(format!("the collector rejected {spans} spans"))
        }
    }
}

impl TraceExporter {
    async fn run(mut self, mut spans: mpsc::Receiver<Span>) {
        while let Some(batch) = self.next_batch(&mut spans).await {
            let count = u64::try_from(batch.len()).unwrap_or(u64::MAX);
            let request = ExportTraceServiceRequest {
                resource_spans: vec![resource_spans(Some(self.resource.clone()), batch)],
            };
            if !self.deliver(request.encode_to_vec()).await {
                self.dropped.fetch_add(count, Ordering::Relaxed);
            }
        }
    }

    /// Waits for spans until a batch is full or its first one has waited long enough. `None`: closed and empty.
    async fn next_batch(&self, spans: &mut mpsc::Receiver<Span>) -> Option<Vec<Span>> {
        let most = self.settings.batch;
        let mut batch = Vec::new();
        tokio::select! {
            biased;
            received = spans.recv_many(&mut batch, most) => if received == 0 { return None },
            () = self.closing.cancelled() => return None,
        }
        let delay = tokio::time::sleep(self.settings.delay);
        tokio::pin!(delay);
        while batch.len() < most {
            let room = most - batch.len();
            tokio::select! {
                biased;
                received = spans.recv_many(&mut batch, room) => if received == 0 { break },
                () = &mut delay => break,
                () = self.closing.cancelled() => break,
            }
        }
        Some(batch)
    }

    /// Sends a batch until it is accepted. Returns false if it was given up. While the exporter closes, there is one
    /// attempt.
    async fn deliver(&mut self, body: Vec<u8>) -> bool {
        let body = Bytes::from(body);
        let mut backoff = RETRY;
        loop {
            let failure = match self.send(body.clone()).await {
                Ok(0) => {
                    self.note_success();
                    return true;
                }
                Ok(rejected) => {
                    self.dropped.fetch_add(rejected, Ordering::Relaxed);
                    self.note_failure(&ExportFailure::rejected(rejected));
                    return true;
                }
                Err(failure) => failure,
            };
            self.note_failure(&failure);
            if !failure.is_temporary || self.closing.is_cancelled() {
                return false;
            }
            let wait = failure.retry_after.unwrap_or_else(|| backoff.next_spread(jitter()));
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.closing.cancelled() => {}
            }
        }
    }

    /// Returns how many spans the collector rejected although it accepted the request.
    async fn send(&self, body: Bytes) -> Result<u64, ExportFailure> {
        let request = self
            .client
            .post(self.settings.endpoint.clone())
            .header(CONTENT_TYPE, PROTOBUF)
            .body(body);
        let response = request.send().await;
        let response = response.map_err(|error| ExportFailure::temporary(cause(&error)))?;
        let status = response.status();
        if status.is_success() {
            return Ok(rejected_spans(response).await.unwrap_or(0));
        }
        let seconds = response.headers().get(RETRY_AFTER);
        let seconds = seconds.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Err(ExportFailure {
            cause: format!("status {}", status.as_u16()),
            // As the protocol lists them.
            is_temporary: matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            ),
            retry_after: seconds.map(|seconds: u64| Duration::from_secs(seconds.min(300))),
        })
    }

    fn note_success(&mut self) {
        if std::mem::take(&mut self.is_failing) {
            let dropped = self.dropped.load(Ordering::Relaxed);
            tracing::info!(dropped, "traces are exported again");
        }
    }

    fn note_failure(&mut self, failure: &ExportFailure) {
        if !std::mem::replace(&mut self.is_failing, true) {
            let dropped = self.dropped.load(Ordering::Relaxed);
            let host = self.settings.endpoint.host_str().unwrap_or_default();
            tracing::warn!(
                host,
                cause = failure.cause,
                dropped,
                "failed to export traces; the loop continues, and spans are dropped once the queue is full"
            );
        }
    }
}

/// How many spans the collector rejected, if it says so.
async fn rejected_spans(response: Response) -> Option<u64> {
    response.content_length().filter(|length| *length <= MOST_RESPONSE)?;
    let body = response.bytes().await.ok()?;
    let partial = ExportTraceServiceResponse::decode(body).ok()?.partial_success?;
    u64::try_from(partial.rejected_spans).ok()
}

/// The innermost cause, which contains neither a URL nor a header.
fn cause(error: &reqwest::Error) -> String {
    first_chars(&root_cause(error), 200).to_owned()
}

#[cfg(test)]
#[path = "exporter_tests.rs"]
mod tests;
