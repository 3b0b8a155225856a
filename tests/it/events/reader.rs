//! A person who reads.

use std::pin::Pin;

use futures::{Stream, StreamExt};
use reqwest::{Response, StatusCode};
use sse_stream::{Sse, SseStream};
use tokio::time::timeout;

use super::harness::{EventsHarness, WAIT_TIMEOUT};

/// One event as it came.
#[derive(Debug)]
pub struct Event {
    pub id: Option<i64>,
    pub name: String,
    pub data: String,
}

type Events = Pin<Box<dyn Stream<Item = Result<Sse, sse_stream::Error>> + Send>>;

/// A connection.
pub struct Reader(Events);

pub async fn request(
    harness: &EventsHarness,
    token: Option<&str>,
    agent: &str,
    query: &str,
    last: Option<i64>,
) -> Response {
    let mut request = harness.client.get(harness.events_url(agent, query));
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    if let Some(last) = last {
        request = request.header("last-event-id", last.to_string());
    }
    timeout(WAIT_TIMEOUT, request.send()).await.unwrap().unwrap()
}

impl Reader {
    /// Reads the events of Agent `x`.
    pub async fn connect(harness: &EventsHarness, token: &str, query: &str, last: Option<i64>) -> Self {
        let response = request(harness, Some(token), "a/x", query, last).await;
        Self::connected(response)
    }

    pub fn connected(response: Response) -> Self {
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self(Box::pin(SseStream::from_bytes_stream(response.bytes_stream())))
    }

    /// The next `count` events.
    pub async fn take(&mut self, count: usize) -> Vec<Event> {
        let mut events = Vec::new();
        while events.len() < count {
            let Ok(event) = timeout(WAIT_TIMEOUT, self.0.next()).await else {
                panic!("{} of {count} events came, the last {:?}", events.len(), events.last());
            };
            let event = event.expect("the stream ended").unwrap();
            // Comments keep the connection alive.
            let Some(name) = event.event else { continue };
            events.push(Event {
                id: event.id.map(|id| id.parse().unwrap()),
                name,
                data: event.data.unwrap_or_default(),
            });
        }
        events
    }

    /// Whether the stream ends now.
    pub async fn ended(&mut self) -> bool {
        timeout(WAIT_TIMEOUT, self.0.next()).await.unwrap().is_none()
    }
}
