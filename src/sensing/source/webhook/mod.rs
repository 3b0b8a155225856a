//! The source that others send to: `POST /`, signed. It answers 202 once what came is on disk, and never before.
//!
//! | status | means |
//! |---|---|
//! | 202 | taken, and on disk |
//! | 200 | known already |
//! | 400 | its `Content-Type` is JSON and it is none, or it has too many levels |
//! | 401 | not signed, or not with the key, or too long ago |
//! | 408 | its body did not come in time |
//! | 409 | the same signed text came before under another id |
//! | 413 | longer than `limits.maxPayloadBytes` |
//! | 429 | more than `limits.perMinute` |
//! | 503 | it cannot be kept now: send it again |
//!
//! Strangers may reach it. What they can take is bounded: connections in all and of each peer, the bytes of all bodies that
//! are read at once; and without a signature among the headers no body is read at all.

pub mod signature;
mod slots;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use axum_server::Handle;
use hyper_util::rt::TokioTimer;
use jiff::Timestamp;
use serde::de::IgnoredAny;
use tokio::net::TcpListener;
use tokio::sync::{AcquireError, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::signature::{SignatureError, SignatureRule};
use self::slots::{PeerSlot, PeerSlots, SlotError};
use super::{ArrivalOutcome, SourceCursor, SourceFeed, SourceMessage};
use crate::sensing::rules::MOST_DEPTH;

/// Longest time for a request's head, for its body, and for its keeping.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How long open requests may go on after the server was told to stop.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Most bytes of all bodies that are read at once, within the memory of a small pod.
const BODIES_BYTES: usize = 16 * 1024 * 1024;
/// One of so many parts of the connections, and of the bytes, is for one peer: an Ingress, through which all come, needs many.
const PEERS: usize = 4;
/// Seconds after which a sender that was too fast may come again.
const RETRY_AFTER: &str = "60";

/// Receives what others send.
#[derive(Clone, Debug)]
pub struct WebhookReceiver {
    /// How requests have to be signed.
    pub rule: SignatureRule,
    /// The file with the key; read for each request, since keys are changed.
    pub key_file: PathBuf,
    /// Most bytes of a body.
    pub most_bytes: usize,
    /// Most connections at once; more are closed at once.
    pub connections: usize,
}

struct WebhookState {
    receiver: WebhookReceiver,
    feed: SourceFeed,
    /// Bytes of bodies that may still be read.
    room: Arc<Semaphore>,
}

impl WebhookReceiver {
    /// Serves until `stop`.
    pub async fn run(self, listener: TcpListener, feed: SourceFeed, stop: CancellationToken) -> std::io::Result<()> {
        let bytes = (BODIES_BYTES / PEERS).max(self.most_bytes);
        let slots = PeerSlots::new(self.connections, (self.connections / PEERS).max(1), bytes);
        feed.report_connected();
        let app = router(self, feed);
        // A connection without a slot is closed; a slot lives as long as its connection's service.
        let per_connection = tower::service_fn(move |peer: SocketAddr| {
            let slot = slots.take(peer.ip());
            let app = app.clone();
            async move { slot.map(|slot| app.layer(Extension(Arc::new(slot)))).ok_or(SlotError) }
        });
        let handle = Handle::new();
        let mut server = axum_server::from_tcp(listener.into_std()?)?
            .handle(handle.clone())
            .http1_only();
        server
            .http_builder()
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(READ_TIMEOUT);
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
}

fn router(receiver: WebhookReceiver, feed: SourceFeed) -> Router {
    Router::new().route("/", post(take)).with_state(Arc::new(WebhookState {
        receiver,
        feed,
        room: Arc::new(Semaphore::new(BODIES_BYTES)),
    }))
}

async fn take(State(server): State<Arc<WebhookState>>, headers: HeaderMap, request: Request) -> Response {
    match hear(&server, &headers, request).await {
        Ok(taken) => answer(taken),
        Err(WebhookRefusal::NotNow) => not_now(),
        Err(WebhookRefusal::For(status, why)) => {
            server.feed.refused();
            (status, why).into_response()
        }
    }
}

/// Why a delivery is not heard.
enum WebhookRefusal {
    /// For a reason of the sender's.
    For(StatusCode, String),
    /// For one of ours: it is to be sent again.
    NotNow,
}

fn permits(length: usize) -> u32 {
    u32::try_from(length.max(1)).unwrap_or(u32::MAX)
}

async fn hear(server: &WebhookState, headers: &HeaderMap, request: Request) -> Result<ArrivalOutcome, WebhookRefusal> {
    let WebhookState { receiver, feed, room } = server;
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let unsigned = |unsigned: SignatureError| WebhookRefusal::For(StatusCode::UNAUTHORIZED, unsigned.to_string());
    if !receiver.rule.is_signed(header) {
        return Err(unsigned(SignatureError::Missing));
    }
    let length = header(header::CONTENT_LENGTH.as_str()).and_then(|length| length.parse().ok());
    let length: usize = length.unwrap_or(receiver.most_bytes);
    if length > receiver.most_bytes {
        return Err(receiver.too_large());
    }
    // Held until what was read is gone again. Whoever sends slowly, with a signature or without a right one, takes no more than
    // the part of one peer.
    let slot = request.extensions().get::<Arc<PeerSlot>>().cloned();
    let room = async {
        let of_peer = match &slot {
            Some(slot) => Some(slot.bytes().acquire_many(permits(length)).await?),
            None => None,
        };
        Ok::<_, AcquireError>((of_peer, room.acquire_many(permits(length)).await?))
    };
    let _room = timeout(READ_TIMEOUT, room)
        .await
        .map_err(|_| WebhookRefusal::NotNow)?
        .map_err(|_| WebhookRefusal::NotNow)?;
    let body = receiver.read(request).await?;
    let secret = tokio::fs::read(&receiver.key_file)
        .await
        .map_err(|_| WebhookRefusal::NotNow)?;
    let id = match receiver.rule.check(&secret, header, &body, Timestamp::now()) {
        Ok(id) => id,
        Err(SignatureError::Key) => {
            let why = signature::unusable(receiver.rule.scheme, &secret).unwrap_or_default();
            feed.failed(
                &format!("the key of spec.source.webhook.secretKeyRef {why}"),
                Duration::ZERO,
            );
            return Err(WebhookRefusal::NotNow);
        }
        Err(why) => return Err(unsigned(why)),
    };
    feed.report_connected();
    if says_json(header(header::CONTENT_TYPE.as_str())) && serde_json::from_slice::<IgnoredAny>(&body).is_err() {
        let why = "the Content-Type says JSON, and the body is none".to_owned();
        return Err(WebhookRefusal::For(StatusCode::BAD_REQUEST, why));
    }
    let heard = SourceMessage {
        id,
        payload: body,
        cursor: SourceCursor::default(),
        repeat: receiver.rule.repeat(),
    };
    // After the time it may still be kept: then the repeat is known.
    let taken = timeout(READ_TIMEOUT, feed.submit(heard))
        .await
        .unwrap_or(ArrivalOutcome::NotNow);
    match taken {
        ArrivalOutcome::TooDeep => {
            let why = format!("the body has more than {MOST_DEPTH} levels");
            Err(WebhookRefusal::For(StatusCode::BAD_REQUEST, why))
        }
        ArrivalOutcome::Replayed => {
            let why = "the same signed body came before under another id; a body that is meant to be sent again needs something \
                       that differs, such as a time"
                .to_owned();
            Err(WebhookRefusal::For(StatusCode::CONFLICT, why))
        }
        ArrivalOutcome::OnDisk | ArrivalOutcome::Known | ArrivalOutcome::Dropped | ArrivalOutcome::NotNow => Ok(taken),
    }
}

fn answer(taken: ArrivalOutcome) -> Response {
    match taken {
        ArrivalOutcome::OnDisk => StatusCode::ACCEPTED.into_response(),
        ArrivalOutcome::Known => StatusCode::OK.into_response(),
        ArrivalOutcome::Dropped => {
            let retry = [(header::RETRY_AFTER, RETRY_AFTER)];
            (StatusCode::TOO_MANY_REQUESTS, retry, "more than spec.limits.perMinute").into_response()
        }
        ArrivalOutcome::NotNow | ArrivalOutcome::TooDeep | ArrivalOutcome::Replayed => not_now(),
    }
}

/// Whether a `Content-Type` is JSON: `application/json`, or a type that ends with `+json`.
fn says_json(content_type: Option<&str>) -> bool {
    let essence = content_type
        .and_then(|value| value.split(';').next())
        .unwrap_or_default();
    let essence = essence.trim().to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

impl WebhookReceiver {
    fn too_large(&self) -> WebhookRefusal {
        let most = self.most_bytes;
        let why = format!("the body is cut, or longer than {most} bytes (spec.limits.maxPayloadBytes)");
        WebhookRefusal::For(StatusCode::PAYLOAD_TOO_LARGE, why)
    }

    async fn read(&self, request: Request) -> Result<Vec<u8>, WebhookRefusal> {
        let body = axum::body::to_bytes(request.into_body(), self.most_bytes);
        match timeout(READ_TIMEOUT, body).await {
            Ok(Ok(body)) => Ok(body.into()),
            Ok(Err(_)) => Err(self.too_large()),
            Err(_) => Err(WebhookRefusal::For(
                StatusCode::REQUEST_TIMEOUT,
                "the body came too slowly".into(),
            )),
        }
    }
}

fn not_now() -> Response {
    (
        StatusCode::SERVICE_UNAVAILABLE,
        "the event cannot be stored now: send it again",
    )
        .into_response()
}

#[cfg(test)]
mod tests;
