//! Compaction: a call asks the model for a summary of the oldest turns, which takes their place in the prompt.
//!
//! Owns when such a call is made, what it asks, and what its answer is worth. It is a call of the turn that needs the room:
//! metered, limited, journalled and repeated like any other, but it counts for nothing that limits the turn itself. The
//! summarised turns leave the live transcript in the transaction that takes the summary, and stay in the journal's
//! history. A summary that is not to be had stops nothing: its turns leave without one, and the model is told.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::context::{self, Surplus};
use super::machine::Engine;
use super::message::{Answer, Finish, Message};
use super::outbox::{Outbox, answer_line, line};
use super::snapshot::{Step, Turn};
use super::{CallId, Purpose, Record, RecordKind, clock, prompt};
use crate::api::failure::{Failure, FailureKind};

/// Most bytes of a summary: it is written with each step of the loop.
pub const MOST_BYTES: u64 = 16 * 1024;
/// Tokens that a summary must replace: a call to save fewer costs more than they are worth.
pub const LEAST_REPLACED: u64 = 500;
/// Attempts that fail until the turns leave without a summary.
pub const MOST_FAILURES: u32 = 2;
/// Wait before the attempt after a failed one.
const AGAIN: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);
/// Bytes of a word of a summary, its space included: a little many.
const BYTES_PER_WORD: u64 = 8;

/// A summary that is being made.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compaction {
    /// It is of so many of the oldest messages: whole turns.
    messages: usize,
    /// Most bytes of it.
    most_bytes: u64,
    /// Attempts at it that failed.
    failures: u32,
}

impl Turn {
    /// What its present call is for.
    pub fn purpose(&self) -> Purpose {
        match self.compaction {
            Some(_) => Purpose::Compaction,
            None if self.heartbeat => Purpose::Heartbeat,
            None => Purpose::Turn,
        }
    }

    /// Number of its present call among those that are not for a summary.
    pub fn own_call(&self) -> u32 {
        self.call.saturating_sub(self.compactions)
    }
}

impl Engine {
    pub(super) fn compaction(&self) -> Option<Compaction> {
        self.state.turn.as_ref()?.compaction
    }

    /// Plans a summary of what must leave: of all of it, or of as much of its newest turns as fits into the window and the
    /// limits, the ones before them leaving without one. False: it all leaves without one.
    pub(super) fn plan_compaction(&mut self, surplus: &Surplus, out: &mut Outbox) -> bool {
        // One that did not help is none to repeat.
        if self.state.turn.as_ref().is_none_or(|turn| turn.compactions > 0) {
            return false;
        }
        let window = self
            .settings
            .context_tokens
            .saturating_sub(self.settings.max_output_tokens);
        let most = self.state.budget.tokens.unwrap_or(u64::MAX).min(window.into());
        let asked = context::system(&prompt::summarise(MOST_BYTES / BYTES_PER_WORD));
        let room = most.saturating_sub(self.fixed_tokens().saturating_add(asked));
        let Some(from) = self.worth_a_summary(surplus.summarised, room) else {
            return false;
        };
        if from > 0 {
            self.forget(from, out);
        }
        let oldest = &self.transcript[..surplus.summarised - from];
        // It leaves half of what it replaces free, and a quarter of the room to itself.
        let replaced = context::prompt(oldest, 0);
        let compaction = Compaction {
            messages: oldest.len(),
            most_bytes: MOST_BYTES.min(surplus.room).min(replaced * 2),
            failures: 0,
        };
        if let Some(turn) = &mut self.state.turn {
            turn.compaction = Some(compaction);
        }
        true
    }

    /// The first of the newest whole turns, of so many of the oldest messages, that fit into so many tokens and are worth a
    /// summary.
    fn worth_a_summary(&self, messages: usize, most: u64) -> Option<usize> {
        let oldest = self.transcript.get(..messages)?;
        let from = context::newest(oldest, most)?;
        (context::prompt(&oldest[from..], 0) >= LEAST_REPLACED).then_some(from)
    }

    /// The call for a summary is larger than a whole limit. What a call costs at most is counted by bytes where the server has
    /// not billed the same text before, so it can be too large all the same: the older half leaves without a summary, and the
    /// call is made again for the rest while that is worth one.
    pub(super) fn shorten_compaction(&mut self, compaction: Compaction, out: &mut Outbox) {
        let oldest = &self.transcript[..compaction.messages.min(self.transcript.len())];
        let half = context::prompt(oldest, 0) / 2;
        let Some(from) = self.worth_a_summary(oldest.len(), half) else {
            self.end_compaction(out);
            return;
        };
        self.forget(from, out);
        if let Some(turn) = &mut self.state.turn {
            turn.compaction = Some(Compaction {
                messages: compaction.messages - from,
                ..compaction
            });
            turn.step = Step::Due(out.now);
        }
    }

