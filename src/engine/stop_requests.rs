//! Requests of users to end the loop: after the turn that runs, or at once.
//!
//! A request is part of the snapshot until the loop has ended, so a worker that is killed in between continues with it. A turn
//! that is cut stays open: if the loop is started again, it continues with that turn, as after a suspension.
//!
//! It is reported as handled only once the loop has ended, or continues after all. Until then the controller hands it to each pod
//! of the Agent, which thus ends the loop even if the volume is lost, or the report of the end.

use crate::RecordKind;
use crate::effects::{EffectBuffer, journal_line};
use crate::lifecycle::StopRequest;
use crate::machine::Engine;
use agentloop_api::annotations::STOP_NOW;
use agentloop_api::status::{HandledRequests, LoopOutcome};

/// The requests of users, by annotation, that the controller does not know to be handled when a process starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenRequests {
    /// See [`EngineInput::WakeRequested`](crate::EngineInput::WakeRequested), which is fed as well.
    pub wake: Option<String>,
    /// See [`EngineInput::ResumeRequested`](crate::EngineInput::ResumeRequested), which is fed as well.
    pub resume: Option<String>,
    /// Takes effect before the first turn, also if the journal knows nothing of it or has ended because of it. If it is new
    /// to the journal, the others count as handled before it: which came first is not known, and a stop holds until the next
    /// request to continue.
    pub stop: Option<String>,
}

impl Engine {
    /// Handles the request `stop` that is open when a process starts.
    pub(super) fn stop_at_start(&mut self, open: OpenRequests, out: &mut EffectBuffer) {
        let turn = self.turn_number();
        let handled = &mut self.state.handled;
        // A request to continue that is fed after a stop which the journal knows takes it back.
        let Some(stop) = open.stop.filter(|stop| handled.stop.as_ref() != Some(stop)) else {
            return;
        };
        for (what, handled, open) in [
            ("wake", &mut handled.wake, open.wake),
            ("resume", &mut handled.resume, open.resume),
        ] {
            if open.is_some() && *handled != open {
                *handled = open;
                out.record(journal_line(RecordKind::RequestHandled, turn, what));
            }
        }
        self.stop_requested(stop, out);
    }

    /// Handles the request `stop`, once per token.
    pub(super) fn stop_requested(&mut self, token: String, out: &mut EffectBuffer) {
        // A loop that is about to end leaves the request open, as it does with a request to continue that came before: the
        // controller records both.
        if self.state.handled.stop.as_ref() == Some(&token) || self.state.life.outcome().is_some() {
            return;
        }
        let request = if token.starts_with(STOP_NOW) {
            StopRequest::AtOnce
        } else {
            StopRequest::AfterTurn
        };
        self.state.handled.stop = Some(token);
        out.record(journal_line(RecordKind::RequestHandled, self.turn_number(), "stop"));
        self.state.life.request_stop(request);
    }

    /// The requests that are reported as handled.
    pub(super) fn handled_requests(&self) -> HandledRequests {
        let (handled, life) = (self.state.handled.clone(), &self.state.life);
        let is_pending = life.stop_request().is_some() && life.outcome().is_none();
        HandledRequests {
            stop: handled.stop.filter(|_| !is_pending),
            ..handled
        }
    }

    /// Ends the loop if a user has requested that and the open turn is not waited for: the stop is immediate, or the loop is
    /// paused for an unknown time.
    pub(super) fn end_if_stop_requested(&mut self, out: &mut EffectBuffer) {
        let Some(request) = self.state.life.stop_request().filter(|_| self.state.life.is_active()) else {
            return;
        };
        let waits = request == StopRequest::AfterTurn && self.state.turn.is_some() && self.state.reasons.is_empty();
        if waits {
            return;
        }
        self.cancel_runs(false, out);
        self.cancel_call(out);
        self.end_loop(LoopOutcome::Cancelled, out);
    }
}
