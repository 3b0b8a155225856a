//! Snapshots of what commands print, as a user sees it: data, wide tables, results of tasks, the list of a report, and what
//! a command that writes confirms. Tables and texts that depend on more than a line have theirs beside the code.

use std::fmt::Write as _;
use std::io::Read as _;

use serde_json::{Value, json};

use super::harness::{CommandOutput, LOG_CANARY, NOW, PluginHarness};
use super::link::{Answer, FakeController, Stream, accepted, completed, ended, start};

/// Fields whose values differ from run to run.
const VARYING: [&str; 3] = ["creationTimestamp:", "resourceVersion:", "uid:"];

/// A command with its output: that on standard error after `!`, and the status if it is not 0.
fn transcript(line: &str, done: &CommandOutput) -> String {
    let mut text = format!("$ kubectl agentloop {line}\n");
    for line in done.out.lines() {
        let varying = VARYING.iter().find(|field| line.trim_start().starts_with(*field));
        let _ = match varying {
            None => writeln!(text, "{line}"),
            Some(field) => writeln!(text, "{}{field} …", &line[..line.len() - line.trim_start().len()]),
        };
    }
    for line in done.err.lines() {
        let _ = writeln!(text, "! {line}");
    }
    let code = done.status.code();
    if code != 0 {
        let _ = writeln!(text, "(exit code {code})");
    }
    text + "\n"
}

async fn transcripts(harness: &PluginHarness, lines: &[&str]) -> String {
    let mut text = String::new();
    for line in lines {
        text += &transcript(line, &harness.run(line).await);
    }
    text
}

fn gate(id: &str, kind: &str, tool: &str) -> Value {
    json!({"id": id, "kind": kind, "tool": tool, "argumentsHash": "5f0c", "openedAt": "2026-11-22T13:05:00Z"})
}

/// An Agent and an AgentBudget with something in each column.
fn busy() -> PluginHarness {
    let harness = PluginHarness::start();
    let ready =
        json!([{"type": "Ready", "status": "True", "reason": "LoopRunning", "message": "", "lastTransitionTime": NOW}]);
    let model = json!({"model": "large", "calls": 3, "inputTokens": 900, "outputTokens": 50, "costMicroUSD": 7_000});
    harness.put_agent(
        "helper",
        &json!({
            "conditions": ready, "loop": {"state": "Paused", "reasons": ["ToolCallNeedsApproval"]},
            "usage": {"turns": 2, "calls": 3, "inputTokens": 900, "outputTokens": 50, "costMicroUSD": 7_000, "byModel": [model]},
            "gates": [gate("e3-t12c1r1", "ToolCallNeedsApproval", "bank__pay")],
        }),
    );
    harness.put_budget(
        "team",
        &json!({
            "limits": {"tokens": 1_000}, "used": {"tokens": 950}, "reserved": {"tokens": 40}, "remaining": {"tokens": 10},
            "topAgents": [{"namespace": "team-a", "name": "helper", "tokens": 950, "costMicroUSD": 7_000}],
            "gates": [gate("b-7", "BudgetAsk", "")],
        }),
    );
    harness
}

#[tokio::test]
async fn screens_as_yaml() {
    let harness = busy();
    harness.install();
    let lines = [
        "status helper -o yaml",
        "status -A -o yaml",
        "explain helper -o yaml",
        "approvals -o yaml",
        "cost -o yaml",
        "cost --by model -o yaml",
        "budget top -o yaml",
        "check -o yaml",
    ];
    insta::assert_snapshot!("yaml", transcripts(&harness, &lines).await);
}

#[tokio::test]
async fn screens_of_budgets_and_gates_as_wide_tables() {
    let lines = [
        "budget top -o wide",
        "budget top -A",
        "approvals -o wide",
        "approvals -A",
        "cost -o wide",
    ];
    insta::assert_snapshot!("wide", transcripts(&busy(), &lines).await);
}

#[tokio::test]
async fn commands_that_write_confirm_the_change() {
    let harness = busy();
    let mut text = transcripts(
        &harness,
        &[
            "pause helper",
            "pause helper nobody",
            "resume helper",
            "wake helper",
            "stop helper",
            "stop helper --now",
            "approve helper",
            "deny helper e3-t12c1r1",
            "approve helper e9-t1c1r1",
            "approve --budget team",
            "deny --budget team",
            "budget top-up team --tokens 500 --id fire --reason incident",
            "budget top-up team --tokens 500 --id fire",
            "budget top-up team --tokens 600 --id fire",
            "budget top-up team --calls 5",
        ],
    )
    .await;
    harness.put_agent(
        "helper",
        &json!({"loop": {"state": "Paused", "reasons": ["BudgetExhausted"]}}),
    );
    text += &transcripts(&harness, &["resume helper", "wake helper", "approve helper"]).await;
    harness.put_agent("helper", &json!({"loop": {"state": "Stopped", "outcome": "Completed"}}));
    text += &transcripts(&harness, &["resume helper", "wake helper", "stop helper"]).await;
    insta::assert_snapshot!("writes", text);
}

