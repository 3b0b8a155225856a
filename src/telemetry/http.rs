//! The small HTTP servers: `/healthz` and `/readyz` on one port, `/metrics` on another, and pages.
//!
//! Scrapes are compressed with gzip for peers that accept it; nothing else is. Without authentication of their own. Everything a
//! peer can take is therefore bounded (connections, time, scrapes), and probes have their own port, which scrapes cannot exhaust.
//! Does not decide readiness: the process sets it through [`Readiness`].

use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use axum_server::accept::Accept;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use futures::stream;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::exposition::ExpositionFormat;
use super::gzip::{self, GzipPieces};
use super::metrics::Metrics;
use super::write_timeout::WriteTimeout;
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

/// Bounds on concurrent scrapes, until the last piece is handed to the connection; each has a thread, and a second one if
/// it is compressed.
const SCRAPES: ConnectionBounds = ConnectionBounds::of_strangers(6, 2);
/// How long a scrape beyond the bounds waits for another to end, and how often it checks.
pub const SCRAPE_WAIT: Duration = Duration::from_secs(5);
const SCRAPE_LOOK: Duration = Duration::from_millis(20);
/// Most pieces of a text that are written before the peer has taken the first of them.
const PIECES: usize = 2;
/// Pause after a failure to accept a connection, as without file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The first byte of a connection with TLS: the type of a record of the handshake.
const HANDSHAKE: u8 = 22;
/// What a peer reads that sends a request without TLS.
const PLAIN_HTTP: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n\
    connection: close\r\n\r\nthis port serves HTTPS only\n";

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

/// The same over TLS. The configuration may be replaced in place. A handshake has as much time as the head of a request.
pub async fn serve_tls(listener: TcpListener, router: Router, limits: HttpLimits, tls: RustlsConfig) -> Infallible {
    let acceptor = RustlsAcceptor::new(tls).handshake_timeout(limits.head);
    accept(listener, router, limits, |mut connection| {
        let acceptor = acceptor.clone();
        let opened = async move {
            refuse_plain_http(&mut connection).await?;
            let (connection, ()) = acceptor.accept(connection, ()).await?;
            Ok::<_, io::Error>(connection)
        };
        async move {
            timeout(limits.head, opened)
                .await
                .unwrap_or_else(|late| Err(late.into()))
        }
    })
    .await
}

/// Answers a request without TLS, and fails then: its sender would else see only that the connection ends.
async fn refuse_plain_http(connection: &mut WriteTimeout<TcpStream>) -> io::Result<()> {
    let mut first = [0];
    if connection.get_ref().peek(&mut first).await? == 0 || first[0] == HANDSHAKE {
        return Ok(());
    }
    // A peer may not see the response of a connection that ends with unread data.
    let mut request = vec![0; 4096];
    if connection.read(&mut request).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    connection.write_all(PLAIN_HTTP).await?;
    connection.shutdown().await?;
    Err(io::ErrorKind::InvalidData.into())
}

