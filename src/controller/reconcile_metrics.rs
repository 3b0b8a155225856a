//! Records reconciles as metrics, and sets the readiness of the process.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::agent::{AgentsView, ReconcileObserver};
use super::duration_totals::DurationTotals;
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
        let totals = Arc::new(NamespaceTotals::new(refused_calls(&loops)));
        let durations = Arc::new(durations(&metrics, &agents));
        loops.count_durations(durations.clone());
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
        // Any earlier, the sums would lack the Agents that are not listed yet, whose totals would then count as growth.
        self.metrics.add(self.totals.clone());
        self.metrics.add(self.durations.clone());
        let collector = AgentCollector::new(Box::new(take), gateways, sampled(&self.metrics), self.level);
        self.metrics.add(Arc::new(collector));
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
mod tests {
    use kube::runtime::reflector;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;
    use crate::controller::pod_sessions::LivePod;
    use crate::controller::runtime::guarded::GuardedObject;
    use crate::link::messages::{Directives, LoopTotals, PodReport};
    use crate::telemetry::exposition::{ExpositionFormat, MetricWriter};
    use crate::telemetry::families::SeriesSource;

    fn agent(name: &str) -> Agent {
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"namespace": "ns", "name": name, "uid": name},
            "spec": {"model": {"api": "Scripted", "name": "m"}},
        });
        serde_json::from_value(object).unwrap()
    }

    fn has_durations(observer: &MetricsObserver) -> bool {
        let mut length = 0;
        let mut sink = |piece: Vec<u8>| {
            length += piece.len();
            true
        };
        let mut out = MetricWriter::new(ExpositionFormat::Text, &mut sink);
        observer.durations.write(&mut out);
        out.finish();
        length > 0
    }

    fn observer(metrics: &Arc<Metrics>, loops: &Arc<PodSessions>) -> MetricsObserver {
        let readiness = Readiness::waiting("the caches to fill");
        MetricsObserver::new(
            metrics.clone(),
            Arc::default(),
            loops.clone(),
            readiness,
            1,
            PerObject::Disabled,
        )
    }

    /// The calls of namespace `ns`, as a scrape shows them.
    fn calls(metrics: &Metrics) -> Option<String> {
        let mut text = Vec::new();
        let mut sink = |piece: Vec<u8>| {
            text.extend(piece);
            true
        };
        metrics.write(ExpositionFormat::Text, &mut sink);
        let text = String::from_utf8(text).unwrap();
        let series = "agentloop_namespace_calls_total{namespace=\"ns\"} ";
        text.lines()
            .find_map(|line| line.strip_prefix(series).map(str::to_owned))
    }

    #[test]
    fn the_sums_of_namespaces_are_exported_once_all_agents_are_in_them() {
        let (loops, metrics) = (Arc::new(PodSessions::new().0), Arc::new(Metrics::new().unwrap()));
        let observer = observer(&metrics, &loops);
        let (store, mut writer) = reflector::store();
        for (name, calls_of) in [("a", 1_000), ("b", 200)] {
            assert_eq!(calls(&metrics), None);
            let mut agent = agent(name);
            agent.status = serde_json::from_value(json!({"usage": {"calls": calls_of}})).unwrap();
            writer.apply_watcher_event(&Event::Apply(GuardedObject(Ok(agent.clone()))));
            observer.agent_seen(&agent);
        }
        observer.agents(AgentsView::new(vec![store]));
        assert_eq!(calls(&metrics).as_deref(), Some("1200"));
    }

    #[test]
    fn the_durations_of_a_namespace_last_as_long_as_it_has_agents() {
        let (loops, metrics) = (Arc::new(PodSessions::new().0), Arc::new(Metrics::new().unwrap()));
        let observer = observer(&metrics, &loops);
        let (store, mut writer) = reflector::store();
        observer.agents(AgentsView::new(vec![store]));
        for name in ["a", "b"] {
            writer.apply_watcher_event(&Event::Apply(GuardedObject(Ok(agent(name)))));
            observer.agent_seen(&agent(name));
        }
        let key = |name: &str| NamespacedName::new("ns", name);
        let pod = LivePod {
            uid: "p".into(),
            epoch: 1,
        };
        loops.expect_pod(
            (&key("a"), "a"),
            pod.clone(),
            LoopTotals::default(),
            Directives::default(),
        );
        for count in [0, 1] {
            let report = json!({"epoch": 1, "callDurations": [{"model": "m", "counts": {"buckets": [count]}}]});
            let report: PodReport = serde_json::from_value(report).unwrap();
            loops
                .report(&key("a"), &pod, report, jiff::Timestamp::UNIX_EPOCH)
                .unwrap();
        }
        assert!(has_durations(&observer));
        observer.agent_deleted(&key("a"));
        assert!(has_durations(&observer), "another Agent is there");
        observer.agents_listed(None, &BTreeSet::from([key("b")]));
        assert!(has_durations(&observer));
        observer.agent_deleted(&key("b"));
        assert!(!has_durations(&observer));
    }
}
