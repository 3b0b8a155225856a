//! A budget with `onExhausted: Stop` that an Agent with large calls shares with one that sleeps: what `simulate` says about
//! the last quarter of its limit is what happens in a real run.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::process::{LocalHarness, agent, script};
use super::simulate_settings::{history, let_through, simulated, sum};

/// Input of the large calls and of the small ones, and the output of each.
const LARGE: i64 = 20_000;
const SMALL: i64 = 1_500;
const OUTPUT: i64 = 100;
/// What is used when the third large call has no room, and the largest limit of which a quarter is left then.
const USED: i64 = 2 * (LARGE + OUTPUT) + SMALL + OUTPUT;
const LIMIT: i64 = USED * 4 / 3;
/// Longer than a gateway keeps the leases of an Agent that sleeps, and longer than a leader waits until it knows the Agents.
const ASLEEP: i64 = 45;
/// The gateway keeps its lease.
const NAP: i64 = 20;

/// The budgets: the limit, whether the second Agent naps instead of sleeping, and the calls of both Agents.
fn budgets() -> [(&'static str, i64, &'static str, [u64; 2]); 3] {
    [
        // Less than the large call needs, and the other one sleeps: nobody continues.
        ("quarter", LIMIT, "sleeps", [2, 1]),
        // More than a quarter: the small calls count, although their Agent sleeps.
        ("more", LIMIT + 1, "sleeps", [2, 2]),
        // It is awake.
        ("awake", LIMIT, "naps", [2, 3]),
    ]
}

fn turns(kind: &str) -> Value {
    let usage = |input: i64| json!({"inputTokens": input, "outputTokens": OUTPUT});
    let sleeps = |seconds: i64| json!({"yield": {"sleep": seconds}, "usage": usage(SMALL)});
    let end = |input: i64| json!({"yield": {"mode": "shutdown"}, "usage": usage(input)});
    let large = |n: u32| json!({"toolCalls": [{"name": "missing", "arguments": {"n": n}}], "usage": usage(LARGE)});
    match kind {
        "large" => json!([large(1), large(2), large(3), end(LARGE)]),
        "sleeps" => json!([sleeps(ASLEEP), end(SMALL)]),
        _ => json!([sleeps(NAP), sleeps(NAP), end(SMALL)]),
    }
}

fn member(kind: &str, name: &str, budget: Option<&str>) -> Value {
    // The bound of a call is more than it uses.
    let words = if kind == "large" { 2_100 } else { 200 };
    let mut spec = json!({
        "instructions": "Be brief. ".repeat(words),
        "model": {
            "api": "Scripted", "name": "scripted", "maxOutputTokens": 200,
            "price": {"inputPerMillion": "2.00", "outputPerMillion": "10.00"},
            "scripted": {"configMapKeyRef": {"name": kind, "key": "turns"}},
        },
    });
    if let Some(budget) = budget {
        spec["budgetRefs"] = json!([{"name": budget}]);
    }
    agent(name, &spec)
}

fn set(limit: i64) -> Vec<String> {
    vec![format!("limits.tokens={limit}"), "onExhausted=Stop".into()]
}

#[tokio::test]
async fn a_budget_stops_at_the_call_that_its_simulation_names_when_an_agent_sleeps() {
    let mut harness = LocalHarness::new();
    let mut objects = Vec::new();
    for kind in ["large", "sleeps", "naps"] {
        objects.push(script(kind, &turns(kind)));
        objects.push(member(kind, kind, None));
    }
    for (budget, limit, other, _) in budgets() {
        objects.push(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": budget},
            "spec": {"limits": {"tokens": limit}, "window": {"lifetime": {}}, "onExhausted": "Stop"},
        }));
        objects.push(member("large", &format!("{budget}-large"), Some(budget)));
        objects.push(member(other, &format!("{budget}-{other}"), Some(budget)));
    }
    harness.write("all.yaml", &objects);
    let mut run = harness.run(&[]);
    // The last of each budget to come to its end.
    for (name, state) in [("quarter-large", "Stopped"), ("quarter-sleeps", "Stopped")] {
        run.until(name, state, |line| line["state"] == state && line["outcome"].is_null())
            .await;
    }
    for name in ["large", "sleeps", "naps", "more-sleeps", "awake-naps"] {
        run.until(name, "at its end", |line| line["outcome"].is_string()).await;
    }
    // Long after its sleep would have ended.
    let line = run.agent("quarter-sleeps");
    assert_eq!(
        (&line["state"], &line["outcome"]),
        (&json!("Stopped"), &Value::Null),
        "{line}"
    );
    run.interrupt().await;
    run.ended().await;

    for (budget, limit, other, calls) in budgets() {
        let members = ["large", other];
        let really = members.map(|kind| sum(&history(&harness, &format!("{budget}-{kind}")), None));
        assert_eq!(really.map(|sum| sum.calls), calls, "{budget}");
        let histories = members.map(|kind| (kind.to_owned(), history(&harness, kind)));
        let report = simulated(&set(limit), &histories);
        let through = let_through(&report);
        let tokens: i64 = really.iter().map(|sum| sum.tokens).sum();
        assert_eq!(
            (through.calls, through.tokens),
            (calls.iter().sum(), tokens),
            "{budget}: {report:?}"
        );
        let stopped: Vec<&str> = report.stops.iter().map(|stop| stop.agent.as_str()).collect();
        let expected = if budget == "quarter" {
            &members[..]
        } else {
            &members[..1]
        };
        assert_eq!(stopped, expected, "{budget}: {report:?}");
    }
}
