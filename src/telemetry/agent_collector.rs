//! Metrics of Agents, read from the controller's cache at each scrape.
//!
//! Holds no state: a deleted Agent leaves no series behind, and the counters equal the totals in its status.

use kube::ResourceExt;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use strum::IntoEnumIterator;

use super::families::{MetricFamilies, bit, number};
use super::registry::{self, Metric, MetricSource};
use crate::api::Agent;
use crate::api::agent::AgentMode;
use crate::api::condition::{self, ConditionType, GatewaySign, LoopSign};
use crate::api::status::{LoopState, LoopUsage, ModelUsage, PauseReason};
use crate::api::task::TaskOutcome;
use crate::api::usage_counts::{GuardrailTrip, OTHER_TOOLS, ToolUsage};

/// `model` label of usage that is in no entry of `status.usage.byModel`.
const OTHER_MODELS: &str = "other";

/// Calls its argument with each Agent in the cache.
type ForEachAgent = Box<dyn Fn(&mut dyn FnMut(&Agent)) + Send + Sync>;

/// Number of calls that limits refused to the Agent of this namespace and name, as last reported by its gateway.
type RefusedCalls = Box<dyn Fn(&str, &str) -> Option<i64> + Send + Sync>;

/// Collects the Agents in the cache at each scrape.
pub struct AgentCollector {
    for_each: ForEachAgent,
    refused: RefusedCalls,
    descriptions: Vec<Desc>,
}

impl AgentCollector {
    /// `for_each` visits the Agents at the time of a scrape; `refused` returns the number of calls that limits refused
    /// to one.
    pub fn new(
        for_each: impl Fn(&mut dyn FnMut(&Agent)) + Send + Sync + 'static,
        refused: impl Fn(&str, &str) -> Option<i64> + Send + Sync + 'static,
    ) -> prometheus::Result<Self> {
        let metrics = registry::ALL
            .iter()
            .filter(|metric| metric.source == MetricSource::Agents);
        Ok(Self {
            for_each: Box::new(for_each),
            refused: Box::new(refused),
            descriptions: metrics.map(Metric::desc).collect::<Result<_, _>>()?,
        })
    }
}

impl Collector for AgentCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = MetricFamilies::default();
        (self.for_each)(&mut |agent| agent_series(&mut families, agent, &self.refused));
        families.into_all()
    }
}

