//! Tasks that users request: which are accepted, and the receipt that says so.
//!
//! A receipt is sent once the task is on disk, so an accepted task outlives the pod. What the loop does with the task is
//! up to the engine.

use jiff::Timestamp;

use super::LoopDriver;
use crate::engine::EngineInput;
use crate::engine::tasks::{TaskOffer, TaskOrigin};
use crate::link::task_requests::{RequestedTask, TaskAck, TaskReceipt, TaskRefusal};
use crate::worker::journal::JournalError;

impl LoopDriver<'_> {
    /// When the loop ends for lack of tasks, so that its pod is deleted. Responses are delivered first, and events that
    /// only this pod can receive keep it.
    pub(super) fn scale_down_due(&self) -> Option<Timestamp> {
        let needs_pod = self.stop.is_some() || self.responses.is_waiting() || self.sensors.needs_pod();
        self.steps.scale_down_due().filter(|_| !needs_pod)
    }

    pub(super) fn check_scale_down(&mut self, now: Timestamp) -> Result<(), JournalError> {
        if self.scale_down_due().is_some_and(|due| due <= now) {
            self.feed(EngineInput::ScaleDown)?;
        }
        Ok(())
    }

    /// Takes a task, unless its id is known.
    pub(super) fn take_task(&mut self, task: RequestedTask) -> Result<(), JournalError> {
        let RequestedTask {
            id,
            user,
            prompt,
            untrusted_content,
            ..
        } = task;
        let origin = TaskOrigin::Request(user.clone());
        let (receipt, after, refusal) = if let Some(known) = self.steps.find_task(&id)? {
            if known.is_of_another(&user) {
                (TaskReceipt::Stopped, 0, Some(TaskRefusal::IdOfAnotherUser))
            } else {
                (TaskReceipt::Repeated, known.after, None)
            }
        } else if self.stop.is_some() || self.stopped || !self.steps.is_live() {
            (TaskReceipt::Stopped, 0, None)
        } else if self.responses.is_full() {
            (TaskReceipt::QueueFull, 0, Some(TaskRefusal::ResponsesWait))
        } else if !self.steps.accepts_task_of(&origin) {
            (TaskReceipt::QueueFull, 0, None)
        } else {
            let after = self.steps.last_line()?;
            self.feed(EngineInput::TaskOffered(TaskOffer {
                id: id.clone(),
                origin,
                prompt,
                untrusted: untrusted_content,
            }))?;
            (TaskReceipt::Accepted, after, None)
        };
        self.tasks.acknowledge(
            self.gateway,
            TaskAck {
                id,
                receipt,
                after,
                refusal,
                user: Some(user),
            },
        );
        Ok(())
    }
}
