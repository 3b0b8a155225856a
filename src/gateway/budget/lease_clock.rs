//! The clock of leases: milliseconds since the gateway began, never back, and never behind the time that has passed.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::ClockReading;

/// What shows more of the two clocks counts, so that a lease ends early rather than late.
pub struct LeaseClock {
    start: ClockReading,
    latest: AtomicU64,
}

impl LeaseClock {
    /// Zero, now.
    pub fn start() -> Self {
        Self {
            start: ClockReading::now(),
            latest: AtomicU64::new(0),
        }
    }

    /// Milliseconds since then.
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
    fn the_clock_that_shows_more_counts_and_time_never_goes_back() {
        let clock = LeaseClock::start();
        let reading = |monotonic, wall| clock.reading(clock.start.later(monotonic, wall));
        assert_eq!(reading(1_000, -500_000), 1_000, "the wall clock was set back");
        assert_eq!(reading(2_000, 90_000), 90_000, "the machine was suspended");
        assert_eq!(reading(3_000, 3_000), 90_000);
        assert_eq!(reading(91_000, 3_000), 91_000);
    }
}
