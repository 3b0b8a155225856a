//! Sends the responses to tasks to the server of `spec.task.responses`.
//!
//! One attempt for each request of the worker, which repeats it until the server has accepted the response. Keeps
//! nothing, and logs no text of a response.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode};
use reqwest::Url;
use serde::Serialize;
use serde_json::{Map, Value};

use super::headers_secret::HeadersSecret;
use super::http::{self, MountedRoots, ServerClient};
use super::mcp_proxy::ServerDirs;
use crate::api::agent::RESPONSES_SECRET;
use crate::api::server_tls::RESPONSES_CA;
use crate::api::task::ResponseEndpoint;
use crate::egress::AddressPolicy;
use crate::link::pod::PodConfig;
use crate::link::socket::OutgoingResponse;

/// Longest time for one attempt.
const ATTEMPT: Duration = Duration::from_secs(30);
/// The path in the spec of the receiver, for messages.
const PATH: &str = "spec.task.responses.http";
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// The receiver of an Agent's responses.
pub struct ResponseSender {
    agent: ResponseAgent,
    target: Option<ResponseTarget>,
}

#[derive(Serialize, Clone)]
struct ResponseAgent {
    namespace: String,
    name: String,
    uid: String,
}

struct ResponseTarget {
    /// The client and URL to use, or why there is none.
    server: Result<(ServerClient, Url), String>,
    headers: Option<HeadersSecret>,
}

/// What the server receives.
#[derive(Serialize)]
struct SentResponse<'a> {
    agent: &'a ResponseAgent,
    #[serde(flatten)]
    response: &'a Map<String, Value>,
}

impl ResponseSender {
    pub(super) fn new(config: &PodConfig, dirs: &ServerDirs, policy: &Arc<AddressPolicy>) -> Self {
        let target = config.spec.response_endpoint().map(|endpoint| ResponseTarget {
            server: server(endpoint, dirs, policy),
            headers: endpoint.headers_secret_ref.as_ref().map(|_| HeadersSecret {
                dir: dirs.headers.join(RESPONSES_SECRET),
                field: format!("{PATH}.headersSecretRef"),
            }),
        });
        Self {
            agent: ResponseAgent {
                namespace: config.namespace.clone(),
                name: config.name.clone(),
                uid: config.uid.clone(),
            },
            target,
        }
    }

    /// Sends a response once. Returns the status of the server, or why there is none.
    pub(super) async fn send(&self, response: &OutgoingResponse) -> Result<StatusCode, String> {
        let Some(target) = &self.target else {
            return Err("spec.task.responses is not set".to_owned());
        };
        let (server, url) = target.server.as_ref().map_err(Clone::clone)?;
        let client = server.get()?;
        let mut headers = match &target.headers {
            Some(secret) => secret.read()?,
            None => HeaderMap::new(),
        };
        let key = format!("{}/{}", self.agent.uid, response.id);
        let key = HeaderValue::from_str(&key).map_err(|_| "the id of the task is not a header value".to_owned())?;
        headers.insert(IDEMPOTENCY_KEY, key);
        let body = SentResponse {
            agent: &self.agent,
            response: &response.body,
        };
        let sending = client.post(url.clone()).headers(headers).json(&body).timeout(ATTEMPT);
        let answer = sending.send().await.map_err(|error| {
            let cause = http::cause(&error);
            let advice = http::tls_advice(&cause, PATH);
            format!("{cause}{advice}")
        })?;
        Ok(answer.status())
    }
}

fn server(
    endpoint: &ResponseEndpoint,
    dirs: &ServerDirs,
    policy: &Arc<AddressPolicy>,
) -> Result<(ServerClient, Url), String> {
    let url = Url::parse(&endpoint.url).map_err(|error| format!("the URL is not valid: {error}"))?;
    let roots = endpoint.tls.as_ref();
    let roots = roots.map(|_| MountedRoots::new(&dirs.ca.join(RESPONSES_CA), PATH));
    Ok((ServerClient::new(&url, policy, roots)?, url))
}
