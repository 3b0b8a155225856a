//! The heartbeat: now and then a turn with a fixed prompt, in a conversation of its own.
//!
//! Owns when it is due and what it is told. It comes between the agent's own turns and while the agent sleeps, and leaves
//! both as they were: its messages leave the live transcript with its end (the journal's history keeps them), it sets no
//! pace, and the deadline of a sleep stays. Whatever holds the loop holds it too. One that was missed comes once.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::effects::{EffectBuffer, journal_line};
use super::machine::Engine;
use super::message::Message;
use super::snapshot::{Turn, TurnBriefing};
use super::{JournalRecord, RecordKind, prompt, time_math};
use crate::api::agent;
use crate::api::failure::CallFailure;

/// Note of the lines that begin and end one.
pub(super) const HEARTBEAT: &str = "heartbeat";
/// Most bytes of an answer that the next heartbeat is told.
pub const MOST_LAST_BYTES: usize = 2 * 1024;
/// What the next heartbeat is told of one that failed after it had done something.
const FAILED: &str = "(It failed before its end; what its tools did stands.)";

/// How often, and with what prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeartbeatSettings {
    /// Time between the beginnings of two.
    pub every: SignedDuration,
    /// What it is asked.
    pub prompt: String,
}

impl From<&agent::HeartbeatSpec> for HeartbeatSettings {
    fn from(heartbeat: &agent::HeartbeatSpec) -> Self {
        Self {
            every: SignedDuration::from_secs(heartbeat.every_seconds.into()),
            prompt: heartbeat.prompt.clone(),
        }
    }
}

/// Of the heartbeat, what outlives the process.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct HeartbeatState {
    /// When the next one is due.
    due: Option<Timestamp>,
    /// What the last one came to.
    last: String,
    /// The agent's own turn, where one is due, comes before the next heartbeat: however long those take, they leave room
    /// for its work.
    pub(super) own_first: bool,
}

impl Engine {
    /// Sets the next heartbeat where there is none, and never later than one interval from now.
    pub(super) fn schedule_heartbeat(&mut self, now: Timestamp) {
        let due = self.state.beat.due;
        self.state.beat.due = self.settings.heartbeat.as_ref().map(|heartbeat| {
            let latest = time_math::after(now, heartbeat.every);
            due.map_or(latest, |due| due.min(latest))
        });
    }

    /// When the next heartbeat is due.
    pub(super) fn heartbeat_due(&self) -> Option<Timestamp> {
        self.state.beat.due
    }

    /// Whether the present turn is one.
    pub(super) fn is_heartbeat(&self) -> bool {
        self.state.turn.as_ref().is_some_and(|turn| turn.heartbeat)
    }

    /// The conversation that the present turn belongs to.
    pub(super) fn session(&self) -> &[Arc<Message>] {
        match &self.state.turn {
            Some(turn) if turn.heartbeat => {
                let before = self.transcript.len().saturating_sub(turn.messages);
                &self.transcript[before..]
            }
            Some(_) | None => &self.transcript,
        }
    }

    /// Begins one.
    pub(super) fn begin_heartbeat(&mut self, out: &mut EffectBuffer) {
        let Some(heartbeat) = &self.settings.heartbeat else {
            return;
        };
        let number = self.state.turns_begun.saturating_add(1);
        let text = prompt::heartbeat(number, out.now, &heartbeat.prompt, &self.state.beat.last);
        self.state.beat.due = Some(time_math::after(out.now, heartbeat.every));
        self.open_turn(text, TurnBriefing::default(), true, out);
    }

    /// The present heartbeat is done.
    pub(super) fn complete_heartbeat(&mut self, out: &mut EffectBuffer) {
        let said = self.session().iter().rev().find_map(|message| match &**message {
            Message::Assistant { text, .. } => text.clone(),
            Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
        });
        let Some(turn) = self.state.turn.take() else {
            return;
        };
        let mut last = said.unwrap_or_default();
        last.truncate(last.floor_char_boundary(MOST_LAST_BYTES));
        self.state.beat.last = last;
        self.state.turns_completed = self.state.turns_completed.saturating_add(1);
        self.retract_heartbeat(&turn, RecordKind::TurnCompleted, HEARTBEAT, out);
    }

    /// The present heartbeat was given up. It counts as no failure of the loop: the next one comes at its time.
    pub(super) fn fail_heartbeat(&mut self, turn: &Turn, failure: CallFailure, out: &mut EffectBuffer) {
        if turn.acted {
            FAILED.clone_into(&mut self.state.beat.last);
        }
        self.retract_heartbeat(turn, RecordKind::TurnFailed, failure.kind.as_ref(), out);
        self.state.last_error = Some((out.now, failure));
    }

    fn retract_heartbeat(&mut self, turn: &Turn, kind: RecordKind, note: &str, out: &mut EffectBuffer) {
        self.state.beat.own_first = true;
        self.state.beat.due = self.state.beat.due.map(|due| due.max(out.now));
        self.state.counters.idle.skip(out.now);
        let retract = turn.messages.min(self.transcript.len());
        self.transcript.truncate(self.transcript.len() - retract);
        out.record(JournalRecord {
            retract,
            ..journal_line(kind, turn.number, note)
        });
    }
}
