//! The HTTP side of the bridge: streamable HTTP of both generations, as far as the server supports them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::{CONTENT_TYPE, ORIGIN, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures::{Stream, StreamExt, stream};
use serde_json::value::RawValue;
use tokio::sync::mpsc;

use super::exchange::{AcceptedRequest, ServerReply};
use super::message::{self, MAX_MESSAGE_BYTES, RpcMessage};
use super::{Bridge, BridgeRefusal};
use crate::listen::MCP_PATH;

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const METHOD_NOT_FOUND: i32 = -32601;

/// The routes of the bridge.
pub(super) fn router(bridge: Arc<Bridge>) -> Router {
    // A session is one process of the server, and ends with it: clients cannot end it (405).
    let routes = post(receive).get(listen);
    Router::new()
        .route(MCP_PATH, routes)
        .layer(DefaultBodyLimit::max(MAX_MESSAGE_BYTES))
        .with_state(bridge)
}

/// The stream of notifications, for clients of the older revision.
async fn listen(State(bridge): State<Arc<Bridge>>, headers: HeaderMap) -> Response {
    match bridge.open_stream(session(&headers)).await {
        Ok(messages) => {
            let events = stream::unfold(messages, |mut messages| async {
                let message = messages.recv().await?;
                Some((Ok::<_, Infallible>(event(&message)), messages))
            });
            event_stream(events)
        }
        Err(refusal) => refused(&refusal),
    }
}

async fn receive(State(bridge): State<Arc<Bridge>>, headers: HeaderMap, body: Bytes) -> Response {
    // Only browsers send it, and no page may use a server of the pod.
    if headers.contains_key(ORIGIN) {
        return StatusCode::FORBIDDEN.into_response();
    }
    let Some(message) = RpcMessage::parse(&body) else {
        let error = message::error(
            RawValue::from_string("null".into()).ok(),
            -32700,
            "not a single JSON-RPC message",
        );
        return (StatusCode::BAD_REQUEST, json(error.to_bytes())).into_response();
    };
    drop(body);
    let session = session(&headers);
    if !message.is_request() {
        return match bridge.notify(message, session).await {
            Ok(()) => StatusCode::ACCEPTED.into_response(),
            Err(refusal) => refused(&refusal),
        };
    }
    let id = message.id.clone();
    let is_initialize = message.is("initialize");
    match bridge.request(message, session).await {
        Ok(accepted) => answered(&bridge, accepted, is_initialize).await,
        Err(BridgeRefusal::Known(result)) => {
            let answer = RpcMessage {
                id,
                result: Some(result),
                ..RpcMessage::new()
            };
            with_session(&bridge, json(answer.to_bytes()))
        }
        Err(BridgeRefusal::NoDiscovery) => {
            let text = "the server does not support discovery";
            json(message::error(id, METHOD_NOT_FOUND, text).to_bytes())
        }
        Err(refusal) => refused(&refusal),
    }
}

/// Waits for what the server replies: the answer alone, or a stream if something precedes it. The request is cancelled
/// at the server if the client disconnects.
async fn answered(bridge: &Arc<Bridge>, accepted: AcceptedRequest, is_initialize: bool) -> Response {
    let mut request = OpenRequest {
        bridge: Arc::clone(bridge),
        number: accepted.number,
        replies: accepted.replies,
    };
    match request.replies.recv().await {
        Some(ServerReply::Answer(answer)) if is_initialize => with_session(bridge, json(answer)),
        Some(ServerReply::Answer(answer)) => json(answer),
        Some(ServerReply::Notice(first)) => {
            let first = stream::once(async move { Ok(event(&first)) });
            event_stream(first.chain(request.into_events()))
        }
        // The server died, and whether it did what it was asked is unknown.
        None => StatusCode::BAD_GATEWAY.into_response(),
    }
}

/// A request that the server has not answered.
struct OpenRequest {
    bridge: Arc<Bridge>,
    number: u64,
    replies: mpsc::Receiver<ServerReply>,
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.bridge.abandon(self.number);
    }
}

/// The server died within a stream. The connection breaks, so that the client does not take it for an end.
#[derive(Debug, thiserror::Error)]
#[error("the MCP server ended")]
struct ServerEnded;

impl OpenRequest {
    fn into_events(self) -> impl Stream<Item = Result<Event, ServerEnded>> {
        stream::unfold(Some(self), |request| async {
            let mut request = request?;
            match request.replies.recv().await {
                Some(ServerReply::Notice(message)) => Some((Ok(event(&message)), Some(request))),
                Some(ServerReply::Answer(message)) => Some((Ok(event(&message)), None)),
                None => Some((Err(ServerEnded), None)),
            }
        })
    }
}

fn event(message: &[u8]) -> Event {
    // An event has one line; a line end inside a message can only be white space.
    let text = String::from_utf8_lossy(message).replace(['\n', '\r'], " ");
    Event::default().event("message").data(text)
}

fn event_stream<E>(events: impl Stream<Item = Result<Event, E>> + Send + 'static) -> Response
where
    E: std::error::Error + Send + Sync + 'static,
{
    Sse::new(events)
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response()
}

fn session(headers: &HeaderMap) -> Option<&str> {
    headers.get(SESSION)?.to_str().ok()
}

fn json(body: Vec<u8>) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

fn with_session(bridge: &Bridge, response: Response) -> Response {
    match bridge.session() {
        Some(session) => ([(SESSION, session)], response).into_response(),
        None => response,
    }
}

fn refused(refusal: &BridgeRefusal) -> Response {
    match refusal {
        // Clients of the protocol then begin a new session.
        BridgeRefusal::UnknownSession => StatusCode::NOT_FOUND.into_response(),
        BridgeRefusal::NoSession => (StatusCode::BAD_REQUEST, "Mcp-Session-Id is missing").into_response(),
        BridgeRefusal::TooMany => (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "1")]).into_response(),
        BridgeRefusal::Down | BridgeRefusal::Known(_) | BridgeRefusal::NoDiscovery => {
            (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")]).into_response()
        }
    }
}
