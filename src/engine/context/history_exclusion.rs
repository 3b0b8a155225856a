//! The part of the history that the server may be refusing.
//!
//! Owns which messages are left out of prompts on trial, and when a trial ends. A failed turn retracts its own messages only,
//! so a refusal that an older message causes would repeat forever. After two refused turns in a row, the next turns are tried
//! without a part of the history: the older half, then the newer half, then all of it. Once a call without a part was
//! accepted, the next turn has the part again: only if that one is refused too, the part is removed, since a wrong model name
//! or an outage that ended meanwhile must not cost the memory. It is also removed when the window or a limit requires that a
//! part of the history leaves. Otherwise it comes back.
//!
//! Each part is tried once, and again whenever the number of refused turns in a row reaches a power of two: the history, or
//! what the server refuses, may have changed since. Example: refusals 2, 3 and 4 begin the three trials, so do 8, 9 and 10,
//! 16, 17 and 18.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::digest::DigestDetail;

/// Refused turns in a row after which the history is doubted.
const MAX_REFUSED: u32 = 2;

/// What is suspected of the history.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct HistoryExclusion {
    /// Refused turns in a row.
    refused: u32,
    /// Messages of the transcript before those that are left out.
    from: usize,
    /// Number of messages of the part that is left out of the prompts on trial, or back in them. Whole turns.
    left_out: usize,
    /// Trials in this series of refused turns.
    trials: usize,
    /// All of the history is left out, so even what the digest quotes of its calls is suspected.
    names_only: bool,
    /// How far the trial of this part is.
    stage: TrialStage,
}

/// How far the trial of a part is.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TrialStage {
    /// The turns are tried without the part.
    #[default]
    Begun,
    /// A call without it was accepted. The rest of the turn continues without it.
    Accepted,
    /// The turns have it again: it is the cause if the next one is refused.
    Verifying,
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

impl HistoryExclusion {
    /// The messages of the transcript that are left out of the agent's own turns.
    pub fn left_out(&self) -> Range<usize> {
        match self.stage {
            TrialStage::Begun | TrialStage::Accepted => self.part(),
            TrialStage::Verifying => self.from..self.from,
        }
    }

    /// The messages that are suspected, whether they are left out or back.
    fn part(&self) -> Range<usize> {
        self.from..self.from.saturating_add(self.left_out)
    }

    /// Whether the listed calls of messages without a summary are shown without what they quote.
    pub fn names_only(&self) -> bool {
        self.names_only && !self.is_verifying()
    }

    /// Whether a call without the part was accepted, and the turns have it again.
    pub fn is_verifying(&self) -> bool {
        self.stage == TrialStage::Verifying
    }

    /// How detailed the digest is about messages that are left out. Results are what others wrote, so a trial never
    /// quotes them.
    pub fn detail(&self) -> DigestDetail {
        if self.names_only {
            DigestDetail::Names
        } else {
            DigestDetail::Arguments
        }
    }

    /// A call was accepted: without the part, or else the series of refused turns ends.
    pub fn call_accepted(&mut self) {
        if self.part().is_empty() && !self.names_only || self.is_verifying() {
            *self = Self::default();
        } else {
            self.stage = TrialStage::Accepted;
        }
    }

    /// A turn ended without a refusal. If a call of it was accepted without the part, the next one has it again; a part that
    /// is back stays suspected until a call is accepted or refused. Otherwise the series of refused turns ends.
    pub fn turn_ended(&mut self) {
        match self.stage {
            TrialStage::Begun => *self = Self::default(),
            TrialStage::Accepted | TrialStage::Verifying => self.stage = TrialStage::Verifying,
        }
    }

    /// Another turn in a row was refused, which ends the trial. Whether the next turn is tried without a part.
    pub fn count_refusal(&mut self) -> bool {
        if self.stage == TrialStage::Accepted {
            // What was refused is a later call, with what the turn itself has read.
            self.stage = TrialStage::Verifying;
            return false;
        }
        self.refused = self.refused.saturating_add(1);
        self.clear_part();
        self.refused >= MAX_REFUSED
    }

    fn clear_part(&mut self) {
        self.left_out = 0;
        self.names_only = false;
        self.stage = TrialStage::Begun;
    }

    /// The next turn is tried without the next of these parts. After the last one, everything is back. `all`: messages of
    /// the transcript.
    pub fn begin_trial(&mut self, parts: Vec<HistoryTrial>, all: usize) -> TrialStep {
        if self.trials >= parts.len() && self.refused.is_power_of_two() {
            self.trials = 0;
        }
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

    /// The suspected part is to be removed: it is the cause, or its room is needed. `None`: nothing is suspected.
    pub fn end_trial(&mut self) -> Option<EndedTrial> {
        let ended = EndedTrial {
            messages: self.part(),
            detail: self.detail(),
            names_only: self.names_only,
        };
        self.clear_part();
        (!ended.messages.is_empty() || ended.names_only).then_some(ended)
    }

    /// Messages of the transcript were removed, of which `remaining` remain: the same messages stay suspected.
    pub fn removed(&mut self, removed: &Range<usize>, remaining: usize) {
        let Range { start, end } = self.part();
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

/// The part of a trial that has ended.
pub struct EndedTrial {
    pub messages: Range<usize>,
    pub detail: DigestDetail,
    pub names_only: bool,
}
