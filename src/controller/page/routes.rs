//! The routes of the page: the document, its stream, and the forms to sign in and out.
//!
//! The session is in a cookie that scripts and other sites do not get. Requests of forms must come from the page itself.
//! Bodies, connections, readers and sessions are bounded.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{Html, IntoResponse, Response};
use axum::{Extension, Form, Router};
use futures::stream;
use jiff::tz::TimeZone;
use serde::Deserialize;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::rights::unverified;
use super::session::{PageSession, PageSessionTable, SessionRefusal};
use super::streams::{StreamPlace, StreamRefusal, StreamTable};
use super::turns::TurnFollower;
use super::{PageSources, content, login};
use crate::controller::agent::AgentsView;
use crate::controller::event_subscriptions::unavailable;
use crate::link::events::{ClientRefusal, ClientRefusalCode};
use crate::page::html::{PagePart, document, parts};
use crate::page::live;
use crate::page::responses::{PageForms, SCRIPT_NAME, STYLE_NAME, asset, protect};
use crate::support::connections::ConnectionBounds;
use crate::telemetry::http::HttpLimits;

/// Bounds on connections. Readers may share the address of a proxy. An hour ends a stream too.
pub const LIMITS: HttpLimits = HttpLimits {
    connections: ConnectionBounds::of_strangers(128, 96),
    head: Duration::from_secs(5),
    whole: Duration::from_hours(1),
    unread: Duration::from_secs(15),
};
/// The cookie of a session. Browsers accept the prefix only over HTTPS, for the whole host and no other.
const COOKIE: &str = "__Host-agentloop";
/// Largest body of a form in bytes.
const MAX_FORM_BYTES: usize = 16 * 1024;
/// Longest time for a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for what a document shows.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(15);
/// How often a stream looks for changes.
const LOOK: Duration = Duration::from_secs(1);

pub(super) struct PageServer {
    sources: PageSources,
    sessions: PageSessionTable,
    pub(super) turns: TurnFollower,
    streams: Arc<StreamTable>,
    stop: CancellationToken,
}

/// The routes of a server.
pub(super) fn router(server: Arc<PageServer>) -> Router {
    Router::new().fallback(answer).with_state(server)
}

async fn answer(
    State(server): State<Arc<PageServer>>,
    Extension(address): Extension<IpAddr>,
    request: Request,
) -> Response {
    let head_only = request.method() == Method::HEAD;
    let mut response = server.route(address, request).await;
    protect(response.headers_mut(), PageForms::Own);
    if head_only {
        // A stream would have no reader.
        *response.body_mut() = Body::empty();
    }
    response
}

