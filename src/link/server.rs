//! The controller's end of the link: routes, limits and status codes.
//!
//! Owns the HTTP side only. Authentication and all decisions are up to an implementation of [`LinkHandler`]. The routes
//! for clients are in `events_route`, `answers_route` and `tasks_route`, those for single messages of pods in `pod_route` and
//! `text_route`.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody;
use axum::extract::{FromRequestParts, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use axum_server::Handle;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use futures::future::ready;
use futures::{Stream, StreamExt, stream};
use hyper_util::rt::TokioTimer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tokio_util::sync::CancellationToken;

use super::acceptor::SlotAcceptor;
use super::answers::{AnsweredGate, GateAnswerRequest};
use super::answers_route;
use super::body_room::{BodyBounds, BodyKind, BodyPermit, BodyRooms};
use super::deliveries::{
    Delivery, DeliveryAck, DeliveryRequest, RelayedDeliveryAck, SensorDirectives, SensorPodReport,
};
use super::events::{ClientRefusal, EventStream, EventsPage, EventsResponse, ReadRequest};
use super::events_route;
use super::history::{HistoryAck, HistoryBatch};
use super::messages::{
    AttachRequest, AttachResponse, Directives, HEARTBEAT_SECONDS, LeaseRequest, LeaseResponse, OLDEST_PROTOCOL,
    PROTOCOL, PodRefusal, PodReport, REPORT_SECONDS, RefusalCode, common_protocol,
};
use super::pod_route::{self, respond};
use super::task_requests::{AcceptedTask, RelayedTaskAck, RequestedTask, TaskRequest};
use super::tasks_route;
use super::text_fragments::RelayedTextFragment;
use super::text_route;
use agentloop_support::connections::{ConnectionBounds, ConnectionLimiter, ConnectionSlot};

/// Largest request body in bytes.
pub const MAX_BODY_BYTES: usize = 256 * 1024;
/// Longest wait for the room for a body: well below the 10 s after which a client gives up.
const ROOM_TIMEOUT: Duration = Duration::from_secs(3);
/// How long open requests may continue after the server is stopped.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Identity of a pod, as proved by its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIdentity {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Uid of the pod.
    pub uid: String,
    /// What kind of pod it is.
    pub kind: PodKind,
}

/// The kind of a pod, which follows from the service account of its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodKind {
    /// An Agent.
    Agent,
    /// A Sensor.
    Sensor,
}

