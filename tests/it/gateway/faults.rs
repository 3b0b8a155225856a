//! What a provider can do wrong: each with its kind of failure, and its place in the totals.

use agentloop::api::failure::FailureKind;
use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::harness::{GatewayHarness, failure, kinds, stream_failure, streamed, whole};
use super::provider::{ANSWER, STREAM_HEAD, STREAM_TAIL, ScriptedResponse, Step, send};
use crate::support::ports::free_port;

const QUOTA: &str = r#"{"error":{"message":"You exceeded your quota","code":"insufficient_quota"}}"#;

/// A stream with nothing but this error.
fn in_stream(error: &serde_json::Value) -> ScriptedResponse {
    ScriptedResponse::stream(vec![send(&format!("data: {}\n\n", json!({ "error": error })))])
}

#[rstest]
#[case::bad_key(ScriptedResponse::json(401, "{}"), FailureKind::AuthenticationFailed, None, 0)]
#[case::forbidden(ScriptedResponse::json(403, "{}"), FailureKind::AuthenticationFailed, None, 0)]
#[case::no_credit(ScriptedResponse::json(402, "{}"), FailureKind::QuotaExceeded, None, 0)]
#[case::rate_in_seconds(ScriptedResponse::json(429, "{}").with("retry-after", "7"), FailureKind::RateLimited, Some(7000), 0)]
#[case::rate_in_milliseconds(ScriptedResponse::json(429, "{}").with("retry-after-ms", "70"), FailureKind::RateLimited, Some(70), 0)]
#[case::quota(ScriptedResponse::json(429, QUOTA), FailureKind::QuotaExceeded, None, 0)]
#[case::broken(
    ScriptedResponse::json(500, r#"{"error":{"type":"server_error"}}"#),
    FailureKind::Unreachable,
    None,
    0
)]
#[case::foreign_error(ScriptedResponse::json(500, "<html>"), FailureKind::Unreachable, None, 1)]
#[case::proxy_timeout(ScriptedResponse::json(504, "<html>"), FailureKind::Unreachable, None, 1)]
#[case::conflict(ScriptedResponse::json(409, "{}"), FailureKind::Unreachable, None, 1)]
#[case::too_large(ScriptedResponse::json(413, "{}"), FailureKind::ContextExceeded, None, 0)]
#[case::overloaded(ScriptedResponse::json(529, "{}").with("retry-after", "1"), FailureKind::Unreachable, Some(1000), 0)]
#[case::refused(ScriptedResponse::json(400, "{}"), FailureKind::BadResponse, None, 0)]
#[case::moved(ScriptedResponse::json(307, "").with("location", "http://127.0.0.1:1/"), FailureKind::BadResponse, None, 1)]
#[case::slow_to_explain(
    ScriptedResponse { steps: vec![send("{"), Step::Hold], ..ScriptedResponse::json(429, "") }, FailureKind::RateLimited, None, 0
)]
#[case::garbage(ScriptedResponse::json(200, "<html>"), FailureKind::BadResponse, None, 1)]
#[case::no_choices(ScriptedResponse::json(200, "{\"choices\":[]}"), FailureKind::BadResponse, None, 1)]
#[case::garbage_stream(ScriptedResponse::stream(vec![send("data: <html>\n\n")]), FailureKind::BadResponse, None, 1)]
#[case::error_in_stream(ScriptedResponse::stream(vec![send("data: {\"error\":{}}\n\n")]), FailureKind::Unreachable, None, 1)]
#[case::rate_in_stream(in_stream(&json!({"code": "rate_limit_exceeded"})), FailureKind::RateLimited, None, 0)]
#[case::status_in_stream(in_stream(&json!({"code": 429, "message": "canary"})), FailureKind::RateLimited, None, 0)]
#[case::gateway_timeout_in_stream(in_stream(&json!({"code": 504})), FailureKind::Unreachable, None, 1)]
#[case::too_long_in_stream(
    in_stream(&json!({"code": 400, "type": "BadRequestError", "message": "This model's maximum context length is 4096 tokens."})),
    FailureKind::ContextExceeded,
    None,
    0
)]
#[case::quota_in_body(ScriptedResponse::json(200, QUOTA), FailureKind::QuotaExceeded, None, 0)]
#[case::empty_stream(ScriptedResponse::stream(vec![]), FailureKind::Unreachable, None, 1)]
#[case::cut_body(
    ScriptedResponse { steps: vec![send("{\"cho"), Step::Cut], ..ScriptedResponse::json(200, "") }, FailureKind::Unreachable, None, 1
)]
#[tokio::test]
async fn a_fault_is_of_one_kind_and_is_replayed_and_counted_once(
    #[case] act: ScriptedResponse,
    #[case] kind: FailureKind,
    #[case] retry_after: Option<u64>,
    #[case] unknown: i64,
) {
    let harness = GatewayHarness::started().await;
    harness.provider.will(act);
    let first = failure(harness.call("t1c1a1", &streamed()).await).await;
    assert_eq!(kinds(&first), (kind, retry_after));
    assert_eq!(failure(harness.call("t1c1a1", &streamed()).await).await, first);
    assert_eq!(harness.provider.seen().len(), 1);
    let report = harness.until_counted(1, unknown).await;
    assert_eq!(report.usage.input_tokens + report.usage.output_tokens, 0);
    assert_eq!(report.model.unwrap().failure, Some(kind));
    // The next good call clears it.
    assert_eq!(harness.ask("t1c1a2").await.1, ANSWER);
    let model = harness.until_counted(2, unknown).await.model.unwrap();
    assert_eq!((model.failure, model.message.as_str()), (None, ""));
}

