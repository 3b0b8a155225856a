//! What Sensors tell the loop, as it comes: ticks, files, deliveries of other pods, and scores.
//!
//! Decides only when it is heard: what it does is the engine's, and what is remembered of it that of [`Sensors`].
//!
//! [`Sensors`]: crate::worker::sensors::LoopSensors

use jiff::Timestamp;

use super::LoopDriver;
use crate::link::deliveries::{Delivery, MOST_DELIVERY_EVENTS};
use crate::worker::journal::JournalError;
use crate::worker::sensors::file_watcher::WatchReport;
use crate::worker::sensors::{ScoringStep, SensorTransition};

/// Things that happen to Sensors which are taken before anything else is looked at.
const SENSORS_AT_ONCE: usize = MOST_DELIVERY_EVENTS;

impl LoopDriver<'_> {
    /// Whether Sensors that run here are heard: a loop that is to stop leaves what comes to the next pod.
    pub(super) fn accepts_sensor_events(&self) -> bool {
        self.stop.is_none() && !self.stopped && self.steps.hears()
    }

    /// Takes what is due of Sensors.
    pub(super) fn check_sensors(&mut self, now: Timestamp) -> Result<(), JournalError> {
        for _ in 0..SENSORS_AT_ONCE {
            let Some(happened) = self.accepts_sensor_events().then(|| self.sensors.due(now)).flatten() else {
                break;
            };
            self.apply_transition(happened)?;
        }
        Ok(())
    }

    /// Has waiting events scored, and lets those take effect of which all is known.
    pub(super) fn check_scores(&mut self) -> Result<(), JournalError> {
        while self.accepts_sensor_events() {
            let (scored, scoring) = (self.steps.scored(), self.steps.is_scoring());
            match self.sensors.step(Timestamp::now(), scored, scoring) {
                Some(ScoringStep::Happened(happened)) => self.apply_transition(*happened)?,
                Some(ScoringStep::Hear(input)) => self.feed(input)?,
                None => break,
            }
        }
        Ok(())
    }

    /// Takes events of a Sensor's pod, and says through which one they are on disk. What is left over comes again.
    pub(super) fn take_delivery(&mut self, delivery: &Delivery) -> Result<(), JournalError> {
        for _ in 0..SENSORS_AT_ONCE {
            let Some(happened) = self
                .accepts_sensor_events()
                .then(|| self.sensors.take(Timestamp::now(), delivery))
                .flatten()
            else {
                break;
            };
            self.apply_transition(happened)?;
        }
        if self.accepts_sensor_events() {
            self.deliveries
                .report_delivered(self.sensors.delivered_through(delivery));
        }
        Ok(())
    }

    /// Takes what is seen of files; a change is heard as soon as it finds room.
    pub(super) fn handle_watch_report(&mut self, sighting: WatchReport) -> Result<(), JournalError> {
        let happened = self.sensors.apply_watch_report(sighting);
        happened.map_or(Ok(()), |happened| self.apply_transition(happened))
    }

    /// Lets the loop hear what happened to a Sensor. What is to be remembered of it is on disk then.
    pub(super) fn apply_transition(&mut self, happened: SensorTransition) -> Result<(), JournalError> {
        if !self.accepts_sensor_events() {
            return Ok(());
        }
        self.refresh_instructions();
        let taken = self
            .steps
            .sense(Timestamp::now(), happened.input().cloned(), &happened.kept());
        self.sensors.confirm(happened);
        self.outbox.report(self.report());
        self.apply_outcome(taken)
    }
}
