//! What a process exchanges with clients, a Sensor and the receiver of responses, as the driver does.

use super::{EarlyEnd, KillPoint, Process, ProcessEnd};
use crate::api::agent::AgentMode;
use crate::engine::EngineInput;
use crate::engine::tasks::TaskOffer;
use crate::link::deliveries::Delivery;
use crate::link::task_requests::TaskReceipt;
use crate::worker::crash_tests::files::Files;
use crate::worker::crash_tests::modes::injected_bugs::Broken;
use crate::worker::crash_tests::modes::invariants::CheckInput;
use crate::worker::crash_tests::modes::loop_environment::seconds;
use crate::worker::crash_tests::modes::patches;

impl Process<'_> {
    /// Does what the driver does with a request.
    pub(super) fn take_task(&mut self, offer: TaskOffer) -> Result<(), EarlyEnd> {
        let id = offer.id.clone();
        let origin = patches::origin(self.environment, &offer);
        let receipt = if self.steps.find_task(&id).expect("a journal").is_some() {
            TaskReceipt::Repeated
        } else if self.stop.is_some() || self.stopped || !self.steps.is_live() {
            TaskReceipt::Stopped
        } else if !self.steps.accepts_task_of(&origin) {
            TaskReceipt::QueueFull
        } else {
            if self.environment.is_broken(Broken::ReceiptBeforeCommit) {
                self.environment.receipt(&id, TaskReceipt::Accepted);
            }
            self.feed(EngineInput::TaskOffered(TaskOffer { origin, ..offer }))?;
            TaskReceipt::Accepted
        };
        self.environment.receipt(&id, receipt);
        Ok(())
    }

    fn accepts_events_of(&self, delivery: &Delivery) -> bool {
        self.stop.is_none() && !self.stopped && self.steps.accepts_events_of(&delivery.name)
    }

    /// Does what the driver does with a delivery.
    pub(super) fn take_delivery(&mut self, delivery: &Delivery) -> Result<(), EarlyEnd> {
        let runs_tasks = self.schedule.mode == AgentMode::Task;
        if self.environment.is_broken(Broken::AcknowledgesBeforeCommit) && self.accepts_events_of(delivery) {
            let through = delivery.events.last().map_or(0, |event| event.seq);
            self.environment.acknowledge(through, runs_tasks);
        }
        while self.accepts_events_of(delivery) {
            let Some(happened) = self.sensors.take(self.environment.wall(), delivery) else {
                break;
            };
            let fate = self.fate();
            let before = self.before(fate)?;
            let input = happened.input().cloned();
            let taken = self.steps.sense(self.environment.wall(), input, &happened.record());
            self.sensors.confirm(happened);
            self.follow(taken, &CheckInput::Nothing, (fate, before))?;
        }
        if self.accepts_events_of(delivery) {
            let through = self.sensors.delivered_through(delivery).through;
            self.environment.acknowledge(through, runs_tasks);
        }
        Ok(())
    }

    /// Begins with the oldest response, unless one is being sent.
    pub(super) fn send_response(&mut self) {
        let sends = self.schedule.mode == AgentMode::Task && self.schedule.has_receiver;
        if !sends || self.sending.is_some() {
            return;
        }
        if let Some(waiting) = self.steps.next_response().expect("a journal") {
            let at = self.environment.now + seconds(self.environment.random.range(0, 3));
            self.sending = Some((at, waiting));
        }
    }

    pub(super) fn respond(&mut self) -> Result<(), EarlyEnd> {
        let Some((_, waiting)) = self.sending.take() else {
            return Ok(());
        };
        let swaps = self.environment.is_broken(Broken::SwapsResponses);
        let holds = swaps && self.environment.held_back.is_none() && self.waiting_responses > 1;
        let drops = self.environment.is_broken(Broken::DropsResponse) && self.environment.random.percent(30);
        if holds {
            self.environment.held_back = Some(waiting.response.clone());
        } else if !drops && !self.environment.respond(&waiting.response) {
            let at = self.environment.now + seconds(5);
            self.sending = Some((at, waiting));
            return Ok(());
        }
        if !holds && let Some(earlier) = self.environment.held_back.take() {
            self.environment.respond(&earlier);
        }
        if let KillPoint::Before | KillPoint::Torn(_) = self.fate() {
            return Err(self.killed(Files::of(&self.dir)));
        }
        self.waiting_responses = self.waiting_responses.saturating_sub(1);
        if self.steps.response_delivered(waiting.seq).is_err() {
            return Err(EarlyEnd(ProcessEnd::Failed));
        }
        self.send_response();
        Ok(())
    }
}