#[tokio::test]
async fn a_retry_after_date_is_read_as_a_wait() {
    let harness = GatewayHarness::started().await;
    let date = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60);
    let date = date.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
    harness
        .provider
        .will(ScriptedResponse::json(429, "{}").with("retry-after", date));
    let wait = failure(harness.call("t1c1a1", &whole()).await)
        .await
        .retry_after_milliseconds
        .unwrap();
    assert!((50_000..=60_000).contains(&wait), "{wait}");
}

#[tokio::test]
async fn a_server_that_is_not_there_was_not_called() {
    let url = format!("http://127.0.0.1:{}/v1", free_port());
    let harness = GatewayHarness::started_with(json!({"baseURL": url})).await;
    let failure = failure(harness.call("t1c1a1", &whole()).await).await;
    assert_eq!(failure.kind, FailureKind::Unreachable);
    assert!(failure.message.contains("Connection refused"), "{}", failure.message);
    let report = harness
        .controller
        .until("the failure", |report| report.model.is_some())
        .await;
    assert_eq!((report.usage.calls, report.usage.unknown_calls), (0, 0));
}

#[tokio::test]
async fn a_stream_cut_after_its_start_ends_with_the_failure_and_is_unknown() {
    let harness = GatewayHarness::started().await;
    let half = "data: {\"choices\":[{\"index\":0,\"del";
    harness.provider.will(ScriptedResponse::stream(vec![
        send(STREAM_HEAD),
        send(half),
        Step::Hold,
        Step::Cut,
    ]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    assert_eq!(response.chunk().await.unwrap().unwrap(), STREAM_HEAD);
    harness.provider.release();
    let (before, failed) = stream_failure(&response.text().await.unwrap());
    assert_eq!((before.as_str(), failed.kind), ("", FailureKind::Unreachable));
    harness.until_counted(1, 1).await;
    // Nothing was kept that could pass for an answer.
    assert_eq!(failure(harness.call("t1c1a1", &streamed()).await).await, failed);
}

#[tokio::test]
async fn a_stream_that_ends_without_its_end_is_cut_too() {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![send(STREAM_HEAD)]));
    let body = harness.call("t1c1a1", &streamed()).await.text().await.unwrap();
    assert_eq!(stream_failure(&body).1.kind, FailureKind::Unreachable);
    harness.until_counted(1, 1).await;
}

#[tokio::test]
async fn a_stream_cut_after_its_usage_is_not_unknown() {
    let harness = GatewayHarness::started().await;
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4}}\n\n";
    harness.provider.will(ScriptedResponse::stream(vec![
        send(STREAM_HEAD),
        send(usage),
        Step::Hold,
        Step::Cut,
    ]));
    let mut response = harness.call("t1c1a1", &streamed()).await;
    let mut before = String::new();
    while !before.contains("usage") {
        before.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    harness.provider.release();
    assert_eq!(
        stream_failure(&response.text().await.unwrap()).1.kind,
        FailureKind::Unreachable
    );
    assert_eq!(harness.until_counted(1, 0).await.usage.output_tokens, 4);
}

#[rstest]
#[case::missing(r#"{"choices":[{}]}"#)]
#[case::null(r#"{"choices":[{}],"usage":null}"#)]
#[case::negative(r#"{"choices":[{}],"usage":{"prompt_tokens":-5,"completion_tokens":4}}"#)]
#[case::more_cached_than_sent(
    r#"{"choices":[{}],"usage":{"prompt_tokens":5,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":6}}}"#
)]
#[tokio::test]
async fn an_answer_with_implausible_usage_is_returned_and_its_usage_is_unknown(#[case] answer: &str) {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::json(200, answer));
    assert_eq!(harness.ask("t1c1a1").await.1, answer);
    let usage = harness.until_counted(1, 1).await.usage;
    assert_eq!(usage.input_tokens + usage.output_tokens, 0);
}

