//! The source of WebSocket messages.
//!
//! The HTTP client connects, so that addresses, redirects, headers and TLS are as for every other source; what follows are
//! frames. A message that is too long is not read: it counts as dropped, and the connection is made again.

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

/// Bytes that are read at once: a sensor pod is small.
const READ_BYTES: usize = 16 * 1024;
/// Wait until a message that could not be kept is given again.
const GIVE_AGAIN: Duration = Duration::from_secs(1);

type UpgradedSocket = WebSocketStream<Upgraded>;

/// Listens to a WebSocket.
#[derive(Clone, Debug)]
pub struct WebSocketListener {
    /// To which; with `http` for `ws`, and `https` for `wss`.
    pub place: SourceTarget,
    /// A text that is sent once the connection is made.
    pub subscribe: Option<String>,
    /// Silence after which the connection is made again; a third of it brings a ping.
    pub idle: Duration,
}

impl WebSocketListener {
    /// Listens until it is dropped.
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

    /// One connection, to its end.
    async fn follow(&self, client: &Client, feed: &SourceFeed) -> Result<(), SourceError> {
        let opened = timeout(self.idle, self.open(client)).await;
        let mut socket = opened.map_err(|_| silent(self.idle))??;
        feed.report_connected();
        let third = (self.idle / 3).max(Duration::from_millis(1));
        let mut pings = interval_at(Instant::now() + third, third);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = Instant::now();
        loop {
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
            .max_message_size(Some(self.place.most_bytes))
            .max_frame_size(Some(self.place.most_bytes));
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
        let most = self.place.most_bytes;
        // Its length alone, which is what the rules drop it for.
        let _ = feed.submit(heard(vec![0; most + 1])).await;
        Err(SourceError(format!(
            "a message is longer than {most} bytes (spec.limits.maxPayloadBytes) and was dropped"
        )))
    }
}

fn heard(payload: Vec<u8>) -> SourceMessage {
    SourceMessage {
        id: None,
        payload,
        cursor: SourceCursor::default(),
        // Two equal messages are two events.
        repeat: RepeatRule::Never,
    }
}

/// Gives a message until it is taken: nobody sends it again.
async fn give(message: &[u8], feed: &SourceFeed) {
    let mut waited = false;
    while feed.submit(heard(message.to_vec())).await == ArrivalOutcome::NotNow {
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

/// What a close by the server means. Its reason is text of the server's, and stays unsaid.
fn closed(close: Option<&CloseFrame>) -> Result<(), SourceError> {
    let Some(code) = close.map(|close| u16::from(close.code)) else {
        return Ok(());
    };
    let meaning = match code {
        1000 | 1001 | 1005 => return Ok(()),
        1002 => "protocol error",
        1003 => "it does not take such messages; look at subscribe",
        1007 => "it could not read what was sent; look at subscribe",
        1008 => "against its policy; look at headersSecretRef and subscribe",
        1009 => "what was sent is too long; look at subscribe",
        1010 => "it wants an extension",
        1011 => "an error of its own",
        1012 => "it restarts",
        1013 => "it has too much to do",
        1014 => "what is behind it gave a wrong answer",
        4000..=4999 => "a meaning of its own; look into its documentation",
        _ => "an unknown meaning",
    };
    Err(SourceError(format!(
        "the server closed the WebSocket with code {code}: {meaning}"
    )))
}

/// Why frames came to an end, without any of theirs.
fn cause(error: &Error) -> String {
    const BROKEN_OFF: &str = "the connection broke off";
    if let Error::Io(error) = error {
        format!("{BROKEN_OFF}: {error}")
    } else if let Error::Protocol(ProtocolError::ResetWithoutClosingHandshake) = error {
        BROKEN_OFF.into()
    } else if let Error::Protocol(error) = error {
        format!("the server does not speak WebSocket as it should: {error}")
    } else if let Error::Utf8(_) = error {
        "the server sent a text that is not UTF-8".into()
    } else {
        "the connection failed".into()
    }
}

#[cfg(test)]
mod tests;
