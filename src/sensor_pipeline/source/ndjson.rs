//! The source of newline-delimited JSON: one long HTTP response, each line of which is an event.
//!
//! Reads with bounds: a line that is too long is skipped without being buffered, and the stream continues after it.

use std::time::Duration;

use reqwest::header::ACCEPT;
use reqwest::{Client, Response};
use tokio::time::{Instant, timeout};

use super::http::{SourceError, SourceTarget, content_type, open_stream, silent, unreachable};
use super::reconnect::ReconnectBackoff;
use super::{RepeatRule, SourceCursor, SourceFeed, SourceMessage};

#[derive(Clone, Debug)]
pub struct NdjsonListener {
    pub place: SourceTarget,
    /// Time without data after which it reconnects.
    pub idle: Duration,
}

impl NdjsonListener {
    pub async fn run(self, feed: SourceFeed) {
        let mut reopening = ReconnectBackoff::default();
        let mut clients = self.place.clients();
        loop {
            let begun = Instant::now();
            let result = match clients.get() {
                Ok(client) => self.follow(&client, &feed).await,
                Err(failure) => Err(failure),
            };
            reopening.wait_to_reconnect(begun.elapsed(), result, &feed).await;
        }
    }

    /// Runs one connection to its end. A line that the connection cuts off is no event.
    async fn follow(&self, client: &Client, feed: &SourceFeed) -> Result<(), SourceError> {
        let mut response = self.open(client).await?;
        feed.report_connected();
        let mut lines = LineBuffer::new(self.place.max_bytes);
        loop {
            let chunk = timeout(self.idle, response.chunk())
                .await
                .map_err(|_| silent(self.idle))?;
            let Some(chunk) = chunk.map_err(|error| unreachable(&error))? else {
                return Ok(());
            };
            for line in lines.push(&chunk) {
                submit(line, feed).await?;
            }
        }
    }

    async fn open(&self, client: &Client) -> Result<Response, SourceError> {
        self.place.check()?;
        let request = client
            .get(self.place.url.clone())
            .headers(self.place.headers()?)
            .header(ACCEPT, "application/x-ndjson, application/json;q=0.9, */*;q=0.1");
        let response = open_stream(request, self.idle).await?;
        if content_type(&response).starts_with("text/html") {
            return Err(SourceError("the response is an HTML page; check url".into()));
        }
        Ok(response)
    }
}

async fn submit(line: Vec<u8>, feed: &SourceFeed) -> Result<(), SourceError> {
    let message = SourceMessage {
        id: None,
        payload: line,
        cursor: SourceCursor::default(),
        // Two equal lines are two events.
        repeat: RepeatRule::Never,
    };
    feed.store(message).await
}

/// Splits a stream into lines. Buffers at most one line of the allowed length and one byte, which marks it as too long.
struct LineBuffer {
    max_bytes: usize,
    line: Vec<u8>,
}

impl LineBuffer {
    fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            line: Vec::new(),
        }
    }

    /// The lines that end in this chunk, without empty ones: servers send those to keep the connection alive.
    fn push(&mut self, chunk: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        let mut pieces = chunk.split(|byte| *byte == b'\n').peekable();
        while let Some(piece) = pieces.next() {
            let remaining = (self.max_bytes + 1).saturating_sub(self.line.len());
            self.line.extend_from_slice(&piece[..piece.len().min(remaining)]);
            if pieces.peek().is_none() {
                break;
            }
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            if !line.trim_ascii().is_empty() {
                lines.push(line.to_vec());
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests;