/// Accepts connections, each of which `open` prepares for HTTP.
async fn accept<S, F>(
    listener: TcpListener,
    router: Router,
    limits: HttpLimits,
    open: impl Fn(WriteTimeout<TcpStream>) -> F,
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
        let opened = open(WriteTimeout::new(connection, limits.unread));
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
    method: Method,
    headers: HeaderMap,
) -> Response {
    let Some(slot) = scrapes.slot(address).await else {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "too many concurrent scrapes; try again\n",
        )
            .into_response();
    };
    let format = ExpositionFormat::negotiate(&list(&headers, &header::ACCEPT));
    // There is nothing to compress for HEAD.
    let compressed = method == Method::GET && gzip::is_accepted(&list(&headers, &header::ACCEPT_ENCODING));
    let (sender, mut receiver) = mpsc::channel::<Vec<u8>>(PIECES);
    // A slow reader must not make room for another text.
    let slot = Arc::new(slot);
    let slot_of_writer = slot.clone();
    // On blocking threads, since the channels make them wait for the peer, and so that many Agents do not delay timers and
    // the renewal of the Lease. They end when the connection does, which drops the receiver.
    tokio::task::spawn_blocking(move || {
        let mut send = |piece| sender.blocking_send(piece).is_ok();
        scrapes.metrics.write(format, &mut send);
        drop(slot_of_writer);
    });
    if compressed {
        receiver = compress(receiver, slot);
    }
    let pieces = stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((Ok::<_, Infallible>(Bytes::from(piece)), receiver))
    });
    let headers = [
        (header::CONTENT_TYPE, format.content_type()),
        (header::VARY, "accept, accept-encoding"),
    ];
    let mut response = (headers, Body::from_stream(pieces)).into_response();
    if compressed {
        let coding = HeaderValue::from_static(gzip::GZIP);
        response.headers_mut().insert(header::CONTENT_ENCODING, coding);
    }
    response
}

/// Compresses the pieces of a text while the next ones are written. Holds the slot of the scrape until all are handed on.
fn compress(mut text: mpsc::Receiver<Vec<u8>>, slot: Arc<ConnectionSlot>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let mut pieces = GzipPieces::default();
        let mut send = |piece| sender.blocking_send(piece).is_ok();
        while let Some(piece) = text.blocking_recv() {
            if !pieces.push(&piece, &mut send) {
                return;
            }
        }
        pieces.finish(&mut send);
        drop(slot);
    });
    receiver
}

