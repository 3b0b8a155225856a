//! Updates from the gateway: what the controller wants of the loop. They are levels; only what differs from the previous ones is fed.

use jiff::Timestamp;
use tokio::sync::watch;

use super::{LinkFreshness, LoopDriver};
use crate::engine::{EngineGateAnswer, EngineInput, StopCause};
use crate::support::clock::ClockReading;
use crate::worker::gateway_client::GatewayUpdate;
use crate::worker::journal::JournalError;

impl LoopDriver<'_> {
    /// Takes what is new in the last update from the gateway.
    pub(super) fn apply_gateway_update(
        &mut self,
        updates: &mut watch::Receiver<Option<GatewayUpdate>>,
    ) -> Result<(), JournalError> {
        let Some(update) = updates.borrow_and_update().clone() else {
            return Ok(());
        };
        if update.event.fenced {
            return self.stop(StopCause::Fenced);
        }
        let directives = update.event.directives.clone();
        self.readings.set(&directives.readings);
        self.history.set_wanted(directives.history);
        if update.suspends() {
            self.stop(StopCause::Suspend)?;
        }
        self.contact = update.contact();
        if self.link > LinkFreshness::Fresh && !self.contact.is_silent(ClockReading::now()) {
            self.link = LinkFreshness::Fresh;
            self.feed(EngineInput::LinkBack)?;
        }
        // Directives are levels and are repeated: feed only what differs from the previous ones.
        let before = std::mem::replace(&mut self.directives, directives.clone());
        if before.budget != directives.budget {
            self.feed(EngineInput::BudgetChanged {
                budget: update.budget(),
            })?;
        }
        if let Some(token) = directives.wake.filter(|token| before.wake.as_ref() != Some(token)) {
            self.feed(EngineInput::WakeRequested { token })?;
        }
        if let Some(token) = directives.resume.filter(|token| before.resume.as_ref() != Some(token)) {
            self.feed(EngineInput::ResumeRequested { token })?;
        }
        if let Some(token) = directives.stop.filter(|token| before.stop.as_ref() != Some(token)) {
            self.feed(EngineInput::StopRequested { token })?;
        }
        let answers = directives.gate_answers.iter();
        for answer in answers.filter(|answer| !before.gate_answers.contains(answer)) {
            self.feed(EngineInput::GateAnswered(EngineGateAnswer {
                gate: answer.id.clone(),
                arguments: answer.arguments_hash.clone(),
                approved: answer.approved,
                by: answer.by.clone(),
            }))?;
        }
        if before.wake_events != directives.wake_events
            && let Some(names) = directives.wake_events.clone()
        {
            self.feed(EngineInput::WakeEventsChanged { names })?;
        }
        if before.sensors != directives.sensors {
            let begun = self
                .sensors
                .apply_terms(Timestamp::now(), directives.sensors.as_deref());
            begun
                .into_iter()
                .try_for_each(|happened| self.record_transition(happened))?;
            self.lookouts.set(&self.sensors);
            self.outbox.report(self.report());
        }
        Ok(())
    }
}
