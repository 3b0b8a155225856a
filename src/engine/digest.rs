//! What a prompt says of messages that left it without a summary, so that nothing that was done is done again for want of
//! a memory.
//!
//! Made without the model. It stands beside the model's own summary until the next one, which is also of it.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::message::{Message, ToolCall};
use super::prompt::truncate;
use super::yield_tool;

/// Calls that are listed, the newest of those that left.
pub const MOST_CALLS: usize = 24;
/// Bytes of the arguments, and of the result, of one.
const MOST_BYTES: usize = 120;
/// Bytes of the message that began the turn under way.
const MOST_OPENING_BYTES: usize = 4096;

/// What is left of messages that left without a summary.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct HistoryDigest {
    /// So many messages left.
    messages: u64,
    /// A line for each tool call among them that may have changed something, oldest first.
    calls: VecDeque<String>,
    /// So many such calls were before those.
    more: u64,
    /// The message that began a turn whose first messages left while it went on, and that turn.
    opening: Option<(i64, String)>,
}

impl HistoryDigest {
    /// These messages leave. `acts`: whether a tool may have changed something.
    pub fn add(&mut self, messages: &[Arc<Message>], acts: impl Fn(&str) -> bool) {
        self.messages = self.messages.saturating_add(count(messages.len()));
        for (place, message) in messages.iter().enumerate() {
            let Message::Assistant { tool_calls, .. } = &**message else {
                continue;
            };
            let results = messages.iter().skip(place + 1);
            for (call, result) in tool_calls.iter().zip(results) {
                if let Message::Tool { text, .. } = &**result
                    && call.name != yield_tool::NAME
                    && acts(&call.name)
                {
                    self.calls.push_back(line(call, text));
                }
            }
        }
        while self.calls.len() > MOST_CALLS {
            self.calls.pop_front();
            self.more = self.more.saturating_add(1);
        }
    }

    /// The first messages of this turn leave, and the turn goes on.
    pub fn keep_opening(&mut self, turn: i64, message: Option<&Message>) {
        if self.opening.as_ref().is_some_and(|(known, _)| *known == turn) {
            return;
        }
        self.opening = match message {
            Some(Message::User { text }) => Some((turn, truncate(text, MOST_OPENING_BYTES))),
            Some(Message::System { .. } | Message::Assistant { .. } | Message::Tool { .. }) | None => None,
        };
    }

    /// A summary has taken the place of what is listed here. The turn under way still has its beginning here.
    pub fn reset_after_summary(&mut self, turn: i64) {
        let opening = self.opening.take().filter(|(known, _)| *known == turn);
        *self = Self {
            opening,
            ..Self::default()
        };
    }

    /// What the prompt says, in about `most` bytes; `None`: nothing.
    #[must_use]
    pub fn text(&self, most: usize) -> Option<String> {
        let mut text = String::new();
        if self.messages > 0 {
            let _ = write!(text, "{} messages left your context without a summary.", self.messages);
            let newest = self.newest(most / 2);
            let more = self.more.saturating_add(count(self.calls.len() - newest.len()));
            if newest.is_empty() && more == 0 {
                text.push_str(" No tool call among them is known to have changed anything.");
            } else {
                text.push_str(" Tool calls among them that may have changed something:");
            }
            if more > 0 {
                let _ = write!(text, "\n- {more} calls, not listed");
            }
            for call in newest {
                let _ = write!(text, "\n- {call}");
            }
        }
        if let Some((turn, opening)) = &self.opening {
            let gap = if text.is_empty() { "" } else { "\n\n" };
            let _ = write!(
                text,
                "{gap}Turn {turn} began with this message:\n{}",
                truncate(opening, most / 2)
            );
        }
        (!text.is_empty()).then_some(text)
    }

    /// The newest lines that have at most so many bytes together.
    fn newest(&self, most: usize) -> Vec<&str> {
        let mut left = most;
        let fits = move |line: &&String| {
            let fits = line.len() <= left;
            left = left.saturating_sub(line.len());
            fits
        };
        let mut lines: Vec<&str> = self.calls.iter().rev().take_while(fits).map(String::as_str).collect();
        lines.reverse();
        lines
    }
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

fn line(call: &ToolCall, result: &str) -> String {
    let ToolCall { name, arguments, .. } = call;
    format!(
        "{} {} -> {}",
        truncate(name, MOST_BYTES),
        on_one_line(arguments),
        on_one_line(result)
    )
}

fn on_one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().take(MOST_BYTES).collect();
    truncate(&words.join(" "), MOST_BYTES)
}
