//! Tools of a real MCP server, from a pod on the node and in local mode: the same script takes the same actions.

use std::process::{Command, Stdio};

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, manifest, script, scripted};
use super::cluster::{Namespace, shared};
use crate::tools::python::{self, Edition, McpServer};

const TOKEN: &str = "Bearer canary-tool-token";

/// Two actions and a look, in two turns, and the end.
fn turns() -> Value {
    let note = |text: &str| json!({"name": "hub__note", "arguments": {"text": text}});
    let add = json!({"name": "hub__add", "arguments": {"a": 1, "b": 2}});
    json!({"turns": [
        {"text": "I begin.", "toolCalls": [note("one"), add]},
        {"text": "That is done."},
        {"toolCalls": [note("two")]},
        {"yield": {"mode": "shutdown", "reason": "all is done"}},
    ]})
}

fn secret() -> String {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"Authorization": TOKEN}})
        .to_string()
}

fn spec(server: &McpServer) -> Value {
    let hub = json!({"name": "hub", "url": server.url(), "trusted": true, "headersSecretRef": {"name": "hub"}});
    json!({"tools": {"servers": [hub]}})
}

/// What the server was asked to do, and with which header.
fn acts(server: &McpServer) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let records = server.records();
    records
        .iter()
        .map(|record| (text(&record["what"]), text(&record["authorization"])))
        .collect()
}

fn expected() -> Vec<(String, String)> {
    ["note one", "add", "note two"]
        .map(|what| (what.to_owned(), TOKEN.to_owned()))
        .to_vec()
}

/// Runs the script without a cluster; outcome, turns and the last line of the Agent.
fn locally(server: &McpServer) -> (String, i64) {
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("all.yaml");
    let all = [
        script("tools", &turns()),
        secret(),
        manifest("tools", &scripted("tools"), &spec(server)),
    ];
    std::fs::write(&file, all.join("\n---\n")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .args(["run".as_ref(), "-f".as_ref(), file.as_os_str()])
        .args(["--duration", "60", "--state"])
        .arg(folder.path().join("state"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert!(output.status.success(), "{out}\n{err}");
    assert!(!out.contains("canary") && !err.contains("canary"), "{out}\n{err}");
    let mut lines = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let last = lines
        .rfind(|line| line["type"] == "agent")
        .expect("a line of the Agent");
    (
        last["outcome"].as_str().unwrap_or_default().to_owned(),
        last["turnsCompleted"].as_i64().unwrap(),
    )
}

#[test]
fn local_mode_runs_the_tools_of_a_server_as_scripted() {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(Edition::Newer, &[]);
    assert_eq!(locally(&server), ("Completed".to_owned(), 2));
    assert_eq!(acts(&server), expected());
}

#[test]
fn the_same_script_performs_the_same_actions_on_the_node_and_in_local_mode() {
    let Some(cluster) = shared().filter(|_| python::is_there()) else {
        return;
    };
    let (of_pod, of_local) = (McpServer::for_pods(Edition::Newer), McpServer::for_pods(Edition::Newer));
    let namespace = Namespace::new(&cluster.system, "tools");
    namespace.kubectl.apply(&script("tools", &turns()));
    namespace.kubectl.apply(&secret());
    let agent = Agent::apply(&namespace, "tools", &scripted("tools"), &spec(&of_pod));
    let ended = agent.until("an end", 120, |agent| {
        (agent["status"]["loop"]["outcome"] == "Completed").then(|| agent.clone())
    });
    let usage = &ended["status"]["usage"];
    let (turns, runs, actions) = (&usage["turns"], &usage["toolCalls"], &usage["actions"]);
    assert_eq!((turns, runs, actions), (&json!(2), &json!(3), &json!(2)), "{usage}");
    assert_eq!(acts(&of_pod), expected());
    assert_eq!(locally(&of_local), ("Completed".to_owned(), 2));
    assert_eq!(acts(&of_local), acts(&of_pod));
}
