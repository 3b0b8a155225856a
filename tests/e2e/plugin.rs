//! The kubectl plugin on a real cluster: a viewer, an editor, an approver and an administrator, each with the role that the
//! chart gives and over a port-forward to the leader.

use std::process::Command;

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::budgets;
use super::cluster::{Namespace, shared};
use super::plugin_user::PluginUser;
use crate::support::clusters;
use crate::support::kubectl::{Ended, Kubectl};
use crate::tools::python::{self, Edition, McpServer};

/// Stands in each text that only the model, its tools and its users may see.
const CANARY: &str = "canary-plugin-5d0e";

/// A call that a person must approve, a sleep, and the answers to a request and two lines of a chat.
fn turns() -> Value {
    let note = json!({"name": "hub__note", "arguments": {"text": CANARY}});
    json!({"turns": [
        {"text": format!("I write {CANARY}."), "toolCalls": [note]},
        {"yield": {"sleep": 3600, "reason": CANARY}},
        {"text": format!("To the request: {CANARY}.")},
        {"text": "To the first line."},
        {"text": "To the second line."},
        {"yield": {"sleep": 3600}},
    ]})
}

fn spec(server: &McpServer) -> Value {
    let hub = json!({
        "name": "hub", "url": server.url(), "requiredGrant": "notes", "tools": [{"name": "note", "approval": "Always"}],
    });
    json!({"instructions": format!("Be {CANARY}."), "tools": {"servers": [hub], "grants": ["notes"]}})
}

/// Who uses the plugin.
struct People {
    viewer: PluginUser,
    editor: PluginUser,
    approver: PluginUser,
    administrator: PluginUser,
}

impl People {
    fn new(system: &Kubectl, kubectl: &Kubectl) -> Self {
        let person = |name: &str, role: &str| PluginUser::new(system, kubectl, name, &[role]);
        Self {
            viewer: person("viewer", "view"),
            editor: person("editor", "edit"),
            approver: person("approver", "agentloop-approver"),
            administrator: person("administrator", "admin"),
        }
    }

    /// Only an approver approves.
    fn approve(&self, server: &McpServer) {
        let explained = self.viewer.until_ok(&["explain", "helper"]);
        assert!(explained.contains("kubectl agentloop approve -n "), "{explained}");
        let refused = self.viewer.refused(&["approve", "helper"]);
        assert!(refused.contains("patch"), "{refused}");
        self.editor.until_ok(&["status", "helper"]);
        let refused = self.editor.refused(&["approve", "helper"]);
        assert!(refused.contains("approve"), "{refused}");
        assert!(server.records().is_empty());
        self.approver.until_ok(&["approve", "helper"]);
    }

    /// Requests, one of them twice, and a chat.
    fn talk(&self) {
        let ask = ["run", "helper", "--prompt", CANARY, "--id", "first"];
        let answer = format!("To the request: {CANARY}.");
        assert_eq!(self.editor.until_ok(&ask).trim(), answer);
        assert_eq!(self.editor.ok(&ask).trim(), answer, "a repetition is not another task");
        let chat = self.editor.run_with_input(&["chat", "helper"], "one\ntwo\n");
        assert!(chat.success, "{}", chat.stderr);
        let lines = ["To the first line.", "To the second line."].map(|line| chat.stdout.find(line));
        assert!(lines[0].is_some() && lines[0] < lines[1], "{}", chat.stdout);
        let refused = self.viewer.refused(&["run", "helper", "--prompt", "x"]);
        assert!(refused.contains("agents/messages"), "{refused}");
    }

