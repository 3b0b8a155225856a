//! Messages about the events of a loop: from the worker's journal over gateway and controller to whoever reads them.
//!
//! | route | does |
//! |---|---|
//! | `GET /v1/namespaces/{namespace}/agents/{name}/events?after=N&words=true`, controller | server-sent events for people, see docs/reference/events.md |
//! | `POST /v1/events`, controller | an [`EventsPage`] of a pod → [`EventsResponse`] |
//! | `POST /v1/readings`, gateway's socket | the same, of the worker |
//!
//! Nothing is sent while nobody reads. Who reads shows in [`Directives::readings`](super::messages::Directives); the
//! worker then sends pages from there on, each only after the answer to the one before. The controller keeps the cursor
//! of each reading and takes no page that begins elsewhere, so a repeat does no harm, also of a worker that restarted.

use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};

/// Most lines of a page.
pub const PAGE_LINES: usize = 200;
/// Most messages that show what a detected loop was.
pub const WORDS_MESSAGES: usize = 12;
/// Most bytes of each.
pub const MOST_WORDS: usize = 2048;
/// Name of the last event of a stream that the controller ends: why, and how to go on.
pub const END_EVENT: &str = "end";

/// One event: a line of the journal. Names, numbers and hashes; no prompt, answer, argument or result but in `words`.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct EventLine {
    /// The line's number in the journal: the cursor.
    pub seq: i64,
    /// Its name, such as `tool:intent`.
    pub event: String,
    /// When it was committed, RFC 3339.
    pub at: String,
    /// The kind of line in the journal.
    pub kind: String,
    /// The turn it belongs to.
    pub turn: i64,
    /// The model call it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// The run of a tool it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// Name of that tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// What that tool may do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
    /// What became of that run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// A short note.
    pub note: String,
    /// Only for who reads with words, and of `autonomy:loop_detected`: what the model said and what its tools gave last,
    /// newest last, each as JSON and cut after [`MOST_WORDS`] bytes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<String>,
}

/// Somebody reads an Agent's events.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase", default)]
pub struct EventSubscription {
    /// Its number, of this leader.
    pub id: u64,
    /// Where it began: after this line.
    pub after: i64,
    /// Whether the words of detected loops are wanted too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub words: bool,
}

/// Lines for one reading, in order and without a gap but for lines that are not kept any more.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct EventsPage {
    /// Epoch of the pod; the gateway's word.
    pub epoch: i64,
    /// Whose.
    pub reading: u64,
    /// The page begins after this line.
    pub after: i64,
    /// And ends with this one.
    pub next: i64,
    /// The newest line of the journal.
    pub newest: i64,
    /// The lines. The first page of a reading may have none: it says that the pod is there.
    pub events: Vec<EventLine>,
}

/// What the controller says to a page.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct EventsResponse {
    /// The next page is to begin after this line: the page's own end, or its beginning when the reader has no room yet.
    /// `None`: nobody reads any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<i64>,
}

/// What somebody wants to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Namespace of the Agent.
    pub namespace: String,
    /// Name of the Agent.
    pub name: String,
    /// The cursor.
    pub after: i64,
    /// Whether the words of detected loops are wanted too.
    pub words: bool,
}

/// What a reader is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventStreamItem {
    /// An event.
    Line(Box<EventLine>),
    /// The last word: why there is no more.
    End(String),
}

/// What a reader is told, one after the other; ends after [`EventStreamItem::End`]. The reading is over when this is dropped.
pub type EventStream = BoxStream<'static, EventStreamItem>;

/// Why nothing can be read.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
#[serde(rename_all = "camelCase")]
pub struct ReadRefusal {
    /// What kind.
    pub code: ReadRefusalCode,
    /// In words.
    pub message: String,
}

/// Kinds of refusal of a reader.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum ReadRefusalCode {
    /// 400: the request cannot be read.
    Malformed,
    /// 401: no token, or none of this cluster.
    Unauthenticated,
    /// 403: whose token it is may not read this.
    Forbidden,
    /// 404: there is no such Agent.
    NotFound,
    /// 429: too many read already.
    TooManyReaders,
    /// 503: nothing can be read now; the message says why.
    Unavailable,
}
