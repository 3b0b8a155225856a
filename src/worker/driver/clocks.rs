//! What only the clocks announce: deadlines of the engine and of Sensors, the end of the run lease, and the end of the drain.

use std::time::Duration;

use super::{LOOK_AGAIN, LinkFreshness, LoopDriver};
use crate::engine::EngineInput;
use crate::support::clock::ClockReading;
use crate::worker::journal::JournalError;

impl LoopDriver<'_> {
    /// Returns the time until the next deadline that only the clocks announce.
    pub(super) fn until_moment(&self, now: ClockReading) -> Duration {
        let timer = self
            .timer
            .at()
            .map(|at| Duration::try_from(at.duration_since(now.wall)).unwrap_or_default());
        let silence = (self.link < LinkFreshness::Silent).then(|| self.contact.time_until_silent(now));
        let lease = (self.link < LinkFreshness::Lost).then(|| self.contact.time_until_lost(now));
        let drain = self.drain_from.map(|from| self.drain.saturating_sub(now.since(from)));
        let sensor = self
            .next_sensor(now.wall)
            .map(|at| Duration::try_from(at.duration_since(now.wall)).unwrap_or_default());
        let idle = self.scale_down_due();
        let idle = idle.map(|at| Duration::try_from(at.duration_since(now.wall)).unwrap_or_default());
        [timer, silence, lease, drain, sensor, idle]
            .into_iter()
            .flatten()
            .fold(LOOK_AGAIN, Duration::min)
    }

    pub(super) fn check_clocks(&mut self) -> Result<(), JournalError> {
        let now = ClockReading::now();
        let set_back = now.was_set_back_since(self.looked);
        self.looked = now;
        if self.timer.fires(now.wall) || set_back {
            // Safe if early: the engine checks its own deadlines again.
            self.feed(EngineInput::Timer)?;
        }
        self.check_link(now)?;
        if !self.stopped && self.drain_from.is_some_and(|from| now.since(from) >= self.drain) {
            self.feed(EngineInput::DrainEnded)?;
        }
        self.check_sensors(now.wall)?;
        self.check_scale_down(now.wall)
    }

    /// Reports to the engine each threshold of the [`RunLease`](crate::worker::run_lease::RunLease) that has passed.
    pub(super) fn check_link(&mut self, now: ClockReading) -> Result<(), JournalError> {
        if self.link < LinkFreshness::Silent && self.contact.is_silent(now) {
            self.link = LinkFreshness::Silent;
            self.feed(EngineInput::LinkSilent)?;
        }
        if self.link < LinkFreshness::Lost && self.contact.is_lost(now) {
            self.link = LinkFreshness::Lost;
            self.feed(EngineInput::LinkLost)?;
        }
        Ok(())
    }
}
