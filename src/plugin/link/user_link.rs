//! A client of the controller with the rights of a user: one stream of events, and the request of a task.
//!
//! Never retries: that is up to the caller.

use std::net::Ipv4Addr;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client as ApiClient};
use reqwest::{Certificate, Client, RequestBuilder, Response, StatusCode, Url};
use serde::{Deserialize, Serialize};
use sse_stream::{Sse, SseStream};

use super::port_forward::PortForward;
use super::{LinkRoute, UserToken};
use crate::api::NamespacedName;
use crate::link::events::{END_EVENT, EventLine, LATEST, START_EVENT};
use crate::link::json_error;
use crate::link::messages::HEARTBEAT_SECONDS;
use crate::link::pod::LINK_CA_CONFIGMAP;
use crate::link::text_fragments::{TEXT_EVENT, TextFragment};
use crate::plugin::cluster_errors::problem;
use crate::plugin::failure::{PluginError, is_not_found};
use crate::plugin::session::PluginSession;
use crate::support::text::root_cause;

/// Port of the link.
pub(super) const LINK_PORT: u16 = 8443;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The controller waits up to 10 s for the pod of the Agent.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Two missed heartbeats plus a margin: after this silence a stream is considered dead.
const READ_TIMEOUT: Duration = Duration::from_secs(2 * HEARTBEAT_SECONDS + 5);

/// Why a request to the controller fails.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum LinkFailure {
    /// The controller rejects the request.
    #[error("the controller rejected the request: {message}")]
    Refused {
        /// Status of the response.
        status: u16,
        /// The reason and the fix.
        message: String,
    },
    /// There is no token to authenticate with.
    #[error("{0}")]
    Token(String),
    /// The connection failed or broke.
    #[error("the controller cannot be reached: {0}")]
    Unreachable(String),
    /// The controller accepted the request for events, and ended them before the first one: another pod takes over.
    #[error("the events of this Agent have ended: {0}")]
    Ended(String),
    /// The response does not follow the protocol. Never quotes it.
    #[error("the controller's response cannot be read: {0}")]
    Unreadable(String),
}

impl LinkFailure {
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Refused { status, .. } => [429, 503].contains(status),
            Self::Unreachable(_) | Self::Ended(_) => true,
            Self::Token(_) | Self::Unreadable(_) => false,
        }
    }
}

/// Where a stream of events begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventCursor {
    /// With the next event.
    Latest,
    /// After the event with this number.
    After(i64),
}

/// An item of a stream of events.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum FeedItem {
    /// The cursor of a stream that begins with the next event.
    Start(i64),
    /// An event.
    Line(Box<EventLine>),
    /// Text of an answer that arrives.
    Text(TextFragment),
    /// The end, with the reason.
    End(String),
}

/// A task for an Agent.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TaskSubmission {
    /// The task.
    pub prompt: String,
    /// Idempotency key.
    pub id: String,
    /// Source of untrusted content in the prompt. Absent: the user wrote all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untrusted_content: Option<String>,
}

/// The confirmation of a task.
#[derive(Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SubmissionReceipt {
    /// Id of the task in the journal.
    pub id: String,
    /// `Accepted`, or `Repeated` if there was a task with this key.
    pub state: String,
    /// The cursor after which the events of the task begin.
    #[serde(default)]
    pub after: Option<i64>,
}

impl SubmissionReceipt {
    /// Whether the task was there before, and may have ended already.
    #[must_use]
    pub fn is_repeated(&self) -> bool {
        self.state == "Repeated"
    }
}

/// What the controller says when it rejects a request.
#[derive(Deserialize)]
struct RefusalBody {
    message: String,
}

/// A connection to the controller.
pub struct UserLink<'a> {
    base: String,
    http: Client,
    api: &'a ApiClient,
    token: &'a UserToken,
    forward: Option<PortForward>,
}

