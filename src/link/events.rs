//! Messages that carry the events of a loop from the worker's journal through gateway and controller to subscribers.
//!
//! | route | does |
//! |---|---|
//! | `GET /v1/namespaces/{namespace}/agents/{name}/events?after=N&messages=true&text=true`, controller | server-sent events for clients, see docs/reference/events.md |
//! | `POST /v1/events`, controller | an [`EventsPage`] of a pod → [`EventsResponse`] |
//! | `POST /v1/readings`, gateway's socket | the same, from the worker |
//!
//! Nothing is sent without subscribers. Subscriptions are in [`Directives::readings`](super::messages::Directives); the
//! worker then sends pages from their cursor on, each only after the answer to the previous one. The controller keeps
//! the cursor of each subscription and rejects pages that begin elsewhere, so repeats are harmless, even by a restarted
//! worker. Text of an answer that arrives is not a line of the journal: see [`text_fragments`](super::text_fragments).

use std::sync::Arc;

use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};

use super::text_fragments::TextFragment;
use agentloop_api::first_elements::first_elements;

/// Maximum number of lines of an [`EventsPage`].
pub const PAGE_LINES: usize = 200;
/// Maximum number of bytes of memory of the lines of an [`EventsPage`] with more than one line.
pub const PAGE_BYTES: usize = 128 * 1024;
/// How many lines of a page are read: one more than it may have, which shows that there are too many.
const READ_LINES: usize = PAGE_LINES + 1;
/// Maximum number of messages in [`EventLine::messages`].
pub const RECENT_MESSAGES: usize = 12;
/// Maximum number of bytes of each of these messages.
pub const MAX_MESSAGE_BYTES: usize = 2048;
/// Maximum number of bytes of the call of a `gate:opened`.
pub const MAX_CALL_BYTES: usize = 64 * 1024;
/// Maximum number of bytes of the response of a `task:ended`.
pub const MAX_RESPONSE_BYTES: usize = 64 * 1024;
/// The cursor of a reader that begins at the present end of the journal, `after=latest`.
pub const LATEST: i64 = i64::MAX;
/// What the reason of an end contains if the cursor is beyond the journal, which may be a new one.
pub const READ_FROM_START: &str = "read from 0";
/// Name of the first event of a stream that begins at [`LATEST`]; its id is the cursor.
pub const START_EVENT: &str = "start";
/// Name of the last event of a stream that the controller ends; it gives the reason and how to continue.
pub const END_EVENT: &str = "end";
/// Maximum number of bytes of the name of an event.
pub const MAX_NAME_BYTES: usize = 64;
/// Stands in a stream for a name that no event can have.
pub const UNNAMED_EVENT: &str = "event:unnamed";

/// Whether an event of a loop can have this name, such as `tool:intent`. The colon tells it from [`START_EVENT`],
/// [`END_EVENT`] and [`TEXT_EVENT`](super::text_fragments::TEXT_EVENT), and a line break would end the line of the stream.
#[must_use]
pub fn is_event_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte == b'_' || byte == b':';
    name.len() <= MAX_NAME_BYTES && name.contains(':') && name.bytes().all(is_allowed)
}

/// One event: a line of the journal. Names, numbers and hashes; prompts, answers, arguments and results only in
/// `messages`.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct EventLine {
    /// The line's number in the journal: the cursor.
    pub seq: i64,
    /// Name of the event, such as `tool:intent`.
    pub event: String,
    /// Time of the commit, RFC 3339.
    pub at: String,
    /// The kind of line in the journal.
    pub kind: String,
    /// The member of the Agent that the event is of; absent for the agent itself.
    #[serde(skip_serializing_if = "is_main")]
    pub member: u16,
    /// The turn of the event.
    pub turn: i64,
    /// The model call of the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// The tool run of the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// Name of the tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// The declared effect of the tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
    /// The outcome of the tool run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// In `model:call_answered`: name of the model that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// In `model:call_answered`: all input tokens, those that were read from or written to a cache included. Absent: not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<i64>,
    /// In `model:call_answered`: output tokens, including reasoning. Absent: not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<i64>,
    /// In `model:call_answered`: cost in millionths of a US dollar. Absent: not known.
    #[serde(rename = "costMicroUSD", skip_serializing_if = "Option::is_none")]
    pub cost: Option<i64>,
    /// A short text about it, from the journal.
    pub note: String,
    /// Id of the turn's trace, if traces are exported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// Only for subscriptions with messages. For `autonomy:loop_detected`: the last messages of the model and results of its
    /// tools, newest last, each as JSON and cut after [`MAX_MESSAGE_BYTES`] bytes. For `gate:opened`: the call that waits
    /// for an approval, with its arguments, as JSON and cut after [`MAX_CALL_BYTES`] bytes. For `task:ended`: the response,
    /// as JSON, a longer result than [`MAX_RESPONSE_BYTES`] as a text that is cut.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<RECENT_MESSAGES, _, _>"
    )]
    pub messages: Vec<String>,
}