    /// What the next attempt is for, and its prompt without the system message.
    pub(super) fn conversation(&self) -> (Purpose, Vec<Arc<Message>>) {
        let summary = self.state.summary.as_deref().map(prompt::summary);
        let summary = summary.map(|text| Arc::new(Message::User { text }));
        if self.is_heartbeat() {
            return (Purpose::Heartbeat, self.session().to_vec());
        }
        let Some(compaction) = self.compaction() else {
            let all = summary.into_iter().chain(self.transcript.iter().cloned());
            return (Purpose::Turn, all.collect());
        };
        let oldest = self.transcript.iter().take(compaction.messages).cloned();
        let text = request(compaction);
        let request = Arc::new(Message::User { text });
        let all = summary.into_iter().chain(oldest).chain([request]);
        (Purpose::Compaction, all.collect())
    }

    /// Estimated tokens of the summary in a prompt.
    pub(super) fn summary_tokens(&self) -> u64 {
        let summary = self.state.summary.as_deref().filter(|_| !self.is_heartbeat());
        let summary = summary.map(prompt::summary);
        summary.map_or(0, |text| context::system(&text))
    }

    /// The call for a summary was answered.
    pub(super) fn summarised(&mut self, compaction: Compaction, call: CallId, answer: &Answer, out: &mut Outbox) {
        self.state.counters.idle.count(out.now);
        let Some(text) = summary_of(answer, compaction.most_bytes) else {
            let of = (call, Purpose::Compaction);
            out.record(answer_line(of, answer, "no summary", Vec::new()));
            self.end_compaction(out);
            return;
        };
        let asked = Message::User {
            text: request(compaction),
        };
        let said = Message::Assistant {
            text: Some(text.clone()),
            tool_calls: Vec::new(),
        };
        let note = format!("{:?}", answer.finish);
        // Into the history, and out of the live transcript at once: it is in the snapshot.
        let messages = vec![Arc::new(asked), Arc::new(said)];
        out.record(answer_line((call, Purpose::Compaction), answer, note, messages));
        out.record(Record {
            call: Some(call),
            retract: 2,
            forget: compaction.messages,
            ..line(
                RecordKind::Compacted,
                call.turn,
                format!("{} messages", compaction.messages),
            )
        });
        self.state.watch.forgets();
        self.transcript.drain(..compaction.messages.min(self.transcript.len()));
        self.state.summary = Some(text);
        self.end_compaction(out);
    }

    /// An attempt at a summary failed in a way that says something of the summary. True: what follows is decided.
    pub(super) fn compaction_failed(&mut self, failure: &Failure, out: &mut Outbox) -> bool {
        let Some(turn) = &mut self.state.turn else {
            return false;
        };
        let Some(compaction) = &mut turn.compaction else {
            return false;
        };
        if !matches!(failure.kind, FailureKind::BadResponse | FailureKind::Timeout) {
            return false;
        }
        compaction.failures = compaction.failures.saturating_add(1);
        let again = compaction.failures < MOST_FAILURES;
        turn.step = Step::Due(clock::after(out.now, AGAIN));
        self.state.last_error = Some((out.now, failure.clone()));
        if !again {
            self.end_compaction(out);
        }
        true
    }

    /// There will be no further attempt at a summary in this turn: it goes on with its own next call. What is still too
    /// much leaves before that.
    pub(super) fn end_compaction(&mut self, out: &Outbox) {
        if let Some(turn) = &mut self.state.turn {
            turn.compaction = None;
            turn.compactions = turn.compactions.saturating_add(1);
        }
        self.next_call(out);
    }

    /// The summary leaves too: without it there may be room for a call. False: there is none.
    pub(super) fn drop_summary(&mut self, out: &mut Outbox) -> bool {
        if self.state.summary.take().is_none() {
            return false;
        }
        self.forget(0, out);
        true
    }
}

/// What the model is asked; the same for each attempt.
fn request(compaction: Compaction) -> String {
    prompt::summarise(compaction.most_bytes / BYTES_PER_WORD)
}

/// The summary that an answer is; `None`: it is none.
fn summary_of(answer: &Answer, most_bytes: u64) -> Option<String> {
    if !answer.tool_calls.is_empty() || answer.finish == Finish::Refused {
        return None;
    }
    let text = answer.text.as_deref()?.trim();
    let most = usize::try_from(most_bytes).unwrap_or(usize::MAX);
    match text {
        "" => None,
        text if text.len() <= most => Some(text.to_owned()),
        text => Some(format!("{} [cut]", &text[..text.floor_char_boundary(most)])),
    }
}
