//! Sizes of prompts, and what a prompt leaves out so that it fits. Pure functions of messages and numbers; the engine's
//! decisions are in `window`.
//!
//! All sizes are estimates. [`TokenEstimator`] corrects them: limits, which are in tokens of the server, are converted
//! into estimated tokens, so that all sums here use one unit.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::answer_schema::AnswerSchema;
use crate::message::{Message, ToolDefinition};
use crate::settings::EngineSettings;
use crate::tool::ResultArtifacts;

/// Tokens of a message in addition to its text.
const PER_MESSAGE: u64 = 8;

/// Bytes that count as one token until the server has reported its count.
pub const BYTES_PER_TOKEN: u64 = 4;

/// Shorter tool results are never cleared: the text that says so would be as long.
pub const MIN_CLEARED_BYTES: usize = 600;

/// Bytes of a cleared result that stay: most results begin with what was done and its id.
const KEPT_BYTES: usize = 160;

/// The largest correction, in thousandths: no tokenizer needs more than one token per byte.
const MAX_RATIO: u32 = 4000;

/// Prompts with fewer estimated tokens do not change the ratio: the server's own additions dominate them.
const MIN_MEASURED: u64 = 250;

/// What a server's answers and refusals reveal about the estimate.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(default)]
pub struct TokenEstimator {
    /// Tokens counted by the server per thousand estimated ones, in the last answered call; from 1000 to 4000.
    ratio: u32,
    /// Estimated tokens of the smallest prompt that the server refused as too long.
    refused: Option<u64>,
    /// `contextTokens` at that time: another window belongs to another model.
    window: u32,
}

impl Default for TokenEstimator {
    fn default() -> Self {
        Self {
            ratio: 1000,
            refused: None,
            window: 0,
        }
    }
}

impl TokenEstimator {
    /// Converts tokens of the server into estimated ones.
    #[must_use]
    pub fn estimated(self, tokens: u64) -> u64 {
        ratio_of(tokens, 1000, self.ratio.max(1000).into())
    }

    /// Converts estimated tokens into those of the server.
    #[must_use]
    pub fn billed(self, estimate: u64) -> u64 {
        ratio_of(estimate, self.ratio.max(1000).into(), 1000)
    }

    /// The server counted `billed` tokens for a prompt of `estimate` tokens.
    pub fn calibrate(&mut self, estimate: u64, billed: u64, settings: &EngineSettings) {
        if estimate < MIN_MEASURED || billed == 0 {
            return;
        }
        let ratio = u32::try_from(ratio_of(billed, 1000, estimate)).unwrap_or(u32::MAX);
        self.ratio = ratio.clamp(1000, MAX_RATIO);
        // A refusal that the ratio explains reveals nothing about the window.
        self.refused = self
            .refused
            .filter(|refused| self.billed(*refused) <= prompt_limit(settings));
    }

    /// The server refused a prompt of this many estimated tokens as too long.
    pub fn record_refusal(&mut self, estimate: u64, settings: &EngineSettings) {
        let before = self.known_refusal(settings);
        self.refused = Some(before.map_or(estimate, |before| before.min(estimate)));
        self.window = settings.context_tokens;
    }

    fn known_refusal(self, settings: &EngineSettings) -> Option<u64> {
        self.refused.filter(|_| self.window == settings.context_tokens)
    }

    /// Estimated tokens of the largest prompt that the server accepts, as far as is known.
    fn largest_prompt(self, settings: &EngineSettings) -> u64 {
        let refused = self.known_refusal(settings).map_or(u64::MAX, |refused| refused / 5 * 4);
        self.estimated(prompt_limit(settings)).min(refused)
    }
}

/// Tokens of the window that are not reserved for the answer.
pub fn prompt_limit(settings: &EngineSettings) -> u64 {
    settings
        .context_tokens
        .saturating_sub(settings.max_output_tokens)
        .into()
}

fn ratio_of(number: u64, by: u64, of: u64) -> u64 {
    let result = u128::from(number) * u128::from(by) / u128::from(of.max(1));
    u64::try_from(result).unwrap_or(u64::MAX)
}

