//! Tests of the kubectl plugin: what its commands write to the API server, and how it speaks with the controller.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster_roles;
mod forward;
mod harness;
mod impersonation;
mod link;
mod program;
mod rejections;
mod roles;
mod screens;
mod unreachable;
mod usage;

use std::sync::Arc;

use agentloop::plugin::session::PluginClock;
use agentloop::plugin::{ExitStatus, PluginSession};
use jiff::{SignedDuration, Timestamp};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use harness::{NOW, PluginHarness};

const GATE: &str = "e3-t12c1r1";

fn gated(gates: &[&str]) -> Value {
    let gate = |id: &&str| {
        json!({"id": id, "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": format!("hash-of-{id}"),
            "openedAt": NOW})
    };
    json!({"loop": {"state": "Paused", "reasons": ["ToolCallNeedsApproval"]}, "gates": gates.iter().map(gate).collect::<Vec<_>>()})
}

#[tokio::test]
async fn pause_resume_wake_and_stop_write_the_fields_and_annotations_of_the_api() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &json!({"loop": {"state": "Sleeping"}}));
    let done = harness.run("pause helper").await;
    assert_eq!(
        (done.status, harness.agent("helper")["spec"]["suspend"].clone()),
        (ExitStatus::Success, json!(true))
    );
    assert_eq!(harness.server.take_writes(), ["patch agentloop.dev/agents"]);
    assert_eq!(harness.run("pause helper").await.out, "helper is suspended already\n");
    assert_eq!(harness.server.take_writes(), Vec::<String>::new());

    harness.put_agent(
        "helper",
        &json!({"loop": {"state": "Stopped", "reasons": ["SuspendedBySpec"]}}),
    );
    let done = harness.run("resume helper").await;
    assert_eq!(done.out, "helper no longer suspended\n");
    assert_eq!(harness.agent("helper")["spec"]["suspend"], false);
    assert_eq!(harness.agent("helper")["metadata"]["annotations"], Value::Null);

    harness.put_agent(
        "helper",
        &json!({"loop": {"state": "Paused", "reasons": ["ConsecutiveErrors"]}}),
    );
    harness.run("resume helper").await;
    assert_eq!(
        harness.agent("helper")["metadata"]["annotations"],
        json!({"agentloop.dev/resume": NOW})
    );
    harness.run("wake helper").await;
    let annotations = json!({"agentloop.dev/resume": NOW, "agentloop.dev/wake": NOW});
    assert_eq!(harness.agent("helper")["metadata"]["annotations"], annotations);

    harness.put_agent("helper", &json!({"loop": {"state": "Running"}}));
    harness.run("stop helper --now").await;
    let stop = harness.agent("helper")["metadata"]["annotations"]["agentloop.dev/stop"].clone();
    assert_eq!(stop, format!("now:{NOW}"));
    harness.run("stop helper").await;
    let stop = harness.agent("helper")["metadata"]["annotations"]["agentloop.dev/stop"].clone();
    assert_eq!(stop, NOW);
}

#[tokio::test]
async fn each_named_agent_is_processed_even_if_one_does_not_exist() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &json!({}));
    let done = harness.run("pause nobody helper").await;
    assert_eq!(done.status, ExitStatus::Failure);
    assert_eq!(done.err, "error: Agent nobody does not exist in namespace team-a\n");
    assert_eq!(harness.agent("helper")["spec"]["suspend"], true);
}

#[tokio::test]
async fn an_approval_has_the_hash_and_the_user_name_of_the_api_server() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &gated(&[GATE]));
    let done = harness.run("approve helper").await;
    assert_eq!(done.out, format!("helper: approved {GATE} as ann@example.com\n"));
    assert_eq!(
        harness.agent("helper")["metadata"]["annotations"],
        json!({"agentloop.dev/approve": format!("{GATE}:hash-of-{GATE}"), "agentloop.dev/approved-by": "ann@example.com"})
    );
    let refused = harness.run("approve helper no-such-gate").await;
    assert_eq!(refused.status, ExitStatus::Failure);
}

#[tokio::test]
async fn an_ambiguous_answer_writes_nothing() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &gated(&["g1", "g2"]));
    harness.server.take_writes();
    let refused = harness.run("deny helper").await;
    assert_eq!(refused.status, ExitStatus::Usage);
    assert_eq!(
        refused.err,
        "error: helper has several open gates: name one, or use --all; open: g1, g2\n"
    );
    assert_eq!(harness.server.take_writes(), Vec::<String>::new());
    harness.run("deny helper --all").await;
    assert_eq!(
        harness.agent("helper")["metadata"]["annotations"]["agentloop.dev/deny"],
        "g1:hash-of-g1 g2:hash-of-g2"
    );
}

