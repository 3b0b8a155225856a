//! Elapsed time by two clocks.
//!
//! The monotonic clock stops while a machine is suspended, and the wall clock can be set. Code that must not
//! underestimate the age of something reads both, and the larger time counts. Example: a run lease has expired if
//! either clock says so.

use std::time::{Duration, Instant};

use jiff::Timestamp;

#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    pub instant: Instant,
    pub wall: Timestamp,
}

impl ClockReading {
    #[must_use]
    pub fn now() -> Self {
        Self {
            instant: Instant::now(),
            wall: Timestamp::now(),
        }
    }

    /// Time elapsed since `earlier`: the larger of the two clocks' values.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        let monotonic = self.instant.saturating_duration_since(earlier.instant);
        let wall = Duration::try_from(self.wall.duration_since(earlier.wall)).unwrap_or_default();
        monotonic.max(wall)
    }

    /// Whether the wall clock was set back after `earlier`.
    #[must_use]
    pub fn was_set_back_since(self, earlier: Self) -> bool {
        let monotonic = self.instant.saturating_duration_since(earlier.instant);
        let wall = Duration::try_from(self.wall.duration_since(earlier.wall)).unwrap_or_default();
        monotonic > wall + SLACK
    }
}

impl ClockReading {
    /// A reading after this many milliseconds on each clock, for tests.
    #[must_use]
    pub fn later(self, monotonic: u64, wall: i64) -> Self {
        Self {
            instant: self.instant + Duration::from_millis(monotonic),
            wall: self.wall + jiff::SignedDuration::from_millis(wall),
        }
    }
}

/// A time in RFC 3339 with whole seconds, as Kubernetes writes it.
#[must_use]
pub fn rfc3339_seconds(moment: Timestamp) -> String {
    moment.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// How far the wall clock may lag behind the monotonic clock before it counts as set back.
const SLACK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    /// A reading after this many seconds on each clock.
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
    fn a_time_is_written_without_fractions_of_a_second() {
        let moment = Timestamp::new(1_800_000_000, 999_999_999).unwrap();
        assert_eq!(rfc3339_seconds(moment), "2027-01-15T08:00:00Z");
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
