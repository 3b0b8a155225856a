//! Classifies the error answers of model servers, and reads how long they ask to wait.
//!
//! Messages name the status and the fix. The body of an answer is inspected but never quoted: it may echo a prompt.

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};

use super::model_field::ModelField;
use crate::api::failure::{CallFailure, FailureKind};
use crate::provider::reported_error::ReportedError;

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
/// Anthropic's API reports this with the status and type of an invalid request; only the message distinguishes them.
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
/// Error codes and types of a rate limit, where no status indicates it.
const RATE_CODES: [&str; 2] = ["rate_limit_exceeded", "rate_limit_error"];
const KEY_CODES: [&str; 3] = ["authentication_error", "invalid_api_key", "permission_error"];
const UNKNOWN_MODEL_CODES: [&str; 2] = ["model_not_found", "not_found_error"];
const INVALID_CODES: [&str; 2] = ["invalid_prompt", "invalid_request_error"];
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

/// Classifies an answer with this status. `body` is the beginning of its body.
pub fn failure_from_status(
    field: ModelField,
    (status, headers): (StatusCode, &HeaderMap),
    body: &[u8],
    now: Timestamp,
) -> CallFailure {
    let (kind, advice) = classify(field, status.as_u16(), &ReportedError::from_body(body));
    CallFailure {
        retry_after_milliseconds: retry_after(headers, now),
        ..CallFailure::new(
            kind,
            format!("the model server answered {}: {advice}", describe_status(status)),
        )
    }
}

/// Classifies an error that a server reported within an answer with a good status.
pub fn failure_from_error(field: ModelField, error: &ReportedError) -> CallFailure {
    let (kind, advice) = classify(field, equivalent_status(error), error);
    CallFailure::new(
        kind,
        format!("the model server reported an error within its answer: {advice}"),
    )
}

/// The kind of a [`CallFailure`], and what to do about it.
fn classify(field: ModelField, status: u16, error: &ReportedError) -> (FailureKind, String) {
    let too_long = || {
        let advice = format!(
            "the request does not fit into the model's context; set {field}.contextTokens to the context length of the \
             server, so that older turns are left out in time"
        );
        (FailureKind::ContextExceeded, advice)
    };
    match status {
        401 | 403 => (
            FailureKind::AuthenticationFailed,
            format!("check the key that {field}.apiKeySecretRef names, and that it may use {field}.name"),
        ),
        402 => (
            FailureKind::QuotaExceeded,
            "add credit to the provider account".to_owned(),
        ),
        429 if error.is_one_of(&QUOTA_CODES) => (
            FailureKind::QuotaExceeded,
            "raise the quota at the provider, or wait until it resets".to_owned(),
        ),
        400 if error.says(&OUT_OF_CREDIT) => (
            FailureKind::QuotaExceeded,
            "add credit to the provider account, or raise its limit".to_owned(),
        ),
        413 => too_long(),
        400 | 422 | 500 if is_too_long(error) => too_long(),
        429 => (FailureKind::RateLimited, "the loop retries later".to_owned()),
        408 | 409 | 500.. => (FailureKind::Unreachable, "the loop retries".to_owned()),
        404 => (
            FailureKind::BadResponse,
            format!("check {field}.baseURL (with /v1 for OpenAI, without for Anthropic) and {field}.name"),
        ),
        300..=399 => (
            FailureKind::BadResponse,
            format!(
                "redirects are not followed, since they could disclose the key; set {field}.baseURL to the final address"
            ),
        ),
        _ => (
            FailureKind::BadResponse,
            format!("the server rejected the request; check that it supports the settings of {field}"),
        ),
    }
}

fn is_too_long(error: &ReportedError) -> bool {
    error.is_one_of(&CONTEXT_CODES) || error.says(&CONTEXT_WORDS)
}

/// The status with which a server would have reported the error before its answer began.
fn equivalent_status(error: &ReportedError) -> u16 {
    let codes: [(&[&str], u16); 4] = [
        (&QUOTA_CODES, 429),
        (&CONTEXT_CODES, 400),
        (&RATE_CODES, 429),
        (&KEY_CODES, 401),
    ];
    let of = |codes: &[(&[&str], u16)]| {
        let found = codes.iter().find(|(codes, _)| error.is_one_of(codes));
        found.map(|(_, status)| *status)
    };
    of(&codes)
        .or(error.status())
        .or_else(|| of(&[(&UNKNOWN_MODEL_CODES, 404), (&INVALID_CODES, 400)]))
        .unwrap_or(if error.says(&OUT_OF_CREDIT) || is_too_long(error) {
            400
        } else {
            500
        })
}

/// Whether an answer with this status means that the request was not processed, so that nothing is billed.
///
/// The outcome of any other error is unknown: a proxy that times out after 60 s leaves a model running, which bills. A
/// 500 or 503 counts as unprocessed only when the model server itself reports it, in its own format.
pub fn is_unprocessed(status: StatusCode, body: &[u8]) -> bool {
    match status.as_u16() {
        500 | 503 => ReportedError::from_body(body).is_one_of(&UNPROCESSED),
        status => is_rejection(status),
    }
}

