//! What kind of failure a server's answer is, and how long it asks to wait.
//!
//! Messages name the status and what to do; the body of an answer is looked at, never quoted: it may echo a prompt.

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde::Deserialize;

use crate::api::failure::{Failure, FailureKind};
use crate::engine::Purpose;

/// Longest wait that a server may ask for.
pub const MAX_RETRY_AFTER_MILLISECONDS: u64 = 15 * 60 * 1000;
/// Codes and types of errors that are about quota although the status says rate.
const QUOTA_CODES: [&str; 6] = [
    "billing_error",
    "insufficient_quota",
    "billing_hard_limit_reached",
    "billing_not_active",
    "quota_exceeded",
    "insufficient_balance",
];

/// A failure of a call for this purpose: its words name the fields of the model that served it.
pub fn of_purpose(purpose: Purpose, mut failure: Failure) -> Failure {
    if purpose.uses_light_model() {
        failure.message = failure.message.replace("spec.model", "spec.lightModel");
    }
    failure
}

/// A failure without a wait.
pub fn failure(kind: FailureKind, message: impl Into<String>) -> Failure {
    Failure {
        kind,
        message: message.into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}

/// The failure that an answer with this status is. `body` is its beginning.
pub fn of_status(status: StatusCode, headers: &HeaderMap, body: &[u8], now: Timestamp) -> Failure {
    let code = status.as_u16();
    let (kind, advice) = match code {
        401 | 403 => (
            FailureKind::AuthenticationFailed,
            "check the key that spec.model.apiKeySecretRef names, and that it may use spec.model.name",
        ),
        402 => (FailureKind::QuotaExceeded, "the account behind the key needs credit"),
        429 if is_quota(body) => (
            FailureKind::QuotaExceeded,
            "the quota is used up; raise it at the provider or wait for its reset",
        ),
        400 if is_out_of_credit(body) => (
            FailureKind::QuotaExceeded,
            "the account behind the key needs credit, or its limit raised",
        ),
        429 => (
            FailureKind::RateLimited,
            "too many requests; the loop waits and tries again",
        ),
        408 | 409 | 500.. => (
            FailureKind::Unreachable,
            "trouble on the server's side; the loop tries again",
        ),
        404 => (
            FailureKind::BadResponse,
            "check spec.model.baseURL (with /v1 for OpenAI, without for Anthropic) and spec.model.name",
        ),
        300..=399 => (
            FailureKind::BadResponse,
            "redirects are not followed, they would carry the key elsewhere; set spec.model.baseURL to the final address",
        ),
        _ => (
            FailureKind::BadResponse,
            "the server refused the request; check spec.model against what it supports",
        ),
    };
    Failure {
        kind,
        message: format!("the model server answered {}: {advice}", words(status)),
        retry_after_milliseconds: retry_after(headers, now),
        resumes_at: None,
    }
}

/// `429 Too Many Requests`; a status without a name stays a number.
fn words(status: StatusCode) -> String {
    status.canonical_reason().map_or_else(
        || status.as_u16().to_string(),
        |reason| format!("{} {reason}", status.as_u16()),
    )
}

fn is_quota(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Body {
        error: ErrorBody,
    }
    #[derive(Deserialize)]
    struct ErrorBody {
        #[serde(default)]
        code: serde_json::Value,
        #[serde(default)]
        r#type: serde_json::Value,
    }
    serde_json::from_slice::<Body>(body).is_ok_and(|body| {
        let is_one = |value: &serde_json::Value| value.as_str().is_some_and(|text| QUOTA_CODES.contains(&text));
        is_one(&body.error.code) || is_one(&body.error.r#type)
    })
}

/// Anthropic's API says so with the status and type of a wrong request: only the words tell it.
fn is_out_of_credit(body: &[u8]) -> bool {
    const WORDS: [&str; 2] = ["credit balance is too low", "reached your specified API usage limits"];
    #[derive(Deserialize)]
    struct Body {
        error: ErrorBody,
    }
    #[derive(Deserialize)]
    struct ErrorBody {
        message: String,
    }
    serde_json::from_slice::<Body>(body).is_ok_and(|body| WORDS.iter().any(|words| body.error.message.contains(words)))
}

/// `retry-after-ms`, else `Retry-After` in seconds or as a date; clamped.
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
        of_status(status, &HeaderMap::new(), body.as_bytes(), Timestamp::UNIX_EPOCH).kind
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
        let failure = of_status(status, &headers, b"the secret prompt", Timestamp::UNIX_EPOCH);
        assert_eq!(failure.retry_after_milliseconds, Some(7));
        assert!(!failure.message.contains("secret"), "{}", failure.message);
        assert!(failure.message.contains("429 Too Many Requests"), "{}", failure.message);
    }
}
