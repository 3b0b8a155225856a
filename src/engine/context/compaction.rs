//! Compaction: a call asks the model for a summary of the oldest messages, which replaces them in the prompt.
//!
//! Owns what such a call asks, and how its answer is used; `window` decides when it is made. It is a call of
//! the turn that needs the room: metered, limited, journalled and repeated like any other, but it does not count
//! against the limits of the turn itself. The summarized messages leave the live transcript in the transaction that
//! stores the summary, and stay in the journal's history. A failed summary stops nothing: its messages leave with a
//! [`HistoryDigest`](crate::context::digest::HistoryDigest), and a note informs the model.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::context::prompt;
use crate::context::prompt_size;
use crate::effects::{EffectBuffer, answer_line, journal_line};
use crate::machine::Engine;
use crate::message::{FinishReason, Message, ModelAnswer};
use crate::turn::Turn;
use crate::{CallId, CallPurpose, JournalRecord, RecordKind, time_math};
use agentloop_api::failure::{CallFailure, FailureKind};

/// Maximum number of bytes of a summary: it is written with each step of the loop.
pub const MAX_BYTES: u64 = 16 * 1024;
/// Tokens that a summary must replace: to save fewer, the call costs more than it is worth.
pub const MIN_REPLACED: u64 = 500;
/// Failed attempts after which the turn continues without a summary.
pub const MAX_FAILURES: u32 = 2;
/// Fewest bytes of a summary beside tool calls: a shorter text only announces the calls.
const MIN_BESIDE_CALLS: usize = 200;
/// Fewest bytes that a summary may have.
const MIN_BYTES: u64 = 512;
/// Delay before the attempt after a failed one.
const AGAIN: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);
/// Bytes of a word of a summary including its space, rounded up.
const BYTES_PER_WORD: u64 = 8;

/// A summary in progress.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compaction {
    /// How many of the oldest messages it covers: whole turns, or whole calls of a turn that is too large.
    messages: usize,
    /// Maximum number of bytes it may have.
    most_bytes: u64,
    /// Failed attempts at it.
    failures: u32,
}

/// Whether the oldest messages can be summarized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionPlan {
    /// They can, with this compaction.
    Worth(Compaction),
    /// This many of them are too large for one call.
    TooLarge(usize),
    /// No summary could be had in this turn, or the messages are too small to be worth one.
    None,
}

impl Engine {
    pub(crate) fn compaction(&self) -> Option<Compaction> {
        self.state.call.compaction()
    }

    /// Plans a summary of the `leaving` oldest messages, or of as many of them as fit into one call: the rest needs
    /// another.
    pub(crate) fn plan_compaction(&self, leaving: usize) -> CompactionPlan {
        if leaving == 0 || !self.state.turn.as_ref().is_some_and(Turn::may_summarize) {
            return CompactionPlan::None;
        }
        let asked = prompt_size::message_size(&prompt::summary_request(MAX_BYTES / BYTES_PER_WORD));
        let limit = self.state.budget.tokens.unwrap_or(u64::MAX);
        let limit = self.state.sizes.estimated(limit).saturating_sub(self.fixed_tokens());
        let available = self.available(0);
        let max = available.whole.min(limit).saturating_sub(asked);
        self.plan_within(leaving, max, available)
    }

    fn plan_within(&self, leaving: usize, max: u64, available: prompt_size::AvailableTokens) -> CompactionPlan {
        let oldest = &self.transcript[..leaving.min(self.transcript.len())];
        let cleared = self.cleared();
        let messages = prompt_size::longest_prefix(oldest, cleared, max).unwrap_or(0);
        let replaced = prompt_size::messages_size(&oldest[..messages], cleared);
        if replaced >= MIN_REPLACED {
            // It frees half of what it replaces, and leaves three quarters of the room to others.
            let most_bytes = MAX_BYTES.min(available.share.max(available.history)).min(replaced * 2);
            return CompactionPlan::Worth(Compaction {
                messages,
                most_bytes: most_bytes.max(MIN_BYTES),
                failures: 0,
            });
        }
        if messages == oldest.len() {
            return CompactionPlan::None;
        }
        let next = prompt_size::cuts(oldest).find(|cut| *cut > messages);
        CompactionPlan::TooLarge(next.unwrap_or(oldest.len()))
    }

    /// The call for a summary exceeds a whole limit or the window. Since sizes are estimates, this can happen despite
    /// the plan: the older half is summarized instead, while that is worth it.
    pub(crate) fn shorten_compaction(&mut self, compaction: Compaction, out: &mut EffectBuffer) {
        let messages = compaction.messages.min(self.transcript.len());
        let half = prompt_size::messages_size(&self.transcript[..messages], self.cleared()) / 2;
        let CompactionPlan::Worth(shorter) = self.plan_within(messages, half, self.available(0)) else {
            self.end_compaction(false, out);
            return;
        };
        self.state.call.summarize(Compaction {
            failures: compaction.failures,
            ..shorter
        });
        self.state.call.retry_at(out.now);
    }

