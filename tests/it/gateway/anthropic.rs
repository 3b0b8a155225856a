//! Anthropic messages through the gateway: what passes, what changes, what is counted, and what a provider can do wrong.

use agentloop::api::failure::FailureKind;
use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use rstest::rstest;
use serde_json::{Value, json};

use super::harness::{GatewayHarness, KEY, PROMPT, failure, kinds, stream_failure, streamed, whole};
use super::provider::{ANSWER, ScriptedResponse, Step, send};

/// A whole answer: 21 tokens of input from no cache, 300 read, 40 and 5 written, 20 of output.
const MESSAGE: &str = r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"canary-answer"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":21,"cache_creation_input_tokens":45,"cache_read_input_tokens":300,"cache_creation":{"ephemeral_5m_input_tokens":40,"ephemeral_1h_input_tokens":5},"output_tokens":20,"service_tier":"standard"}}"#;
/// The same as a stream: its beginning, and its end, with counts that grow on the way.
const HEAD: &str = concat!(
    "event: message_start\n",
    "data: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"m\",\"content\":[],\"stop_reason\":null,\"usage\":{\"input_tokens\":21,\"cache_creation_input_tokens\":45,\"cache_read_input_tokens\":300,\"cache_creation\":{\"ephemeral_5m_input_tokens\":40,\"ephemeral_1h_input_tokens\":5},\"output_tokens\":1}}}\n\n",
    "event: content_block_start\n",
    "data: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
    "event: ping\n",
    "data: {\"type\": \"ping\"}\n\n",
);
const TAIL: &str = concat!(
    "event: content_block_delta\n",
    "data: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"canary-answer\"}}\n\n",
    "event: content_block_stop\n",
    "data: {\"type\":\"content_block_stop\",\"index\":0}\n\n",
    "event: message_delta\n",
    "data: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":12}}\n\n",
    "event: message_delta\n",
    "data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null},\"usage\":{\"output_tokens\":20}}\n\n",
    "event: message_stop\n",
    "data: {\"type\":\"message_stop\"}\n\n",
);
const RATE: &str = r#"{"type":"error","error":{"type":"rate_limit_error","message":"canary"}}"#;
const BILLING: &str = r#"{"type":"error","error":{"type":"billing_error","message":"canary"}}"#;
const CREDIT: &str =
    r#"{"type":"error","error":{"type":"invalid_request_error","message":"Your credit balance is too low, canary"}}"#;

async fn started_with(fields: Value) -> GatewayHarness {
    GatewayHarness::of_format("AnthropicMessages", "", "/v1/messages", &fields).await
}

async fn started() -> GatewayHarness {
    started_with(json!({})).await
}

/// Input from no cache, read from it, written to it; output.
async fn counted(harness: &GatewayHarness, calls: i64, unknown: i64) -> [i64; 4] {
    let usage = harness.until_counted(calls, unknown).await.usage;
    [
        usage.input_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.output_tokens,
    ]
}

#[tokio::test]
async fn a_whole_message_passes_byte_for_byte_and_each_kind_of_token_is_counted_once() {
    let harness = started().await;
    harness.provider.will(ScriptedResponse::json(200, MESSAGE));
    assert_eq!(harness.ask("t1c1a1").await, (StatusCode::OK, MESSAGE.to_owned()));
    assert_eq!(counted(&harness, 1, 0).await, [21, 300, 45, 20]);
}

#[tokio::test]
async fn a_streamed_message_passes_unbuffered_and_its_counts_are_totals() {
    let harness = started().await;
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(HEAD), Step::Hold, send(TAIL)]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.chunk().await.unwrap().unwrap(), HEAD);
    harness.provider.release();
    assert_eq!(response.text().await.unwrap(), TAIL);
    assert_eq!(counted(&harness, 1, 0).await, [21, 300, 45, 20]);
}

