//! Pauses: how each reason is raised, and the one rule by which it clears.

pub mod budget;

use jiff::{SignedDuration, Timestamp};
use strum::IntoEnumIterator;

use crate::effects::{EffectBuffer, journal_line};
use crate::guardrails::{self, ClockDecision, ClockPause, Guardrail, TrippedGuardrail};
use crate::machine::Engine;
use crate::snapshot::{ActivePause, CauseKind};
use crate::{RecordKind, retry, time_math};
use agentloop_api::pause::{CooldownCause, PauseEnd, PauseReason};

const FIRST_COOLDOWN: SignedDuration = SignedDuration::from_secs(60);
const LONGEST_COOLDOWN: SignedDuration = SignedDuration::from_hours(1);
/// Refused turns in a row after which the loop pauses.
pub const MOST_REFUSALS: u32 = 2;
/// Crashes within one turn after which the loop pauses.
pub const MAX_CRASHES: u32 = 3;

impl Engine {
    /// Holds the loop until the reason clears.
    pub(crate) fn raise_pause(&mut self, reason: PauseReason, until: Option<Timestamp>, message: String) {
        let hold = ActivePause {
            until,
            message,
            probe: None,
        };
        self.state.reasons.insert(reason, hold);
    }

    pub(crate) fn raise_guardrail_pause(&mut self, trip: TrippedGuardrail, out: &EffectBuffer) {
        self.raise_pause(trip.reason, Some(time_math::after(out.now, trip.wait)), trip.message);
    }

