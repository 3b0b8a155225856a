//! The instruments of the controller, created from the registry of metrics.
//!
//! Owns counting and the text format. Series that are known in advance start at 0.

use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::{Histogram, LabelPair, MetricFamily, MetricType};
use prometheus::{Counter, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};
use strum::IntoEnumIterator;

use super::budget_collector::value;
use super::exposition::{Exemplar, ExpositionFormat, FamilyHead, FamilyWriter, Labels, MetricWriter, PieceSink};
use super::families::SeriesSource;
use super::metric_points::PointTarget;
use super::queues::QueueInstruments;
use super::reconcile_traces::ReconcileTraces;
use super::registry::{self, Metric, MetricKind};
use crate::api::amount::{Amount, AmountKind};
use crate::otlp::{DropCount, MetricPoints, SpanSink};

/// Upper bounds of the buckets of requests to the Kubernetes API, in seconds.
const REQUEST_BUCKETS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];
/// Upper bounds of the buckets of reconcile durations, in seconds.
pub(super) const RECONCILE_BUCKETS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// The instruments, and the registry that a scrape reads.
pub struct Metrics {
    registry: Registry,
    /// What is read from the caches.
    sources: Mutex<Vec<Arc<dyn SeriesSource>>>,
    /// Reconciles by controller and result.
    pub reconciles: IntCounterVec,
    /// Failed reconciles by controller.
    pub reconcile_errors: IntCounterVec,
    /// Those of them that took too long.
    pub reconcile_timeouts: IntCounterVec,
    /// Durations of reconciles by controller.
    pub reconcile_seconds: HistogramVec,
    /// Reconciles running now, by controller.
    pub active_workers: IntGaugeVec,
    /// Maximum number of concurrent reconciles, by controller.
    pub max_concurrent: IntGaugeVec,
    /// 1 for the Lease that this replica holds.
    pub leader: IntGaugeVec,
    /// 1 once this replica leads and its caches are filled.
    pub caches_filled: IntGauge,
    /// Requests to the Kubernetes API by code, method, host.
    pub requests: IntCounterVec,
    /// Durations of requests to the Kubernetes API by verb and host.
    pub request_seconds: HistogramVec,
    /// What the queues of the controllers count.
    pub queues: QueueInstruments,
    /// Pods that attached to the link.
    pub link_attaches: IntCounter,
    /// Accepted reports on the link.
    pub link_reports: IntCounter,
    /// Refused requests on the link, by code.
    pub link_refusals: IntCounterVec,
    /// Requests to the webhook that announces gates, by event and result.
    pub gate_webhooks: IntCounterVec,
    /// Batches of histories, by result.
    pub history_batches: IntCounterVec,
    /// Rows of histories that were written, by record.
    pub history_rows: IntCounterVec,
    /// Rows of histories that were deleted, by record.
    pub history_deleted_rows: IntCounterVec,
    /// When the database of the history last answered.
    pub history_last_success: IntGauge,
    /// Amounts forfeited by lost gateways, in the order of [`AmountKind`].
    forfeited: Vec<Counter>,
    /// Leases that gateways lost with their storage.
    pub lost_leases: IntCounter,
    /// Kubernetes Events that were not written, since their objects had too many.
    pub dropped_events: IntCounter,
    /// Traces of reconciles.
    pub reconcile_traces: Arc<ReconcileTraces>,
    dropped: IntCounterVec,
    /// What the exports of this process count, by signal.
    drop_counts: Mutex<Vec<(&'static str, DropCount)>>,
    /// When the instruments began to count.
    since: Timestamp,
}

impl Metrics {
    /// Creates and registers all instruments.
    pub fn new() -> prometheus::Result<Self> {
        let metrics = Self {
            registry: Registry::new(),
            sources: Mutex::default(),
            reconciles: counters(&registry::RECONCILES)?,
            reconcile_errors: counters(&registry::RECONCILE_ERRORS)?,
            reconcile_timeouts: counters(&registry::RECONCILE_TIMEOUTS)?,
            reconcile_seconds: histograms(&registry::RECONCILE_SECONDS, &RECONCILE_BUCKETS)?,
            active_workers: gauges(&registry::RECONCILE_WORKERS)?,
            max_concurrent: gauges(&registry::RECONCILE_MAX)?,
            leader: gauges(&registry::LEADER)?,
            caches_filled: IntGauge::with_opts(registry::CACHES_FILLED.opts())?,
            requests: counters(&registry::REQUESTS)?,
            request_seconds: histograms(&registry::REQUEST_SECONDS, &REQUEST_BUCKETS)?,
            queues: QueueInstruments::new()?,
            link_attaches: IntCounter::with_opts(registry::LINK_ATTACHES.opts())?,
            link_reports: IntCounter::with_opts(registry::LINK_REPORTS.opts())?,
            link_refusals: counters(&registry::LINK_REFUSALS)?,
            gate_webhooks: counters(&registry::GATE_WEBHOOKS)?,
            history_batches: counters(&registry::HISTORY_BATCHES)?,
            history_rows: counters(&registry::HISTORY_ROWS)?,
            history_deleted_rows: counters(&registry::HISTORY_DELETED_ROWS)?,
            history_last_success: IntGauge::with_opts(registry::HISTORY_LAST_SUCCESS.opts())?,
            forfeited: AmountKind::iter()
                .map(|kind| Counter::with_opts(forfeited(kind).opts()))
                .collect::<Result<_, _>>()?,
            lost_leases: IntCounter::with_opts(registry::LOST_LEASES.opts())?,
            dropped_events: IntCounter::with_opts(registry::KUBERNETES_EVENTS_DROPPED.opts())?,
            reconcile_traces: Arc::default(),
            dropped: counters(&registry::TELEMETRY_DROPPED)?,
            drop_counts: Mutex::default(),
            since: Timestamp::now(),
        };
        for signal in ["traces", "logs", "metrics"] {
            metrics.dropped.with_label_values(&[signal]).inc_by(0);
        }
        metrics.register_all()?;
        Ok(metrics)
    }

