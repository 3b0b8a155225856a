//! The periodic export of metrics. Values are cumulative, so an export that fails loses nothing that the next one does not
//! have: there are no retries, and no queue.

use std::sync::Arc;

use jiff::Timestamp;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;
use prost::bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tokio_util::sync::CancellationToken;

use crate::exporter::ExportTask;
use crate::metric_points::{MetricPoints, MetricRequest};
use crate::queue::DropCount;
use crate::resource::TelemetryOrigin;
use crate::settings::MetricSettings;
use crate::transport::{CollectorClient, ExportFailure};

/// Writes all series.
pub type MetricWalk = Arc<dyn Fn(&mut MetricPoints<'_>) + Send + Sync>;

impl ExportTask {
    /// Starts the export of metrics. `walk` writes them, on a thread that may block; `dropped` counts data points that were
    /// not exported.
    #[must_use]
    pub fn of_metrics(
        settings: MetricSettings,
        origin: &TelemetryOrigin,
        dropped: DropCount,
        walk: MetricWalk,
    ) -> Self {
        let client = match CollectorClient::new(&settings.export) {
            Ok(client) => client,
            Err(failure) => {
                let cause = failure.cause;
                tracing::warn!(cause, "no metrics are exported: the HTTP client failed to start");
                return Self::none();
            }
        };
        let exporter = MetricExporter {
            resource: Arc::new(origin.resource(&settings.export.resource)),
            settings,
            client,
            dropped,
            walk,
            sending: DropCount::default(),
            is_failing: false,
        };
        Self::spawn(|closing| tokio::spawn(exporter.run(closing)))
    }
}

struct MetricExporter {
    settings: MetricSettings,
    client: CollectorClient,
    resource: Arc<Resource>,
    dropped: DropCount,
    walk: MetricWalk,
    /// Data points of the request in flight, or that failed.
    sending: DropCount,
    /// Whether the last export failed: only the first of them is logged.
    is_failing: bool,
}

impl MetricExporter {
    async fn run(mut self, closing: CancellationToken) {
        let interval = self.settings.interval;
        let mut due = interval_at(Instant::now() + interval, interval);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_last = tokio::select! {
                _ = due.tick() => false,
                () = closing.cancelled() => true,
            };
            let limit = self.settings.limit;
            let exported = timeout(limit, self.export()).await;
            let exported = exported.unwrap_or_else(|_| Err(ExportFailure::temporary("timeout".into())));
            self.dropped
                .add(usize::try_from(self.sending.take()).unwrap_or(usize::MAX));
            self.note(exported);
            if is_last {
                return;
            }
        }
    }

    /// Exports all series once, request by request: one is in memory while another is written.
    async fn export(&self) -> Result<(), ExportFailure> {
        let (sender, mut requests) = mpsc::channel::<MetricRequest>(1);
        let (walk, resource) = (Arc::clone(&self.walk), Arc::clone(&self.resource));
        // It ends when the receiver is dropped.
        let writing = tokio::task::spawn_blocking(move || {
            let mut sink = |request| sender.blocking_send(request).is_ok();
            let mut points = MetricPoints::new(&resource, Timestamp::now(), &mut sink);
            walk(&mut points);
            points.finish();
        });
        while let Some(MetricRequest { body, points }) = requests.recv().await {
            self.sending.add(points);
            let rejected = rejected(self.client.send(body.into()).await?);
            let _ = self.sending.take();
            if rejected > 0 {
                self.dropped.add(usize::try_from(rejected).unwrap_or(usize::MAX));
                return Err(ExportFailure::rejected(rejected));
            }
        }
        writing
            .await
            .map_err(|error| ExportFailure::temporary(error.to_string()))
    }

    fn note(&mut self, exported: Result<(), ExportFailure>) {
        let dropped = self.dropped.get();
        match exported {
            Ok(()) => {
                if std::mem::take(&mut self.is_failing) {
                    tracing::info!(dropped, "metrics are exported again");
                }
            }
            Err(failure) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(
                        host = self.client.host(),
                        cause = failure.cause,
                        dropped,
                        "failed to export metrics; the next export has their values as they are then"
                    );
                }
            }
        }
    }
}

fn rejected(response: Bytes) -> u64 {
    let response = ExportMetricsServiceResponse::decode(response).ok();
    let partial = response.and_then(|response| response.partial_success);
    partial.map_or(0, |partial| u64::try_from(partial.rejected_data_points).unwrap_or(0))
}

#[cfg(test)]
#[path = "metric_export_tests.rs"]
mod tests;