impl EventLine {
    /// How many bytes of memory it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let names = [&self.event, &self.at, &self.kind, &self.note];
        let optional = [
            &self.call,
            &self.run,
            &self.tool,
            &self.effect,
            &self.outcome,
            &self.model,
            &self.trace_id,
        ];
        let texts = names
            .into_iter()
            .chain(optional.into_iter().flatten())
            .chain(&self.messages);
        let list = self.messages.capacity() * size_of::<String>();
        size_of::<Self>() + list + texts.map(String::len).sum::<usize>()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_main(member: &u16) -> bool {
    *member == 0
}

/// A subscription to an Agent's events.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase", default)]
pub struct EventSubscription {
    /// Number of the subscription, unique per leader.
    pub id: u64,
    /// The line after which the subscription started.
    pub after: i64,
    /// Whether the subscriber also wants the messages of detected loops.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub messages: bool,
    /// Whether the subscriber also wants the text of answers to requested tasks while it arrives.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub text: bool,
}

/// Lines for one subscription, in order and without gaps, except for lines that are no longer kept.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct EventsPage {
    /// Epoch of the pod; set by the gateway.
    pub epoch: i64,
    /// Number of the subscription.
    pub reading: u64,
    /// The page begins after this line.
    pub after: i64,
    /// The page ends with this line.
    pub next: i64,
    /// The newest line of the journal.
    pub newest: i64,
    /// The lines. The first page of a subscription may be empty: it shows that the pod is connected.
    #[serde(deserialize_with = "first_elements::<READ_LINES, _, _>")]
    pub events: Vec<EventLine>,
}

impl EventsPage {
    /// How many bytes of memory its lines take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.events.iter().map(EventLine::bytes).sum()
    }

    /// Keeps the first lines that take at most [`PAGE_BYTES`], and at least one. The page then ends with the last of them.
    pub fn shorten(&mut self) {
        let mut bytes = 0_usize;
        let fitting = self.events.iter().take_while(|line| {
            bytes = bytes.saturating_add(line.bytes());
            bytes <= PAGE_BYTES
        });
        let kept = fitting.count().max(1);
        if kept < self.events.len() {
            self.events.truncate(kept);
            let last = self.events.last().map_or(self.after, |line| line.seq);
            // Its number is what a pod says it is.
            self.next = last.min(self.next).max(self.after);
        }
        self.events.shrink_to_fit();
    }
}

/// The controller's answer to a page.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct EventsResponse {
    /// The next page must begin after this line: the page's end, a line before it if the page is too long, or its beginning if the
    /// subscriber has no room yet.
    /// `None`: the subscription has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<i64>,
}

/// A request to subscribe to events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Namespace of the Agent.
    pub namespace: String,
    /// Name of the Agent.
    pub name: String,
    /// The cursor: begin after this [`EventLine`], or with the next one if it is [`LATEST`].
    pub after: i64,
    /// Whether the subscriber also wants the messages of detected loops.
    pub messages: bool,
    /// Whether the subscriber also wants the text of answers to requested tasks while it arrives.
    pub text: bool,
}

/// An item of a subscriber's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventStreamItem {
    /// The cursor of a stream that begins at [`LATEST`].
    Start(i64),
    /// An event of the loop.
    Line(Box<EventLine>),
    /// Text of an answer that arrives. Not an event of the loop.
    Text(Arc<TextFragment>),
    /// The end of the stream, with the reason.
    End(String),
}

/// The stream of a subscriber; ends after [`EventStreamItem::End`]. Dropping it ends the subscription.
pub type EventStream = BoxStream<'static, EventStreamItem>;

/// Why the request of a client is refused: a subscription, or an answer to a gate.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
#[serde(rename_all = "camelCase")]
pub struct ClientRefusal {
    /// The kind of refusal.
    pub code: ClientRefusalCode,
    /// The reason and the fix, for people.
    pub message: String,
}