/// Handles the requests of pods.
pub trait LinkHandler: Send + Sync + 'static {
    /// The pod that holds this token; the request came from `address`.
    fn authenticate(
        &self,
        token: &str,
        address: IpAddr,
    ) -> impl Future<Output = Result<PodIdentity, PodRefusal>> + Send;
    /// A pod attaches.
    fn attach(&self, pod: &PodIdentity, attach: &AttachRequest) -> Result<AttachResponse, PodRefusal>;
    /// A pod reports.
    fn report(&self, pod: &PodIdentity, report: PodReport) -> Result<(), PodRefusal>;
    /// A gateway reports its leases and requests more; answered once what it is granted is written.
    fn lease(
        &self,
        pod: &PodIdentity,
        request: LeaseRequest,
    ) -> impl Future<Output = Result<LeaseResponse, PodRefusal>> + Send;
    /// The [`Directives`] of a pod, now and on each change. The sender is dropped when the pod may no longer use the
    /// link.
    fn directives(&self, pod: &PodIdentity, epoch: i64) -> Result<watch::Receiver<Directives>, PodRefusal>;
    /// A pod sends events to a subscriber; answered once the subscriber has room for them, or has had none for too
    /// long.
    fn events(
        &self,
        pod: &PodIdentity,
        page: EventsPage,
    ) -> impl Future<Output = Result<EventsResponse, PodRefusal>> + Send;
    /// A pod sends text of an answer that arrives; dropped for subscribers without room.
    fn text(&self, pod: &PodIdentity, fragment: RelayedTextFragment) -> Result<(), PodRefusal>;
    /// A pod uploads rows of its Agent's history; answered once they are stored.
    fn history(
        &self,
        pod: &PodIdentity,
        batch: HistoryBatch,
    ) -> impl Future<Output = Result<HistoryAck, PodRefusal>> + Send;
    /// The holder of this token subscribes to an Agent's events, from `address`.
    fn read(
        &self,
        token: &str,
        address: IpAddr,
        request: &ReadRequest,
    ) -> impl Future<Output = Result<EventStream, ClientRefusal>> + Send;
    /// The holder of this token answers a gate of an Agent, from `address`; returns once the answer is durable.
    fn answer(
        &self,
        token: &str,
        address: IpAddr,
        request: &GateAnswerRequest,
    ) -> impl Future<Output = Result<AnsweredGate, ClientRefusal>> + Send;
    /// The user who holds this token, if that user may request tasks of this Agent, from `address`. Asked before the body of
    /// a request is read.
    fn authorize_task(
        &self,
        token: &str,
        address: IpAddr,
        agent: (&str, &str),
    ) -> impl Future<Output = Result<String, ClientRefusal>> + Send;
    /// This user requests that an Agent works on a task; returns once the task is on the disk of its worker.
    fn request_task(
        &self,
        user: &str,
        request: &TaskRequest,
    ) -> impl Future<Output = Result<AcceptedTask, ClientRefusal>> + Send;
    /// Tasks that users request of the Agent of this pod, from now on.
    fn requested_tasks(&self, pod: &PodIdentity, epoch: i64) -> Result<mpsc::Receiver<RequestedTask>, PodRefusal>;
    /// The Agent of this pod has decided on a task.
    fn task_acknowledged(&self, pod: &PodIdentity, ack: RelayedTaskAck) -> Result<(), PodRefusal>;
    /// Events of sensor pods for the Agent of this pod, from now on.
    fn deliveries(&self, pod: &PodIdentity, epoch: i64) -> Result<mpsc::Receiver<Delivery>, PodRefusal>;
    /// The Agent of this pod has events on disk.
    fn delivered(&self, pod: &PodIdentity, delivered: RelayedDeliveryAck) -> Result<(), PodRefusal>;
    /// The [`Directives`] of a sensor pod, now and on each change.
    fn sensor(&self, pod: &PodIdentity) -> Result<watch::Receiver<SensorDirectives>, PodRefusal>;
    /// A sensor pod reports.
    fn sensor_report(&self, pod: &PodIdentity, report: SensorPodReport) -> Result<(), PodRefusal>;
    /// A sensor pod sends events for a receiver; answered once the receiver has them on disk.
    fn deliver(
        &self,
        pod: &PodIdentity,
        deliver: DeliveryRequest,
    ) -> impl Future<Output = Result<DeliveryAck, PodRefusal>> + Send;
    /// Called for each refused request.
    fn refused(&self, refusal: &PodRefusal);
}

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct LinkLimits {
    /// Connections. A peer is a stranger until a token of it was accepted.
    pub connections: ConnectionBounds,
    /// Bytes of the large requests of pods. Small ones have room of their own.
    pub bodies: BodyBounds,
    /// Time between two heartbeats of a [`Directives`] stream.
    pub heartbeat: Duration,
    /// Longest time for the body of a request.
    pub read_timeout: Duration,
    /// How long a connection may wait for a request, its head included. Longer than the pause between two reports, so
    /// that a pod does not need a handshake for each.
    pub idle: Duration,
}

impl Default for LinkLimits {
    fn default() -> Self {
        Self {
            // The pods of a node may share an address.
            connections: ConnectionBounds {
                all: 16_384,
                strangers: 2048,
                per_address: 1024,
                strangers_per_address: 256,
            },
            bodies: BodyBounds::default(),
            heartbeat: Duration::from_secs(HEARTBEAT_SECONDS),
            read_timeout: Duration::from_secs(10),
            idle: Duration::from_secs(3 * REPORT_SECONDS),
        }
    }
}

