//! The guardrails of a loop, applied to a recorded history: which of its calls they would have admitted.
//!
//! Uses the same rules as the engine, with the same counters, and runs no loop. What a history does not contain, such as how
//! the loop would have continued after a pause, is up to the caller.

use jiff::{SignedDuration, Timestamp};

use super::OutcomeKind;
use super::counters::StreakCounters;
use super::guardrails::{self, EndedToolRun, Guardrail, RestKind, TrippedGuardrail};
use super::resources::ResourceTracker;
use super::settings::EngineSettings;
use super::time_math;
use agentloop_api::agent::LimitedResource;
use agentloop_api::status::PauseReason;

/// A pause that a guardrail would have begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayedPause {
    /// What would have held the loop.
    pub reason: PauseReason,
    /// Until when; [`Timestamp::MAX`]: forever.
    pub until: Timestamp,
}

/// The guardrails of one loop, and what they have counted.
#[derive(Clone, Debug)]
pub struct GuardrailReplay {
    settings: EngineSettings,
    used: ResourceTracker,
    counters: StreakCounters,
    pause: Option<ReplayedPause>,
}

impl GuardrailReplay {
    /// A loop that has done nothing yet.
    #[must_use]
    pub fn new(settings: EngineSettings) -> Self {
        Self {
            settings,
            used: ResourceTracker::default(),
            counters: StreakCounters::default(),
            pause: None,
        }
    }

    /// Whether a turn that has made this many calls would have ended before the next one.
    #[must_use]
    pub fn ends_turn(&self, calls: u32) -> bool {
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_call(&self.settings, calls);
        calls > 0 && guardrails::ALL.iter().find_map(ask).is_some()
    }

    /// The pause that holds a model call at this time.
    pub fn holds_call(&mut self, now: Timestamp) -> Option<ReplayedPause> {
        self.end_pause(now);
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_attempt(&self.settings, &self.used, now);
        let trip = guardrails::ALL.iter().find_map(ask);
        self.raise(trip, now);
        self.pause.or_else(|| self.closed(now))
    }

    /// The limits that depend on the clock alone.
    fn closed(&self, now: Timestamp) -> Option<ReplayedPause> {
        guardrails::ALL.iter().find_map(|guardrail| {
            let decision = guardrail.by_clock(&self.settings, now)?;
            Some(ReplayedPause {
                reason: decision.reason,
                until: decision.closed?.until.unwrap_or(Timestamp::MAX),
            })
        })
    }

    /// A model call began.
    pub fn count_call(&mut self, now: Timestamp) {
        self.count(LimitedResource::LLMCalls, 1, now);
    }

    /// The answer of a model call used this many tokens.
    pub fn count_tokens(&mut self, tokens: u64, now: Timestamp) {
        self.count(LimitedResource::LLMTokens, tokens, now);
    }

    /// A tool run with side effects is due. Returns the pause that would have begun; the run is counted at its end.
    pub fn run_action(&mut self, now: Timestamp) -> Option<ReplayedPause> {
        self.end_pause(now);
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_action(&self.settings, &self.used, now);
        let trips = guardrails::ALL.iter().filter_map(ask);
        let trip = trips.max_by_key(|trip| trip.wait);
        let pause = self.raise(trip, now);
        self.count(LimitedResource::Actions, 1, pause.map_or(now, |pause| pause.until));
        pause
    }

    /// A tool run of a turn ended. Returns the pause that would have begun.
    pub fn end_tool_run(&mut self, tool: &str, outcome: OutcomeKind, now: Timestamp) -> Option<ReplayedPause> {
        self.end_pause(now);
        let run = EndedToolRun {
            tool,
            outcome,
            result: "",
            in_counted_turn: true,
            of_mode: true,
            at: now,
        };
        let mut trip = None;
        for guardrail in guardrails::ALL {
            trip = trip.or(guardrail.after_tool_run(&self.settings, &mut self.counters, &run));
        }
        self.raise(trip, now)
    }

    /// A turn was completed, and the agent chose to sleep this long. Returns the pause that would have begun.
    pub fn complete_turn(&mut self, sleep: Option<SignedDuration>, now: Timestamp) -> Option<ReplayedPause> {
        self.end_pause(now);
        let rest = match sleep {
            Some(sleep) => self.counters.rest.rested(sleep.min(self.settings.max_sleep)),
            None => RestKind::None,
        };
        let mut trip = None;
        for guardrail in guardrails::ALL {
            trip = trip.or(guardrail.after_turn(&self.settings, &mut self.counters, rest));
        }
        self.raise(trip, now)
    }

    fn count(&mut self, resource: LimitedResource, amount: u64, now: Timestamp) {
        self.used.count(&self.settings.windows(), resource, amount, now);
    }

    fn raise(&mut self, trip: Option<TrippedGuardrail>, now: Timestamp) -> Option<ReplayedPause> {
        let trip = trip?;
        let pause = ReplayedPause {
            reason: trip.reason,
            until: time_math::after(now, trip.wait),
        };
        if self.pause.is_none_or(|held| held.until < pause.until) {
            self.pause = Some(pause);
        }
        Some(pause)
    }

    fn end_pause(&mut self, now: Timestamp) {
        let Some(over) = self.pause.take_if(|pause| pause.until <= now) else {
            return;
        };
        for guardrail in guardrails::ALL {
            guardrail.cleared(over.reason, &mut self.counters);
        }
    }
}
