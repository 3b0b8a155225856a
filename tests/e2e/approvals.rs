//! Approvals on a real cluster: a call that a person must approve waits across pods, runs exactly as it was shown, and a denied
//! one never runs.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::cluster::{AGENTS, Namespace, alone, leader, shared};
use crate::tools::python::{self, Edition, McpServer};

/// Two calls that need an approval, and the end once the model has seen their results.
fn turns() -> Value {
    let note = |text: &str| json!({"name": "hub__note", "arguments": {"text": text}});
    json!({"turns": [
        {"text": "I write two notes.", "toolCalls": [note("canary-one"), note("canary-two")]},
        {"yield": {"mode": "shutdown", "reason": "all is done"}},
        {"yield": {"mode": "shutdown", "reason": "all is done"}},
    ]})
}

fn spec(server: &McpServer) -> Value {
    let hub = json!({
        "name": "hub", "url": server.url(), "requiredGrant": "notes", "tools": [{"name": "note", "approval": "Always"}],
    });
    json!({"tools": {"servers": [hub], "grants": ["notes"]}})
}

fn acts(server: &McpServer) -> Vec<String> {
    let records = server.records();
    let what = |record: &Value| record["what"].as_str().unwrap_or_default().to_owned();
    records.iter().map(what).collect()
}

pub fn gates(agent: &Value) -> Vec<Value> {
    agent["status"]["gates"].as_array().cloned().unwrap_or_default()
}

/// Sets annotations that answer gates.
pub fn answer(agent: &Agent<'_>, annotations: &[(&str, String)]) {
    let pairs: Vec<String> = annotations
        .iter()
        .map(|(key, value)| format!("agentloop.dev/{key}={value}"))
        .collect();
    let mut args = vec!["annotate", "--overwrite", AGENTS, &agent.name];
    args.extend(pairs.iter().map(String::as_str));
    agent.kubectl.ok(&args);
}

#[test]
fn a_call_waits_for_its_approval_across_pods_and_a_denied_one_never_runs() {
    let Some(cluster) = alone().filter(|_| python::is_there()) else {
        return;
    };
    let server = McpServer::for_pods(Edition::Newer);
    let namespace = Namespace::new(&cluster.system, "approvals");
    namespace.kubectl.apply(&script("approvals", &turns()));
    let agent = Agent::apply(&namespace, "approvals", &scripted("approvals"), &spec(&server));
    let waiting = |pod_before: Option<Value>| {
        agent.until("two gates", 120, move |agent| {
            let is_new = pod_before
                .as_ref()
                .is_none_or(|before| agent["status"]["pod"]["startedAt"] != *before);
            let paused = agent["status"]["loop"]["state"] == "Paused";
            (is_new && paused && gates(agent).len() == 2).then(|| agent.clone())
        })
    };
    let first = waiting(None);
    let condition = |type_: &str| {
        let conditions = first["status"]["conditions"].as_array().unwrap();
        conditions
            .iter()
            .find(|condition| condition["type"] == type_)
            .cloned()
            .unwrap()
    };
    assert_eq!(first["status"]["loop"]["reasons"], json!(["ToolCallNeedsApproval"]));
    assert_eq!(
        (&condition("Ready")["status"], &condition("Ready")["reason"]),
        (&json!("True"), &json!("AwaitingApproval"))
    );
    let open = gates(&first);
    let (id, hash) = (
        open[0]["id"].as_str().unwrap(),
        open[0]["argumentsHash"].as_str().unwrap(),
    );
    let message = condition("ApprovalPending")["message"].as_str().unwrap().to_owned();
    assert!(
        message.contains(&format!("agentloop.dev/approve={id}:{hash}")),
        "{message}"
    );
    assert_ne!(open[0]["argumentsHash"], open[1]["argumentsHash"]);
    assert!(!first.to_string().contains("canary"), "{first}");

    // Another pod waits for the same answers.
    agent.kubectl.ok(&["delete", "pod", &agent.name, "--wait=true"]);
    let second = waiting(Some(first["status"]["pod"]["startedAt"].clone()));
    assert_eq!(gates(&second), open);
    assert!(acts(&server).is_empty());

    // The hash of the other call approves nothing; the denial beside it takes effect.
    let other = format!("{id}:{}", open[1]["argumentsHash"].as_str().unwrap());
    let denied = open[1]["id"].as_str().unwrap().to_owned();
    let by = ("approved-by", "admin".to_owned());
    answer(&agent, &[("approve", other), by.clone(), ("deny", denied)]);
    agent.until("the denial", 60, |agent| (gates(agent) == open[..1]).then_some(()));
    assert!(acts(&server).is_empty());

    // The leader is killed while the call waits: the answer reaches the pod through the next one.
    let old = leader(&cluster.system);
    let name = old["metadata"]["name"].as_str().unwrap();
    cluster
        .system
        .ok(&["delete", "pod", name, "--grace-period=0", "--force", "--wait=false"]);
    answer(&agent, &[("approve", format!("{id}:{hash}")), by]);
    let ended = agent.until("an end", 120, |agent| {
        (agent["status"]["loop"]["outcome"] == "Completed").then(|| agent.clone())
    });
    assert_eq!(acts(&server), ["note canary-one"]);
    assert_eq!(
        (gates(&ended), &ended["status"]["usage"]["actions"]),
        (vec![], &json!(1))
    );
}