pub(super) struct LinkServer<L> {
    pub(super) link: Arc<L>,
    pub(super) limits: LinkLimits,
    pub(super) stop: CancellationToken,
    room: Arc<BodyRooms>,
}

impl<L> Clone for LinkServer<L> {
    fn clone(&self) -> Self {
        Self {
            link: self.link.clone(),
            limits: self.limits,
            stop: self.stop.clone(),
            room: Arc::clone(&self.room),
        }
    }
}

/// The routes of the link. Streams end when `stop` is cancelled.
fn router<L: LinkHandler>(link: Arc<L>, limits: LinkLimits, stop: CancellationToken) -> Router {
    let server = LinkServer {
        link,
        limits,
        stop,
        room: Arc::new(BodyRooms::new(limits.bodies)),
    };
    Router::new()
        .route("/v1/attach", post(attach::<L>))
        .route("/v1/report", post(pod_route::report::<L>))
        .route("/v1/lease", post(lease::<L>))
        .route("/v1/directives", get(directives::<L>))
        .route("/v1/events", post(pod_route::events::<L>))
        .route("/v1/text", post(text_route::text::<L>))
        .route("/v1/history", post(pod_route::history::<L>))
        .route(
            "/v1/namespaces/{namespace}/agents/{name}/events",
            get(events_route::events::<L>),
        )
        .route(
            "/v1/namespaces/{namespace}/agents/{name}/gates/{gate}",
            post(answers_route::answer::<L>),
        )
        .route(
            "/v1/namespaces/{namespace}/agents/{name}/tasks",
            post(tasks_route::request_task::<L>),
        )
        .route("/v1/tasks/ack", post(tasks_route::acknowledge::<L>))
        .route("/v1/delivered", post(pod_route::delivered::<L>))
        .route("/v1/sensor", get(sensor::<L>))
        .route("/v1/sensor/report", post(pod_route::sensor_report::<L>))
        .route("/v1/deliver", post(pod_route::deliver::<L>))
        .with_state(server)
}

/// Serves the link over TLS until `stop`, then gives open requests a moment to finish.
pub async fn serve<L: LinkHandler>(
    listener: tokio::net::TcpListener,
    tls: RustlsConfig,
    link: Arc<L>,
    limits: LinkLimits,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let app = router(link, limits, stop.clone());
    let acceptor = SlotAcceptor {
        tls: RustlsAcceptor::new(tls),
        slots: ConnectionLimiter::new(limits.connections),
    };
    let handle = Handle::new();
    let mut server = axum_server::from_tcp(listener.into_std()?)?
        .acceptor(acceptor)
        .handle(handle.clone())
        .http1_only();
    server
        .http_builder()
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle);
    let stopper = async {
        stop.cancelled().await;
        handle.graceful_shutdown(Some(STOP_GRACE));
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        result = server.serve(app.into_make_service()) => result,
        never = stopper => match never {},
    }
}

async fn attach<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, request: Request) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        let (attach, _) = read::<AttachRequest, L>(&server, &pod, BodyKind::Message, request).await?;
        let theirs = attach.oldest_protocol.unwrap_or(attach.protocol)..=attach.protocol;
        let Some(protocol) = common_protocol(OLDEST_PROTOCOL..=PROTOCOL, theirs) else {
            return Err(malformed(format!(
                "protocol version {} is not supported, {OLDEST_PROTOCOL} to {PROTOCOL} are: delete the pod, so that the \
                 controller creates one of its own version",
                attach.protocol
            )));
        };
        let attached = server.link.attach(&pod, &attach)?;
        Ok(AttachResponse { protocol, ..attached })
    };
    respond(&server, answer.await.map(Json))
}