#[tokio::test]
async fn an_answer_is_written_onto_the_version_that_was_read() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &gated(&["g1", "g2"]));
    // Another user approves the other gate between the read and the write: that must not be lost.
    harness
        .interfere(json!({"agentloop.dev/approve": "g2:hash-of-g2", "agentloop.dev/approved-by": "ann@example.com"}));
    let done = harness.run("approve helper g1").await;
    assert_eq!(done.status, ExitStatus::Success, "{}", done.err);
    assert_eq!(
        harness.agent("helper")["metadata"]["annotations"]["agentloop.dev/approve"],
        "g2:hash-of-g2 g1:hash-of-g1"
    );
}

#[tokio::test]
async fn gates_of_a_budget_are_answered_and_top_ups_are_appended() {
    let harness = PluginHarness::start();
    harness.put_budget(
        "team",
        &json!({"gates": [{"id": "b-1", "kind": "BudgetAsk", "argumentsHash": "c0de", "openedAt": NOW}]}),
    );
    let other_kind = harness.run("approve team").await;
    assert_eq!(
        other_kind.err,
        "error: Agent team does not exist in namespace team-a, but an AgentBudget of this name does: add --budget\n"
    );
    let unknown = harness.run("approve nothing").await;
    assert_eq!(unknown.err, "error: Agent nothing does not exist in namespace team-a\n");
    harness.run("approve --budget team").await;
    assert_eq!(
        harness.budget("team")["metadata"]["annotations"]["agentloop.dev/approve"],
        "b-1:c0de"
    );
    let done = harness
        .run("budget top-up team --tokens 50000 --reason incident --id fire")
        .await;
    assert_eq!(done.out, "team: top-up fire added\n");
    let first = json!({"id": "fire", "tokens": 50_000, "reason": "incident"});
    assert_eq!(harness.budget("team")["spec"]["topUps"], json!([first]));
    let again = harness.run("budget top-up team --tokens 50000 --id fire").await;
    assert_eq!(again.out, "team: top-up fire was added before, and counts once\n");
    // Two in one second are two.
    for _ in 0..2 {
        harness.run("budget top-up team --tokens 7").await;
    }
    let all = harness.budget("team")["spec"]["topUps"].clone();
    assert_eq!(all.as_array().unwrap().len(), 3, "{all}");
    assert_eq!(all[0], first);
    for added in [&all[1], &all[2]] {
        assert_eq!(added["tokens"], 7);
        assert!(
            added["id"].as_str().unwrap().starts_with("20261122T140000Z-"),
            "{added}"
        );
    }
    let refused = harness.run("budget top-up team --cost-usd 2.50 --id other").await;
    assert_eq!(refused.status, ExitStatus::Failure);
    assert!(refused.err.contains("team does not limit costUSD"), "{}", refused.err);
}

#[tokio::test]
async fn a_top_up_keeps_unknown_fields_and_is_repeated_after_a_conflict() {
    let harness = PluginHarness::start();
    harness.put_budget("team", &json!({}));
    let newer = json!({"id": "old", "tokens": 5, "expires": NOW});
    harness.server.put(
        "agentloop.dev/agentbudgets",
        json!({"metadata": {"namespace": "team-a", "name": "team"}, "spec": {"topUps": [newer]}}),
    );
    harness.interfere(json!({"other": "client"}));
    let done = harness.run("budget top-up team --tokens 7 --id new").await;
    assert_eq!(done.out, "team: top-up new added\n", "{}", done.err);
    let budget = harness.budget("team");
    assert_eq!(budget["spec"]["topUps"], json!([newer, {"id": "new", "tokens": 7}]));
    assert_eq!(budget["metadata"]["annotations"]["other"], "client");
}

#[tokio::test]
async fn lists_are_tables_or_data_and_of_one_namespace_or_all() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &gated(&[GATE]));
    let status = harness.run("status").await.out;
    assert!(
        status.starts_with("NAME     READY") && status.contains("ToolCallNeedsApproval"),
        "{status}"
    );
    let data: Value = serde_json::from_str(&harness.run("status helper -o json").await.out).unwrap();
    assert_eq!(
        (&data["kind"], &data["metadata"]["name"]),
        (&json!("Agent"), &json!("helper"))
    );
    let list: Value = serde_json::from_str(&harness.run("status -A -o json").await.out).unwrap();
    assert_eq!(
        (&list["kind"], list["items"].as_array().unwrap().len()),
        (&json!("List"), 1)
    );
    let yaml = harness.run("approvals -o yaml").await.out;
    assert!(yaml.contains(&format!("gate: {GATE}\n")), "{yaml}");
    let empty = harness.run("status -n team-b").await;
    assert_eq!(
        (empty.out.as_str(), empty.err.as_str()),
        ("", "No Agents were found in namespace team-b.\n")
    );
    let explained = harness.run("explain helper").await.out;
    assert!(
        explained.contains("kubectl agentloop approve -n team-a helper"),
        "{explained}"
    );
    let missing = harness.run("explain nobody").await;
    assert_eq!(missing.status, ExitStatus::Failure);
}

