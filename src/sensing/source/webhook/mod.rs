//! The source that others send to: `POST /`, signed. It answers 202 once what came is on disk, and never before.
//!
//! | status | means |
//! |---|---|
//! | 202 | taken, and on disk |
//! | 200 | known already |
//! | 401 | not signed, or not with the key, or too long ago |
//! | 413 | longer than `limits.maxPayloadBytes` |
//! | 429 | more than `limits.perMinute` |
//! | 503 | it cannot be kept now: send it again |

pub mod signature;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use axum_server::Handle;
use hyper_util::rt::TokioTimer;
use jiff::Timestamp;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::signature::{Rule, Unsigned};
use super::{Cursor, Feed, Heard, Taken};

/// Longest time for a request's head, for its body, and for its keeping.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How long open requests may go on after the server was told to stop.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Seconds after which a sender that was too fast may come again.
const RETRY_AFTER: &str = "60";

/// Receives what others send.
#[derive(Clone, Debug)]
pub struct Receiver {
    /// How requests have to be signed.
    pub rule: Rule,
    /// The file with the key; read for each request, since keys are changed.
    pub key_file: PathBuf,
    /// Most bytes of a body.
    pub most_bytes: usize,
    /// Most connections at once; more are closed at once.
    pub connections: usize,
}

struct Server {
    receiver: Receiver,
    feed: Feed,
}

impl Receiver {
    /// Serves until `stop`.
    pub async fn run(self, listener: TcpListener, feed: Feed, stop: CancellationToken) -> std::io::Result<()> {
        let slots = Arc::new(Semaphore::new(self.connections));
        feed.works();
        let app = router(self, feed);
        // A connection without a slot is closed; a slot lives as long as its connection's service.
        let per_connection = tower::service_fn(move |_: SocketAddr| {
            let slot = slots.clone().try_acquire_owned();
            let app = app.clone();
            async move { slot.map(|slot| app.layer(Extension(Arc::new(slot)))) }
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

fn router(receiver: Receiver, feed: Feed) -> Router {
    Router::new()
        .route("/", post(take))
        .route("/healthz", get(StatusCode::OK))
        .with_state(Arc::new(Server { receiver, feed }))
}

async fn take(State(server): State<Arc<Server>>, headers: HeaderMap, request: Request) -> Response {
    let body = match read(&server.receiver, request).await {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let Ok(secret) = tokio::fs::read(&server.receiver.key_file).await else {
        return not_now();
    };
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let id = match server.receiver.rule.check(&secret, header, &body, Timestamp::now()) {
        Ok(id) => id,
        Err(Unsigned::Key) => return not_now(),
        Err(unsigned) => return (StatusCode::UNAUTHORIZED, unsigned.to_string()).into_response(),
    };
    let heard = Heard {
        id,
        payload: body,
        cursor: Cursor::default(),
    };
    match timeout(READ_TIMEOUT, server.feed.give(heard)).await {
        Ok(Taken::OnDisk) => StatusCode::ACCEPTED.into_response(),
        Ok(Taken::Known) => StatusCode::OK.into_response(),
        Ok(Taken::Dropped) => {
            let retry = [(header::RETRY_AFTER, RETRY_AFTER)];
            (StatusCode::TOO_MANY_REQUESTS, retry, "more than spec.limits.perMinute").into_response()
        }
        // After the time it may still be kept: then the repeat is known.
        Ok(Taken::NotNow) | Err(_) => not_now(),
    }
}

async fn read(receiver: &Receiver, request: Request) -> Result<Vec<u8>, Response> {
    let body = axum::body::to_bytes(request.into_body(), receiver.most_bytes);
    match timeout(READ_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.into()),
        Ok(Err(_)) => {
            let most = receiver.most_bytes;
            let why = format!("the body is cut, or longer than {most} bytes (spec.limits.maxPayloadBytes)");
            Err((StatusCode::PAYLOAD_TOO_LARGE, why).into_response())
        }
        Err(_) => Err(StatusCode::REQUEST_TIMEOUT.into_response()),
    }
}

fn not_now() -> Response {
    (
        StatusCode::SERVICE_UNAVAILABLE,
        "this cannot be kept now: send it again",
    )
        .into_response()
}

#[cfg(test)]
mod tests;
