//! OpenAI Responses through the gateway: what passes, what changes, what is counted, and what a provider can do wrong.

use agentloop::api::failure::FailureKind;
use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use rstest::rstest;
use serde_json::{Value, json};

use super::harness::{GatewayHarness, KEY, PROMPT, failure, kinds, stream_failure};
use super::provider::{ANSWER, ScriptedResponse, Step, send};

/// A whole answer: 10 tokens of input from no cache, 90 read, 20 of output, of which 15 are reasoning.
const RESPONSE: &str = r#"{"id":"resp_1","object":"response","status":"completed","error":null,"incomplete_details":null,"model":"m","output":[{"type":"message","id":"msg_1","role":"assistant","content":[{"type":"output_text","text":"canary-answer"}]}],"usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":90},"output_tokens":20,"output_tokens_details":{"reasoning_tokens":15},"total_tokens":120}}"#;
/// A stream: its beginning, and its end with the same usage.
const HEAD: &str = concat!(
    "event: response.created\n",
    "data: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"model\":\"m\",\"output\":[],\"usage\":null,\"error\":null}}\n\n",
    "event: response.output_text.delta\n",
    "data: {\"type\":\"response.output_text.delta\",\"output_index\":0,\"delta\":\"canary-\"}\n\n",
);

/// The last event of a stream of this kind.
fn tail(kind: &str) -> String {
    let response = RESPONSE.replace("\"completed\"", &format!("\"{kind}\""));
    format!("event: response.{kind}\ndata: {{\"type\":\"response.{kind}\",\"response\":{response}}}\n\n")
}

async fn started_with(fields: Value) -> GatewayHarness {
    GatewayHarness::of_format("OpenAIResponses", "/v1", "/v1/responses", &fields).await
}

async fn started() -> GatewayHarness {
    started_with(json!({})).await
}

/// A stream that begins and then reports this error.
fn failed(code: &str) -> ScriptedResponse {
    let begin = "data: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\",\"output\":[]}}\n\n";
    let response = json!({"status": "failed", "output": [], "error": {"code": code, "message": "canary"}});
    let event = json!({"type": "response.failed", "response": response});
    ScriptedResponse::stream(vec![send(begin), send(&format!("data: {event}\n\n"))])
}

/// A request of the worker.
fn body(stream: bool) -> Value {
    json!({"model": "m", "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]}],
        "store": false, "stream": stream})
}

/// Input from no cache, read from it; output, and reasoning, which is a part of it.
async fn counted(harness: &GatewayHarness, calls: i64, unknown: i64) -> [i64; 4] {
    let usage = harness.until_counted(calls, unknown).await.usage;
    [
        usage.input_tokens,
        usage.cache_read_tokens,
        usage.output_tokens,
        usage.reasoning_tokens,
    ]
}

#[tokio::test]
async fn a_whole_response_passes_byte_for_byte_and_each_kind_of_token_is_counted_once() {
    let harness = started().await;
    harness.provider.will(ScriptedResponse::json(200, RESPONSE));
    let answer = harness.call("t1c1a1", &body(false)).await;
    assert_eq!(answer.text().await.unwrap(), RESPONSE);
    assert_eq!(counted(&harness, 1, 0).await, [10, 90, 20, 15]);
}

#[rstest]
#[case::completed("completed")]
#[case::cut_at_its_output_limit("incomplete")]
#[tokio::test]
async fn a_streamed_response_passes_unbuffered_and_is_metered_by_its_last_event(#[case] kind: &str) {
    let harness = started().await;
    let end = tail(kind);
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(HEAD), Step::Hold, send(&end)]));
    let mut response = harness.call("t1c1a1", &body(true)).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.chunk().await.unwrap().unwrap(), HEAD);
    harness.provider.release();
    assert_eq!(response.text().await.unwrap(), end);
    assert_eq!(counted(&harness, 1, 0).await, [10, 90, 20, 15]);
}

