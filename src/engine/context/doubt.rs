//! The part of the history that the server may be refusing.
//!
//! Owns which messages are left out of prompts on trial, and when a trial ends. A failed turn retracts its own messages only,
//! so a refusal that an older message causes would repeat forever. After two refused turns in a row, the next turns are tried
//! without a part of the history: the older half, then the newer half, then all of it. A part is removed only when a call
//! without it was accepted. Otherwise it comes back, because a wrong model name or instructions that a provider filters are
//! refused in the same way and must not cost the memory. Each part is tried once per series of refused turns.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::RecordKind;
use crate::context::digest::{DigestDetail, HistoryDigest};
use crate::context::prompt_size;
use crate::effects::{EffectBuffer, journal_line};
use crate::machine::Engine;
use crate::message::Message;
use agentloop_api::failure::{CallFailure, FailureKind};

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
struct HistoryTrial {
    name: &'static str,
    messages: Range<usize>,
}

impl HistoryTrial {
    const fn new(name: &'static str, messages: Range<usize>) -> Self {
        Self { name, messages }
    }
}

impl Engine {
    /// The messages of the transcript that are left out of the agent's own turns.
    pub(crate) fn left_out(&self) -> Range<usize> {
        let HistoryDoubt { from, left_out, .. } = self.state.doubt;
        from..from.saturating_add(left_out)
    }

    /// A turn has failed. Returns what to add to the failure's message.
    pub(crate) fn doubt_history(&mut self, failure: &CallFailure, out: &mut EffectBuffer) -> Option<String> {
        if failure.kind != FailureKind::BadResponse {
            self.trust_history();
            return None;
        }
        let doubt = &mut self.state.doubt;
        doubt.refused = doubt.refused.saturating_add(1);
        doubt.left_out = 0;
        doubt.names_only = false;
        if doubt.refused < MOST_REFUSED {
            return None;
        }
        self.begin_trial(out)
    }

    /// Tries the next turn without another part of the history. After the last part, everything is back.
    fn begin_trial(&mut self, out: &mut EffectBuffer) -> Option<String> {
        let trials = self.trials();
        let tried = self.state.doubt.trials;
        let Some(trial) = trials.into_iter().nth(tried) else {
            return (tried > 0).then(|| {
                "leaving out parts of the history did not help, so the history was restored: check spec.model and the \
                 instructions"
                    .to_owned()
            });
        };
        let (leaving, all) = (trial.messages.len(), self.transcript.len());
        self.state.doubt = HistoryDoubt {
            from: trial.messages.start,
            left_out: leaving,
            trials: tried + 1,
            names_only: leaving == all,
            ..self.state.doubt
        };
        let refused = self.state.doubt.refused;
        let note = format!(
            "{}: {leaving} of {all} messages, after {refused} refused turns in a row",
            trial.name
        );
        out.record(journal_line(RecordKind::HistoryDoubted, self.turn_number(), note));
        Some(format!(
            "the next turn is tried without {} of the history ({leaving} of {all} messages), since it may be the cause",
            trial.name
        ))
    }

    /// The parts to try, in order: the one that costs the least memory first. Cut between two turns, so that no tool call is
    /// parted from its result.
    fn trials(&self) -> Vec<HistoryTrial> {
        let all = self.transcript.len();
        let cleared = self.cleared();
        let goal = prompt_size::messages_size(&self.transcript, cleared) / 2;
        let half = prompt_size::oldest_to_drop(&self.transcript, cleared, all, goal);
        let mut parts = Vec::new();
        if (1..all).contains(&half) {
            parts.push(HistoryTrial::new("the older half", 0..half));
            parts.push(HistoryTrial::new("the newer half", half..all));
        }
        // What left the window without a summary is quoted in the digest, and may be the cause as well.
        if all > 0 || self.state.digest.has_quotes() {
            parts.push(HistoryTrial::new("all", 0..all));
        }
        parts
    }

    /// The provider accepted the conversation, or a turn failed for another cause: the series of refused turns is over.
    pub(crate) fn trust_history(&mut self) {
        self.state.doubt = HistoryDoubt::default();
    }

    /// Removes what is left out on trial: a call without it was accepted, or its room is needed. False: nothing is left out.
    pub(crate) fn forget_left_out(&mut self, out: &mut EffectBuffer) -> bool {
        let leaving = self.left_out();
        let names_only = std::mem::take(&mut self.state.doubt.names_only);
        if leaving.is_empty() && !names_only {
            return false;
        }
        if names_only {
            self.state.digest.drop_quotes();
        }
        self.state.doubt.left_out = 0;
        if !leaving.is_empty() {
            self.trim_range(leaving, detail_on_trial(names_only), out);
        }
        true
    }

    /// Messages of the transcript were removed: the same messages stay left out.
    pub(crate) fn heed_removed(&mut self, removed: &Range<usize>) {
        let Range { start, end } = self.left_out();
        let place = |place: usize| place - removed.end.min(place).saturating_sub(removed.start);
        let all = self.transcript.len();
        let (start, end) = (place(start).min(all), place(end).min(all));
        self.state.doubt.from = start;
        self.state.doubt.left_out = end - start;
    }

    /// What the prompt says of messages without a summary, including those that are left out on trial.
    pub(crate) fn digest(&self) -> Cow<'_, HistoryDigest> {
        let left_out = self.left_out_messages();
        let names_only = self.state.doubt.names_only;
        if left_out.is_empty() && !names_only {
            return Cow::Borrowed(&self.state.digest);
        }
        let mut digest = self.state.digest.clone();
        if names_only {
            digest.drop_quotes();
        }
        digest.add(left_out, detail_on_trial(names_only), |name| self.toolbox.may_act(name));
        Cow::Owned(digest)
    }

    fn left_out_messages(&self) -> &[Arc<Message>] {
        let Range { start, end } = self.left_out();
        let end = end.min(self.transcript.len());
        &self.transcript[start.min(end)..end]
    }
}

/// Results are what others wrote, so a trial never quotes them.
const fn detail_on_trial(names_only: bool) -> DigestDetail {
    if names_only {
        DigestDetail::Names
    } else {
        DigestDetail::Arguments
    }
}