impl PageServer {
    /// Streams end when `stop` is cancelled.
    pub(super) fn new(sources: PageSources, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            turns: TurnFollower::new(sources.loops.clone()),
            sources,
            sessions: PageSessionTable::default(),
            streams: Arc::default(),
            stop,
        })
    }

    async fn route(self: &Arc<Self>, address: IpAddr, request: Request) -> Response {
        let Some(agents) = self.sources.agents.get() else {
            return text(StatusCode::SERVICE_UNAVAILABLE, "the controller is starting; retry");
        };
        let (head, body) = request.into_parts();
        let reads = [Method::GET, Method::HEAD].contains(&head.method);
        let posts = head.method == Method::POST;
        match head.uri.path().strip_prefix('/').unwrap_or_default() {
            "" if reads => self.document(agents, &head).await,
            "events" if reads => self.stream(&head),
            "login" if reads => Html(login::form(None)).into_response(),
            "login" | "logout" if posts && !is_own_form(&head.headers) => {
                text(StatusCode::FORBIDDEN, "sign in and out with the forms of this page")
            }
            "login" if posts => self.sign_in(address, Request::from_parts(head, body)).await,
            "logout" if posts => self.sign_out(&head.headers),
            name @ (SCRIPT_NAME | STYLE_NAME) if reads => asset(name).unwrap_or_else(not_found),
            "" | "events" | SCRIPT_NAME | STYLE_NAME => not_allowed("GET, HEAD"),
            "login" => not_allowed("GET, HEAD, POST"),
            "logout" => not_allowed("POST"),
            _ => not_found(),
        }
    }

    async fn document(&self, agents: &AgentsView, head: &Parts) -> Response {
        let Some(session) = self.session(&head.headers) else {
            return see("/login");
        };
        let filter = namespace(&head.uri);
        let shown = timeout(DOCUMENT_TIMEOUT, self.parts(agents, &session, filter.as_ref()));
        match shown.await.unwrap_or_else(|_| Err(unverified())) {
            Ok(parts) => {
                let bar = login::bar(session.name(), filter.as_ref());
                Html(document(&parts, &TimeZone::UTC, &bar)).into_response()
            }
            Err(refusal) => text(StatusCode::SERVICE_UNAVAILABLE, &refusal.message),
        }
    }

    /// The parts that this user may see now.
    async fn parts(
        &self,
        agents: &AgentsView,
        session: &PageSession,
        filter: Option<&String>,
    ) -> Result<Vec<PagePart>, ClientRefusal> {
        let view = content::view(&self.sources, agents, &self.turns, (session, filter)).await?;
        Ok(parts(&view, &TimeZone::UTC))
    }

    fn stream(self: &Arc<Self>, head: &Parts) -> Response {
        let Some(session) = self.session(&head.headers) else {
            return text(StatusCode::UNAUTHORIZED, "the session has ended; sign in again");
        };
        let place = match self.streams.open(session.name()) {
            Ok(place) => place,
            Err(refusal) => {
                let status = match refusal {
                    StreamRefusal::OfUser => StatusCode::TOO_MANY_REQUESTS,
                    StreamRefusal::InTotal => StatusCode::SERVICE_UNAVAILABLE,
                };
                return text(status, &refusal.to_string());
            }
        };
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let reader = SessionReader {
            server: self.clone(),
            session,
            filter: namespace(&head.uri),
            shown: Vec::new(),
            look,
            written: Instant::now(),
            place,
        };
        let body = stream::unfold(Some(reader), |reader| async {
            let (text, reader) = reader?.next().await?;
            Some((Ok::<_, Infallible>(text), reader))
        });
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
    }

    async fn sign_in(&self, address: IpAddr, request: Request) -> Response {
        // Other tabs of the browser, and its next visitors, have the new session's cookie in place of theirs.
        let replaced: Vec<_> = session_ids(request.headers()).map(ToOwned::to_owned).collect();
        let Some(token) = token(request).await else {
            return refused(StatusCode::BAD_REQUEST, "The form has no token, or is too large.");
        };
        let user = match self.sources.access.identify((&token, address)).await {
            Ok(user) => user,
            Err(refusal) => {
                let status = if refusal.code == ClientRefusalCode::Unauthenticated {
                    StatusCode::UNAUTHORIZED
                } else {
                    StatusCode::SERVICE_UNAVAILABLE
                };
                return refused(status, &refusal.message);
            }
        };
        let name = user.username.clone().unwrap_or_default();
        match self.sessions.begin((user, &token), &replaced, (self.sources.clock)()) {
            Ok(id) => {
                tracing::info!(user = name, "signed in to the page");
                let cookie = format!("{COOKIE}={id}; Path=/; Secure; HttpOnly; SameSite=Strict");
                ([(header::SET_COOKIE, cookie)], see("/")).into_response()
            }
            Err(SessionRefusal::Expired) => refused(StatusCode::UNAUTHORIZED, "The token has expired."),
            Err(SessionRefusal::NoRandom) => {
                refused(StatusCode::SERVICE_UNAVAILABLE, "No session can be started now. Retry.")
            }
        }
    }

    fn sign_out(&self, headers: &HeaderMap) -> Response {
        for id in session_ids(headers) {
            self.sessions.end(id);
        }
        let cookie = format!("{COOKIE}=; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=0");
        ([(header::SET_COOKIE, cookie)], see("/login")).into_response()
    }

    fn session(&self, headers: &HeaderMap) -> Option<Arc<PageSession>> {
        session_ids(headers).find_map(|id| self.sessions.get(id))
    }
}

/// The ids of sessions in a request.
fn session_ids(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let cookies = headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let pairs = cookies.flat_map(|cookies| cookies.split(';'));
    pairs.filter_map(|pair| {
        let (name, id) = pair.trim().split_once('=')?;
        (name == COOKIE).then_some(id)
    })
}