    /// What readers see, which has no texts of the agent.
    fn read(&self) {
        let mut shown = Vec::new();
        for args in [
            &["status", "-o", "wide"][..],
            &["explain", "helper"],
            &["approvals"],
            &["cost", "--by", "model"],
            &["cost", "--since", "1h"],
            &["budget", "top"],
            &["check"],
            &["logs", "helper"],
            &["events", "helper"],
            &["history", "helper"],
        ] {
            let text = self.viewer.ok(args);
            assert!(text.len() > 10, "{}: {text}", args.join(" "));
            shown.push(text);
        }
        // The whole object, which has the instructions.
        let object: Value = serde_json::from_str(&self.viewer.ok(&["status", "helper", "-o", "json"])).unwrap();
        assert_eq!(object["status"]["loop"]["state"], "Sleeping");
        let history = shown.last().unwrap();
        assert!(history.lines().count() >= 5, "{history}");
        let refused = self.viewer.refused(&["events", "helper", "--messages"]);
        assert!(refused.contains("agents/messages"), "{refused}");
        let report = self.administrator.report();
        for name in ["index.json", "agents.json", "agentbudgets.json", "events.json"] {
            assert!(report.iter().any(|(file, _)| file == name), "no {name}");
        }
        shown.extend(report.into_iter().map(|(_, content)| content));
        shown.push(
            self.administrator
                .ok(&["simulate", "helper", "--set", "limits.calls=2"]),
        );
        for text in &shown {
            assert!(!text.contains(CANARY), "{text}");
        }
    }

    /// A kubeconfig with a client certificate authenticates to the API server only; a service account's token serves instead.
    fn read_with_a_certificate(kubectl: &Kubectl) {
        let admin = clusters::node().unwrap();
        assert!(std::fs::read_to_string(&admin).unwrap().contains("client-certificate"));
        let run = |more: &[&str]| -> Ended {
            let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
            command
                .args(["kubectl", "logs", "helper", "-n", kubectl.namespace()])
                .args(more);
            command.env("KUBECONFIG", &admin).output().unwrap().into()
        };
        let refused = run(&[]);
        assert!(
            !refused.success && refused.stderr.contains("kubectl create serviceaccount loop-user"),
            "{}",
            refused.stderr
        );
        let read = run(&["--service-account", "viewer"]);
        assert!(read.success && read.stdout.contains("total "), "{}", read.stderr);
    }

    /// Pause, stop, and their opposites.
    fn hold(&self, agent: &Agent<'_>) {
        assert!(self.viewer.refused(&["pause", "helper"]).contains("patch"));
        self.editor.ok(&["pause", "helper"]);
        agent.kubectl.until_gone("pod", "helper", 60);
        self.editor.ok(&["resume", "helper"]);
        agent.until_state("Sleeping", 120);
        self.editor.ok(&["stop", "helper"]);
        agent.until("its end", 60, |agent| {
            (agent["status"]["loop"]["outcome"] == "Cancelled").then_some(())
        });
        agent.kubectl.until_gone("pod", "helper", 60);
        self.editor.ok(&["wake", "helper"]);
        agent.until_state("Sleeping", 120);
    }

    /// An id adds to the limits once.
    fn top_up(&self, kubectl: &Kubectl) {
        let command = ["budget", "top-up", "team", "--calls", "7", "--id", "once"];
        assert!(self.editor.refused(&command).contains("agentbudgets"));
        for _ in 0..2 {
            self.administrator.ok(&command);
        }
        let budget = kubectl.get("agentbudgets.agentloop.dev", "team").unwrap();
        assert_eq!(budget["spec"]["topUps"].as_array().map(Vec::len), Some(1), "{budget}");
    }
}

#[test]
fn viewer_editor_approver_and_administrator_use_the_plugin_against_a_real_cluster() {
    let Some(cluster) = shared().filter(|_| python::is_there()) else {
        return;
    };
    let server = McpServer::for_pods(Edition::Newer);
    let namespace = Namespace::new(&cluster.system, "plugin");
    let kubectl = &namespace.kubectl;
    let budget = json!({"selector": {}, "limits": {"calls": 100}, "window": {"rolling": {"seconds": 3600}}});
    kubectl.apply(&budgets::manifest("team", &budget));
    kubectl.apply(&script("plan", &turns()));
    let agent = Agent::apply(&namespace, "helper", &scripted("plan"), &spec(&server));
    let people = People::new(&cluster.system, kubectl);
    agent.until_condition("Ready", "True", "AwaitingApproval", 120);
    people.approve(&server);
    agent.until_state("Sleeping", 120);
    let did: Vec<_> = server
        .records()
        .into_iter()
        .map(|record| record["what"].clone())
        .collect();
    assert_eq!(did, [json!(format!("note {CANARY}"))]);
    people.talk();
    // A state that lasts is written after up to 15 s.
    agent.until_state("Sleeping", 60);
    people.read();
    People::read_with_a_certificate(kubectl);
    people.hold(&agent);
    people.top_up(kubectl);
}
