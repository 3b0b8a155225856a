//! The routes at which pods post one message.
//!
//! Owns the HTTP side only: who may use a route, body and status codes. What a message leads to is up to an implementation
//! of [`LinkHandler`].

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;

use super::body_room::BodyKind;
use super::events::{EventsPage, PAGE_LINES, UNNAMED_EVENT, is_event_name};
use super::messages::PodRefusal;
use super::server::{LinkCaller, LinkHandler, LinkServer, PodIdentity, PodKind, authenticate, malformed, read, refuse};

/// Answers the message of a pod of this kind with what `handle` makes of it.
pub(super) async fn pod_post<L, M, A, F>(
    server: &LinkServer<L>,
    caller: &LinkCaller,
    request: Request,
    kind: PodKind,
    handle: impl FnOnce(Arc<L>, PodIdentity, M) -> F,
) -> Response
where
    L: LinkHandler,
    M: DeserializeOwned,
    A: IntoResponse,
    F: Future<Output = Result<A, PodRefusal>>,
{
    let answer = async {
        let pod = authenticate(server, caller, kind).await?;
        // What is kept of it from here on has bounds of its own.
        let (message, room) = read::<M, L>(server, &pod, BodyKind::Message, request).await?;
        drop(room);
        handle(server.link.clone(), pod, message).await
    };
    respond(server, answer.await)
}

/// The answer to a pod, or its refusal.
pub(super) fn respond<L: LinkHandler>(
    server: &LinkServer<L>,
    answer: Result<impl IntoResponse, PodRefusal>,
) -> Response {
    match answer {
        Ok(answer) => answer.into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}

/// The answer to a message that needs none.
pub(super) fn no_content((): ()) -> StatusCode {
    StatusCode::NO_CONTENT
}

pub(super) async fn report<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    pod_post(
        &server,
        &caller,
        request,
        PodKind::Agent,
        |link, pod, report| async move { link.report(&pod, report).map(no_content) },
    )
    .await
}

pub(super) async fn events<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let handle = |link: Arc<L>, pod, mut page: EventsPage| async move {
        if page.events.len() > PAGE_LINES {
            return Err(malformed(format!("a page has at most {PAGE_LINES} lines")));
        }
        // Replaced, not refused: otherwise the worker would retry the same page forever, and one line would block all others.
        for line in page.events.iter_mut().filter(|line| !is_event_name(&line.event)) {
            UNNAMED_EVENT.clone_into(&mut line.event);
        }
        link.events(&pod, page).await.map(Json)
    };
    pod_post(&server, &caller, request, PodKind::Agent, handle).await
}

pub(super) async fn history<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    pod_post(
        &server,
        &caller,
        request,
        PodKind::Agent,
        |link, pod, batch| async move { link.history(&pod, batch).await.map(Json) },
    )
    .await
}

pub(super) async fn delivered<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    pod_post(
        &server,
        &caller,
        request,
        PodKind::Agent,
        |link, pod, delivered| async move { link.delivered(&pod, delivered).map(no_content) },
    )
    .await
}

pub(super) async fn sensor_report<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    pod_post(
        &server,
        &caller,
        request,
        PodKind::Sensor,
        |link, pod, report| async move { link.sensor_report(&pod, report).map(no_content) },
    )
    .await
}

pub(super) async fn deliver<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    pod_post(
        &server,
        &caller,
        request,
        PodKind::Sensor,
        |link, pod, deliver| async move { link.deliver(&pod, deliver).await.map(Json) },
    )
    .await
}
