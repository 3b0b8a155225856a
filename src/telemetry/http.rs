//! The small HTTP servers: `/healthz` and `/readyz` on one port, `/metrics` on another, and pages.
//!
//! Without authentication of their own. Everything a peer can take is therefore bounded (connections, time, scrapes), and
//! probes have their own port, which scrapes cannot exhaust. Does not decide readiness: the process sets it through
//! [`Readiness`].

use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use axum_server::accept::Accept;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use futures::stream;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::exposition::ExpositionFormat;
use super::metrics::Metrics;
use super::unread::UnreadLimit;
use crate::support::connections::{ConnectionBounds, ConnectionLimiter, ConnectionSlot};

/// Whether the process is ready, and if not, what it waits for.
#[derive(Clone)]
pub struct Readiness(Arc<Mutex<Option<&'static str>>>);

impl Readiness {
    #[must_use]
    pub fn waiting(reason: &'static str) -> Self {
        Self(Arc::new(Mutex::new(Some(reason))))
    }

    pub fn set(&self, waiting_for: Option<&'static str>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = waiting_for;
    }

    #[must_use]
    pub fn waiting_for(&self) -> Option<&'static str> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Bounds on connections; a connection beyond them is closed at once.
    pub connections: ConnectionBounds,
    pub head: Duration,
    /// Longest life of a connection, from accept to the last byte of its only response.
    pub whole: Duration,
    /// The longest time for which a peer may read nothing of a response.
    pub unread: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections: ConnectionBounds::of_strangers(128, 16),
            head: Duration::from_secs(5),
            whole: Duration::from_secs(15),
            unread: Duration::from_secs(15),
        }
    }
}

/// Bounds on concurrent scrapes, until the response is sent; each has a thread.
const SCRAPES: ConnectionBounds = ConnectionBounds::of_strangers(6, 2);
/// How long a scrape beyond the bounds waits for another to end, and how often it checks.
pub const SCRAPE_WAIT: Duration = Duration::from_secs(5);
const SCRAPE_LOOK: Duration = Duration::from_millis(20);
/// Most pieces of a text that are written before the peer has taken the first of them.
const PIECES: usize = 2;
/// Pause after a failure to accept a connection, as without file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Routes of the probes.
pub fn probes(readiness: Readiness) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz).with_state(readiness))
}

/// Route of the metrics. Scrapes beyond the bounds wait for up to `wait`.
pub fn metrics(metrics: Arc<Metrics>, wait: Duration) -> Router {
    let scrapes = ScrapeState {
        metrics,
        wait,
        slots: ConnectionLimiter::new(SCRAPES),
    };
    Router::new().route("/metrics", get(scrape).with_state(Arc::new(scrapes)))
}

/// Serves a router forever, with one request per connection, within `limits`.
pub async fn serve(listener: TcpListener, router: Router, limits: HttpLimits) -> Infallible {
    accept(listener, router, limits, |connection| ready(Ok(connection))).await
}

/// The same over TLS. The configuration may be replaced in place.
pub async fn serve_tls(listener: TcpListener, router: Router, limits: HttpLimits, tls: RustlsConfig) -> Infallible {
    let acceptor = RustlsAcceptor::new(tls).handshake_timeout(limits.head);
    accept(listener, router, limits, |connection| {
        let accepted = acceptor.accept(connection, ());
        async { accepted.await.map(|(connection, ())| connection) }
    })
    .await
}

/// Accepts connections, each of which `open` prepares for HTTP.
async fn accept<S, F>(
    listener: TcpListener,
    router: Router,
    limits: HttpLimits,
    open: impl Fn(UnreadLimit<TcpStream>) -> F,
) -> Infallible
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = io::Result<S>> + Send + 'static,
{
    let slots = ConnectionLimiter::new(limits.connections);
    loop {
        let (connection, address) = match listener.accept().await {
            Ok((connection, address)) => (connection, address.ip()),
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection; retrying");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(slot) = slots.take(address) else { continue };
        let service = TowerToHyperService::new(router.clone().layer(Extension(address)));
        let opened = open(UnreadLimit::new(connection, limits.unread));
        let answer = async move {
            let Ok(connection) = opened.await else { return };
            let answer = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(limits.head)
                .keep_alive(false)
                .serve_connection(TokioIo::new(connection), service);
            // A peer's errors are not worth a log line; it has its response or none.
            let _ = answer.await;
        };
        tokio::spawn(async move {
            let _ = timeout(limits.whole, answer).await;
            drop(slot);
        });
    }
}

struct ScrapeState {
    metrics: Arc<Metrics>,
    slots: Arc<ConnectionLimiter>,
    wait: Duration,
}

impl ScrapeState {
    /// A slot, if one becomes free in time.
    async fn slot(&self, address: IpAddr) -> Option<ConnectionSlot> {
        let look = async {
            loop {
                if let Some(slot) = self.slots.take(address) {
                    return slot;
                }
                sleep(SCRAPE_LOOK).await;
            }
        };
        timeout(self.wait, look).await.ok()
    }
}

async fn readyz(State(readiness): State<Readiness>) -> Response {
    match readiness.waiting_for() {
        None => "ok\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {reason}\n")).into_response(),
    }
}

