//! The bridge in front of real servers on standard input and output.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use agentloop_mcp::McpRequestError;
use pretty_assertions::assert_eq;
use rmcp::model::{CallToolRequestParams, JsonObject, RequestMetaObject, SubscriptionFilter};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::{Server, TestClient, processes, until};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/");

/// A bridge to the server for failures, and the file with what that server received.
async fn bridged(flags: &[&str]) -> (Server, PathBuf, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("record");
    std::fs::write(&record, "").unwrap();
    let script = format!("{FOLDER}stdio_server.py");
    let program = [&["python3", &script, record.to_str().unwrap()], flags].concat();
    (Server::bridge(&program).await, record, folder)
}

fn received(record: &PathBuf) -> Vec<Value> {
    let text = std::fs::read_to_string(record).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn methods(record: &PathBuf, wanted: &str) -> usize {
    received(record)
        .iter()
        .filter(|message| message["method"] == wanted)
        .count()
}

/// The processes of the server with this record.
fn servers(record: &std::path::Path) -> Vec<u32> {
    processes(record.to_str().unwrap())
        .into_iter()
        .filter(|pid| !is_bridge(*pid))
        .collect()
}

fn is_bridge(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("mcp-bridge")
}

async fn tools(client: &TestClient) -> Vec<String> {
    let tools = agentloop_mcp::tools(client.service.peer()).await.unwrap();
    tools.into_iter().map(|tool| tool.name.to_string()).collect()
}

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

#[tokio::test]
async fn calls_pass_with_their_meta_and_a_second_client_shares_the_server() {
    let (server, record, _folder) = bridged(&[]).await;
    let client = server.client().await;
    assert_eq!(tools(&client).await, ["call"]);
    let mut params = CallToolRequestParams::new("call").with_arguments(JsonObject::new());
    let mut meta = JsonObject::new();
    meta.insert("agentloop.dev/idempotency-key".into(), json!("k"));
    params.meta = Some(RequestMetaObject::from(meta));
    client.service.call_tool_once(params).await.unwrap();
    let calls: Vec<_> = received(&record)
        .into_iter()
        .filter(|message| message["method"] == "tools/call")
        .collect();
    assert_eq!(calls[0]["params"]["_meta"]["agentloop.dev/idempotency-key"], "k");
    let other = server.client().await;
    let answers = futures::future::join_all((0..20).map(|number| {
        let client = if number % 2 == 0 { &client } else { &other };
        client.call("call", json!({"number": number}))
    }));
    for (number, answer) in answers.await.into_iter().enumerate() {
        let params: Value = serde_json::from_str(&answer.ok()).unwrap();
        assert_eq!(params["arguments"]["number"], number);
    }
    assert_eq!(
        (
            methods(&record, "initialize"),
            methods(&record, "notifications/initialized")
        ),
        (1, 1)
    );
    assert_eq!(servers(&record).len(), 1);
}

#[tokio::test]
async fn a_change_of_the_list_and_progress_pass() {
    let (server, _record, _folder) = bridged(&[]).await;
    let mut client = server.client().await;
    client.call("call", json!({"do": "grow"})).await.ok();
    let changed = tokio::time::timeout(Duration::from_secs(20), client.changed.recv());
    assert_eq!(changed.await.unwrap(), Some(()));
    assert_eq!(tools(&client).await, ["call", "more"]);
    // Progress makes the answer a stream, which ends with the result.
    client.call("call", json!({"do": "progress"})).await.ok();
    client.call("call", json!({"do": "noise"})).await.ok();
}

#[tokio::test]
async fn a_dropped_call_is_cancelled_at_the_server() {
    let (server, record, _folder) = bridged(&[]).await;
    let client = server.client().await;
    let call = client.try_call("call", json!({"do": "hang"}));
    let sent = until("it is sent", || (methods(&record, "tools/call") == 1).then_some(()));
    tokio::select! {
        _ = call => panic!("it ended"),
        () = sent => {}
    }
    until("it is cancelled", || {
        (methods(&record, "notifications/cancelled") > 0).then_some(())
    })
    .await;
    let messages = received(&record);
    let called = messages
        .iter()
        .find(|message| message["method"] == "tools/call")
        .unwrap();
    let cancelled = messages
        .iter()
        .find(|message| message["method"] == "notifications/cancelled")
        .unwrap();
    assert_eq!(cancelled["params"]["requestId"], called["id"]);
}

#[tokio::test]
async fn a_server_that_dies_within_a_call_leaves_its_outcome_unknown_and_is_restarted() {
    let (server, record, _folder) = bridged(&[]).await;
    for how in ["die", "progress then die"] {
        let client = server.client().await;
        let first = servers(&record);
        let outcome = client.try_call("call", json!({"do": how})).await;
        assert!(
            matches!(outcome, Err(McpRequestError::NoAnswer(_))),
            "{how}: {outcome:?}"
        );
        // The session ended with the process: the call was certainly not sent, and may be made in a new one.
        let stale = client.try_call("call", json!({})).await;
        assert!(matches!(stale, Err(McpRequestError::NotSent(_))), "{how}: {stale:?}");
        server.client().await.call("call", json!({})).await.ok();
        assert_ne!(servers(&record), first);
    }
}

#[tokio::test]
async fn a_server_killed_between_calls_is_restarted() {
    let (server, record, _folder) = bridged(&[]).await;
    let client = server.client().await;
    kill(servers(&record)[0], Signal::KILL);
    let stale = async {
        matches!(
            client.try_call("call", json!({})).await,
            Err(McpRequestError::NotSent(_) | McpRequestError::NoAnswer(_))
        )
    };
    assert!(stale.await);
    server.client().await.call("call", json!({})).await.ok();
}

#[tokio::test]
async fn a_server_that_cannot_be_started_is_reported_as_down_and_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("server");
    let server = Server::bridge(&[program.to_str().unwrap()]).await;
    let health = server.http().get("http://server/v1/healthz").send().await.unwrap();
    assert_eq!(health.status(), 200, "a new container would not help");
    let initialize = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}});
    let began = Instant::now();
    let answer = server
        .http()
        .post("http://server/mcp")
        .json(&initialize)
        .send()
        .await
        .unwrap();
    assert!(matches!(answer.status().as_u16(), 502 | 503), "{}", answer.status());
    assert!(began.elapsed() < Duration::from_secs(15));
    let record = folder.path().join("record");
    let script = format!("#!/bin/sh\nexec python3 {FOLDER}stdio_server.py {}\n", record.display());
    std::fs::write(folder.path().join("draft"), script).unwrap();
    std::fs::set_permissions(
        folder.path().join("draft"),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    std::fs::rename(folder.path().join("draft"), &program).unwrap();
    let connected = async {
        loop {
            if let Ok(client) = server.try_client().await {
                break client;
            }
        }
    };
    let client = tokio::time::timeout(Duration::from_mins(1), connected).await.unwrap();
    client.call("call", json!({})).await.ok();
}

