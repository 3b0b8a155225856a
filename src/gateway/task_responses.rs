//! Sends the responses to tasks to the server of `spec.task.responses`.
//!
//! One attempt for each request of the worker, which repeats it until the server has accepted the response. Keeps
//! nothing, and logs no text of a response.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode};
use reqwest::{Client, Url};
use serde::Serialize;
use serde_json::{Map, Value};

use super::headers_secret::HeadersSecret;
use super::http;
use crate::api::agent::RESPONSES_SECRET;
use crate::egress::AddressPolicy;
use crate::link::pod::PodConfig;
use crate::link::socket::OutgoingResponse;

/// Longest time for one attempt.
const ATTEMPT: Duration = Duration::from_secs(30);
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
    client: Result<(Client, Url), String>,
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
    pub(super) fn new(config: &PodConfig, headers: &Path, policy: &Arc<AddressPolicy>) -> Self {
        let target = config.spec.response_endpoint().map(|endpoint| ResponseTarget {
            client: Url::parse(&endpoint.url)
                .map_err(|error| format!("the URL is not valid: {error}"))
                .and_then(|url| Ok((http::client(&url, policy)?, url))),
            headers: endpoint.headers_secret_ref.as_ref().map(|_| HeadersSecret {
                dir: headers.join(RESPONSES_SECRET),
                field: "spec.task.responses.http.headersSecretRef".to_owned(),
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
        let (client, url) = target.client.as_ref().map_err(Clone::clone)?;
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
        let answer = sending.send().await.map_err(|error| http::cause(&error))?;
        Ok(answer.status())
    }
}