    /// Clears the pauses whose end has come.
    pub(crate) fn clear_expired(&mut self, now: Timestamp) {
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

    /// Evaluates the guardrails that depend only on the clock. Their reasons are levels, set again on each input.
    pub(crate) fn check_clock_guardrails(&mut self, now: Timestamp) {
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

    /// The guardrail that holds the next attempt at a call, if any.
    pub(crate) fn trip_before_attempt(&self, now: Timestamp) -> Option<TrippedGuardrail> {
        let ask = |guardrail: &&dyn Guardrail| guardrail.before_attempt(&self.settings, &self.state.used, now);
        guardrails::ALL.iter().find_map(ask)
    }

    /// Checks the guardrails before an attempt. False: the attempt waits.
    pub(crate) fn may_attempt(&mut self, out: &EffectBuffer) -> bool {
        match self.trip_before_attempt(out.now) {
            Some(trip) => {
                self.raise_guardrail_pause(trip, out);
                false
            }
            None => true,
        }
    }

    /// The guardrails that hold the next tool run with side effects.
    pub(crate) fn trips_before_action(&self, now: Timestamp) -> impl Iterator<Item = TrippedGuardrail> {
        let ask = move |guardrail: &&dyn Guardrail| guardrail.before_action(&self.settings, &self.state.used, now);
        guardrails::ALL.iter().filter_map(ask)
    }

    /// Whether `guardrails.rateLimits` still hold what they paused: a tool run if the turn waits for one, otherwise a
    /// call.
    pub(crate) fn trip_of_window(&self, now: Timestamp) -> Option<TrippedGuardrail> {
        if self.tool_batch().is_none() {
            return self.trip_before_attempt(now);
        }
        let mut trips = self.trips_before_action(now);
        trips.find(|trip| trip.reason == PauseReason::RateWindow)
    }

    /// Evaluates a rate-limit pause again, since the spec or the clock may have changed what it waits for.
    pub(crate) fn recheck_rate_limits(&mut self, out: &EffectBuffer) {
        if !self.state.reasons.contains_key(&PauseReason::RateWindow) {
            return;
        }
        match self.trip_of_window(out.now) {
            Some(trip) => self.raise_guardrail_pause(trip, out),
            None => self.clear_pause(PauseReason::RateWindow),
        }
    }

    pub(crate) fn clear_pause(&mut self, reason: PauseReason) {
        if self.state.reasons.remove(&reason).is_none() {
            return;
        }
        if let PauseEnd::Cooldown(cause) = reason.facts().end {
            self.count_anew(cause);
        }
        for guardrail in guardrails::ALL {
            guardrail.cleared(reason, &mut self.state.counters);
        }
        if self.state.turn.is_none() && self.mode().sleep().is_none() {
            let over = format!("a pause ({reason}) is over");
            let briefing = &mut self.state.briefing;
            match briefing.cause_kind {
                CauseKind::Loop | CauseKind::Pause => briefing.set_cause(CauseKind::Pause, over),
                // If a sleep ended during the pause, its cause tells the model more.
                CauseKind::Event => self.add_note(&over),
            }
        }
    }

    /// The request `resume`, once per token: it ends the cool-downs after errors, crashes and refusals, what a person had to
    /// look at first, and the wait for a model or light model that cannot be used, and nothing else.
    pub(crate) fn resume_requested(&mut self, token: String, out: &mut EffectBuffer) {
        if self.state.handled.resume.as_ref() == Some(&token) {
            return;
        }
        self.state.handled.resume = Some(token);
        out.record(journal_line(RecordKind::RequestHandled, self.turn_number(), "resume"));
        for reason in PauseReason::iter().filter(|reason| reason.facts().ends_on_resume) {
            if let PauseEnd::Cooldown(cause) = reason.facts().end
                && self.state.reasons.contains_key(&reason)
            {
                self.shorten_cooldowns(cause);
            }
            self.clear_pause(reason);
        }
        self.retry_light_model(out.now);
    }

    /// After a cool-down: what led to it has to happen as often again before the next one. Refusals are the exception: each
    /// further one in a row brings a longer cool-down.
    fn count_anew(&mut self, cause: CooldownCause) {
        match cause {
            CooldownCause::Errors => self.state.counters.errors = 0,
            CooldownCause::Crashes => {
                if let Some(turn) = &mut self.state.turn {
                    turn.crashes = 0;
                }
            }
            CooldownCause::Refusals => {}
        }
    }

    /// The next cool-down of this cause is as short as the first.
    fn shorten_cooldowns(&mut self, cause: CooldownCause) {
        let counters = &mut self.state.counters;
        match cause {
            CooldownCause::Errors => counters.error_cooldowns = 0,
            CooldownCause::Crashes => counters.crash_cooldowns = 0,
            CooldownCause::Refusals => counters.refusals = 0,
        }
    }

    /// Contact with the controller is lost: nothing new starts until it is restored, however long that takes.
    pub(crate) fn link_lost(&mut self) {
        self.link_silent = true;
        let message =
            "no contact with the controller for the whole run lease; the loop resumes when contact is restored";
        self.raise_pause(PauseReason::LinkLost, None, message.to_owned());
    }

    pub(crate) fn link_back(&mut self) {
        self.link_silent = false;
        self.clear_pause(PauseReason::LinkLost);
    }

    /// The gateway refused a call because it has no link, before the worker was notified. The pause ends after
    /// [`retry::LINK_PROBE`], so that a link that was restored unnoticed does not hold the loop forever.
    pub(crate) fn link_refused(&mut self, out: &EffectBuffer) {
        if !self.state.reasons.contains_key(&PauseReason::LinkLost) {
            let message = "the gateway has no contact with the controller and made no call; the call is retried";
            let until = time_math::after(out.now, retry::LINK_PROBE);
            self.raise_pause(PauseReason::LinkLost, Some(until), message.to_owned());
        }
    }

    /// After a failed turn: starts a cool-down once the limit of failed turns in a row is reached.
    pub(crate) fn check_error_limit(&mut self, last: &str, out: &EffectBuffer) {
        let counters = &mut self.state.counters;
        if counters.errors < self.settings.max_consecutive_errors.max(1) {
            return;
        }
        let wait = time_math::doubled(FIRST_COOLDOWN, counters.error_cooldowns, LONGEST_COOLDOWN);
        counters.error_cooldowns = counters.error_cooldowns.saturating_add(1);
        let message = format!(
            "{} turns in a row failed (loop.maxConsecutiveErrors), the last one: {last}. The loop resumes after a \
             cool-down; the annotation agentloop.dev/resume ends it at once",
            counters.errors
        );
        self.raise_pause(
            PauseReason::ConsecutiveErrors,
            Some(time_math::after(out.now, wait)),
            message,
        );
    }

    /// After a refused turn: starts a cool-down from the second in a row on, since an immediate retry only costs money.
    pub(crate) fn check_refusals(&mut self, out: &EffectBuffer) {
        let Some(earlier) = self.state.counters.refusals.checked_sub(MOST_REFUSALS) else {
            return;
        };
        let wait = time_math::doubled(FIRST_COOLDOWN, earlier, LONGEST_COOLDOWN);
        let message = format!(
            "the model or its provider refused {} turns in a row. Check the instructions, what its tools and Sensors \
             return, and the provider's content filters. The loop resumes after a cool-down; the annotation \
             agentloop.dev/resume ends it at once",
            self.state.counters.refusals
        );
        self.raise_pause(
            PauseReason::ModelRefused,
            Some(time_math::after(out.now, wait)),
            message,
        );
    }

    /// The worker ended during a turn. A turn that crashes the worker repeatedly must not be retried forever.
    pub(crate) fn count_crash(&mut self, out: &EffectBuffer) {
        let Some(turn) = &mut self.state.turn else {
            return;
        };
        turn.crashes = turn.crashes.saturating_add(1);
        if turn.crashes < MAX_CRASHES {
            return;
        }
        let message = format!(
            "the worker ended {} times during turn {}. Check the log of the pod's previous containers; the \
             loop resumes after a cool-down; the annotation agentloop.dev/resume ends it at once",
            turn.crashes, turn.number
        );
        let counters = &mut self.state.counters;
        let wait = time_math::doubled(FIRST_COOLDOWN, counters.crash_cooldowns, LONGEST_COOLDOWN);
        counters.crash_cooldowns = counters.crash_cooldowns.saturating_add(1);
        self.raise_pause(PauseReason::CrashLoop, Some(time_math::after(out.now, wait)), message);
    }

    /// The longest pause for this reason, if it ends at a time of this machine's clock. `None`: budgets reset by the
    /// leader's clock, and the other reasons are re-evaluated or need a person.
    pub(crate) fn longest_hold(&self, reason: PauseReason) -> Option<SignedDuration> {
        match reason.facts().end {
            PauseEnd::ForcedSleep => Some(self.settings.max_sleep),
            PauseEnd::ActionWindow => Some(guardrails::LONGEST_HOLD_OF_ACTIONS),
            PauseEnd::NextAttempt => Some(retry::LONGEST_RETRY_AFTER),
            PauseEnd::Contact => Some(retry::LINK_PROBE),
            PauseEnd::Cooldown(_) => Some(LONGEST_COOLDOWN),
            PauseEnd::Spec | PauseEnd::Recheck | PauseEnd::Room { .. } | PauseEnd::User => None,
        }
    }
}
