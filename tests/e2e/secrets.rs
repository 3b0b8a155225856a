//! Keys, prompts, answers and provider error bodies never appear in logs, status, Events or metrics.

use pretty_assertions::assert_eq;
use serde_json::json;

use super::agents::{Agent, STARTUP, openai, script, scripted};
use super::approvals::{answer, gates};
use super::cluster::{self, AGENTS, Namespace, SYSTEM, shared};
use super::goals::goal_without_totals;
use super::model_server::{self, Line};
use super::plugin_user::PluginUser;
use super::toolbox::image;
use crate::support::kubectl::Kubectl;

/// Texts that only the provider, the Secret, the ConfigMap and the transcript may hold.
const CANARIES: &[&str] = &[
    "canary-key",
    "canary-prompt-text",
    "canary-answer-text",
    "canary-provider-text",
];

#[test]
fn no_key_prompt_or_answer_appears_in_describe_events_logs_metrics_plugin_or_report() {
    let (Some(cluster), Some(server)) = (shared(), model_server::faulty()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "canary");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&[
        "create",
        "secret",
        "generic",
        "provider",
        "--from-literal=key=canary-key-3141592653",
    ]);
    kubectl.ok(&[
        "create",
        "configmap",
        "prompt",
        "--from-literal=text=Say canary-prompt-text now.",
    ]);
    let label = kubectl.namespace();
    server.choose(label, "good");
    let mut model = openai(&server.base_url(label));
    model["apiKeySecretRef"] = json!({"name": "provider", "key": "key"});
    let from = json!({"loop": {"maxConsecutiveErrors": 100, "maxDelayMilliseconds": 500}, "instructions": null, "instructionsFrom": {"configMapKeyRef": {"name": "prompt", "key": "text"}}});
    let agent = Agent::apply(&namespace, "discreet", &model, &from);
    agent.until_turns(3, STARTUP);
    // Errors of every kind carry the provider's own words, which may repeat the prompt.
    for fault in ["garbage", "401", "404", "500"] {
        server.choose(label, fault);
        let known = server.lines(label).len();
        // What waits for a person, as after a refused key, tries at once.
        let resume = json!({"metadata": {"annotations": {"agentloop.dev/resume": fault}}});
        kubectl.patch(AGENTS, &agent.name, &resume);
        server.until("a failed call", label, 60, |lines| {
            let begun = lines.iter().skip(known).find(|line| line.event == "begin")?;
            let is_end = |line: &&Line| line.event == "end" && line.id == begun.id;
            lines.iter().find(is_end).map(|_| ())
        });
        if fault == "401" {
            // A resume that arrives before the loop waits has no effect on the wait.
            agent.until_condition("ModelAvailable", "False", "AuthenticationFailed", 60);
        }
    }
    agent.until("a last error", 60, |agent| {
        agent["status"]["lastError"]["kind"].is_string().then_some(())
    });
    server.choose(label, "good");

    let reads = [
        &["describe", "agents.agentloop.dev,pods,persistentvolumeclaims,events"][..],
        &["get", "agents.agentloop.dev,pods,events", "-o", "yaml"],
    ];
    let pages = pages_of_operators(&cluster.system, &agent, &reads);
    no_canary(&pages, CANARIES);
}

/// A goal, and what its checks find. The manifest has the first two of them, which the spec of the Agent thus has too.
const GOAL_CANARIES: &[&str] = &[
    "canary-description-text",
    "canary-question-text",
    "canary-missing-text",
    "canary-output-text",
    "canary-result-text",
    "canary-reason-text",
    "canary-estimate-text",
];

