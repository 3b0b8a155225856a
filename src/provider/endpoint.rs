//! Where and how the servers of a wire format are called.

use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};

use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_ledger::bound::RequestOverhead;

/// The facts of a wire format that do not depend on a request.
#[derive(Debug)]
pub struct ModelEndpoint {
    /// Route on the gateway's socket.
    pub route: &'static str,
    /// The path of calls, relative to the base URL.
    pub path: &'static str,
    /// The name of the format, for messages of the gateway.
    pub format: &'static str,
    /// What its base URL has to include, for messages of the gateway.
    pub base_url_advice: &'static str,
    /// What `spec.model.baseURL` must be, for messages of the worker.
    pub server: &'static str,
    /// A header of every request.
    pub header: Option<(HeaderName, HeaderValue)>,
    /// The header with the key.
    pub key: KeyHeader,
    /// What a server renders in addition to the text of a request.
    pub overhead: RequestOverhead,
}

/// Where a request carries the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyHeader {
    /// `Authorization: Bearer`.
    Bearer,
    /// `x-api-key`.
    XApiKey,
}

impl ModelEndpoint {
    /// Headers of every request.
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        self.header.clone().into_iter().collect()
    }

    /// The header with the key; `None` if the key is not a valid header value.
    #[must_use]
    pub fn authorization(&self, key: &str) -> Option<(HeaderName, HeaderValue)> {
        const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
        let (name, text) = match self.key {
            KeyHeader::Bearer => (AUTHORIZATION, format!("Bearer {key}")),
            KeyHeader::XApiKey => (X_API_KEY, key.to_owned()),
        };
        let mut value = HeaderValue::try_from(text).ok()?;
        value.set_sensitive(true);
        Some((name, value))
    }

    /// Builds the failure for an answer that is not in this format.
    pub fn bad_response(&self, message: &str) -> CallFailure {
        CallFailure::new(
            FailureKind::BadResponse,
            format!("{message}: check that model.baseURL is {}", self.server),
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::WireFormat;

    #[test]
    fn a_key_is_sensitive_and_in_the_header_of_its_format() {
        for (format, name, value) in [
            (WireFormat::OpenAiChat, "authorization", "Bearer k"),
            (WireFormat::AnthropicMessages, "x-api-key", "k"),
        ] {
            let endpoint = format.endpoint();
            let (header, sent) = endpoint.authorization("k").unwrap();
            assert_eq!((header.as_str(), sent.to_str().unwrap()), (name, value));
            assert!(sent.is_sensitive());
            assert_eq!(endpoint.authorization("two\nlines"), None);
        }
    }
}