#[tokio::test]
async fn a_request_changes_in_the_named_fields_and_the_key_is_in_its_own_header() {
    let extra = json!({"rag": {"on": true}, "tool_choice": "theirs"});
    let harness =
        started_with(json!({"extraBody": extra, "headers": {"X-Session-ID": "s", "User-Agent": "mine"}})).await;
    harness.provider.will(ScriptedResponse::json(200, MESSAGE));
    let body = json!({"model": "m", "max_tokens": 9, "tool_choice": "ours", "system": "be",
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}], "tools": [{"name": "a"}]});
    harness.call("t4c2a3", &body).await;
    let seen = &harness.provider.seen()[0];
    let mut expected = body.to_string().replace("\"max_tokens\":9", "\"max_tokens\":77");
    expected = expected.replace("\"ours\"", "\"theirs\"");
    expected.truncate(expected.len() - 1);
    assert_eq!(seen.body, format!("{expected},\"rag\":{{\"on\":true}}}}"));
    assert_eq!(seen.path, "/v1/messages");
    assert_eq!(seen.headers["x-api-key"], KEY);
    assert_eq!(seen.headers["anthropic-version"], "2023-06-01");
    assert_eq!(seen.headers["content-type"], "application/json");
    assert_eq!(seen.headers["idempotency-key"], "agent-uid-t4c2a3");
    assert_eq!(seen.headers["x-session-id"], "s");
    for absent in ["authorization", "x-agentloop-call"] {
        assert!(!seen.headers.contains_key(absent), "{absent}");
    }
}

#[rstest]
#[case(json!({"extraBody": {"service_tier": "auto"}}), "service_tier")]
#[case(json!({"extraBody": {"n": 2}}), "field n ")]
#[case(json!({"extraBody": {"max_tokens": 9}}), "max_tokens")]
#[case(json!({"headers": {"X-API-Key": "canary"}}), "X-API-Key")]
#[case(json!({"headers": {"Anthropic-Beta": "canary"}}), "Anthropic-Beta")]
#[case(json!({"headers": {"X-Agentloop-Call": "canary"}}), "X-Agentloop-Call")]
#[tokio::test]
async fn a_spec_that_admission_should_have_refused_makes_no_call(#[case] fields: Value, #[case] named: &str) {
    let harness = started_with(fields).await;
    let failure = failure(harness.call("t1c1a1", &whole()).await).await;
    assert_eq!(failure.kind, FailureKind::BadResponse);
    assert!(failure.message.contains(named), "{}", failure.message);
    assert!(!failure.message.contains("canary"), "{}", failure.message);
    assert!(harness.provider.seen().is_empty());
}

#[rstest]
#[case(json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}))]
#[case(json!({"mcp_servers": []}))]
#[case(json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "canary"}}]}]}))]
#[tokio::test]
async fn a_request_whose_bill_has_no_bound_is_not_sent(#[case] fields: Value) {
    let harness = started().await;
    let mut body = whole();
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let failure = failure(harness.call("t1c1a1", &body).await).await;
    assert_eq!(failure.kind, FailureKind::BadResponse);
    assert!(!failure.message.contains("canary"), "{}", failure.message);
    assert!(harness.provider.seen().is_empty());
}

/// A stream with nothing but this error.
fn in_stream(kind: &str, message: &str) -> ScriptedResponse {
    let event = json!({"type": "error", "error": {"type": kind, "message": message}});
    ScriptedResponse::stream(vec![send(&format!("event: error\ndata: {event}\n\n"))])
}

