//! Classifies the error answers of model servers, and reads how long they ask to wait.
//!
//! Messages name the status and the fix. The body of an answer is inspected but never quoted: it may echo a prompt.

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde_json::Value;

use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::CallPurpose;

/// Upper limit of the wait that a server may request.
pub const MAX_RETRY_AFTER_MILLISECONDS: u64 = 15 * 60 * 1000;
/// Error codes and types that mean an exhausted quota although the status is that of a rate limit.
const QUOTA_CODES: [&str; 6] = [
    "billing_error",
    "insufficient_quota",
    "billing_hard_limit_reached",
    "billing_not_active",
    "quota_exceeded",
    "insufficient_balance",
];
/// Anthropic's API reports this with the status and type of an invalid request; only the message tells them apart.
const OUT_OF_CREDIT: [&str; 2] = ["credit balance is too low", "reached your specified api usage limits"];
/// Error codes and types of a request that is longer than the model's context.
const CONTEXT_CODES: [&str; 5] = [
    "context_length_exceeded",
    "exceed_context_size_error",
    "model_max_prompt_tokens_exceeded",
    "request_too_large",
    "string_above_max_length",
];
/// The same as phrases in messages, in lower case: OpenAI, vLLM, Mistral; Anthropic; llama.cpp; xAI; Gemini; `SGLang`;
/// Bedrock; Groq; Qwen; Ollama and LM Studio.
const CONTEXT_WORDS: [&str; 15] = [
    "maximum context length",
    "maximum model length",
    "prompt is too long",
    "exceed context limit",
    "exceeds the available context size",
    "maximum prompt length",
    "exceeds the maximum number of tokens",
    "longer than the model's context length",
    "input is too long",
    "reduce the length of the messages",
    "range of input length",
    "prompt exceeds max length",
    "exceeded max context length",
    "greater than the context length",
    "exceeds the context window",
];
const TOO_LONG: &str = "the request does not fit into the model's context; set spec.model.contextTokens to the context \
     length of the server, so that older turns are left out in time";
/// Error types and codes by which a model server reports that it did not process the request.
const UNPROCESSED: [&str; 15] = [
    "api_error",
    "authentication_error",
    "engine_overloaded",
    "exceed_context_size_error",
    "insufficient_quota",
    "invalid_request_error",
    "model_not_found",
    "not_found_error",
    "overloaded",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "rate_limit_exceeded",
    "server_error",
    "unavailable_error",
];

/// Names the fields of the model that served the call: messages are written for `spec.model`.
pub fn adapt_to_purpose(purpose: CallPurpose, mut failure: CallFailure) -> CallFailure {
    if purpose.uses_light_model() {
        failure.message = failure.message.replace("spec.model", "spec.lightModel");
    }
    failure
}

