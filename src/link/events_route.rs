//! The route for clients: an Agent's events as server-sent events.
//!
//! Owns the HTTP side only: the cursor, the format of events, status codes. Authorization is up to
//! [`LinkHandler::read`].

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::Deserialize;

use super::events::{
    ClientRefusal, ClientRefusalCode, END_EVENT, EventStreamItem, LATEST, ReadRequest, START_EVENT, UNNAMED_EVENT,
    is_event_name,
};
use super::server::{LinkCaller, LinkHandler, LinkServer, closing};
use super::text_fragments::TEXT_EVENT;

/// Sent by browsers when they reconnect; takes precedence over the query, which they repeat unchanged.
const LAST_EVENT_ID: &str = "last-event-id";
/// Value of `after` for [`LATEST`].
const LATEST_WORD: &str = "latest";

#[derive(Deserialize)]
struct EventsQuery {
    after: Option<String>,
    messages: Option<bool>,
    text: Option<bool>,
}

pub(super) async fn events<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    Path((namespace, name)): Path<(String, String)>,
    caller: LinkCaller,
    headers: HeaderMap,
    uri: Uri,
) -> Response {
    let telling = async {
        let (after, query) = events_query(&headers, &uri)?;
        let request = ReadRequest {
            namespace,
            name,
            after,
            messages: query.messages.unwrap_or(false),
            text: query.text.unwrap_or(false),
        };
        let (token, address) = caller.token().ok_or_else(no_token)?;
        let telling = server.link.read(token, address, &request).await?;
        caller.mark_authenticated(&request.namespace);
        Ok::<_, ClientRefusal>(telling)
    };
    match telling.await {
        Ok(telling) => {
            let events = telling.map(event).take_until(server.stop.clone().cancelled_owned());
            Sse::new(events)
                .keep_alive(KeepAlive::new().interval(server.limits.heartbeat))
                .into_response()
        }
        Err(refusal) => refuse_client(refusal),
    }
}

fn event(told: EventStreamItem) -> Result<Event, axum::Error> {
    match told {
        EventStreamItem::Start(seq) => Event::default()
            .id(seq.to_string())
            .event(START_EVENT)
            .json_data(serde_json::json!({ "seq": seq })),
        EventStreamItem::Line(line) => Event::default()
            .id(line.seq.to_string())
            .event(event_name(&line.event))
            .json_data(line),
        // Without an id: it moves no cursor.
        EventStreamItem::Text(fragment) => Event::default().event(TEXT_EVENT).json_data(&*fragment),
        EventStreamItem::End(reason) => Event::default()
            .event(END_EVENT)
            .json_data(serde_json::json!({ "reason": reason })),
    }
}

/// The name of an event. A line break would make [`Event::event`] panic, and so end the controller of all Agents.
fn event_name(name: &str) -> &str {
    if is_event_name(name) { name } else { UNNAMED_EVENT }
}

/// The response to a client that is refused.
pub(super) fn refuse_client(refusal: ClientRefusal) -> Response {
    let unauthenticated = refusal.code == ClientRefusalCode::Unauthenticated;
    let answer = (status(refusal.code), Json(refusal));
    if unauthenticated {
        return closing(answer);
    }
    answer.into_response()
}

pub(super) fn no_token() -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::Unauthenticated,
        message: "the token is missing; send it as `Authorization: Bearer <token>`, for example a token from `kubectl create token`"
            .into(),
    }
}

/// The line after which to begin (0: the oldest that is kept), and what else is in the query.
fn events_query(headers: &HeaderMap, uri: &Uri) -> Result<(i64, EventsQuery), ClientRefusal> {
    let asked = Query::<EventsQuery>::try_from_uri(uri).ok();
    let asked = asked.and_then(|Query(asked)| {
        let after = match headers.get(LAST_EVENT_ID) {
            Some(id) => id.to_str().ok()?.parse().ok()?,
            None => match asked.after.as_deref() {
                Some(LATEST_WORD) => return Some((LATEST, asked)),
                Some(seq) => seq.parse().ok()?,
                None => 0,
            },
        };
        (0..LATEST).contains(&after).then_some((after, asked))
    });
    asked.ok_or_else(|| ClientRefusal {
        code: ClientRefusalCode::Malformed,
        message:
            "after=N and the header Last-Event-ID must be 0 or the seq of an event, or after=latest; messages and text must be true or false"
                .into(),
    })
}

fn status(code: ClientRefusalCode) -> StatusCode {
    match code {
        ClientRefusalCode::Malformed => StatusCode::BAD_REQUEST,
        ClientRefusalCode::Unauthenticated => StatusCode::UNAUTHORIZED,
        ClientRefusalCode::Forbidden => StatusCode::FORBIDDEN,
        ClientRefusalCode::NotFound => StatusCode::NOT_FOUND,
        ClientRefusalCode::Conflict => StatusCode::CONFLICT,
        ClientRefusalCode::TooManyReaders | ClientRefusalCode::TooManyTasks => StatusCode::TOO_MANY_REQUESTS,
        ClientRefusalCode::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::events::EventLine;

    #[rstest]
    #[case::two_lines("x\ny")]
    #[case::a_carriage_return("x\ry")]
    #[case::a_frame_of_the_stream("end")]
    #[case::empty("")]
    fn a_name_that_no_event_can_have_is_replaced(#[case] name: &str) {
        let line = |name: &str| {
            let line = EventLine {
                event: name.into(),
                ..EventLine::default()
            };
            event(EventStreamItem::Line(Box::new(line))).unwrap()
        };
        let written = format!("{:?}", line(name));
        assert!(written.contains("event: event:unnamed"), "{written}");
        let written = format!("{:?}", line("tool:intent"));
        assert!(written.contains("event: tool:intent"), "{written}");
    }
}
