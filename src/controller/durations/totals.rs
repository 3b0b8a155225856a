//! Histograms of how long model calls, turns and tool runs took and approvals waited, by namespace, from what the pods report.
//!
//! Labels are those of the Agents' specs, never those of a report, and their number is bounded. The counts begin with this
//! process and only grow.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use strum::IntoEnumIterator as _;

use crate::api::NamespacedName;
use crate::api::status::OTHER_MODELS;
use crate::link::durations::{
    APPROVAL_BOUNDS, ApprovalDecision, ApprovalWaits, CALL_BOUNDS, DurationCounts, MAX_MEAN, TURN_BOUNDS, bucket_of,
};
use crate::otlp::TurnName;
use crate::support::hash::hex;
use crate::telemetry::agent_collector::SampledTraces;
use crate::telemetry::exposition::{Exemplar, FamilyWriter, Labels, MetricWriter};
use crate::telemetry::families::SeriesSource;
use crate::telemetry::registry::{self, Metric};

/// Maximum number of models of a namespace with series of their own.
pub const MAX_MODELS: usize = 10;
/// Maximum number of namespaces. Beyond them, the one whose durations have not grown for longest makes room if that is
/// [`IDLE`] or longer: namespaces that are all in use would otherwise evict each other, and none would have rates.
pub const MAX_NAMESPACES: usize = 1000;
/// How long the durations of a namespace have not grown when it makes room for another.
const IDLE: SignedDuration = SignedDuration::from_mins(10);
/// Maximum number of durations that one report adds. A pod reports several times a minute.
const MAX_COUNTED: u64 = 1_000_000;

/// What the spec of an Agent says, for labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentLabels {
    /// Its mode.
    pub mode: String,
    /// Its models.
    pub models: Vec<String>,
}

/// The labels of the Agent of this name; `None`: there is none.
pub type LabelsOfAgent = Box<dyn Fn(&NamespacedName) -> Option<AgentLabels> + Send + Sync>;

/// What a pod has counted since its last report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DurationGrowth {
    /// Answered calls by model.
    pub calls: Vec<(String, DurationCounts)>,
    /// Completed turns.
    pub turns: DurationCounts,
    /// Tool runs.
    pub tool_runs: DurationCounts,
    /// Closed gates.
    pub approvals: ApprovalWaits,
    /// A gate is reported for the first time, open or closed.
    pub first_gate: bool,
}

impl DurationGrowth {
    fn is_none(&self) -> bool {
        let calls = self.calls.iter().map(|(_, counts)| counts);
        let approvals = ApprovalDecision::iter().map(|decision| self.approvals.of(decision));
        let mut all = calls.chain([&self.turns, &self.tool_runs]).chain(approvals);
        !self.first_gate && all.all(|counts| counts.count() == 0)
    }
}

/// The histograms of all namespaces.
pub struct DurationTotals {
    labels: LabelsOfAgent,
    sampled: SampledTraces,
    table: Mutex<DurationTable>,
}

#[derive(Default)]
struct DurationTable {
    namespaces: BTreeMap<String, NamespaceDurations>,
}

#[derive(Clone)]
struct NamespaceDurations {
    calls: BTreeMap<String, DurationHistogram>,
    turns: BTreeMap<String, DurationHistogram>,
    tool_runs: DurationHistogram,
    /// All decisions, or none before the first gate.
    approvals: BTreeMap<ApprovalDecision, DurationHistogram>,
    /// When it grew last.
    grown: Timestamp,
}

/// One histogram.
#[derive(Clone)]
struct DurationHistogram {
    bounds: &'static [u64],
    /// Not cumulative; one more than there are bounds.
    buckets: Vec<u64>,
    sum_microseconds: u64,
    exemplars: Vec<Option<Exemplar>>,
}

/// The Agent whose pod has reported, and when.
struct GrowthOrigin<'a> {
    uid: &'a str,
    now: Timestamp,
    sampled: &'a SampledTraces,
}

impl DurationTotals {
    /// `sampled` says which traces may be exemplars.
    #[must_use]
    pub fn new(labels: LabelsOfAgent, sampled: SampledTraces) -> Self {
        Self {
            labels,
            sampled,
            table: Mutex::default(),
        }
    }

