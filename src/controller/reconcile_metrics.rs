//! Turns what the reconciler tells into metrics and readiness.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::agent::{AgentsView, ReconcileObserver, ReconcileResult};
use super::pod_sessions::{AgentKey, PodSessions};
use crate::telemetry::agent_collector::AgentCollector;
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;

/// Counts the reconciles of one controller.
pub struct ReconcileMetrics {
    metrics: Arc<Metrics>,
    /// Label `controller` of its metrics.
    controller: &'static str,
}

impl ReconcileMetrics {
    /// Of the controller of this name, in which `workers` reconciles may run at once.
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

    /// A reconcile starts.
    pub fn started(&self) {
        self.metrics.active_workers.with_label_values(&[self.controller]).inc();
    }

    /// A reconcile ended.
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

/// Observes the Agent reconciler.
pub struct MetricsObserver {
    metrics: Arc<Metrics>,
    reconciles: ReconcileMetrics,
    agents: Arc<OnceLock<AgentsView>>,
    loops: Arc<PodSessions>,
    readiness: Readiness,
}

impl MetricsObserver {
    /// `agents` is filled, and the process made ready, when the caches are; `loops` knows what gateways last said;
    /// `workers` reconciles may run at once.
    #[must_use]
    pub fn new(
        metrics: Arc<Metrics>,
        agents: Arc<OnceLock<AgentsView>>,
        loops: Arc<PodSessions>,
        readiness: Readiness,
        workers: u16,
    ) -> Self {
        Self {
            reconciles: ReconcileMetrics::new(metrics.clone(), "agent", workers),
            metrics,
            agents,
            loops,
            readiness,
        }
    }
}

impl ReconcileObserver for MetricsObserver {
    fn started(&self) {
        self.reconciles.started();
    }

    fn finished(&self, how: ReconcileResult, took: Duration) {
        self.reconciles.finished(how, took);
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
