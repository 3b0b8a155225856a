//! The way to tool servers: what passes, what is added, and what is refused.

use std::time::Duration;

use agentloop::link::messages::Directives;
use agentloop::link::socket::{MCP_FAILURE_HEADER, NO_ANSWER, NOT_SENT};
use pretty_assertions::assert_eq;
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use super::harness::{GatewayHarness, KEY, url};
use super::provider::{STREAM_HEAD, STREAM_TAIL, ScriptedResponse, Step, send};

const TOKEN: &str = "Bearer canary-tool-token";

/// A gateway whose spec names the provider as the tool server `hub`, with a Secret of headers.
async fn started() -> GatewayHarness {
    let mut harness = GatewayHarness::new().await;
    let address = harness.provider.address;
    harness.tools = json!({"servers": [
        {"name": "hub", "url": format!("http://{address}/mcp?set=all"), "headersSecretRef": {"name": "s"}},
        {"name": "plain", "url": format!("http://{address}/plain")},
        {"name": "gone", "url": "http://127.0.0.1:9/mcp"},
    ]});
    harness.write_header("hub", "Authorization", &format!("{TOKEN}\n"));
    harness.start().await;
    harness
}

fn call() -> Value {
    json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t"}})
}

async fn post(harness: &GatewayHarness, server: &str, body: &Value) -> Response {
    let request = harness.worker.post(url(&format!("/v1/mcp/{server}"))).json(body);
    let request = request.header("mcp-session-id", "s1").header("x-other", "dropped");
    request.send().await.unwrap()
}

/// The failure that the gateway itself reports.
async fn failure(response: Response) -> (String, String) {
    let kind = response.headers()[MCP_FAILURE_HEADER].to_str().unwrap().to_owned();
    (kind, response.text().await.unwrap())
}

#[tokio::test]
async fn a_request_passes_with_the_headers_of_the_protocol_and_those_of_the_secret() {
    let harness = started().await;
    let act = ScriptedResponse::json(200, "{}").with("mcp-session-id", "s2");
    harness
        .provider
        .will(act.with("set-cookie", "a=b").with(MCP_FAILURE_HEADER, NOT_SENT));
    let response = post(&harness, "hub", &call()).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["mcp-session-id"], "s2");
    for header in ["set-cookie", MCP_FAILURE_HEADER] {
        assert!(!response.headers().contains_key(header), "{header} is the server's own");
    }
    assert_eq!(response.text().await.unwrap(), "{}");
    let seen = &harness.provider.seen()[0];
    assert_eq!((seen.path.as_str(), seen.body.clone()), ("/mcp", call().to_string()));
    assert_eq!(seen.headers["authorization"], TOKEN);
    assert_eq!(seen.headers["mcp-session-id"], "s1");
    assert_eq!(seen.headers["content-type"], "application/json");
    assert!(!seen.headers.contains_key("x-other"));
    post(&harness, "plain", &call()).await;
    assert!(!harness.provider.seen()[1].headers.contains_key("authorization"));
    assert!(!harness.log().contains("canary-tool-token"));
}

#[tokio::test]
async fn a_stream_passes_unbuffered() {
    let harness = started().await;
    harness.provider.will(ScriptedResponse::stream(vec![
        send(STREAM_HEAD),
        Step::Hold,
        send(STREAM_TAIL),
    ]));
    let mut response = post(&harness, "hub", &call()).await;
    assert_eq!(response.chunk().await.unwrap().unwrap(), STREAM_HEAD);
    harness.provider.release();
    assert_eq!(response.text().await.unwrap(), STREAM_TAIL);
}

#[tokio::test]
async fn a_request_ends_at_the_server_when_the_worker_leaves_also_before_there_is_an_answer() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut harness = GatewayHarness::new().await;
    let address = listener.local_addr().unwrap();
    harness.tools = json!({"servers": [{"name": "silent", "url": format!("http://{address}/")}]});
    harness.start().await;
    let request = harness.worker.post(url("/v1/mcp/silent")).json(&call()).send();
    let left = tokio::spawn(request);
    let (mut connection, _) = listener.accept().await.unwrap();
    let mut bytes = [0; 4096];
    assert!(connection.read(&mut bytes).await.unwrap() > 0);
    left.abort();
    let read_on = async { while connection.read(&mut bytes).await.is_ok_and(|read| read > 0) {} };
    let ended = tokio::time::timeout(Duration::from_secs(10), read_on).await;
    ended.expect("the gateway holds on to a request that nobody waits for");
}

#[tokio::test]
async fn undelivered_requests_are_distinguished_from_unanswered_ones() {
    let harness = started().await;
    let (kind, words) = failure(post(&harness, "gone", &call()).await).await;
    assert_eq!(kind, NOT_SENT);
    assert!(
        words.contains("spec.tools.servers[gone].url cannot be reached"),
        "{words}"
    );
    let (kind, words) = failure(post(&harness, "unnamed", &call()).await).await;
    assert_eq!(
        (kind.as_str(), words.as_str()),
        (NOT_SENT, "spec.tools.servers has no server of this name")
    );
    // A server that takes the request, and closes.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut harness = GatewayHarness::new().await;
    let address = listener.local_addr().unwrap();
    harness.tools = json!({"servers": [{"name": "rude", "url": format!("http://{address}/")}]});
    harness.start().await;
    let accept = tokio::spawn(async move { drop(listener.accept().await.unwrap()) });
    let (kind, words) = failure(post(&harness, "rude", &call()).await).await;
    accept.await.unwrap();
    assert_eq!(kind, NO_ANSWER);
    assert!(words.contains("closed the connection"), "{words}");
}

