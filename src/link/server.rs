//! The controller's end of the link: routes, limits and status codes.
//!
//! Owns the HTTP side only. Who a pod is and what it may do is decided by an implementation of [`LinkHandler`]. The route for
//! people is in `reading`.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;
use futures::future::ready;
use futures::{Stream, StreamExt, stream};
use hyper_util::rt::TokioTimer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tokio_util::sync::CancellationToken;

use super::deliveries::{
    Delivery, DeliveryAck, DeliveryRequest, RelayedDeliveryAck, SensorDirectives, SensorPodReport,
};
use super::events::{EventStream, EventsPage, EventsResponse, ReadRefusal, ReadRequest};
use super::events_route;
use super::messages::{
    AttachRequest, AttachResponse, Directives, HEARTBEAT_SECONDS, LeaseRequest, LeaseResponse, OLDEST_PROTOCOL,
    PROTOCOL, PodRefusal, PodReport, REPORT_SECONDS, RefusalCode, common_protocol,
};
use crate::connections::{ConnectionBounds, ConnectionLimiter, ConnectionSlot};

/// Largest body of a request.
pub const MAX_BODY_BYTES: usize = 256 * 1024;
/// Length of the name of a gateway's record.
const RECORD_DIGITS: usize = 32;
/// How long open requests may go on after the server was told to stop.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Who speaks, as its token proves.
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

/// What a pod may speak about, as the service account of its token says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodKind {
    /// An Agent.
    Agent,
    /// A Sensor.
    Sensor,
}

/// What answers pods.
pub trait LinkHandler: Send + Sync + 'static {
    /// Which pod holds this token, which came from `address`.
    fn authenticate(
        &self,
        token: &str,
        address: IpAddr,
    ) -> impl Future<Output = Result<PodIdentity, PodRefusal>> + Send;
    /// A pod introduces itself.
    fn attach(&self, pod: &PodIdentity, attach: &AttachRequest) -> Result<AttachResponse, PodRefusal>;
    /// A pod reports.
    fn report(&self, pod: &PodIdentity, report: PodReport) -> Result<(), PodRefusal>;
    /// A gateway says what became of its leases, and asks for more; answered once what it is granted is written.
    fn lease(
        &self,
        pod: &PodIdentity,
        request: LeaseRequest,
    ) -> impl Future<Output = Result<LeaseResponse, PodRefusal>> + Send;
    /// What a pod is to do, now and later. The sender goes away when the pod may no longer speak.
    fn directives(&self, pod: &PodIdentity, epoch: i64) -> Result<watch::Receiver<Directives>, PodRefusal>;
    /// A pod sends events to one who reads them; answered once there is room for them, or there is none for too long.
    fn events(
        &self,
        pod: &PodIdentity,
        page: EventsPage,
    ) -> impl Future<Output = Result<EventsResponse, PodRefusal>> + Send;
    /// Somebody with this token wants to read an Agent's events, from `address`.
    fn read(
        &self,
        token: &str,
        address: IpAddr,
        request: &ReadRequest,
    ) -> impl Future<Output = Result<EventStream, ReadRefusal>> + Send;
    /// Events of sensor pods for the Agent of this pod, from now on.
    fn deliveries(&self, pod: &PodIdentity, epoch: i64) -> Result<mpsc::Receiver<Delivery>, PodRefusal>;
    /// The Agent of this pod has events on disk.
    fn delivered(&self, pod: &PodIdentity, delivered: RelayedDeliveryAck) -> Result<(), PodRefusal>;
    /// What a sensor pod is to do, now and later.
    fn sensor(&self, pod: &PodIdentity) -> Result<watch::Receiver<SensorDirectives>, PodRefusal>;
    /// A sensor pod reports.
    fn sensor_report(&self, pod: &PodIdentity, report: SensorPodReport) -> Result<(), PodRefusal>;
    /// A sensor pod has events for a receiver; answered once that has them on disk.
    fn deliver(
        &self,
        pod: &PodIdentity,
        deliver: DeliveryRequest,
    ) -> impl Future<Output = Result<DeliveryAck, PodRefusal>> + Send;
    /// A request was refused.
    fn refused(&self, refusal: &PodRefusal);
}

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct LinkLimits {
    /// Connections; those over the bounds are closed at once. Whose token was taken is no stranger.
    pub connections: ConnectionBounds,
    /// Time between two heartbeats of a directives stream.
    pub heartbeat: Duration,
    /// Longest time for the body of a request.
    pub read_timeout: Duration,
    /// How long a connection may wait for a request, its head included. Longer than the pause between two reports, so that
    /// a pod does not need a handshake for each.
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
}

