//! Records reconciles as metrics, under the names of controller-runtime.

use std::sync::Arc;
use std::time::Duration;

use super::controller::ReconcileResult;
use crate::telemetry::metrics::Metrics;

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
        metrics.active_workers.with_label_values(&label).set(0);
        for result in ["success", "error", "requeue_after"] {
            metrics.reconciles.with_label_values(&[controller, result]).inc_by(0);
        }
        Self { metrics, controller }
    }

    /// Records the start of a reconcile.
    pub fn started(&self) {
        self.metrics.active_workers.with_label_values(&[self.controller]).inc();
    }

    /// Records the end of a reconcile.
    pub fn finished(&self, how: ReconcileResult, took: Duration) {
        let result = match how {
            ReconcileResult::Success => "success",
            ReconcileResult::RequeueAfter => "requeue_after",
            ReconcileResult::Error(_) => "error",
        };
        let label = [self.controller];
        if matches!(how, ReconcileResult::Error(_)) {
            self.metrics.reconcile_errors.with_label_values(&label).inc();
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
