//! Records reconciles as metrics, and sets the readiness of the process.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::agent::{AgentsView, ReconcileObserver};
use super::pod_sessions::PodSessions;
use super::runtime::{ReconcileMetrics, ReconcileResult};
use crate::api::NamespacedName;
use crate::telemetry::agent_collector::AgentCollector;
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;

/// Observes the Agent reconciler: metrics of reconciles and Agents, and readiness.
pub struct MetricsObserver {
    metrics: Arc<Metrics>,
    reconciles: ReconcileMetrics,
    agents: Arc<OnceLock<AgentsView>>,
    loops: Arc<PodSessions>,
    readiness: Readiness,
}

impl MetricsObserver {
    /// `agents` is set and the process becomes ready once the caches are filled. `loops` has the last reports of the
    /// gateways; `workers` is the number of concurrent reconciles.
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
        let refused = move |namespace: &str, name: &str| loops.refused_calls(&NamespacedName::new(namespace, name));
        match AgentCollector::new(move |visit| view.for_each(visit), refused) {
            Ok(collector) => {
                if let Err(error) = self.metrics.register(collector) {
                    tracing::error!(%error, "failed to register the metrics of Agents");
                }
            }
            Err(error) => tracing::error!(%error, "failed to register the metrics of Agents"),
        }
        if self.agents.set(agents).is_err() {
            tracing::error!("the caches were reported as filled twice; using the first view");
        }
        self.readiness.set(None);
    }
}