#[tokio::test]
async fn agents_that_are_found_are_shown_before_the_errors_of_those_that_are_not() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &json!({"loop": {"state": "Running"}}));
    let gone = |name: &str| format!("error: Agent {name} does not exist in namespace team-a\n");
    let done = harness.run("status lost helper gone").await;
    assert_eq!(
        (done.status, done.err),
        (ExitStatus::Failure, gone("lost") + &gone("gone"))
    );
    let lines: Vec<&str> = done.out.lines().collect();
    assert_eq!(lines.len(), 2, "{}", done.out);
    assert!(lines[1].starts_with("helper"), "{}", done.out);
    // As kubectl get: a list if several were asked for, and nothing for one that is not there.
    for (line, found) in [("status helper gone -o json", 1), ("status lost gone -o json", 0)] {
        let done = harness.run(line).await;
        let list: Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!((&list["kind"], done.status), (&json!("List"), ExitStatus::Failure));
        assert_eq!(list["items"].as_array().unwrap().len(), found, "{line}");
    }
    for line in ["status gone", "status gone -o json", "status gone lost"] {
        let done = harness.run(line).await;
        assert_eq!((done.status, done.out.as_str()), (ExitStatus::Failure, ""), "{line}");
        assert!(done.err.starts_with(&gone("gone")), "{}", done.err);
        assert!(!done.err.contains("No Agents"), "{}", done.err);
    }
}

#[tokio::test]
async fn all_namespaces_are_refused_by_what_acts_on_one() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &gated(&[GATE]));
    harness.server.take_writes();
    for line in [
        "status helper",
        "explain helper",
        "approve helper",
        "pause helper",
        "report",
    ] {
        let refused = harness.run(&format!("{line} -A")).await;
        assert_eq!(refused.status, ExitStatus::Usage, "{line}");
        assert!(refused.err.contains("name one namespace with -n"), "{}", refused.err);
    }
    assert_eq!(harness.server.take_writes(), Vec::<String>::new());
}

#[tokio::test]
async fn a_format_is_refused_by_what_does_not_print_it() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &json!({"loop": {"state": "Running"}}));
    harness.server.take_writes();
    for line in [
        "pause helper -o json",
        "approve helper -o yaml",
        "budget top-up team --calls 1 -o json",
        "logs helper -o json",
        "events helper -o yaml",
        "chat helper -o json",
        "report --dry-run -o yaml",
    ] {
        let refused = harness.run(line).await;
        assert_eq!(refused.status, ExitStatus::Usage, "{line}");
        assert!(refused.err.contains("--output (-o)"), "{}", refused.err);
    }
    assert_eq!(harness.server.take_writes(), Vec::<String>::new());
    let done = harness.run("pause helper -o wide").await;
    assert_eq!(done.status, ExitStatus::Success, "{}", done.err);
}

#[tokio::test]
async fn no_objects_are_an_empty_list_in_data_and_a_sentence_otherwise() {
    let harness = PluginHarness::start();
    for (line, list, text, note) in [
        ("status", "/items", "", "No Agents were found in namespace team-a.\n"),
        ("status -A -l team=a", "/items", "", "No Agents were found.\n"),
        ("approvals", "", "No gate is open.\n", ""),
        ("budget top", "", "There are no AgentBudgets.\n", ""),
    ] {
        let done = harness.run(line).await;
        assert_eq!(
            (done.status, &*done.out, &*done.err),
            (ExitStatus::Success, text, note),
            "{line}"
        );
        let done = harness.run(&format!("{line} -o json")).await;
        assert_eq!((done.status, &*done.err), (ExitStatus::Success, ""), "{line}");
        let data: Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!(data.pointer(list), Some(&json!([])), "{line}: {data}");
    }
    for line in ["cost -o json", "cost --by model -o json", "cost --since 1h -o json"] {
        let done = harness.run(line).await;
        assert_eq!(
            (done.status, &*done.out, &*done.err),
            (ExitStatus::Success, "[]\n", ""),
            "{line}"
        );
    }
}

