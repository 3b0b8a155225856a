//! The pod's side of the link: one request each for attach, report and lease, one streamed response for directives.
//!
//! Reads its token for each request, since the kubelet rotates it, and the CA bundle whenever it has changed. Never
//! retries: that is up to the caller.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt};
use reqwest::{Certificate, Client, Method, RequestBuilder, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sse_stream::{Sse, SseStream};

use super::deliveries::{
    Delivery, DeliveryAck, DeliveryRequest, RelayedDeliveryAck, SensorDirectives, SensorPodReport,
};
use super::events::{EventsPage, EventsResponse};
use super::history::{HistoryAck, HistoryBatch};
use super::json_error;
use super::messages::{
    AttachRequest, AttachResponse, Directives, HEARTBEAT_SECONDS, LeaseRequest, LeaseResponse, PodRefusal, PodReport,
    RefusalCode,
};
use super::task_requests::{RelayedTaskAck, RequestedTask};
use super::text_fragments::RelayedTextFragment;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Two missed heartbeats plus a margin: after this silence the stream is considered dead.
const READ_TIMEOUT: Duration = Duration::from_secs(2 * HEARTBEAT_SECONDS + 5);

/// Why a request to the controller failed.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum LinkError {
    /// The controller refused the request.
    #[error("the controller rejects this pod: {0}")]
    Refused(PodRefusal),
    /// The token or the CA bundle is unusable.
    #[error("{path}: {problem}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with the file.
        problem: String,
    },
    /// The connection failed or broke.
    #[error("the controller cannot be reached: {0}")]
    Transport(String),
    /// The answer does not follow the protocol. Never quotes it.
    #[error("the controller's response cannot be parsed: {0}")]
    Unreadable(String),
}

impl LinkError {
    /// Whether another pod has taken this one's place, so that a retry is pointless.
    #[must_use]
    pub fn is_fence(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.code == RefusalCode::Fenced)
    }
}

/// An item of the stream of [`Directives`].
#[derive(Clone, Debug, PartialEq)]
pub enum DirectiveEvent {
    /// What the pod has to do.
    Directives(Box<Directives>),
    /// Events of a Sensor for this pod's Agent.
    Delivery(Box<Delivery>),
    /// A task that a user requests.
    Task(Box<RequestedTask>),
    /// The connection is alive.
    Heartbeat,
}

/// A client of one controller.
pub struct LinkClient {
    base: String,
    ca_file: PathBuf,
    token_file: PathBuf,
    client: Mutex<Option<(Vec<u8>, Client)>>,
}

impl LinkClient {
    /// A client for the controller at `base`; does not read files or connect yet.
    #[must_use]
    pub fn new(base: &str, ca_file: PathBuf, token_file: PathBuf) -> Self {
        Self {
            base: base.trim_end_matches('/').into(),
            ca_file,
            token_file,
            client: Mutex::new(None),
        }
    }

    /// Attaches the pod: the first request under an epoch.
    pub async fn attach(&self, attach: &AttachRequest) -> Result<AttachResponse, LinkError> {
        let response = self.post("/v1/attach", attach).await?;
        read_json(response).await
    }

    /// Sends a report of the pod.
    pub async fn report(&self, report: &PodReport) -> Result<(), LinkError> {
        self.post("/v1/report", report).await.map(drop)
    }

    /// Reports the state of leases and requests more.
    pub async fn lease(&self, request: &LeaseRequest) -> Result<LeaseResponse, LinkError> {
        let response = self.post("/v1/lease", request).await?;
        read_json(response).await
    }

    /// Sends events to a subscriber.
    pub async fn events(&self, page: &EventsPage) -> Result<EventsResponse, LinkError> {
        let response = self.post("/v1/events", page).await?;
        read_json(response).await
    }

    /// Sends text of an answer that arrives, once.
    pub async fn text(&self, fragment: &RelayedTextFragment) -> Result<(), LinkError> {
        self.post("/v1/text", fragment).await.map(drop)
    }

    /// Uploads rows of the history; answered once they are stored.
    pub async fn history(&self, batch: &HistoryBatch) -> Result<HistoryAck, LinkError> {
        let response = self.post("/v1/history", batch).await?;
        read_json(response).await
    }

    /// Follows the [`Directives`] of a pod. The stream ends with the connection.
    pub async fn directives(
        &self,
        epoch: i64,
    ) -> Result<impl Stream<Item = Result<DirectiveEvent, LinkError>> + Send + use<>, LinkError> {
        let events = self.listen(&format!("/v1/directives?epoch={epoch}")).await?;
        Ok(events.map(|event| {
            let event = event.map_err(|error| LinkError::Transport(error.to_string()))?;
            match (event.event.as_deref(), event.data) {
                (Some("directives"), Some(data)) => Ok(DirectiveEvent::Directives(Box::new(parse(&data)?))),
                (Some("delivery"), Some(data)) => Ok(DirectiveEvent::Delivery(Box::new(parse(&data)?))),
                (Some("task"), Some(data)) => Ok(DirectiveEvent::Task(Box::new(parse(&data)?))),
                // Comments and events of later versions only show that the connection is alive.
                _ => Ok(DirectiveEvent::Heartbeat),
            }
        }))
    }

