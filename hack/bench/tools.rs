//! What the gateway and the worker's client add to a tool call: `cargo bench --bench tools`, part of `make bench`.
//!
//! A server on loopback answers at once: to plain requests, and to the worker's client behind a gateway, which is a process as in
//! a pod. In turns, so that both see the same machine. Then results of 1 MiB, and what they leave in the gateway's memory.
#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

use std::net::SocketAddr;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::api::tools::ToolsSpec;
use agentloop::engine::ids;
use agentloop::engine::tool::{ToolOutcome, ToolRun, ToolRunId};
use agentloop::link::messages::BudgetTerms;
use agentloop::worker::artifacts::ArtifactStore;
use agentloop::worker::tools::McpTools;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::serve::ListenerExt;
use axum::{Json, Router};
use reqwest::Client;
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

#[path = "leader.rs"]
mod leader;

#[path = "gateway_process.rs"]
mod gateway_process;

#[path = "figures.rs"]
mod figures;

use figures::{figures, say};
use gateway_process::GatewayProcess;
use leader::{aside, listen};

const CALLS: u32 = 2_000;
const WARM: u32 = 200;
const LARGE_RESULTS: u32 = 200;
const LARGE: usize = 1024 * 1024;
const LIMIT: Duration = Duration::from_secs(10);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = format!("http://{}/mcp", server());
    let spec = json!({"servers": [{"name": "bench", "url": server}]});
    let gateway = gateway(&spec).await;
    let spec: ToolsSpec = serde_json::from_value(spec).expect("a spec");
    let path = |name: &str| gateway.directory.path().join(name);
    let store = Arc::new(ArtifactStore::open(&path("journal")));
    let tools = McpTools::new(&spec, &path("socket"), store).expect("a client");
    tools.complete().await;
    let plain = Client::builder().no_proxy().tls_certs_only([]);
    let plain = plain.build().expect("a client needs nothing");
    let (mut direct, mut added) = (Vec::new(), Vec::new());
    for number in 0..WARM + CALLS {
        let one = ask(&plain, &server, number).await;
        let other = run(&tools, number, 100).await;
        if number >= WARM {
            direct.push(one);
            added.push(other.saturating_sub(one));
        }
    }
    figures("tool_call_direct", direct);
    figures("tool_call_adds", added);
    let before = memory(&gateway.process);
    let mut large = Vec::new();
    for number in 0..LARGE_RESULTS {
        large.push(run(&tools, WARM + CALLS + number, LARGE).await);
    }
    figures("tool_call_of_1_mib", large);
    say(&format!(
        "FIGURE gateway_rss_with_1_mib_results {:.1} MiB of its own, {before:.1} before",
        memory(&gateway.process)
    ));
}

/// A plain request, from the first byte sent to the last one read.
async fn ask(client: &Client, server: &str, number: u32) -> Duration {
    let body = json!({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": "echo", "arguments": {"bytes": 100}}});
    let start = Instant::now();
    let answer = client.post(server).json(&body).send().await.expect("it answers");
    let answer: Value = answer.json().await.expect("it answers whole");
    let taken = start.elapsed();
    assert!(answer["result"]["content"].is_array(), "{answer}");
    taken
}

/// A run of the worker's client.
async fn run(tools: &McpTools, number: u32, bytes: usize) -> Duration {
    let spec = tools.watch().borrow().specs[0].clone();
    let arguments: Map<String, Value> = [("bytes".to_owned(), json!(bytes))].into_iter().collect();
    let run = ToolRun {
        id: ToolRunId {
            member: ids::MAIN,
            turn: i64::from(number) + 1,
            call: 1,
            index: 1,
        },
        name: spec.name,
        target: spec.target,
        definition: spec.definition.map(|definition| definition.hash).unwrap_or_default(),
        arguments,
        idempotency_key: format!("{number:032x}"),
        max_result_bytes: 32 * 1024,
    };
    let start = Instant::now();
    let finished = tools.run(run, LIMIT).await;
    let taken = start.elapsed();
    let is_whole = matches!(&finished.outcome, ToolOutcome::Done { text } if text.len() == bytes);
    assert!(is_whole, "{:?}", finished.outcome);
    taken
}

/// An MCP server that needs no time.
fn server() -> SocketAddr {
    let (listener, address) = listen();
    aside(|| async {
        let listener = TcpListener::from_std(listener).expect("it can be awaited");
        let router = Router::new().route(
            "/mcp",
            post(|Json(request): Json<Value>| async move { answer(&request) }),
        );
        axum::serve(listener.tap_io(|stream| drop(stream.set_nodelay(true))), router)
            .await
            .expect("the server serves");
    });
    address
}

fn answer(request: &Value) -> Response {
    let params = &request["params"];
    let result = match request["method"].as_str() {
        Some("initialize") => json!({
            "protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
            "serverInfo": {"name": "bench", "version": "1"},
        }),
        Some("tools/list") => {
            let schema = json!({"type": "object", "properties": {"bytes": {"type": "integer"}}});
            json!({"tools": [{"name": "echo", "description": "So many bytes.", "inputSchema": schema}]})
        }
        Some("tools/call") => {
            let bytes = params["arguments"]["bytes"].as_u64().unwrap_or(0);
            let text = "x".repeat(usize::try_from(bytes).expect("a small number"));
            json!({"content": [{"type": "text", "text": text}]})
        }
        _ if request.get("id").is_none() => return StatusCode::ACCEPTED.into_response(),
        _ => {
            let error = json!({"code": -32601, "message": "method not found"});
            return Json(json!({"jsonrpc": "2.0", "id": request["id"], "error": error})).into_response();
        }
    };
    Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result})).into_response()
}

/// A gateway of an Agent with these tools.
async fn gateway(tools: &Value) -> GatewayProcess {
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory can be written");
    let spec =
        json!({"model": {"api": "OpenAIChat", "name": "m", "baseURL": "http://127.0.0.1:1/v1/"}, "tools": tools});
    GatewayProcess::start(spec, directory, BudgetTerms::default()).await
}

/// The private memory of a process, in MiB.
fn memory(process: &Child) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).expect("a size");
    kib.parse::<f64>().expect("a number") / 1024.0
}
