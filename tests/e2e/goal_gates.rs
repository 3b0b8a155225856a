//! Mode Goal and the persons who answer it on a real cluster: a loop that is allowed to go on, a call that is denied, and a loop
//! that ends since nobody lets it repeat itself.
//!
//! A test of the engine runs the same spec and script, so that it is known where they lead.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, condition, script, scripted};
use super::approvals::{answer, gates};
use super::cluster::{self, Namespace, shared};
use super::goals::goal_without_totals;
use super::node;
use super::toolbox::image;
use crate::support::kubectl::Kubectl;

/// The spec and the script.
fn story() -> Value {
    let mut story: Value = serde_json::from_str(include_str!("goal_gates.json")).expect("JSON");
    story["spec"]["tools"]["toolbox"]["image"] = image().into();
    story
}

/// Whether the metric says this of the condition.
fn is_measured(agent: &Agent<'_>, system: &Kubectl, type_: &str, status: &str) -> bool {
    let labels = [
        ("namespace", agent.kubectl.namespace()),
        ("agent", agent.name.as_str()),
        ("condition", type_),
        ("status", status),
    ];
    cluster::series(&cluster::metrics(system), "agentloop_agent_status_condition", &labels) == Some(1.0)
}

/// Waits until the loop is paused by a gate of this kind; the Agent.
fn until_gate(agent: &Agent<'_>, kind: &str) -> Value {
    let paused = agent.until(&format!("a gate of kind {kind}"), 180, |agent| {
        let status = &agent["status"];
        let is_open = gates(agent).iter().any(|gate| gate["kind"] == kind);
        let pending = condition(agent, "ApprovalPending")?;
        let is_told = pending["status"] == "True" && pending["reason"] == kind;
        (is_open && is_told && status["loop"]["reasons"] == json!([kind])).then(|| agent.clone())
    });
    assert_eq!(gates(&paused).len(), 1, "{paused}");
    let ready = condition(&paused, "Ready").expect("it is set");
    assert_eq!(
        (&ready["status"], &ready["reason"]),
        (&json!("True"), &json!("AwaitingApproval"))
    );
    paused
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn deny(agent: &Agent<'_>, paused: &Value) {
    answer(agent, &[("deny", text(&gates(paused)[0], "id").to_owned())]);
}

#[test]
fn a_goal_with_a_retry_a_low_confidence_a_denied_call_and_repeated_steps_escalates() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "goal-gates");
    let story = story();
    namespace.kubectl.apply(&script("cloudy", &story["script"]));
    let agent = Agent::apply(&namespace, "cloudy", &scripted("cloudy"), &story["spec"]);
    let unmet = json!([{"name": "number", "met": false}]);

    // The first attempt fails, the second one does not, and then the agent doubts.
    let doubtful = until_gate(&agent, "LowConfidence");
    assert_eq!(
        goal_without_totals(&doubtful),
        json!({
            "steps": 1, "progressPercent": 20, "progressSource": "Estimate", "lastConfidencePercent": 10, "criteria": unmet,
        })
    );
    let gate = &gates(&doubtful)[0];
    let approval = format!("{}:{}", text(gate, "id"), text(gate, "argumentsHash"));
    let said = "after 1 of 12 steps the confidence that the goal will be reached is 10 %, below 50 %";
    let pending = condition(&doubtful, "ApprovalPending").expect("it is set");
    let message = text(pending, "message");
    assert!(
        message.starts_with(said) && message.contains(&format!("agentloop.dev/approve={approval}")),
        "{message}"
    );
    agent.until_condition("LowConfidence", "True", "BelowThreshold", 30);
    let note = agent.until_event("Warning", "ApprovalPending", 30);
    assert!(note.starts_with(said), "{note}");
    for type_ in ["ApprovalPending", "LowConfidence"] {
        assert!(is_measured(&agent, &cluster.system, type_, "true"), "{type_}");
    }
    answer(&agent, &[("approve", approval), ("approved-by", "admin".to_owned())]);

    // The loop goes on with the next step. Its command is denied, and it uses another tool.
    let held = until_gate(&agent, "ToolCallNeedsApproval");
    assert_eq!(gates(&held)[0]["tool"], "toolbox__shell");
    assert_eq!(
        condition(&held, "LowConfidence").map(|one| &one["status"]),
        Some(&json!("False"))
    );
    deny(&agent, &held);

    // Then it says the same in four steps.
    let looping = until_gate(&agent, "Escalated");
    let pending = condition(&looping, "ApprovalPending").expect("it is set");
    let message = text(pending, "message");
    assert!(
        message.starts_with("after 6 of 12 steps the loop repeats itself; it waits for an approval to continue"),
        "{message}"
    );
    assert_eq!(condition(&looping, "Succeeded"), None, "the loop has not ended");
    deny(&agent, &looping);

    agent.until_condition("Stalled", "True", "Escalated", 120);
    let ended = agent.object();
    let status = &ended["status"];
    assert_eq!(
        goal_without_totals(&ended),
        json!({
            "steps": 6, "progressPercent": 20, "progressSource": "Estimate", "lastConfidencePercent": 10,
            "end": "LoopDetected", "criteria": unmet,
        })
    );
    assert_eq!(status["loop"]["outcome"], "Escalated");
    let succeeded = condition(&ended, "Succeeded").expect("it is set");
    assert_eq!(
        (&succeeded["status"], &succeeded["reason"]),
        (&json!("False"), &json!("Escalated"))
    );
    let why = "the loop repeated itself, and its continuation was not approved; after 6 steps ";
    let message = text(succeeded, "message");
    assert!(
        message.starts_with(&format!("{why}these criteria are not met: number. ")),
        "{message}"
    );
    let note = agent.until_event("Warning", "Escalated", 30);
    assert!(
        note.starts_with(&format!("{why}1 of 1 criteria are not met. ")),
        "{note}"
    );
    // Conditions other than Ready have no series while they are False.
    assert!(is_measured(&agent, &cluster.system, "Ready", "false"));
    for type_ in ["Succeeded", "ApprovalPending", "LowConfidence"] {
        let shown = ["true", "false", "unknown"].map(|status| is_measured(&agent, &cluster.system, type_, status));
        assert_eq!(shown, [false; 3], "{type_}");
    }

    // Each answer of the script was asked for once, and the denied command did not run.
    let usage = &status["usage"];
    assert_eq!(
        (&usage["turns"], &usage["calls"], &usage["toolCalls"]),
        (&json!(7), &json!(12), &json!(3)),
        "{usage}"
    );
    let workspace = node::claim(agent.kubectl, "cloudy-workspace");
    for (file, content) in [("sky.txt", "dark\n"), ("stars.txt", "none yet\n")] {
        assert_eq!(
            std::fs::read_to_string(workspace.join(file)).unwrap(),
            content,
            "{file}"
        );
    }
}
