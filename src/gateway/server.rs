//! The pod's Unix socket: implements the routes of [`crate::link::socket`].

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Path as RoutePath, Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use futures::{Stream, stream};
use serde::Deserialize;
use tokio::sync::watch;

use super::calls::{CallReply, ModelCalls};
use super::deliveries::DeliveryQueue;
use super::in_flight::{AnswerItem, InFlightCall};
use super::link_state::LinkState;
use super::mcp_proxy::McpProxy;
use super::requested_tasks::RequestedTasks;
use super::store::{CallEnd, StoredCallKey};
use super::task_responses::ResponseSender;
use super::uplink::ExportedTelemetry;
use super::upstream::EVENT_STREAM;
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::{CallId, CallPurpose};
use crate::link::client::LinkClient;
use crate::link::deliveries::{DeliveryAck, POLL_SECONDS};
use crate::link::events::EventsPage;
use crate::link::history::HistoryBatch;
use crate::link::messages::LoopReport;
use crate::link::socket::{
    CALL_HEADER, COST_EVENT, COST_HEADER, FAILURE_EVENT, FAILURE_HEADER, OutgoingResponse, PURPOSE_HEADER,
};
use crate::link::task_requests::TaskAck;
use crate::link::text_fragments::{RelayedTextFragment, TextFragment};
use crate::provider::WireFormat;
use crate::support::clock::ClockReading;

/// Largest request of a worker.
const MAX_REQUEST_BYTES: usize = 32 * 1024 * 1024;
/// Largest message with spans or log lines of a worker.
const MAX_TELEMETRY_BYTES: usize = 1024 * 1024;
/// Interval of events while nothing changes.
const EVENT_PERIOD: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct GatewayState {
    pub calls: Arc<ModelCalls>,
    pub contact: Arc<LinkState>,
    pub mcp: Arc<McpProxy>,
    pub responses: Arc<ResponseSender>,
    /// The connection to the controller and the pod's epoch, for event subscriptions.
    pub link: (Arc<LinkClient>, i64),
    pub deliveries: Arc<DeliveryQueue>,
    pub tasks: Arc<RequestedTasks>,
    /// The last [`LoopReport`] of the worker.
    pub loop_report: watch::Sender<Option<LoopReport>>,
    /// Where the worker's spans and the lines of its log go.
    pub exported: ExportedTelemetry,
}

/// How much telemetry the worker has dropped since its last request.
#[derive(Deserialize)]
struct WorkerLoss {
    #[serde(default)]
    dropped: u32,
}

impl WorkerLoss {
    fn number(&self) -> usize {
        usize::try_from(self.dropped).unwrap_or(usize::MAX)
    }
}

pub fn router(gateway: GatewayState) -> Router {
    let formats = WireFormat::ENDPOINTS.iter();
    let calls = formats.fold(Router::new(), |router, format| {
        router.route(format.endpoint().route, post(call))
    });
    calls
        .route("/v1/session", get(session))
        .route("/v1/calls/{id}/ack", post(acknowledge))
        .route("/v1/calls/{id}/cancel", post(cancel))
        .route("/v1/mcp/{server}", post(mcp).get(mcp).delete(mcp))
        .route("/v1/task-responses", post(response))
        .route("/v1/report", put(report))
        .route("/v1/readings", post(forward_events))
        .route("/v1/text", post(forward_text))
        .route("/v1/history", post(forward_history))
        .route("/v1/events", get(events))
        .route("/v1/deliveries", get(delivery))
        .route("/v1/deliveries/ack", post(delivered))
        .route("/v1/tasks", get(requested_task))
        .route("/v1/tasks/ack", post(acknowledge_task))
        .route(
            "/v1/traces",
            post(traces).layer(DefaultBodyLimit::max(MAX_TELEMETRY_BYTES)),
        )
        .route("/v1/logs", post(logs).layer(DefaultBodyLimit::max(MAX_TELEMETRY_BYTES)))
        .route("/v1/healthz", get(StatusCode::OK))
        .layer(DefaultBodyLimit::max(MAX_REQUEST_BYTES))
        .with_state(gateway)
}

/// Sends a response to a task once. 200 with the status of the server, or 502 with why there is none.
async fn response(State(gateway): State<GatewayState>, Json(response): Json<OutgoingResponse>) -> Response {
    match gateway.responses.send(&response).await {
        Ok(status) => Json(status.as_u16()).into_response(),
        Err(message) => (StatusCode::BAD_GATEWAY, message).into_response(),
    }
}

async fn session(State(gateway): State<GatewayState>) -> Response {
    let session = gateway.contact.subscribe().borrow().session.clone();
    match session {
        Some(session) => Json(session).into_response(),
        None => not_attached_response(),
    }
}

