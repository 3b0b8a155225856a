//! The loop as seen from outside. Derived from the state, never stored.

use jiff::Timestamp;

use super::approvals::OpenGate;
use super::effects::{EffectBuffer, journal_line, trip_line};
use super::lifecycle::{LifecyclePhase, PublicState};
use super::machine::Engine;
use super::modes::GoalView;
use super::resources::ResourceWait;
use super::snapshot::ChosenSleep;
use super::tasks::EndedTask;
use super::untrusted::UntrustedSource;
use super::{EngineEffect, RecordKind};
use agentloop_api::condition::LoopSign;
use agentloop_api::failure::CallFailure;
use agentloop_api::status::{HandledRequests, LoopOutcome, LoopState, PauseReason, WakeCondition, WakeType};
use agentloop_api::usage_counts::{GuardrailTrip, LoopCounts};
use agentloop_support::clock::rfc3339_seconds;

/// A loop as seen from outside; the worker turns it into a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoopView {
    /// One of the six states.
    pub state: LoopState,
    /// The reasons that hold the loop.
    pub reasons: Vec<ReportedPause>,
    /// When the state began.
    pub since: Option<Timestamp>,
    /// When the loop resumes on its own: the latest `until` of all reasons, or the end of the sleep.
    pub resumes_at: Option<Timestamp>,
    /// What a sleep waits for.
    pub wake: Option<WakeCondition>,
    /// How the loop ended.
    pub outcome: Option<LoopOutcome>,
    pub turn: i64,
    pub counts: LoopCounts,
    /// Failed turns in a row.
    pub consecutive_errors: u32,
    /// Turns since the last sleep.
    pub consecutive_turns: u32,
    pub handled: HandledRequests,
    /// The last failure: when and what.
    pub last_error: Option<(Timestamp, CallFailure)>,
    /// The open gates, in the order of their runs, then those for definitions.
    pub gates: Vec<OpenGate>,
    /// The tasks that ended last, the newest first.
    pub recent_tasks: Vec<EndedTask>,
    /// Tasks that wait.
    pub waiting_tasks: usize,
    /// The untrusted content of the conversation.
    pub untrusted: Option<UntrustedSource>,
    /// The repetition that the loop is in.
    pub detected: Option<DetectedRepetition>,
    /// The progress of a loop in mode `Goal`.
    pub goal: Option<GoalView>,
    /// Why the light model cannot be used, if only a user can fix that.
    pub light_model: Option<CallFailure>,
}

/// A repetition that was detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetectedRepetition {
    /// The sign that showed it.
    pub sign: LoopSign,
    /// What was detected and what followed, with hashes as evidence.
    pub message: String,
}

/// A reason that holds the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedPause {
    pub reason: PauseReason,
    /// When it clears without an input.
    pub until: Option<Timestamp>,
    /// What happened, and how to fix it.
    pub message: String,
}

impl Engine {
    /// The state of the loop as reported.
    #[must_use]
    pub fn view(&self) -> LoopView {
        let state = &self.state;
        let public = self.public_state();
        LoopView {
            state: public.state,
            reasons: self.reported_pauses(),
            since: state.life.since(),
            resumes_at: self.resumes_at(public.state),
            wake: self.wake_condition(public.state),
            outcome: state.life.outcome(),
            turn: state.totals.turns_begun(),
            counts: state.totals.counts.clone(),
            consecutive_errors: state.counters.streaks.count(PauseReason::ConsecutiveErrors),
            consecutive_turns: state.counters.turns.count(),
            handled: self.handled_requests(),
            last_error: state.last_error.clone(),
            gates: self.view_gates(),
            recent_tasks: state.tasks.recent().cloned().collect(),
            waiting_tasks: self.tasks.count(),
            untrusted: state.trust.untrusted().cloned(),
            detected: self.detected(),
            goal: self.mode().goal_view(&self.settings),
            light_model: self.light_model_failure().cloned(),
        }
    }

    /// The public state: the lifecycle first, then the reasons, then the sleep.
    pub(super) fn public_state(&self) -> PublicState {
        let state = match self.state.life.phase() {
            _ if self.fenced => LoopState::Stopped,
            LifecyclePhase::Stopped => LoopState::Stopped,
            LifecyclePhase::Starting => LoopState::Starting,
            LifecyclePhase::Stopping => LoopState::Stopping,
            LifecyclePhase::Active if self.is_stopped_by_budget() => LoopState::Stopped,
            LifecyclePhase::Active if !self.state.reasons.is_empty() => LoopState::Paused,
            // A heartbeat may run during a sleep.
            LifecyclePhase::Active if self.mode().sleep().is_some() && self.state.turn.is_none() => LoopState::Sleeping,
            LifecyclePhase::Active if self.waits_for_task() => LoopState::Sleeping,
            LifecyclePhase::Active => LoopState::Running,
        };
        let reasons = self.reported_pauses().into_iter().map(|held| held.reason).collect();
        PublicState { state, reasons }
    }

    /// Journals a change of the public state, and reports it.
    pub(super) fn note_transition(&mut self, out: &mut EffectBuffer) {
        let public = self.public_state();
        if public == *self.state.life.public() {
            return;
        }
        self.set_task_clock(public.state == LoopState::Running, out.now);
        if public.state == LoopState::Running {
            self.state.counters.idle.awake(out.now);
        } else {
            self.state.counters.idle.interrupted();
        }
        let before = self.state.life.set_public(public.clone(), out.now);
        let note = format!("{before} -> {public}");
        out.record(journal_line(RecordKind::Transition, self.turn_number(), note));
        let reached = public.reasons.iter().filter(|reason| reason.facts().is_guardrail);
        for reason in reached.filter(|reason| !before.reasons.contains(reason)) {
            let trip = GuardrailTrip::of_pause(*reason);
            out.record(trip_line(self.turn_number(), trip, reason.as_ref()));
        }
    }

    /// Requests a report if the view differs from `before`.
    pub(super) fn report_change(&self, before: &LoopView, out: &mut EffectBuffer) {
        if self.view() != *before {
            out.push(EngineEffect::Report);
        }
    }

    fn reported_pauses(&self) -> Vec<ReportedPause> {
        let suspended = self.state.life.is_suspended().then(|| ReportedPause {
            reason: PauseReason::SuspendedBySpec,
            until: None,
            message: "spec.suspend is true; set it to false to resume".to_owned(),
        });
        suspended.into_iter().chain(self.state.reasons.reported()).collect()
    }

    fn resumes_at(&self, state: LoopState) -> Option<Timestamp> {
        match state {
            LoopState::Paused => self.state.reasons.last_end(),
            LoopState::Sleeping => self.mode().sleep().map(ChosenSleep::ends).or(self.own_task_due()),
            LoopState::Starting | LoopState::Running | LoopState::Stopping | LoopState::Stopped => None,
        }
    }

    fn wake_condition(&self, state: LoopState) -> Option<WakeCondition> {
        if state == LoopState::Sleeping && self.runs_tasks() {
            let (r#type, value) = (WakeType::Event, "task".to_owned());
            return Some(WakeCondition { r#type, value });
        }
        let sleep = self.mode().sleep().filter(|_| state == LoopState::Sleeping)?;
        let names = &sleep.wake_early_if;
        let (r#type, value) = if names.is_empty() {
            (WakeType::Time, rfc3339_seconds(sleep.until))
        } else if names.iter().all(|name| ResourceWait::read(name).is_some()) {
            (WakeType::Resource, names.join(","))
        } else {
            (WakeType::Event, names.join(","))
        };
        Some(WakeCondition { r#type, value })
    }
}