#[test]
fn no_goal_result_check_output_or_judge_reason_appears_outside_the_spec() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "canary-goal");
    let read = json!({"name": "toolbox__read_file", "arguments": {"path": "canary-missing-text"}});
    let finish = json!({"name": "finish", "arguments": {"result": "canary-result-text"}});
    let turns = json!({"atEnd": "Fail", "turns": [
        {"toolCalls": [read]},
        {"text": "There is no canary-missing-text."},
        {"toolCalls": [finish]},
        {"toolCalls": [finish]},
        {"text": r#"{"met": false, "reason": "canary-reason-text"}"#},
        {"text": r#"{"confidence": 10, "progress": 20, "reason": "canary-estimate-text"}"#},
    ]});
    namespace.kubectl.apply(&script("discreet", &turns));
    // The output is not in the command, which a user may read in the spec. It fails in the first check alone.
    let run = "printf 'canary-%s' output-text; [ -e looked ] || { touch looked; exit 1; }";
    let spec = json!({
        "mode": "Goal",
        "goal": {
            "description": "Write canary-description-text.",
            "acceptanceCriteria": [
                {"name": "tests", "command": {"run": run}},
                {"name": "sense", "judge": "Is there canary-question-text?"},
            ],
            "maxSteps": 5,
            "confidence": {"everySteps": 2},
        },
        "tools": {"builtin": ["Shell", "Files"], "approval": {"default": "Never"}, "toolbox": {"image": image()}},
        "workspace": {"size": "64Mi"},
    });
    let agent = Agent::apply(&namespace, "discreet", &scripted("discreet"), &spec);
    let paused = agent.until("a gate", 180, |agent| {
        (agent["status"]["loop"]["reasons"] == json!(["LowConfidence"]) && gates(agent).len() == 1)
            .then(|| agent.clone())
    });
    let criteria = json!([{"name": "tests", "met": true}, {"name": "sense", "met": false}]);
    assert_eq!(
        goal_without_totals(&paused),
        json!({
            "steps": 2, "progressPercent": 50, "progressSource": "Criteria", "lastConfidencePercent": 10,
            "criteria": criteria,
        }),
        "all texts were there to be shown"
    );
    // The spec shows what the user has written into it, in the Agent and in its pod. Of the Agent, only the status is looked at
    // here, and all of it by the plugin.
    let status = ["get", AGENTS, &agent.name, "-o", "jsonpath={.status}"];
    let reads = [
        &status[..],
        &["describe", "pods,persistentvolumeclaims,events"],
        &["get", "pods,persistentvolumeclaims,events", "-o", "yaml"],
    ];
    let pages = pages_of_operators(&cluster.system, &agent, &reads);
    let has_spec = |place: &str| place.contains("pods,") || place == "status -o yaml";
    let (specs, pages): (Vec<_>, Vec<_>) = pages.into_iter().partition(|(place, _)| has_spec(place));
    no_canary(&specs, &GOAL_CANARIES[2..]);
    no_canary(&pages, GOAL_CANARIES);

    // The end names the criteria that are not met, and nothing that was found.
    let id = gates(&paused)[0]["id"].as_str().unwrap_or_default().to_owned();
    answer(&agent, &[("deny", id)]);
    agent.until_condition("Stalled", "True", "Escalated", 120);
    agent.until_event("Warning", "Escalated", 30);
    let mut pages = pages_of_the_controller(&cluster.system);
    for args in [&status[..], &["get", "events", "-o", "yaml"]] {
        pages.push((args.join(" "), namespace.kubectl.ok(args)));
    }
    no_canary(&pages, GOAL_CANARIES);
}

/// What operators see of an Agent whose pod runs: the outcome of these commands, logs, metrics, the plugin and a report.
fn pages_of_operators(system: &Kubectl, agent: &Agent<'_>, reads: &[&[&str]]) -> Vec<(String, String)> {
    let kubectl = agent.kubectl;
    let mut pages = pages_of_the_controller(system);
    let logs = ["logs", &agent.name, "--all-containers", "--tail=-1"];
    for args in reads.iter().chain([&&logs[..]]) {
        pages.push((args.join(" "), kubectl.ok(args)));
    }
    let admin = PluginUser::new(system, kubectl, "admin", &["admin"]);
    for args in [
        &["events", &agent.name][..],
        &["logs", &agent.name],
        &["history", &agent.name],
        &["explain", &agent.name],
        &["status", "-o", "yaml"],
    ] {
        pages.push((args.join(" "), admin.until_ok(args)));
    }
    let report: Vec<_> = admin.report().into_iter().map(|(_, content)| content).collect();
    pages.push(("report".to_owned(), report.concat()));
    pages
}

/// Metrics and logs.
fn pages_of_the_controller(system: &Kubectl) -> Vec<(String, String)> {
    let mut pages = vec![("metrics".to_owned(), cluster::metrics(system))];
    for pod in system
        .ok(&["get", "pods", "-l", cluster::REPLICAS, "-o", "name"])
        .lines()
    {
        let log = system.ok(&["logs", pod, "--all-containers", "--tail=-1"]);
        pages.push((format!("{SYSTEM}/{pod}"), log));
    }
    pages
}

fn no_canary(pages: &[(String, String)], canaries: &[&str]) {
    for (place, page) in pages {
        assert!(page.len() > 40, "{place} has something to look at: {page}");
        for canary in canaries {
            let line = page.lines().find(|line| line.contains(canary));
            assert!(line.is_none(), "{canary} shows in {place}: {line:?}");
        }
    }
}