/// Whether a request was sent by a page of this server: browsers say so, and scripts of other sites cannot.
fn is_own_form(headers: &HeaderMap) -> bool {
    let value = |name: &str| {
        let mut values = headers.get_all(name).iter();
        match (values.next(), values.next()) {
            (Some(value), None) => value.to_str().ok(),
            _ => None,
        }
    };
    match (value("sec-fetch-site"), value("origin"), value("host")) {
        (Some(site), ..) => site == "same-origin",
        (None, Some(origin), Some(host)) => origin
            .strip_prefix("https://")
            .is_some_and(|origin| origin.eq_ignore_ascii_case(host)),
        _ => false,
    }
}

/// The token in a form.
async fn token(request: Request) -> Option<String> {
    #[derive(Deserialize)]
    struct LoginForm {
        token: String,
    }
    let (parts, body) = request.into_parts();
    let bytes = timeout(BODY_TIMEOUT, to_bytes(body, MAX_FORM_BYTES)).await.ok()?.ok()?;
    let request = Request::from_parts(parts, Body::from(bytes));
    let Form(form) = Form::<LoginForm>::from_request(request, &()).await.ok()?;
    let token = form.token.trim();
    (!token.is_empty()).then(|| token.to_owned())
}

/// The namespace to which a URL narrows the page.
fn namespace(uri: &Uri) -> Option<String> {
    #[derive(Deserialize)]
    struct PageQuery {
        namespace: Option<String>,
    }
    let Query(query) = Query::<PageQuery>::try_from_uri(uri).ok()?;
    query
        .namespace
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
}

/// The form to sign in, with the reason of a refusal.
fn refused(status: StatusCode, why: &str) -> Response {
    (status, Html(login::form(Some(why)))).into_response()
}

fn text(status: StatusCode, words: &str) -> Response {
    (status, format!("{words}\n")).into_response()
}

fn see(path: &'static str) -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, path)]).into_response()
}

fn not_allowed(methods: &'static str) -> Response {
    (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, methods)]).into_response()
}

fn not_found() -> Response {
    StatusCode::NOT_FOUND.into_response()
}

/// A reader of the stream. It holds the parts that it was sent last, and is sent what differs.
struct SessionReader {
    server: Arc<PageServer>,
    session: Arc<PageSession>,
    filter: Option<String>,
    shown: Vec<PagePart>,
    look: Interval,
    /// When something was written last.
    written: Instant,
    /// Counts this reader until its connection ends.
    place: StreamPlace,
}

/// The last message to a reader whose session has ended.
const SESSION_ENDED: &str = "The session has ended: sign in again";
/// Shown to a reader whose place another user has taken. The page does not reconnect, since it would have no place.
const DISPLACED: &str =
    "Not live: too many pages are open, and another user had none. Close another page and reload this one";

impl SessionReader {
    /// The next text, and the reader unless that was the last; `None` if there is nothing more now.
    async fn next(mut self) -> Option<(String, Option<Self>)> {
        loop {
            tokio::select! {
                biased;
                // Another replica leads soon; the browser connects again.
                () = self.server.stop.cancelled() => return None,
                () = self.session.ended.cancelled() => return Some((live::end(SESSION_ENDED), None)),
                () = self.place.displaced.cancelled() => return Some((live::end(DISPLACED), None)),
                () = sleep_until(self.session.ends) => return Some((live::end(SESSION_ENDED), None)),
                _ = self.look.tick() => {}
            }
            self.session.touch();
            let Ok(parts) = self.parts().await else {
                // What cannot be verified is not shown. The browser connects again.
                return None;
            };
            let mut text = live::changes(&self.shown, &parts);
            self.shown = parts;
            if text.is_empty() && self.written.elapsed() >= live::KEEP_ALIVE_INTERVAL {
                text = live::COMMENT.into();
            }
            if !text.is_empty() {
                self.written = Instant::now();
                return Some((text, Some(self)));
            }
        }
    }

    async fn parts(&self) -> Result<Vec<PagePart>, ClientRefusal> {
        let agents = self.server.sources.agents.get();
        let agents = agents.ok_or_else(|| unavailable("the controller is starting; retry"))?;
        self.server.parts(agents, &self.session, self.filter.as_ref()).await
    }
}