/// The estimated tokens that are available to the messages of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableTokens {
    /// A larger prompt does not fit into the window.
    pub whole: u64,
    /// Maximum for a prompt with earlier turns: 80 % of the window, and 40 % of the smallest limit that a whole call
    /// must fit into. A history that filled a limit would leave no room for a second call in its window.
    pub share: u64,
    /// Maximum for earlier turns alone when a turn begins, since each call pays for them.
    pub history: u64,
}

/// What is available beside `fixed` estimated tokens. `limit`: the smallest limit that a whole call must fit into; `newest`:
/// what the current turn needs.
#[must_use]
pub fn available(
    settings: &EngineSettings,
    sizes: TokenEstimator,
    limit: Option<u64>,
    fixed: u64,
    newest: u64,
) -> AvailableTokens {
    let whole = sizes.largest_prompt(settings);
    let needed = fixed.saturating_add(newest);
    // A limit that no call fits into would only cost the history: people set zero to block an Agent.
    let limit = limit
        .map(|limit| sizes.estimated(limit))
        .filter(|limit| needed <= *limit);
    let window = sizes.estimated(u64::from(settings.context_tokens) / 5 * 4);
    let share = window
        .min(limit.map_or(u64::MAX, |limit| limit / 5 * 2))
        .min(whole)
        .saturating_sub(fixed);
    AvailableTokens {
        whole: whole.saturating_sub(fixed),
        share,
        history: share.min(sizes.estimated(settings.history_tokens.into())),
    }
}

/// Messages as sent in a prompt: of the results among the first `cleared` messages only the beginning is kept, and no
/// image.
pub fn rendered(messages: &[Arc<Message>], cleared: usize) -> impl Iterator<Item = Arc<Message>> + '_ {
    messages
        .iter()
        .enumerate()
        .map(move |(place, message)| match &**message {
            Message::Tool {
                id,
                text,
                reasoning,
                failed,
                artifacts,
            } if place < cleared && (is_clearable(text) || !artifacts.images.is_empty()) => Arc::new(Message::Tool {
                id: id.clone(),
                text: cleared_text(text, artifacts).into_owned(),
                reasoning: reasoning.clone(),
                failed: *failed,
                artifacts: ResultArtifacts::default(),
            }),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } | Message::Tool { .. } => {
                message.clone()
            }
        })
}

fn is_clearable(text: &str) -> bool {
    text.len() >= MIN_CLEARED_BYTES
}

fn cleared_text<'a>(text: &'a str, artifacts: &ResultArtifacts) -> Cow<'a, str> {
    if !is_clearable(text) {
        return text.into();
    }
    let head = &text[..text.floor_char_boundary(KEPT_BYTES)];
    let left = text.len() - head.len();
    let stored = artifacts.text.as_deref();
    let stored = stored.map_or_else(String::new, |name| format!(" All of it is artifact {name}."));
    format!(
        "{head}\n[The runtime left out {left} more bytes of this result to save room.{stored} Read them again if you need \
         them; do not repeat a call that changes something.]"
    )
    .into()
}

/// Estimated tokens of messages as [`rendered`].
#[must_use]
pub fn messages_size(messages: &[Arc<Message>], cleared: usize) -> u64 {
    messages.iter().enumerate().fold(0, |sum: u64, (place, message)| {
        sum.saturating_add(tokens(message, place < cleared))
    })
}

/// How many of the first messages to clear so that all together have at most `goal` tokens: more than `from`, and at
/// most `to`. `None`: no message in between can be cleared.
#[must_use]
pub fn clear_until(messages: &[Arc<Message>], from: usize, to: usize, goal: u64) -> Option<usize> {
    let mut size = messages_size(messages, from);
    let mut last = None;
    for (place, message) in messages.iter().enumerate().take(to).skip(from) {
        let saved = tokens(message, false).saturating_sub(tokens(message, true));
        if saved == 0 {
            continue;
        }
        size = size.saturating_sub(saved);
        last = Some(place + 1);
        if size <= goal {
            break;
        }
    }
    last
}

