//! An exhausted budget stops a running loop before the call that would exceed it, reports this, and releases the loop by its
//! own rule.

use std::time::Instant;

use serde_json::{Value, json};

use super::agents::{Agent, STARTUP, computed, condition, openai, script, scripted, status_used};
use super::cluster::{Namespace, figure, shared};
use super::model_server;
use crate::support::kubectl::Kubectl;

/// The resource by its full name.
pub const BUDGETS: &str = "agentbudgets.agentloop.dev";

/// A manifest of an AgentBudget.
pub fn manifest(name: &str, spec: &Value) -> String {
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": name}, "spec": spec})
        .to_string()
}

/// Watches a budget until its condition has this status; the whole object.
pub fn until_budget(kubectl: &Kubectl, name: &str, type_: &str, status: &str, seconds: u64) -> Value {
    kubectl.until(&format!("budget {type_}={status}"), seconds, BUDGETS, name, |budget| {
        (condition(budget, type_)?["status"] == status).then(|| budget.clone())
    })
}

/// An Agent that makes a call of 1,000 tokens about once a second.
fn thousand<'a>(namespace: &'a Namespace, name: &str) -> Agent<'a> {
    let turn = json!({"text": "One more.", "usage": {"inputTokens": 900, "outputTokens": 100}, "yield": {"sleep": 1}});
    namespace.kubectl.apply(&script("plan", &json!({"turns": [turn]})));
    let mut model = scripted("plan");
    model["maxOutputTokens"] = json!(200);
    Agent::apply(namespace, name, &model, &json!({}))
}

fn used(budget: &Value, kind: &str) -> i64 {
    budget["status"]["used"][kind].as_i64().unwrap_or(0)
}

#[test]
fn an_exhausted_budget_pauses_before_the_call_and_a_top_up_resumes_it_within_seconds() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "budget");
    let kubectl = &namespace.kubectl;
    let spec = json!({"selector": {}, "limits": {"tokens": 5500}, "window": {"rolling": {"seconds": 3600}}});
    kubectl.apply(&manifest("team", &spec));
    let agent = thousand(&namespace, "spender");

    let held = agent.until_condition("BudgetExhausted", "True", "BudgetExhausted", 120);
    let paused = agent.until_state("Paused", 30);
    assert_eq!(paused["status"]["loop"]["reasons"], json!(["BudgetExhausted"]));
    assert!(
        paused["status"]["loop"]["resumesAt"].is_string(),
        "a rolling window says when"
    );
    assert_eq!(
        condition(&paused, "Ready").expect("Ready")["status"],
        "True",
        "it needs no one"
    );
    let message = held["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("team") && message.contains("topUps"),
        "whose limit, and how to add: {message}"
    );
    let budget = until_budget(kubectl, "team", "Exhausted", "True", 30);
    let budget_used = used(&budget, "tokens");
    assert_eq!(
        budget_used, 5000,
        "five calls fit, the sixth would cross: {:#}",
        budget["status"]
    );
    assert_eq!(status_used(&agent.object()).calls, 5);
    assert_eq!(condition(&budget, "NearLimit").expect("NearLimit")["status"], "True");
    agent.until_event("Warning", "BudgetExhausted", 30);
    let described = kubectl.ok(&["describe", BUDGETS, "team"]);
    for word in ["spender", "5000", "topUps"] {
        assert!(
            described.contains(word),
            "kubectl describe does not say {word}: {described}"
        );
    }
    let described = kubectl.ok(&["describe", super::cluster::AGENTS, "spender"]);
    for word in ["BudgetExhausted", "team", "topUps", "Resumes At"] {
        assert!(
            described.contains(word),
            "kubectl describe does not say {word}: {described}"
        );
    }

    let added = Instant::now();
    let top_up = json!({"spec": {"topUps": [{"id": "more", "tokens": 2000, "reason": "a test"}]}});
    kubectl.patch(BUDGETS, "team", &top_up);
    agent.until("a call after the top-up", 30, |agent| {
        (status_used(agent).calls > 5).then_some(())
    });
    figure(
        "budget_top_up_to_next_call",
        format!("{:.1}", added.elapsed().as_secs_f64()),
        "s",
    );
    // Applied again it is the same top-up.
    kubectl.patch(BUDGETS, "team", &json!({"metadata": {"annotations": {"touched": "1"}}}));
    agent.until("the seventh call", 30, |agent| {
        (status_used(agent).calls == 7).then_some(())
    });
    agent.until_condition("BudgetExhausted", "True", "BudgetExhausted", 30);
    let budget = kubectl.until("all that fits is used", 30, BUDGETS, "team", |budget| {
        (used(budget, "tokens") == 7000).then(|| budget.clone())
    });
    assert_eq!(budget["status"]["limits"]["tokens"], 7500, "the top-up counted once");
}