async fn call(State(gateway): State<GatewayState>, headers: HeaderMap, body: Bytes) -> Response {
    let id = headers
        .get(CALL_HEADER)
        .and_then(|id| id.to_str().ok())
        .and_then(|id| id.parse::<CallId>().ok());
    let Some(id) = id else {
        let message = format!("the header {CALL_HEADER} is not a call id such as t12c1a1");
        return failed(
            StatusCode::BAD_REQUEST,
            &CallFailure::new(FailureKind::BadResponse, message),
        );
    };
    let purpose = match headers.get(PURPOSE_HEADER) {
        Some(purpose) => purpose.to_str().ok().and_then(|purpose| purpose.parse().ok()),
        None => Some(CallPurpose::default()),
    };
    let Some(purpose) = purpose else {
        let message = format!("the header {PURPOSE_HEADER} is not a known purpose of a call");
        return failed(
            StatusCode::BAD_REQUEST,
            &CallFailure::new(FailureKind::BadResponse, message),
        );
    };
    let reply = gateway.calls.submit(StoredCallKey { id, purpose }, &body);
    // Free the body early: it may be large, and the answer may take long.
    drop(body);
    match reply {
        CallReply::Live(flight) => live_response(flight).await,
        CallReply::Ended(CallEnd::Answered {
            content_type,
            body,
            cost,
        }) => kept_response(content_type, body, cost),
        CallReply::Ended(CallEnd::Failed(failure)) => failed(StatusCode::BAD_GATEWAY, &failure),
        CallReply::Acknowledged => {
            let message = "this call or a later one was acknowledged: its answer is no longer kept";
            failed(
                StatusCode::CONFLICT,
                &CallFailure::new(FailureKind::BadResponse, message),
            )
        }
        CallReply::NotYet => not_attached_response(),
    }
}

async fn live_response(flight: Arc<InFlightCall>) -> Response {
    let Some(head) = flight.head().await else {
        return not_attached_response();
    };
    match head {
        Ok(content_type) if content_type == EVENT_STREAM => (
            [(CONTENT_TYPE, content_type)],
            Body::from_stream(answer_stream(flight, true)),
        )
            .into_response(),
        // The head of a non-streamed answer is available only once all of it is.
        Ok(content_type) => {
            let cost = flight.cost().map(|cost| [(COST_HEADER, cost.to_string())]);
            let body = Body::from_stream(answer_stream(flight, false));
            (cost, [(CONTENT_TYPE, content_type)], body).into_response()
        }
        Err(failure) => failed(StatusCode::BAD_GATEWAY, &failure),
    }
}

/// A recorded answer, byte for byte as first given.
fn kept_response(content_type: String, body: Bytes, cost: Option<i64>) -> Response {
    let is_stream = content_type == EVENT_STREAM;
    let body = match cost.filter(|_| is_stream).map(cost_event) {
        Some(last) => [body, last].concat().into(),
        None => body,
    };
    let header = cost
        .filter(|_| !is_stream)
        .map(|cost| [(COST_HEADER, cost.to_string())]);
    (header, [(CONTENT_TYPE, content_type)], body).into_response()
}

/// Starts with a line break: whole lines were passed on before, but maybe not a whole event.
fn cost_event(cost: i64) -> Bytes {
    format!("\nevent: {COST_EVENT}\ndata: {cost}\n\n").into()
}

/// The bytes of a call from its beginning as they arrive; a stream ends with its cost.
fn answer_stream(flight: Arc<InFlightCall>, is_stream: bool) -> impl Stream<Item = std::io::Result<Bytes>> {
    stream::unfold((flight, Some(0)), move |(flight, read)| async move {
        let read = read?;
        match flight.next(read).await {
            AnswerItem::Chunk(bytes) => Some((Ok(bytes), (flight, Some(read + 1)))),
            AnswerItem::End => {
                let cost = flight.cost().filter(|_| is_stream)?;
                Some((Ok(cost_event(cost)), (flight, None)))
            }
            // Starts with a line break: whole lines were passed on before, but maybe not a whole event.
            AnswerItem::Failed(failure) => {
                let json = serde_json::to_string(&failure).unwrap_or_default();
                let event = format!("\nevent: {FAILURE_EVENT}\ndata: {json}\n\n");
                Some((Ok(event.into()), (flight, None)))
            }
            // Nothing that could be taken for an end: the worker retries.
            AnswerItem::NotYet => Some((
                Err(std::io::Error::other("the outcome is not recorded yet")),
                (flight, None),
            )),
        }
    })
}

