//! The part of the history that the server may be refusing.
//!
//! Owns which messages are left out of prompts on trial, and when a trial ends. A failed turn retracts its own messages only,
//! so a refusal that an older message causes would repeat forever. After two refused turns in a row, the next turns are tried
//! without a part of the history: the older half, then the newer half, then all of it. A part is removed only when a call
//! without it was accepted, or when the window or a limit requires that a part of the history leaves. Otherwise it comes
//! back, because a wrong model name or instructions that a provider filters are refused in the same way and must not cost
//! the memory. Each part is tried once per series of refused turns.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::digest::DigestDetail;

/// Refused turns in a row after which the history is doubted.
const MOST_REFUSED: u32 = 2;

/// What is suspected of the history.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct HistoryDoubt {
    /// Refused turns in a row.
    refused: u32,
    /// Messages of the transcript before those that are left out.
    from: usize,
    /// Number of messages that are left out of the prompts, on trial. Whole turns.
    left_out: usize,
    /// Trials in this series of refused turns.
    trials: usize,
    /// All of the history is left out, so even what the digest quotes of its calls is suspected.
    names_only: bool,
}

/// A part of the history that is left out on trial.
pub struct HistoryTrial {
    name: &'static str,
    messages: Range<usize>,
}

impl HistoryTrial {
    pub const fn new(name: &'static str, messages: Range<usize>) -> Self {
        Self { name, messages }
    }
}

impl HistoryDoubt {
    /// The messages of the transcript that are left out of the agent's own turns.
    pub fn left_out(&self) -> Range<usize> {
        self.from..self.from.saturating_add(self.left_out)
    }

    /// Whether the listed calls of messages without a summary are shown without what they quote.
    pub fn names_only(&self) -> bool {
        self.names_only
    }

    /// How much the digest says of messages that are left out. Results are what others wrote, so a trial never quotes them.
    pub fn detail(&self) -> DigestDetail {
        if self.names_only {
            DigestDetail::Names
        } else {
            DigestDetail::Arguments
        }
    }

    /// Another turn in a row was refused, which ends the trial. Whether the next turn is tried without a part.
    pub fn count_refusal(&mut self) -> bool {
        self.refused = self.refused.saturating_add(1);
        self.left_out = 0;
        self.names_only = false;
        self.refused >= MOST_REFUSED
    }

    /// The next turn is tried without the next of these parts. After the last one, everything is back. `all`: messages of
    /// the transcript.
    pub fn begin_trial(&mut self, parts: Vec<HistoryTrial>, all: usize) -> TrialStep {
        let Some(trial) = parts.into_iter().nth(self.trials) else {
            return if self.trials > 0 {
                TrialStep::NoMore
            } else {
                TrialStep::None
            };
        };
        self.from = trial.messages.start;
        self.left_out = trial.messages.len();
        self.trials += 1;
        self.names_only = self.left_out == all;
        let part = format!("{} of {all} messages", self.left_out);
        TrialStep::Begun {
            note: format!("{}: {part}, after {} refused turns in a row", trial.name, self.refused),
            message: format!(
                "the next turn is tried without {} of the history ({part}), since it may be the cause",
                trial.name
            ),
        }
    }

    /// What is left out on trial is to be removed: a call without it was accepted, or its room is needed. `None`: nothing is
    /// left out.
    pub fn end_trial(&mut self) -> Option<EndedTrial> {
        let ended = EndedTrial {
            messages: self.left_out(),
            detail: self.detail(),
            names_only: self.names_only,
        };
        self.names_only = false;
        if ended.messages.is_empty() && !ended.names_only {
            return None;
        }
        self.left_out = 0;
        Some(ended)
    }

    /// Messages of the transcript were removed, of which so many remain: the same messages stay left out.
    pub fn removed(&mut self, removed: &Range<usize>, remaining: usize) {
        let Range { start, end } = self.left_out();
        let place = |place: usize| place - removed.end.min(place).saturating_sub(removed.start);
        let (start, end) = (place(start).min(remaining), place(end).min(remaining));
        self.from = start;
        self.left_out = end - start;
    }
}

/// What follows a refused turn.
pub enum TrialStep {
    /// There is nothing to leave out.
    None,
    /// Every part was tried.
    NoMore,
    /// A trial has begun: the note for the journal, and what to add to the failure's message.
    Begun { note: String, message: String },
}

/// What a trial that has ended left out.
pub struct EndedTrial {
    pub messages: Range<usize>,
    pub detail: DigestDetail,
    pub names_only: bool,
}