#[test]
fn a_rolling_window_frees_room_without_user_action() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "rolling");
    let kubectl = &namespace.kubectl;
    let spec = json!({"selector": {}, "limits": {"calls": 3}, "window": {"rolling": {"seconds": 60}}});
    kubectl.apply(&manifest("short", &spec));
    let agent = thousand(&namespace, "patient");
    let before = agent.until("BudgetExhausted=True", STARTUP, |agent| {
        let is_exhausted = condition(agent, "BudgetExhausted")?["status"] == "True";
        is_exhausted.then(|| status_used(agent).calls)
    });
    assert!(before <= 3, "{before} calls");
    agent.until("calls of the next window", 150, |agent| {
        (status_used(agent).calls > 3).then_some(())
    });
}

#[test]
fn an_approval_of_the_gate_of_a_spent_budget_tops_it_up() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "ask");
    let kubectl = &namespace.kubectl;
    let spec = json!({
        "limits": {"tokens": 3500}, "window": {"lifetime": {}}, "selector": {},
        "onExhausted": "Ask", "ask": {"topUp": {"tokens": 2000}},
    });
    kubectl.apply(&manifest("asking", &spec));
    let agent = thousand(&namespace, "asker");
    agent.until_condition("ApprovalPending", "True", "BudgetAsk", 120);
    let gate = kubectl.until("a gate", 30, BUDGETS, "asking", |budget| {
        let gate = budget["status"]["gates"].get(0)?;
        Some(format!("{}:{}", gate["id"].as_str()?, gate["argumentsHash"].as_str()?))
    });
    assert_eq!(status_used(&agent.object()).calls, 3);
    let me = kubectl.ok(&["auth", "whoami", "-o", "jsonpath={.status.userInfo.username}"]);
    let approve = format!("agentloop.dev/approve={gate}");
    let approved_by = format!("agentloop.dev/approved-by={}", me.trim());
    kubectl.ok(&["annotate", BUDGETS, "asking", &approve, &approved_by]);
    agent.until("the calls that were approved", 60, |agent| {
        (status_used(agent).calls == 5).then_some(())
    });
    let budget = kubectl.get(BUDGETS, "asking").expect("the budget exists");
    assert_eq!(budget["status"]["limits"]["tokens"], 5500);
    let counted = budget["status"]["ledger"]["topUps"][0]["id"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(
        counted.starts_with("gate/"),
        "an approval is a top-up of the gate: {counted}"
    );
    // The next question is another gate: the old answer does not open it.
    agent.until_condition("ApprovalPending", "True", "BudgetAsk", 60);
}

#[test]
fn stop_ends_the_loop_until_a_person_adds_room() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "stop");
    let kubectl = &namespace.kubectl;
    let spec = json!({"selector": {}, "limits": {"tokens": 2500}, "window": {"rolling": {"seconds": 60}}, "onExhausted": "Stop"});
    kubectl.apply(&manifest("hard", &spec));
    let agent = thousand(&namespace, "stopped");
    let stopped = agent.until_state("Stopped", 120);
    assert_eq!(stopped["status"]["loop"]["reasons"], json!(["BudgetExhausted"]));
    agent.until_condition("Stalled", "True", "BudgetExhausted", 30);
    assert_eq!(status_used(&agent.object()).calls, 2);
    kubectl.patch(BUDGETS, "hard", &json!({"spec": {"limits": {"tokens": 4500}}}));
    agent.until("calls after the limit was raised", 60, |agent| {
        (status_used(agent).calls > 2).then_some(())
    });
}

#[test]
fn the_settled_usage_is_what_a_real_model_server_counted() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "settled");
    let kubectl = &namespace.kubectl;
    let label = kubectl.namespace();
    // The fifth call is the last, so that none is cut.
    let spec = json!({"selector": {}, "limits": {"tokens": 1_000_000, "calls": 5}, "window": {"lifetime": {}}});
    kubectl.apply(&manifest("exact", &spec));
    let busy = json!({"guardrails": {"maxConsecutiveTurns": 1000}});
    let agent = Agent::apply(&namespace, "counted", &computed(openai(&server.base_url(label))), &busy);
    agent.until_condition("BudgetExhausted", "True", "BudgetExhausted", 900);
    let counted = server.used(label);
    let budget = kubectl.until("nothing reserved", 60, BUDGETS, "exact", |budget| {
        let quiet = budget["status"]["reserved"]["tokens"].as_i64().unwrap_or(0) == 0;
        (quiet && used(budget, "calls") == counted.calls).then(|| budget.clone())
    });
    assert_eq!(counted.unknown_calls, 0, "no call was cut");
    let left = budget["status"]["remaining"]["tokens"].as_i64();
    assert_eq!(
        used(&budget, "tokens"),
        counted.input + counted.output,
        "settled (left) and counted (right)"
    );
    assert_eq!(left, Some(1_000_000 - counted.input - counted.output), "nothing leaked");
}
