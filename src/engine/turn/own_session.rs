//! Turns with a conversation of their own, such as heartbeats. Their messages are the newest of the transcript, and leave
//! it when the turn ends; the journal's history keeps them. They leave the loop's own work as it is.

use std::sync::Arc;

use super::Turn;
use crate::effects::{EffectBuffer, journal_line};
use crate::machine::Engine;
use crate::message::Message;
use crate::modes::{LoopPace, TurnEnd};
use crate::{JournalRecord, RecordKind};
use agentloop_api::failure::CallFailure;

impl Engine {
    /// The conversation of the current turn.
    pub(crate) fn session(&self) -> &[Arc<Message>] {
        match &self.state.turn {
            Some(turn) if turn.rules().own_session => {
                let before = self.transcript.len().saturating_sub(turn.messages());
                &self.transcript[before..]
            }
            Some(_) | None => &self.transcript,
        }
    }

    /// The current turn, which has its own conversation, is complete.
    pub(crate) fn complete_own_session(&mut self, pace: &LoopPace, out: &mut EffectBuffer) {
        let said = self.session().iter().rev().find_map(|message| match &**message {
            Message::Assistant { text, .. } => text.clone(),
            Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
        });
        let Some(turn) = self.take_turn() else {
            return;
        };
        self.state.turns_completed = self.state.turns_completed.saturating_add(1);
        let said = said.unwrap_or_default();
        self.retract_session(&turn, RecordKind::TurnCompleted, turn.rules().note, out);
        self.mode_turn_ended(turn.kind(), &TurnEnd::Completed { pace, said: &said }, out);
    }

    /// The current turn, which has its own conversation, failed. This does not count as a failure of the loop.
    pub(crate) fn fail_own_session(&mut self, turn: &Turn, failure: CallFailure, out: &mut EffectBuffer) {
        self.retract_session(turn, RecordKind::TurnFailed, failure.kind.as_ref(), out);
        self.state.last_error = Some((out.now, failure));
        self.mode_turn_ended(
            turn.kind(),
            &TurnEnd::Failed {
                acted: turn.has_acted(),
            },
            out,
        );
    }

    fn retract_session(&mut self, turn: &Turn, kind: RecordKind, note: &str, out: &mut EffectBuffer) {
        self.state.counters.idle.skip(out.now);
        let retract = turn.messages().min(self.transcript.len());
        self.transcript.truncate(self.transcript.len() - retract);
        out.record(JournalRecord {
            retract,
            ..journal_line(kind, turn.number(), note)
        });
    }
}
