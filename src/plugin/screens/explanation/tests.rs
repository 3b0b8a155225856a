//! A table of situations, each as the status that the controller writes.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::*;
use crate::plugin::screens::status::{StatusColumns, table};

const NOW: &str = "2026-11-22T14:00:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn agent_with(spec: &Value, status: &Value) -> Agent {
    let mut object = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": {"namespace": "team-a", "name": "helper", "generation": 3},
        "spec": {"instructions": "Be brief.", "model": {"api": "Scripted", "name": "small"}},
        "status": status,
    });
    for (field, value) in spec.as_object().unwrap() {
        object["spec"][field] = value.clone();
    }
    if object["status"].is_object() && object["status"]["observedGeneration"].is_null() {
        object["status"]["observedGeneration"] = json!(3);
    }
    serde_json::from_value(object).unwrap()
}

fn agent(status: &Value) -> Agent {
    agent_with(&json!({}), status)
}

fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW})
}

/// A paused loop with the condition that shows why.
fn paused(reason: &str, shown: &Value) -> Value {
    json!({
        "conditions": [shown],
        "loop": {"state": "Paused", "reasons": [reason], "since": "2026-11-22T13:05:00Z"},
    })
}

/// Situations of the whole life of an Agent, by name.
fn situations() -> Vec<(&'static str, Agent)> {
    let mut all = pauses();
    all.extend(others());
    all
}

fn pauses() -> Vec<(&'static str, Agent)> {
    let mut budget = paused(
        "BudgetExhausted",
        &condition(
            "BudgetExhausted",
            "True",
            "BudgetExhausted",
            "budget team-a has no room; resumes at 2026-11-22T14:05:00Z",
        ),
    );
    budget["loop"]["resumesAt"] = json!("2026-11-22T14:05:00Z");
    budget["budgets"] = json!([{"name": "team-a", "exhausted": true}, {"name": "platform/all", "exhausted": true}, {"name": "c", "exhausted": false}]);
    let mut asks = paused(
        "BudgetAsk",
        &condition("ApprovalPending", "True", "BudgetAsk", "budget team-a asks for more"),
    );
    asks["budgets"] = json!([{"name": "team-a", "exhausted": true}]);
    let mut approval = paused(
        "ToolCallNeedsApproval",
        &condition(
            "ApprovalPending",
            "True",
            "ToolCallNeedsApproval",
            "the call of bank__pay waits for an approval",
        ),
    );
    approval["gates"] = json!([{"id": "e3-t12c1r1", "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": "5f0c", "openedAt": NOW}]);
    let mut lost = paused(
        "LinkLost",
        &condition(
            "LinkLost",
            "True",
            "LinkLost",
            "no contact between the pod and the controller for 60 s",
        ),
    );
    lost["loop"]["state"] = json!("Paused");
    vec![
        ("budget exhausted", agent(&budget)),
        ("budget asks", agent(&asks)),
        ("approval pending", agent(&approval)),
        ("link lost", agent(&lost)),
        (
            "model down",
            agent(&paused(
                "ModelUnreachable",
                &condition("ModelAvailable", "False", "Unreachable", "connection refused"),
            )),
        ),
        (
            "cool-down",
            agent(&paused(
                "ConsecutiveErrors",
                &condition(
                    "ErrorLimitReached",
                    "True",
                    "ConsecutiveErrors",
                    "5 turns in a row have failed",
                ),
            )),
        ),
        (
            "total limit",
            agent(&paused(
                "TotalTokens",
                &condition(
                    "BudgetExhausted",
                    "True",
                    "TotalTokens",
                    "guardrails.total.tokens is used up",
                ),
            )),
        ),
    ]
}

fn others() -> Vec<(&'static str, Agent)> {
    let suspended = json!({"conditions": [condition("Ready", "True", "SuspendedBySpec", "suspended")],
        "loop": {"state": "Stopped", "reasons": ["SuspendedBySpec"], "since": "2026-11-20T14:00:00Z"}});
    let sleeping = json!({"loop": {"state": "Sleeping", "resumesAt": "2026-11-22T15:30:00Z",
        "wake": {"type": "Event", "value": "sensor/prices,notification"}}});
    let invalid = json!({"conditions": [condition("Accepted", "False", "SecretNotFound", "Secret openai does not exist: create it")],
        "loop": {"state": "Stopped"}});
    let pending = json!({"conditions": [condition("PodReady", "False", "Unschedulable", "0/3 nodes are available")],
        "loop": {"state": "Starting"}});
    let completed = json!({"conditions": [condition("Ready", "True", "Completed", "the agent ended its loop")],
        "loop": {"state": "Stopped", "outcome": "Completed"}});
    let failed = json!({"conditions": [condition("Succeeded", "False", "Failed", "all steps are used (spec.goal.maxSteps)")],
        "loop": {"state": "Stopped", "outcome": "Failed"}, "goal": {"steps": 20, "end": "StepLimit",
        "startedAt": "2026-11-22T09:00:00Z", "endedAt": "2026-11-22T10:30:00Z",
        "usage": {"calls": 64, "tokens": 1_234_567, "costMicroUSD": 2_450_000}}});
    let goal = json!({"loop": {"state": "Running"}, "goal": {"steps": 3, "startedAt": "2026-11-22T13:12:00Z",
        "usage": {"calls": 1, "tokens": 1_830, "costMicroUSD": 0}}});
    let detected = json!({"conditions": [condition("LoopDetected", "True", "RepeatedRequest", "detected from the gateway's counters")],
        "loop": {"state": "Running"}});
    let running = json!({"observedGeneration": 2, "loop": {"state": "Running", "consecutiveErrors": 2},
        "gates": [{"id": "tools-github-e3-1", "kind": "ToolDefinitionsChanged", "tool": "github", "argumentsHash": "aa", "openedAt": NOW}],
        "lastError": {"at": NOW, "kind": "Timeout", "message": "no answer within\n60 s"}});
    let scaled = json!({"conditions": [condition("Ready", "True", "ScaledToZero", "the Agent has no task and no pod")],
        "loop": {"state": "Stopped", "outcome": "ScaledToZero"}});
    vec![
        ("scaled to zero", agent(&scaled)),
        ("not reconciled", agent(&Value::Null)),
        ("suspended", agent_with(&json!({"suspend": true}), &suspended)),
        ("sleeping", agent(&sleeping)),
        ("waiting for a task", agent_with(&json!({"mode": "Task"}), &sleeping)),
        ("invalid spec", agent(&invalid)),
        ("pod pending", agent(&pending)),
        ("completed", agent(&completed)),
        ("failed goal", agent(&failed)),
        ("running goal", agent(&goal)),
        ("loop detected from outside", agent(&detected)),
        ("running", agent(&running)),
    ]
}