#[tokio::test]
async fn a_server_that_dies_on_a_discovery_request_is_not_sent_another() {
    let (server, record, _folder) = bridged(&["--dies-unless-initialized"]).await;
    let connected = async {
        loop {
            if let Ok(client) = server.try_client().await {
                break client;
            }
        }
    };
    let client = tokio::time::timeout(Duration::from_secs(20), connected).await.unwrap();
    client.call("call", json!({})).await.ok();
    server.client().await.call("call", json!({})).await.ok();
    assert_eq!(methods(&record, "server/discover"), 1);
}

#[tokio::test]
async fn a_result_above_the_limit_is_an_error_and_the_server_stays() {
    let (server, record, _folder) = bridged(&[]).await;
    let client = server.client().await;
    let first = servers(&record);
    let outcome = client.try_call("call", json!({"do": "long", "bytes": 5_000_000})).await;
    let Err(McpRequestError::Said { words, .. }) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(
        words,
        "it ran, but its result is longer than 4 MiB and was dropped: ask for less"
    );
    let largest = client
        .call("call", json!({"do": "long", "bytes": 4_000_000}))
        .await
        .ok();
    assert_eq!(largest.len(), 4_000_000);
    assert_eq!(servers(&record), first);
    println!(
        "RssAnon {} KiB, VmHWM {} KiB after results of 4 MiB",
        server.memory("RssAnon"),
        server.memory("VmHWM")
    );
}

