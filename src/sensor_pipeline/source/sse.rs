//! The source of server-sent events.
//!
//! Reads with bounds: an event that is too long is skipped without being buffered, and the stream continues after it.

use std::time::Duration;

use reqwest::header::{ACCEPT, HeaderValue};
use reqwest::{Client, Response};
use tokio::time::{Instant, timeout};

use super::backoff::MAX_PAUSE;
use super::http::{SourceError, SourceTarget, content_type, open_stream, silent, unreachable};
use super::reconnect::{PAUSE, ReconnectBackoff};
use super::{RepeatRule, SourceCursor, SourceFeed, SourceMessage};

/// Longest event id that is kept.
const MAX_ID: usize = 1024;

#[derive(Clone, Debug)]
pub struct SseListener {
    pub place: SourceTarget,
    /// Time without data after which it reconnects.
    pub idle: Duration,
}

impl SseListener {
    pub async fn run(self, mut cursor: SourceCursor, feed: SourceFeed) {
        let mut reopening = ReconnectBackoff::default();
        let mut clients = self.place.clients();
        loop {
            let begun = Instant::now();
            let result = match clients.get() {
                Ok(client) => self.follow(&client, &mut cursor, &feed, &mut reopening).await,
                Err(failure) => Err(failure),
            };
            reopening.wait_to_reconnect(begun.elapsed(), result, &feed).await;
        }
    }

    /// Runs one connection to its end.
    async fn follow(
        &self,
        client: &Client,
        cursor: &mut SourceCursor,
        feed: &SourceFeed,
        reopening: &mut ReconnectBackoff,
    ) -> Result<(), SourceError> {
        let mut response = self.open(client, cursor).await?;
        feed.report_connected();
        let mut parser = SseParser::new(self.place.max_bytes, cursor.last_event_id.clone());
        loop {
            let chunk = timeout(self.idle, response.chunk())
                .await
                .map_err(|_| silent(self.idle))?;
            let Some(chunk) = chunk.map_err(|error| unreachable(&error))? else {
                return Ok(());
            };
            for event in parser.push(&chunk) {
                self.give(event, cursor, feed).await?;
            }
            if let Some(pause) = parser.pause() {
                reopening.pause = pause;
            }
        }
    }

    async fn open(&self, client: &Client, cursor: &SourceCursor) -> Result<Response, SourceError> {
        self.place.check()?;
        let mut request = client
            .get(self.place.url.clone())
            .headers(self.place.headers()?)
            .header(ACCEPT, "text/event-stream")
            .header("cache-control", "no-cache");
        // An id that is not a valid header value, which an old outbox may contain, cannot be used to resume.
        let id = cursor.last_event_id.as_ref();
        if let Some(id) = id.and_then(|id| HeaderValue::from_bytes(id.as_bytes()).ok()) {
            request = request.header("last-event-id", id);
        }
        let response = open_stream(request, self.idle).await?;
        if !content_type(&response).starts_with("text/event-stream") {
            return Err(SourceError(
                "the response is not a stream of server-sent events; check url".into(),
            ));
        }
        Ok(response)
    }

    async fn give(&self, event: SseEvent, cursor: &mut SourceCursor, feed: &SourceFeed) -> Result<(), SourceError> {
        let next = SourceCursor {
            last_event_id: event.last_id,
            ..SourceCursor::default()
        };
        let message = SourceMessage {
            // A server may number from 1 again after a restart, so an id alone does not identify an event; and without
            // ids two equal messages are two events.
            repeat: if event.id.is_some() {
                RepeatRule::IdAndText
            } else {
                RepeatRule::Never
            },
            id: event.id,
            payload: event.data,
            cursor: next.clone(),
        };
        feed.store(message).await?;
        *cursor = next;
        Ok(())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct SseEvent {
    /// The data, up to one byte more than allowed.
    data: Vec<u8>,
    id: Option<String>,
    /// The last id of the stream, from which it resumes after this event.
    last_id: Option<String>,
}

/// Parses a stream. Buffers at most one event of the allowed length.
struct SseParser {
    max_bytes: usize,
    line: Vec<u8>,
    /// The last byte was a carriage return: a line feed after it does not end another line.
    after_return: bool,
    started: bool,
    data: Option<Vec<u8>>,
    id: Option<String>,
    last_id: Option<String>,
    retry: Option<Duration>,
}

/// Bytes of a line for the name of its field.
const NAME_ROOM: usize = 16;

impl SseParser {
    fn new(max_bytes: usize, last_id: Option<String>) -> Self {
        Self {
            max_bytes,
            line: Vec::new(),
            after_return: false,
            started: false,
            data: None,
            id: None,
            last_id,
            retry: None,
        }
    }

    /// The `retry` of the server, at least `PAUSE`: 0 would be a hot loop.
    fn pause(&self) -> Option<Duration> {
        self.retry.map(|retry| retry.clamp(PAUSE, MAX_PAUSE))
    }

    fn push(&mut self, chunk: &[u8]) -> Vec<SseEvent> {
        let mut events = Vec::new();
        for byte in chunk {
            let after_return = std::mem::replace(&mut self.after_return, *byte == b'\r');
            match byte {
                b'\n' if after_return => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                // One byte more than allowed marks it as too long.
                _ if self.line.len() > self.max_bytes.max(MAX_ID) + NAME_ROOM => {}
                other => self.line.push(*other),
            }
        }
        events
    }

    fn end_line(&mut self) -> Option<SseEvent> {
        let mut line = std::mem::take(&mut self.line);
        if !std::mem::replace(&mut self.started, true) && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        if line.is_empty() {
            return self.dispatch();
        }
        let colon = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
        let (name, value) = line.split_at(colon);
        let value = value.strip_prefix(b":").unwrap_or(value);
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"data" => self.append(value),
            // The standard excludes only NUL; an id with another control character could never be sent back, and so the
            // stream could never be opened again.
            b"id" if value.len() <= MAX_ID && HeaderValue::from_bytes(value).is_ok() => {
                let id = String::from_utf8_lossy(value).into_owned();
                // An empty id resets the last event id.
                self.last_id = (!id.is_empty()).then(|| id.clone());
                self.id = self.last_id.clone();
            }
            b"retry" => {
                let milliseconds = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                self.retry = milliseconds.map(Duration::from_millis).or(self.retry);
            }
            _ => {}
        }
        None
    }

    fn append(&mut self, value: &[u8]) {
        let max_bytes = self.max_bytes + 1;
        let data = match &mut self.data {
            Some(data) => {
                data.push(b'\n');
                data
            }
            None => self.data.insert(Vec::new()),
        };
        data.extend_from_slice(value);
        data.truncate(max_bytes);
    }

    fn dispatch(&mut self) -> Option<SseEvent> {
        let id = self.id.take();
        Some(SseEvent {
            data: self.data.take().filter(|data| !data.is_empty())?,
            id,
            last_id: self.last_id.clone(),
        })
    }
}

#[cfg(test)]
mod tests;
