//! Reasons that hold the loop: how each is raised, and the one rule by which each clears.

use jiff::{SignedDuration, Timestamp};

use super::effects::{EffectBuffer, journal_line};
use super::guardrails::{self, ClockDecision, ClockPause, Guardrail, TrippedGuardrail};
use super::machine::Engine;
use super::snapshot::ActivePause;
use super::{RecordKind, prompt, retry, time_math};
use crate::api::status::PauseReason;

const FIRST_COOLDOWN: SignedDuration = SignedDuration::from_secs(60);
const LONGEST_COOLDOWN: SignedDuration = SignedDuration::from_hours(1);
/// Refused turns in a row until the loop pauses.
pub const MOST_REFUSALS: u32 = 2;
/// Crashes in one turn until the loop pauses.
pub const MAX_CRASHES: u32 = 3;

/// Whether a reason is a limit that was reached, and not trouble outside or a person's wish.
pub const fn is_guardrail(reason: PauseReason) -> bool {
    match reason {
        PauseReason::MaxConsecutiveTurns
        | PauseReason::ActionsPerMinute
        | PauseReason::RateWindow
        | PauseReason::OutsideActiveHours
        | PauseReason::BudgetExhausted
        | PauseReason::TokensPerHour
        | PauseReason::TotalTokens
        | PauseReason::TotalCost
        | PauseReason::CallExceedsLimit
        | PauseReason::BudgetAsk
        | PauseReason::ConsecutiveErrors
        | PauseReason::CrashLoop
        | PauseReason::LoopDetected => true,
        PauseReason::ProviderRateLimit
        | PauseReason::ModelUnreachable
        | PauseReason::AuthenticationFailed
        | PauseReason::QuotaExceeded
        | PauseReason::ModelRefused
        | PauseReason::LinkLost
        | PauseReason::SuspendedBySpec
        | PauseReason::BudgetUnavailable
        | PauseReason::BoundViolated => false,
    }
}

impl Engine {
    /// The loop may not go on until the reason clears.
    pub(super) fn raise_pause(&mut self, reason: PauseReason, until: Option<Timestamp>, message: String) {
        let hold = ActivePause {
            until,
            message,
            probe: None,
        };
        self.state.reasons.insert(reason, hold);
    }

    /// A guardrail was reached.
    pub(super) fn raise_guardrail_pause(&mut self, trip: TrippedGuardrail, out: &EffectBuffer) {
        self.raise_pause(trip.reason, Some(time_math::after(out.now, trip.wait)), trip.message);
    }

    /// Clears the reasons whose moment has come.
    pub(super) fn clear_expired(&mut self, now: Timestamp) {
        let over = |hold: &ActivePause| hold.ends().is_some_and(|end| end <= now);
        let expired: Vec<PauseReason> = self
            .state
            .reasons
            .iter()
            .filter(|(_, hold)| over(hold))
            .map(|(reason, _)| *reason)
            .collect();
        for reason in expired {
            self.clear_pause(reason);
        }
    }

    /// Asks the guardrails that depend on the clock alone: their reasons are levels.
    pub(super) fn check_clock_guardrails(&mut self, now: Timestamp) {
        self.clock_changes = None;
        for guardrail in guardrails::ALL {
            let Some(ClockDecision {
                reason,
                closed,
                changes,
            }) = guardrail.by_clock(&self.settings, now)
            else {
                continue;
            };
            match closed {
                Some(ClockPause { until, message }) => self.raise_pause(reason, until, message),
                None => self.clear_pause(reason),
            }
            self.clock_changes = self.clock_changes.into_iter().chain(changes).min();
        }
    }

    /// Whether a guardrail holds the next attempt at a call, which then waits.
    pub(super) fn trip_before_attempt(&self, now: Timestamp) -> Option<TrippedGuardrail> {
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_attempt(&self.settings, &self.state.used, now);
        guardrails::ALL.iter().find_map(ask)
    }

    /// Asks before an attempt. False: it waits.
    pub(super) fn may_attempt(&mut self, out: &EffectBuffer) -> bool {
        match self.trip_before_attempt(out.now) {
            Some(trip) => {
                self.raise_guardrail_pause(trip, out);
                false
            }
            None => true,
        }
    }

    /// The guardrails that hold a tool run with side effects, which then waits.
    pub(super) fn trips_before_action(&self, now: Timestamp) -> impl Iterator<Item = TrippedGuardrail> {
        let ask = move |guardrail: &&dyn Guardrail| guardrail.before_action(&self.settings, &self.state.used, now);
        guardrails::ALL.iter().filter_map(ask)
    }

