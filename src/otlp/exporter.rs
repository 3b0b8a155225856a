//! The export of spans and log records: a bounded queue, and a task that sends it in batches.
//!
//! Nothing waits for it. A collector that cannot be reached, hangs or refuses costs memory up to the queue's bound and one
//! warning; beyond the bound the oldest records are dropped and counted.

use std::sync::Arc;
use std::time::Duration;

use agentloop_support::backoff::{Backoff, jitter};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::bytes::Bytes;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::log_records::{LogSink, LogsSignal};
use crate::queue::{DropCount, DropQueue, QueuedRecord};
use crate::resource::TelemetryOrigin;
use crate::settings::{LogSettings, TraceSettings};
use crate::span_sink::{SpanSink, SpansSignal};
use crate::transport::{CollectorClient, ExportFailure};
use crate::variables::{BatchSettings, ExportSettings};

const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_mins(1));

/// What is queued and sent in batches.
pub(crate) trait BatchedSignal: 'static {
    type Record: QueuedRecord + Send + 'static;
    /// Its name in messages.
    const NAME: &'static str;

    /// The request with these records.
    fn encode(resource: &Resource, records: Vec<Self::Record>) -> Vec<u8>;

    /// How many records the collector rejected, if its response says so.
    fn rejected(response: Bytes) -> Option<u64>;
}

/// The task that exports. Dropped, it ends at once.
pub struct ExportTask {
    closing: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl ExportTask {
    /// Starts the export of spans, if there are settings.
    #[must_use]
    pub fn of_spans(settings: Option<TraceSettings>, origin: &TelemetryOrigin) -> (SpanSink, Self) {
        let Some(settings) = settings else {
            return (SpanSink::default(), Self::none());
        };
        let queue = Arc::new(DropQueue::new(settings.batch.queue));
        let sink = SpanSink::new(Arc::clone(&queue), settings.sampler, settings.has_content);
        let task = Self::start::<SpansSignal>(queue, (settings.export, settings.batch), origin);
        (sink, task)
    }

    /// Starts the export of what this sink takes.
    #[must_use]
    pub fn of_logs(settings: LogSettings, sink: &LogSink, origin: &TelemetryOrigin) -> Self {
        match sink.queue() {
            Some(queue) => Self::start::<LogsSignal>(queue, (settings.export, settings.batch), origin),
            None => Self::none(),
        }
    }

    /// A task that exports nothing.
    #[must_use]
    pub fn none() -> Self {
        Self {
            closing: CancellationToken::new(),
            task: None,
        }
    }

    fn start<S: BatchedSignal>(
        queue: Arc<DropQueue<S::Record>>,
        (export, batch): (ExportSettings, BatchSettings),
        origin: &TelemetryOrigin,
    ) -> Self {
        let closing = CancellationToken::new();
        let client = match CollectorClient::new(&export) {
            Ok(client) => client,
            Err(failure) => {
                let cause = failure.cause;
                tracing::warn!(cause, "no {} are exported: the HTTP client failed to start", S::NAME);
                queue.close();
                return Self::none();
            }
        };
        let exporter = BatchExporter {
            resource: origin.resource(&export.resource),
            batch,
            client,
            closing: closing.clone(),
            queue,
            is_failing: false,
        };
        let task = Some(tokio::spawn(exporter.run::<S>()));
        Self { closing, task }
    }

    pub(crate) fn spawn(task: impl FnOnce(CancellationToken) -> JoinHandle<()>) -> Self {
        let closing = CancellationToken::new();
        let task = Some(task(closing.clone()));
        Self { closing, task }
    }

    /// Exports what is queued, for at most this long, and ends.
    pub async fn finish(mut self, within: Duration) {
        self.closing.cancel();
        if let Some(task) = &mut self.task {
            // What is not exported by then is lost.
            let _ = tokio::time::timeout(within, task).await;
        }
    }
}

impl Drop for ExportTask {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

struct BatchExporter<T> {
    batch: BatchSettings,
    client: CollectorClient,
    resource: Resource,
    closing: CancellationToken,
    queue: Arc<DropQueue<T>>,
    /// Whether the last batch failed: only the first of them is logged.
    is_failing: bool,
}

impl<T: QueuedRecord + Send> BatchExporter<T> {
    async fn run<S: BatchedSignal<Record = T>>(mut self) {
        let BatchSettings { batch: max, delay, .. } = self.batch;
        while let Some(batch) = self.queue.next_batch(max, delay, &self.closing).await {
            let count = batch.len();
            let body = S::encode(&self.resource, batch);
            if !self.deliver::<S>(body.into()).await {
                self.dropped().add(count);
            }
        }
    }

    fn dropped(&self) -> &DropCount {
        &self.queue.dropped
    }

    /// Sends a batch until it is accepted. Returns false if it was given up. While the exporter closes, there is one
    /// attempt.
    async fn deliver<S: BatchedSignal>(&mut self, body: Bytes) -> bool {
        let mut backoff = RETRY;
        loop {
            let failure = match self.client.send(body.clone()).await {
                Ok(response) => {
                    match S::rejected(response).unwrap_or(0) {
                        0 => self.note_success::<S>(),
                        rejected => {
                            self.dropped().add(usize::try_from(rejected).unwrap_or(usize::MAX));
                            self.note_failure::<S>(&ExportFailure::rejected(rejected));
                        }
                    }
                    return true;
                }
                Err(failure) => failure,
            };
            self.note_failure::<S>(&failure);
            if !failure.is_temporary || self.closing.is_cancelled() {
                return false;
            }
            let wait = wait_of(failure.retry_after, backoff.next_spread(jitter()));
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.closing.cancelled() => {}
            }
        }
    }

    fn note_success<S: BatchedSignal>(&mut self) {
        if std::mem::take(&mut self.is_failing) {
            let dropped = self.dropped().get();
            tracing::info!(dropped, "{} are exported again", S::NAME);
        }
    }

    fn note_failure<S: BatchedSignal>(&mut self, failure: &ExportFailure) {
        if !std::mem::replace(&mut self.is_failing, true) {
            let dropped = self.dropped().get();
            tracing::warn!(
                host = self.client.host(),
                cause = failure.cause,
                dropped,
                "failed to export {}; nothing waits for it, and once the queue is full the oldest are dropped",
                S::NAME
            );
        }
    }
}

/// How long to wait before the next attempt. A server that asks for no time, or for less than the backoff, gets the backoff: it
/// would otherwise receive requests without a pause.
fn wait_of(asked: Option<Duration>, backoff: Duration) -> Duration {
    asked.map_or(backoff, |asked| asked.max(backoff))
}

#[cfg(test)]
#[path = "exporter_tests.rs"]
mod tests;