    /// Has reconciles traced.
    #[must_use]
    pub fn with_traces(self, sink: SpanSink) -> Self {
        self.show_drops("traces", sink.dropped());
        Self {
            reconcile_traces: Arc::new(ReconcileTraces::new(sink)),
            ..self
        }
    }

    /// Shows what the export of a signal drops.
    pub fn show_drops(&self, signal: &'static str, count: DropCount) {
        let mut counts = self.drop_counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.push((signal, count));
    }

    /// Adds series that are read at each scrape, such as those of Agents.
    pub fn add(&self, source: Arc<dyn SeriesSource>) {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).push(source);
    }

    /// Counts the amount that a lost gateway forfeited.
    pub fn forfeit(&self, lost: &Amount) {
        for (kind, counter) in AmountKind::iter().zip(&self.forfeited) {
            counter.inc_by(value(kind, lost.get(kind)));
        }
    }

    /// Writes all series. Blocks as long as `sink` does.
    pub fn write(&self, format: ExpositionFormat, sink: PieceSink<'_>) {
        let mut out = MetricWriter::new(format, sink);
        self.walk(&mut out);
        out.finish();
    }

    /// Writes all series as data points. Blocks as long as their sink does.
    pub fn write_points(&self, points: &mut MetricPoints<'_>) {
        let mut target = PointTarget::new(points, self.since);
        self.walk(&mut MetricWriter::of_samples(&mut target));
    }

    fn walk(&self, out: &mut MetricWriter<'_>) {
        let sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.queues.refresh();
        self.refresh_drops();
        for family in self.registry.gather() {
            self.write_family(out, &family);
        }
        for source in sources {
            source.write(out);
        }
    }

    fn refresh_drops(&self) {
        // The lock is held over the reading, so that two scrapes do not both add what is new.
        let counts = self.drop_counts.lock().unwrap_or_else(PoisonError::into_inner);
        for (signal, count) in counts.iter() {
            let counter = self.dropped.with_label_values(&[*signal]);
            counter.inc_by(count.get().saturating_sub(counter.get()));
        }
    }

    /// All series as one text, in the Prometheus text format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = Vec::new();
        self.write(ExpositionFormat::Text, &mut |piece| {
            text.extend_from_slice(&piece);
            true
        });
        String::from_utf8_lossy(&text).into_owned()
    }

    fn register(&self, collector: impl Collector + 'static) -> prometheus::Result<()> {
        self.registry.register(Box::new(collector))
    }

    fn register_all(&self) -> prometheus::Result<()> {
        let build = gauges(&registry::BUILD_INFO)?;
        let revision = option_env!("AGENTLOOP_REVISION").unwrap_or("unknown");
        let rustc = env!("AGENTLOOP_RUSTC");
        build
            .with_label_values(&[env!("CARGO_PKG_VERSION"), revision, rustc])
            .set(1);
        self.register(build)?;
        self.register(self.reconciles.clone())?;
        self.register(self.reconcile_errors.clone())?;
        self.register(self.reconcile_timeouts.clone())?;
        self.register(self.reconcile_seconds.clone())?;
        self.register(self.active_workers.clone())?;
        self.register(self.max_concurrent.clone())?;
        self.register(self.leader.clone())?;
        self.register(self.caches_filled.clone())?;
        self.register(self.requests.clone())?;
        self.register(self.request_seconds.clone())?;
        self.queues.register(&self.registry)?;
        self.register(self.link_attaches.clone())?;
        self.register(self.link_reports.clone())?;
        self.register(self.link_refusals.clone())?;
        self.register(self.gate_webhooks.clone())?;
        self.register(self.history_batches.clone())?;
        self.register(self.history_rows.clone())?;
        self.register(self.history_deleted_rows.clone())?;
        self.register(self.history_last_success.clone())?;
        for counter in &self.forfeited {
            self.register(counter.clone())?;
        }
        self.register(self.lost_leases.clone())?;
        self.register(self.dropped_events.clone())?;
        self.register(self.dropped.clone())?;
        self.register(ProcessCollector::for_self())
    }
}

