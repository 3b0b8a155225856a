//! Validates the address of a source without connecting to it.

use reqwest::Url;
use serde_json::Value;

use crate::FieldError;
use agentloop_api::SensorSpec;
use agentloop_api::endpoint::SourceEndpoint;

/// Maximum number of bytes of a tool's arguments, as JSON.
const MAX_ARGUMENT_BYTES: usize = 16 * 1024;

/// The URL that requests go to; `ws` becomes `http`.
pub fn url(endpoint: &SourceEndpoint<'_>) -> Result<Url, FieldError> {
    let wrong = |detail: String| FieldError {
        field: format!("{}.url", endpoint.field),
        detail,
    };
    let text = match endpoint.url.strip_prefix("ws") {
        Some(rest) => format!("http{rest}"),
        None => endpoint.url.to_owned(),
    };
    let url = Url::parse(&text).map_err(|error| wrong(format!("is not a valid URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(wrong("is not an HTTP or WebSocket URL".into()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong(
            "must not carry a user or password: put them into a Secret as the header Authorization and name it in \
             headersSecretRef"
                .into(),
        ));
    }
    if url.fragment().is_some() {
        return Err(wrong("must not have a fragment: remove everything from '#' on".into()));
    }
    Ok(url)
}

/// Checks the URL of a spec's source, if it has one, and the size of a tool's arguments.
pub fn check(spec: &SensorSpec) -> Result<(), FieldError> {
    if let Some(endpoint) = spec.source.endpoint() {
        url(&endpoint)?;
    }
    let tool = spec.source.poll.as_ref().and_then(|poll| poll.tool.as_ref());
    let bytes = tool.map_or(0, |tool| Value::Object(tool.arguments.clone()).to_string().len());
    if bytes > MAX_ARGUMENT_BYTES {
        return Err(FieldError {
            field: "spec.source.poll.tool.arguments".into(),
            detail: format!("must be at most {MAX_ARGUMENT_BYTES} bytes as JSON, and has {bytes}"),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn of(url: &str) -> SourceEndpoint<'_> {
        SourceEndpoint {
            field: "spec.source.poll.http",
            url,
            headers: None,
            tls: None,
        }
    }

    #[rstest]
    #[case("https://example.com/a?b=c", "https://example.com/a?b=c")]
    #[case("ws://example.com:81/ticker", "http://example.com:81/ticker")]
    #[case("wss://example.com/", "https://example.com/")]
    #[case("http://[::1]:80/@/", "http://[::1]/@/")]
    fn an_address_is_used_unchanged(#[case] text: &str, #[case] expected: &str) {
        assert_eq!(url(&of(text)).unwrap().as_str(), expected);
    }

    #[rstest]
    #[case("https://", "is not a valid URL: empty host")]
    #[case("http://a:65536/", "is not a valid URL: invalid port number")]
    #[case("ftp://a/", "is not an HTTP or WebSocket URL")]
    #[case(
        "https://me:secret@a/",
        "must not carry a user or password: put them into a Secret as the header Authorization and name it in headersSecretRef"
    )]
    #[case(
        "https://me@a/",
        "must not carry a user or password: put them into a Secret as the header Authorization and name it in headersSecretRef"
    )]
    #[case("https://a/#b", "must not have a fragment: remove everything from '#' on")]
    fn an_invalid_address_is_reported_before_any_request(#[case] text: &str, #[case] detail: &str) {
        let invalid = url(&of(text)).unwrap_err();
        assert_eq!(invalid.to_string(), format!("spec.source.poll.http.url: {detail}"));
    }

    #[test]
    fn arguments_of_a_tool_may_have_16_kib_and_no_byte_more() {
        let check = |bytes: usize| {
            let arguments = serde_json::json!({"a": "x".repeat(bytes - r#"{"a":""}"#.len())});
            let tool = serde_json::json!({"server": {"url": "https://a/"}, "name": "t", "arguments": arguments});
            let spec = serde_json::json!({"agentNames": ["x"], "source": {"poll": {"tool": tool}}});
            super::check(&serde_json::from_value(spec).unwrap())
        };
        assert_eq!(check(16 * 1024), Ok(()));
        let expected = "spec.source.poll.tool.arguments: must be at most 16384 bytes as JSON, and has 16385";
        assert_eq!(check(16 * 1024 + 1).unwrap_err().to_string(), expected);
    }
}
