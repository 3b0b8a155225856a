//! The instruments of the controller, created from the registry of metrics.
//!
//! Owns counting and the text format. Series that are known in advance start at 0.

use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::{
    CounterVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry, TextEncoder,
};

use strum::IntoEnumIterator;

use super::budget_collector::{label, value};
use super::registry::{self, Metric};
use crate::api::amount::{Amount, AmountKind};

/// Upper bounds of the buckets of reconcile durations, in seconds.
const RECONCILE_BUCKETS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// The instruments, and the registry that a scrape reads.
pub struct Metrics {
    registry: Registry,
    /// Reconciles by controller and result.
    pub reconciles: IntCounterVec,
    /// Failed reconciles by controller.
    pub reconcile_errors: IntCounterVec,
    /// Durations of reconciles by controller.
    pub reconcile_seconds: HistogramVec,
    /// Reconciles running now, by controller.
    pub active_workers: IntGaugeVec,
    /// Maximum number of concurrent reconciles, by controller.
    pub max_concurrent: IntGaugeVec,
    /// 1 for the Lease that this replica holds.
    pub leader: IntGaugeVec,
    /// Requests to the Kubernetes API by code, method, host.
    pub requests: IntCounterVec,
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
    /// Amounts forfeited by lost gateways, by kind.
    forfeited: CounterVec,
    /// Leases that gateways lost with their storage.
    pub lost_leases: IntCounter,
}

impl Metrics {
    /// Creates and registers all instruments.
    pub fn new() -> prometheus::Result<Self> {
        let seconds = &registry::RECONCILE_SECONDS;
        let histogram = HistogramOpts::new(seconds.name, seconds.help).buckets(RECONCILE_BUCKETS.into());
        let metrics = Self {
            registry: Registry::new(),
            reconciles: counters(&registry::RECONCILES)?,
            reconcile_errors: counters(&registry::RECONCILE_ERRORS)?,
            reconcile_seconds: HistogramVec::new(histogram, seconds.labels)?,
            active_workers: gauges(&registry::RECONCILE_WORKERS)?,
            max_concurrent: gauges(&registry::RECONCILE_MAX)?,
            leader: gauges(&registry::LEADER)?,
            requests: counters(&registry::REQUESTS)?,
            link_attaches: IntCounter::with_opts(registry::LINK_ATTACHES.opts())?,
            link_reports: IntCounter::with_opts(registry::LINK_REPORTS.opts())?,
            link_refusals: counters(&registry::LINK_REFUSALS)?,
            gate_webhooks: counters(&registry::GATE_WEBHOOKS)?,
            history_batches: counters(&registry::HISTORY_BATCHES)?,
            history_rows: counters(&registry::HISTORY_ROWS)?,
            history_deleted_rows: counters(&registry::HISTORY_DELETED_ROWS)?,
            history_last_success: IntGauge::with_opts(registry::HISTORY_LAST_SUCCESS.opts())?,
            forfeited: CounterVec::new(registry::FORFEITED.opts(), registry::FORFEITED.labels)?,
            lost_leases: IntCounter::with_opts(registry::LOST_LEASES.opts())?,
        };
        metrics.forfeit(&Amount::ZERO);
        metrics.register_all()?;
        Ok(metrics)
    }

    /// Registers a collector, such as the one of Agents.
    pub fn register(&self, collector: impl Collector + 'static) -> prometheus::Result<()> {
        self.registry.register(Box::new(collector))
    }

    /// Counts the amount that a lost gateway forfeited.
    pub fn forfeit(&self, lost: &Amount) {
        for kind in AmountKind::iter() {
            let counter = self.forfeited.with_label_values(&[label(kind)]);
            counter.inc_by(value(kind, lost.get(kind)));
        }
    }

    /// All series in the Prometheus text format.
    pub fn text(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    fn register_all(&self) -> prometheus::Result<()> {
        let build = gauges(&registry::BUILD_INFO)?;
        let revision = option_env!("AGENTLOOP_REVISION").unwrap_or("unknown");
        build.with_label_values(&[env!("CARGO_PKG_VERSION"), revision]).set(1);
        self.register(build)?;
        self.register(self.reconciles.clone())?;
        self.register(self.reconcile_errors.clone())?;
        self.register(self.reconcile_seconds.clone())?;
        self.register(self.active_workers.clone())?;
        self.register(self.max_concurrent.clone())?;
        self.register(self.leader.clone())?;
        self.register(self.requests.clone())?;
        self.register(self.link_attaches.clone())?;
        self.register(self.link_reports.clone())?;
        self.register(self.link_refusals.clone())?;
        self.register(self.gate_webhooks.clone())?;
        self.register(self.history_batches.clone())?;
        self.register(self.history_rows.clone())?;
        self.register(self.history_deleted_rows.clone())?;
        self.register(self.history_last_success.clone())?;
        self.register(self.forfeited.clone())?;
        self.register(self.lost_leases.clone())?;
        self.register(ProcessCollector::for_self())
    }
}

fn counters(metric: &Metric) -> prometheus::Result<IntCounterVec> {
    IntCounterVec::new(metric.opts(), metric.labels)
}

fn gauges(metric: &Metric) -> prometheus::Result<IntGaugeVec> {
    IntGaugeVec::new(metric.opts(), metric.labels)
}
