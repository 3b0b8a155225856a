//! Sources: what listens to the world for a Sensor's own pod.
//!
//! A source hears, bounds what it reads, and gives it to whoever keeps it; it goes on once that is on disk, so that what
//! is lost with a crash is heard again. Knows nothing of rules or receivers. Says never text of a payload.

pub mod backoff;
pub mod endpoint;
pub mod http;
pub mod poll;
mod reconnect;
pub mod sse;
pub mod tls;
pub mod web_socket;
pub mod webhook;

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

/// Arrivals that wait for being kept.
const WAITING: usize = 16;

/// Where to go on after a restart. Kept in the same transaction as the arrival that it came with.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct SourceCursor {
    /// Validator of the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Date of the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_modified: Option<String>,
    /// Id of the last event of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_event_id: Option<String>,
}

/// Something came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceMessage {
    /// The sender's own id.
    pub id: Option<String>,
    /// What it says. One byte longer than allowed stands for anything longer.
    pub payload: Vec<u8>,
    /// Where to go on after it.
    pub cursor: SourceCursor,
    /// What makes another one a repeat of it.
    pub repeat: RepeatRule,
}

/// What makes something that comes a repeat of what came before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RepeatRule {
    /// It says the same as what came last: a page that did not change.
    #[default]
    SameAsLast,
    /// Nothing: each message of a stream counts.
    Never,
    /// Its id, which its sender vouches for.
    Id,
    /// Its id and its text together: the id alone may be counted from 1 again, or be anybody's.
    IdAndText,
    /// Its id and its text. Only the text is signed, so the same text under another id is a replay.
    SignedText,
}

/// Something came, and somebody waits to hear what became of it.
#[derive(Debug)]
pub struct SourceArrival {
    /// What.
    pub heard: SourceMessage,
    /// When.
    pub at: Timestamp,
    /// Where to say what became of it.
    pub answer: oneshot::Sender<ArrivalOutcome>,
}

/// What became of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalOutcome {
    /// It is on disk, with all that it does.
    OnDisk,
    /// It is no news: the same came before.
    Known,
    /// It is beyond the limits of the Sensor, and passed over for good.
    Dropped,
    /// It has more levels than a payload may have, and is passed over for good.
    TooDeep,
    /// The same signed text came before under another id: somebody sends again what is not his.
    Replayed,
    /// It cannot be kept now: it has to come again.
    NotNow,
}

/// How a source is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceCondition {
    /// It has reached what it listens to since it last failed.
    pub connected: bool,
    /// Failures since it began.
    pub failures: i64,
    /// Deliveries that were refused since it began: not signed, too large, malformed, or replayed.
    pub refused: i64,
    /// Failures since the last success.
    pub consecutive_failures: i64,
    /// Why it does not hear; never text of a payload.
    pub failure: Option<String>,
    /// When it tries again.
    pub next_attempt_at: Option<Timestamp>,
}

/// Where a source puts what it hears.
#[derive(Clone, Debug)]
pub struct SourceFeed {
    arrivals: mpsc::Sender<SourceArrival>,
    condition: watch::Sender<SourceCondition>,
}

impl SourceFeed {
    /// A feed, and its other end.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<SourceArrival>) {
        let (arrivals, taken) = mpsc::channel(WAITING);
        let condition = watch::Sender::new(SourceCondition::default());
        (Self { arrivals, condition }, taken)
    }

    /// Gives what was heard; says what became of it.
    pub async fn submit(&self, heard: SourceMessage) -> ArrivalOutcome {
        let (answer, answered) = oneshot::channel();
        let arrival = SourceArrival {
            heard,
            at: Timestamp::now(),
            answer,
        };
        if self.arrivals.send(arrival).await.is_err() {
            return ArrivalOutcome::NotNow;
        }
        answered.await.unwrap_or(ArrivalOutcome::NotNow)
    }

    /// The source reaches what it listens to.
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

    /// The source failed, and tries again after `wait`.
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

    /// A delivery was refused. Wakes nobody: strangers may cause as many as they like.
    pub fn refused(&self) {
        self.condition.send_if_modified(|condition| {
            condition.refused = condition.refused.saturating_add(1);
            false
        });
    }

    /// How the source is, now and later.
    #[must_use]
    pub fn condition(&self) -> watch::Receiver<SourceCondition> {
        self.condition.subscribe()
    }
}

/// A payload as JSON: what is not JSON is a text.
#[must_use]
pub fn value(payload: &[u8]) -> serde_json::Value {
    serde_json::from_slice(payload).unwrap_or_else(|_| String::from_utf8_lossy(payload).into_owned().into())
}
