//! One OTLP request over HTTP: how it is sent, and what its response means.

use std::time::Duration;

use agentloop_support::text::{first_chars, root_cause};
use prost::bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url};

use crate::variables::ExportSettings;

const PROTOBUF: &str = "application/x-protobuf";
const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
/// Largest response that is read: it is about records that the collector rejected.
const MAX_RESPONSE: u64 = 64 * 1024;

/// The connection to a collector.
pub(crate) struct CollectorClient {
    http: Client,
    endpoint: Url,
}

/// Why a request was not accepted.
pub(crate) struct ExportFailure {
    pub(crate) cause: String,
    /// Whether the same request may be accepted later.
    pub(crate) is_temporary: bool,
    /// How long the collector asks to wait.
    pub(crate) retry_after: Option<Duration>,
}

impl ExportFailure {
    pub(crate) fn temporary(cause: String) -> Self {
        Self {
            cause,
            is_temporary: true,
            retry_after: None,
        }
    }

    pub(crate) fn rejected(records: u64) -> Self {
        Self {
            is_temporary: false,
            ..Self::temporary(format!("the collector rejected {records} records"))
        }
    }
}

impl CollectorClient {
    /// A client that follows no redirects: they could disclose a header.
    pub(crate) fn new(settings: &ExportSettings) -> Result<Self, ExportFailure> {
        let builder = Client::builder()
            .user_agent(USER_AGENT)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(settings.timeout)
            .default_headers(settings.headers.clone());
        let builder = match settings.endpoint.scheme() {
            "https" => builder,
            // Plain HTTP needs no roots, and none may be installed.
            _ => builder.tls_certs_only([]),
        };
        let http = builder
            .build()
            .map_err(|error| ExportFailure::temporary(cause(&error)))?;
        Ok(Self {
            http,
            endpoint: settings.endpoint.clone(),
        })
    }

    /// Host of the collector, for messages.
    pub(crate) fn host(&self) -> &str {
        self.endpoint.host_str().unwrap_or_default()
    }

    /// Sends a request. Returns the response if it is short enough to be read, otherwise an empty one.
    pub(crate) async fn send(&self, body: Bytes) -> Result<Bytes, ExportFailure> {
        let request = self.http.post(self.endpoint.clone());
        let request = request.header(CONTENT_TYPE, PROTOBUF).body(body);
        let response = request.send().await;
        let response = response.map_err(|error| ExportFailure::temporary(cause(&error)))?;
        let status = response.status();
        if status.is_success() {
            return Ok(short_body(response).await.unwrap_or_default());
        }
        let seconds = response.headers().get(RETRY_AFTER);
        let seconds = seconds.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Err(ExportFailure {
            cause: format!("status {}", status.as_u16()),
            // As the protocol lists them.
            is_temporary: matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            ),
            retry_after: seconds.map(|seconds: u64| Duration::from_secs(seconds.min(300))),
        })
    }
}

async fn short_body(response: Response) -> Option<Bytes> {
    response.content_length().filter(|length| *length <= MAX_RESPONSE)?;
    response.bytes().await.ok()
}

/// The innermost cause, which contains neither a URL nor a header.
fn cause(error: &reqwest::Error) -> String {
    first_chars(&root_cause(error), 200).to_owned()
}