#[tokio::test]
async fn a_stream_without_usage_is_returned_and_its_usage_is_unknown() {
    let harness = GatewayHarness::started().await;
    let tail = "data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(STREAM_HEAD), send(tail)]));
    let body = harness.call("t1c1a1", &streamed()).await.text().await.unwrap();
    assert_eq!(body, format!("{STREAM_HEAD}{tail}"));
    harness.until_counted(1, 1).await;
}

#[tokio::test]
async fn data_after_the_end_mark_of_an_answer_is_ignored() {
    let harness = GatewayHarness::started().await;
    harness.provider.will(ScriptedResponse::stream(vec![
        send(STREAM_HEAD),
        send(STREAM_TAIL),
        Step::Hold,
    ]));
    let body = harness.call("t1c1a1", &streamed()).await.text().await.unwrap();
    assert_eq!(body, format!("{STREAM_HEAD}{STREAM_TAIL}"));
}

#[tokio::test]
async fn silence_within_a_stream_is_a_timeout() {
    // The head must not meet the limit on a busy machine.
    let harness = GatewayHarness::started_with(json!({"streamIdleTimeoutSeconds": 5})).await;
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(STREAM_HEAD), Step::Hold]));
    let body = harness.call("t1c1a1", &streamed()).await.text().await.unwrap();
    let failure = stream_failure(&body).1;
    assert_eq!(failure.kind, FailureKind::Timeout);
    assert!(
        failure.message.contains("streamIdleTimeoutSeconds"),
        "{}",
        failure.message
    );
    harness.until_counted(1, 1).await;
}

#[rstest]
#[case::no_answer(ScriptedResponse::json(200, "").steps(vec![Step::Hold]))]
#[case::half_an_answer(ScriptedResponse::json(200, "").steps(vec![send("{"), Step::Hold]))]
#[tokio::test]
async fn a_server_that_hangs_is_a_timeout(#[case] act: ScriptedResponse) {
    let harness = GatewayHarness::started_with(json!({"timeoutSeconds": 1})).await;
    harness.provider.will(act);
    let failure = failure(harness.call("t1c1a1", &whole()).await).await;
    assert_eq!(failure.kind, FailureKind::Timeout);
    assert!(failure.message.contains("timeoutSeconds"), "{}", failure.message);
    harness.until_counted(1, 1).await;
}

#[tokio::test]
async fn an_endless_stream_is_cut_at_its_size() {
    let harness = GatewayHarness::started().await;
    let line = format!("data: {{\"choices\":[],\"x\":\"{}\"}}\n\n", "x".repeat(100_000));
    harness
        .provider
        .will(ScriptedResponse::stream(vec![Step::Endless(line)]));
    let body = harness.call("t1c1a1", &streamed()).await.text().await.unwrap();
    let (before, failure) = stream_failure(&body);
    assert_eq!(failure.kind, FailureKind::BadResponse);
    assert!(failure.message.contains("16 MiB"), "{}", failure.message);
    assert!(
        before.len() <= 16 * 1024 * 1024 && before.len() > 15 * 1024 * 1024,
        "{}",
        before.len()
    );
    harness.until_counted(1, 1).await;
}

#[tokio::test]
async fn an_endless_answer_is_cut_at_its_size() {
    let harness = GatewayHarness::started().await;
    harness
        .provider
        .will(ScriptedResponse::json(200, "").steps(vec![Step::Endless(" ".repeat(100_000))]));
    assert_eq!(
        failure(harness.call("t1c1a1", &whole()).await).await.kind,
        FailureKind::BadResponse
    );
}

#[rstest]
#[case::by_address("127.0.0.1", "Agents may not connect to 127.0.0.1:", FailureKind::BadResponse)]
#[case::by_name(
    "localhost",
    "Agents may not connect to any address of the host",
    FailureKind::Unreachable
)]
#[tokio::test]
async fn a_server_at_an_address_that_is_closed_is_not_called(
    #[case] host: &str,
    #[case] words: &str,
    #[case] kind: FailureKind,
) {
    let mut harness = GatewayHarness::new().await;
    let url = format!("http://{host}:{}/v1", harness.provider.address.port());
    harness.set(&json!({"baseURL": url}));
    harness.egress = json!({"deniedRanges": ["127.0.0.0/8", "::1/128"]});
    harness.start().await;
    let failure = failure(harness.call("t1c1a1", &whole()).await).await;
    assert_eq!(failure.kind, kind);
    for part in [words, "spec.model.baseURL", "egress.agents.allowedCIDRs"] {
        assert!(failure.message.contains(part), "{}", failure.message);
    }
    assert!(harness.provider.seen().is_empty());
}