impl<L> Clone for LinkServer<L> {
    fn clone(&self) -> Self {
        Self {
            link: self.link.clone(),
            limits: self.limits,
            stop: self.stop.clone(),
        }
    }
}

/// The routes of the link. Streams end when `stop` is cancelled.
fn router<L: LinkHandler>(link: Arc<L>, limits: LinkLimits, stop: CancellationToken) -> Router {
    let server = LinkServer { link, limits, stop };
    Router::new()
        .route("/v1/attach", post(attach::<L>))
        .route("/v1/report", post(report::<L>))
        .route("/v1/lease", post(lease::<L>))
        .route("/v1/directives", get(directives::<L>))
        .route("/v1/events", post(events::<L>))
        .route(
            "/v1/namespaces/{namespace}/agents/{name}/events",
            get(events_route::events::<L>),
        )
        .route("/v1/delivered", post(delivered::<L>))
        .route("/v1/sensor", get(sensor::<L>))
        .route("/v1/sensor/report", post(sensor_report::<L>))
        .route("/v1/deliver", post(deliver::<L>))
        .with_state(server)
}

/// Serves the link over TLS until `stop`, then lets open requests finish for a moment.
pub async fn serve<L: LinkHandler>(
    listener: tokio::net::TcpListener,
    tls: RustlsConfig,
    link: Arc<L>,
    limits: LinkLimits,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let app = router(link, limits, stop.clone());
    let slots = ConnectionLimiter::new(limits.connections);
    // A connection without a slot is closed before its handshake; a slot lives as long as its connection's service.
    let per_connection = tower::service_fn(move |address: SocketAddr| {
        let slot = slots.take(address.ip());
        let app = app.clone();
        async move {
            slot.map(|slot| app.layer(Extension(Arc::new(slot))))
                .ok_or_else(|| std::io::Error::other("no slot"))
        }
    });
    let handle = Handle::new();
    let mut server = axum_server::from_tcp_rustls(listener.into_std()?, tls)?
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
        result = server.serve(per_connection) => result,
        never = stopper => match never {},
    }
}

async fn attach<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, request: Request) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        let attach: AttachRequest = read(request, server.limits.read_timeout).await?;
        let theirs = attach.oldest_protocol.unwrap_or(attach.protocol)..=attach.protocol;
        let Some(protocol) = common_protocol(OLDEST_PROTOCOL..=PROTOCOL, theirs) else {
            return Err(malformed(format!(
                "protocol {} is not spoken here, {OLDEST_PROTOCOL} to {PROTOCOL} are; run gateway and controller of versions \
                 that follow each other",
                attach.protocol
            )));
        };
        let attached = server.link.attach(&pod, &attach)?;
        Ok(AttachResponse { protocol, ..attached })
    };
    match answer.await {
        Ok(attached) => Json(attached).into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

async fn report<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, request: Request) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        server
            .link
            .report(&pod, read(request, server.limits.read_timeout).await?)
    };
    match answer.await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

async fn lease<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, request: Request) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        let request: LeaseRequest = read(request, server.limits.read_timeout).await?;
        let digits = request.record.bytes().all(|byte| byte.is_ascii_hexdigit());
        if request.record.len() != RECORD_DIGITS || !digits {
            return Err(malformed(format!("record must be {RECORD_DIGITS} hexadecimal digits")));
        }
        server.link.lease(&pod, request).await
    };
    match answer.await {
        Ok(answer) => Json(answer).into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

#[derive(Deserialize)]
struct DirectivesQuery {
    epoch: i64,
}

async fn directives<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, uri: Uri) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        let query = Query::<DirectivesQuery>::try_from_uri(&uri)
            .map_err(|_| malformed("the query must be epoch=N, the epoch of the pod".into()))?;
        let levels = server.link.directives(&pod, query.epoch)?;
        Ok((levels, server.link.deliveries(&pod, query.epoch)?))
    };
    match answer.await {
        Ok((levels, deliveries)) => {
            let deliveries =
                ReceiverStream::new(deliveries).map(|delivery| Event::default().event("delivery").json_data(delivery));
            sse_response(
                &server,
                stream::select(directives_stream(levels), with_end_marker(deliveries)),
            )
        }
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

async fn events<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller, request: Request) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        server
            .link
            .events(&pod, read(request, server.limits.read_timeout).await?)
            .await
    };
    match answer.await {
        Ok(answer) => Json(answer).into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

async fn sensor<L: LinkHandler>(State(server): State<LinkServer<L>>, caller: LinkCaller) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Sensor).await?;
        server.link.sensor(&pod)
    };
    match answer.await {
        Ok(levels) => sse_response(&server, directives_stream(levels)),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

type SseItem = Option<Result<Event, axum::Error>>;

/// An answer that goes on until its first `None`, or until the server stops.
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

/// The level now and each new one; its end when the sender is gone.
fn directives_stream<T: Serialize + Clone + Send + Sync + 'static>(
    levels: watch::Receiver<T>,
) -> impl Stream<Item = SseItem> {
    with_end_marker(WatchStream::new(levels).map(|level| Event::default().event("directives").json_data(level)))
}

