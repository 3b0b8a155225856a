//! Sums over the Agents of each namespace, which keep what deleted Agents had.
//!
//! Every version of an Agent that the watch shows adds its growth to its namespace, so that nothing between two scrapes
//! is lost and no counter ever decreases within a process. What an Agent had when this process began is not part of the sums:
//! an earlier process has exported it, maybe as the same target. Refused calls are in no status: each report of a gateway adds
//! their growth.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use kube::ResourceExt;
use strum::IntoEnumIterator;

use super::agent_collector::{tool_outcomes, trips};
use super::exposition::MetricWriter;
use super::families::{Samples, SeriesSource, number};
use super::registry::{self, Metric};
use crate::api::status::{LoopState, LoopUsage};
use crate::api::task::TaskOutcome;
use crate::api::usage_counts::{GuardrailTrip, ToolUsage};
use crate::api::{Agent, NamespacedName};

/// Most namespaces without Agents whose sums are kept; beyond them, the one that has been empty longest is dropped.
const MAX_EMPTY: usize = 1000;
/// `state` label of an Agent without a report.
const NO_STATE: &str = "None";

/// One counter of a namespace.
struct SumSeries {
    metric: &'static Metric,
    /// Values of the labels after `namespace`.
    labels: Vec<&'static str>,
    /// The total of one Agent.
    of_agent: Box<dyn Fn(&LoopUsage) -> i64 + Send + Sync>,
}

impl SumSeries {
    fn new(
        metric: &'static Metric,
        labels: impl Into<Vec<&'static str>>,
        of_agent: impl Fn(&LoopUsage) -> i64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            metric,
            labels: labels.into(),
            of_agent: Box::new(of_agent),
        }
    }

    /// All of them, by family.
    fn all() -> Vec<Self> {
        let mut all = vec![
            Self::new(&registry::NAMESPACE_CALLS, [], |usage| usage.calls),
            Self::new(&registry::NAMESPACE_COST, [], |usage| usage.cost),
        ];
        for (guardrail, action) in GuardrailTrip::all().map(GuardrailTrip::labels) {
            let count = move |usage: &LoopUsage| trips(usage, guardrail, action);
            all.push(Self::new(&registry::NAMESPACE_TRIPS, [guardrail, action], count));
        }
        for outcome in TaskOutcome::iter() {
            let count = move |usage: &LoopUsage| usage.counts.tasks.of(outcome);
            all.push(Self::new(&registry::NAMESPACE_TASKS, [<&str>::from(outcome)], count));
        }
        let tokens = |kind, count: fn(&LoopUsage) -> i64| Self::new(&registry::NAMESPACE_TOKENS, [kind], count);
        all.extend([
            tokens("input", |usage| usage.input_tokens),
            tokens("cache_read", |usage| usage.cache_read_tokens),
            tokens("cache_write", |usage| usage.cache_write_tokens),
            tokens("output", |usage| usage.output_tokens),
        ]);
        for (index, (outcome, _)) in tool_outcomes(&ToolUsage::default()).into_iter().enumerate() {
            let count = move |usage: &LoopUsage| {
                let tools = usage.counts.by_tool.iter();
                let counts = tools.map(|used| tool_outcomes(used)[index].1);
                counts.fold(0, i64::saturating_add)
            };
            all.push(Self::new(&registry::NAMESPACE_OUTCOMES, [outcome], count));
        }
        let turns = |outcome, count: fn(&LoopUsage) -> i64| Self::new(&registry::NAMESPACE_TURNS, [outcome], count);
        all.extend([
            turns("Completed", |usage| usage.counts.turns),
            turns("Failed", |usage| usage.counts.failed_turns),
        ]);
        all
    }
}

/// An Agent as last seen.
struct SeenAgent {
    uid: String,
    /// Those of its totals that need not be added any more, in the order of the series.
    totals: Vec<i64>,
    /// Its refused calls in the last report of its gateway to this leader; `None`: there was none.
    refused: Option<i64>,
    state: Option<LoopState>,
    open_gates: usize,
}

/// The sums of one namespace.
#[derive(Clone, Default)]
struct NamespaceSums {
    /// In the order of the series.
    totals: Vec<i64>,
    refused: i64,
    agents: usize,
    /// When it became empty, as the number of such moments before.
    emptied: u64,
}

