//! Tests of the series of Agents.

use std::sync::Arc;

use super::*;
use crate::api::status::LoopOutcome;
use crate::telemetry::exposition::ExpositionFormat;
use crate::telemetry::families::ObjectVisitor;
use crate::telemetry::metrics::Metrics;

fn by_model(usage: &LoopUsage, spec_model: &str) -> Vec<ModelUsage> {
    let mut models = Vec::new();
    each_model(Some(usage), spec_model, |used| models.push(used.clone()));
    models
}

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

/// The Agent of the bench `scrape` before its numbers are varied: healthy, with one model and two tools.
fn bench_agent(number: usize) -> Agent {
    let mut agent: Agent = serde_json::from_str(include_str!("../../../hack/bench/scrape-agent.json")).unwrap();
    agent.metadata.namespace = Some(format!("team-{}", number % 20));
    agent.metadata.name = Some(format!("research-agent-{number}"));
    agent.metadata.uid = Some(format!("uid-{number}"));
    agent
}

/// The metrics of these Agents.
fn metrics(agents: Vec<Agent>) -> Metrics {
    let metrics = Metrics::new().unwrap();
    let agents = Arc::new(agents);
    let take = move || {
        let snapshot = agents.clone();
        Box::new(move |visit: &mut dyn FnMut(&Agent)| snapshot.iter().for_each(&mut *visit)) as ObjectVisitor<Agent>
    };
    let gateways = GatewayCounts {
        refused: Box::new(|_, _| Some(1)),
        dropped: Box::new(|_, _| TelemetryDrops::default()),
    };
    let collector = AgentCollector::new(Box::new(take), gateways, Box::new(|_| false), PerObject::Full);
    metrics.add(Arc::new(collector));
    metrics
}

fn text_of(metrics: &Metrics, format: ExpositionFormat) -> String {
    let mut text = Vec::new();
    metrics.write(format, &mut |piece| {
        text.extend(piece);
        true
    });
    String::from_utf8(text).unwrap()
}

#[test]
fn all_families_begin_with_the_labels_that_are_written_once() {
    for (metric, _) in FAMILIES {
        assert!(metric.labels.starts_with(&ID_LABELS), "{}", metric.name);
    }
}

#[test]
fn meaningless_zeros_are_absent_and_appear_when_they_count() {
    const ABSENT: [&str; 5] = [
        "actions_total",
        "denied_tool_calls_total",
        "failed_turns_total",
        "pending_approvals",
        "spec_suspended",
    ];
    let series = |text: &str, name: &str| {
        let start = format!("agentloop_agent_{name}{{namespace=\"team-1\",agent=\"research-agent-1\"}} ");
        text.lines()
            .find_map(|line| line.strip_prefix(&start).map(ToOwned::to_owned))
    };
    let text = text_of(&metrics(vec![bench_agent(1)]), ExpositionFormat::Text);
    for name in ABSENT {
        assert_eq!(series(&text, name), None, "{name}");
    }

    let mut busy = bench_agent(1);
    busy.spec.suspend = true;
    let status = busy.status.as_mut().unwrap();
    let usage = status.usage.as_mut().unwrap();
    usage.counts.actions = 1;
    usage.counts.denied_tool_calls = 1;
    usage.counts.failed_turns = 1;
    let gate = serde_json::json!({"id": "budget", "kind": "Escalated", "tool": "goal", "argumentsHash": "aa", "openedAt": "2026-01-02T03:04:05Z"});
    status.gates = vec![serde_json::from_value(gate).unwrap()];
    let text = text_of(&metrics(vec![busy]), ExpositionFormat::Text);
    for name in ABSENT {
        assert_eq!(series(&text, name).as_deref(), Some("1"), "{name}");
    }
}

#[test]
fn the_outcome_of_a_loop_is_there_from_its_end_until_the_agent_is_woken() {
    let outcomes = |outcome: Option<LoopOutcome>| {
        let mut agent = bench_agent(1);
        let state = agent.status.as_mut().unwrap().r#loop.as_mut().unwrap();
        state.outcome = outcome;
        let text = text_of(&metrics(vec![agent]), ExpositionFormat::Text);
        let start = "agentloop_agent_loop_outcome{";
        let lines = text.lines().filter(|line| line.starts_with(start));
        lines.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    for outcome in LoopOutcome::iter() {
        let outcome_name = outcome.as_ref();
        let labels = format!("namespace=\"team-1\",agent=\"research-agent-1\",outcome=\"{outcome_name}\"");
        let series = format!("agentloop_agent_loop_outcome{{{labels}}} 1");
        assert_eq!(outcomes(Some(outcome)), [series]);
        let help = registry::AGENT_LOOP_OUTCOME.help;
        assert!(help.contains(outcome_name), "{outcome_name} is not in the reference");
    }
    assert_eq!(outcomes(None), [""; 0], "it runs, for the first time or again");
}