/// The value of a header that is a list, which may be in several lines.
fn list(headers: &HeaderMap, name: &HeaderName) -> String {
    let lines = headers.get_all(name).iter();
    let lines: Vec<_> = lines.filter_map(|line| line.to_str().ok()).collect();
    lines.join(",")
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::read_to_string;
    use std::net::SocketAddr;

    use axum::body::to_bytes;
    use axum::http::Request;
    use flate2::read::GzDecoder;
    use rstest::rstest;
    use tokio::net::TcpStream;
    use tower::ServiceExt as _;

    use super::*;

    const SOON: Duration = Duration::from_mins(1);

    /// Limits that end no connection on a machine that stalls.
    fn patient() -> HttpLimits {
        HttpLimits {
            head: SOON,
            whole: SOON,
            // Of those that are to be closed, none may be closed by this limit.
            unread: SOON * 10,
            ..HttpLimits::default()
        }
    }

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
            sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn connections_over_the_bound_are_closed_and_there_is_room_again_when_one_ends() {
        let limits = HttpLimits {
            connections: ConnectionBounds::of_strangers(9, 2),
            ..patient()
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
            head: Duration::from_secs(1),
            // The second request comes within that time, also on a machine that stalls.
            whole: Duration::from_secs(5),
            connections: ConnectionBounds::of_strangers(9, 1),
            ..patient()
        };
        // More than the buffers of two sockets hold.
        let long = Bytes::from(vec![b'x'; 64 * 1024 * 1024]);
        let address = served(Router::new().route("/", get(move || async { long })), limits).await;
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
        let address = served(metrics(text, Duration::from_millis(100)), patient()).await;
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

    /// Metrics whose text needs more pieces, also when it is compressed, than are written ahead.
    fn long_text() -> Arc<Metrics> {
        let text = Arc::new(Metrics::new().unwrap());
        for number in 0..500_u64 {
            let words = (1..50).map(|word| (number * 50 + word).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let mut reason = String::new();
            for word in words {
                write!(reason, "{:016x}", word ^ (word >> 31)).unwrap();
            }
            text.link_refusals.with_label_values(&[reason.as_str()]).inc();
        }
        text
    }

    async fn answer(router: &Router, request: axum::http::request::Builder) -> Response {
        let router = router.clone().layer(Extension(IpAddr::from([127, 0, 0, 1])));
        let request = request.body(Body::empty()).unwrap();
        router.oneshot(request).await.unwrap()
    }

    /// The content coding of a response, and its text.
    async fn decoded(response: Response) -> (Option<String>, String) {
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[header::VARY], "accept, accept-encoding");
        let coding = response.headers().get(header::CONTENT_ENCODING);
        let coding = coding.map(|value| value.to_str().unwrap().to_owned());
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let text = match coding {
            Some(_) => read_to_string(GzDecoder::new(&*body)),
            None => read_to_string(&*body),
        };
        let text = text.unwrap();
        // What differs between two scrapes is the process itself.
        let lines = text.lines().filter(|line| !line.starts_with("process_"));
        (coding, lines.collect::<Vec<_>>().join("\n"))
    }

    #[rstest]
    #[case("text/plain", ExpositionFormat::Text)]
    #[case("application/openmetrics-text", ExpositionFormat::OpenMetrics)]
    #[tokio::test]
    async fn a_scrape_is_compressed_for_who_accepts_it_and_has_the_same_text(
        #[case] accept: &str,
        #[case] format: ExpositionFormat,
    ) {
        let router = metrics(long_text(), SCRAPE_WAIT);
        let get = || Request::get("/metrics").header(header::ACCEPT, accept);
        let response = answer(&router, get()).await;
        assert_eq!(response.headers()[header::CONTENT_TYPE], format.content_type());
        let (coding, plain) = decoded(response).await;
        assert_eq!(coding, None);
        assert!(plain.len() > 10 * 32 * 1024, "several pieces");
        for (asked, coding) in [("gzip", Some("gzip")), ("deflate, gzip;q=0.5", Some("gzip"))]
            .into_iter()
            .chain(["gzip;q=0", "identity", "br"].map(|asked| (asked, None)))
        {
            let response = answer(&router, get().header(header::ACCEPT_ENCODING, asked)).await;
            assert_eq!(response.headers()[header::CONTENT_TYPE], format.content_type());
            let (received, text) = decoded(response).await;
            assert_eq!(received.as_deref(), coding, "{asked}");
            assert!(text == plain, "{asked}: another text");
        }
        let lines = get().header(header::ACCEPT_ENCODING, "br");
        let response = answer(&router, lines.header(header::ACCEPT_ENCODING, "gzip")).await;
        assert_eq!(
            decoded(response).await,
            (Some("gzip".into()), plain),
            "in several lines"
        );
    }

    #[tokio::test]
    async fn the_head_of_a_scrape_and_probes_are_not_compressed() {
        let router = metrics(long_text(), SCRAPE_WAIT).merge(probes(Readiness::waiting("x")));
        let asked = || Request::head("/metrics").header(header::ACCEPT_ENCODING, "gzip");
        let response = answer(&router, asked()).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(!response.headers().contains_key(header::CONTENT_ENCODING));
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert!(body.is_empty());
        let request = asked().method(Method::GET).uri("/healthz").body(Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert!(!response.headers().contains_key(header::CONTENT_ENCODING));
        assert_eq!(to_bytes(response.into_body(), 9).await.unwrap(), "ok\n");
    }

    #[tokio::test]
    async fn compressed_scrapes_that_nobody_reads_are_bounded_until_their_connections_end() {
        let router = metrics(long_text(), Duration::from_millis(100));
        let get = || Request::get("/metrics").header(header::ACCEPT_ENCODING, "gzip");
        let mut unread = Vec::new();
        for _ in 0..SCRAPES.per_address {
            let response = answer(&router, get()).await;
            assert_eq!(response.status(), StatusCode::OK);
            unread.push(response);
        }
        assert_eq!(answer(&router, get()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        unread.pop();
        let deadline = tokio::time::Instant::now() + SOON;
        while answer(&router, get()).await.status() != StatusCode::OK {
            assert!(tokio::time::Instant::now() < deadline, "never room");
        }
    }
}