#[rstest]
#[case::bad_key(ScriptedResponse::json(401, "{}"), FailureKind::AuthenticationFailed, None, 0)]
#[case::forbidden(ScriptedResponse::json(403, "{}"), FailureKind::AuthenticationFailed, None, 0)]
#[case::no_credit(ScriptedResponse::json(400, CREDIT), FailureKind::QuotaExceeded, None, 0)]
#[case::billing(ScriptedResponse::json(402, BILLING), FailureKind::QuotaExceeded, None, 0)]
#[case::rate(ScriptedResponse::json(429, RATE).with("retry-after", "7"), FailureKind::RateLimited, Some(7000), 0)]
#[case::quota(ScriptedResponse::json(429, BILLING), FailureKind::QuotaExceeded, None, 0)]
#[case::overloaded(ScriptedResponse::json(529, "{}").with("retry-after", "1"), FailureKind::Unreachable, Some(1000), 0)]
#[case::refused(ScriptedResponse::json(400, RATE), FailureKind::BadResponse, None, 0)]
#[case::garbage(ScriptedResponse::json(200, "<html>"), FailureKind::BadResponse, None, 1)]
#[case::another_format(ScriptedResponse::json(200, ANSWER), FailureKind::BadResponse, None, 1)]
#[case::garbage_stream(ScriptedResponse::stream(vec![send("data: <html>\n\n")]), FailureKind::BadResponse, None, 1)]
#[case::error_in_stream(ScriptedResponse::stream(vec![send("event: error\ndata: {\"type\":\"error\"}\n\n")]), FailureKind::Unreachable, None, 1)]
#[case::overloaded_in_stream(in_stream("overloaded_error", "canary"), FailureKind::Unreachable, None, 1)]
#[case::rate_in_stream(in_stream("rate_limit_error", "canary"), FailureKind::RateLimited, None, 0)]
#[case::too_long_in_stream(
    in_stream(
        "invalid_request_error",
        "prompt is too long: 214468 tokens > 200000 maximum, canary"
    ),
    FailureKind::ContextExceeded,
    None,
    0
)]
#[case::credit_in_stream(
    in_stream("invalid_request_error", "Your credit balance is too low, canary"),
    FailureKind::QuotaExceeded,
    None,
    0
)]
#[case::empty_stream(ScriptedResponse::stream(vec![]), FailureKind::Unreachable, None, 1)]
#[case::cut_body(
    ScriptedResponse { steps: vec![send("{\"typ"), Step::Cut], ..ScriptedResponse::json(200, "") }, FailureKind::Unreachable, None, 1
)]
#[tokio::test]
async fn a_fault_is_of_one_kind_and_is_counted_once(
    #[case] act: ScriptedResponse,
    #[case] kind: FailureKind,
    #[case] retry_after: Option<u64>,
    #[case] unknown: i64,
) {
    let harness = started().await;
    harness.provider.will(act);
    let mut response = harness.call("t1c1a1", &streamed()).await;
    // Lines that are no data pass before the fault shows.
    let first = if response.status() == StatusCode::OK {
        let mut body = String::new();
        while let Some(chunk) = response.chunk().await.unwrap() {
            body.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        stream_failure(&body).1
    } else {
        failure(response).await
    };
    assert_eq!(kinds(&first), (kind, retry_after));
    assert!(!first.message.contains("canary"), "{}", first.message);
    assert_eq!(failure(harness.call("t1c1a1", &streamed()).await).await, first);
    assert_eq!(harness.provider.seen().len(), 1);
    assert_eq!(counted(&harness, 1, unknown).await, [0; 4]);
    harness.provider.will(ScriptedResponse::json(200, MESSAGE));
    assert_eq!(harness.ask("t1c1a2").await.1, MESSAGE);
    assert_eq!(harness.until_counted(2, unknown).await.model.unwrap().failure, None);
    for canary in ["canary-key", PROMPT] {
        assert!(!harness.log().contains(canary), "{}", harness.log());
    }
}

/// What was counted on the way is less than what will be billed.
#[rstest]
#[case::after_its_head("")]
#[case::after_a_count_on_the_way(
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":12}}\n\n"
)]
#[tokio::test]
async fn a_stream_that_is_cut_before_its_last_count_is_unknown(#[case] more: &str) {
    let harness = started().await;
    let begun = format!("{HEAD}{more}");
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(&begun), Step::Hold, Step::Cut]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    let mut before = String::new();
    while before.len() < begun.len() {
        before.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    harness.provider.release();
    let (_, failed) = stream_failure(&response.text().await.unwrap());
    assert_eq!(failed.kind, FailureKind::Unreachable);
    assert_eq!(counted(&harness, 1, 1).await, [0; 4]);
}

#[tokio::test]
async fn a_stream_that_is_cut_after_its_last_count_is_counted() {
    let harness = started().await;
    let (all, _) = TAIL.split_once("event: message_stop").unwrap();
    harness.provider.will(ScriptedResponse::stream(vec![
        send(HEAD),
        send(all),
        Step::Hold,
        Step::Cut,
    ]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    let mut before = String::new();
    while !before.contains("\"output_tokens\":20") {
        before.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    harness.provider.release();
    assert_eq!(
        stream_failure(&response.text().await.unwrap()).1.kind,
        FailureKind::Unreachable
    );
    assert_eq!(counted(&harness, 1, 0).await, [21, 300, 45, 20]);
}

#[rstest]
#[case::missing(json!(null))]
#[case::of_another_format(json!({"prompt_tokens": 3, "completion_tokens": 4}))]
#[case::negative(json!({"input_tokens": -3, "output_tokens": 4}))]
#[case::a_tool_of_the_server(json!({"input_tokens": 3, "output_tokens": 4, "server_tool_use": {"web_search_requests": 1}}))]
#[tokio::test]
async fn an_answer_with_implausible_usage_is_returned_and_its_usage_is_unknown(#[case] usage: Value) {
    let harness = started().await;
    let answer = json!({"type": "message", "content": [], "usage": usage}).to_string();
    harness.provider.will(ScriptedResponse::json(200, &answer));
    assert_eq!(harness.ask("t1c1a1").await.1, answer);
    assert_eq!(counted(&harness, 1, 1).await, [0; 4]);
}