    /// Acknowledges events that the worker has on disk.
    pub async fn delivered(&self, delivered: &RelayedDeliveryAck) -> Result<(), LinkError> {
        self.post("/v1/delivered", delivered).await.map(drop)
    }

    /// Sends what the worker has decided on a task.
    pub async fn acknowledge_task(&self, ack: &RelayedTaskAck) -> Result<(), LinkError> {
        self.post("/v1/tasks/ack", ack).await.map(drop)
    }

    /// Follows the [`Directives`] of a sensor pod; `None` is a heartbeat. The stream ends with the connection.
    pub async fn sensor(
        &self,
    ) -> Result<impl Stream<Item = Result<Option<SensorDirectives>, LinkError>> + Send + use<>, LinkError> {
        let events = self.listen("/v1/sensor").await?;
        Ok(events.map(|event| {
            let event = event.map_err(|error| LinkError::Transport(error.to_string()))?;
            match (event.event.as_deref(), event.data) {
                (Some("directives"), Some(data)) => parse(&data).map(Some),
                _ => Ok(None),
            }
        }))
    }

    /// Sends a report of a sensor pod.
    pub async fn sensor_report(&self, report: &SensorPodReport) -> Result<(), LinkError> {
        self.post("/v1/sensor/report", report).await.map(drop)
    }

    /// Sends events to a receiver; answered once it has them on disk.
    pub async fn deliver(&self, deliver: &DeliveryRequest) -> Result<DeliveryAck, LinkError> {
        let response = self.post("/v1/deliver", deliver).await?;
        read_json(response).await
    }

    async fn listen(
        &self,
        path: &str,
    ) -> Result<impl Stream<Item = Result<Sse, sse_stream::Error>> + Send + use<>, LinkError> {
        let request = self.request(Method::GET, path)?;
        let response = tokio::time::timeout(REQUEST_TIMEOUT, send(request))
            .await
            .map_err(|_| LinkError::Transport("the request for directives timed out".into()))??;
        Ok(SseStream::from_bytes_stream(response.bytes_stream()))
    }

    async fn post(&self, path: &str, body: &impl Serialize) -> Result<Response, LinkError> {
        send(self.request(Method::POST, path)?.json(body).timeout(REQUEST_TIMEOUT)).await
    }

    fn request(&self, method: Method, path: &str) -> Result<RequestBuilder, LinkError> {
        let token = String::from_utf8(read(&self.token_file)?).map_err(|_| self.bad_token("is not UTF-8 text"))?;
        let token = token.trim();
        if token.is_empty() {
            return Err(self.bad_token("is empty"));
        }
        let client = self.client()?;
        Ok(client
            .request(method, format!("{}{path}", self.base))
            .bearer_auth(token))
    }

    fn bad_token(&self, problem: &str) -> LinkError {
        LinkError::File {
            path: self.token_file.clone(),
            problem: problem.into(),
        }
    }

    /// The HTTP client, rebuilt whenever the CA bundle has changed.
    fn client(&self) -> Result<Client, LinkError> {
        let bundle = read(&self.ca_file)?;
        let mut kept = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, client)) = kept.as_ref().filter(|(of, _)| *of == bundle) {
            return Ok(client.clone());
        }
        let client = build(&bundle).map_err(|error| LinkError::File {
            path: self.ca_file.clone(),
            problem: format!("is not a bundle of CA certificates: {error}"),
        })?;
        *kept = Some((bundle, client.clone()));
        Ok(client)
    }
}

fn build(bundle: &[u8]) -> reqwest::Result<Client> {
    Client::builder()
        .tls_certs_only(Certificate::from_pem_bundle(bundle)?)
        .https_only(true)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .build()
}

fn read(path: &Path) -> Result<Vec<u8>, LinkError> {
    std::fs::read(path).map_err(|error| LinkError::File {
        path: path.into(),
        problem: error.to_string(),
    })
}

async fn send(request: RequestBuilder) -> Result<Response, LinkError> {
    let response = request.send().await.map_err(|error| transport(&error))?;
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    match read_json(response).await {
        Ok(refusal) => Err(LinkError::Refused(refusal)),
        Err(_) => Err(LinkError::Unreadable(format!(
            "status {status} without a readable refusal"
        ))),
    }
}

fn parse<T: DeserializeOwned>(data: &str) -> Result<T, LinkError> {
    serde_json::from_str(data).map_err(|error| LinkError::Unreadable(json_error::describe(&error)))
}

async fn read_json<T: DeserializeOwned>(response: Response) -> Result<T, LinkError> {
    let body = response.bytes().await.map_err(|error| transport(&error))?;
    serde_json::from_slice(&body).map_err(|error| LinkError::Unreadable(json_error::describe(&error)))
}

/// Keeps the innermost cause, which is the most specific: `connection refused`, `invalid peer certificate`.
fn transport(error: &reqwest::Error) -> LinkError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    LinkError::Transport(cause.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_that_cannot_be_parsed_is_not_quoted() {
        for data in [
            r#"{"stored": "canary"}"#,
            r#"{"stored": 1, "restart": "canary"}"#,
            r#"{"stored": 1 canary"#,
            r#"{"stored": 1, "canary"#,
            r#"["canary"]"#,
        ] {
            let error = parse::<HistoryAck>(data).unwrap_err().to_string();
            assert!(
                !error.contains("canary") && error.contains(" at line 1 column "),
                "{error}"
            );
        }
    }
}