#[tokio::test]
async fn usage_in_a_period_is_also_read_from_budgets_of_the_platform_if_the_user_may() {
    let harness = PluginHarness::start();
    harness.put_agent("helper", &json!({"budgets": [{"name": "agentloop-system/all"}]}));
    let platform = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
        "metadata": {"namespace": "agentloop-system", "name": "all"},
        "spec": {"limits": {"tokens": 1_000}, "window": {"rolling": {"seconds": 3_600}}, "selector": {},
            "namespaceSelector": {}},
        "status": {"ledger": {"watermark": NOW}},
    });
    harness.server.put("agentloop.dev/agentbudgets", platform);
    // The server sets the age of the budget, which must be older than the period.
    let later = || {
        let clock: PluginClock = Arc::new(|| Timestamp::now() + SignedDuration::from_hours(2));
        PluginSession {
            clock,
            ..harness.session()
        }
    };
    let shown = harness::run(later(), "cost --since 1h").await;
    assert!(shown.out.contains("team-a/helper   0 "), "{}", shown.out);
    let partial = harness::run(later(), "cost --since 1h --controller-namespace forbidden").await;
    assert_eq!(partial.status, ExitStatus::Success, "{}", partial.err);
    assert!(
        partial
            .err
            .contains("you may not list agentbudgets in namespace forbidden"),
        "{}",
        partial.err
    );
    assert!(partial.out.contains("this time for: team-a/helper"), "{}", partial.out);
}

#[tokio::test]
async fn a_check_reports_each_prerequisite_and_fails_if_one_is_missing() {
    let harness = PluginHarness::start();
    let done = harness.run("check").await;
    assert_eq!(done.status, ExitStatus::Failure);
    assert!(done.out.contains("Kubernetes 1.33"), "{}", done.out);
    assert!(
        done.out.contains("agents.agentloop.dev         does not exist"),
        "{}",
        done.out
    );
    assert!(done.out.contains("no Deployment of the controller"), "{}", done.out);
    assert!(done.out.contains("not allowed; for approve, deny"), "{}", done.out);
    harness.install();
    let done = harness.run("check").await;
    assert_eq!(done.status, ExitStatus::Success, "{}", done.out);
    assert!(
        done.out.contains("none: set spec.storage.storageClassName"),
        "{}",
        done.out
    );
    harness.server.put(
        "storage.k8s.io/storageclasses",
        json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": "x", "metadata": {"name": "fast",
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}),
    );
    let done = harness.run("check").await;
    assert!(done.out.contains("fast"), "{}", done.out);
    assert!(done.out.contains("a valid Agent is accepted"), "{}", done.out);
    assert!(
        harness.server.list("agentloop.dev/agents").is_empty(),
        "it was a dry run"
    );
    let short = harness.run("check --installation-only").await;
    assert_eq!(short.status, ExitStatus::Success, "{}", short.out);
    assert!(
        short.out.contains("a valid Agent is accepted") && !short.out.contains("allowed; for"),
        "{}",
        short.out
    );
    harness.refuse_new_agents("policy says no");
    let done = harness.run("check").await;
    assert_eq!(done.status, ExitStatus::Failure);
    assert!(
        done.out.contains("a valid Agent is rejected: policy says no"),
        "{}",
        done.out
    );
}

#[tokio::test]
async fn a_report_contains_what_the_user_may_read_and_names_what_is_missing() {
    let harness = PluginHarness::start();
    harness.install();
    harness.put_agent("helper", &gated(&[GATE]));
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "team-a", "name": "helper", "labels": {
        "app.kubernetes.io/name": "agent", "app.kubernetes.io/part-of": "agentloop",
        "app.kubernetes.io/managed-by": "agentloop-controller"}}, "spec": {"containers": []}});
    harness.server.put("/pods", pod);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.zip");
    let line = format!("report --file {}", path.display());
    let dry = harness.run(&format!("{line} --dry-run")).await;
    assert_eq!(dry.status, ExitStatus::Success, "{}", dry.err);
    assert!(dry.err.contains("nothing was written (--dry-run)"), "{}", dry.err);
    assert!(!path.exists());
    let done = harness.run(&line).await;
    assert_eq!(done.out, dry.out, "the list is that of the archive");
    for name in [
        "index.json",
        "agents.json",
        "sensors.json",
        "agentbudgets.json",
        "check.json",
    ] {
        assert!(done.out.contains(&format!("  {name}\n")), "{name}: {}", done.out);
    }
    let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
    let agents: Value = serde_json::from_reader(archive.by_name("agents.json").unwrap()).unwrap();
    assert_eq!(agents[0]["metadata"]["name"], "helper");
    let pods: Value = serde_json::from_reader(archive.by_name("pods.json").unwrap()).unwrap();
    assert!(pods.to_string().contains("helper"), "{pods}");
    let again = harness.run(&line).await;
    assert_eq!(again.status, ExitStatus::Failure);
    assert!(again.err.contains("exists already"), "{}", again.err);
    let forbidden = harness
        .run(&format!(
            "report -n forbidden --file {}",
            dir.path().join("other.zip").display()
        ))
        .await;
    assert_eq!(forbidden.status, ExitStatus::Success, "{}", forbidden.err);
    assert!(
        forbidden.err.contains("not included: agents: you may not read it"),
        "{}",
        forbidden.err
    );
}
