//! Limits that hold whatever the model does: one small type and one file each, and one list of all. What they count is
//! in the snapshot, so that none can lack its input.

mod actions_per_minute;
mod calls_per_turn;
mod consecutive_turns;

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};

use super::{settings::Settings, snapshot::Counters};
use crate::api::status::PauseReason;
pub use actions_per_minute::MINUTE;

/// All guardrails.
pub const ALL: [&dyn Guardrail; 3] = [
    &actions_per_minute::ActionsPerMinute,
    &calls_per_turn::CallsPerTurn,
    &consecutive_turns::ConsecutiveTurns,
];

/// One limit. Each method speaks up only when its limit is reached.
pub trait Guardrail: Sync {
    /// Asked before one more call of a turn that has made `calls`. An answer ends the turn; it is a note for the model.
    fn before_call(&self, _settings: &Settings, _calls: u32) -> Option<String> {
        None
    }

    /// Asked before a tool run with side effects, `recent` being the moments of those before it. An answer pauses the loop;
    /// the run waits.
    fn before_action(&self, _settings: &Settings, _recent: &VecDeque<Timestamp>, _now: Timestamp) -> Option<Trip> {
        None
    }

    /// Told after each completed turn, and whether the agent sleeps now. An answer pauses the loop.
    fn after_turn(&self, _settings: &Settings, _counters: &mut Counters, _sleeps: bool) -> Option<Trip> {
        None
    }

    /// Told that a reason was cleared by its own rule.
    fn cleared(&self, _reason: PauseReason, _counters: &mut Counters) {}
}

/// A limit that was reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trip {
    /// The reason that now holds the loop.
    pub reason: PauseReason,
    /// For how long.
    pub wait: SignedDuration,
    /// What happened and what to do.
    pub message: String,
}