/// A call that waits while the loop sleeps, and the end once its result has woken the loop.
fn sleeping_turns() -> Value {
    json!({"turns": [
        {"text": "I write a note.", "toolCalls": [{"name": "hub__note", "arguments": {"text": "canary-three"}}]},
        {"yield": {"sleep": 3600, "reason": "a person has to approve it"}},
        {"yield": {"mode": "shutdown", "reason": "the note is there"}},
    ]})
}

#[test]
fn a_loop_continues_while_a_call_waits_and_its_result_ends_the_sleep() {
    let Some(cluster) = shared().filter(|_| python::is_there()) else {
        return;
    };
    let server = McpServer::for_pods(Edition::Newer);
    let namespace = Namespace::new(&cluster.system, "deferred");
    namespace.kubectl.apply(&script("deferred", &sleeping_turns()));
    let mut spec = spec(&server);
    spec["tools"]["approval"] = json!({"whilePending": "Continue"});
    let agent = Agent::apply(&namespace, "deferred", &scripted("deferred"), &spec);
    let asleep = agent.until("a sleep with a gate", 120, |agent| {
        (agent["status"]["loop"]["state"] == "Sleeping" && gates(agent).len() == 1).then(|| agent.clone())
    });
    let conditions = asleep["status"]["conditions"].as_array().unwrap();
    let pending = conditions.iter().find(|one| one["type"] == "ApprovalPending");
    assert_eq!(pending.unwrap()["status"], "True");
    // The gate outlives the pod, and nothing runs before the answer.
    agent.kubectl.ok(&["delete", "pod", &agent.name, "--wait=true"]);
    let before = asleep["status"]["pod"]["startedAt"].clone();
    let again = agent.until("the next pod", 120, |agent| {
        let is_new = agent["status"]["pod"]["startedAt"] != before;
        (is_new && agent["status"]["loop"]["state"] == "Sleeping").then(|| agent.clone())
    });
    assert_eq!(gates(&again), gates(&asleep));
    assert!(acts(&server).is_empty());
    let open = gates(&again);
    let text = |field: &str| open[0][field].as_str().unwrap().to_owned();
    let approval = format!("{}:{}", text("id"), text("argumentsHash"));
    answer(&agent, &[("approve", approval), ("approved-by", "admin".to_owned())]);
    agent.until("an end", 60, |agent| {
        (agent["status"]["loop"]["outcome"] == "Completed").then_some(())
    });
    assert_eq!(acts(&server), ["note canary-three"]);
}