    /// Whether `guardrails.rateLimits` still hold what they hold: a tool run where the turn waits for one, else a call.
    pub(super) fn trip_of_window(&self, now: Timestamp) -> Option<TrippedGuardrail> {
        if self.tool_batch().is_none() {
            return self.trip_before_attempt(now);
        }
        let mut trips = self.trips_before_action(now);
        trips.find(|trip| trip.reason == PauseReason::RateWindow)
    }

    /// What is held is asked for again, since what it waits for may have changed with the spec or the clock.
    pub(super) fn recheck_rate_limits(&mut self, out: &EffectBuffer) {
        if !self.state.reasons.contains_key(&PauseReason::RateWindow) {
            return;
        }
        match self.trip_of_window(out.now) {
            Some(trip) => self.raise_guardrail_pause(trip, out),
            None => self.clear_pause(PauseReason::RateWindow),
        }
    }

    pub(super) fn clear_pause(&mut self, reason: PauseReason) {
        if self.state.reasons.remove(&reason).is_none() {
            return;
        }
        match reason {
            PauseReason::ConsecutiveErrors => self.state.counters.errors = 0,
            PauseReason::CrashLoop => {
                if let Some(turn) = &mut self.state.turn {
                    turn.crashes = 0;
                }
            }
            PauseReason::MaxConsecutiveTurns
            | PauseReason::ActionsPerMinute
            | PauseReason::RateWindow
            | PauseReason::OutsideActiveHours
            | PauseReason::ProviderRateLimit
            | PauseReason::ModelUnreachable
            | PauseReason::AuthenticationFailed
            | PauseReason::QuotaExceeded
            | PauseReason::ModelRefused
            | PauseReason::LinkLost
            | PauseReason::SuspendedBySpec
            | PauseReason::BudgetExhausted
            | PauseReason::TokensPerHour
            | PauseReason::TotalTokens
            | PauseReason::TotalCost
            | PauseReason::CallExceedsLimit
            | PauseReason::BudgetAsk
            | PauseReason::BudgetUnavailable
            | PauseReason::BoundViolated
            | PauseReason::LoopDetected => {}
        }
        for guardrail in guardrails::ALL {
            guardrail.cleared(reason, &mut self.state.counters);
        }
        if self.state.turn.is_none() && self.state.sleep.is_none() {
            let over = format!("a pause ({reason}) is over");
            let briefing = &mut self.state.briefing;
            // What ended a sleep meanwhile says more.
            if [prompt::GOES_ON, prompt::STARTS].contains(&&*briefing.cause) || briefing.cause.starts_with("a pause (")
            {
                briefing.cause = over;
            } else {
                self.add_note(&over);
            }
        }
    }

    /// The request `resume`, once per token: it ends the cool-downs after errors, crashes and refusals, what a person had to
    /// look at first, and the wait for a model that cannot be used, and nothing else.
    pub(super) fn resume_requested(&mut self, token: String, out: &mut EffectBuffer) {
        if self.state.handled.resume.as_ref() == Some(&token) {
            return;
        }
        self.state.handled.resume = Some(token);
        out.record(journal_line(RecordKind::RequestHandled, self.turn_number(), "resume"));
        if self.state.reasons.contains_key(&PauseReason::ConsecutiveErrors) {
            self.clear_pause(PauseReason::ConsecutiveErrors);
            self.state.counters.error_cooldowns = 0;
        }
        if self.state.reasons.contains_key(&PauseReason::CrashLoop) {
            self.clear_pause(PauseReason::CrashLoop);
            self.state.counters.crash_cooldowns = 0;
        }
        if self.state.reasons.contains_key(&PauseReason::ModelRefused) {
            self.clear_pause(PauseReason::ModelRefused);
            self.state.counters.refusals = 0;
        }
        for reason in [
            PauseReason::BoundViolated,
            PauseReason::LoopDetected,
            PauseReason::ModelUnreachable,
            PauseReason::AuthenticationFailed,
            PauseReason::QuotaExceeded,
        ] {
            self.clear_pause(reason);
        }
    }

    /// No contact with the controller: nothing new starts until it is back, however long that takes.
    pub(super) fn link_lost(&mut self) {
        self.link_silent = true;
        let message = "no contact with the controller for the whole run lease; the loop goes on when it is back";
        self.raise_pause(PauseReason::LinkLost, None, message.to_owned());
    }

    /// Contact again.
    pub(super) fn link_back(&mut self) {
        self.link_silent = false;
        self.clear_pause(PauseReason::LinkLost);
    }

