//! A history that may be what the server refuses.
//!
//! A failed turn takes back itself and no more, so a refusal that an older message causes would repeat for ever. After two
//! refused turns in a row the next one is tried without the older half of the history. That half leaves for good once a
//! call without it was accepted; a turn that is refused all the same brings it back, since a wrong model name or a wrong
//! field is refused in the same way, and must not cost the memory. It is tried once in each row of refused turns.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::digest::HistoryDigest;
use super::effects::{EffectBuffer, journal_line};
use super::machine::Engine;
use super::message::Message;
use super::{RecordKind, prompt_size};
use crate::api::failure::{CallFailure, FailureKind};

/// Refused turns in a row after which the history is doubted.
const MOST_REFUSED: u32 = 2;

/// What is suspected of the history.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct HistoryDoubt {
    /// Refused turns in a row.
    refused: u32,
    /// So many of the oldest messages are left out of the prompts, on trial. Whole turns.
    left_out: usize,
}

impl Engine {
    /// So many of the oldest messages of the transcript are left out of the agent's own turns.
    pub(super) fn left_out(&self) -> usize {
        self.state.doubt.left_out
    }

    /// A turn has failed. What to add to the failure's message, when it says something of the history.
    pub(super) fn doubt_history(&mut self, failure: &CallFailure, out: &mut EffectBuffer) -> Option<String> {
        if failure.kind != FailureKind::BadResponse {
            self.trust_history();
            return None;
        }
        let doubt = &mut self.state.doubt;
        doubt.refused = doubt.refused.saturating_add(1);
        if std::mem::take(&mut doubt.left_out) > 0 {
            return Some(
                "leaving out the older half of the history did not help, and it is back: look at spec.model".to_owned(),
            );
        }
        if doubt.refused == MOST_REFUSED {
            return self.leave_out(out);
        }
        None
    }

    /// The next turn is tried without the older half of the history, cut between two turns.
    fn leave_out(&mut self, out: &mut EffectBuffer) -> Option<String> {
        let all = self.transcript.len();
        let cleared = self.cleared();
        let goal = prompt_size::messages_size(&self.transcript, cleared) / 2;
        let leaving = prompt_size::oldest_to_drop(&self.transcript, cleared, all, goal);
        if leaving == 0 {
            return None;
        }
        self.state.doubt.left_out = leaving;
        let note = format!("{leaving} of {all} messages, after {MOST_REFUSED} refused turns in a row");
        out.record(journal_line(RecordKind::HistoryDoubted, self.turn_number(), note));
        Some(format!(
            "the next turn is tried without the {leaving} oldest of {all} messages of the history, since one of them may \
             be the cause"
        ))
    }

    /// A turn was completed, or failed for another cause: the row of refused ones is over.
    pub(super) fn trust_history(&mut self) {
        self.state.doubt = HistoryDoubt::default();
    }

    /// What is left out on trial leaves for good: a call without it was accepted, or its room is needed. False: nothing is.
    pub(super) fn forget_left_out(&mut self, out: &mut EffectBuffer) -> bool {
        let leaving = std::mem::take(&mut self.state.doubt.left_out);
        if leaving == 0 {
            return false;
        }
        self.trim_messages(leaving, out);
        true
    }

    /// The oldest messages are gone from the transcript, or the newest: no more can be left out than there are.
    pub(super) fn heed_left(&mut self, oldest: usize) {
        let left_out = &mut self.state.doubt.left_out;
        *left_out = left_out.saturating_sub(oldest).min(self.transcript.len());
    }

    /// What the prompt says of messages without a summary, those that are left out on trial among them.
    pub(super) fn digest(&self) -> Cow<'_, HistoryDigest> {
        let left_out = self.left_out_messages();
        if left_out.is_empty() {
            return Cow::Borrowed(&self.state.digest);
        }
        let mut digest = self.state.digest.clone();
        digest.add(left_out, |name| self.toolbox.may_act(name));
        Cow::Owned(digest)
    }

    fn left_out_messages(&self) -> &[Arc<Message>] {
        &self.transcript[..self.left_out().min(self.transcript.len())]
    }
}
