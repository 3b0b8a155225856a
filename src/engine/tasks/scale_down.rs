//! Scaling to zero: the pod of a loop without a task is deleted after a while.
//!
//! The engine decides, and not the controller: from the end of the loop on it accepts no task, so none is accepted by a pod that
//! is about to be deleted.

use jiff::Timestamp;

use crate::effects::EffectBuffer;
use crate::machine::Engine;
use crate::time_math;
use agentloop_api::status::{LoopOutcome, LoopState};

impl Engine {
    /// When the loop has had no task for `task.idlePodSeconds`; `None`: it has one, something else is open, or it keeps its pod.
    #[must_use]
    pub fn scale_down_due(&self) -> Option<Timestamp> {
        let idle = self.settings.task()?.idle_pod?;
        let rests = self.accepts_input() && self.public_state().state == LoopState::Sleeping && self.waits_for_task();
        let is_open = self.state.deferred.len() > 0 || !self.view().gates.is_empty() || !self.running.is_empty();
        let since = self.state.life.since().filter(|_| rests && !is_open)?;
        Some(time_math::after(since, idle))
    }

    /// The loop ends if it is time to.
    pub(crate) fn scale_down(&mut self, out: &mut EffectBuffer) {
        if self.scale_down_due().is_some_and(|due| due <= out.now) {
            self.end_loop(LoopOutcome::ScaledToZero, out);
        }
    }
}
