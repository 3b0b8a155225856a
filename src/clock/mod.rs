//! Time that has passed, by two clocks.
//!
//! The monotonic clock stands still while a machine is suspended, and the wall clock may be set. Whoever must not take
//! something for fresher than it is asks both, and the larger time counts. Decides nothing itself.

use std::time::{Duration, Instant};

use jiff::Timestamp;

/// A reading of both clocks.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    /// Monotonic.
    pub instant: Instant,
    /// Wall.
    pub wall: Timestamp,
}

impl ClockReading {
    /// Both clocks now.
    #[must_use]
    pub fn now() -> Self {
        Self {
            instant: Instant::now(),
            wall: Timestamp::now(),
        }
    }

    /// Time passed since `earlier`, by the clock that shows more.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        let monotonic = self.instant.saturating_duration_since(earlier.instant);
        let wall = Duration::try_from(self.wall.duration_since(earlier.wall)).unwrap_or_default();
        monotonic.max(wall)
    }

    /// Whether somebody set the wall clock back after `earlier`.
    #[must_use]
    pub fn was_set_back_since(self, earlier: Self) -> bool {
        let monotonic = self.instant.saturating_duration_since(earlier.instant);
        let wall = Duration::try_from(self.wall.duration_since(earlier.wall)).unwrap_or_default();
        monotonic > wall + SLACK
    }
}

#[cfg(test)]
impl ClockReading {
    /// A reading when so many milliseconds have passed by each clock.
    pub(crate) fn later(self, monotonic: u64, wall: i64) -> Self {
        Self {
            instant: self.instant + Duration::from_millis(monotonic),
            wall: self.wall + jiff::SignedDuration::from_millis(wall),
        }
    }
}

/// How much the wall clock may lag behind the monotonic one before it counts as set back.
const SLACK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    /// Both clocks so many seconds later.
    fn later(from: ClockReading, monotonic: u64, wall: i64) -> ClockReading {
        from.later(monotonic * 1000, wall * 1000)
    }

    #[test]
    fn the_clock_that_shows_more_counts() {
        let start = ClockReading::now();
        assert_eq!(later(start, 5, 5).since(start), Duration::from_secs(5));
        assert_eq!(
            later(start, 5, 3_600).since(start),
            Duration::from_hours(1),
            "suspended"
        );
        assert_eq!(later(start, 5, -3_600).since(start), Duration::from_secs(5), "set back");
        assert_eq!(start.since(later(start, 5, 5)), Duration::ZERO);
    }

    #[test]
    fn a_wall_clock_that_lags_by_more_than_a_second_was_set_back() {
        let start = ClockReading::now();
        assert!(!later(start, 30, 30).was_set_back_since(start));
        assert!(!later(start, 30, 29).was_set_back_since(start));
        assert!(later(start, 30, 28).was_set_back_since(start));
        assert!(!later(start, 30, 3600).was_set_back_since(start));
    }
}