#[tokio::test]
async fn a_request_changes_in_the_named_fields_and_is_never_stored() {
    let extra = json!({"text": {"verbosity": "low"}, "tool_choice": "theirs"});
    let harness = started_with(json!({"extraBody": extra, "headers": {"X-Session-ID": "s"}})).await;
    harness.provider.will(ScriptedResponse::json(200, RESPONSE));
    let mut body = body(false);
    body["tools"] = json!([{"type": "function", "name": "a", "parameters": {}, "strict": false}]);
    body["tool_choice"] = "ours".into();
    body["reasoning"] = json!({"effort": "low"});
    body["store"] = true.into();
    harness.call("t4c2a3", &body).await;
    let seen = &harness.provider.seen()[0];
    body["tool_choice"] = "theirs".into();
    body["store"] = false.into();
    body["text"] = json!({"verbosity": "low"});
    body["max_output_tokens"] = 77.into();
    assert_eq!(seen.body, body.to_string());
    assert_eq!(seen.path, "/v1/responses");
    assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
    assert_eq!(seen.headers["idempotency-key"], "agent-uid-t4c2a3");
    assert_eq!(seen.headers["x-session-id"], "s");
    assert!(!seen.headers.contains_key("x-agentloop-call"));
}

#[rstest]
#[case("previous_response_id")]
#[case("background")]
#[case("conversation")]
#[case("store")]
#[case("max_output_tokens")]
#[case("include")]
#[case("input")]
#[case("instructions")]
#[case("reasoning")]
#[tokio::test]
async fn a_spec_with_a_field_of_the_loop_or_of_the_bill_makes_no_call(#[case] name: &str) {
    let harness = started_with(json!({"extraBody": {name: "canary"}})).await;
    let failure = failure(harness.call("t1c1a1", &body(false)).await).await;
    assert_eq!(failure.kind, FailureKind::BadResponse);
    assert!(failure.message.contains(name), "{}", failure.message);
    assert!(!failure.message.contains("canary"), "{}", failure.message);
    assert!(harness.provider.seen().is_empty());
}

#[rstest]
#[case::search(json!({"tools": [{"type": "web_search"}]}))]
#[case::code(json!({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}))]
#[case::server_of_tools(json!({"tools": [{"type": "mcp", "server_label": "canary"}]}))]
#[case::history(json!({"previous_response_id": "canary"}))]
#[case::conversation(json!({"conversation": "canary"}))]
#[case::background(json!({"background": true}))]
#[case::template(json!({"prompt": {"id": "canary"}}))]
#[case::tier(json!({"service_tier": "priority"}))]
#[case::passes(json!({"reasoning": {"effort": "low", "mode": "canary"}}))]
#[case::reference(json!({"input": [{"type": "item_reference", "id": "canary"}]}))]
#[case::result_of_a_server(json!({"input": [{"type": "web_search_call", "id": "canary"}]}))]
#[case::image(json!({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "canary"}]}]}))]
#[case::image_of_a_tool(json!({"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]}))]
#[case::file(json!({"instructions": [{"type": "input_file", "file_id": "canary"}]}))]
#[case::text_alone(json!({"input": "canary"}))]
#[case::no_type(json!({"input": [{"role": "user", "content": "canary"}]}))]
#[tokio::test]
async fn a_request_whose_bill_has_no_bound_is_not_sent(#[case] fields: Value) {
    let harness = started().await;
    let mut body = body(false);
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let failure = failure(harness.call("t1c1a1", &body).await).await;
    assert_eq!(failure.kind, FailureKind::BadResponse);
    assert!(!failure.message.contains("canary"), "{}", failure.message);
    assert!(harness.provider.seen().is_empty());
}