async fn scrape(
    State(scrapes): State<Arc<ScrapeState>>,
    Extension(address): Extension<IpAddr>,
    headers: HeaderMap,
) -> Response {
    let Some(slot) = scrapes.slot(address).await else {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "too many concurrent scrapes; try again\n",
        )
            .into_response();
    };
    let accept = headers.get_all(header::ACCEPT).iter();
    let accept: Vec<_> = accept.filter_map(|value| value.to_str().ok()).collect();
    let format = ExpositionFormat::negotiate(&accept.join(","));
    let (sender, receiver) = mpsc::channel::<Vec<u8>>(PIECES);
    // On a blocking thread, since the channel makes it wait for the peer, and so that many Agents do not delay timers and
    // the renewal of the Lease. It ends when the connection does, which drops the receiver.
    tokio::task::spawn_blocking(move || {
        scrapes
            .metrics
            .write(format, &mut |piece| sender.blocking_send(piece).is_ok());
        // A slow reader must not make room for another text.
        drop(slot);
    });
    let pieces = stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((Ok::<_, Infallible>(Bytes::from(piece)), receiver))
    });
    (
        [(header::CONTENT_TYPE, format.content_type())],
        Body::from_stream(pieces),
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    async fn served(router: Router, limits: HttpLimits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, router, limits));
        address
    }

    /// Everything received until the connection is closed.
    async fn rest(mut connection: TcpStream) -> String {
        let mut answer = Vec::new();
        let _ = timeout(SOON, connection.read_to_end(&mut answer)).await.unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn ask(address: SocketAddr, path: &str) -> TcpStream {
        let mut connection = TcpStream::connect(address).await.unwrap();
        // The server may have closed it already.
        let _ = connection
            .write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes())
            .await;
        connection
    }

    /// Sends requests until the response contains the text.
    async fn ask_until(address: SocketAddr, path: &str, words: &str) {
        let deadline = tokio::time::Instant::now() + SOON;
        while !rest(ask(address, path).await).await.contains(words) {
            assert!(tokio::time::Instant::now() < deadline, "never '{words}'");
        }
    }

    #[tokio::test]
    async fn connections_over_the_bound_are_closed_and_there_is_room_again_when_one_ends() {
        let limits = HttpLimits {
            connections: ConnectionBounds::of_strangers(9, 2),
            ..HttpLimits::default()
        };
        let address = served(probes(Readiness::waiting("x")), limits).await;
        let mut idle = vec![TcpStream::connect(address).await.unwrap()];
        assert!(
            rest(ask(address, "/healthz").await).await.ends_with("ok\n"),
            "the second"
        );
        idle.push(TcpStream::connect(address).await.unwrap());
        assert_eq!(rest(ask(address, "/healthz").await).await, "", "the third at once");
        idle.pop();
        ask_until(address, "/healthz", "200 OK").await;
    }

    #[tokio::test]
    async fn an_idle_connection_and_one_that_does_not_read_are_closed_in_time() {
        let limits = HttpLimits {
            head: Duration::from_millis(100),
            whole: Duration::from_millis(300),
            connections: ConnectionBounds::of_strangers(9, 1),
            ..HttpLimits::default()
        };
        // More than the buffers of two sockets hold.
        let long = || async { "x".repeat(64 * 1024 * 1024) };
        let address = served(Router::new().route("/", get(long)), limits).await;
        let idle = TcpStream::connect(address).await.unwrap();
        let since = tokio::time::Instant::now();
        rest(idle).await;
        assert!(since.elapsed() >= limits.head);
        let slow = ask(address, "/").await;
        assert_eq!(rest(ask(address, "/").await).await, "", "its slot is taken");
        ask_until(address, "/none", "404").await;
        drop(slow);
    }

    #[tokio::test]
    async fn a_connection_has_one_request() {
        let address = served(probes(Readiness::waiting("x")), HttpLimits::default()).await;
        let answer = rest(ask(address, "/readyz").await).await;
        assert!(
            answer.starts_with("HTTP/1.1 503") && answer.contains("connection: close"),
            "{answer}"
        );
    }

    #[tokio::test]
    async fn scrapes_of_one_address_are_bounded_until_they_are_sent() {
        let text = Arc::new(Metrics::new().unwrap());
        for number in 0..20_000 {
            // Longer than the buffers of two sockets hold.
            let reason = format!("{number:0>900}");
            text.link_refusals.with_label_values(&[reason.as_str()]).inc();
        }
        let address = served(metrics(text, Duration::from_millis(100)), HttpLimits::default()).await;
        let mut slow = Vec::new();
        for _ in 0..SCRAPES.per_address {
            let mut connection = ask(address, "/metrics").await;
            let mut head = [0; 15];
            connection.read_exact(&mut head).await.unwrap();
            assert_eq!(&head, b"HTTP/1.1 200 OK");
            slow.push(connection);
        }
        assert!(
            rest(ask(address, "/metrics").await)
                .await
                .contains("too many concurrent scrapes")
        );
        slow.pop();
        ask_until(address, "/metrics", "200 OK").await;
    }
}
