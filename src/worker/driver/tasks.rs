//! Tasks that users request: which are accepted, and the receipt that says so.
//!
//! A receipt is sent once the task is on disk, so what a client is told outlives the pod. What the loop does with the task is
//! up to the engine.

use super::LoopDriver;
use crate::engine::EngineInput;
use crate::engine::tasks::{TaskOffer, TaskOrigin};
use crate::link::task_requests::{RequestedTask, TaskAck, TaskReceipt};
use crate::worker::journal::JournalError;

impl LoopDriver<'_> {
    /// Takes a task, unless its id is known.
    pub(super) fn take_task(&mut self, task: RequestedTask) -> Result<(), JournalError> {
        let RequestedTask { id, user, prompt, .. } = task;
        let (receipt, after) = if let Some(after) = self.steps.find_task(&id)? {
            (TaskReceipt::Repeated, after)
        } else if self.stop.is_some() || self.stopped || !self.steps.is_live() {
            (TaskReceipt::Stopped, 0)
        } else if self.responses.is_full() || !self.steps.accepts_tasks() {
            (TaskReceipt::QueueFull, 0)
        } else {
            let after = self.steps.last_line()?;
            let origin = TaskOrigin::Request(user);
            self.feed(EngineInput::TaskOffered(TaskOffer {
                id: id.clone(),
                origin,
                prompt,
            }))?;
            (TaskReceipt::Accepted, after)
        };
        self.tasks.acknowledge(TaskAck { id, receipt, after });
        Ok(())
    }
}
