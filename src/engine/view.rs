//! The loop as seen from outside. Derived from the state, never stored.

use jiff::Timestamp;

use super::effects::{EffectBuffer, journal_line};
use super::lifetime_counts::LifetimeCounts;
use super::machine::Engine;
use super::pause::is_guardrail;
use super::resources::ResourceWait;
use super::snapshot::{ChosenSleep, LifecyclePhase, PublicState};
use super::time_math;
use super::{EngineEffect, RecordKind};
use crate::api::condition::LoopSign;
use crate::api::failure::CallFailure;
use crate::api::status::{HandledRequests, LoopOutcome, LoopState, PauseReason, WakeCondition, WakeType};

/// A loop as seen from outside; the worker turns it into a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoopView {
    /// One of the six states.
    pub state: LoopState,
    /// Reasons that hold.
    pub reasons: Vec<ReportedPause>,
    /// Since when the state holds.
    pub since: Option<Timestamp>,
    /// When the loop goes on by itself: the latest `until` of all reasons, or the end of the sleep.
    pub resumes_at: Option<Timestamp>,
    /// What a sleep waits for.
    pub wake: Option<WakeCondition>,
    /// How the loop ended.
    pub outcome: Option<LoopOutcome>,
    /// Turns begun.
    pub turn: i64,
    /// Turns completed.
    pub turns_completed: i64,
    /// Runs of tools that were sent.
    pub tool_calls: i64,
    /// Those of them that do not only look.
    pub actions: i64,
    /// What limits did, and how runs of tools ended.
    pub tally: LifetimeCounts,
    /// Failed turns in a row.
    pub consecutive_errors: u32,
    /// Turns since the last sleep.
    pub consecutive_turns: u32,
    /// Requests handled.
    pub handled: HandledRequests,
    /// The last failure: when and what.
    pub last_error: Option<(Timestamp, CallFailure)>,
    /// The repetition that the loop is in.
    pub detected: Option<DetectedRepetition>,
}

/// A repetition that was detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetectedRepetition {
    /// What showed it.
    pub sign: LoopSign,
    /// What was seen and what followed, with hashes as evidence.
    pub message: String,
}

/// A reason that holds the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedPause {
    /// Which.
    pub reason: PauseReason,
    /// When it clears by itself.
    pub until: Option<Timestamp>,
    /// What happened and what to do.
    pub message: String,
}

impl Engine {
    /// What the loop looks like from outside.
    #[must_use]
    pub fn view(&self) -> LoopView {
        let state = &self.state;
        let public = self.public_state();
        LoopView {
            state: public.state,
            reasons: self.reported_pauses(),
            since: state.since,
            resumes_at: self.resumes_at(public.state),
            wake: self.wake_condition(public.state),
            outcome: state.outcome,
            turn: state.turns_begun,
            turns_completed: state.turns_completed,
            tool_calls: state.tool_calls,
            actions: state.actions,
            tally: state.tally.clone(),
            consecutive_errors: state.counters.errors,
            consecutive_turns: state.counters.turns,
            handled: state.handled.clone(),
            last_error: state.last_error.clone(),
            detected: self.detected(),
        }
    }

    /// The public state: the lifecycle first, then the reasons, then the sleep.
    pub(super) fn public_state(&self) -> PublicState {
        let state = match self.state.lifecycle {
            _ if self.fenced => LoopState::Stopped,
            LifecyclePhase::Stopped => LoopState::Stopped,
            LifecyclePhase::Starting => LoopState::Starting,
            LifecyclePhase::Stopping => LoopState::Stopping,
            LifecyclePhase::Active if self.is_stopped_by_budget() => LoopState::Stopped,
            LifecyclePhase::Active if !self.state.reasons.is_empty() => LoopState::Paused,
            // A heartbeat comes in the middle of a sleep.
            LifecyclePhase::Active if self.state.sleep.is_some() && self.state.turn.is_none() => LoopState::Sleeping,
            LifecyclePhase::Active => LoopState::Running,
        };
        let reasons = self.reported_pauses().into_iter().map(|held| held.reason).collect();
        PublicState { state, reasons }
    }

    /// Journals a changed public state, and reports it.
    pub(super) fn note_transition(&mut self, out: &mut EffectBuffer) {
        let public = self.public_state();
        if public == self.state.public {
            return;
        }
        if public.state != self.state.public.state {
            self.state.since = Some(out.now);
        }
        if public.state == LoopState::Running {
            self.state.counters.idle.awake(out.now);
        } else {
            self.state.counters.idle.interrupted();
        }
        let note = format!("{} -> {public}", self.state.public);
        out.record(journal_line(RecordKind::Transition, self.turn_number(), note));
        let reached = public.reasons.iter().filter(|reason| is_guardrail(**reason));
        for reason in reached.filter(|reason| !self.state.public.reasons.contains(reason)) {
            out.record(journal_line(
                RecordKind::GuardrailTriggered,
                self.turn_number(),
                reason.as_ref(),
            ));
        }
        self.state.public = public;
    }

    /// Asks for a report when `before` is no longer what the loop looks like.
    pub(super) fn report_change(&self, before: &LoopView, out: &mut EffectBuffer) {
        if self.view() != *before {
            out.push(EngineEffect::Report);
        }
    }

    fn reported_pauses(&self) -> Vec<ReportedPause> {
        let suspended = self.state.suspended.then(|| ReportedPause {
            reason: PauseReason::SuspendedBySpec,
            until: None,
            message: "spec.suspend is true; set it to false to go on".to_owned(),
        });
        let held = self.state.reasons.iter().map(|(reason, hold)| ReportedPause {
            reason: *reason,
            until: hold.until,
            message: hold.message.clone(),
        });
        suspended.into_iter().chain(held).collect()
    }

    fn resumes_at(&self, state: LoopState) -> Option<Timestamp> {
        match state {
            LoopState::Paused => {
                let moments: Option<Vec<Timestamp>> = self.state.reasons.values().map(|hold| hold.until).collect();
                moments?.into_iter().max()
            }
            LoopState::Sleeping => self.state.sleep.as_ref().map(ChosenSleep::ends),
            LoopState::Starting | LoopState::Running | LoopState::Stopping | LoopState::Stopped => None,
        }
    }

    fn wake_condition(&self, state: LoopState) -> Option<WakeCondition> {
        let sleep = self.state.sleep.as_ref().filter(|_| state == LoopState::Sleeping)?;
        let names = &sleep.wake_early_if;
        let (r#type, value) = if names.is_empty() {
            (WakeType::Time, time_math::format_moment(sleep.until))
        } else if names.iter().all(|name| ResourceWait::read(name).is_some()) {
            (WakeType::Resource, names.join(","))
        } else {
            (WakeType::Event, names.join(","))
        };
        Some(WakeCondition { r#type, value })
    }
}
