//! Keys, prompts, answers and provider error bodies never appear in logs, status, Events or metrics.

use serde_json::json;

use super::agents::{Agent, openai};
use super::cluster::{self, AGENTS, Namespace, SYSTEM, shared};
use super::model_server::{self, Line};
use super::plugin_user::PluginUser;

/// Texts that only the provider, the Secret, the ConfigMap and the transcript may hold.
const CANARIES: &[&str] = &[
    "canary-key",
    "canary-prompt-text",
    "canary-answer-text",
    "canary-provider-text",
];

#[test]
fn no_key_prompt_or_answer_shows_in_describe_events_logs_metrics_the_plugin_or_a_report() {
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
    agent.until_turns(3, 60);
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
    }
    agent.until("a last error", 60, |agent| {
        agent["status"]["lastError"]["kind"].is_string().then_some(())
    });
    server.choose(label, "good");

    let mut pages = vec![("metrics".to_owned(), cluster::metrics(&cluster.system))];
    for args in [
        &["describe", "agents.agentloop.dev,pods,persistentvolumeclaims,events"][..],
        &["get", "agents.agentloop.dev,pods,events", "-o", "yaml"],
        &["logs", &agent.name, "--all-containers", "--tail=-1"],
    ] {
        pages.push((args.join(" "), kubectl.ok(args)));
    }
    for pod in cluster.system.ok(&["get", "pods", "-o", "name"]).lines() {
        let log = cluster.system.ok(&["logs", pod, "--all-containers", "--tail=-1"]);
        pages.push((format!("{SYSTEM}/{pod}"), log));
    }
    let admin = PluginUser::new(&cluster.system, kubectl, "admin", &["admin"]);
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
    for (place, page) in &pages {
        assert!(page.len() > 100, "{place} has something to look at: {page}");
        for canary in CANARIES {
            let line = page.lines().find(|line| line.contains(canary));
            assert!(line.is_none(), "{canary} shows in {place}: {line:?}");
        }
    }
}
