//! The HTTP transport to a tool server, as the protocol's client library expects it, with bounds on what is read.
//!
//! Owns whether a server may have received a failed request: a tool that may have run is never run again unasked.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, ErrorData, RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::{Sse, SseStream};
use tokio_util::bytes::Bytes;
use tokio_util::sync::CancellationToken;

const JSON: &str = "application/json";
const EVENT_STREAM: &str = "text/event-stream";
const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// The longest message of a server. A result for a model is far shorter (`tools.maxResultBytes`).
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of bytes that are read of a refusal.
const MAX_REFUSAL_BYTES: usize = 16 * 1024;

/// Why a request has no answer. The text is the runtime's own, never the server's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum McpTransportError {
    /// The server certainly did not receive it.
    #[error("{0}")]
    NotSent(String),
    /// The server may have received it.
    #[error("{0}")]
    NoAnswer(String),
    /// The server answered with a status that means it did nothing.
    #[error("the server rejected the request with status {0}")]
    Refused(u16),
}

type McpHttpError = StreamableHttpError<McpTransportError>;

/// The properties of the connection to a server.
pub trait McpTransport: Clone + Send + Sync + 'static {
    /// Adds what the connection needs to a request.
    fn prepare(&self, request: RequestBuilder) -> Result<RequestBuilder, McpTransportError>;

    /// Why a request had no answer at all.
    fn unanswered(&self, error: &reqwest::Error) -> McpTransportError;

    /// Returns the answer, unless an intermediary gave it to report a failure.
    fn judge(&self, response: Response) -> impl Future<Output = Result<Response, McpTransportError>> + Send;
}

/// The client of one server.
#[derive(Clone)]
pub struct McpHttpClient<W> {
    client: Client,
    way: W,
    /// Cancelled once the server is known to be gone, or the session has expired.
    lost: CancellationToken,
}

impl<W: McpTransport> McpHttpClient<W> {
    /// A client for one connection, which ends with `lost`.
    #[must_use]
    pub fn new(client: Client, way: W, lost: CancellationToken) -> Self {
        Self { client, way, lost }
    }

    /// Sends a request, with the id of its session if it has one.
    async fn send(&self, request: RequestBuilder, session: Option<&str>) -> Result<Response, McpHttpError> {
        let mut request = self.way.prepare(request).map_err(StreamableHttpError::Client)?;
        if let Some(session) = session {
            request = request.header(SESSION_ID, session);
        }
        let response = request.send().await;
        let response = response.map_err(|error| StreamableHttpError::Client(self.way.unanswered(&error)))?;
        let response = self.way.judge(response).await.map_err(|error| {
            if matches!(error, McpTransportError::NotSent(_)) {
                self.lost.cancel();
            }
            StreamableHttpError::Client(error)
        })?;
        if response.status() == StatusCode::NOT_FOUND && session.is_some() {
            self.lost.cancel();
            return Err(StreamableHttpError::SessionExpired);
        }
        Ok(response)
    }
}