/// Where messages may be cut without separating a call from its result, excluding both ends.
pub fn cuts(messages: &[Arc<Message>]) -> impl DoubleEndedIterator<Item = usize> + '_ {
    (1..messages.len()).filter(|place| !matches!(*messages[*place], Message::Tool { .. }))
}

/// Whether a turn begins with this message.
#[must_use]
pub fn begins_turn(message: &Message) -> bool {
    matches!(message, Message::User { .. })
}

/// Estimated tokens of the first 0, 1, 2, … messages.
fn sums(messages: &[Arc<Message>], cleared: usize) -> Vec<u64> {
    let mut sum: u64 = 0;
    let sizes = messages.iter().enumerate().map(|(place, message)| {
        sum = sum.saturating_add(tokens(message, place < cleared));
        sum
    });
    std::iter::once(0).chain(sizes).collect()
}

/// How many of the oldest messages must leave, in whole turns, until the rest of the first `end` has at most `goal`
/// tokens; `end` if not even the last turn has.
#[must_use]
pub fn oldest_to_drop(messages: &[Arc<Message>], cleared: usize, end: usize, goal: u64) -> usize {
    let sums = sums(&messages[..end], cleared);
    let rest = |cut: usize| sums[end] - sums[cut];
    let turns = (1..end).filter(|place| begins_turn(&messages[*place]));
    turns.chain([end]).find(|cut| rest(*cut) <= goal).unwrap_or(end)
}

/// The longest prefix of these messages with at most `goal` tokens, in whole turns or, if not even the first turn fits,
/// in whole calls of it. `None`: not even the first call fits.
#[must_use]
pub fn longest_prefix(messages: &[Arc<Message>], cleared: usize, goal: u64) -> Option<usize> {
    let sums = sums(messages, cleared);
    let ends = || {
        cuts(messages)
            .chain([messages.len()])
            .filter(|cut| *cut > 0 && sums[*cut] <= goal)
    };
    let whole = |cut: &usize| messages.get(*cut).is_none_or(|next| begins_turn(next));
    ends().rfind(whole).or_else(|| ends().next_back())
}

/// Estimated tokens of one text, such as the system message.
#[must_use]
pub fn message_size(text: &str) -> u64 {
    PER_MESSAGE + text_tokens(text)
}

/// Estimated tokens of the tools in every prompt.
#[must_use]
pub fn tools_size(tools: &[ToolDefinition]) -> u64 {
    tools
        .iter()
        .map(|tool| {
            text_tokens(&tool.name) + text_tokens(&tool.description) + text_tokens(&tool.parameters.to_string())
        })
        .sum()
}

/// Estimated tokens of the schema of an answer, if one is sent.
#[must_use]
pub fn schema_size(schema: Option<&AnswerSchema>) -> u64 {
    schema.map_or(0, |schema| bytes_tokens(schema.bytes()))
}

fn tokens(message: &Message, is_cleared: bool) -> u64 {
    PER_MESSAGE
        + match message {
            Message::System { text } | Message::User { text } => text_tokens(text),
            Message::Tool {
                id, text, artifacts, ..
            } if is_cleared => text_tokens(id) + text_tokens(&cleared_text(text, artifacts)),
            Message::Tool { id, text, .. } => text_tokens(id) + text_tokens(text),
            Message::Assistant {
                text,
                tool_calls,
                reasoning,
            } => {
                let calls: u64 = tool_calls
                    .iter()
                    .map(|call| text_tokens(&call.id) + text_tokens(&call.name) + text_tokens(&call.arguments))
                    .sum();
                let reasoning = reasoning.as_ref().map_or(0, |reasoning| bytes_tokens(reasoning.len()));
                text.as_deref().map_or(0, text_tokens) + calls + reasoning
            }
        }
}

fn text_tokens(text: &str) -> u64 {
    bytes_tokens(text.len())
}

/// Rounded up.
fn bytes_tokens(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX).div_ceil(BYTES_PER_TOKEN)
}
