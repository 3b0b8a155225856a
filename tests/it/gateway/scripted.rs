//! The Scripted model through the gateway: no key, no network, the same metering.

use agentloop::api::failure::FailureKind;
use agentloop::link::socket::{CALL_HEADER, PURPOSE_HEADER};
use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use serde_json::{Value, json};

use super::harness::{GatewayHarness, failure, kinds, streamed, url, whole, write};

const SCRIPT: &str = "
turns:
- {text: one, usage: {inputTokens: 10, outputTokens: 5, cacheReadTokens: 90}}
- {text: two, usage: {inputTokens: 1, outputTokens: 1}}
- {yield: {sleep: 5, reason: tired}, usage: {inputTokens: 1, outputTokens: 1}}
";

pub async fn scripted(script: &str) -> GatewayHarness {
    let mut harness = GatewayHarness::new().await;
    harness.set(&json!({"api": "Scripted", "baseURL": null, "apiKeySecretRef": null}));
    write(&harness.path("script"), script);
    harness.start().await;
    harness
}

async fn said(harness: &GatewayHarness, id: &str) -> Value {
    let (status, body) = harness.ask(id).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (body["model"].as_str(), body["system_fingerprint"].as_str()),
        (Some("scripted"), Some("agentloop-scripted"))
    );
    body["choices"][0]["message"].clone()
}

#[tokio::test]
async fn a_script_continues_at_its_position_over_restarts() {
    let mut harness = scripted(SCRIPT).await;
    assert_eq!(said(&harness, "t1c1a1").await["content"], "one");
    assert_eq!(said(&harness, "t1c1a1").await["content"], "one");
    harness.kill();
    harness.start().await;
    assert_eq!(said(&harness, "t2c1a1").await["content"], "two");
    harness.kill();
    harness.start().await;
    let call = said(&harness, "t3c1a1").await["tool_calls"][0]["function"].clone();
    assert_eq!(
        call,
        json!({"name": "yield", "arguments": r#"{"mode":"sleep","sleep":5,"reason":"tired"}"#})
    );
    assert_eq!(said(&harness, "t4c1a1").await["content"], "one");
    let usage = harness.until_counted(4, 0).await.usage;
    assert_eq!(
        (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens),
        (22, 12, 180)
    );
}

#[tokio::test]
async fn a_call_of_an_unknown_purpose_is_refused_with_a_message() {
    let harness = scripted(SCRIPT).await;
    let call = |purpose: &'static str| {
        let request = harness.worker.post(url(harness.route)).header(CALL_HEADER, "t1c1a1");
        request.header(PURPOSE_HEADER, purpose).json(&whole()).send()
    };
    let response = call("Gossip").await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let words = response.text().await.unwrap();
    assert!(words.contains(PURPOSE_HEADER) && !words.contains("Gossip"), "{words}");
    assert_eq!(call("Turn").await.unwrap().status(), StatusCode::OK);
    harness.until_counted(1, 0).await;
}

#[tokio::test]
async fn a_scripted_stream_is_metered_like_any_other() {
    let harness = scripted(SCRIPT).await;
    let body = harness.call("t1c1a1", &streamed()).await.text().await.unwrap();
    assert!(
        body.contains("\"content\":\"one\"") && body.ends_with("data: [DONE]\n\n"),
        "{body}"
    );
    let usage = harness.until_counted(1, 0).await.usage;
    assert_eq!(
        (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens),
        (10, 5, 90)
    );
}

#[tokio::test]
async fn a_scripted_failure_is_returned_and_consumes_its_turn() {
    let harness = scripted("turns: [{fail: {status: 429, retryAfterSeconds: 2}}, {text: ok}]").await;
    let failed = failure(harness.call("t1c1a1", &whole()).await).await;
    assert_eq!(kinds(&failed), (FailureKind::RateLimited, Some(2000)));
    assert_eq!(said(&harness, "t1c1a2").await["content"], "ok");
    harness.until_counted(2, 0).await;
}

#[tokio::test]
async fn a_cancelled_call_consumes_no_scripted_turn() {
    let mut harness = scripted("turns: [{text: slow, delayMilliseconds: 1200}, {text: next}]").await;
    harness.kill();
    harness.set(&json!({"timeoutSeconds": 1}));
    harness.start().await;
    assert_eq!(
        failure(harness.call("t1c1a1", &whole()).await).await.kind,
        FailureKind::Timeout
    );
    harness.kill();
    harness.set(&json!({"timeoutSeconds": 30}));
    harness.start().await;
    assert_eq!(said(&harness, "t1c1a2").await["content"], "slow");
    harness.until_counted(2, 1).await;
}

#[tokio::test]
async fn an_exhausted_script_fails_with_that_reason() {
    let harness = scripted("atEnd: Fail\nturns: [{text: only}]").await;
    said(&harness, "t1c1a1").await;
    let failed = failure(harness.call("t2c1a1", &whole()).await).await;
    assert_eq!(failed.kind, FailureKind::BadResponse);
    assert!(failed.message.contains("atEnd"), "{}", failed.message);
}

#[tokio::test]
async fn a_script_with_a_mistake_answers_each_call_with_it() {
    let harness = scripted("turns: [{txt: a}]").await;
    let failed = failure(harness.call("t1c1a1", &whole()).await).await;
    assert_eq!(failed.kind, FailureKind::BadResponse);
    assert!(
        failed.message.contains("spec.model.scripted") && failed.message.contains("line 1"),
        "{}",
        failed.message
    );
}
