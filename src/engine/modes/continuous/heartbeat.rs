//! The heartbeat: a turn with a fixed prompt at a fixed interval, with its own conversation.
//!
//! Owns when it is due and what its prompt says. It runs between the agent's own turns and during sleeps, and leaves
//! both unchanged: its messages leave the live transcript when it ends (the journal's history keeps them), it sets no
//! pace, and the deadline of a sleep stays. Every pause holds it too. If several were missed, one runs.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::modes::{ModeContext, TurnEnd};
use crate::time_math;
use agentloop_api::agent;
use agentloop_support::clock::rfc3339_seconds;

/// Maximum number of bytes of an answer that the next heartbeat repeats.
pub const MAX_LAST_BYTES: usize = 2 * 1024;
/// What the next heartbeat says about one that failed after side effects.
const FAILED: &str = "(It failed; the effects of its tool calls remain.)";

/// The interval and the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeartbeatSettings {
    /// Time between the beginnings of two heartbeats.
    pub every: SignedDuration,
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

/// The persisted state of the heartbeat.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct HeartbeatState {
    /// When the next one is due.
    due: Option<Timestamp>,
    /// The answer of the last one.
    last: String,
    /// If the agent's own turn is due too, it runs before the next heartbeat: however long heartbeats take, they leave
    /// room for its work.
    pub own_first: bool,
}

impl HeartbeatState {
    /// Schedules the next heartbeat if none is scheduled, and never later than one interval from now.
    pub fn schedule(&mut self, context: &ModeContext<'_>) {
        let due = self.due;
        self.due = context.settings.heartbeat.as_ref().map(|heartbeat| {
            let latest = time_math::after(context.now, heartbeat.every);
            due.map_or(latest, |due| due.min(latest))
        });
    }

    pub fn due(&self) -> Option<Timestamp> {
        self.due
    }

    /// A heartbeat begins. Returns its first message.
    pub fn begin(&mut self, number: i64, context: &ModeContext<'_>) -> String {
        let settings = context.settings.heartbeat.as_ref();
        self.due = settings.map(|heartbeat| time_math::after(context.now, heartbeat.every));
        let prompt = settings.map_or("", |heartbeat| &heartbeat.prompt);
        opening(number, context.now, prompt, &self.last)
    }

    /// A heartbeat ended. A failed one does not count as a failure of the loop: the next one runs on schedule.
    pub fn ended(&mut self, end: &TurnEnd<'_>, now: Timestamp) {
        match end {
            TurnEnd::Completed { last_text, .. } => {
                last_text[..last_text.floor_char_boundary(MAX_LAST_BYTES)].clone_into(&mut self.last);
            }
            TurnEnd::Failed { acted: true } => FAILED.clone_into(&mut self.last),
            TurnEnd::Failed { acted: false } => {}
        }
        self.own_first = true;
        // After a heartbeat that took longer than its interval one more is due, not all that were missed.
        self.due = self.due.map(|due| due.max(now));
    }
}

/// The message that begins a heartbeat. `last`: the answer of the previous one.
fn opening(turn: i64, now: Timestamp, prompt: &str, last: &str) -> String {
    let mut text = format!(
        "Turn {turn}, {}: your heartbeat, a separate turn beside your other work. It ends with your first answer that \
         calls no tool.",
        rfc3339_seconds(now)
    );
    if !last.is_empty() {
        text.push_str("\nYour answer at the previous heartbeat:\n");
        text.push_str(last);
    }
    text.push_str("\n\n");
    text.push_str(prompt);
    text
}