impl<W: McpTransport> StreamableHttpClient for McpHttpClient<W> {
    type Error = McpTransportError;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        _auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, McpHttpError> {
        let request = self
            .client
            .post(uri.as_ref())
            .header(ACCEPT, format!("{EVENT_STREAM}, {JSON}"))
            .headers(headers.into_iter().collect())
            .json(&message);
        let response = self.send(request, session_id.as_deref()).await?;
        let status = response.status();
        if !status.is_success() {
            return refusal(response, &message).await;
        }
        let session = text(&response, &SESSION_ID);
        let kind = text(&response, &CONTENT_TYPE).unwrap_or_default();
        let ClientJsonRpcMessage::Request(request) = message else {
            return Ok(StreamableHttpPostResponse::Accepted);
        };
        if status == StatusCode::ACCEPTED || status == StatusCode::NO_CONTENT {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        if kind.starts_with(EVENT_STREAM) {
            return Ok(StreamableHttpPostResponse::Sse(
                events(response, Some(request.id)),
                session,
            ));
        }
        if !kind.starts_with(JSON) {
            return Err(no_answer("the response is neither JSON nor an event stream"));
        }
        let message = match read(response, MAX_MESSAGE_BYTES).await {
            Ok(body) => serde_json::from_slice(&body).map_err(|_| no_answer("the response is not valid MCP"))?,
            Err(BodyReadError::TooLong) => too_long(request.id),
            Err(BodyReadError::Broken) => return Err(no_answer("the response ended early")),
        };
        Ok(StreamableHttpPostResponse::Json(message, session))
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session_id: Arc<str>,
        _auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), McpHttpError> {
        let request = self.client.delete(uri.as_ref()).headers(headers.into_iter().collect());
        self.send(request, Some(&session_id)).await.map(|_| ())
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        _auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, McpHttpError> {
        let mut request = self
            .client
            .get(uri.as_ref())
            .header(ACCEPT, EVENT_STREAM)
            .headers(headers.into_iter().collect());
        if let Some(last) = last_event_id {
            request = request.header(LAST_EVENT_ID, last);
        }
        let response = self.send(request, session_id.as_deref()).await?;
        let is_stream = text(&response, &CONTENT_TYPE).is_some_and(|kind| kind.starts_with(EVENT_STREAM));
        if response.status().is_success() && is_stream {
            return Ok(events(response, None));
        }
        // 405 is the status that the protocol defines; any other answer is not a stream either.
        Err(StreamableHttpError::ServerDoesNotSupportSse)
    }
}

/// Whether the server may have acted before it gave this status. A proxy that timed out sends 408 while the server
/// behind it may still be working.
fn may_have_run(status: StatusCode) -> bool {
    status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT
}

/// The error in a refusal, or else the meaning of its status.
async fn refusal(
    response: Response,
    message: &ClientJsonRpcMessage,
) -> Result<StreamableHttpPostResponse, McpHttpError> {
    let status = response.status();
    let body = read(response, MAX_REFUSAL_BYTES).await.unwrap_or_default();
    let ClientJsonRpcMessage::Request(request) = message else {
        return Err(StreamableHttpError::Client(McpTransportError::Refused(status.as_u16())));
    };
    let error = match serde_json::from_slice(&body) {
        Ok(ServerJsonRpcMessage::Error(error)) if status.is_client_error() => error.error,
        // A server of an older revision does not support discovery, and may reply without an error of the protocol.
        _ if matches!(request.request, ClientRequest::DiscoverRequest(_)) && says_unknown(status) => {
            ErrorData::invalid_request("the server rejected discovery", None)
        }
        _ if may_have_run(status) => {
            let status = status.as_u16();
            return Err(no_answer(format!("the server returned status {status}")));
        }
        _ => return Err(StreamableHttpError::Client(McpTransportError::Refused(status.as_u16()))),
    };
    // A server that could not parse the request does not know its id.
    let error = ServerJsonRpcMessage::error(error, Some(request.id.clone()));
    Ok(StreamableHttpPostResponse::Json(error, None))
}

/// Whether a status may mean that the request is unknown, rather than its sender.
fn says_unknown(status: StatusCode) -> bool {
    status.is_client_error() && status != StatusCode::UNAUTHORIZED && status != StatusCode::FORBIDDEN
}

/// A short text, such as a refusal; empty if it is longer.
pub async fn words(response: Response) -> String {
    let words = read(response, MAX_REFUSAL_BYTES).await.unwrap_or_default();
    String::from_utf8_lossy(&words).into_owned()
}

fn no_answer(words: impl Into<String>) -> McpHttpError {
    StreamableHttpError::Client(McpTransportError::NoAnswer(words.into()))
}

fn too_long(id: RequestId) -> ServerJsonRpcMessage {
    let limit = MAX_MESSAGE_BYTES / 1024 / 1024;
    let words = format!("it ran, but its result is longer than {limit} MiB and was dropped: ask for less");
    ServerJsonRpcMessage::error(ErrorData::internal_error(words, None), Some(id))
}

fn text(response: &Response, header: &HeaderName) -> Option<String> {
    let value = response.headers().get(header)?;
    value.to_str().ok().map(str::to_owned)
}

/// Why a body was not read to its end.
#[derive(Debug)]
enum BodyReadError {
    TooLong,
    Broken,
}

async fn read(mut response: Response, limit: usize) -> Result<Vec<u8>, BodyReadError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| BodyReadError::Broken)? {
        if body.len() + chunk.len() > limit {
            return Err(BodyReadError::TooLong);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The events of a stream. An event that is too long ends the stream; if the stream answers a request, an error text
/// replaces it.
fn events(response: Response, answers: Option<RequestId>) -> BoxStream<'static, Result<Sse, SseError>> {
    let bytes = bounded(response.bytes_stream());
    let events = SseStream::from_bytes_stream(bytes).map(move |event| match (event, &answers) {
        (Err(SseError::Body(error)), Some(id))
            if error
                .downcast_ref::<StreamReadError>()
                .is_some_and(StreamReadError::is_too_long) =>
        {
            let data = serde_json::to_string(&too_long(id.clone())).ok();
            Ok(Sse {
                event: None,
                data,
                id: None,
                retry: None,
            })
        }
        (event, _) => event,
    });
    events.boxed()
}

/// Why a stream ended early.
#[derive(Debug, thiserror::Error)]
enum StreamReadError {
    #[error("an event of the server is too long")]
    TooLong,
    #[error("the stream broke")]
    Broken,
}

impl StreamReadError {
    fn is_too_long(&self) -> bool {
        matches!(self, Self::TooLong)
    }
}

/// The same bytes, up to an event that is too long.
fn bounded(
    bytes: impl Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
) -> impl Stream<Item = Result<Bytes, StreamReadError>> + Send {
    let state = (Box::pin(bytes), EventLength::default(), false);
    stream::unfold(state, |(mut bytes, mut length, ended)| async move {
        if ended {
            return None;
        }
        let chunk = match bytes.next().await? {
            Ok(chunk) if length.take(&chunk) <= MAX_MESSAGE_BYTES => Ok(chunk),
            Ok(_) => Err(StreamReadError::TooLong),
            Err(_) => Err(StreamReadError::Broken),
        };
        let ended = chunk.is_err();
        Some((chunk, (bytes, length, ended)))
    })
}

/// The length of the event being read. An empty line ends an event.
#[derive(Debug, Default)]
struct EventLength {
    event: usize,
    line: usize,
}

impl EventLength {
    /// Adds bytes, and returns the greatest length of an event among them.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let mut greatest = self.event;
        for byte in bytes {
            match byte {
                b'\n' if self.line == 0 => self.event = 0,
                b'\n' => {
                    self.line = 0;
                    self.event += 1;
                }
                b'\r' => self.event += 1,
                _ => {
                    self.line += 1;
                    self.event += 1;
                }
            }
            greatest = greatest.max(self.event);
        }
        greatest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_an_event_ends_with_an_empty_line_however_the_bytes_are_cut() {
        for size in 1..8 {
            let mut length = EventLength::default();
            let stream = b"data: aaaa\r\n\r\ndata: b\n\nid: 1\ndata: cc\n\n";
            let greatest = stream.chunks(size).map(|chunk| length.take(chunk)).max();
            assert_eq!(greatest, Some("id: 1\ndata: cc\n".len()), "{size}");
            assert_eq!(length.take(b""), 0);
        }
    }

    #[test]
    fn a_timeout_or_gateway_error_may_have_run_the_call_and_a_rejection_has_not() {
        let may = |status: u16| may_have_run(StatusCode::from_u16(status).unwrap());
        assert!([408, 500, 502, 503, 504].into_iter().all(may));
        assert!(![400, 401, 404, 409, 413, 429].into_iter().any(may));
    }

    #[tokio::test]
    async fn a_stream_ends_one_byte_above_the_longest_event_and_not_at_it() {
        let read = |bytes: usize| async move {
            let event = [vec![b'x'; bytes], b"\n\n".to_vec()].concat();
            let chunks = vec![Ok(Bytes::from(event)), Ok(Bytes::from_static(b"data: next\n\n"))];
            let chunks: Vec<_> = bounded(stream::iter(chunks)).collect().await;
            chunks.iter().map(Result::is_ok).collect::<Vec<_>>()
        };
        assert_eq!(read(MAX_MESSAGE_BYTES - 1).await, [true, true]);
        assert_eq!(read(MAX_MESSAGE_BYTES).await, [false]);
    }
}
