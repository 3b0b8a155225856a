//! The webhook source: `POST /`, signed. Answers 202 only once the delivery is on disk.
//!
//! | status | means |
//! |---|---|
//! | 202 | accepted and on disk |
//! | 200 | a repeat |
//! | 400 | its `Content-Type` is JSON and its body is not, or it is nested too deeply |
//! | 401 | not signed, not signed with the key, or signed too long ago |
//! | 408 | the body was not received in time |
//! | 409 | the same signed text came before under another id |
//! | 413 | longer than `limits.maxPayloadBytes` |
//! | 429 | more than `limits.perMinute` |
//! | 503 | it cannot be stored now: send it again |
//!
//! The port may be reachable by anyone. Connections are bounded in total and per peer, and so are the bytes of all
//! bodies being read; a request without signature headers is answered before its body is read.

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
use crate::rules::MAX_DEPTH;

/// Longest time for a request's head, for its body, and for its storage.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for open requests to finish after `stop`.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Maximum number of bytes of all bodies being read, within the memory of a small pod.
const BODIES_BYTES: usize = 16 * 1024 * 1024;
/// One peer gets at most this fraction of the connections and the bytes: large, since an Ingress is one peer for all
/// senders.
const PEERS: usize = 4;
/// Seconds after which a rate-limited sender may retry.
const RETRY_AFTER: &str = "60";

#[derive(Clone, Debug)]
pub struct WebhookReceiver {
    pub rule: SignatureRule,
    /// The file with the key; read for each request, since keys are rotated.
    pub key_file: PathBuf,
    pub max_bytes: usize,
    /// Maximum number of concurrent connections; more are closed at once.
    pub connections: usize,
}

struct WebhookState {
    receiver: WebhookReceiver,
    feed: SourceFeed,
    /// Bytes of bodies that may still be read.
    body_bytes: Arc<Semaphore>,
}

impl WebhookReceiver {
    pub async fn run(self, listener: TcpListener, feed: SourceFeed, stop: CancellationToken) -> std::io::Result<()> {
        let bytes = (BODIES_BYTES / PEERS).max(self.max_bytes);
        let slots = PeerSlots::new(self.connections, (self.connections / PEERS).max(1), bytes);
        feed.report_connected();
        let app = router(self, feed);
        // Connections without a slot are closed; a slot lives as long as its connection's service.
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
        body_bytes: Arc::new(Semaphore::new(BODIES_BYTES)),
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

/// Why a delivery is not accepted.
enum WebhookRefusal {
    /// The request is invalid.
    For(StatusCode, String),
    /// It cannot be stored now: the sender has to retry.
    NotNow,
}

fn permits(length: usize) -> u32 {
    u32::try_from(length.max(1)).unwrap_or(u32::MAX)
}

async fn hear(server: &WebhookState, headers: &HeaderMap, request: Request) -> Result<ArrivalOutcome, WebhookRefusal> {
    let WebhookState {
        receiver,
        feed,
        body_bytes,
    } = server;
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let unsigned = |unsigned: SignatureError| WebhookRefusal::For(StatusCode::UNAUTHORIZED, unsigned.to_string());
    if !receiver.rule.is_signed(header) {
        return Err(unsigned(SignatureError::Missing));
    }
    let length = header(header::CONTENT_LENGTH.as_str()).and_then(|length| length.parse().ok());
    let length: usize = length.unwrap_or(receiver.max_bytes);
    if length > receiver.max_bytes {
        return Err(receiver.too_large());
    }
    // Held until the body is dropped. A slow sender, even with a wrong signature, takes no more than the share of one
    // peer. The peer's share is acquired first, so that a peer at its bound does not hold bytes of the total while it
    // waits.
    let slot = request.extensions().get::<Arc<PeerSlot>>().cloned();
    let body_bytes = async {
        let of_peer = match &slot {
            Some(slot) => Some(slot.bytes().acquire_many(permits(length)).await?),
            None => None,
        };
        Ok::<_, AcquireError>((of_peer, body_bytes.acquire_many(permits(length)).await?))
    };
    let _permits = timeout(READ_TIMEOUT, body_bytes)
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
        let why = "the Content-Type is JSON, but the body is not".to_owned();
        return Err(WebhookRefusal::For(StatusCode::BAD_REQUEST, why));
    }
    let message = SourceMessage {
        id,
        payload: body,
        cursor: SourceCursor::default(),
        repeat: receiver.rule.repeat(),
    };
    // It may still be stored after the timeout: then the retry is recognized as a repeat.
    let taken = timeout(READ_TIMEOUT, feed.submit(message))
        .await
        .unwrap_or(ArrivalOutcome::NotNow);
    match taken {
        ArrivalOutcome::TooDeep => {
            let why = format!("the body has more than {MAX_DEPTH} levels of nesting");
            Err(WebhookRefusal::For(StatusCode::BAD_REQUEST, why))
        }
        ArrivalOutcome::Replayed => {
            let why = "the same signed body was received before under another id; to send a body again on purpose, include something \
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
        let max = self.max_bytes;
        let why = format!("the body is incomplete, or longer than {max} bytes (spec.limits.maxPayloadBytes)");
        WebhookRefusal::For(StatusCode::PAYLOAD_TOO_LARGE, why)
    }

    async fn read(&self, request: Request) -> Result<Vec<u8>, WebhookRefusal> {
        let body = axum::body::to_bytes(request.into_body(), self.max_bytes);
        match timeout(READ_TIMEOUT, body).await {
            Ok(Ok(body)) => Ok(body.into()),
            Ok(Err(_)) => Err(self.too_large()),
            Err(_) => Err(WebhookRefusal::For(
                StatusCode::REQUEST_TIMEOUT,
                "the body was not received in time".into(),
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
