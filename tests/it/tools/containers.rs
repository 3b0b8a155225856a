//! Tools in containers of the pod, as processes: the toolbox and the bridge on Unix sockets, and a server on a port.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use agentloop::api::agent::LimitedResource;
use agentloop::engine::tool::{ToolEffect, ToolOutcome};
use agentloop::worker::tools::McpTools;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::python::{Edition, McpServer};
use super::{LONG, done, run};
use crate::gateway::harness::GatewayHarness;

/// A process that ends with the test.
struct Role(Child);

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a role of the binary, which listens where the gateway looks for the server.
fn role(harness: &GatewayHarness, server: &str, args: &[&str]) -> Role {
    let folder = harness.path("tool-sockets").join(server);
    std::fs::create_dir_all(&folder).unwrap();
    let (role, rest) = args.split_first().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
    command
        .arg(role)
        .arg(format!("--listen=unix:{}", folder.join("mcp.sock").display()));
    Role(command.args(rest).stdin(Stdio::null()).spawn().unwrap())
}

async fn tools(harness: &mut GatewayHarness, spec: Value) -> Arc<McpTools> {
    harness.tools = spec;
    harness.start().await;
    let spec = serde_json::from_value(harness.tools.clone()).unwrap();
    let tools = super::tools(harness, &spec);
    tokio::time::timeout(LONG, tools.complete())
        .await
        .expect("all servers answer");
    tools
}

#[tokio::test]
async fn the_toolbox_is_reached_on_its_socket_and_its_bytes_are_reported() {
    let mut harness = GatewayHarness::new().await;
    let workspace = harness.path("workspace");
    std::fs::create_dir(&workspace).unwrap();
    let root = format!("--root={}", workspace.display());
    let _toolbox = role(&harness, "toolbox", &["toolbox", &root, "--tools=shell,files"]);
    let spec = json!({
        "builtin": ["Shell", "Files"], "approval": {"default": "Never"},
        "toolbox": {"image": "i", "tools": [{"name": "shell", "timeoutSeconds": 90}, {"name": "edit_file", "effect": "Write"}]},
    });
    let tools = tools(&mut harness, spec).await;
    let offered = tools.watch().borrow().clone();
    let rules: Vec<_> = offered
        .specs
        .iter()
        .map(|spec| (spec.name.as_str(), spec.effect, spec.timeout.as_secs()))
        .collect();
    assert_eq!(
        rules,
        [
            ("toolbox__edit_file", ToolEffect::Write, 60),
            ("toolbox__list_directory", ToolEffect::Read, 60),
            ("toolbox__read_file", ToolEffect::Read, 60),
            ("toolbox__search_files", ToolEffect::Read, 60),
            ("toolbox__shell", ToolEffect::Destructive, 90),
            ("toolbox__write_file", ToolEffect::Destructive, 60),
            ("artifact_read", ToolEffect::Read, 30),
        ]
    );
    let call = |tool: &str, arguments: Value| {
        let mut wanted = run(tool, arguments);
        wanted.name = format!("toolbox__{tool}");
        tools.run(wanted, LONG)
    };
    let written = call("write_file", json!({"path": "a", "content": "hello"})).await;
    assert!(matches!(written.outcome, ToolOutcome::Done { .. }), "{written:?}");
    let [(LimitedResource::DiskWriteBytes, bytes)] = written.used[..] else {
        panic!("{written:?}")
    };
    assert!(bytes >= 5, "{bytes}");
    let read = call("read_file", json!({"path": "a"})).await;
    assert_eq!((read.outcome, read.used), (done("hello"), vec![]));
    let outside = call("read_file", json!({"path": "../key"})).await.outcome;
    assert!(matches!(outside, ToolOutcome::Failed { .. }), "{outside:?}");
}

#[tokio::test]
async fn a_server_is_reached_through_the_bridge_or_on_its_port_and_its_byte_counts_are_ignored() {
    if !super::python::is_there() {
        return;
    }
    let server = McpServer::start(Edition::Newer, &[]);
    let port: u16 = server.url().rsplit([':', '/']).nth(1).unwrap().parse().unwrap();
    let mut harness = GatewayHarness::new().await;
    let script = harness.path("server.sh");
    // A server that claims to have written.
    std::fs::write(&script, CLAIMS).unwrap();
    let _bridge = role(
        &harness,
        "std",
        &["mcp-bridge", "--", "python3", script.to_str().unwrap()],
    );
    let spec = json!({"servers": [
        {"name": "std", "container": {"image": "i", "command": ["python3"]}},
        {"name": "hub", "container": {"image": "i", "port": port}},
    ]});
    let tools = tools(&mut harness, spec).await;
    assert_eq!(
        tools.run(run("add", json!({"a": 1, "b": 2})), LONG).await.outcome,
        done("3")
    );
    let mut claims = run("claim", json!({}));
    claims.name = "std__claim".into();
    let claimed = tools.run(claims, LONG).await;
    assert_eq!((claimed.outcome, claimed.used), (done("written"), vec![]));
}

#[tokio::test]
async fn a_container_that_is_not_there_costs_a_wait_and_its_field_is_named() {
    let mut harness = GatewayHarness::new().await;
    harness.tools = json!({"servers": [{"name": "std", "container": {"image": "i", "command": ["x"]}}]});
    harness.start().await;
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    let response = harness
        .worker
        .post(crate::gateway::harness::url("/v1/mcp/std"))
        .json(&request)
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 502);
    let message = response.text().await.unwrap();
    assert!(
        message.starts_with("the server at spec.tools.servers[std].container cannot be reached: "),
        "{message}"
    );
}

/// A server that speaks over standard input and output.
const CLAIMS: &str = r#"
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method = message["method"]
    if method == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "claims", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "claim", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "written"}], "_meta": {"agentloop.dev/disk-write-bytes": 10**12}}
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "unknown"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"#;
