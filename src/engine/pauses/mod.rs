//! Pauses: how each reason is raised, and the one rule by which it clears.

pub mod budget;
pub mod cooldowns;
pub mod holds;

use jiff::{SignedDuration, Timestamp};
use strum::IntoEnumIterator;

use self::budget::{BudgetState, PROBE_DELAY, PROBE_INTERVAL, ProbeState, budget_stop_failure, is_worth_probing};
use self::holds::waits_for_room;
use crate::effects::{EffectBuffer, call_line, journal_line};
use crate::guardrails::{self, ClockDecision, ClockPause, EndedToolRun, Guardrail, TrippedGuardrail};
use crate::machine::Engine;
use crate::settings::EngineSettings;
use crate::snapshot::CauseKind;
use crate::{EngineEffect, RecordKind, retry, time_math};
use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_api::pause::{PauseEnd, PauseReason};
use agentloop_support::text::counted;

const FIRST_COOLDOWN: SignedDuration = SignedDuration::from_secs(60);
const MAX_COOLDOWN: SignedDuration = SignedDuration::from_hours(1);
/// Refused turns in a row after which the loop pauses.
pub const MAX_REFUSALS: u32 = 2;
/// Crashes within one turn after which the loop pauses: restarts of the worker within a pod.
pub const MAX_CRASHES: u32 = 3;

impl Engine {
    /// Holds the loop until the reason clears.
    pub(crate) fn raise_pause(&mut self, reason: PauseReason, until: Option<Timestamp>, message: String) {
        self.state.reasons.raise(reason, until, message);
    }

    pub(crate) fn raise_guardrail_pause(&mut self, trip: TrippedGuardrail, out: &EffectBuffer) {
        self.raise_pause(trip.reason, Some(time_math::after(out.now, trip.wait)), trip.message);
    }

