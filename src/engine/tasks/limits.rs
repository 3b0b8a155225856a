//! The limits of one task: model calls, tokens and time.

use jiff::Timestamp;

use super::requests::REQUEST_LIMITS;
use crate::effects::{EffectBuffer, call_line};
use crate::machine::Engine;
use crate::modes::LoopPace;
use crate::settings::TaskSettings;
use crate::tools::admission::{DenialReason, DeniedCall};
use crate::tools::batch::{ToolBatch, ToolSlot};
use crate::{EngineEffect, RecordKind, time_math};
use agentloop_api::failure::FailureKind;
use agentloop_api::task::TaskLimit;

/// The result of a call that was not run when the time was over.
const TOO_LATE: &str = "the task has exceeded its time limit";

impl Engine {
    fn task_settings(&self) -> Option<&TaskSettings> {
        self.state.tasks.current.as_ref()?;
        Some(self.settings.task().unwrap_or(&REQUEST_LIMITS))
    }

    /// The limit that the task under way has reached before another model call.
    pub(crate) fn task_limit(&self) -> Option<TaskLimit> {
        let settings = self.task_settings()?;
        let turn = self.state.turn.as_ref()?;
        if let Some(limit) = turn.limit() {
            return Some(limit);
        }
        if turn.rules().detects_loops && self.state.watch.has_failed() {
            return Some(TaskLimit::LoopDetected);
        }
        if turn.counted_calls() >= settings.max_iterations {
            return Some(TaskLimit::MaxIterations);
        }
        (turn.most_tokens() >= settings.max_tokens).then_some(TaskLimit::MaxTokens)
    }

    /// When the time of the task under way is over; `None`: it has none, or it does not pass now.
    pub(crate) fn task_deadline(&self) -> Option<Timestamp> {
        let settings = self.task_settings()?;
        let turn = self.state.turn.as_ref()?;
        if turn.limit().is_some() {
            return None;
        }
        let current = self.state.tasks.current.as_ref()?;
        current.clock.reaches(settings.max_duration)
    }

    /// Ends the task whose time is over. Tool runs that were sent are completed first: they may have had effects.
    pub(crate) fn end_overdue_task(&mut self, out: &mut EffectBuffer) {
        if self.task_deadline().is_none_or(|deadline| deadline > out.now) {
            return;
        }
        if let Some(turn) = &mut self.state.turn {
            turn.limited(TaskLimit::MaxDuration);
        }
        if self.tool_batch().is_some() {
            self.deny_waiting_calls(out);
            return;
        }
        if let Some(call) = self.call_in_flight() {
            let note = FailureKind::Cancelled;
            out.record(call_line(RecordKind::CallFailed, call, note.as_ref(), Vec::new()));
            out.push(EngineEffect::CancelCall { call });
            self.in_flight = false;
        }
        self.complete_turn(&LoopPace::Continue, out);
    }

    /// Calls of the last answer that have not been sent are not run.
    fn deny_waiting_calls(&mut self, out: &mut EffectBuffer) {
        let places = self.tool_batch().map_or(0, ToolBatch::places);
        for place in 0..places {
            if !matches!(
                self.tool_batch().and_then(|batch| batch.slot(place)),
                Some(ToolSlot::Waiting(_))
            ) {
                continue;
            }
            self.close_gate(place, "withdrawn: the task has ended", out);
            let denied = DeniedCall::not_run(DenialReason::TaskEnded, TOO_LATE, "nothing: the task ends now");
            self.reject(place, denied, out);
        }
    }

    /// The public state has changed: the time of the task passes only while the loop runs.
    pub(crate) fn set_task_clock(&mut self, runs: bool, now: Timestamp) {
        if let Some(current) = &mut self.state.tasks.current {
            if runs {
                current.clock.runs(now);
            } else {
                current.clock.halts(now);
            }
        }
    }

    /// The previous process has ended at an unknown time.
    pub(crate) fn interrupt_task_clock(&mut self) {
        if let Some(current) = &mut self.state.tasks.current {
            current.clock.interrupted();
        }
    }

    pub(crate) fn move_task_clock(&mut self, back: jiff::SignedDuration) {
        let tasks = &mut self.state.tasks;
        if let Some(current) = &mut tasks.current {
            current.started_at = time_math::before(current.started_at, back);
            current.clock.moved(back);
        }
        tasks.own_ended_at = tasks.own_ended_at.map(|at| time_math::before(at, back));
    }
}