async fn lease<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, request: Request) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        // It waits for a write, and keeps its room until then.
        let (request, _room) = read::<LeaseRequest, L>(&server, &pod, BodyKind::Lease, request).await?;
        if let Some(problem) = request.problem() {
            return Err(malformed(problem));
        }
        server.link.lease(&pod, request).await
    };
    respond(&server, answer.await.map(Json))
}

#[derive(Deserialize)]
struct DirectivesQuery {
    epoch: i64,
}

async fn directives<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, uri: Uri) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        let query = Query::<DirectivesQuery>::try_from_uri(&uri)
            .map_err(|_| malformed("the query must be epoch=N with the epoch of the pod".into()))?;
        let levels = server.link.directives(&pod, query.epoch)?;
        let deliveries = server.link.deliveries(&pod, query.epoch)?;
        Ok((levels, deliveries, server.link.requested_tasks(&pod, query.epoch)?))
    };
    match answer.await {
        Ok((levels, deliveries, tasks)) => {
            let deliveries =
                ReceiverStream::new(deliveries).map(|delivery| Event::default().event("delivery").json_data(delivery));
            let tasks = ReceiverStream::new(tasks).map(|task| Event::default().event("task").json_data(task));
            // The stream ends with the first of them: another one of this pod has replaced it.
            let events = stream::select(with_end_marker(deliveries), with_end_marker(tasks));
            sse_response(&server, stream::select(directives_stream(levels), events))
        }
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

async fn sensor<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Sensor).await?;
        server.link.sensor(&pod)
    };
    let levels = answer.await;
    respond(
        &server,
        levels.map(|levels| sse_response(&server, directives_stream(levels))),
    )
}

type SseItem = Option<Result<Event, axum::Error>>;

/// A stream of server-sent events that ends at its first `None`, or when the server stops.
fn sse_response<L: LinkHandler>(
    server: &LinkServer<L>,
    events: impl Stream<Item = SseItem> + Send + 'static,
) -> Response {
    let events = events
        .take_while(|event| ready(event.is_some()))
        .filter_map(ready)
        .take_until(server.stop.clone().cancelled_owned());
    let heartbeat = Event::default().event("heartbeat").data("");
    Sse::new(events)
        .keep_alive(KeepAlive::new().interval(server.limits.heartbeat).event(heartbeat))
        .into_response()
}

/// The current value and each later one; ends when the sender is dropped.
fn directives_stream<T: Serialize + Clone + Send + Sync + 'static>(
    levels: watch::Receiver<T>,
) -> impl Stream<Item = SseItem> {
    with_end_marker(WatchStream::new(levels).map(|level| Event::default().event("directives").json_data(level)))
}

/// Appends an end marker, so that the end is visible after merging with other streams.
fn with_end_marker(events: impl Stream<Item = Result<Event, axum::Error>>) -> impl Stream<Item = SseItem> {
    events.map(Some).chain(stream::iter([None]))
}

/// The caller of a request, as far as the request identifies it.
pub(super) struct LinkCaller {
    slot: Arc<ConnectionSlot>,
    token: Option<String>,
}

impl LinkCaller {
    /// The token and the address it came from; `None` without a token.
    pub(super) fn token(&self) -> Option<(&str, IpAddr)> {
        Some((self.token.as_deref()?, self.slot.address()))
    }

    /// Called once the token is accepted: the connection no longer counts as one of a stranger, but as one of this namespace.
    pub(super) fn mark_authenticated(&self, namespace: &str) {
        self.slot.mark_authenticated(namespace);
    }
}

impl<S: Sync> FromRequestParts<S> for LinkCaller {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        // The server gives every connection a slot.
        let slot = parts.extensions.get::<Arc<ConnectionSlot>>().cloned();
        let token = parts
            .headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.strip_prefix("Bearer "))
            .map(|token| token.trim().to_owned())
            .filter(|token| !token.is_empty());
        Ok(Self {
            slot: slot.ok_or(StatusCode::INTERNAL_SERVER_ERROR)?,
            token,
        })
    }
}