/// Kinds of [`ClientRefusal`]s.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum ClientRefusalCode {
    /// 400: the request is malformed.
    Malformed,
    /// 401: the token is missing or not of this cluster.
    Unauthenticated,
    /// 403: the owner of the token may not do this.
    Forbidden,
    /// 404: the Agent does not exist, or has no such gate open.
    NotFound,
    /// 409: the answer is to other arguments, or the opposite of one that is given already.
    Conflict,
    /// 429: too many subscriptions.
    TooManyReaders,
    /// 429: too many tasks wait.
    TooManyTasks,
    /// 503: not possible now; the message gives the reason.
    Unavailable,
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::text_fragments::TEXT_EVENT;

    /// A line that takes this many bytes.
    fn sized(seq: i64, bytes: usize) -> EventLine {
        let bare = EventLine::default().bytes();
        EventLine {
            seq,
            note: "x".repeat(bytes - bare),
            ..EventLine::default()
        }
    }

    /// How many lines of these sizes a page after line 10 keeps, and where it ends.
    fn kept(sizes: &[usize]) -> (usize, i64) {
        let events = sizes.iter().zip(11..).map(|(bytes, seq)| sized(seq, *bytes));
        let mut page = EventsPage {
            after: 10,
            next: 90,
            newest: 100,
            events: events.collect(),
            ..EventsPage::default()
        };
        page.shorten();
        (page.events.len(), page.next)
    }

    #[test]
    fn a_page_keeps_the_lines_that_fit_and_a_line_that_does_not_is_a_page_alone() {
        let half = PAGE_BYTES / 2;
        assert_eq!(kept(&[]), (0, 90));
        assert_eq!(
            kept(&[half, half]),
            (2, 90),
            "at the bound, with the lines after it that are not kept"
        );
        assert_eq!(kept(&[half, half + 1]), (1, 11));
        assert_eq!(kept(&[half, half, 1024, 1024]), (2, 12));
        assert_eq!(kept(&[2 * PAGE_BYTES]), (1, 90));
        assert_eq!(kept(&[2 * PAGE_BYTES, 1024]), (1, 11));
    }

    #[test]
    fn a_page_that_is_shortened_ends_between_its_beginning_and_its_end_whatever_its_lines_say() {
        for (seq, next) in [(i64::MIN, 10), (i64::MAX, 20), (15, 15)] {
            let mut page = EventsPage {
                after: 10,
                next: 20,
                events: vec![sized(seq, PAGE_BYTES), sized(16, 1024)],
                ..EventsPage::default()
            };
            page.shorten();
            assert_eq!((page.events.len(), page.next), (1, next));
        }
    }

    #[test]
    fn texts_and_messages_count_in_full() {
        let text = || "x".repeat(1000);
        let line = EventLine {
            event: text(),
            at: text(),
            kind: text(),
            call: Some(text()),
            run: Some(text()),
            tool: Some(text()),
            effect: Some(text()),
            outcome: Some(text()),
            model: Some(text()),
            note: text(),
            trace_id: Some(text()),
            messages: vec![text(); 3],
            // Only numbers may be left out here.
            seq: 0,
            member: 0,
            turn: 0,
            input_tokens: None,
            output_tokens: None,
            cost: None,
        };
        assert!((14_000..15_000).contains(&line.bytes()), "{}", line.bytes());
    }

    #[rstest]
    #[case::of_an_event("tool:intent", true)]
    #[case::with_a_low_line("autonomy:turn_started", true)]
    #[case::empty("", false)]
    #[case::of_the_start(START_EVENT, false)]
    #[case::of_the_end(END_EVENT, false)]
    #[case::of_text(TEXT_EVENT, false)]
    #[case::with_a_line_feed("tool:a\nb", false)]
    #[case::with_a_carriage_return("tool:a\rb", false)]
    #[case::with_character_0("tool:a\0b", false)]
    #[case::with_a_space("tool: a", false)]
    #[case::with_a_capital("Tool:a", false)]
    #[case::with_a_letter_of_two_bytes("tool:\u{e9}", false)]
    #[case::of_this_crate(UNNAMED_EVENT, true)]
    fn a_name_has_small_letters_and_a_colon(#[case] name: &str, #[case] valid: bool) {
        assert_eq!(is_event_name(name), valid, "{name:?}");
    }

    #[test]
    fn a_name_has_at_most_64_bytes() {
        let of_length = |length: usize| format!("a:{}", "b".repeat(length - 2));
        assert!(is_event_name(&of_length(MAX_NAME_BYTES)));
        assert!(!is_event_name(&of_length(MAX_NAME_BYTES + 1)));
    }
}