/// A stream whose end shows among the items of others.
fn with_end_marker(events: impl Stream<Item = Result<Event, axum::Error>>) -> impl Stream<Item = SseItem> {
    events.map(Some).chain(stream::iter([None]))
}

async fn delivered<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        server
            .link
            .delivered(&pod, read(request, server.limits.read_timeout).await?)
    };
    match answer.await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

async fn sensor_report<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Sensor).await?;
        server
            .link
            .sensor_report(&pod, read(request, server.limits.read_timeout).await?)
    };
    match answer.await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

async fn deliver<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Sensor).await?;
        let deliver = read(request, server.limits.read_timeout).await?;
        server.link.deliver(&pod, deliver).await
    };
    match answer.await {
        Ok(delivered) => Json(delivered).into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

/// Who sent a request, as far as the request says.
pub(super) struct LinkCaller {
    slot: Arc<ConnectionSlot>,
    token: Option<String>,
}

impl LinkCaller {
    /// The token that came, and from where; `None`: none came.
    pub(super) fn token(&self) -> Option<(&str, IpAddr)> {
        Some((self.token.as_deref()?, self.slot.address()))
    }

    /// Its token was taken: its connection is no stranger's any more.
    pub(super) fn mark_authenticated(&self) {
        self.slot.mark_authenticated();
    }
}

impl<S: Sync> FromRequestParts<S> for LinkCaller {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        // Every connection has a slot.
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

/// Who speaks; refused when it is another kind of pod than the route is for.
async fn authenticate<L: LinkHandler>(
    server: &LinkServer<L>,
    caller: &LinkCaller,
    kind: PodKind,
) -> Result<PodIdentity, PodRefusal> {
    let Some((token, address)) = caller.token() else {
        return Err(PodRefusal {
            code: RefusalCode::Unauthenticated,
            message: "no token; send the header «Authorization: Bearer <token>»".into(),
        });
    };
    let pod = server.link.authenticate(token, address).await?;
    caller.mark_authenticated();
    if pod.kind != kind {
        return Err(PodRefusal {
            code: RefusalCode::Unknown,
            message: "this route is not for pods of this service account".into(),
        });
    }
    Ok(pod)
}

/// Reads a JSON body within the limits. Messages never repeat what was sent.
async fn read<T: DeserializeOwned>(request: Request, longest: Duration) -> Result<T, PodRefusal> {
    let body = timeout(longest, axum::body::to_bytes(request.into_body(), MAX_BODY_BYTES));
    let bytes = body
        .await
        .map_err(|_| malformed(format!("the body did not arrive within {} s", longest.as_secs())))?
        .map_err(|_| malformed(format!("the body is cut, or larger than {MAX_BODY_BYTES} bytes")))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        malformed(format!(
            "the body is not the JSON that is expected (line {}, column {}: {})",
            error.line(),
            error.column(),
            match error.classify() {
                serde_json::error::Category::Data => "a field is missing or of another type",
                serde_json::error::Category::Eof => "it ends too early",
                serde_json::error::Category::Io | serde_json::error::Category::Syntax => "it is not JSON",
            }
        ))
    })
}

fn malformed(message: String) -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Malformed,
        message,
    }
}

fn refuse<L: LinkHandler>(link: &L, refusal: &PodRefusal) -> Response {
    link.refused(refusal);
    let answer = (status(refusal.code), Json(refusal));
    if refusal.code == RefusalCode::Unauthenticated {
        return closing(answer);
    }
    answer.into_response()
}

/// An answer to one who did not show who they are: the last one on its connection.
pub(super) fn closing(answer: impl IntoResponse) -> Response {
    ([(header::CONNECTION, "close")], answer).into_response()
}

/// The status code of a refusal.
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