#[tokio::test]
async fn a_bridge_that_ends_or_is_killed_leaves_no_server() {
    for (signal, seconds) in [(Signal::TERM, "1000.11"), (Signal::KILL, "1000.12")] {
        let (mut server, record, _folder) = bridged(&[]).await;
        let client = server.client().await;
        client
            .call("call", json!({"do": "start", "seconds": seconds}))
            .await
            .ok();
        let started = format!("sleep\0{seconds}");
        until("it started a process", || {
            (!processes(&started).is_empty()).then_some(())
        })
        .await;
        kill(server.process.id(), signal);
        until("the bridge ended", || server.process.try_wait().unwrap()).await;
        until("the server ended", || servers(&record).is_empty().then_some(())).await;
        if signal == Signal::TERM {
            assert_eq!(processes(&started), Vec::<u32>::new());
        }
        // In a container the kernel ends the rest; here it has to be done by hand.
        for pid in processes(&started) {
            kill(pid, Signal::KILL);
        }
    }
}

#[tokio::test]
async fn the_log_of_a_server_is_bounded() {
    let (server, _record, _folder) = bridged(&[]).await;
    let client = server.client().await;
    // More than the pipe and the bound hold: a server that could not log would stop here.
    client.call("call", json!({"do": "log", "bytes": 1_000_000})).await.ok();
    client.call("call", json!({})).await.ok();
}

#[tokio::test]
async fn requests_of_browsers_unknown_sessions_and_broken_messages_are_refused() {
    let (server, _record, _folder) = bridged(&[]).await;
    let client = server.client().await;
    let post = |headers: &[(&'static str, &'static str)], body: &'static str| {
        let mut request = server.http().post("http://server/mcp").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        async move { request.send().await.unwrap().status().as_u16() }
    };
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    assert_eq!(post(&[("origin", "http://evil")], list).await, 403);
    assert_eq!(post(&[("mcp-session-id", "other")], list).await, 404);
    assert_eq!(post(&[], list).await, 400, "the server has a session");
    assert_eq!(post(&[], "[]").await, 400);
    let deleted = server.http().delete("http://server/mcp").send().await.unwrap();
    assert_eq!(deleted.status(), 405);
    assert_eq!(
        server.http().get("http://server/mcp").send().await.unwrap().status(),
        400
    );
    client.call("call", json!({})).await.ok();
}

fn script(name: &str, argument: &str) -> String {
    let path = format!("{}/../../hack/{name}", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(path)
        .arg(argument)
        .stderr(std::process::Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "{name} failed");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().last().unwrap().trim().to_owned()
}

#[tokio::test]
async fn the_mcp_projects_own_server_in_javascript_works_unchanged() {
    if Command::new("npm").arg("--version").output().is_err() {
        let required = std::env::var_os("AGENTLOOP_REQUIRE_CLUSTERS").is_some();
        assert!(!required, "npm is missing");
        eprintln!("SKIPPED: npm is missing");
        return;
    }
    let packages = script("node-env.sh", "mcp-server/everything");
    let entry = format!("{packages}/node_modules/@modelcontextprotocol/server-everything/dist/index.js");
    let server = Server::bridge(&["node", &entry, "stdio"]).await;
    let client = server.client().await;
    let names = tools(&client).await;
    assert!(names.len() > 8 && names.contains(&"get-sum".to_owned()), "{names:?}");
    let sum = client.call("get-sum", json!({"a": 2, "b": 40})).await.ok();
    assert!(sum.contains("42"), "{sum}");
    // With progress notifications in between.
    let long = client
        .call("trigger-long-running-operation", json!({"duration": 1, "steps": 4}))
        .await
        .ok();
    assert!(long.contains("Long running operation completed"), "{long}");
}

#[tokio::test]
async fn the_protocols_own_server_in_python_works_with_the_stateless_revision() {
    let python = script("python-env.sh", "mcp-server/requirements.txt");
    let server = Server::bridge(&[&python, &format!("{FOLDER}newer_server.py")]).await;
    let client = server.client().await;
    assert_eq!(
        client.service.peer_info().unwrap().protocol_version.to_string(),
        "2026-07-28"
    );
    assert_eq!(tools(&client).await, ["add", "grow"]);
    assert_eq!(client.call("add", json!({"a": 2, "b": 40})).await.ok(), "42");
    let filter = SubscriptionFilter::builder().tools_list_changed().build();
    let mut subscription = client.service.listen(filter).await.unwrap();
    client.call("grow", json!({})).await.ok();
    let changed = tokio::time::timeout(Duration::from_secs(20), subscription.next());
    assert!(matches!(changed.await.unwrap(), Ok(Some(_))));
    assert_eq!(tools(&client).await, ["add", "grow", "more"]);
}
