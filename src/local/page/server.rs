//! Serves the page over HTTP: the document, and a stream of the parts that change.
//!
//! Answers nothing without the token in the path, so that neither other users of the machine nor pages in a browser can
//! read it. Also refuses names in `Host`: a page of another site that lets its name point here (DNS rebinding) sends its
//! own. There is no route that changes anything. Readers are bounded, and one that does not read is dropped; a slow one
//! skips states, so that each costs no more than the newest.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use futures::stream;
use jiff::tz::TimeZone;
use maud::Markup;
use tokio::sync::watch;
use tokio::time::timeout;

use super::PageContent;
use crate::page::html::{PagePart, document};
use crate::page::live;
use crate::page::responses::{PageForms, SCRIPT_NAME, STYLE_NAME, asset, protect};
use crate::support::connections::{ConnectionBounds, ConnectionLimiter, ConnectionSlot};
use crate::support::hash::sha256;
use crate::telemetry::http::HttpLimits;

/// Readers of the stream at a time.
pub const MAX_READERS: usize = 8;
/// Bounds on connections. An hour ends a stream too; the browser connects again and is sent everything.
pub const LIMITS: HttpLimits = HttpLimits {
    connections: ConnectionBounds::of_strangers(32, 32),
    head: Duration::from_secs(5),
    whole: Duration::from_hours(1),
    unread: Duration::from_secs(15),
};

struct LocalPageServer {
    /// Hash of the token: comparing hashes takes the same time for each wrong token.
    token: [u8; 32],
    zone: TimeZone,
    content: watch::Sender<PageContent>,
    readers: Arc<ConnectionLimiter>,
}

/// Routes of the page, under this token.
pub fn router(token: &str, zone: TimeZone, content: watch::Sender<PageContent>) -> Router {
    let server = LocalPageServer {
        token: sha256(token),
        zone,
        content,
        readers: ConnectionLimiter::new(ConnectionBounds::of_strangers(MAX_READERS, MAX_READERS)),
    };
    Router::new().fallback(answer).with_state(Arc::new(server))
}

async fn answer(
    State(server): State<Arc<LocalPageServer>>,
    Extension(address): Extension<IpAddr>,
    request: Request,
) -> Response {
    let mut response = server.answer(address, &request);
    // The URL contains the token.
    protect(response.headers_mut(), PageForms::Absent);
    response
}

impl LocalPageServer {
    fn answer(&self, address: IpAddr, request: &Request) -> Response {
        if !has_safe_host(request) {
            let why = "open the page by an IP address or as localhost\n";
            return (StatusCode::MISDIRECTED_REQUEST, why).into_response();
        }
        let path = request
            .uri()
            .path()
            .strip_prefix('/')
            .and_then(|path| path.split_once('/'));
        let Some((_, path)) = path.filter(|(token, _)| sha256(token) == self.token) else {
            let why = "open the page by the URL that the run prints when it starts\n";
            return (StatusCode::FORBIDDEN, why).into_response();
        };
        let reads = [Method::GET, Method::HEAD].contains(request.method());
        match path {
            "" | "events" | SCRIPT_NAME | STYLE_NAME if !reads => {
                (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "GET, HEAD")]).into_response()
            }
            "" => axum::response::Html(self.document()).into_response(),
            "events" => self.stream(address, request.method() == Method::HEAD),
            name => asset(name).unwrap_or_else(|| StatusCode::NOT_FOUND.into_response()),
        }
    }

    fn document(&self) -> String {
        document(&self.content.borrow().parts, &self.zone, &Markup::default())
    }

    fn stream(&self, address: IpAddr, head_only: bool) -> Response {
        let Some(slot) = self.readers.take(address) else {
            return (
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{MAX_READERS} pages are live already, which is the most; close one and reload this page\n"),
            )
                .into_response();
        };
        let body = if head_only {
            Body::empty()
        } else {
            Body::from_stream(stream::unfold(
                Some(PageReader::new(self.content.subscribe(), slot)),
                |reader| async {
                    let (text, reader) = reader?.next().await?;
                    Some((Ok::<_, Infallible>(text), reader))
                },
            ))
        };
        ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
    }
}

/// Whether the request names this server by an IP address or as `localhost`, on any port: a tunnel has its own.
fn has_safe_host(request: &Request) -> bool {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let host = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
    host.is_some_and(|host| is_safe(&host)) && request.uri().authority().is_none_or(is_safe)
}

fn is_safe(authority: &Authority) -> bool {
    let host = authority.host();
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    !authority.as_str().contains('@') && (host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok())
}

/// A reader of the stream. It holds the content that it was sent last, and is sent what differs.
struct PageReader {
    content: watch::Receiver<PageContent>,
    shown: Arc<Vec<PagePart>>,
    /// Counts this reader until its connection ends.
    _slot: ConnectionSlot,
}

impl PageReader {
    fn new(mut content: watch::Receiver<PageContent>, slot: ConnectionSlot) -> Self {
        // Everything first: the document may be older than the stream.
        content.mark_changed();
        Self {
            content,
            shown: Arc::default(),
            _slot: slot,
        }
    }

    /// The next text, and the reader unless that was the last; `None` if there is nothing more.
    async fn next(mut self) -> Option<(String, Option<Self>)> {
        match timeout(live::KEEP_ALIVE_INTERVAL, self.content.changed()).await {
            Err(_) => return Some((live::COMMENT.into(), Some(self))),
            Ok(Err(_)) => return None,
            Ok(Ok(())) => {}
        }
        let content = self.content.borrow_and_update().clone();
        let text = live::changes(&self.shown, &content.parts);
        if let Some(why) = content.ended {
            return Some((text + &live::end(why), None));
        }
        self.shown = content.parts;
        Some((text, Some(self)))
    }
}

#[cfg(test)]
mod tests;
