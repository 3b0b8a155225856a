//! Sources: what a Sensor's own pod receives events from.
//!
//! A source receives messages, bounds what it reads, and submits them for storage. It continues after a message is on
//! disk, so that a message lost in a crash is received again. Knows nothing of rules or receivers. Errors never contain
//! payload text.

pub mod backoff;
pub mod endpoint;
pub mod http;
pub mod ndjson;
pub mod poll;
mod reconnect;
pub mod sse;
#[cfg(test)]
mod test_server;
pub mod tls;
pub mod web_socket;
pub mod webhook;

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use http::SourceError;

/// Arrivals that wait to be stored.
const WAITING: usize = 16;

/// Where to resume after a restart. Stored in the same transaction as the arrival that it came with.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct SourceCursor {
    /// `ETag` of the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// `Last-Modified` of the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_modified: Option<String>,
    /// Id of the last event of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_event_id: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceMessage {
    /// The sender's id.
    pub id: Option<String>,
    /// The body. One byte longer than allowed stands for anything longer.
    pub payload: Vec<u8>,
    /// Where to resume after it.
    pub cursor: SourceCursor,
    /// When another message is a repeat of it.
    pub repeat: RepeatRule,
}

/// When a message is a repeat of an earlier one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RepeatRule {
    /// If it equals the last message, as an unchanged page does.
    #[default]
    SameAsLast,
    /// Never: each message of a stream counts.
    Never,
    /// If its id was seen before; the signature covers the id.
    Id,
    /// If its id and text were seen together: an id alone may start over at 1, or be forged.
    IdAndText,
    /// If its id and text were seen together. Only the text is signed, so the same text under another id is a replay.
    SignedText,
}

/// A message whose source waits for the outcome.
#[derive(Debug)]
pub struct SourceArrival {
    pub message: SourceMessage,
    pub at: Timestamp,
    pub answer: oneshot::Sender<ArrivalOutcome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalOutcome {
    /// It is on disk, with all its effects.
    OnDisk,
    /// It is a repeat.
    Known,
    /// It exceeds the limits of the Sensor and is dropped permanently.
    Dropped,
    /// It is nested deeper than a payload may be and is dropped permanently.
    TooDeep,
    /// The same signed text came before under another id: a replay.
    Replayed,
    /// It cannot be stored now and has to be sent again.
    NotNow,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceCondition {
    /// It has connected since it last failed.
    pub connected: bool,
    /// Failures since it started.
    pub failures: i64,
    /// Deliveries that were refused since it started: not signed, too large, malformed, or replayed.
    pub refused: i64,
    /// Failures since the last success.
    pub consecutive_failures: i64,
    /// Why it receives nothing; never text of a payload.
    pub failure: Option<String>,
    /// When it retries.
    pub next_attempt_at: Option<Timestamp>,
}

/// Takes the messages of a source.
#[derive(Clone, Debug)]
pub struct SourceFeed {
    arrivals: mpsc::Sender<SourceArrival>,
    condition: watch::Sender<SourceCondition>,
}

impl SourceFeed {
    /// A feed and its receiving end.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<SourceArrival>) {
        let (arrivals, taken) = mpsc::channel(WAITING);
        let condition = watch::Sender::new(SourceCondition::default());
        (Self { arrivals, condition }, taken)
    }

    /// Submits a message and waits for the outcome.
    pub async fn submit(&self, message: SourceMessage) -> ArrivalOutcome {
        let (answer, answered) = oneshot::channel();
        let arrival = SourceArrival {
            message,
            at: Timestamp::now(),
            answer,
        };
        if self.arrivals.send(arrival).await.is_err() {
            return ArrivalOutcome::NotNow;
        }
        answered.await.unwrap_or(ArrivalOutcome::NotNow)
    }

    /// Submits a message of a stream. An error means that it was not stored, so that the stream has to be opened again.
    async fn store(&self, message: SourceMessage) -> Result<(), SourceError> {
        match self.submit(message).await {
            ArrivalOutcome::NotNow => Err(SourceError(
                "cannot store incoming events; check the sensor pod's storage".into(),
            )),
            ArrivalOutcome::OnDisk
            | ArrivalOutcome::Known
            | ArrivalOutcome::Dropped
            | ArrivalOutcome::TooDeep
            | ArrivalOutcome::Replayed => Ok(()),
        }
    }

    /// Records that the source is connected.
    pub fn report_connected(&self) {
        self.condition.send_if_modified(|condition| {
            let well = SourceCondition {
                connected: true,
                failures: condition.failures,
                refused: condition.refused,
                ..SourceCondition::default()
            };
            let news = *condition != well;
            *condition = well;
            news
        });
    }

    /// Records a failure; the source retries after `wait`.
    pub fn failed(&self, failure: &str, wait: Duration) {
        let next = Timestamp::now().checked_add(wait).ok();
        self.condition.send_modify(|condition| {
            *condition = SourceCondition {
                connected: false,
                failures: condition.failures.saturating_add(1),
                refused: condition.refused,
                consecutive_failures: condition.consecutive_failures.saturating_add(1),
                failure: Some(failure.into()),
                next_attempt_at: next,
            };
        });
    }

    /// Records a refused delivery. Wakes no task: anyone can cause any number of them.
    pub fn refused(&self) {
        self.condition.send_if_modified(|condition| {
            condition.refused = condition.refused.saturating_add(1);
            false
        });
    }

    #[must_use]
    pub fn condition(&self) -> watch::Receiver<SourceCondition> {
        self.condition.subscribe()
    }
}

/// A payload as JSON; a payload that is not JSON becomes a string.
#[must_use]
pub fn value(payload: &[u8]) -> serde_json::Value {
    serde_json::from_slice(payload).unwrap_or_else(|_| String::from_utf8_lossy(payload).into_owned().into())
}