impl<'a> UserLink<'a> {
    /// Prepares the connection, for requests about Agents of `namespace`.
    pub async fn open(session: &'a PluginSession, namespace: &str) -> Result<Self, PluginError> {
        session.refuse_impersonation(namespace)?;
        let (base, http, forward) = match &session.route {
            LinkRoute::Direct(url) => (url.clone(), direct(session, url, namespace).await?, None),
            LinkRoute::PortForward => {
                let certificates = certificates(&session.client, namespace).await?;
                let system = &session.controller_namespace;
                let forward = PortForward::open(&session.client, system).await?;
                // The certificate is for this name; the port is that of the port-forward.
                let host = format!("agentloop-link.{system}.svc");
                let builder = builder().tls_certs_only(certificates).https_only(true);
                let http = builder.resolve(&host, forward.address()).build();
                let base = format!("https://{host}:{}", forward.address().port());
                (base, http.map_err(|error| setup(&error))?, Some(forward))
            }
        };
        Ok(Self {
            base,
            http,
            api: &session.client,
            token: &session.token,
            forward,
        })
    }

    /// Opens the stream of an Agent's events, with or without messages, and text of answers that arrives.
    pub(super) async fn events(
        &self,
        agent: &NamespacedName,
        cursor: EventCursor,
        (messages, text): (bool, bool),
    ) -> Result<EventFeed, LinkFailure> {
        let after = match cursor {
            EventCursor::Latest => "latest".to_owned(),
            EventCursor::After(seq) => seq.min(LATEST - 1).to_string(),
        };
        let mut url = self.url(agent, "events")?;
        url.query_pairs_mut()
            .append_pair("after", &after)
            .append_pair("messages", &messages.to_string());
        if text {
            url.query_pairs_mut().append_pair("text", "true");
        }
        let request = self.authorized(self.http.get(url), agent).await?;
        let sent = tokio::time::timeout(REQUEST_TIMEOUT, self.send(request)).await;
        let response = sent.map_err(|_| LinkFailure::Unreachable("no response in time".into()))??;
        Ok(EventFeed {
            events: SseStream::from_bytes_stream(response.bytes_stream()).boxed(),
        })
    }

    /// Gives an Agent a task.
    pub async fn submit(
        &self,
        agent: &NamespacedName,
        task: &TaskSubmission,
    ) -> Result<SubmissionReceipt, LinkFailure> {
        let request = self.http.post(self.url(agent, "tasks")?).json(task);
        let request = self.authorized(request, agent).await?.timeout(REQUEST_TIMEOUT);
        let response = self.send(request).await?;
        let body = response.bytes().await.map_err(|error| self.broken(&error))?;
        serde_json::from_slice(&body).map_err(|error| LinkFailure::Unreadable(json_error::describe(&error)))
    }

    fn url(&self, agent: &NamespacedName, last: &str) -> Result<Url, LinkFailure> {
        let mut url: Url = self
            .base
            .parse()
            .map_err(|error| LinkFailure::Unreachable(format!("{}: {error}", self.base)))?;
        let segments = url.path_segments_mut();
        let mut segments = segments.map_err(|()| LinkFailure::Unreachable(format!("{} has no path", self.base)))?;
        let parts = ["v1", "namespaces", &agent.namespace, "agents", &agent.name, last];
        segments.pop_if_empty().extend(parts);
        drop(segments);
        Ok(url)
    }

