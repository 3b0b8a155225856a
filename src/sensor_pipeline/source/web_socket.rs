//! The source of WebSocket messages.
//!
//! The HTTP client makes the connection, so that addresses, redirects, headers and TLS work as for every other source.
//! A message that is too long is not read: it counts as dropped, and the source reconnects.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use reqwest::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use reqwest::{Client, StatusCode, Upgraded};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout, timeout_at};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::{Error, ProtocolError};
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Bytes, Message};

use super::http::{SourceError, SourceTarget, refused, silent, unreachable};
use super::reconnect::ReconnectBackoff;
use super::{ArrivalOutcome, RepeatRule, SourceCursor, SourceFeed, SourceMessage};

/// Size of the read buffer: small, because a sensor pod has little memory.
const READ_BYTES: usize = 16 * 1024;
/// Wait before a message that could not be stored is submitted again.
const GIVE_AGAIN: Duration = Duration::from_secs(1);

type UpgradedSocket = WebSocketStream<Upgraded>;

#[derive(Clone, Debug)]
pub struct WebSocketListener {
    /// The target, with `http` for `ws` and `https` for `wss`.
    pub place: SourceTarget,
    /// Text message that is sent after connecting.
    pub subscribe: Option<String>,
    /// Time without data after which it reconnects; a ping is sent after each third of it.
    pub idle: Duration,
}

impl WebSocketListener {
    pub async fn run(self, feed: SourceFeed) {
        let mut reopening = ReconnectBackoff::default();
        let mut clients = self.place.clients_to_upgrade();
        loop {
            let begun = Instant::now();
            let result = match clients.get() {
                Ok(client) => self.follow(&client, &feed).await,
                Err(failure) => Err(failure),
            };
            reopening.wait_to_reconnect(begun.elapsed(), result, &feed).await;
        }
    }

    /// Runs one connection to its end.
    async fn follow(&self, client: &Client, feed: &SourceFeed) -> Result<(), SourceError> {
        let opened = timeout(self.idle, self.open(client)).await;
        let mut socket = opened.map_err(|_| silent(self.idle))??;
        feed.report_connected();
        let third = (self.idle / 3).max(Duration::from_millis(1));
        let mut pings = interval_at(Instant::now() + third, third);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = Instant::now();
        loop {
            // Pings make a quiet but living server answer. Anything that it sends, also a pong, resets the idle
            // timeout.
            let next = async {
                loop {
                    tokio::select! {
                        message = socket.next() => return Ok(message),
                        _ = pings.tick() => socket.send(Message::Ping(Bytes::new())).await?,
                    }
                }
            };
            let next = timeout_at(last + self.idle, next)
                .await
                .map_err(|_| silent(self.idle))?;
            let message = match next {
                Ok(Some(Ok(message))) => message,
                Ok(None) => return Ok(()),
                Ok(Some(Err(error))) | Err(error) => return self.broken(error, feed).await,
            };
            match message {
                Message::Text(text) => give(text.as_bytes(), feed).await,
                Message::Binary(bytes) => give(&bytes, feed).await,
                Message::Close(close) => return closed(close.as_ref()),
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
            last = Instant::now();
        }
    }

    async fn open(&self, client: &Client) -> Result<UpgradedSocket, SourceError> {
        self.place.check()?;
        let key = generate_key();
        let request = client
            .get(self.place.url.clone())
            .headers(self.place.headers()?)
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, &key);
        let response = request.send().await.map_err(|error| unreachable(&error))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS && !response.status().is_success() {
            return Err(refused(response.status()));
        }
        let accept = response.headers().get(SEC_WEBSOCKET_ACCEPT);
        let answers = accept.is_some_and(|accept| accept.as_bytes() == derive_accept_key(key.as_bytes()).as_bytes());
        if response.status() != StatusCode::SWITCHING_PROTOCOLS || !answers {
            return Err(SourceError(
                "the server did not accept the WebSocket upgrade; check url".into(),
            ));
        }
        let upgraded = response.upgrade().await.map_err(|error| unreachable(&error))?;
        let config = WebSocketConfig::default()
            .read_buffer_size(READ_BYTES)
            .write_buffer_size(0)
            .max_message_size(Some(self.place.max_bytes))
            .max_frame_size(Some(self.place.max_bytes));
        let mut socket = UpgradedSocket::from_raw_socket(upgraded, Role::Client, Some(config)).await;
        if let Some(text) = &self.subscribe {
            let sent = socket.send(Message::text(text.as_str())).await;
            sent.map_err(|error| SourceError(cause(&error)))?;
        }
        Ok(socket)
    }

    async fn broken(&self, error: Error, feed: &SourceFeed) -> Result<(), SourceError> {
        if matches!(error, Error::ConnectionClosed | Error::AlreadyClosed) {
            return Ok(());
        }
        if !matches!(error, Error::Capacity(_)) {
            return Err(SourceError(cause(&error)));
        }
        let max = self.place.max_bytes;
        // Only its length matters: the rules drop it for that.
        let _ = feed.submit(source_message(vec![0; max + 1])).await;
        Err(SourceError(format!(
            "a message is longer than {max} bytes (spec.limits.maxPayloadBytes) and was dropped"
        )))
    }
}

fn source_message(payload: Vec<u8>) -> SourceMessage {
    SourceMessage {
        id: None,
        payload,
        cursor: SourceCursor::default(),
        // Two equal messages are two events.
        repeat: RepeatRule::Never,
    }
}

/// Submits a message until it is stored: the server does not send it again.
async fn give(message: &[u8], feed: &SourceFeed) {
    let mut waited = false;
    while feed.submit(source_message(message.to_vec())).await == ArrivalOutcome::NotNow {
        if !std::mem::replace(&mut waited, true) {
            feed.failed(
                "cannot store incoming events; check the sensor pod's storage",
                GIVE_AGAIN,
            );
        }
        sleep(GIVE_AGAIN).await;
    }
    if waited {
        feed.report_connected();
    }
}

/// The result of a close frame. Its reason is text of the server and is not shown.
fn closed(close: Option<&CloseFrame>) -> Result<(), SourceError> {
    let Some(code) = close.map(|close| u16::from(close.code)) else {
        return Ok(());
    };
    let meaning = match code {
        1000 | 1001 | 1005 => return Ok(()),
        1002 => "protocol error",
        1003 => "unsupported data; check subscribe",
        1007 => "invalid message data; check subscribe",
        1008 => "policy violation; check headersSecretRef and subscribe",
        1009 => "message too long; check subscribe",
        1010 => "missing extension",
        1011 => "internal error",
        1012 => "service restart",
        1013 => "overloaded",
        1014 => "bad gateway",
        4000..=4999 => "application-specific; see the server's documentation",
        _ => "unknown code",
    };
    Err(SourceError(format!(
        "the server closed the WebSocket with code {code}: {meaning}"
    )))
}

/// The cause of a failure, without text from frames.
fn cause(error: &Error) -> String {
    const BROKEN_OFF: &str = "the connection was interrupted";
    if let Error::Io(error) = error {
        format!("{BROKEN_OFF}: {error}")
    } else if let Error::Protocol(ProtocolError::ResetWithoutClosingHandshake) = error {
        BROKEN_OFF.into()
    } else if let Error::Protocol(error) = error {
        format!("the server violated the WebSocket protocol: {error}")
    } else if let Error::Utf8(_) = error {
        "the server sent text that is not UTF-8".into()
    } else {
        "the connection failed".into()
    }
}

#[cfg(test)]
mod tests;
