//! Metrics of Agents, read from the controller's cache at each scrape.
//!
//! Holds no state: a deleted Agent leaves no series behind, and the counters equal the totals in its status.

use strum::IntoEnumIterator;

use super::exposition::{Exemplar, LabelStarts, MetricWriter};
use super::families::{PerObject, Samples, SeriesSource, TakeSnapshot, dollars, number, write_conditions};
use super::registry::{self, Metric};
use crate::api::Agent;
use crate::api::agent::AgentMode;
use crate::api::condition::{self, ConditionType, GatewaySign, LoopSign};
use crate::api::status::{Gate, LoopStatus, LoopUsage, ModelUsage, OTHER_MODELS, PauseReason};
use crate::api::task::TaskOutcome;
use crate::api::usage_counts::{GuardrailTrip, ToolUsage};
use crate::otlp::TurnName;
use crate::support::hash::hex;

/// Number of calls that limits refused to the Agent of this namespace and name, as last reported by its gateway.
pub type RefusedCalls = Box<dyn Fn(&str, &str) -> Option<i64> + Send + Sync>;

/// What the pod of the Agent of this namespace and name has not exported, as last reported by its gateway.
pub type DroppedTelemetry = Box<dyn Fn(&str, &str) -> TelemetryDrops + Send + Sync>;

/// Telemetry that was not exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TelemetryDrops {
    /// Number of spans.
    pub traces: i64,
    /// Number of log lines.
    pub logs: i64,
}

/// What the gateways of Agents report, beside what is persisted.
pub struct GatewayCounts {
    /// Calls that limits refused.
    pub refused: RefusedCalls,
    /// Telemetry that was not exported.
    pub dropped: DroppedTelemetry,
}

/// Whether the traces with this id are exported.
pub type SampledTraces = Box<dyn Fn(&[u8]) -> bool + Send + Sync>;

/// Writes the series of the Agents in the cache.
pub struct AgentCollector {
    agents: TakeSnapshot<Agent>,
    gateways: GatewayCounts,
    sampled: SampledTraces,
    level: PerObject,
}

impl AgentCollector {
    /// `agents` takes a snapshot of the Agents at a scrape; `gateways` has what their gateways report; `sampled` says
    /// which traces of turns may be exemplars.
    #[must_use]
    pub fn new(agents: TakeSnapshot<Agent>, gateways: GatewayCounts, sampled: SampledTraces, level: PerObject) -> Self {
        Self {
            agents,
            gateways,
            sampled,
            level,
        }
    }
}

impl SeriesSource for AgentCollector {
    fn write(&self, out: &mut MetricWriter<'_>) {
        let agents = (self.agents)();
        let mut starts = LabelStarts::default();
        agents(&mut |agent| {
            let metadata = &agent.metadata;
            let [namespace, name] =
                [&metadata.namespace, &metadata.name].map(|part| part.as_deref().unwrap_or_default());
            starts.push([(ID_LABELS[0], namespace), (ID_LABELS[1], name)]);
        });
        for (metric, write) in FAMILIES.iter().filter(|(metric, _)| self.level.includes(metric)) {
            let mut family = out.family((*metric).into());
            let mut starts = starts.iter();
            agents(&mut |agent| {
                // The reader is gone.
                if !family.is_open() {
                    return;
                }
                let start = starts.next().unwrap_or_default();
                family.start_with(start);
                let facts = AgentSamples {
                    agent,
                    id: start.values,
                    gateways: &self.gateways,
                    sampled: &self.sampled,
                };
                write(&facts, &mut Samples::new(&mut family, metric, &start.values));
            });
        }
    }
}

/// The first labels of all series of an Agent.
const ID_LABELS: [&str; 2] = ["namespace", "agent"];

/// An Agent, and what is known of it elsewhere.
struct AgentSamples<'a> {
    agent: &'a Agent,
    /// Namespace and name.
    id: [&'a str; 2],
    gateways: &'a GatewayCounts,
    sampled: &'a SampledTraces,
}

