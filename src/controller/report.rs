//! Turns what the reconciler tells into metrics and readiness.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::agent::{AgentsView, Finished, Observer};
use super::loops::{AgentKey, Loops};
use crate::telemetry::collector::AgentCollector;
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;

/// Label `controller` of the Agent reconciler's metrics.
const CONTROLLER: &str = "agent";

/// Observes the Agent reconciler.
pub struct ReconcileReport {
    metrics: Arc<Metrics>,
    agents: Arc<OnceLock<AgentsView>>,
    loops: Arc<Loops>,
    readiness: Readiness,
}

impl ReconcileReport {
    /// `agents` is filled, and the process made ready, when the caches are; `loops` knows what gateways last said;
    /// `workers` reconciles may run at once.
    #[must_use]
    pub fn new(
        metrics: Arc<Metrics>,
        agents: Arc<OnceLock<AgentsView>>,
        loops: Arc<Loops>,
        readiness: Readiness,
        workers: u16,
    ) -> Self {
        metrics
            .max_concurrent
            .with_label_values(&[CONTROLLER])
            .set(workers.into());
        metrics.reconcile_errors.with_label_values(&[CONTROLLER]).inc_by(0);
        metrics.active_workers.with_label_values(&[CONTROLLER]).set(0);
        for result in ["success", "error", "requeue_after"] {
            metrics.reconciles.with_label_values(&[CONTROLLER, result]).inc_by(0);
        }
        Self {
            metrics,
            agents,
            loops,
            readiness,
        }
    }
}

impl Observer for ReconcileReport {
    fn started(&self) {
        self.metrics.active_workers.with_label_values(&[CONTROLLER]).inc();
    }

    fn finished(&self, how: Finished, took: Duration) {
        let result = match how {
            Finished::Success => "success",
            Finished::RequeueAfter => "requeue_after",
            Finished::Error(_) => "error",
        };
        if matches!(how, Finished::Error(_)) {
            self.metrics.reconcile_errors.with_label_values(&[CONTROLLER]).inc();
        }
        self.metrics.reconciles.with_label_values(&[CONTROLLER, result]).inc();
        let seconds = self.metrics.reconcile_seconds.with_label_values(&[CONTROLLER]);
        seconds.observe(took.as_secs_f64());
        self.metrics.active_workers.with_label_values(&[CONTROLLER]).dec();
    }

    fn agents(&self, agents: AgentsView) {
        let view = agents.clone();
        let loops = self.loops.clone();
        let refused = move |namespace: &str, name: &str| {
            loops.refused_calls(&AgentKey {
                namespace: namespace.into(),
                name: name.into(),
            })
        };
        match AgentCollector::new(move |visit| view.for_each(visit), refused) {
            Ok(collector) => {
                if let Err(error) = self.metrics.register(collector) {
                    tracing::error!(%error, "the metrics of Agents are missing");
                }
            }
            Err(error) => tracing::error!(%error, "the metrics of Agents are missing"),
        }
        if self.agents.set(agents).is_err() {
            tracing::error!("the caches were filled twice; the first ones are used");
        }
        self.readiness.set(None);
    }
}