pub(super) fn counters(metric: &Metric) -> prometheus::Result<IntCounterVec> {
    IntCounterVec::new(metric.opts(), metric.labels)
}

pub(super) fn gauges(metric: &Metric) -> prometheus::Result<IntGaugeVec> {
    IntGaugeVec::new(metric.opts(), metric.labels)
}

pub(super) fn histograms(metric: &Metric, buckets: &[f64]) -> prometheus::Result<HistogramVec> {
    let options = HistogramOpts::new(metric.name, metric.help).buckets(buckets.into());
    HistogramVec::new(options, metric.labels)
}

fn forfeited(kind: AmountKind) -> &'static Metric {
    match kind {
        AmountKind::Tokens => &registry::FORFEITED_TOKENS,
        AmountKind::InputTokens => &registry::FORFEITED_INPUT,
        AmountKind::OutputTokens => &registry::FORFEITED_OUTPUT,
        AmountKind::Calls => &registry::FORFEITED_CALLS,
        AmountKind::Cost => &registry::FORFEITED_USD,
    }
}

impl Metrics {
    /// Writes what an instrument has counted.
    fn write_family(&self, out: &mut MetricWriter<'_>, family: &MetricFamily) {
        let kind = match family.get_field_type() {
            MetricType::COUNTER => MetricKind::Counter,
            MetricType::HISTOGRAM => MetricKind::Histogram,
            MetricType::SUMMARY => MetricKind::Summary,
            MetricType::GAUGE | MetricType::UNTYPED => MetricKind::Gauge,
        };
        let (name, help) = (family.name(), family.help());
        let mut samples = out.family(FamilyHead {
            name,
            help,
            kind,
            is_of_process: true,
        });
        for metric in family.get_metric() {
            let labels: Vec<_> = metric
                .get_label()
                .iter()
                .map(|pair: &LabelPair| (pair.name(), pair.value()))
                .collect();
            match kind {
                MetricKind::Counter => samples.value(&labels, metric.get_counter().get_value(), None),
                MetricKind::Gauge => samples.value(&labels, metric.get_gauge().get_value(), None),
                MetricKind::Summary => {
                    let summary = metric.get_summary();
                    samples.summary(&labels, summary.sample_sum(), summary.sample_count());
                }
                MetricKind::Histogram => {
                    let exemplars = self.exemplars(name, &labels);
                    write_histogram(&mut samples, &labels, metric.get_histogram(), exemplars.as_slice());
                }
            }
        }
    }

    /// The exemplars of a histogram's buckets, if it has any.
    fn exemplars(&self, name: &str, labels: &Labels<'_>) -> Vec<Option<Exemplar>> {
        let found = (name == registry::RECONCILE_SECONDS.name)
            .then(|| labels.iter().find(|(label, _)| *label == "controller"))
            .flatten()
            .and_then(|(_, controller)| self.reconcile_traces.exemplars(controller));
        found.map(Vec::from).unwrap_or_default()
    }
}

/// The exemplars are those of the buckets and of the unbounded one.
fn write_histogram(
    samples: &mut FamilyWriter<'_, '_>,
    labels: &Labels<'_>,
    histogram: &Histogram,
    exemplars: &[Option<Exemplar>],
) {
    let (sum, count) = (histogram.get_sample_sum(), histogram.get_sample_count());
    let bounded = histogram.get_bucket().iter();
    let bounded = bounded.map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
    let buckets = bounded.chain([(f64::INFINITY, count)]).enumerate();
    let buckets = buckets.map(|(at, (bound, cumulative))| {
        let exemplar = exemplars.get(at).and_then(Option::as_ref);
        (bound, cumulative, exemplar)
    });
    samples.histogram(labels, buckets, sum, count);
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