impl AgentSamples<'_> {
    fn usage(&self) -> Option<&LoopUsage> {
        self.agent.status.as_ref()?.usage.as_ref()
    }

    fn loop_(&self) -> Option<&LoopStatus> {
        self.agent.status.as_ref()?.r#loop.as_ref()
    }

    fn gates(&self) -> &[Gate] {
        self.agent.status.as_ref().map_or(&[], |status| &status.gates)
    }

    /// Most Agents of other modes never have a task.
    fn has_tasks(&self) -> bool {
        self.agent.spec.mode == AgentMode::Task || self.usage().is_some_and(|usage| !usage.counts.tasks.is_empty())
    }

    fn each_model(&self, visit: impl FnMut(&ModelUsage)) {
        each_model(self.usage(), &self.agent.spec.model.name, visit);
    }

    /// The trace of the newest turn, if it is exported: its id follows from the names of Agent and turn.
    fn newest_turn(&self) -> Option<Exemplar> {
        let state = self.loop_()?;
        let at = state.last_turn_time.as_ref().filter(|_| state.turn > 0)?;
        let turn = TurnName {
            agent: self.agent.metadata.uid.as_deref()?,
            member: 0,
            turn: state.turn,
        };
        let trace_id = turn.trace_id();
        (self.sampled)(&trace_id).then(|| Exemplar {
            trace_id: hex(&trace_id),
            value: 1.0,
            seconds: at.0.as_duration().as_secs_f64(),
        })
    }

    /// A count of the usage; 0 before the first.
    fn count(&self, of: impl FnOnce(&LoopUsage) -> i64) -> f64 {
        number(self.count_of(of))
    }

    fn count_of(&self, of: impl FnOnce(&LoopUsage) -> i64) -> i64 {
        self.usage().map_or(0, of)
    }
}

/// Writes the series of one Agent in one family.
type WriteAgent = fn(&AgentSamples<'_>, &mut Samples<'_, '_, '_>);

