//! Records reconciles as metrics, and sets the readiness of the process.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;

use super::agent::{AgentsView, ReconcileObserver};
use super::durations::totals::DurationTotals;
use super::pod_sessions::PodSessions;
use super::runtime::{ReconcileMetrics, ReconcileResult};
use crate::api::{Agent, NamespacedName};
use crate::telemetry::agent_collector::{
    AgentCollector, DroppedTelemetry, GatewayCounts, RefusedCalls, SampledTraces, TelemetryDrops,
};
use crate::telemetry::families::{ObjectVisitor, PerObject};
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::namespace_totals::NamespaceTotals;
use crate::telemetry::reconcile_traces::ReconcileTracer;

/// Observes the Agent reconciler: metrics of reconciles and Agents, and readiness.
pub struct MetricsObserver {
    metrics: Arc<Metrics>,
    reconciles: ReconcileMetrics,
    agents: Arc<OnceLock<AgentsView>>,
    loops: Arc<PodSessions>,
    readiness: Readiness,
    totals: Arc<NamespaceTotals>,
    durations: Arc<DurationTotals>,
    level: PerObject,
}

impl MetricsObserver {
    /// `agents` is set and the process becomes ready once the caches are filled. `loops` has the last reports of the
    /// gateways; `workers` is the number of concurrent reconciles; `level` says which series of single Agents are
    /// exported.
    #[must_use]
    pub fn new(
        metrics: Arc<Metrics>,
        agents: Arc<OnceLock<AgentsView>>,
        loops: Arc<PodSessions>,
        readiness: Readiness,
        workers: u16,
        level: PerObject,
    ) -> Self {
        let totals = Arc::new(NamespaceTotals::default());
        let durations = Arc::new(durations(&metrics, &agents));
        loops.count_durations(durations.clone());
        loops.count_refused_calls(totals.clone());
        Self {
            reconciles: ReconcileMetrics::new(metrics.clone(), "agent", workers),
            metrics,
            agents,
            loops,
            readiness,
            totals,
            durations,
            level,
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

    fn tracer(&self) -> ReconcileTracer {
        self.metrics.reconcile_traces.of("agent")
    }

    fn agents(&self, agents: AgentsView) {
        let view = agents.clone();
        let take = move || {
            let snapshot = view.snapshot();
            Box::new(move |visit: &mut dyn FnMut(&Agent)| snapshot.for_each(visit)) as ObjectVisitor<Agent>
        };
        let gateways = GatewayCounts {
            refused: refused_calls(&self.loops),
            dropped: dropped_telemetry(&self.loops),
        };
        if self.agents.set(agents).is_err() {
            tracing::error!("the caches were reported as filled twice; using the first view");
            return;
        }
        // Any earlier, the totals of the Agents that are not listed yet would count as growth.
        self.totals.caches_filled(Timestamp::now());
        self.metrics.add(self.totals.clone());
        self.metrics.add(self.durations.clone());
        let collector = AgentCollector::new(Box::new(take), gateways, sampled(&self.metrics), self.level);
        self.metrics.add(Arc::new(collector));
        self.metrics.caches_filled.set(1);
        self.readiness.set(None);
    }

    fn agent_seen(&self, agent: &Agent) {
        self.totals.agent_seen(agent);
    }

    fn agent_deleted(&self, agent: &NamespacedName) {
        if self.totals.agent_deleted(agent) {
            self.durations.namespace_emptied(&agent.namespace);
        }
    }

    fn agents_listed(&self, scope: Option<&str>, listed: &BTreeSet<NamespacedName>) {
        self.totals.agents_listed(scope, listed);
        self.durations.agents_listed(scope, listed);
    }
}

/// The histograms of durations, with the labels of the Agents in the caches.
fn durations(metrics: &Metrics, agents: &Arc<OnceLock<AgentsView>>) -> DurationTotals {
    let agents = agents.clone();
    let labels = Box::new(move |agent: &NamespacedName| agents.get()?.labels(agent));
    DurationTotals::new(labels, sampled(metrics))
}

/// Which traces of turns may be exemplars.
fn sampled(metrics: &Metrics) -> SampledTraces {
    let traces = metrics.reconcile_traces.clone();
    Box::new(move |trace_id: &[u8]| traces.samples(trace_id))
}

fn dropped_telemetry(loops: &Arc<PodSessions>) -> DroppedTelemetry {
    let loops = loops.clone();
    Box::new(move |namespace, name| {
        let loss = loops.telemetry_loss(&NamespacedName::new(namespace, name));
        let loss = loss.unwrap_or_default();
        TelemetryDrops {
            traces: loss.spans,
            logs: loss.logs,
        }
    })
}

/// What the gateways last reported.
fn refused_calls(loops: &Arc<PodSessions>) -> RefusedCalls {
    let loops = loops.clone();
    Box::new(move |namespace, name| loops.refused_calls(&NamespacedName::new(namespace, name)))
}

#[cfg(test)]
mod tests;
