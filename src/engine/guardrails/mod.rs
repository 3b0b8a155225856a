//! Limits that hold whatever the model does: one small type and one file each, and one list of all. What they count is
//! in the snapshot, so that none can lack its input.

mod actions_per_minute;
pub mod active_hours;
mod calls_per_turn;
mod consecutive_turns;
pub mod idle_timeout;
mod rate_limits;

use jiff::{SignedDuration, Timestamp};

use super::{resources::ResourceTracker, settings::EngineSettings, snapshot::StreakCounters};
use crate::api::status::{LoopOutcome, PauseReason};
pub use actions_per_minute::LONGEST as LONGEST_HOLD_OF_ACTIONS;

/// All guardrails.
pub const ALL: [&dyn Guardrail; 6] = [
    &actions_per_minute::ActionsPerMinute,
    &active_hours::ActiveHoursGuardrail,
    &calls_per_turn::CallsPerTurn,
    &consecutive_turns::ConsecutiveTurns,
    &idle_timeout::IdleTimeout,
    &rate_limits::RateLimits,
];

/// One limit. Each method speaks up only when its limit is reached.
pub trait Guardrail: Sync {
    /// Asked before one more call of a turn that has made `calls`. An answer ends the turn; it is a note for the model.
    fn before_call(&self, _settings: &EngineSettings, _calls: u32) -> Option<String> {
        None
    }

    /// Asked before a tool run with side effects, and again until it says nothing any more. An answer pauses the loop; the run
    /// waits.
    fn before_action(
        &self,
        _settings: &EngineSettings,
        _used: &ResourceTracker,
        _now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        None
    }

    /// Asked before each attempt at a model call, and again until it says nothing any more. An answer pauses the loop.
    fn before_attempt(
        &self,
        _settings: &EngineSettings,
        _used: &ResourceTracker,
        _now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        None
    }

    /// Told after each completed turn, and how the agent rests now. An answer pauses the loop.
    fn after_turn(
        &self,
        _settings: &EngineSettings,
        _counters: &mut StreakCounters,
        _rest: RestKind,
    ) -> Option<TrippedGuardrail> {
        None
    }

    /// Asked before one more call and after each completed turn. An answer ends the loop for good.
    fn ends(&self, _settings: &EngineSettings, _counters: &StreakCounters) -> Option<LoopOutcome> {
        None
    }

    /// What a limit that depends on the clock alone says at a moment; its reason holds as long as it says so, and no longer.
    fn by_clock(&self, _settings: &EngineSettings, _now: Timestamp) -> Option<ClockDecision> {
        None
    }

    /// Told that a reason was cleared by its own rule.
    fn cleared(&self, _reason: PauseReason, _counters: &mut StreakCounters) {}
}

/// How an agent rests after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestKind {
    /// It does not, or too shortly for anything to begin anew.
    None,
    /// It naps, and its naps come to a minute with this one.
    Naps,
    /// It sleeps for a minute or more.
    Sleep,
}

/// A limit that was reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrippedGuardrail {
    /// The reason that now holds the loop.
    pub reason: PauseReason,
    /// For how long.
    pub wait: SignedDuration,
    /// What happened and what to do.
    pub message: String,
}

/// What a limit that depends on the clock alone says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockDecision {
    /// The reason it raises.
    pub reason: PauseReason,
    /// Why the loop is held, when it is.
    pub closed: Option<ClockPause>,
    /// When it says something else.
    pub changes: Option<Timestamp>,
}

/// Why the clock holds the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockPause {
    /// Until when; `None`: for ever.
    pub until: Option<Timestamp>,
    /// What happened and what to do.
    pub message: String,
}