/// The families of Agents, in the order of their names.
const FAMILIES: &[(&Metric, WriteAgent)] = &[
    (&registry::AGENT_ACTIONS, |agent, out| {
        put_above_zero(out, &[], agent.count_of(|usage| usage.counts.actions));
    }),
    (&registry::AGENT_CALLS, |agent, out| {
        agent.each_model(|used| out.put(&[&used.model], number(used.calls)));
    }),
    (&registry::AGENT_COST, |agent, out| {
        agent.each_model(|used| out.put(&[&used.model], dollars(used.cost)));
    }),
    (&registry::AGENT_CREATED, |agent, out| {
        let created = agent.agent.metadata.creation_timestamp.as_ref();
        out.put(&[], number(created.map_or(0, |time| time.0.as_second())));
    }),
    (&registry::AGENT_DENIED_TOOL_CALLS, |agent, out| {
        put_above_zero(out, &[], agent.count_of(|usage| usage.counts.denied_tool_calls));
    }),
    (&registry::AGENT_DROPPED_TELEMETRY, |agent, out| {
        let TelemetryDrops { traces, logs } = (agent.gateways.dropped)(agent.id[0], agent.id[1]);
        put_above_zero(out, &["traces"], traces);
        put_above_zero(out, &["logs"], logs);
    }),
    (&registry::AGENT_ESTIMATED_CALLS, |agent, out| {
        agent.each_model(|used| put_above_zero(out, &[&used.model], used.estimated_calls));
    }),
    (&registry::AGENT_FAILED_TURNS, |agent, out| {
        put_above_zero(out, &[], agent.count_of(|usage| usage.counts.failed_turns));
    }),
    (&registry::AGENT_GUARDRAIL_TRIPS, guardrail_trips),
    (&registry::AGENT_INFO, |agent, out| {
        let spec = &agent.agent.spec;
        out.put(&[spec.model.api.name(), &spec.model.name, spec.mode.as_ref()], 1.0);
    }),
    (&registry::AGENT_LAST_TURN, |agent, out| {
        if let Some(at) = agent.loop_().and_then(|state| state.last_turn_time.as_ref()) {
            out.put(&[], number(at.0.as_second()));
        }
    }),
    (&registry::AGENT_LOOP_DETECTED, loop_detected),
    (&registry::AGENT_LOOP_OUTCOME, |agent, out| {
        if let Some(outcome) = agent.loop_().and_then(|state| state.outcome) {
            out.put(&[outcome.as_ref()], 1.0);
        }
    }),
    (&registry::AGENT_LOOP_PAUSED_REASON, |agent, out| {
        let reasons = agent.loop_().map_or(&[][..], |state| &state.reasons);
        // Each once, whatever wrote the list.
        for reason in PauseReason::iter().filter(|reason| reasons.contains(reason)) {
            out.put(&[reason.as_ref()], 1.0);
        }
    }),
    (&registry::AGENT_LOOP_STATE, |agent, out| {
        if let Some(state) = agent.loop_() {
            out.put(&[state.state.as_ref()], 1.0);
        }
    }),
    (&registry::AGENT_GENERATION, |agent, out| {
        out.put(&[], number(agent.agent.metadata.generation.unwrap_or_default()));
    }),
    (&registry::AGENT_OLDEST_APPROVAL, |agent, out| {
        if let Some(oldest) = agent.gates().iter().map(|gate| gate.opened_at.0).min() {
            out.put(&[], number(oldest.as_second()));
        }
    }),
    (&registry::AGENT_PENDING_APPROVALS, |agent, out| {
        let open = i64::try_from(agent.gates().len()).unwrap_or(i64::MAX);
        put_above_zero(out, &[], open);
    }),
    (&registry::AGENT_REASONING_TOKENS, |agent, out| {
        agent.each_model(|used| put_above_zero(out, &[&used.model], used.reasoning_tokens));
    }),
    (&registry::AGENT_REFUSED_CALLS, |agent, out| {
        // Not 0 before the first report of a pod: the total would then look like growth.
        if let Some(refused) = (agent.gateways.refused)(agent.id[0], agent.id[1]) {
            out.put(&[], number(refused));
        }
    }),
    (&registry::AGENT_SUSPENDED, |agent, out| {
        put_above_zero(out, &[], agent.agent.spec.suspend.into());
    }),
    (&registry::AGENT_CONDITION, |agent, out| {
        let status = agent.agent.status.as_ref();
        write_conditions(status.map_or(&[], |status| &status.conditions), out);
    }),
    (&registry::AGENT_OBSERVED_GENERATION, |agent, out| {
        let status = agent.agent.status.as_ref();
        let observed = status.and_then(|status| status.observed_generation);
        out.put(&[], number(observed.unwrap_or_default()));
    }),
    (&registry::AGENT_TASKS, tasks),
    (&registry::AGENT_TOKENS, |agent, out| {
        agent.each_model(|used| {
            for (kind, tokens) in token_types(used) {
                out.put(&[&used.model, kind], number(tokens));
            }
        });
    }),
    (&registry::AGENT_TOOL_SECONDS, |agent, out| {
        for used in agent.usage().iter().flat_map(|usage| &usage.counts.by_tool) {
            // Absent for a tool that was never run, such as one that was only denied.
            if used.timed > 0 {
                out.put(&[&used.tool], number(used.milliseconds) / 1e3);
            }
        }
    }),
    (&registry::AGENT_TOOL_CALLS, |agent, out| {
        out.put(&[], agent.count(|usage| usage.counts.tool_calls));
    }),
    (&registry::AGENT_TOOL_OUTCOMES, |agent, out| {
        for used in agent.usage().iter().flat_map(|usage| &usage.counts.by_tool) {
            for (outcome, count) in tool_outcomes(used) {
                put_above_zero(out, &[&used.tool, outcome], count);
            }
        }
    }),
    (&registry::AGENT_TURNS, |agent, out| {
        let exemplar = agent.newest_turn();
        out.put_with(&[], agent.count(|usage| usage.counts.turns), exemplar.as_ref());
    }),
    (&registry::AGENT_UNKNOWN_CALLS, |agent, out| {
        agent.each_model(|used| put_above_zero(out, &[&used.model], used.unknown_calls));
    }),
    (&registry::AGENT_WAITING_TASKS, |agent, out| {
        if agent.has_tasks() {
            let waiting = agent.loop_().and_then(|state| state.waiting_tasks);
            out.put(&[], number(waiting.unwrap_or_default()));
        }
    }),
];