#[test]
fn the_explanations_of_situations() {
    let texts = situations().into_iter().map(|(name, agent)| {
        let text = of(&agent, now()).text(now());
        format!("--- {name}\n{text}")
    });
    insta::assert_snapshot!(texts.collect::<Vec<_>>().join("\n"));
}

#[test]
fn an_explanation_as_data() {
    let (_, agent) = situations()
        .into_iter()
        .find(|(name, _)| *name == "budget exhausted")
        .unwrap();
    insta::assert_json_snapshot!(of(&agent, now()));
}

#[test]
fn each_pause_has_a_cause_with_something_to_wait_for_or_to_do() {
    for reason in PauseReason::iter() {
        let status = json!({"loop": {"state": "Paused", "reasons": [reason.as_ref()]},
            "budgets": [{"name": "b", "exhausted": true}]});
        let spec = json!({"suspend": reason == PauseReason::SuspendedBySpec});
        let explained = of(&agent_with(&spec, &status), now());
        assert_eq!(explained.causes.len(), 1, "{reason}");
        assert_eq!(explained.causes[0].reason, reason.as_ref());
        assert!(!explained.causes[0].ends.is_empty(), "{reason}");
        if reason.facts().ends_on_resume {
            assert!(
                explained.causes[0]
                    .steps
                    .last()
                    .unwrap()
                    .contains("kubectl agentloop resume"),
                "{reason}"
            );
        }
    }
}

#[test]
fn a_time_that_has_passed_is_no_time_at_which_the_loop_continues() {
    let at = |at: &str| of(&agent(&json!({"loop": {"state": "Sleeping", "resumesAt": at}})), now()).resumes_at;
    assert_eq!(at(NOW), None);
    assert!(at("2026-11-22T14:00:01Z").is_some());
}

#[test]
fn a_condition_that_shows_one_pause_does_not_explain_another() {
    let mut status = paused(
        "BudgetExhausted",
        &condition(
            "BudgetExhausted",
            "True",
            "BudgetExhausted",
            "budget team-a has no room",
        ),
    );
    status["loop"]["reasons"] = json!(["BudgetExhausted", "TokensPerHour"]);
    let causes = of(&agent(&status), now()).causes;
    let messages: Vec<&str> = causes.iter().map(|cause| cause.message.as_str()).collect();
    assert_eq!(messages, ["budget team-a has no room", ""]);
}

#[test]
fn a_request_to_stop_is_shown_until_the_loop_has_reported_its_end() {
    let with = |requested: &str, status: &Value| {
        let mut agent = agent(status);
        agent.metadata.annotations = Some([(STOP.to_owned(), requested.to_owned())].into());
        agent
    };
    let running = json!({"loop": {"state": "Running"}});
    let handled = json!({"loop": {"state": "Running"}, "lastHandledRequests": {"stop": "1"}});
    let ended = json!({"loop": {"state": "Stopped", "outcome": "Cancelled"}});
    for (requested, status, is_shown) in [
        ("1", &running, true),
        ("", &running, false),
        ("1", &handled, false),
        ("2", &handled, true),
        ("1", &ended, false),
    ] {
        let agent = with(requested, status);
        let notes = of(&agent, now()).notes;
        let is_noted = notes
            .iter()
            .any(|note| note == "stop requested, not yet confirmed by the loop");
        assert_eq!(is_noted, is_shown, "{requested}: {status}");
        let shown = table(&[agent], StatusColumns::default(), now()).to_string();
        assert_eq!(shown.contains("stop requested"), is_shown, "{shown}");
    }
    let paused = with("1", &json!({"loop": {"state": "Paused", "reasons": ["RateWindow"]}}));
    let shown = table(&[paused], StatusColumns::default(), now()).to_string();
    assert!(shown.contains("RateWindow; stop requested"), "{shown}");
}
