//! Healthy Agents, and the metrics of a controller with them: for the bench `scrape`, and for the test of its size.

#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

use std::sync::Arc;

use agentloop::api::status::ModelUsage;
use agentloop::api::{Agent, NamespacedName};
use agentloop::controller::durations::totals::{AgentLabels, DurationGrowth, DurationTotals};
use agentloop::link::durations::{
    APPROVAL_BOUNDS, ApprovalDecision, ApprovalWaits, CALL_BOUNDS, DurationCounts, TURN_BOUNDS,
};
use agentloop::telemetry::agent_collector::{AgentCollector, GatewayCounts, TelemetryDrops};
use agentloop::telemetry::families::{ObjectVisitor, PerObject};
use agentloop::telemetry::metrics::Metrics;
use agentloop::telemetry::namespace_totals::NamespaceTotals;
use jiff::Timestamp;
use serde_json::Value;
use strum::IntoEnumIterator as _;

/// Number of namespaces that the Agents are in.
pub const NAMESPACES: usize = 20;

/// Healthy Agents, each with one model and two tools that it has used.
pub fn agents(count: usize) -> Vec<Arc<Agent>> {
    (0..count).map(|number| Arc::new(agent(number))).collect()
}

fn agent(number: usize) -> Agent {
    let mut agent: Value = serde_json::from_str(include_str!("scrape-agent.json")).expect("JSON");
    let mut digits = Digits::of(number);
    digits.vary(&mut agent["status"]["usage"]);
    let mut agent: Agent = serde_json::from_value(agent).expect("an Agent");
    derive_totals(&mut agent);
    agent.metadata.namespace = Some(format!("team-{}", number % NAMESPACES));
    agent.metadata.name = Some(format!("research-agent-{number}"));
    agent.metadata.uid = Some(format!("uid-{number}"));
    agent
}

/// Makes the totals the sums of what was used by model and by tool. Otherwise the Agent would have used another model, and
/// maybe less than nothing of it.
fn derive_totals(agent: &mut Agent) {
    let status = agent.status.as_mut().expect("a status");
    let usage = status.usage.as_mut().expect("usage");
    let mut sum = ModelUsage::default();
    for used in &usage.by_model {
        sum += used;
    }
    usage.calls = sum.calls;
    usage.input_tokens = sum.input_tokens;
    usage.output_tokens = sum.output_tokens;
    usage.cache_read_tokens = sum.cache_read_tokens;
    usage.cache_write_tokens = sum.cache_write_tokens;
    usage.cost = sum.cost;
    for used in &mut usage.counts.by_tool {
        used.timed = used.ok;
    }
    usage.counts.tool_calls = usage.counts.by_tool.iter().map(|used| used.ok).sum();
}

/// The metrics that grow with Agents and namespaces, as a leader has them. In each namespace something of each duration was
/// measured.
pub fn metrics(agents: &[Arc<Agent>]) -> Metrics {
    let metrics = Metrics::new().expect("the registry has no conflicts");
    let totals = NamespaceTotals::default();
    for agent in agents {
        totals.agent_seen(agent);
    }
    metrics.add(Arc::new(totals));
    metrics.add(Arc::new(durations(agents)));
    let agents = agents.to_vec();
    let take = move || {
        let snapshot = agents.clone();
        Box::new(move |visit: &mut dyn FnMut(&Agent)| snapshot.iter().for_each(|agent| visit(agent)))
            as ObjectVisitor<Agent>
    };
    let gateways = GatewayCounts {
        refused: Box::new(|_, _| Some(1)),
        dropped: Box::new(|_, _| TelemetryDrops::default()),
    };
    let sampled = Box::new(|_: &[u8]| false);
    let collector = AgentCollector::new(Box::new(take), gateways, sampled, PerObject::Full);
    metrics.add(Arc::new(collector));
    metrics
}

/// The histograms of the namespaces of these Agents, with values in each bucket.
fn durations(agents: &[Arc<Agent>]) -> DurationTotals {
    let spec = &agents.first().expect("an Agent").spec;
    let (model, mode): (String, &str) = (spec.model.name.clone(), spec.mode.as_ref());
    let labels = AgentLabels {
        mode: mode.to_owned(),
        models: vec![model.clone()],
    };
    let totals = DurationTotals::new(Box::new(move |_| Some(labels.clone())), Box::new(|_| false));
    for (number, agent) in agents.iter().take(NAMESPACES).enumerate() {
        let mut digits = Digits::of(number);
        let mut approvals = ApprovalWaits::default();
        for decision in ApprovalDecision::iter() {
            *approvals.of_mut(decision) = digits.counts(APPROVAL_BOUNDS);
        }
        let growth = DurationGrowth {
            calls: vec![(model.clone(), digits.counts(CALL_BOUNDS))],
            turns: digits.counts(TURN_BOUNDS),
            tool_runs: digits.counts(CALL_BOUNDS),
            approvals,
            first_gate: true,
        };
        let uid = agent.metadata.uid.as_deref().expect("a uid");
        totals.add((&NamespacedName::of(&**agent), uid), &growth, Timestamp::UNIX_EPOCH);
    }
    totals
}

/// Digits that differ: texts of Agents that are alike could be compressed too well.
struct Digits {
    state: u64,
}

impl Digits {
    /// The same ones for the same number.
    fn of(number: usize) -> Self {
        let state = u64::try_from(number).expect("small") + 1;
        Self { state }
    }

    /// Another number with as many digits.
    fn like(&mut self, number: u64) -> u64 {
        let floor = 10_u64.pow(number.ilog10());
        self.state = self
            .state
            .wrapping_mul(0x5851_F42D_4C95_7F2D)
            .wrapping_add(0x1405_7B7E_F767_814F);
        floor + (self.state >> 33) % (9 * floor)
    }

    /// Gives each number other digits.
    fn vary(&mut self, value: &mut Value) {
        match value {
            Value::Number(number) => *number = self.like(number.as_u64().expect("a count")).into(),
            Value::Array(values) => values.iter_mut().for_each(|value| self.vary(value)),
            Value::Object(fields) => fields.values_mut().for_each(|value| self.vary(value)),
            Value::Null | Value::Bool(_) | Value::String(_) => {}
        }
    }

    /// Some thousand durations in each of these buckets and above them.
    fn counts(&mut self, bounds: &[u64]) -> DurationCounts {
        DurationCounts {
            buckets: (0..=bounds.len()).map(|_| self.like(1_000)).collect(),
            sum_microseconds: self.like(1_000_000_000),
            last: None,
        }
    }
}