#[rstest]
#[case::bad_key(ScriptedResponse::json(401, "{}"), FailureKind::AuthenticationFailed, 0)]
#[case::quota(
    ScriptedResponse::json(429, r#"{"error":{"type":"insufficient_quota","code":"insufficient_quota"}}"#),
    FailureKind::QuotaExceeded,
    0
)]
#[case::too_long(
    ScriptedResponse::json(
        400,
        r#"{"error":{"type":"invalid_request_error","code":"context_length_exceeded","message":"canary"}}"#
    ),
    FailureKind::ContextExceeded,
    0
)]
#[case::garbage(ScriptedResponse::json(200, "<html>"), FailureKind::BadResponse, 1)]
#[case::another_format(ScriptedResponse::json(200, ANSWER), FailureKind::BadResponse, 1)]
#[case::in_the_background(
    ScriptedResponse::json(200, r#"{"status":"queued","output":[]}"#),
    FailureKind::BadResponse,
    1
)]
#[case::failed(
    ScriptedResponse::json(
        200,
        r#"{"status":"failed","output":[],"error":{"code":"server_error","message":"canary"}}"#
    ),
    FailureKind::Unreachable,
    1
)]
#[case::garbage_stream(ScriptedResponse::stream(vec![send("data: <html>\n\n")]), FailureKind::BadResponse, 1)]
#[case::error_in_stream(ScriptedResponse::stream(vec![send("data: {\"type\":\"error\",\"message\":\"canary\"}\n\n")]), FailureKind::Unreachable, 1)]
#[case::failed_stream(ScriptedResponse::stream(vec![send("data: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\"}}\n\n")]), FailureKind::Unreachable, 1)]
#[case::rate_in_a_failed_response(failed("rate_limit_exceeded"), FailureKind::RateLimited, 0)]
#[case::quota_in_a_failed_response(failed("insufficient_quota"), FailureKind::QuotaExceeded, 0)]
#[case::too_long_in_a_failed_response(failed("context_length_exceeded"), FailureKind::ContextExceeded, 0)]
#[case::overloaded_in_a_failed_response(failed("server_is_overloaded"), FailureKind::Unreachable, 1)]
#[case::rate_in_an_event(ScriptedResponse::stream(vec![send("data: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"canary\"}\n\n")]), FailureKind::RateLimited, 0)]
#[case::rate_after_content(
    ScriptedResponse::stream(vec![send(HEAD), send("data: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\"}\n\n")]),
    FailureKind::RateLimited,
    1
)]
#[case::cut_stream(ScriptedResponse::stream(vec![send(": nothing yet\n\n")]), FailureKind::Unreachable, 1)]
#[tokio::test]
async fn a_fault_is_of_one_kind_and_is_counted_once(
    #[case] act: ScriptedResponse,
    #[case] kind: FailureKind,
    #[case] unknown: i64,
) {
    let harness = started().await;
    harness.provider.will(act);
    let response = harness.call("t1c1a1", &body(true)).await;
    let first = if response.status() == StatusCode::OK {
        stream_failure(&response.text().await.unwrap()).1
    } else {
        failure(response).await
    };
    assert_eq!(kinds(&first), (kind, None));
    assert!(!first.message.contains("canary"), "{}", first.message);
    assert_eq!(failure(harness.call("t1c1a1", &body(true)).await).await, first);
    assert_eq!(harness.provider.seen().len(), 1);
    assert_eq!(counted(&harness, 1, unknown).await, [0; 4]);
    for canary in ["canary-key", PROMPT] {
        assert!(!harness.log().contains(canary), "{}", harness.log());
    }
}

#[tokio::test]
async fn a_stream_that_is_cut_before_its_last_event_is_unknown() {
    let harness = started().await;
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(HEAD), Step::Hold, Step::Cut]));
    let mut response = harness.call("t1c1a1", &body(true)).await;
    assert_eq!(response.chunk().await.unwrap().unwrap(), HEAD);
    harness.provider.release();
    let (_, failed) = stream_failure(&response.text().await.unwrap());
    assert_eq!(failed.kind, FailureKind::Unreachable);
    assert_eq!(counted(&harness, 1, 1).await, [0; 4]);
}

#[rstest]
#[case::missing(json!(null))]
#[case::of_another_format(json!({"prompt_tokens": 3, "completion_tokens": 4}))]
#[case::more_cached_than_read(json!({"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 4}}))]
#[case::more_thought_than_said(json!({"input_tokens": 3, "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 5}}))]
#[case::a_tool_of_the_server(json!({"input_tokens": 3, "output_tokens": 4, "num_server_side_tools_used": 1}))]
#[tokio::test]
async fn an_answer_with_implausible_usage_is_returned_and_its_usage_is_unknown(#[case] usage: Value) {
    let harness = started().await;
    let answer = json!({"status": "completed", "output": [], "usage": usage}).to_string();
    harness.provider.will(ScriptedResponse::json(200, &answer));
    let given = harness.call("t1c1a1", &body(false)).await;
    assert_eq!(given.text().await.unwrap(), answer);
    assert_eq!(counted(&harness, 1, 1).await, [0; 4]);
}