    /// Adds what the pod of the Agent with this uid has counted.
    pub fn add(&self, (agent, uid): (&NamespacedName, &str), growth: &DurationGrowth, now: Timestamp) {
        if growth.is_none() {
            return;
        }
        // Looked up under the lock: an Agent that is in the cache now is not yet gone for `namespace_emptied`.
        let mut table = self.lock();
        let Some(labels) = (self.labels)(agent) else { return };
        let Some(namespace) = table.grow(&agent.namespace, now) else {
            return;
        };
        let origin = GrowthOrigin {
            uid,
            now,
            sampled: &self.sampled,
        };
        for (model, counts) in &growth.calls {
            if counts.count() > 0 {
                let model = Some(model).filter(|model| labels.models.contains(*model));
                namespace.calls_of(model).add(counts, &origin);
            }
        }
        if growth.turns.count() > 0 {
            let turns = namespace.turns.entry(labels.mode);
            let turns = turns.or_insert_with(|| DurationHistogram::new(TURN_BOUNDS));
            turns.add(&growth.turns, &origin);
        }
        namespace.tool_runs.add(&growth.tool_runs, &origin);
        namespace.add_approvals(growth, &origin);
    }

    /// The last Agent of this namespace is gone, also from the cache. The next user of the namespace begins at 0.
    pub fn namespace_emptied(&self, namespace: &str) {
        self.lock().namespaces.remove(namespace);
    }

    /// These are all Agents of the namespace, or of all, also in the cache.
    pub fn agents_listed(&self, scope: Option<&str>, listed: &BTreeSet<NamespacedName>) {
        let used: BTreeSet<&str> = listed.iter().map(|agent| agent.namespace.as_str()).collect();
        self.lock()
            .namespaces
            .retain(|name, _| scope.is_some_and(|scope| scope != name) || used.contains(name.as_str()));
    }

    fn lock(&self) -> MutexGuard<'_, DurationTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DurationTable {
    /// The durations of a namespace that grows now; `None`: there is no room for it.
    fn grow(&mut self, name: &str, now: Timestamp) -> Option<&mut NamespaceDurations> {
        if !self.namespaces.contains_key(name) && self.namespaces.len() >= MAX_NAMESPACES {
            let (oldest, durations) = self.namespaces.iter().min_by_key(|(_, durations)| durations.grown)?;
            if now.duration_since(durations.grown) < IDLE {
                return None;
            }
            let oldest = oldest.clone();
            self.namespaces.remove(&oldest);
        }
        let namespace = self.namespaces.entry(name.to_owned());
        let namespace = namespace.or_insert_with(|| NamespaceDurations {
            calls: BTreeMap::new(),
            turns: BTreeMap::new(),
            tool_runs: DurationHistogram::new(CALL_BOUNDS),
            approvals: BTreeMap::new(),
            grown: now,
        });
        namespace.grown = now;
        Some(namespace)
    }
}

impl NamespaceDurations {
    /// The calls of a model, or of all others.
    fn calls_of(&mut self, model: Option<&String>) -> &mut DurationHistogram {
        let others = usize::from(self.calls.contains_key(OTHER_MODELS));
        let has_room = self.calls.len() - others < MAX_MODELS;
        let own = model.filter(|model| has_room || self.calls.contains_key(*model));
        let label = own.map_or(OTHER_MODELS, String::as_str);
        let calls = self.calls.entry(label.to_owned());
        calls.or_insert_with(|| DurationHistogram::new(CALL_BOUNDS))
    }

    /// Approvals are few: all decisions are there with zeros from the first open gate on, so that rates see the first answer.
    fn add_approvals(&mut self, growth: &DurationGrowth, origin: &GrowthOrigin<'_>) {
        if !growth.first_gate && growth.approvals.is_none() && self.approvals.is_empty() {
            return;
        }
        for decision in ApprovalDecision::iter() {
            let waits = self.approvals.entry(decision);
            let waits = waits.or_insert_with(|| DurationHistogram::new(APPROVAL_BOUNDS));
            waits.add(growth.approvals.of(decision), origin);
        }
    }
}

