//! Tests of how much a scrape has of each Agent, with the Agents and namespaces of the bench `scrape`.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../hack/bench/scrape_agents.rs"]
mod scrape_agents;

use std::collections::BTreeMap;
use std::sync::Arc;

use agentloop::api::Agent;
use agentloop::api::condition::ConditionType;
use agentloop::api::pause::PauseReason;
use agentloop::api::status::MAX_MODELS;
use agentloop::api::usage_counts::{GuardrailTrip, MAX_TOOLS};
use agentloop::telemetry::agent_collector::{AgentCollector, GatewayCounts, TelemetryDrops};
use agentloop::telemetry::exposition::ExpositionFormat;
use agentloop::telemetry::families::{ObjectVisitor, PerObject};
use agentloop::telemetry::metrics::Metrics;
use agentloop::telemetry::registry;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use strum::IntoEnumIterator as _;

use crate::support::agents::agent;

fn scrape(count: usize, format: ExpositionFormat) -> String {
    let mut text = Vec::new();
    scrape_agents::metrics(&scrape_agents::agents(count)).write(format, &mut |piece| {
        text.extend(piece);
        true
    });
    String::from_utf8(text).unwrap()
}

#[test]
fn a_scrape_of_a_thousand_agents_is_below_three_megabytes() {
    for format in [ExpositionFormat::Text, ExpositionFormat::OpenMetrics] {
        let many = scrape(1000, format).len();
        // The sums and histograms of the namespaces are there with one Agent in each.
        let few = scrape(scrape_agents::NAMESPACES, format).len();
        let each = (many - few) / (1000 - scrape_agents::NAMESPACES);
        assert!(many < 3_000_000, "{format:?}: {many} bytes, {each} for each Agent");
    }
}

#[test]
fn the_measured_agents_are_healthy_and_their_namespaces_have_all_histograms() {
    let text = scrape(1000, ExpositionFormat::Text);
    let count = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(count("agentloop_agent_"), 1000 * ordinary(1, 2));
    assert_eq!(count("agentloop_agent_calls_total{"), 1000, "one model each");
    assert!(!text.lines().any(|line| line.contains("} -")), "no negative count");
    for (histogram, each) in [
        ("approval_wait", 5),
        ("call_duration", 1),
        ("tool_call_duration", 1),
        ("turn_duration", 1),
    ] {
        let name = format!("agentloop_namespace_{histogram}_seconds_count{{");
        assert_eq!(count(&name), each * scrape_agents::NAMESPACES, "{name}");
    }
}

/// Number of series of an ordinary Agent: healthy, with a Sensor, with this many models and tools, whose runs have all
/// succeeded. As the reference of metrics states it.
const fn ordinary(models: usize, tools: usize) -> usize {
    14 + 6 * models + 2 * tools
}

/// The series of this Agent, by the names of their metrics.
fn series_of(agent: Value, drops: TelemetryDrops) -> BTreeMap<String, usize> {
    let agent: Arc<Agent> = Arc::new(serde_json::from_value(agent).unwrap());
    let take = move || {
        let agent = agent.clone();
        Box::new(move |visit: &mut dyn FnMut(&Agent)| visit(&agent)) as ObjectVisitor<Agent>
    };
    let gateways = GatewayCounts {
        refused: Box::new(|_, _| Some(1)),
        dropped: Box::new(move |_, _| drops),
    };
    let metrics = Metrics::new().unwrap();
    let collector = AgentCollector::new(Box::new(take), gateways, Box::new(|_| false), PerObject::Full);
    metrics.add(Arc::new(collector));
    let mut counts = BTreeMap::new();
    for line in metrics
        .text()
        .lines()
        .filter(|line| line.starts_with("agentloop_agent_"))
    {
        let name = line.split('{').next().unwrap();
        *counts.entry(name.to_owned()).or_default() += 1;
    }
    counts
}

fn condition(kind: &str) -> Value {
    json!({
        "type": kind, "status": "True", "reason": "Because", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z",
    })
}

/// A healthy Agent that has used this many models and tools.
fn healthy(models: usize, tools: usize) -> Value {
    let conditions = ["Ready", "Accepted", "PodReady", "ModelAvailable", "SensorsHealthy"].map(condition);
    let model = |number: usize| {
        let name = if number == 0 {
            "small".to_owned()
        } else {
            format!("model-{number}")
        };
        json!({"model": name, "calls": 12, "inputTokens": 100, "outputTokens": 50})
    };
    let models: Vec<Value> = (0..models).map(model).collect();
    let sum = |field: &str| models.iter().map(|used| used[field].as_i64().unwrap()).sum::<i64>();
    let tool = |number: usize| json!({"tool": format!("tool-{number}"), "ok": 5, "timed": 5, "milliseconds": 12_500});
    let usage = json!({
        "calls": sum("calls"), "inputTokens": sum("inputTokens"), "outputTokens": sum("outputTokens"), "turns": 11,
        "byModel": models, "byTool": (0..tools).map(tool).collect::<Vec<_>>(),
    });
    let status = json!({
        "observedGeneration": 3, "conditions": conditions, "usage": usage,
        "loop": {"state": "Sleeping", "turn": 12, "lastTurnTime": "2026-01-02T03:04:05Z"},
    });
    agent("team-a", "x", &status)
}