#[derive(Default)]
struct SumTable {
    /// When all Agents that existed had been seen, if they could be read.
    complete_since: Option<Timestamp>,
    agents: BTreeMap<NamespacedName, SeenAgent>,
    namespaces: BTreeMap<String, NamespaceSums>,
    last_emptied: u64,
}

/// The sums of all namespaces.
pub struct NamespaceTotals {
    series: Vec<SumSeries>,
    table: Mutex<SumTable>,
}

impl Default for NamespaceTotals {
    fn default() -> Self {
        Self {
            series: SumSeries::all(),
            table: Mutex::default(),
        }
    }
}

impl NamespaceTotals {
    /// The caches are filled: every Agent that is created from now on is new, and all that it has is growth.
    pub fn caches_filled(&self, now: Timestamp) {
        self.lock().complete_since = Some(now);
    }

    /// Adds what the Agent has more than when it was last seen. The first sight of an Agent that was created before the caches
    /// were filled adds nothing: it may have been unreadable until now.
    pub fn agent_seen(&self, agent: &Agent) {
        let id = NamespacedName::of(agent);
        let status = agent.status.as_ref();
        let usage = status.and_then(|status| status.usage.as_ref());
        let totals: Vec<i64> = self
            .series
            .iter()
            .map(|series| usage.map_or(0, |usage| (series.of_agent)(usage)))
            .collect();
        let mut table = self.lock();
        let SumTable {
            complete_since,
            agents,
            namespaces,
            ..
        } = &mut *table;
        let created = agent.creation_timestamp().map(|created| created.0);
        let is_new = complete_since.is_some_and(|since| created.is_none_or(|created| created >= since));
        let sums = namespaces.entry(id.namespace.clone()).or_default();
        sums.totals.resize(self.series.len(), 0);
        let uid = agent.uid().unwrap_or_default();
        let known = agents.entry(id).or_insert_with(|| {
            sums.agents += 1;
            let counted = |total: &i64| if is_new { 0 } else { (*total).max(0) };
            SeenAgent::new(uid.clone(), totals.iter().map(counted).collect())
        });
        if known.uid != uid {
            // Deleted and created again while the watch was interrupted.
            *known = SeenAgent::new(uid, vec![0; self.series.len()]);
        }
        for ((sum, last), total) in sums.totals.iter_mut().zip(&mut known.totals).zip(totals) {
            // Totals in the status never decrease, unless they are edited.
            *sum = sum.saturating_add(total.saturating_sub(*last).max(0));
            *last = total.max(*last);
        }
        known.state = status
            .and_then(|status| status.r#loop.as_ref())
            .map(|state| state.state);
        known.open_gates = status.map_or(0, |status| status.gates.len());
    }

    /// Adds the calls that limits have refused to the Agent with this uid since the last report of its gateway, whichever pod that
    /// was in: the count is a total of the gateway's record, which outlasts pods.
    ///
    /// The first report to this leader adds nothing, since a former leader has added it. What was refused between the last
    /// report to that one and this report is lost. After a lower count nothing is added either, and counting continues from there:
    /// the gateway has lost its storage, or the report arrives late, and then nearly all of it would be added again.
    pub fn refused_reported(&self, (agent, uid): (&NamespacedName, &str), refused: i64) {
        // The number is what a pod says: no gateway counts below 0.
        let refused = refused.max(0);
        let mut table = self.lock();
        let SumTable { agents, namespaces, .. } = &mut *table;
        let seen = agents.get_mut(agent).filter(|seen| seen.uid == uid);
        let Some((seen, sums)) = seen.zip(namespaces.get_mut(&agent.namespace)) else {
            return;
        };
        if let Some(before) = seen.refused {
            sums.refused = sums.refused.saturating_add(refused.saturating_sub(before).max(0));
        }
        seen.refused = Some(refused);
    }

    /// The Agent was deleted. Its namespace keeps what it had. Returns whether it was the last one there.
    pub fn agent_deleted(&self, agent: &NamespacedName) -> bool {
        let mut table = self.lock();
        table.remove(agent);
        let sums = table.namespaces.get(&agent.namespace);
        sums.is_none_or(|sums| sums.agents == 0)
    }

    /// These are all Agents of the namespace, or of all.
    pub fn agents_listed(&self, namespace: Option<&str>, listed: &BTreeSet<NamespacedName>) {
        let mut table = self.lock();
        let gone: Vec<_> = table
            .agents
            .keys()
            .filter(|id| namespace.is_none_or(|namespace| id.namespace == namespace) && !listed.contains(*id))
            .cloned()
            .collect();
        for agent in &gone {
            table.remove(agent);
        }
    }

    fn lock(&self) -> MutexGuard<'_, SumTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sums of each namespace now, and its Agents by state and their open gates.
    fn read(&self) -> BTreeMap<String, (NamespaceSums, NamespaceGauges)> {
        let table = self.lock();
        let SumTable { agents, namespaces, .. } = &*table;
        let mut gauges: BTreeMap<&str, NamespaceGauges> = BTreeMap::new();
        for (id, seen) in agents {
            let of_namespace = gauges.entry(&id.namespace).or_default();
            *of_namespace.agents.entry(seen.state).or_default() += 1;
            of_namespace.open_gates += seen.open_gates;
        }
        let sums = namespaces.iter();
        sums.map(|(name, sums)| {
            let of_namespace = gauges.remove(name.as_str()).unwrap_or_default();
            (name.clone(), (sums.clone(), of_namespace))
        })
        .collect()
    }
}

/// What is now in a namespace.
#[derive(Default)]
struct NamespaceGauges {
    agents: BTreeMap<Option<LoopState>, u32>,
    open_gates: usize,
}

impl SeenAgent {
    fn new(uid: String, totals: Vec<i64>) -> Self {
        Self {
            uid,
            totals,
            refused: None,
            state: None,
            open_gates: 0,
        }
    }
}

impl SumTable {
    fn remove(&mut self, agent: &NamespacedName) {
        if self.agents.remove(agent).is_none() {
            return;
        }
        let Some(sums) = self.namespaces.get_mut(&agent.namespace) else {
            return;
        };
        sums.agents -= 1;
        if sums.agents > 0 {
            return;
        }
        self.last_emptied += 1;
        sums.emptied = self.last_emptied;
        let empty = self.namespaces.iter().filter(|(_, sums)| sums.agents == 0);
        if empty.clone().count() > MAX_EMPTY
            && let Some(oldest) = empty.min_by_key(|(_, sums)| sums.emptied)
        {
            let oldest = oldest.0.clone();
            self.namespaces.remove(&oldest);
        }
    }
}

impl SeriesSource for NamespaceTotals {
    fn write(&self, out: &mut MetricWriter<'_>) {
        let namespaces = self.read();
        let mut write =
            |metric: &'static Metric, each: &dyn Fn(&NamespaceSums, &NamespaceGauges, &mut Samples<'_, '_, '_>)| {
                let mut family = out.family(metric.into());
                for (name, (sums, gauges)) in &namespaces {
                    each(sums, gauges, &mut Samples::new(&mut family, metric, &[name]));
                }
            };
        write(&registry::NAMESPACE_AGENTS, &|_, gauges, out| {
            for state in std::iter::once(None).chain(LoopState::iter().map(Some)) {
                let count = gauges.agents.get(&state).copied().unwrap_or_default();
                let label = state.as_ref().map_or(NO_STATE, AsRef::as_ref);
                out.put(&[label], count.into());
            }
        });
        write(&registry::NAMESPACE_APPROVALS, &|_, gauges, out| {
            out.put(&[], count(gauges.open_gates));
        });
        write(&registry::NAMESPACE_REFUSED, &|sums, _, out| {
            out.put(&[], number(sums.refused));
        });
        for family in self.series.chunk_by(|one, next| one.metric == next.metric) {
            let Some(SumSeries { metric, .. }) = family.first() else {
                continue;
            };
            let start = self.series.iter().position(|series| series.metric == *metric);
            let scale = if *metric == &registry::NAMESPACE_COST { 1e6 } else { 1.0 };
            write(metric, &|sums, _, out| {
                let totals = sums.totals.iter().skip(start.unwrap_or_default());
                for (series, total) in family.iter().zip(totals) {
                    out.put(&series.labels, number(*total) / scale);
                }
            });
        }
    }
}

fn count(number_of: usize) -> f64 {
    number(i64::try_from(number_of).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests;