    /// The prompt of the turn's call without the system message.
    pub(crate) fn conversation(&self) -> Vec<Arc<Message>> {
        let cleared = self.cleared();
        if self.turn_rules().own_session {
            return prompt_size::rendered(self.session(), cleared).collect();
        }
        let head = self.head().map(|text| Arc::new(Message::User { text })).into_iter();
        let Some(compaction) = self.compaction() else {
            let left_out = self.left_out();
            let rendered = prompt_size::rendered(&self.transcript, cleared).enumerate();
            let kept = rendered.filter(|(place, _)| !left_out.contains(place));
            return head.chain(kept.map(|(_, message)| message)).collect();
        };
        let oldest = &self.transcript[..compaction.messages.min(self.transcript.len())];
        let text = request(compaction);
        let request = Arc::new(Message::User { text });
        head.chain(prompt_size::rendered(oldest, cleared))
            .chain([request])
            .collect()
    }

    /// The text in a prompt that stands for the messages that left it.
    pub(crate) fn head(&self) -> Option<String> {
        if self.turn_rules().own_session {
            return None;
        }
        // In a small window it gets a quarter of the room; a larger window shows the rest again.
        let window = self
            .settings
            .context_tokens
            .saturating_sub(self.settings.max_output_tokens);
        let max = usize::try_from(u64::from(window).min(MAX_BYTES)).unwrap_or(usize::MAX);
        let summary = self
            .state
            .summary
            .as_deref()
            .map(|text| prompt::summary(&prompt::truncate(text, max)));
        let digest = self.digest().text(max / 2);
        prompt::head(summary, digest)
    }

    /// Estimated tokens of [`Self::head`].
    pub(crate) fn head_tokens(&self) -> u64 {
        self.head().map_or(0, |text| prompt_size::message_size(&text))
    }

    /// The call for a summary was answered.
    pub(crate) fn handle_summary(
        &mut self,
        compaction: Compaction,
        call: CallId,
        answer: &ModelAnswer,
        out: &mut EffectBuffer,
    ) {
        self.state.counters.idle.count(out.now);
        let Some(text) = summary_of(answer, compaction.most_bytes) else {
            let of = (call, CallPurpose::Compaction);
            out.record(answer_line(of, answer, "no summary", Vec::new()));
            self.end_compaction(false, out);
            return;
        };
        let asked = Message::User {
            text: request(compaction),
        };
        let summary = Message::Assistant {
            text: Some(text.clone()),
            tool_calls: Vec::new(),
            reasoning: None,
        };
        let note = format!("{:?}", answer.finish);
        // Recorded in the history, but retracted from the live transcript at once: the snapshot holds the summary.
        let messages = vec![Arc::new(asked), Arc::new(summary)];
        out.record(answer_line((call, CallPurpose::Compaction), answer, note, messages));
        out.record(JournalRecord {
            call: Some(call),
            retract: 2,
            forget: 0..compaction.messages,
            ..journal_line(
                RecordKind::Compacted,
                call.turn,
                format!("{} messages", compaction.messages),
            )
        });
        self.digest_opening(compaction.messages);
        self.state.digest.reset_after_summary(call.turn);
        self.drop_messages(&(0..compaction.messages));
        self.state.summary = Some(text);
        self.end_compaction(true, out);
    }

    /// An attempt at a summary failed because of the summary itself. True: handled here.
    pub(crate) fn compaction_failed(&mut self, failure: &CallFailure, out: &mut EffectBuffer) -> bool {
        let Some(mut compaction) = self.compaction() else {
            return false;
        };
        if !matches!(failure.kind, FailureKind::BadResponse | FailureKind::Timeout) {
            return false;
        }
        compaction.failures = compaction.failures.saturating_add(1);
        let again = compaction.failures < MAX_FAILURES;
        self.state.call.summarize(compaction);
        self.state.call.retry_at(time_math::after(out.now, AGAIN));
        self.state.last_error = Some((out.now, failure.clone()));
        if !again {
            self.end_compaction(false, out);
        }
        true
    }

    /// The turn continues with its own next call. After a failure no further summary is tried in this turn: what is
    /// still too large leaves before that call.
    pub(crate) fn end_compaction(&mut self, summed_up: bool, out: &EffectBuffer) {
        if let Some(turn) = &mut self.state.turn {
            turn.summary_ended(summed_up);
        }
        self.next_call(out);
    }
}

/// The request to the model; the same for each attempt.
fn request(compaction: Compaction) -> String {
    prompt::summary_request(compaction.most_bytes / BYTES_PER_WORD)
}

/// The summary in an answer; `None`: there is none. Models tend to add a tool call, which is not run.
fn summary_of(answer: &ModelAnswer, most_bytes: u64) -> Option<String> {
    let text = answer.text.as_deref().unwrap_or_default().trim();
    let min_bytes = if answer.tool_calls.is_empty() {
        1
    } else {
        MIN_BESIDE_CALLS
    };
    if answer.finish == FinishReason::Refused || text.len() < min_bytes {
        return None;
    }
    Some(prompt::truncate(
        text,
        usize::try_from(most_bytes).unwrap_or(usize::MAX),
    ))
}
