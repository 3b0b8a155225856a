//! The clock of leases: milliseconds since the gateway began, never back, and never behind the time that has passed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use jiff::Timestamp;

/// The monotonic clock stands still while a machine is suspended, and the wall clock may be set: what shows more counts,
/// so that a lease ends early rather than late.
pub struct Clock {
    instant: Instant,
    wall: Timestamp,
    latest: AtomicU64,
}

impl Clock {
    /// Zero, now.
    pub fn start() -> Self {
        Self {
            instant: Instant::now(),
            wall: Timestamp::now(),
            latest: AtomicU64::new(0),
        }
    }

    /// Milliseconds since then.
    pub fn now(&self) -> u64 {
        self.reading(Instant::now(), Timestamp::now())
    }

    fn reading(&self, instant: Instant, wall: Timestamp) -> u64 {
        let monotonic = instant.saturating_duration_since(self.instant).as_millis();
        let wall = wall.duration_since(self.wall).as_millis().max(0).unsigned_abs();
        let now = u64::try_from(monotonic.max(wall)).unwrap_or(u64::MAX);
        self.latest.fetch_max(now, Ordering::Relaxed).max(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn the_clock_that_shows_more_counts_and_time_never_goes_back() {
        let clock = Clock::start();
        let (instant, wall) = (clock.instant, clock.wall);
        let later = |seconds: u64| instant + Duration::from_secs(seconds);
        let set = |seconds: i64| wall + SignedDuration::from_secs(seconds);
        assert_eq!(clock.reading(later(1), set(-500)), 1_000, "the wall clock was set back");
        assert_eq!(clock.reading(later(2), set(90)), 90_000, "the machine was suspended");
        assert_eq!(clock.reading(later(3), set(3)), 90_000);
        assert_eq!(clock.reading(later(91), set(3)), 91_000);
    }
}