#[tokio::test]
async fn the_results_of_a_run() {
    let outcomes = [
        (
            "run helper -p x --id a",
            json!({"outcome": "Completed", "result": "It is done."}),
        ),
        (
            "run helper -p x --id a",
            json!({"outcome": "Completed", "result": {"severity": "high"}, "iterations": 2, "tokensUsed": 30}),
        ),
        (
            "run helper -p x --id a -o yaml",
            json!({"outcome": "Completed", "result": "It is done.", "iterations": 2, "tokensUsed": 30}),
        ),
        (
            "run helper -p x --id a -o json",
            json!({"outcome": "Completed", "result": "It is done.", "untrustedContent": "server/web"}),
        ),
        (
            "run helper -p x --id a",
            json!({"outcome": "LimitReached", "reason": "MaxTokens", "error": "4000 tokens were used"}),
        ),
        (
            "run helper -p x --id a",
            json!({"outcome": "Failed", "error": "the model refused"}),
        ),
    ];
    let mut text = String::new();
    for (line, response) in outcomes {
        text += &answered(
            line,
            vec![start(0), accepted("Accepted"), Stream(vec![ended(1, &response)])],
        )
        .await;
    }
    let refused = Answer::Json(429, json!({"message": "too many tasks wait"}));
    text += &answered("run helper -p x --id a", vec![start(0), refused]).await;
    text += &answered(
        "run helper -p x --id a -v",
        vec![
            start(0),
            accepted("Accepted"),
            Stream(vec![completed(1, &json!("done"))]),
        ],
    )
    .await;
    insta::assert_snapshot!("run", text);
}

/// The transcript of a command to which the controller gives these answers.
async fn answered(line: &str, answers: Vec<Answer>) -> String {
    let fake = FakeController::start(answers).await;
    transcript(line, &fake.harness.run(line).await)
}

/// A pod of this project with these containers, by their number of restarts.
fn pod(namespace: &str, name: &str, component: &str, containers: &[(&str, i64)]) -> Value {
    let statuses = containers
        .iter()
        .map(|(name, restarts)| json!({"name": name, "restartCount": restarts}));
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {
            "app.kubernetes.io/part-of": "agentloop", "app.kubernetes.io/component": component}},
        "spec": {"containers": []}, "status": {"containerStatuses": statuses.collect::<Vec<_>>()},
    })
}

#[tokio::test]
async fn a_report_has_why_containers_were_restarted_and_no_events_of_pods_of_others() {
    let harness = busy();
    harness.install();
    let system = "agentloop-system";
    let pods = [
        pod(system, "agentloop-0", "controller", &[("controller", 2)]),
        pod(system, "agentloop-1", "controller", &[("controller", 0)]),
        pod("team-a", "helper", "loop", &[("worker", 1), ("mcp-web", 4)]),
    ];
    for pod in pods {
        harness.server.put("/pods", pod);
    }
    for name in ["helper", "shop"] {
        let event = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "team-a", "name": name},
            "type": "Warning", "reason": "BackOff", "lastTimestamp": NOW,
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "team-a", "name": name},
        });
        harness.server.put("/events", event);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.zip");
    let done = harness.run(&format!("report --file {}", path.display())).await;
    assert_eq!(done.status.code(), 0, "{}", done.err);
    let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
    let mut read = |name: &str| {
        let mut text = String::new();
        archive.by_name(name).unwrap().read_to_string(&mut text).unwrap();
        assert!(!text.contains(LOG_CANARY), "{name}: {text}");
        text
    };
    for (name, earlier) in [
        ("logs/agentloop-0.jsonl", 0),
        ("logs/agentloop-1.jsonl", 0),
        ("logs/agentloop-0.controller.previous.jsonl", 1),
        ("logs/helper.worker.previous.jsonl", 1),
    ] {
        let text = read(name);
        assert!(text.contains(&format!("\"earlier\":{earlier}")), "{name}: {text}");
        assert_eq!(text.lines().count(), 2, "{name}: {text}");
    }
    assert_eq!(done.out.matches("logs/").count(), 4, "{}", done.out);
    let events: Value = serde_json::from_str(&read("events.json")).unwrap();
    assert_eq!(events.as_array().unwrap().len(), 1, "{events}");
    assert_eq!(events[0]["involvedObject"]["name"], "helper");
}

#[tokio::test]
async fn the_list_of_a_report() {
    let harness = busy();
    harness.install();
    let lines = ["report --dry-run", "report -n forbidden --dry-run"];
    let text = transcripts(&harness, &lines).await;
    // Sizes follow from versions and times.
    let sizes = text.lines().map(|line| match line.trim_start().split_once("  ") {
        Some((size, name)) if size.parse::<u64>().is_ok_and(|size| size > 0) => format!("    SIZE  {name}"),
        _ => line.to_owned(),
    });
    insta::assert_snapshot!("report", sizes.collect::<Vec<_>>().join("\n"));
}