impl DurationHistogram {
    fn new(bounds: &'static [u64]) -> Self {
        let buckets = bounds.len() + 1;
        Self {
            bounds,
            buckets: vec![0; buckets],
            sum_microseconds: 0,
            exemplars: vec![None; buckets],
        }
    }

    /// Adds what a report has more. What no pod can have counted is not added.
    fn add(&mut self, growth: &DurationCounts, origin: &GrowthOrigin<'_>) {
        let count = growth.count();
        let longest = count.saturating_mul(MAX_MEAN);
        if count > MAX_COUNTED || growth.sum_microseconds > longest {
            return;
        }
        for (bucket, more) in self.buckets.iter_mut().zip(&growth.buckets) {
            *bucket = bucket.saturating_add(*more);
        }
        self.sum_microseconds = self.sum_microseconds.saturating_add(growth.sum_microseconds);
        self.show_last(growth, origin);
    }

    /// The id of the trace is derived, so that a report can name none of another Agent.
    fn show_last(&mut self, growth: &DurationCounts, origin: &GrowthOrigin<'_>) {
        let Some(last) = growth.last else { return };
        let bucket = bucket_of(self.bounds, Duration::from_micros(last.microseconds));
        if growth.buckets.get(bucket).is_none_or(|more| *more == 0) {
            return;
        }
        let turn = TurnName {
            agent: origin.uid,
            member: last.member,
            turn: last.turn,
        };
        let trace_id = turn.trace_id();
        if (origin.sampled)(&trace_id)
            && let Some(place) = self.exemplars.get_mut(bucket)
        {
            *place = Some(Exemplar {
                trace_id: hex(&trace_id),
                value: seconds(last.microseconds),
                seconds: origin.now.as_duration().as_secs_f64(),
            });
        }
    }

    fn write(&self, labels: &Labels<'_>, out: &mut FamilyWriter<'_, '_>) {
        let bounds = self.bounds.iter().map(|bound| seconds(bound * 1000));
        let mut cumulative: u64 = 0;
        let buckets = bounds.chain([f64::INFINITY]).zip(&self.buckets).zip(&self.exemplars);
        let buckets: Vec<_> = buckets
            .map(|((bound, count), exemplar)| {
                cumulative = cumulative.saturating_add(*count);
                (bound, cumulative, exemplar.as_ref())
            })
            .collect();
        out.histogram(labels, buckets, seconds(self.sum_microseconds), cumulative);
    }
}

impl SeriesSource for DurationTotals {
    fn write(&self, out: &mut MetricWriter<'_>) {
        // Not written under the lock, which reports wait for.
        let namespaces = self.lock().namespaces.clone();
        let mut write = |metric: &'static Metric,
                         each: &dyn Fn(&str, &NamespaceDurations, &mut FamilyWriter<'_, '_>)| {
            let mut family = out.family(metric.into());
            for (name, durations) in &namespaces {
                each(name, durations, &mut family);
            }
        };
        write(&registry::NAMESPACE_APPROVAL_SECONDS, &|namespace, durations, out| {
            for (decision, waits) in &durations.approvals {
                waits.write(&[("namespace", namespace), ("decision", decision.as_ref())], out);
            }
        });
        write(&registry::NAMESPACE_CALL_SECONDS, &|namespace, durations, out| {
            for (model, calls) in &durations.calls {
                calls.write(&[("namespace", namespace), ("model", model)], out);
            }
        });
        write(&registry::NAMESPACE_TOOL_SECONDS, &|namespace, durations, out| {
            durations.tool_runs.write(&[("namespace", namespace)], out);
        });
        write(&registry::NAMESPACE_TURN_SECONDS, &|namespace, durations, out| {
            for (mode, turns) in &durations.turns {
                turns.write(&[("namespace", namespace), ("mode", mode)], out);
            }
        });
    }
}

/// Prometheus has only floating-point numbers; they are exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
fn seconds(microseconds: u64) -> f64 {
    microseconds as f64 / 1e6
}

#[cfg(test)]
mod tests;
