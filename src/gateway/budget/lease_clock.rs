//! The clock of leases: milliseconds since the gateway started. It never runs backwards, and counts suspensions of the
//! machine.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::clock::ClockReading;

/// Uses whichever of the two clocks shows more, so that a lease ends too early rather than too late.
pub struct LeaseClock {
    start: ClockReading,
    latest: AtomicU64,
}

impl LeaseClock {
    pub fn start() -> Self {
        Self {
            start: ClockReading::now(),
            latest: AtomicU64::new(0),
        }
    }

    /// Milliseconds since the start.
    pub fn now(&self) -> u64 {
        self.reading(ClockReading::now())
    }

    fn reading(&self, clocks: ClockReading) -> u64 {
        let now = u64::try_from(clocks.since(self.start).as_millis()).unwrap_or(u64::MAX);
        self.latest.fetch_max(now, Ordering::Relaxed).max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_that_is_ahead_counts_and_time_never_decreases() {
        let clock = LeaseClock::start();
        let reading = |monotonic, wall| clock.reading(clock.start.later(monotonic, wall));
        assert_eq!(reading(1_000, -500_000), 1_000, "the wall clock was set back");
        assert_eq!(reading(2_000, 90_000), 90_000, "the machine was suspended");
        assert_eq!(reading(3_000, 3_000), 90_000);
        assert_eq!(reading(91_000, 3_000), 91_000);
    }
}