    /// With a token that is valid now.
    async fn authorized(&self, request: RequestBuilder, agent: &NamespacedName) -> Result<RequestBuilder, LinkFailure> {
        let token = self.token.obtain(self.api, &agent.namespace).await?;
        Ok(request.bearer_auth(token))
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, LinkFailure> {
        let response = request.send().await.map_err(|error| self.broken(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let refusal = response.json::<RefusalBody>().await.ok();
        Err(LinkFailure::Refused {
            status: status.as_u16(),
            message: refusal.map_or_else(|| unexplained(status), |refusal| refusal.message),
        })
    }

    fn broken(&self, error: &reqwest::Error) -> LinkFailure {
        let problem = self.forward.as_ref().and_then(PortForward::take_problem);
        LinkFailure::Unreachable(problem.unwrap_or_else(|| root_cause(error)))
    }
}

/// A status without a message, as a proxy or a controller of an earlier version answers.
fn unexplained(status: StatusCode) -> String {
    if status == StatusCode::NOT_FOUND || status == StatusCode::METHOD_NOT_ALLOWED {
        return format!("status {status}: the controller may be of an earlier version, see `kubectl agentloop check`");
    }
    format!("status {status}")
}

fn builder() -> reqwest::ClientBuilder {
    Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
}

fn setup(error: &reqwest::Error) -> LinkFailure {
    LinkFailure::Unreachable(format!("cannot set up the connection: {}", root_cause(error)))
}

/// A client for a URL: with TLS, or on this machine.
async fn direct(session: &PluginSession, url: &str, namespace: &str) -> Result<Client, LinkFailure> {
    let parsed: Result<Url, _> = url.parse();
    let parsed = parsed.map_err(|error| LinkFailure::Unreachable(format!("{url}: {error}")))?;
    let local = [Some(Ipv4Addr::LOCALHOST.to_string()), Some("localhost".into())];
    let builder = match parsed.scheme() {
        "https" => {
            let certificates = certificates(&session.client, namespace).await?;
            builder().tls_certs_only(certificates).https_only(true)
        }
        "http" if local.contains(&parsed.host_str().map(str::to_owned)) => builder(),
        _ => {
            return Err(LinkFailure::Unreachable(format!(
                "{url} must start with https://, since the token is sent to it"
            )));
        }
    };
    builder.build().map_err(|error| setup(&error))
}

/// The CA bundle of the link, which is in each namespace with Agents.
async fn certificates(client: &ApiClient, namespace: &str) -> Result<Vec<Certificate>, LinkFailure> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let place = format!("ConfigMap {LINK_CA_CONFIGMAP} of namespace {namespace}");
    let map = maps.get(LINK_CA_CONFIGMAP).await.map_err(|error| {
        LinkFailure::Unreachable(if is_not_found(&error) {
            format!("{place} does not exist; the controller creates it with the first Agent of the namespace")
        } else {
            format!("cannot read {place}: {}", problem(&error))
        })
    })?;
    let bundle = map.data.and_then(|mut data| data.remove("ca.crt"));
    let bundle = bundle.ok_or_else(|| LinkFailure::Unreachable(format!("{place} has no key ca.crt")))?;
    Certificate::from_pem_bundle(bundle.as_bytes())
        .map_err(|error| LinkFailure::Unreachable(format!("{place}: {}", root_cause(&error))))
}

/// A stream of events.
pub(super) struct EventFeed {
    events: BoxStream<'static, Result<Sse, sse_stream::Error>>,
}

impl EventFeed {
    /// The next item; `None`: the connection ended.
    pub(super) async fn next(&mut self) -> Option<Result<FeedItem, LinkFailure>> {
        loop {
            let event = self.events.next().await?.ok()?;
            let (Some(name), Some(data)) = (event.event.as_deref(), event.data.as_deref()) else {
                continue;
            };
            return Some(item(name, data));
        }
    }
}

#[derive(Deserialize)]
struct StartBody {
    seq: i64,
}

#[derive(Deserialize)]
struct EndBody {
    reason: String,
}

fn item(name: &str, data: &str) -> Result<FeedItem, LinkFailure> {
    let read = match name {
        START_EVENT => serde_json::from_str(data).map(|start: StartBody| FeedItem::Start(start.seq)),
        END_EVENT => serde_json::from_str(data).map(|end: EndBody| FeedItem::End(end.reason)),
        TEXT_EVENT => serde_json::from_str(data).map(FeedItem::Text),
        _ => serde_json::from_str(data).map(FeedItem::Line),
    };
    read.map_err(|error| LinkFailure::Unreadable(json_error::describe(&error)))
}
