//! The text in a prompt about messages that left it without a summary, so that the model does not repeat actions that
//! it has forgotten.
//!
//! Built without the model. It is shown beside the model's own summary until the next summary, which includes it.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::context::prompt::truncate;
use crate::message::{Message, ToolCall};

/// Calls that are listed: the newest of those that left.
pub const MAX_CALLS: usize = 24;
/// Bytes of the arguments, and of the result, of one call.
const MAX_BYTES: usize = 120;
/// Bytes of the message that began the turn under way.
const MAX_OPENING_BYTES: usize = 4096;

/// In place of quoted arguments, and of a quoted result.
const NO_ARGUMENTS: &str = "[arguments left out]";
const NO_RESULT: &str = "[result left out]";

/// How much the line of a [`ToolCall`] quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestDetail {
    /// The beginning of its arguments and of its result.
    Results,
    /// The beginning of its arguments, and whether it failed.
    Arguments,
    /// Its tool, and whether it failed.
    Names,
}

/// What remains of messages that left without a summary.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct HistoryDigest {
    /// How many messages left.
    messages: u64,
    /// A line for each [`ToolCall`] among them that may have had side effects, oldest first.
    calls: VecDeque<String>,
    /// How many such calls came before those.
    more: u64,
    /// The turn whose first messages left while it was under way, and the message that began it.
    opening: Option<(i64, String)>,
}

impl HistoryDigest {
    /// Adds messages that leave. `acts`: whether a tool may have side effects.
    pub fn add(&mut self, messages: &[Arc<Message>], detail: DigestDetail, acts: impl Fn(&str) -> bool) {
        self.messages = self.messages.saturating_add(count(messages.len()));
        for (place, message) in messages.iter().enumerate() {
            let Message::Assistant { tool_calls, .. } = &**message else {
                continue;
            };
            let results = messages.iter().skip(place + 1);
            for (call, result) in tool_calls.iter().zip(results) {
                if let Message::Tool { text, failed, .. } = &**result
                    && acts(&call.name)
                {
                    self.calls.push_back(line(call, text, *failed, detail));
                }
            }
        }
        while self.calls.len() > MAX_CALLS {
            self.calls.pop_front();
            self.more = self.more.saturating_add(1);
        }
    }

    /// Keeps of each listed call its tool only: what is quoted may be what a provider refuses.
    pub fn drop_quotes(&mut self) {
        for line in self.calls.iter_mut().filter(|line| is_quoting(line)) {
            // The name of a tool has no space.
            let name = line.split(' ').next().unwrap_or_default();
            *line = format!("{name} {NO_ARGUMENTS} -> {NO_RESULT}");
        }
    }

    /// Whether any listed call quotes its arguments or its result.
    pub fn has_quotes(&self) -> bool {
        self.calls.iter().any(|line| is_quoting(line))
    }

    /// Keeps the opening of a turn whose first messages leave while it is under way.
    pub fn keep_opening(&mut self, turn: i64, message: Option<&Message>) {
        if self.opening.as_ref().is_some_and(|(known, _)| *known == turn) {
            return;
        }
        self.opening = match message {
            Some(Message::User { text }) => Some((turn, truncate(text, MAX_OPENING_BYTES))),
            Some(Message::System { .. } | Message::Assistant { .. } | Message::Tool { .. }) | None => None,
        };
    }

    /// A summary replaces what is listed here. The turn under way still needs its opening.
    pub fn reset_after_summary(&mut self, turn: i64) {
        let opening = self.opening.take().filter(|(known, _)| *known == turn);
        *self = Self {
            opening,
            ..Self::default()
        };
    }

    /// The text for the prompt, of about `max` bytes; `None`: nothing to say.
    #[must_use]
    pub fn text(&self, max: usize) -> Option<String> {
        let mut text = String::new();
        if self.messages > 0 {
            let _ = write!(text, "{} messages left your context without a summary.", self.messages);
            let newest = self.newest(max / 2);
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
                truncate(opening, max / 2)
            );
        }
        (!text.is_empty()).then_some(text)
    }

    /// The newest lines that together have at most `max` bytes.
    fn newest(&self, max: usize) -> Vec<&str> {
        let mut left = max;
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

fn line(call: &ToolCall, result: &str, failed: bool, detail: DigestDetail) -> String {
    let name = truncate(&call.name, MAX_BYTES);
    let arguments = match detail {
        DigestDetail::Results | DigestDetail::Arguments => on_one_line(&call.arguments),
        DigestDetail::Names => NO_ARGUMENTS.to_owned(),
    };
    let result = match (detail, failed) {
        (DigestDetail::Results, _) => on_one_line(result),
        (DigestDetail::Arguments | DigestDetail::Names, true) => "[failed, or not run; result left out]".to_owned(),
        (DigestDetail::Arguments | DigestDetail::Names, false) => NO_RESULT.to_owned(),
    };
    format!("{name} {arguments} -> {result}")
}

fn is_quoting(line: &str) -> bool {
    !line
        .split_once(' ')
        .is_some_and(|(_, rest)| rest.starts_with(NO_ARGUMENTS))
}

fn on_one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().take(MAX_BYTES).collect();
    truncate(&words.join(" "), MAX_BYTES)
}
