//! The loop as seen from outside. Derived from the state, never stored.

use jiff::Timestamp;

use super::clock;
use super::machine::Engine;
use super::outbox::{Outbox, line};
use super::pause::is_guardrail;
use super::resources::Room;
use super::snapshot::{Lifecycle, Public, Sleep};
use super::tally::Tally;
use super::{Effect, RecordKind};
use crate::api::condition::LoopSign;
use crate::api::failure::Failure;
use crate::api::status::{HandledRequests, LoopState, Outcome, PauseReason, Wake, WakeType};

/// A loop as seen from outside; the worker turns it into a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// One of the six states.
    pub state: LoopState,
    /// Reasons that hold.
    pub reasons: Vec<Held>,
    /// Since when the state holds.
    pub since: Option<Timestamp>,
    /// When the loop goes on by itself: the latest `until` of all reasons, or the end of the sleep.
    pub resumes_at: Option<Timestamp>,
    /// What a sleep waits for.
    pub wake: Option<Wake>,
    /// How the loop ended.
    pub outcome: Option<Outcome>,
    /// Turns begun.
    pub turn: i64,
    /// Turns completed.
    pub turns_completed: i64,
    /// Runs of tools that were sent.
    pub tool_calls: i64,
    /// Those of them that do not only look.
    pub actions: i64,
    /// What limits did, and how runs of tools ended.
    pub tally: Tally,
    /// Failed turns in a row.
    pub consecutive_errors: u32,
    /// Turns since the last sleep.
    pub consecutive_turns: u32,
    /// Requests handled.
    pub handled: HandledRequests,
    /// The last failure: when and what.
    pub last_error: Option<(Timestamp, Failure)>,
    /// The repetition that the loop is in.
    pub detected: Option<Detected>,
}

/// A repetition that was detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detected {
    /// What showed it.
    pub sign: LoopSign,
    /// What was seen and what followed, with hashes as evidence.
    pub message: String,
}

/// A reason that holds the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
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
    pub fn view(&self) -> View {
        let state = &self.state;
        let public = self.public();
        View {
            state: public.state,
            reasons: self.held(),
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
    pub(super) fn public(&self) -> Public {
        let state = match self.state.lifecycle {
            _ if self.fenced => LoopState::Stopped,
            Lifecycle::Stopped => LoopState::Stopped,
            Lifecycle::Starting => LoopState::Starting,
            Lifecycle::Stopping => LoopState::Stopping,
            Lifecycle::Active if self.is_stopped_by_budget() => LoopState::Stopped,
            Lifecycle::Active if !self.state.reasons.is_empty() => LoopState::Paused,
            // A heartbeat comes in the middle of a sleep.
            Lifecycle::Active if self.state.sleep.is_some() && self.state.turn.is_none() => LoopState::Sleeping,
            Lifecycle::Active => LoopState::Running,
        };
        let reasons = self.held().into_iter().map(|held| held.reason).collect();
        Public { state, reasons }
    }

    /// Journals a changed public state, and reports it.
    pub(super) fn note_transition(&mut self, out: &mut Outbox) {
        let public = self.public();
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
        out.record(line(RecordKind::Transition, self.turn_number(), note));
        let reached = public.reasons.iter().filter(|reason| is_guardrail(**reason));
        for reason in reached.filter(|reason| !self.state.public.reasons.contains(reason)) {
            out.record(line(
                RecordKind::GuardrailTriggered,
                self.turn_number(),
                reason.as_ref(),
            ));
        }
        self.state.public = public;
    }

    /// Asks for a report when `before` is no longer what the loop looks like.
    pub(super) fn report_change(&self, before: &View, out: &mut Outbox) {
        if self.view() != *before {
            out.push(Effect::Report);
        }
    }

    fn held(&self) -> Vec<Held> {
        let suspended = self.state.suspended.then(|| Held {
            reason: PauseReason::SuspendedBySpec,
            until: None,
            message: "spec.suspend is true; set it to false to go on".to_owned(),
        });
        let held = self.state.reasons.iter().map(|(reason, hold)| Held {
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
            LoopState::Sleeping => self.state.sleep.as_ref().map(Sleep::ends),
            LoopState::Starting | LoopState::Running | LoopState::Stopping | LoopState::Stopped => None,
        }
    }

    fn wake_condition(&self, state: LoopState) -> Option<Wake> {
        let sleep = self.state.sleep.as_ref().filter(|_| state == LoopState::Sleeping)?;
        let names = &sleep.wake_early_if;
        let (r#type, value) = if names.is_empty() {
            (WakeType::Time, clock::text(sleep.until))
        } else if names.iter().all(|name| Room::read(name).is_some()) {
            (WakeType::Resource, names.join(","))
        } else {
            (WakeType::Event, names.join(","))
        };
        Some(Wake { r#type, value })
    }
}
