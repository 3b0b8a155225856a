//! The pod's side of the link: one request each for attach, report and lease, one long answer for directives.
//!
//! Reads its token anew for each request, since the kubelet rotates it, and the CA bundle whenever it has changed.
//! Never retries: when and how often is the caller's matter.

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
use super::messages::{
    AttachRequest, AttachResponse, Directives, HEARTBEAT_SECONDS, LeaseRequest, LeaseResponse, PodRefusal, PodReport,
    RefusalCode,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Two heartbeats missed and a little: the stream is dead.
const SILENCE: Duration = Duration::from_secs(2 * HEARTBEAT_SECONDS + 5);

/// Why the controller was not reached, or said no.
#[derive(thiserror::Error, Debug)]
pub enum LinkError {
    /// It said no.
    #[error("the controller refuses this pod: {0}")]
    Refused(PodRefusal),
    /// The token or the CA bundle cannot be used.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// No connection, or it broke.
    #[error("the controller cannot be reached: {0}")]
    Transport(String),
    /// It answered something else than the protocol says.
    #[error("the controller's answer cannot be read: {0}")]
    Unreadable(String),
}

impl LinkError {
    /// Whether another pod has taken this one's place, so that asking again is of no use.
    #[must_use]
    pub fn is_fence(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.code == RefusalCode::Fenced)
    }
}

/// What the stream of directives carries.
#[derive(Clone, Debug, PartialEq)]
pub enum DirectiveEvent {
    /// What the pod is to do.
    Directives(Box<Directives>),
    /// Events of a Sensor for this pod's Agent.
    Delivery(Box<Delivery>),
    /// The controller is there.
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
    /// A client for the controller at `base`; nothing is read or sent yet.
    #[must_use]
    pub fn new(base: &str, ca_file: PathBuf, token_file: PathBuf) -> Self {
        Self {
            base: base.trim_end_matches('/').into(),
            ca_file,
            token_file,
            client: Mutex::new(None),
        }
    }

    /// Introduces the pod.
    pub async fn attach(&self, attach: &AttachRequest) -> Result<AttachResponse, LinkError> {
        let response = self.post("/v1/attach", attach).await?;
        read_json(response).await
    }

    /// Says how the pod is.
    pub async fn report(&self, report: &PodReport) -> Result<(), LinkError> {
        self.post("/v1/report", report).await.map(drop)
    }

    /// Says what became of leases, and asks for more.
    pub async fn lease(&self, request: &LeaseRequest) -> Result<LeaseResponse, LinkError> {
        let response = self.post("/v1/lease", request).await?;
        read_json(response).await
    }

    /// Sends events to one who reads them.
    pub async fn events(&self, page: &EventsPage) -> Result<EventsResponse, LinkError> {
        let response = self.post("/v1/events", page).await?;
        read_json(response).await
    }

    /// Listens to what the pod is to do. The stream ends when the connection does.
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
                // Comments and events of a newer version show that it is there, no more.
                _ => Ok(DirectiveEvent::Heartbeat),
            }
        }))
    }

    /// Says that the worker has events on disk.
    pub async fn delivered(&self, delivered: &RelayedDeliveryAck) -> Result<(), LinkError> {
        self.post("/v1/delivered", delivered).await.map(drop)
    }

    /// Listens to what a sensor pod is to do; `None` is a heartbeat. The stream ends when the connection does.
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

    /// Says how a sensor pod is.
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
            .map_err(|_| LinkError::Transport("no answer to the request for directives".into()))??;
        Ok(SseStream::from_bytes_stream(response.bytes_stream()))
    }

    async fn post(&self, path: &str, body: &impl Serialize) -> Result<Response, LinkError> {
        send(self.request(Method::POST, path)?.json(body).timeout(REQUEST_TIMEOUT)).await
    }

    fn request(&self, method: Method, path: &str) -> Result<RequestBuilder, LinkError> {
        let token = String::from_utf8(read(&self.token_file)?).map_err(|_| self.bad_token("is no text"))?;
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

    /// The HTTP client; another one once the CA bundle has changed.
    fn client(&self) -> Result<Client, LinkError> {
        let bundle = read(&self.ca_file)?;
        let mut kept = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, client)) = kept.as_ref().filter(|(of, _)| *of == bundle) {
            return Ok(client.clone());
        }
        let client = build(&bundle).map_err(|error| LinkError::File {
            path: self.ca_file.clone(),
            problem: format!("is no bundle of CA certificates: {error}"),
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
        .read_timeout(SILENCE)
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
        Err(_) => Err(LinkError::Unreadable(format!("status {status} without a refusal"))),
    }
}

fn parse<T: DeserializeOwned>(data: &str) -> Result<T, LinkError> {
    serde_json::from_str(data).map_err(|error| LinkError::Unreadable(error.to_string()))
}

async fn read_json<T: DeserializeOwned>(response: Response) -> Result<T, LinkError> {
    let body = response.bytes().await.map_err(|error| transport(&error))?;
    serde_json::from_slice(&body).map_err(|error| LinkError::Unreadable(error.to_string()))
}

/// The innermost cause says most: `connection refused`, `invalid peer certificate`.
fn transport(error: &reqwest::Error) -> LinkError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    LinkError::Transport(cause.to_string())
}