/// Whether an error within an answer means that the request was not processed, if nothing else came. Unlike before an
/// answer, an internal error of the server does not mean this: it may have come after hidden reasoning.
pub fn is_rejected(error: &ReportedError) -> bool {
    is_rejection(equivalent_status(error))
}

fn is_rejection(status: u16) -> bool {
    matches!(status, 400..=405 | 411 | 413 | 415 | 422 | 429 | 529)
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
        let answer = (status, &HeaderMap::new());
        failure_from_status(ModelField::Main, answer, body.as_bytes(), Timestamp::UNIX_EPOCH).kind
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
    fn only_code_and_type_distinguish_quota_from_rate(#[case] body: &str, #[case] expected: FailureKind) {
        assert_eq!(kind(429, body), expected);
    }

    #[rstest]
    #[case("Your credit balance is too low to access the API.", FailureKind::QuotaExceeded)]
    #[case(
        "You have reached your specified API usage limits. You will regain access on …",
        FailureKind::QuotaExceeded
    )]
    #[case("max_tokens: too large", FailureKind::BadResponse)]
    fn the_message_of_an_invalid_request_identifies_missing_credit(
        #[case] message: &str,
        #[case] expected: FailureKind,
    ) {
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
    fn a_request_that_is_too_long_is_distinguished_from_an_invalid_one(#[case] status: u16, #[case] body: &str) {
        assert_eq!(kind(status, body), FailureKind::ContextExceeded);
    }

    #[test]
    fn an_echo_of_the_request_does_not_indicate_its_length() {
        let body = r#"{"detail": [{"type": "missing", "input": "maximum context length"}]}"#;
        assert_eq!(kind(422, body), FailureKind::BadResponse);
    }

    #[rstest]
    fn only_definite_statuses_count_as_unprocessed(
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
    fn a_500_is_free_only_with_the_message_of_a_model_server(
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
    #[case(r#"{"code": "context_length_exceeded"}"#, FailureKind::ContextExceeded, true)]
    #[case(
        r#"{"type": "invalid_request_error", "message": "prompt is too long: 214468 tokens > 200000 maximum"}"#,
        FailureKind::ContextExceeded,
        true
    )]
    #[case(
        r#"{"message": "This model's maximum context length is 4096 tokens"}"#,
        FailureKind::ContextExceeded,
        true
    )]
    #[case(r#"{"code": "insufficient_quota"}"#, FailureKind::QuotaExceeded, true)]
    #[case(r#"{"code": 402}"#, FailureKind::QuotaExceeded, true)]
    #[case(
        r#"{"type": "invalid_request_error", "message": "Your credit balance is too low"}"#,
        FailureKind::QuotaExceeded,
        true
    )]
    #[case(r#"{"code": "rate_limit_exceeded"}"#, FailureKind::RateLimited, true)]
    #[case(r#"{"type": "rate_limit_error"}"#, FailureKind::RateLimited, true)]
    #[case(r#"{"code": 429}"#, FailureKind::RateLimited, true)]
    #[case(r#"{"type": "permission_error"}"#, FailureKind::AuthenticationFailed, true)]
    #[case(r#"{"type": "not_found_error"}"#, FailureKind::BadResponse, true)]
    #[case(r#"{"code": "invalid_prompt"}"#, FailureKind::BadResponse, true)]
    #[case(r#"{"type": "overloaded_error"}"#, FailureKind::Unreachable, false)]
    #[case(r#"{"code": "server_error"}"#, FailureKind::Unreachable, false)]
    #[case(r#"{"code": 504, "type": "invalid_request_error"}"#, FailureKind::Unreachable, false)]
    #[case("{}", FailureKind::Unreachable, false)]
    fn an_error_within_an_answer_is_of_the_kind_of_the_same_error_before_it(
        #[case] error: &str,
        #[case] expected: FailureKind,
        #[case] rejected: bool,
    ) {
        let error = ReportedError::from_body(format!(r#"{{"error": {error}}}"#).as_bytes());
        assert_eq!(failure_from_error(ModelField::Main, &error).kind, expected);
        assert_eq!(is_rejected(&error), rejected);
    }

    #[test]
    fn messages_name_the_field_of_the_model_that_was_called() {
        let error = ReportedError::from_body(br#"{"error": {"code": "invalid_api_key"}}"#);
        let message = failure_from_error(ModelField::Light, &error).message;
        assert!(
            message.ends_with(
                "check the key that spec.lightModel.apiKeySecretRef names, and that it may use spec.lightModel.name"
            ),
            "{message}"
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
        let failure = failure_from_status(
            ModelField::Main,
            (status, &headers),
            b"the secret prompt",
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(failure.retry_after_milliseconds, Some(7));
        assert!(!failure.message.contains("secret"), "{}", failure.message);
        assert!(failure.message.contains("429 Too Many Requests"), "{}", failure.message);
    }
}