async fn acknowledge(State(gateway): State<GatewayState>, RoutePath(id): RoutePath<String>) -> Response {
    let Ok(id) = id.parse() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match gateway.calls.acknowledge(id) {
        Ok(true) => StatusCode::NO_CONTENT.into_response(),
        Ok(false) => (StatusCode::CONFLICT, "the call is still in flight").into_response(),
        Err(error) => (StatusCode::INSUFFICIENT_STORAGE, error.to_string()).into_response(),
    }
}

async fn cancel(State(gateway): State<GatewayState>, RoutePath(id): RoutePath<String>) -> StatusCode {
    let Ok(id) = id.parse() else {
        return StatusCode::NOT_FOUND;
    };
    gateway.calls.cancel(id);
    StatusCode::NO_CONTENT
}

/// Queues spans of the worker for export.
async fn traces(State(gateway): State<GatewayState>, Query(loss): Query<WorkerLoss>, body: Bytes) -> StatusCode {
    if gateway.exported.spans.push_received(&body, loss.number()) {
        StatusCode::NO_CONTENT
    } else {
        StatusCode::BAD_REQUEST
    }
}

/// Queues lines of the worker's log for export.
async fn logs(State(gateway): State<GatewayState>, Query(loss): Query<WorkerLoss>, body: Bytes) -> StatusCode {
    if gateway.exported.logs.push_received(&body, loss.number()) {
        StatusCode::NO_CONTENT
    } else {
        StatusCode::BAD_REQUEST
    }
}

async fn mcp(
    State(gateway): State<GatewayState>,
    RoutePath(server): RoutePath<String>,
    method: Method,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    gateway.mcp.forward(&server, method, &headers, body).await
}

async fn report(State(gateway): State<GatewayState>, Json(report): Json<LoopReport>) -> StatusCode {
    gateway.loop_report.send_if_modified(|latest| {
        let new = latest.as_ref() != Some(&report);
        *latest = Some(report);
        new
    });
    StatusCode::NO_CONTENT
}

/// Forwards events to a subscriber. Keeps nothing: the worker repeats what was not accepted.
async fn forward_events(State(gateway): State<GatewayState>, Json(page): Json<EventsPage>) -> Response {
    let (link, epoch) = gateway.link;
    match link.events(&EventsPage { epoch, ..page }).await {
        Ok(answer) => Json(answer).into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

/// Forwards text of an answer that arrives, once.
async fn forward_text(State(gateway): State<GatewayState>, Json(fragment): Json<TextFragment>) -> Response {
    let (link, epoch) = gateway.link;
    match link.text(&RelayedTextFragment { epoch, fragment }).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

/// Forwards rows of the history. Keeps nothing: the worker repeats what was not stored.
async fn forward_history(State(gateway): State<GatewayState>, Json(batch): Json<HistoryBatch>) -> Response {
    let (link, epoch) = gateway.link;
    match link.history(&HistoryBatch { epoch, ..batch }).await {
        Ok(stored) => Json(stored).into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

async fn delivery(State(gateway): State<GatewayState>) -> Response {
    match gateway.deliveries.next(Duration::from_secs(POLL_SECONDS)).await {
        Some(delivery) => Json(delivery).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    }
}

async fn delivered(State(gateway): State<GatewayState>, Json(delivered): Json<DeliveryAck>) -> Response {
    match gateway.deliveries.report_delivered(delivered).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

async fn requested_task(State(gateway): State<GatewayState>) -> Response {
    match gateway.tasks.next(Duration::from_secs(POLL_SECONDS)).await {
        Some(task) => Json(task).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    }
}

async fn acknowledge_task(State(gateway): State<GatewayState>, Json(ack): Json<TaskAck>) -> Response {
    match gateway.tasks.acknowledge(ack).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

async fn events(State(gateway): State<GatewayState>) -> Response {
    let view = gateway.contact.subscribe();
    let events = stream::unfold((gateway.contact, view, true), |(contact, mut view, first)| async move {
        if !first {
            // The sender is in `contact`, so it cannot be dropped.
            let _ = tokio::time::timeout(EVENT_PERIOD, view.changed()).await;
        }
        view.mark_unchanged();
        let event = Event::default().json_data(contact.socket_event(ClockReading::now()));
        Some((event, (contact, view, false)))
    });
    Sse::new(events).into_response()
}

fn not_attached_response() -> Response {
    (
        StatusCode::SERVICE_UNAVAILABLE,
        "the controller has not accepted this pod yet, or an outcome is not recorded yet; retry later",
    )
        .into_response()
}

fn failed(status: StatusCode, failure: &CallFailure) -> Response {
    let headers = [(FAILURE_HEADER, <&'static str>::from(failure.kind))];
    (status, headers, Json(failure)).into_response()
}