#[tokio::test]
async fn a_redirect_is_not_followed_and_forwards_no_header() {
    let harness = started().await;
    let elsewhere = format!("http://{}/elsewhere", harness.provider.address);
    harness
        .provider
        .will(ScriptedResponse::json(307, "").with("location", elsewhere));
    let response = post(&harness, "hub", &call()).await;
    assert_eq!(response.status(), StatusCode::TEMPORARY_REDIRECT);
    assert!(!response.headers().contains_key("location"));
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn headers_are_read_for_each_request_and_a_bad_secret_is_named_without_its_values() {
    let harness = started().await;
    harness.write_header("hub", "Authorization", "rotated");
    harness.write_header("hub", "..data", "the kubelet's own");
    post(&harness, "hub", &call()).await;
    assert_eq!(harness.provider.seen()[0].headers["authorization"], "rotated");
    for (header, value, says) in [
        (
            "Host",
            "canary",
            "one of the keys of the Secret of spec.tools.servers[hub].headersSecretRef is not an allowed header name",
        ),
        (
            "X-Two",
            "canary\nlines",
            "one of the values of the Secret of spec.tools.servers[hub].headersSecretRef is not a single short line of text",
        ),
    ] {
        harness.write_header("hub", header, value);
        let (kind, words) = failure(post(&harness, "hub", &call()).await).await;
        assert_eq!(kind, NOT_SENT);
        assert!(words.contains("spec.tools.servers[hub].headersSecretRef"), "{words}");
        assert!(words.contains(says) && !words.contains("canary"), "{words}");
        std::fs::remove_file(harness.path("tool-headers").join("hub").join(header)).unwrap();
    }
    std::fs::remove_dir_all(harness.path("tool-headers")).unwrap();
    let (_, words) = failure(post(&harness, "hub", &call()).await).await;
    assert!(words.contains("cannot be read"), "{words}");
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn a_pod_that_must_not_act_runs_no_tool_but_may_cancel_and_list() {
    let harness = started().await;
    harness.controller.direct(Directives {
        suspend: true,
        ..Directives::default()
    });
    let (kind, words) = loop {
        let response = post(&harness, "hub", &call()).await;
        if response.headers().contains_key(MCP_FAILURE_HEADER) {
            break failure(response).await;
        }
    };
    assert_eq!(kind, NOT_SENT);
    assert!(words.contains("suspended"), "{words}");
    let before = harness.provider.seen().len();
    for method in ["notifications/cancelled", "tools/list"] {
        let other = json!({"jsonrpc": "2.0", "method": method});
        assert_eq!(post(&harness, "hub", &other).await.status(), StatusCode::OK);
    }
    // Two methods in one request, or several requests in one: readers might not agree on which counts.
    let twice = r#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call"}"#;
    let many = json!([call()]).to_string();
    for odd in [twice, &many, "tools/call"] {
        let request = harness.worker.post(url("/v1/mcp/hub")).body(odd.to_owned());
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{odd}");
    }
    assert_eq!(harness.provider.seen().len(), before + 2);
}

#[tokio::test]
async fn a_secret_echoed_by_a_server_is_redacted_in_answers_and_across_pieces_of_a_stream() {
    let harness = started().await;
    let said =
        format!(r#"{{"headers":{{"authorization":"{TOKEN}"}},"key":"{KEY}","base64":"Y2FuYXJ5LXRvb2wtdG9rZW4="}}"#);
    harness.provider.will(ScriptedResponse::json(200, &said));
    let answer = post(&harness, "hub", &call()).await.text().await.unwrap();
    let redacted = r#"{"headers":{"authorization":"[redacted]"},"key":"[redacted]","base64":"[redacted]="}"#;
    assert_eq!(answer, redacted);
    // Another server may know it too.
    harness.provider.will(ScriptedResponse::json(403, &said));
    assert_eq!(post(&harness, "plain", &call()).await.text().await.unwrap(), redacted);
    let pieces = vec![
        send("data: canary-too"),
        Step::Hold,
        send("l-token and canary-"),
        send("tool\n\n"),
    ];
    harness.provider.will(ScriptedResponse::stream(pieces));
    let mut response = post(&harness, "hub", &call()).await;
    assert_eq!(response.chunk().await.unwrap().unwrap(), "data: ");
    harness.provider.release();
    assert_eq!(response.text().await.unwrap(), "[redacted] and canary-tool\n\n");
    // A value that was changed in the Secret is known from then on.
    harness.write_header("hub", "Authorization", "Bearer rotated-token");
    harness.provider.will(ScriptedResponse::json(200, "rotated-token"));
    assert_eq!(post(&harness, "hub", &call()).await.text().await.unwrap(), "[redacted]");
}
