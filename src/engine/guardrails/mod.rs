//! Limits that hold whatever the model does: one small type and one file each, and one list of all. What they count is
//! part of the snapshot, so that each always has its input.

mod actions_per_minute;
pub mod active_hours;
mod calls_per_turn;
pub mod consecutive_turns;
pub mod idle_timeout;
mod rate_limits;
mod tool_failures;

use jiff::{SignedDuration, Timestamp};

use super::{OutcomeKind, counters::StreakCounters, resources::ResourceTracker, settings::EngineSettings};
pub use actions_per_minute::MAX_HOLD as MAX_HOLD_OF_ACTIONS;
use agentloop_api::status::{LoopOutcome, PauseReason};
use agentloop_api::usage_counts::GuardrailTrip;

pub const ALL: [&dyn Guardrail; 7] = [
    &actions_per_minute::ActionsPerMinute,
    &active_hours::ActiveHoursGuardrail,
    &calls_per_turn::CallsPerTurn,
    &consecutive_turns::ConsecutiveTurns,
    &idle_timeout::IdleTimeout,
    &rate_limits::RateLimits,
    &tool_failures::ToolFailures,
];

/// One limit. Each method returns a value only when its limit is reached.
pub trait Guardrail: Sync {
    /// Called before each further call of a turn that has made `calls`. A returned value ends the turn.
    fn before_call(&self, _settings: &EngineSettings, _calls: u32) -> Option<TurnLimit> {
        None
    }

    /// Called before a tool run with side effects, and again until it returns `None`. A returned value pauses the loop;
    /// the run waits.
    fn before_action(
        &self,
        _settings: &EngineSettings,
        _used: &ResourceTracker,
        _now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        None
    }

    /// Called before each attempt at a model call, and again until it returns `None`. A returned value pauses the loop.
    fn before_attempt(
        &self,
        _settings: &EngineSettings,
        _used: &ResourceTracker,
        _now: Timestamp,
    ) -> Option<TrippedGuardrail> {
        None
    }

    /// Called after each completed turn. A returned value pauses the loop.
    fn after_turn(
        &self,
        _settings: &EngineSettings,
        _counters: &mut StreakCounters,
        _rest: RestKind,
    ) -> Option<TrippedGuardrail> {
        None
    }

    /// Called after each tool run of a turn. A returned value pauses the loop.
    fn after_tool_run(
        &self,
        _settings: &EngineSettings,
        _counters: &mut StreakCounters,
        _run: &EndedToolRun<'_>,
    ) -> Option<TrippedGuardrail> {
        None
    }

    /// Called before each further call and after each completed turn. A returned outcome ends the loop for good.
    fn ends(&self, _settings: &EngineSettings, _counters: &StreakCounters) -> Option<LoopOutcome> {
        None
    }

    /// The decision of a limit that depends only on the clock. Its reason holds exactly as long as the decision does.
    fn by_clock(&self, _settings: &EngineSettings, _now: Timestamp) -> Option<ClockDecision> {
        None
    }

    /// A reason was cleared by its own rule.
    fn cleared(&self, _reason: PauseReason, _counters: &mut StreakCounters) {}
}

/// How an agent rests after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestKind {
    /// Not at all, or too briefly to reset a limit.
    None,
    /// A nap that, with earlier ones, adds up to a minute.
    Naps,
    /// A sleep of a minute or more.
    Sleep,
}

/// A tool run that ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedToolRun<'a> {
    pub tool: &'a str,
    pub outcome: OutcomeKind,
    /// The result for the model: text of the tool, for no message.
    pub result: &'a str,
    /// Whether it is part of a turn that counts as one.
    pub in_counted_turn: bool,
    /// It was called in a turn of the mode, and not in the answer to a request.
    pub of_mode: bool,
    pub at: Timestamp,
}

impl EndedToolRun<'_> {
    /// It reported a failure, did not run, or may have run.
    pub fn has_failed(&self) -> bool {
        self.outcome != OutcomeKind::Ok
    }
}

/// A limit that ended a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnLimit {
    pub trip: GuardrailTrip,
    /// What happened, for the model.
    pub note: String,
}

/// A limit that was reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrippedGuardrail {
    /// The reason that now holds the loop.
    pub reason: PauseReason,
    pub wait: SignedDuration,
    /// What happened and what to do.
    pub message: String,
}

/// The decision of a limit that depends only on the clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockDecision {
    /// The reason that it raises.
    pub reason: PauseReason,
    /// Set while the loop is held.
    pub closed: Option<ClockPause>,
    /// When the decision changes next.
    pub changes: Option<Timestamp>,
}

/// Why the clock holds the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockPause {
    /// `None`: forever.
    pub until: Option<Timestamp>,
    /// What happened and what to do.
    pub message: String,
}