fn put_above_zero(out: &mut Samples<'_, '_, '_>, more: &[&str], count: i64) {
    if count > 0 {
        out.put(more, number(count));
    }
}

fn guardrail_trips(agent: &AgentSamples<'_>, out: &mut Samples<'_, '_, '_>) {
    let Some(usage) = agent.usage() else { return };
    for (guardrail, action) in GuardrailTrip::all().map(GuardrailTrip::labels) {
        put_above_zero(out, &[guardrail, action], trips(usage, guardrail, action));
    }
}

/// How often this limit led to this action.
pub(super) fn trips(usage: &LoopUsage, guardrail: &str, action: &str) -> i64 {
    let found = usage.counts.guardrail_trips.iter();
    found
        .filter(|trip| (trip.guardrail.as_str(), trip.action.as_str()) == (guardrail, action))
        .map(|trip| trip.count)
        .sum()
}

fn loop_detected(agent: &AgentSamples<'_>, out: &mut Samples<'_, '_, '_>) {
    let conditions = agent.agent.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let held = condition::find(conditions, ConditionType::LoopDetected).filter(|held| held.status == "True");
    let Some(held) = held else { return };
    let is_sign = LoopSign::iter().any(|sign| sign.as_ref() == held.reason)
        || GatewaySign::iter().any(|sign| sign.as_ref() == held.reason);
    if is_sign {
        out.put(&[&held.reason], 1.0);
    }
}

fn tasks(agent: &AgentSamples<'_>, out: &mut Samples<'_, '_, '_>) {
    if agent.has_tasks() {
        for outcome in TaskOutcome::iter() {
            out.put(&[outcome.as_ref()], agent.count(|usage| usage.counts.tasks.of(outcome)));
        }
    }
}

/// The disjoint types of tokens.
fn token_types(used: &ModelUsage) -> [(&'static str, i64); 4] {
    [
        ("input", used.input_tokens),
        ("cache_read", used.cache_read_tokens),
        ("cache_write", used.cache_write_tokens),
        ("output", used.output_tokens),
    ]
}

/// The outcomes of the calls of a tool.
pub(super) fn tool_outcomes(used: &ToolUsage) -> [(&'static str, i64); 5] {
    [
        ("ok", used.ok),
        ("error", used.error),
        ("denied", used.denied),
        ("unavailable", used.unavailable),
        ("unknown", used.unknown),
    ]
}

/// Visits the usage by model, whose sum is exactly the total: with zeros for the model of the spec before its first
/// call, and the rest under [`OTHER_MODELS`] if the list does not contain all models.
fn each_model(usage: Option<&LoopUsage>, spec_model: &str, mut visit: impl FnMut(&ModelUsage)) {
    let models = usage.map_or(&[][..], |usage| &usage.by_model);
    let zero = |model: &str| ModelUsage {
        model: model.into(),
        ..ModelUsage::default()
    };
    let mut rest = usage.map_or_else(|| zero(OTHER_MODELS), LoopUsage::of_other_models);
    for used in models {
        if rest.calls > 0 && used.model == OTHER_MODELS {
            // A model with this name: add the rest, since two series must not have the same labels.
            rest += used;
        } else {
            visit(used);
        }
    }
    if models.iter().all(|used| used.model != spec_model) && (rest.calls == 0 || spec_model != OTHER_MODELS) {
        visit(&zero(spec_model));
    }
    if rest.calls > 0 {
        visit(&rest);
    }
}

#[cfg(test)]
mod tests;
