//! Input from Sensors: ticks, file changes, deliveries of sensor pods, and scores.
//!
//! Decides only when the loop takes it. The engine decides what it does, and [`Sensors`] what is persisted.
//!
//! [`Sensors`]: crate::worker::sensor_receiver::LoopSensors

use jiff::Timestamp;

use super::LoopDriver;
use crate::link::deliveries::{Delivery, MAX_DELIVERY_EVENTS};
use crate::worker::journal::JournalError;
use crate::worker::sensor_receiver::file_watcher::WatchReport;
use crate::worker::sensor_receiver::{ScoringStep, SensorTransition};

/// Maximum number of transitions that are applied before other input is handled.
const SENSORS_AT_ONCE: usize = MAX_DELIVERY_EVENTS;

impl LoopDriver<'_> {
    /// Whether the loop takes what a Sensor says of itself, and what waits here until there is room for its event.
    pub(super) fn takes_records(&self) -> bool {
        self.stop.is_none() && !self.stopped && self.steps.is_live()
    }

    /// When a Sensor of this pod is due next, of those whose events have room. Room comes with an input, after which the others
    /// are looked at again.
    pub(super) fn next_sensor(&self, now: Timestamp) -> Option<Timestamp> {
        let may_accept = self.may_accept_events();
        self.sensors
            .next(now, |name| may_accept && self.steps.accepts_events_of(name))
    }

    /// Whether the loop may take a delivery now: that of a Sensor of which no task waits.
    pub(super) fn accepts_deliveries(&self) -> bool {
        self.may_accept_events() && self.steps.accepts_events_beyond()
    }

    fn accepts_events_of(&self, delivery: &Delivery) -> bool {
        self.may_accept_events() && self.steps.accepts_events_of(&delivery.name)
    }

    /// A loop that is stopping leaves events to the next pod.
    fn may_accept_events(&self) -> bool {
        self.stop.is_none() && !self.stopped && !self.responses.is_full()
    }

    /// Applies what is due of the Sensors of this pod. One whose tasks fill the queue holds up no other.
    pub(super) fn check_sensors(&mut self, now: Timestamp) -> Result<(), JournalError> {
        for _ in 0..SENSORS_AT_ONCE {
            let may_accept = self.may_accept_events();
            let steps = &self.steps;
            let has_room = |name: &str| may_accept && steps.accepts_events_of(name);
            let Some(happened) = self.sensors.due(now, has_room) else {
                break;
            };
            self.commit_transition(happened)?;
        }
        Ok(())
    }

    /// Requests scores for waiting events, and applies the events whose scores are complete.
    pub(super) fn check_scores(&mut self) -> Result<(), JournalError> {
        while self.may_accept_events() && self.steps.is_live() {
            let steps = &self.steps;
            let scoring = (steps.scored(), steps.is_scoring());
            let has_room = |name: &str| steps.accepts_events_of(name);
            match self.sensors.step(Timestamp::now(), scoring, has_room) {
                Some(ScoringStep::Happened(happened)) => self.commit_transition(*happened)?,
                Some(ScoringStep::Hear(input)) => self.feed(*input)?,
                None => break,
            }
        }
        Ok(())
    }

    /// Takes events of a sensor pod and acknowledges those that are on disk. The rest is redelivered.
    pub(super) fn take_delivery(&mut self, delivery: &Delivery) -> Result<(), JournalError> {
        let mut taken = false;
        for _ in 0..SENSORS_AT_ONCE {
            let Some(happened) = self
                .accepts_events_of(delivery)
                .then(|| self.sensors.take(Timestamp::now(), delivery))
                .flatten()
            else {
                break;
            };
            self.commit_transition(happened)?;
            taken = true;
        }
        if taken || self.accepts_events_of(delivery) {
            self.deliveries
                .report_delivered(self.gateway, self.sensors.delivered_through(delivery));
        }
        Ok(())
    }

    /// Takes a report of a file watcher. A change takes effect as soon as the limits and the queue admit it.
    pub(super) fn handle_watch_report(&mut self, sighting: WatchReport) -> Result<(), JournalError> {
        let happened = self.sensors.apply_watch_report(sighting);
        happened.map_or(Ok(()), |happened| self.record_transition(happened))
    }

    /// Commits what a Sensor says of itself. It brings no task, so that it needs no room.
    pub(super) fn record_transition(&mut self, happened: SensorTransition) -> Result<(), JournalError> {
        if !self.takes_records() {
            return Ok(());
        }
        self.commit_transition(happened)
    }

    /// Feeds a transition to the engine. Its record is committed in the same transaction, before it is confirmed.
    fn commit_transition(&mut self, happened: SensorTransition) -> Result<(), JournalError> {
        self.refresh_instructions();
        let taken = self
            .steps
            .sense(Timestamp::now(), happened.input().cloned(), &happened.record());
        self.sensors.confirm(happened);
        self.outbox.report(self.report());
        self.apply_outcome(taken)
    }
}