/// The pod behind a request; refuses pods of another kind than the route is for.
pub(super) async fn authenticate<L: LinkHandler>(
    server: &LinkServer<L>,
    caller: &LinkCaller,
    kind: PodKind,
) -> Result<PodIdentity, PodRefusal> {
    let Some((token, address)) = caller.token() else {
        return Err(PodRefusal {
            code: RefusalCode::Unauthenticated,
            message: "the token is missing; send it as `Authorization: Bearer <token>`".into(),
        });
    };
    let pod = server.link.authenticate(token, address).await?;
    caller.mark_authenticated(&pod.namespace);
    if caller.slot.is_evicted() {
        return Err(PodRefusal {
            code: RefusalCode::NotLeading,
            message: "the namespace has too many connections; retry".into(),
        });
    }
    if pod.kind != kind {
        return Err(PodRefusal {
            code: RefusalCode::Unknown,
            message: "this route does not serve pods with this service account".into(),
        });
    }
    Ok(pod)
}

/// Reads the message of a pod once there is room for it. The room is free again when it is dropped.
pub(super) async fn read<T: DeserializeOwned, L>(
    server: &LinkServer<L>,
    pod: &PodIdentity,
    kind: BodyKind,
    request: Request,
) -> Result<(T, BodyPermit), PodRefusal> {
    let longest = server.limits.read_timeout;
    // Not the header: a chunked body is as long as it likes.
    let length = request.body().size_hint().exact();
    let length = length.map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    let names = (pod.namespace.as_str(), pod.uid.as_str());
    let room = server.room.take(names, kind, length, longest.min(ROOM_TIMEOUT));
    let room = room.await.ok_or_else(|| PodRefusal {
        code: RefusalCode::NotLeading,
        message: "too many requests are being read; retry".into(),
    })?;
    let message = read_body(request, longest, MAX_BODY_BYTES).await.map_err(malformed)?;
    Ok((message, room))
}

/// Reads a JSON body within the limits, or says why it cannot be read. Messages never quote it.
pub(super) async fn read_body<T: DeserializeOwned>(
    request: Request,
    longest: Duration,
    max: usize,
) -> Result<T, String> {
    let body = timeout(longest, axum::body::to_bytes(request.into_body(), max));
    let bytes = body
        .await
        .map_err(|_| format!("the body did not arrive within {} s", longest.as_secs()))?
        .map_err(|_| format!("the body is truncated, or larger than {max} bytes"))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        format!(
            "the body is not the expected JSON (line {}, column {}: {})",
            error.line(),
            error.column(),
            match error.classify() {
                serde_json::error::Category::Data => "a field is missing or has the wrong type",
                serde_json::error::Category::Eof => "it is truncated",
                serde_json::error::Category::Io | serde_json::error::Category::Syntax => "it is not valid JSON",
            }
        )
    })
}

pub(super) fn malformed(message: String) -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Malformed,
        message,
    }
}

pub(super) fn refuse<L: LinkHandler>(link: &L, refusal: &PodRefusal) -> Response {
    link.refused(refusal);
    let answer = (status(refusal.code), Json(refusal));
    if refusal.code == RefusalCode::Unauthenticated {
        return closing(answer);
    }
    answer.into_response()
}

/// An answer to an unauthenticated caller: it closes the connection.
pub(super) fn closing(answer: impl IntoResponse) -> Response {
    ([(header::CONNECTION, "close")], answer).into_response()
}

/// The status code of a [`PodRefusal`].
#[must_use]
pub fn status(code: RefusalCode) -> StatusCode {
    match code {
        RefusalCode::Unauthenticated => StatusCode::UNAUTHORIZED,
        RefusalCode::Unknown => StatusCode::FORBIDDEN,
        RefusalCode::Fenced => StatusCode::CONFLICT,
        RefusalCode::NotLeading | RefusalCode::Away => StatusCode::SERVICE_UNAVAILABLE,
        RefusalCode::Malformed => StatusCode::BAD_REQUEST,
    }
}
