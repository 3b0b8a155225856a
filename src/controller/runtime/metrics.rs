//! Records reconciles as metrics, under the names of controller-runtime.

use std::sync::Arc;
use std::time::Duration;

use super::controller::ReconcileResult;
use super::error::ReconcileErrorKind;
use super::queue::{QueueKey, WorkQueue};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::reconcile_traces::ReconcileTracer;

/// A queue of the controller of this name, which is shown at each scrape.
pub(in crate::controller) fn queue<K>(metrics: &Metrics, controller: &'static str) -> Arc<WorkQueue<K>>
where
    K: QueueKey + Send + Sync + 'static,
{
    let queue = Arc::new(WorkQueue::new(metrics.queues.of(controller)));
    metrics.queues.watch(controller, &queue);
    queue
}

/// The reconcile metrics of one controller.
pub struct ReconcileMetrics {
    metrics: Arc<Metrics>,
    /// Value of the label `controller`.
    controller: &'static str,
}

impl ReconcileMetrics {
    /// Registers the controller of this name, with `workers` concurrent reconciles.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>, controller: &'static str, workers: u16) -> Self {
        let label = [controller];
        metrics.max_concurrent.with_label_values(&label).set(workers.into());
        metrics.reconcile_errors.with_label_values(&label).inc_by(0);
        metrics.reconcile_timeouts.with_label_values(&label).inc_by(0);
        metrics.active_workers.with_label_values(&label).set(0);
        for result in ["success", "error", "requeue_after"] {
            metrics.reconciles.with_label_values(&[controller, result]).inc_by(0);
        }
        Self { metrics, controller }
    }

    /// A queue of this controller, which is shown at each scrape.
    pub(in crate::controller) fn queue<K>(&self) -> Arc<WorkQueue<K>>
    where
        K: QueueKey + Send + Sync + 'static,
    {
        queue(&self.metrics, self.controller)
    }

    /// Traces the reconciles.
    #[must_use]
    pub fn tracer(&self) -> ReconcileTracer {
        self.metrics.reconcile_traces.of(self.controller)
    }

    /// Records the start of a reconcile.
    pub fn started(&self) {
        self.metrics.active_workers.with_label_values(&[self.controller]).inc();
    }

    /// Records the end of a reconcile.
    pub fn finished(&self, how: ReconcileResult, took: Duration) {
        let result = how.label();
        let label = [self.controller];
        if matches!(how, ReconcileResult::Error(_)) {
            self.metrics.reconcile_errors.with_label_values(&label).inc();
        }
        if how == ReconcileResult::Error(ReconcileErrorKind::Timeout) {
            self.metrics.reconcile_timeouts.with_label_values(&label).inc();
        }
        self.metrics
            .reconciles
            .with_label_values(&[self.controller, result])
            .inc();
        let seconds = self.metrics.reconcile_seconds.with_label_values(&label);
        seconds.observe(took.as_secs_f64());
        self.metrics.active_workers.with_label_values(&label).dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_an_error_that_is_also_counted_by_itself() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let reconciles = ReconcileMetrics::new(metrics.clone(), "agent", 1);
        let counted = || {
            let of = |counter: &prometheus::IntCounterVec| counter.with_label_values(&["agent"]).get();
            (of(&metrics.reconcile_errors), of(&metrics.reconcile_timeouts))
        };
        for (how, expected) in [
            (ReconcileResult::Success, (0, 0)),
            (ReconcileResult::Error(ReconcileErrorKind::Refused), (1, 0)),
            (ReconcileResult::Error(ReconcileErrorKind::Timeout), (2, 1)),
            (ReconcileResult::Error(ReconcileErrorKind::Unavailable), (3, 1)),
        ] {
            reconciles.started();
            reconciles.finished(how, Duration::ZERO);
            assert_eq!(counted(), expected, "{how:?}");
        }
    }
}