fn agent_series(families: &mut MetricFamilies, agent: &Agent, refused: &RefusedCalls) {
    let namespace = agent.namespace().unwrap_or_default();
    let name = agent.name_any();
    let id = [namespace.as_str(), name.as_str()];
    let api = agent.spec.model.api.name();
    let model = agent.spec.model.name.as_str();
    families.put(&registry::AGENT_INFO, &[id[0], id[1], api, model], 1.0);
    let created = agent.metadata.creation_timestamp.as_ref();
    families.put(
        &registry::AGENT_CREATED,
        &id,
        number(created.map_or(0, |time| time.0.as_second())),
    );
    families.put(&registry::AGENT_SUSPENDED, &id, bit(agent.spec.suspend));
    families.put(
        &registry::AGENT_GENERATION,
        &id,
        number(agent.metadata.generation.unwrap_or_default()),
    );
    let observed = agent.status.as_ref().and_then(|status| status.observed_generation);
    families.put(
        &registry::AGENT_OBSERVED_GENERATION,
        &id,
        number(observed.unwrap_or_default()),
    );
    loop_series(families, agent, id);
    detection_series(families, agent, id);
    condition_series(families, agent, id);
    let unused = LoopUsage::default();
    let usage = agent
        .status
        .as_ref()
        .and_then(|status| status.usage.as_ref())
        .unwrap_or(&unused);
    let refused = refused(id[0], id[1]).unwrap_or_default();
    families.put(&registry::AGENT_REFUSED_CALLS, &id, number(refused));
    families.put(&registry::AGENT_TURNS, &id, number(usage.counts.turns));
    families.put(&registry::AGENT_TOOL_CALLS, &id, number(usage.counts.tool_calls));
    families.put(&registry::AGENT_ACTIONS, &id, number(usage.counts.actions));
    families.put(
        &registry::AGENT_DENIED_TOOL_CALLS,
        &id,
        number(usage.counts.denied_tool_calls),
    );
    // Most Agents of other modes never have a task.
    if agent.spec.mode == AgentMode::Task || !usage.counts.tasks.is_empty() {
        for outcome in TaskOutcome::iter() {
            let labels = [id[0], id[1], outcome.as_ref()];
            families.put(&registry::AGENT_TASKS, &labels, number(usage.counts.tasks.of(outcome)));
        }
        let waiting = agent
            .status
            .as_ref()
            .and_then(|status| status.r#loop.as_ref()?.waiting_tasks);
        families.put(&registry::AGENT_WAITING_TASKS, &id, number(waiting.unwrap_or_default()));
    }
    for (guardrail, action) in GuardrailTrip::all().map(GuardrailTrip::labels) {
        let found = usage.counts.guardrail_trips.iter();
        let count = found
            .filter(|trip| (trip.guardrail.as_str(), trip.action.as_str()) == (guardrail, action))
            .map(|trip| trip.count)
            .sum();
        let labels = [id[0], id[1], guardrail, action];
        families.put(&registry::AGENT_GUARDRAIL_TRIPS, &labels, number(count));
    }
    tool_series(families, usage, id);
    for used in by_model(usage, model) {
        usage_series(families, &used, id);
    }
}

fn loop_series(families: &mut MetricFamilies, agent: &Agent, [namespace, name]: [&str; 2]) {
    let status = agent.status.as_ref().and_then(|status| status.r#loop.as_ref());
    for state in LoopState::iter() {
        let holds = status.is_some_and(|status| status.state == state);
        families.put(
            &registry::AGENT_LOOP_STATE,
            &[namespace, name, state.as_ref()],
            bit(holds),
        );
    }
    for reason in PauseReason::iter() {
        let holds = status.is_some_and(|status| status.reasons.contains(&reason));
        families.put(
            &registry::AGENT_LOOP_PAUSED_REASON,
            &[namespace, name, reason.as_ref()],
            bit(holds),
        );
    }
}

fn detection_series(families: &mut MetricFamilies, agent: &Agent, [namespace, name]: [&str; 2]) {
    let conditions = agent.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let held = condition::find(conditions, ConditionType::LoopDetected).filter(|held| held.status == "True");
    let mut put = |sign: &str| {
        let seen = held.is_some_and(|held| held.reason == sign);
        families.put(&registry::AGENT_LOOP_DETECTED, &[namespace, name, sign], bit(seen));
    };
    LoopSign::iter().for_each(|sign| put(sign.as_ref()));
    GatewaySign::iter().for_each(|sign| put(sign.as_ref()));
}

fn condition_series(families: &mut MetricFamilies, agent: &Agent, [namespace, name]: [&str; 2]) {
    for condition in agent.status.iter().flat_map(|status| &status.conditions) {
        // Conditions of other writers would make the label unbounded.
        if condition.type_.parse::<ConditionType>().is_err() {
            continue;
        }
        for (label, status) in [("true", "True"), ("false", "False"), ("unknown", "Unknown")] {
            let labels = [namespace, name, condition.type_.as_str(), label];
            families.put(&registry::AGENT_CONDITION, &labels, bit(condition.status == status));
        }
    }
}

fn usage_series(families: &mut MetricFamilies, used: &ModelUsage, [namespace, name]: [&str; 2]) {
    let model = used.model.as_str();
    for (kind, tokens) in [
        ("input", used.input_tokens),
        ("cache_read", used.cache_read_tokens),
        ("cache_write", used.cache_write_tokens),
        ("output", used.output_tokens),
    ] {
        families.put(&registry::AGENT_TOKENS, &[namespace, name, model, kind], number(tokens));
    }
    let id = [namespace, name, model];
    families.put(&registry::AGENT_REASONING_TOKENS, &id, number(used.reasoning_tokens));
    families.put(&registry::AGENT_CALLS, &id, number(used.calls));
    families.put(&registry::AGENT_UNKNOWN_CALLS, &id, number(used.unknown_calls));
    families.put(&registry::AGENT_ESTIMATED_CALLS, &id, number(used.estimated_calls));
    families.put(&registry::AGENT_COST, &id, number(used.cost) / 1e6);
}

fn tool_series(families: &mut MetricFamilies, usage: &LoopUsage, [namespace, name]: [&str; 2]) {
    let rest = ToolUsage {
        tool: OTHER_TOOLS.into(),
        ..ToolUsage::default()
    };
    let has_rest = usage.counts.by_tool.iter().any(|used| used.tool == OTHER_TOOLS);
    for used in usage.counts.by_tool.iter().chain((!has_rest).then_some(&rest)) {
        for (outcome, count) in [
            ("ok", used.ok),
            ("error", used.error),
            ("denied", used.denied),
            ("unavailable", used.unavailable),
            ("unknown", used.unknown),
        ] {
            let labels = [namespace, name, &used.tool, outcome];
            families.put(&registry::AGENT_TOOL_OUTCOMES, &labels, number(count));
        }
        let count = u64::try_from(used.timed).unwrap_or_default();
        let time = (number(used.milliseconds) / 1e3, count);
        families.put_summary(&registry::AGENT_TOOL_SECONDS, &[namespace, name, &used.tool], time);
    }
}

/// Usage by model, whose sum is exactly the total: with zeros for the model of the spec before its first call, and the
/// rest under [`OTHER_MODELS`] if the list does not contain all models.
fn by_model(usage: &LoopUsage, spec_model: &str) -> Vec<ModelUsage> {
    let mut models = usage.by_model.clone();
    if models.iter().all(|used| used.model != spec_model) {
        models.push(ModelUsage {
            model: spec_model.into(),
            ..ModelUsage::default()
        });
    }
    let sum = |field: fn(&ModelUsage) -> i64| models.iter().map(field).sum::<i64>();
    let rest = ModelUsage {
        model: OTHER_MODELS.into(),
        calls: usage.calls - sum(|used| used.calls),
        unknown_calls: usage.unknown_calls - sum(|used| used.unknown_calls),
        estimated_calls: usage.estimated_calls - sum(|used| used.estimated_calls),
        input_tokens: usage.input_tokens - sum(|used| used.input_tokens),
        output_tokens: usage.output_tokens - sum(|used| used.output_tokens),
        cache_read_tokens: usage.cache_read_tokens - sum(|used| used.cache_read_tokens),
        cache_write_tokens: usage.cache_write_tokens - sum(|used| used.cache_write_tokens),
        reasoning_tokens: usage.reasoning_tokens - sum(|used| used.reasoning_tokens),
        cost: usage.cost - sum(|used| used.cost),
    };
    if rest.calls > 0 {
        match models.iter_mut().find(|used| used.model == OTHER_MODELS) {
            // A model with this name: add the rest, since two series must not have the same labels.
            Some(named) => *named += &rest,
            None => models.push(rest),
        }
    }
    models
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(model: &str, calls: i64, input_tokens: i64) -> ModelUsage {
        ModelUsage {
            model: model.into(),
            calls,
            input_tokens,
            ..ModelUsage::default()
        }
    }

    #[test]
    fn the_model_of_the_spec_is_there_with_zeros_before_its_first_call() {
        assert_eq!(by_model(&LoopUsage::default(), "m"), [used("m", 0, 0)]);
    }

    #[test]
    fn what_is_in_no_entry_is_counted_as_other_so_that_the_sum_is_the_total() {
        let usage = LoopUsage {
            calls: 7,
            input_tokens: 70,
            by_model: vec![used("m", 4, 40)],
            ..LoopUsage::default()
        };
        assert_eq!(by_model(&usage, "m"), [used("m", 4, 40), used("other", 3, 30)]);
    }

    #[test]
    fn a_model_called_other_keeps_one_series() {
        let usage = LoopUsage {
            calls: 7,
            input_tokens: 70,
            by_model: vec![used("other", 4, 40)],
            ..LoopUsage::default()
        };
        assert_eq!(by_model(&usage, "other"), [used("other", 7, 70)]);
    }
}