/// A failure without a retry time.
pub fn failure(kind: FailureKind, message: impl Into<String>) -> CallFailure {
    CallFailure {
        kind,
        message: message.into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}

/// Classifies an answer with this status. `body` is the beginning of its body.
pub fn failure_from_status(status: StatusCode, headers: &HeaderMap, body: &[u8], now: Timestamp) -> CallFailure {
    let error = ErrorBody::read(body);
    let code = status.as_u16();
    let (kind, advice) = match code {
        401 | 403 => (
            FailureKind::AuthenticationFailed,
            "check the key that spec.model.apiKeySecretRef names, and that it may use spec.model.name",
        ),
        402 => (FailureKind::QuotaExceeded, "add credit to the provider account"),
        429 if error.is_one_of(&QUOTA_CODES) => (
            FailureKind::QuotaExceeded,
            "raise the quota at the provider, or wait until it resets",
        ),
        400 if error.says(&OUT_OF_CREDIT) => (
            FailureKind::QuotaExceeded,
            "add credit to the provider account, or raise its limit",
        ),
        413 => (FailureKind::ContextExceeded, TOO_LONG),
        400 | 422 | 500 if error.is_one_of(&CONTEXT_CODES) || error.says(&CONTEXT_WORDS) => {
            (FailureKind::ContextExceeded, TOO_LONG)
        }
        429 => (FailureKind::RateLimited, "the loop retries later"),
        408 | 409 | 500.. => (FailureKind::Unreachable, "the loop retries"),
        404 => (
            FailureKind::BadResponse,
            "check spec.model.baseURL (with /v1 for OpenAI, without for Anthropic) and spec.model.name",
        ),
        300..=399 => (
            FailureKind::BadResponse,
            "redirects are not followed, since they could disclose the key; set spec.model.baseURL to the final address",
        ),
        _ => (
            FailureKind::BadResponse,
            "the server rejected the request; check that it supports the settings of spec.model",
        ),
    };
    CallFailure {
        kind,
        message: format!("the model server answered {}: {advice}", describe_status(status)),
        retry_after_milliseconds: retry_after(headers, now),
        resumes_at: None,
    }
}

/// Whether an answer with this status means that the request was not processed, so that nothing is billed.
///
/// The outcome of any other error is unknown: a proxy that times out after 60 s leaves a model running, which bills. A
/// 500 or 503 counts as unprocessed only when the model server itself reports it, in its own format.
pub fn is_unprocessed(status: StatusCode, body: &[u8]) -> bool {
    match status.as_u16() {
        400..=405 | 411 | 413 | 415 | 422 | 429 | 529 => true,
        500 | 503 => ErrorBody::read(body).is_one_of(&UNPROCESSED),
        _ => false,
    }
}

/// Error details in the format of OpenAI, of Anthropic, or of servers that imitate them.
#[derive(Default)]
struct ErrorBody {
    codes: Vec<String>,
    /// In lower case.
    message: String,
}

impl ErrorBody {
    fn read(body: &[u8]) -> Self {
        let Ok(Value::Object(body)) = serde_json::from_slice(body) else {
            return Self::default();
        };
        let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
        // Some servers put the fields of `error` at the top level.
        let fields = match body.get("error") {
            Some(Value::Object(error)) => error,
            _ => &body,
        };
        let message = [fields.get("message"), body.get("error"), body.get("detail")];
        Self {
            codes: ["code", "type"].map(|name| text(fields.get(name))).into(),
            message: message.map(text).join(" ").to_lowercase(),
        }
    }

    fn is_one_of(&self, codes: &[&str]) -> bool {
        self.codes.iter().any(|code| codes.contains(&code.as_str()))
    }

    /// Whether its message, rather than an echo of the request, contains one of these.
    fn says(&self, words: &[&str]) -> bool {
        words.iter().any(|words| self.message.contains(words))
    }
}

/// `429 Too Many Requests`; the number alone for a status without a name.
fn describe_status(status: StatusCode) -> String {
    status.canonical_reason().map_or_else(
        || status.as_u16().to_string(),
        |reason| format!("{} {reason}", status.as_u16()),
    )
}

/// Milliseconds from `retry-after-ms`, or else from `Retry-After` in seconds or as a date; clamped.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<u64> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let number = |text: &str| {
        text.parse::<f64>()
            .ok()
            .filter(|number| number.is_finite() && *number >= 0.0)
    };
    let milliseconds = text("retry-after-ms").and_then(number).or_else(|| {
        let after = text(RETRY_AFTER.as_str())?;
        number(after).map(|seconds| seconds * 1000.0).or_else(|| {
            let at = rfc2822::DateTimeParser::new().parse_timestamp(after).ok()?;
            Some(at.duration_since(now).as_secs_f64().max(0.0) * 1000.0)
        })
    })?;
    // The clamp makes the cast exact.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )]
    Some(milliseconds.min(MAX_RETRY_AFTER_MILLISECONDS as f64).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use reqwest::header::{HeaderName, HeaderValue};
    use rstest::rstest;

    use super::*;

    fn kind(status: u16, body: &str) -> FailureKind {
        let status = StatusCode::from_u16(status).unwrap();
        failure_from_status(status, &HeaderMap::new(), body.as_bytes(), Timestamp::UNIX_EPOCH).kind
    }

    #[rstest]
    #[case(401, FailureKind::AuthenticationFailed)]
    #[case(403, FailureKind::AuthenticationFailed)]
    #[case(402, FailureKind::QuotaExceeded)]
    #[case(429, FailureKind::RateLimited)]
    #[case(408, FailureKind::Unreachable)]
    #[case(409, FailureKind::Unreachable)]
    #[case(500, FailureKind::Unreachable)]
    #[case(503, FailureKind::Unreachable)]
    #[case(529, FailureKind::Unreachable)]
    #[case(400, FailureKind::BadResponse)]
    #[case(404, FailureKind::BadResponse)]
    #[case(422, FailureKind::BadResponse)]
    #[case(302, FailureKind::BadResponse)]
    #[case(413, FailureKind::ContextExceeded)]
    fn each_status_is_of_one_kind(#[case] status: u16, #[case] expected: FailureKind) {
        assert_eq!(kind(status, ""), expected);
    }

    #[rstest]
    #[case(r#"{"error": {"code": "insufficient_quota"}}"#, FailureKind::QuotaExceeded)]
    #[case(
        r#"{"error": {"type": "insufficient_quota", "code": null}}"#,
        FailureKind::QuotaExceeded
    )]
    #[case(r#"{"error": {"code": "rate_limit_exceeded"}}"#, FailureKind::RateLimited)]
    #[case(r#"{"error": {"message": "insufficient_quota"}}"#, FailureKind::RateLimited)]
    #[case(r#"{"error": "insufficient_quota"}"#, FailureKind::RateLimited)]
    fn only_code_and_type_tell_quota_from_rate(#[case] body: &str, #[case] expected: FailureKind) {
        assert_eq!(kind(429, body), expected);
    }

    #[rstest]
    #[case("Your credit balance is too low to access the API.", FailureKind::QuotaExceeded)]
    #[case(
        "You have reached your specified API usage limits. You will regain access on …",
        FailureKind::QuotaExceeded
    )]
    #[case("max_tokens: too large", FailureKind::BadResponse)]
    fn the_words_of_a_wrong_request_tell_missing_credit(#[case] message: &str, #[case] expected: FailureKind) {
        let body = serde_json::json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}});
        assert_eq!(kind(400, &body.to_string()), expected);
        assert_eq!(
            kind(429, r#"{"type":"error","error":{"type":"billing_error"}}"#),
            FailureKind::QuotaExceeded
        );
        assert_eq!(
            kind(429, r#"{"type":"error","error":{"type":"rate_limit_error"}}"#),
            FailureKind::RateLimited
        );
    }

    #[rstest]
    #[case(
        400,
        r#"{"error": {"message": "x", "type": "invalid_request_error", "code": "context_length_exceeded"}}"#
    )]
    #[case(400, r#"{"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 214468 tokens > 200000 maximum"}}"#)]
    #[case(400, r#"{"type": "error", "error": {"type": "invalid_request_error", "message": "input length and `max_tokens` exceed context limit: 199999 + 8192 > 200000"}}"#)]
    #[case(400, r#"{"object": "error", "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens", "code": 400}"#)]
    #[case(400, r#"{"error": {"code": 400, "message": "the request exceeds the available context size. try increasing the context size", "type": "exceed_context_size_error"}}"#)]
    #[case(
        400,
        r#"{"error": "This model's maximum prompt length is 131072 but the request contains 140000 tokens."}"#
    )]
    #[case(400, r#"{"error": {"code": 400, "message": "The input token count (1100000) exceeds the maximum number of tokens allowed (1048576).", "status": "INVALID_ARGUMENT"}}"#)]
    #[case(
        422,
        r#"{"detail": "The input (9000 tokens) is longer than the model's context length (8192 tokens)."}"#
    )]
    #[case(413, "<html>")]
    fn a_request_that_is_too_long_is_told_from_a_wrong_one(#[case] status: u16, #[case] body: &str) {
        assert_eq!(kind(status, body), FailureKind::ContextExceeded);
    }

    #[test]
    fn an_echo_of_the_request_says_nothing_about_its_length() {
        let body = r#"{"detail": [{"type": "missing", "input": "maximum context length"}]}"#;
        assert_eq!(kind(422, body), FailureKind::BadResponse);
    }

    #[rstest]
    fn only_statuses_that_say_so_are_unprocessed(
        #[values(400, 401, 402, 403, 404, 405, 411, 413, 415, 422, 429, 529)] free: u16,
        #[values(
            300, 302, 304, 307, 408, 409, 410, 423, 425, 451, 499, 500, 501, 502, 503, 504, 520, 522, 524, 530
        )]
        unknown: u16,
    ) {
        let unprocessed = |status, body: &str| is_unprocessed(StatusCode::from_u16(status).unwrap(), body.as_bytes());
        assert!(unprocessed(free, "<html>"));
        for body in [
            "",
            "<html>",
            "{}",
            r#"{"error": {"message": "litellm.Timeout", "type": null, "code": "500"}}"#,
        ] {
            assert!(!unprocessed(unknown, body), "{unknown} {body}");
        }
    }

    #[rstest]
    #[case(
        500,
        r#"{"type": "error", "error": {"type": "api_error", "message": "Internal server error"}}"#,
        true
    )]
    #[case(
        500,
        r#"{"error": {"message": "The server had an error", "type": "server_error", "code": null}}"#,
        true
    )]
    #[case(
        503,
        r#"{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}"#,
        true
    )]
    #[case(502, r#"{"error": {"type": "api_error"}}"#, false)]
    #[case(504, r#"{"error": {"type": "server_error"}}"#, false)]
    #[case(500, r#"{"error": {"type": "timeout"}}"#, false)]
    fn a_500_is_free_only_in_the_words_of_a_model_server(
        #[case] status: u16,
        #[case] body: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(
            is_unprocessed(StatusCode::from_u16(status).unwrap(), body.as_bytes()),
            expected
        );
    }

    #[rstest]
    #[case("retry-after-ms", "1500", Some(1500))]
    #[case("retry-after", "2", Some(2000))]
    #[case("retry-after", "0.5", Some(500))]
    #[case("retry-after", "Thu, 01 Jan 1970 00:00:30 GMT", Some(30_000))]
    #[case("retry-after", "Wed, 31 Dec 1969 23:59:00 GMT", Some(0))]
    #[case("retry-after", "900", Some(900_000))]
    #[case("retry-after", "901", Some(900_000))]
    #[case("retry-after", "Thu, 01 Jan 2099 00:00:00 GMT", Some(900_000))]
    #[case("retry-after", "-5", None)]
    #[case("retry-after", "inf", None)]
    #[case("retry-after", "soon", None)]
    fn a_wait_is_read_in_every_form_and_clamped(
        #[case] name: &'static str,
        #[case] value: &'static str,
        #[case] expected: Option<u64>,
    ) {
        let headers = HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))]);
        assert_eq!(retry_after(&headers, Timestamp::UNIX_EPOCH), expected);
    }

    #[test]
    fn milliseconds_win_over_seconds_and_the_body_is_never_quoted() {
        let headers = HeaderMap::from_iter([
            (HeaderName::from_static("retry-after-ms"), HeaderValue::from_static("7")),
            (RETRY_AFTER, HeaderValue::from_static("3")),
        ]);
        let status = StatusCode::TOO_MANY_REQUESTS;
        let failure = failure_from_status(status, &headers, b"the secret prompt", Timestamp::UNIX_EPOCH);
        assert_eq!(failure.retry_after_milliseconds, Some(7));
        assert!(!failure.message.contains("secret"), "{}", failure.message);
        assert!(failure.message.contains("429 Too Many Requests"), "{}", failure.message);
    }
}
