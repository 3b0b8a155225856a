//! How often a budget is written: under load once in fifteen seconds, at rest never. The writes are counted at the API server.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::agents::{Agent, openai, status_used};
use super::budgets::{BUDGETS, manifest};
use super::cluster::{Namespace, figure, shared};
use super::model_server;
use crate::support::kubectl::{Kubectl, Watch};

const COUNT: usize = 5;
/// Seconds between two writes for which no call waits.
const STEP: u64 = 15;
/// Steps of the load that are watched, from one write on.
const STEPS: usize = 3;

#[test]
fn a_budget_under_load_is_written_once_in_fifteen_seconds_and_at_rest_never() {
    let (Some(cluster), Some(server)) = (shared(), model_server::counting()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "budget-writes");
    let kubectl = &namespace.kubectl;
    let label = kubectl.namespace();
    let window = json!({"rolling": {"seconds": 3600}});
    let spec = json!({"selector": {}, "limits": {"tokens": 1_000_000_000}, "perAgent": {"tokens": 500_000_000}, "window": window});
    kubectl.apply(&manifest("roomy", &spec));
    // A gateway holds room for 32 calls at least when the budget is written: with more than two a second, calls of a fast
    // machine would have to wait for more, and that is a write each.
    let busy = json!({
        "guardrails": {"maxConsecutiveTurns": 10_000, "loopDetection": {"mode": "Disabled"}},
        "loop": {"minDelayMilliseconds": 600},
    });
    let agents: Vec<_> = (0..COUNT)
        .map(|number| {
            let model = openai(&server.base_url(&format!("{label}.{number}")));
            Agent::apply(&namespace, &format!("busy-{number}"), &model, &busy)
        })
        .collect();
    // The first call of each waits for its lease, and that is a write.
    let calls = |number: usize| server.ends(&format!("{label}.{number}")).len();
    for number in 0..COUNT {
        let label = format!("{label}.{number}");
        server.until("a loop that goes on", &label, 180, |lines| {
            (lines.len() > 20).then_some(())
        });
    }
    let before: usize = (0..COUNT).map(calls).sum();
    let under_load = writes(kubectl, STEPS + 1, 4 * STEP * STEPS as u64);
    let made = (0..COUNT).map(calls).sum::<usize>() - before;
    assert!(made > COUNT * 10, "no load: {made} calls");
    let versions: Vec<_> = under_load.iter().map(|(_, version)| said(version)).collect();
    assert_eq!(versions.len(), STEPS + 1, "too few writes: {versions:#?}");
    let took = under_load[STEPS].0.duration_since(under_load[0].0);
    figure(
        "budget_writes_under_load",
        STEPS,
        &format!("writes in {} s, {made} calls of {COUNT} gateways", took.as_secs()),
    );
    // They take a step each. One less is asked for, since the write from which on they count may be heard of late.
    let least = Duration::from_secs(STEP * (STEPS as u64 - 1));
    assert!(took >= least, "{STEPS} writes in {took:?}: {versions:#?}");

    for agent in &agents {
        agent.suspend(true);
    }
    kubectl.until("nothing reserved", 120, BUDGETS, "roomy", |budget| {
        let tokens = &budget["status"]["reserved"]["tokens"];
        (tokens.as_i64().unwrap_or(0) == 0).then_some(())
    });
    // What was said last is written at most one step later.
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let rest = writes(kubectl, usize::MAX, STEP + 6);
        figure(
            "budget_writes_at_rest",
            rest.len(),
            &format!("writes in {} s", STEP + 6),
        );
        if rest.is_empty() {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "written at rest: {:#?}",
            rest.iter().map(|(_, version)| said(version)).collect::<Vec<_>>()
        );
    }
    adds_up(&kubectl.get(BUDGETS, "roomy").expect("the budget exists"), &agents);
}

/// The next versions of the budget that the API server makes known within `seconds` seconds, at most `most`, and when.
fn writes(kubectl: &Kubectl, most: usize, seconds: u64) -> Vec<(Instant, Value)> {
    let watch = kubectl.watch(BUDGETS, &["--field-selector", "metadata.name=roomy"]);
    let first = next(&watch, Instant::now() + Duration::from_secs(30)).expect("the watch stands");
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut versions = Vec::new();
    while versions.len() < most
        && let Some(version) = next(&watch, deadline)
    {
        if version["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"] {
            versions.push((Instant::now(), version));
        }
    }
    versions
}

fn next(watch: &Watch, deadline: Instant) -> Option<Value> {
    watch.next(deadline).map(|event| event.object)
}

/// What helps to understand a write that is one too many.
fn said(version: &Value) -> Value {
    let status = &version["status"];
    let holders = status["ledger"]["holders"].as_array().into_iter().flatten();
    let holders: Vec<_> = holders
        .map(|holder| json!([holder["name"], holder["amount"]["tokens"], holder["spent"]["tokens"]]))
        .collect();
    json!({"watermark": status["ledger"]["watermark"], "holders": holders, "used": status["used"]["tokens"]})
}

/// What all used is what each used, and that is what each Agent says of itself. An answer that was cut counts as
/// reserved here, and there as a call of which the tokens are not known.
pub fn adds_up(budget: &Value, agents: &[Agent<'_>]) {
    let status = &budget["status"];
    let shares: Vec<_> = status["topAgents"].as_array().into_iter().flatten().collect();
    let tokens = |value: &Value| value["tokens"].as_i64().unwrap_or(0);
    let sum: i64 = shares.iter().map(|share| tokens(share)).sum();
    assert_eq!(tokens(&status["used"]), sum, "{status:#}");
    let mut calls = 0;
    for agent in agents {
        let object = agent.object();
        let used = status_used(&object);
        let share = shares.iter().find(|share| share["name"] == agent.name.as_str());
        let share = share.map_or(0, |share| tokens(share));
        let counted = used.input + used.output;
        let cut = used.unknown_calls > 0;
        assert!(
            share == counted || cut && share > counted,
            "{}: {share} here, {used:?} there",
            agent.name
        );
        calls += used.calls;
    }
    assert_eq!(status["used"]["calls"].as_i64(), Some(calls), "{status:#}");
}