    /// The gateway refused a call for want of the link, before the worker was told of it. The reason ends by itself
    /// so that a link that came back unseen does not hold the loop for ever.
    pub(super) fn link_refused(&mut self, out: &EffectBuffer) {
        if !self.state.reasons.contains_key(&PauseReason::LinkLost) {
            let message = "the gateway has no contact with the controller and made no call; the call is tried again";
            let until = time_math::after(out.now, retry::LINK_PROBE);
            self.raise_pause(PauseReason::LinkLost, Some(until), message.to_owned());
        }
    }

    /// A turn has failed: at the limit of failures in a row the loop cools down.
    pub(super) fn check_error_limit(&mut self, last: &str, out: &EffectBuffer) {
        let counters = &mut self.state.counters;
        if counters.errors < self.settings.max_consecutive_errors.max(1) {
            return;
        }
        let wait = time_math::doubled(FIRST_COOLDOWN, counters.error_cooldowns, LONGEST_COOLDOWN);
        counters.error_cooldowns = counters.error_cooldowns.saturating_add(1);
        let message = format!(
            "{} turns in a row failed (loop.maxConsecutiveErrors), the last one: {last}. The loop goes on after a \
             cool-down; the annotation agentloop.dev/resume ends it at once",
            counters.errors
        );
        self.raise_pause(
            PauseReason::ConsecutiveErrors,
            Some(time_math::after(out.now, wait)),
            message,
        );
    }

    /// The model refused a turn: from the second in a row on the loop cools down, since asking again at once only costs.
    pub(super) fn check_refusals(&mut self, out: &EffectBuffer) {
        let Some(earlier) = self.state.counters.refusals.checked_sub(MOST_REFUSALS) else {
            return;
        };
        let wait = time_math::doubled(FIRST_COOLDOWN, earlier, LONGEST_COOLDOWN);
        let message = format!(
            "the model or its provider refused {} turns in a row. Look at the instructions, at what its tools and Sensors \
             show it, and at the provider's filters. The loop goes on after a cool-down; the annotation \
             agentloop.dev/resume ends it at once",
            self.state.counters.refusals
        );
        self.raise_pause(
            PauseReason::ModelRefused,
            Some(time_math::after(out.now, wait)),
            message,
        );
    }

    /// The worker ended in the middle of a turn: a turn that does so again and again must not go on for ever.
    pub(super) fn count_crash(&mut self, out: &EffectBuffer) {
        let Some(turn) = &mut self.state.turn else {
            return;
        };
        turn.crashes = turn.crashes.saturating_add(1);
        if turn.crashes < MAX_CRASHES {
            return;
        }
        let message = format!(
            "the worker ended {} times in the middle of turn {}. Look at the log of the pod's previous containers; the \
             loop goes on after a cool-down, the annotation agentloop.dev/resume ends it at once",
            turn.crashes, turn.number
        );
        let counters = &mut self.state.counters;
        let wait = time_math::doubled(FIRST_COOLDOWN, counters.crash_cooldowns, LONGEST_COOLDOWN);
        counters.crash_cooldowns = counters.crash_cooldowns.saturating_add(1);
        self.raise_pause(PauseReason::CrashLoop, Some(time_math::after(out.now, wait)), message);
    }

    /// The longest that a reason holds, when it clears by itself and by this machine's clock. Room in a budget comes by
    /// the leader's.
    pub(super) fn longest_hold(&self, reason: PauseReason) -> Option<SignedDuration> {
        match reason {
            PauseReason::MaxConsecutiveTurns | PauseReason::LoopDetected => Some(self.settings.max_sleep),
            PauseReason::ActionsPerMinute => Some(guardrails::LONGEST_HOLD_OF_ACTIONS),
            PauseReason::ProviderRateLimit
            | PauseReason::ModelUnreachable
            | PauseReason::AuthenticationFailed
            | PauseReason::QuotaExceeded => Some(retry::LONGEST_RETRY_AFTER),
            PauseReason::LinkLost => Some(retry::LINK_PROBE),
            PauseReason::ConsecutiveErrors | PauseReason::CrashLoop | PauseReason::ModelRefused => {
                Some(LONGEST_COOLDOWN)
            }
            PauseReason::SuspendedBySpec
            | PauseReason::RateWindow
            | PauseReason::OutsideActiveHours
            | PauseReason::BudgetExhausted
            | PauseReason::TokensPerHour
            | PauseReason::TotalTokens
            | PauseReason::TotalCost
            | PauseReason::CallExceedsLimit
            | PauseReason::BudgetAsk
            | PauseReason::BudgetUnavailable
            | PauseReason::BoundViolated => None,
        }
    }
}