/// Number of series of this Agent.
fn count(agent: Value) -> usize {
    series_of(agent, TelemetryDrops::default()).values().sum()
}

#[test]
fn an_ordinary_agent_has_as_many_series_as_the_reference_says_and_no_more_than_thirty() {
    for (models, tools) in [(1, 0), (1, 2), (1, 5), (2, 2), (3, 7)] {
        assert_eq!(
            count(healthy(models, tools)),
            ordinary(models, tools),
            "{models} {tools}"
        );
    }
    assert_eq!((ordinary(1, 5), ordinary(2, 2)), (30, 30));
    let mut task = healthy(1, 2);
    task["spec"]["mode"] = json!("Task");
    assert_eq!(count(task), ordinary(1, 2) + 4);
    let mut failing = healthy(1, 2);
    failing["status"]["usage"]["byTool"][0]["error"] = json!(1);
    failing["status"]["usage"]["byTool"][1]["denied"] = json!(1);
    assert_eq!(count(failing), ordinary(1, 2) + 2);
    let mut denied = healthy(1, 1);
    denied["status"]["usage"]["byTool"][0] = json!({"tool": "tool-0", "denied": 1});
    assert_eq!(
        count(denied),
        ordinary(1, 1) - 1,
        "it was never run, so that it has no time"
    );
    let page = registry::reference();
    assert!(page.contains("14 + 6 \u{d7} models + 2 \u{d7} tools series"), "{page}");
    assert!(
        page.contains("30 with one model and five tools, or with two models and two tools"),
        "{page}"
    );
}

/// An Agent whose status is as full as its bounds allow, and holds what cannot hold at the same time.
fn full() -> Value {
    let used = |model: String| {
        json!({
            "model": model, "calls": 9, "unknownCalls": 9, "estimatedCalls": 9, "inputTokens": 9, "outputTokens": 9,
            "cacheReadTokens": 9, "cacheWriteTokens": 9, "reasoningTokens": 9, "costMicroUSD": 9,
        })
    };
    let tool = |number: usize| {
        json!({
            "tool": format!("tool-{number}"), "ok": 1, "error": 1, "denied": 1, "unavailable": 1, "unknown": 1, "timed": 3,
            "milliseconds": 3,
        })
    };
    let trip = |(guardrail, action): (&str, &str)| json!({"guardrail": guardrail, "action": action, "count": 1});
    // Of more models and tools than the status lists, and of another model than those of the spec.
    let mut usage = used(String::new());
    for total in usage
        .as_object_mut()
        .unwrap()
        .values_mut()
        .filter(|total| total.is_i64())
    {
        *total = json!(1000);
    }
    usage["turns"] = json!(9);
    usage["toolCalls"] = json!(9);
    usage["actions"] = json!(9);
    usage["deniedToolCalls"] = json!(9);
    usage["failedTurns"] = json!(9);
    usage["tasks"] = json!({"completed": 1, "failed": 1, "limitReached": 1});
    usage["byModel"] = (0..2 * MAX_MODELS)
        .map(|number| used(format!("model-{number}")))
        .collect();
    usage["byTool"] = (0..2 * MAX_TOOLS).map(tool).collect();
    usage["guardrailTrips"] = GuardrailTrip::all().map(GuardrailTrip::labels).map(trip).collect();
    let conditions: Vec<Value> = ConditionType::iter()
        .map(|kind| {
            let mut shown = condition(kind.as_ref());
            if kind == ConditionType::LoopDetected {
                shown["reason"] = "Cycle".into();
            }
            shown
        })
        .collect();
    let reasons: Vec<&str> = PauseReason::iter().map(Into::into).collect();
    let status = json!({
        "observedGeneration": 3, "conditions": conditions, "usage": usage,
        "loop": {"state": "Paused", "reasons": reasons, "outcome": "Failed", "turn": 12, "waitingTasks": 1,
            "lastTurnTime": "2026-01-02T03:04:05Z"},
        "gates": [{"id": "a", "kind": "LowConfidence", "tool": "goal", "argumentsHash": "h", "openedAt": "2026-01-02T03:04:05Z"}],
    });
    let mut full = agent("team-a", "x", &status);
    full["spec"]["suspend"] = json!(true);
    full
}

#[test]
fn an_agent_never_has_more_series_than_the_reference_says() {
    let counts = series_of(full(), TelemetryDrops { traces: 1, logs: 1 });
    let agents = registry::ALL
        .iter()
        .filter(|metric| metric.name.starts_with("agentloop_agent_"));
    let missing: Vec<&str> = agents
        .map(|metric| metric.name)
        .filter(|name| !counts.contains_key(*name))
        .collect();
    assert_eq!(missing, [""; 0]);
    // The models of the status, all others, and the one of the spec, which has no calls yet.
    let models = 9 * (MAX_MODELS + 1) + 6;
    let tools = 6 * MAX_TOOLS;
    let closed = ConditionType::iter().count() + PauseReason::iter().count() + GuardrailTrip::all().count();
    // Outcomes of tasks, signals of telemetry, and one series of each of the others.
    let others = 3 + 2 + 18;
    let most = models + tools + closed + others;
    assert_eq!(counts.values().sum::<usize>(), most, "{counts:?}");
    let bound = format!("No Agent has more than {most} series");
    assert!(registry::reference().contains(&bound), "{bound}");
}