    /// Clears the pauses whose end has come.
    pub(crate) fn clear_expired(&mut self, now: Timestamp) {
        let expired = self.state.reasons.expired(now);
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

    /// After a tool run: pauses the loop if a guardrail trips.
    pub(crate) fn check_ended_run(&mut self, run: &EndedToolRun<'_>, out: &EffectBuffer) {
        for guardrail in guardrails::ALL {
            if let Some(trip) = guardrail.after_tool_run(&self.settings, &mut self.state.counters, run) {
                self.raise_guardrail_pause(trip, out);
            }
        }
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
        if !self.state.reasons.has(PauseReason::RateWindow) {
            return;
        }
        match self.trip_of_window(out.now) {
            Some(trip) => self.raise_guardrail_pause(trip, out),
            None => self.clear_pause(PauseReason::RateWindow),
        }
    }

    pub(crate) fn clear_pause(&mut self, reason: PauseReason) {
        if !self.state.reasons.remove(reason) {
            return;
        }
        self.state.counters.streaks.cooled_down(reason);
        if let (PauseReason::CrashLoop, Some(turn)) = (reason, &mut self.state.turn) {
            turn.reset_crashes();
        }
        for guardrail in guardrails::ALL {
            guardrail.cleared(reason, &mut self.state.counters);
        }
        if self.state.turn.is_none() && self.mode().sleep().is_none() {
            let over = format!("a pause ({reason}) is over");
            let briefing = &mut self.state.briefing;
            match briefing.cause_kind() {
                CauseKind::Loop | CauseKind::Pause => briefing.set_cause(CauseKind::Pause, over),
                // If a sleep ended during the pause, its cause says more to the model.
                CauseKind::Event => self.add_note(&over),
            }
        }
    }

    /// The request `resume`, once per token: it ends the cool-downs after errors, crashes and refusals, what a person had to
    /// look at first, and the wait for a model or light model that cannot be used, and nothing else.
    pub(crate) fn resume_requested(&mut self, token: String, out: &mut EffectBuffer) {
        // A loop that is about to end leaves the request open: it starts the loop again.
        if self.state.handled.resume.as_ref() == Some(&token) || self.state.life.outcome().is_some() {
            return;
        }
        self.state.life.withdraw_stop_request();
        self.state.handled.resume = Some(token);
        out.record(journal_line(RecordKind::RequestHandled, self.turn_number(), "resume"));
        for reason in PauseReason::iter().filter(|reason| reason.facts().ends_on_resume) {
            if self.state.reasons.has(reason) {
                self.state.counters.streaks.end(reason);
            }
            self.clear_pause(reason);
        }
        self.retry_light_model(out.now);
    }

    /// Contact with the controller is lost: nothing new starts until it is restored, however long that takes.
    pub(crate) fn link_lost(&mut self) {
        self.state.reasons.set_link_silent(true);
        let message =
            "no contact with the controller for the whole run lease; the loop resumes when contact is restored";
        self.raise_pause(PauseReason::LinkLost, None, message.to_owned());
    }

    pub(crate) fn link_back(&mut self) {
        self.state.reasons.set_link_silent(false);
        self.clear_pause(PauseReason::LinkLost);
    }

    /// The gateway refused a call because it has no link, before the worker was notified. The pause ends after
    /// [`retry::LINK_PROBE`], so that a link that was restored unnoticed does not hold the loop forever.
    pub(crate) fn link_refused(&mut self, out: &EffectBuffer) {
        if !self.state.reasons.has(PauseReason::LinkLost) {
            let message = "the gateway has no contact with the controller and made no call; the call is retried";
            let until = time_math::after(out.now, retry::LINK_PROBE);
            self.raise_pause(PauseReason::LinkLost, Some(until), message.to_owned());
        }
    }

    /// After a failed turn: starts a cool-down once the limit of failed turns in a row is reached.
    pub(crate) fn check_error_limit(&mut self, last: &str, out: &EffectBuffer) {
        let (reason, limit) = (PauseReason::ConsecutiveErrors, self.settings.max_consecutive_errors);
        let streaks = &mut self.state.counters.streaks;
        let Some(wait) = streaks.cooldown_at(reason, limit) else {
            return;
        };
        let message = format!(
            "{} in a row failed (loop.maxConsecutiveErrors), the last one: {last}. The loop resumes after a \
             cool-down; the annotation agentloop.dev/resume ends it at once",
            counted(streaks.count(reason), "turn", "turns")
        );
        self.raise_pause(reason, Some(time_math::after(out.now, wait)), message);
    }

    /// After a refused turn: starts a cool-down from the second in a row on, since an immediate retry only costs money.
    pub(crate) fn check_refusals(&mut self, out: &EffectBuffer) {
        let reason = PauseReason::ModelRefused;
        let streaks = &mut self.state.counters.streaks;
        let Some(wait) = streaks.cooldown_at(reason, MAX_REFUSALS) else {
            return;
        };
        let refusals = streaks.count(reason);
        let message = format!(
            "the model or its provider refused {refusals} turns in a row. Check the instructions, what its tools and Sensors \
             return, and the provider's content filters. The loop resumes after a cool-down; the annotation \
             agentloop.dev/resume ends it at once"
        );
        self.raise_pause(reason, Some(time_math::after(out.now, wait)), message);
    }

    /// The worker crashed during a turn, and its pod restarted it. A turn that crashes the worker repeatedly must not be
    /// retried forever.
    pub(crate) fn count_crash(&mut self, out: &mut EffectBuffer) {
        let Some(turn) = &mut self.state.turn else {
            return;
        };
        let crashes = turn.count_crash();
        if crashes < MAX_CRASHES {
            return;
        }
        if turn.rules().works_on_task {
            // Others wait for theirs.
            let message = format!("the worker ended {crashes} times during the task");
            self.fail_turn(CallFailure::new(FailureKind::BadResponse, message), out);
            return;
        }
        let message = format!(
            "the worker ended {crashes} times during turn {}. Check the log of the pod's previous containers; the \
             loop resumes after a cool-down; the annotation agentloop.dev/resume ends it at once",
            turn.number()
        );
        let wait = self.state.counters.streaks.cooldown(PauseReason::CrashLoop);
        self.raise_pause(PauseReason::CrashLoop, Some(time_math::after(out.now, wait)), message);
    }

    pub(crate) fn budget_changed(&mut self, budget: BudgetState, out: &mut EffectBuffer) {
        if budget == self.state.budget {
            return;
        }
        let before = std::mem::replace(&mut self.state.budget, budget);
        if before.revision != self.state.budget.revision {
            self.state.reasons.probe_at(out.now);
        }
        if let Some(message) = self.state.budget.stop.clone() {
            self.cancel_for_budget(message, out);
        }
    }

    /// Handles a refusal by a limit on spending. `asked_under`: the revision of the budget when the call was sent.
    pub(crate) fn handle_budget_refusal(
        &mut self,
        reason: PauseReason,
        failure: CallFailure,
        asked_under: u64,
        out: &mut EffectBuffer,
    ) {
        if let (FailureKind::CallExceedsLimit, Some(compaction)) = (failure.kind, self.compaction()) {
            self.shorten_compaction(compaction, out);
            return;
        }
        let limit = self
            .state
            .budget
            .tokens
            .filter(|_| self.state.turn.is_some() && !self.turn_rules().own_session);
        // A prompt that exceeds a whole limit never fits: shrink it instead of waiting.
        if let (FailureKind::CallExceedsLimit, Some(limit)) = (failure.kind, limit)
            && self.shrink_for_limit(limit, out)
        {
            return;
        }
        let is_current = asked_under == self.state.budget.revision;
        if self.turn_rules().works_on_task && failure.kind == FailureKind::CallExceedsLimit && is_current {
            // It can never fit, however long the tasks behind it wait. Theirs may fit: their calls find out.
            self.clear_probed_pauses();
            self.fail_turn(failure, out);
            return;
        }
        // If several limits refuse, only the latest one is shown.
        self.state.reasons.remove_waits_for_room();
        let probe = if !waits_for_room(reason) {
            None
        } else if !is_current {
            // The refusal may refer to the previous state of the budget.
            Some(ProbeState::At(time_math::after(out.now, PROBE_DELAY)))
        } else if failure.resumes_at.is_none() && is_worth_probing(reason) && !self.state.budget.held {
            Some(ProbeState::At(time_math::after(out.now, PROBE_INTERVAL)))
        } else {
            None
        };
        let until = failure.resumes_at.filter(|_| waits_for_room(reason));
        self.state.reasons.raise_probed(reason, until, failure.message, probe);
    }

    /// The call in flight ended without a refusal, so there was room for it.
    pub(crate) fn clear_probed_pauses(&mut self) {
        let reasons = self.state.reasons.probed();
        for reason in reasons {
            self.clear_pause(reason);
        }
    }

    /// Whether a spent budget with `onExhausted: Stop` stops the loop.
    pub(crate) fn is_stopped_by_budget(&self) -> bool {
        self.state.budget.stop.is_some() && self.state.reasons.has(PauseReason::BudgetExhausted)
    }

    /// Cancels the call in flight. Its answer is lost but its cost counts; the same call is made again once there is
    /// room. Read-only tool runs are cancelled too; others finish, and no new one starts.
    fn cancel_for_budget(&mut self, message: String, out: &mut EffectBuffer) {
        let (refusal, now_under) = (budget_stop_failure(message), self.state.budget.revision);
        let call = self.call_in_flight();
        let has_runs = !self.running.is_empty();
        if let Some(call) = call {
            out.push(EngineEffect::CancelCall { call });
            self.in_flight = false;
            self.close_attempt(out);
            let note = FailureKind::BudgetExhausted.as_ref();
            out.record(call_line(RecordKind::CallFailed, call, note, Vec::new()));
        } else if self.tool_batch().is_some() {
            self.cancel_runs(false, out);
        } else {
            return;
        }
        self.handle_budget_refusal(PauseReason::BudgetExhausted, refusal, now_under, out);
        if has_runs {
            // An approval was for one try, and the loop may resume in this process.
            self.settle_interrupted_runs(None, out);
        }
    }
}

/// The longest pause for this reason, if it ends at a time of this machine's clock. `None`: budgets reset by the
/// leader's clock, and the other reasons are re-evaluated or need a person.
pub fn longest_hold(reason: PauseReason, settings: &EngineSettings) -> Option<SignedDuration> {
    match reason.facts().end {
        PauseEnd::ForcedSleep => Some(settings.max_sleep),
        PauseEnd::ActionWindow => Some(guardrails::MAX_HOLD_OF_ACTIONS),
        PauseEnd::NextAttempt => Some(retry::MAX_RETRY_AFTER),
        PauseEnd::Contact => Some(retry::LINK_PROBE),
        PauseEnd::Cooldown => Some(MAX_COOLDOWN),
        PauseEnd::Answer => Some(settings.approval_timeout),
        PauseEnd::Spec | PauseEnd::Recheck | PauseEnd::Room { .. } | PauseEnd::User => None,
    }
}
