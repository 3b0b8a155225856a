//! The example, from its manifest to the transcript: a scripted model, a real gateway, a real worker, a real server.

use std::fs::File;

use agentloop::api::status::LoopState;
use agentloop::link::pod::CONFIG_ENV;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::process::Command;

use super::TOKEN;
use super::python::{self, Edition, McpServer};
use crate::gateway::harness::{GatewayHarness, write};
use crate::schema::reader::documents;

/// The documents of the example, by kind.
fn example(kind: &str) -> Value {
    let all = documents("examples").into_iter();
    let mut of_file = all.filter(|(path, _)| path.ends_with("/tools.yaml"));
    of_file.find(|(_, document)| document["kind"] == kind).unwrap().1
}

#[tokio::test]
async fn the_example_calls_its_tool_and_the_result_reaches_the_transcript_and_the_secret_nothing() {
    if !python::is_there() {
        return;
    }
    let server = McpServer::start(Edition::Newer, &[]);
    let mut spec = example("Agent")["spec"].clone();
    spec["tools"]["servers"][0]["url"] = server.url().into();
    spec["loop"] = json!({"minDelayMilliseconds": 1});

    let mut harness = GatewayHarness::new().await;
    harness.model = spec["model"].clone();
    harness.tools = spec["tools"].clone();
    let script = example("ConfigMap")["data"]["script.yaml"].as_str().unwrap().to_owned();
    write(&harness.path("script"), &script);
    let headers = example("Secret")["stringData"].clone();
    for (header, value) in headers.as_object().unwrap() {
        let value = value.as_str().unwrap().replace("Bearer replace-me", TOKEN);
        harness.write_header("calculator", header, &value);
    }
    harness.start().await;

    let log = File::create(harness.path("worker-log")).unwrap();
    let config = json!({
        "namespace": "ns", "name": "a", "uid": "agent-uid", "epoch": 3, "linkUrl": "https://unused", "spec": spec,
    });
    let mut worker = Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .arg("worker")
        .env("RUST_LOG", "trace,hyper=info")
        .env(CONFIG_ENV, config.to_string())
        .env("AGENTLOOP_POD_UID", "pod-3")
        .env("AGENTLOOP_SOCKET", harness.path("gateway.sock"))
        .env("AGENTLOOP_JOURNAL_DIR", harness.path("journal"))
        .env("AGENTLOOP_DRAIN_SECONDS", "1")
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let asleep = |report: &agentloop::link::messages::PodReport| {
        report
            .loop_
            .as_ref()
            .is_some_and(|said| said.state == LoopState::Sleeping)
    };
    harness.controller.until("asleep", asleep).await;
    worker.kill().await.unwrap();

    assert_eq!(server.did(), ["add"]);
    assert_eq!(server.records()[0]["authorization"], TOKEN);
    let journal = harness.path("journal").join("journal.sqlite");
    let connection = rusqlite::Connection::open(journal).unwrap();
    let mut query = connection.prepare("SELECT json FROM messages ORDER BY rowid").unwrap();
    let rows = query.query_map([], |row| row.get::<_, String>(0)).unwrap();
    let messages: Vec<Value> = rows.map(|row| serde_json::from_str(&row.unwrap()).unwrap()).collect();
    let result = messages.iter().find(|message| message["role"] == "tool").unwrap();
    assert_eq!(result["text"], "3");

    // Nothing that was kept, logged or said holds what the Secret holds.
    let mut kept = vec![
        harness.log(),
        serde_json::to_string(&harness.controller.reports()).unwrap(),
    ];
    for directory in ["", "journal", "record"] {
        for entry in std::fs::read_dir(harness.path(directory)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                kept.push(String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned());
            }
        }
    }
    assert!(kept.iter().any(|text| text.contains("calculator__add")));
    assert!(kept.iter().all(|text| !text.contains("canary-tool-token")));
}
