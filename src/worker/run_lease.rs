//! The run lease, as the worker sees it: the time since the pod's last contact with the controller.
//!
//! Pure: the caller reads both clocks. The larger of the two elapsed times counts, so that a contact never seems more
//! recent than it is.

use std::time::Duration;

use crate::link::messages::RUN_LEASE_SECONDS;
use crate::support::clock::ClockReading;

/// How long a worker may act without contact.
pub const RUN_LEASE: Duration = Duration::from_secs(RUN_LEASE_SECONDS);

/// How long a worker may start tools with side effects without contact: half the lease, so that a tool started last has
/// time to finish before the lease expires.
pub const ACTION_LEASE: Duration = Duration::from_secs(RUN_LEASE_SECONDS / 2);

/// The last contact, as reported by the gateway.
#[derive(Clone, Copy, Debug)]
pub struct RunLease {
    received: ClockReading,
    age: Duration,
}

impl RunLease {
    /// The gateway reported at `received` that the last contact was `age` ago.
    #[must_use]
    pub fn new(received: ClockReading, age: Duration) -> Self {
        Self { received, age }
    }

    /// Returns the time since the last contact.
    #[must_use]
    pub fn age(&self, now: ClockReading) -> Duration {
        self.age.saturating_add(now.since(self.received))
    }

    /// Whether the run lease has expired.
    #[must_use]
    pub fn is_lost(&self, now: ClockReading) -> bool {
        self.age(now) >= RUN_LEASE
    }

    /// Whether tools with side effects must no longer be started.
    #[must_use]
    pub fn is_silent(&self, now: ClockReading) -> bool {
        self.age(now) >= ACTION_LEASE
    }

    /// Returns how long tools with side effects may still be started.
    #[must_use]
    pub fn time_until_silent(&self, now: ClockReading) -> Duration {
        ACTION_LEASE.saturating_sub(self.age(now))
    }

    /// Returns how long the run lease still holds.
    #[must_use]
    pub fn time_until_lost(&self, now: ClockReading) -> Duration {
        RUN_LEASE.saturating_sub(self.age(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later(from: ClockReading, monotonic: u64, wall: i64) -> ClockReading {
        from.later(monotonic * 1000, wall * 1000)
    }

    #[test]
    fn the_lease_runs_out_at_its_last_second_and_not_before() {
        let start = ClockReading::now();
        let contact = RunLease::new(start, Duration::from_secs(10));
        assert!(!contact.is_lost(later(start, 49, 49)));
        assert_eq!(contact.time_until_lost(later(start, 49, 49)), Duration::from_secs(1));
        assert!(contact.is_lost(later(start, 50, 50)));
        assert_eq!(contact.time_until_lost(later(start, 51, 51)), Duration::ZERO);
    }

    #[test]
    fn the_link_is_silent_at_half_the_lease_and_not_before() {
        let start = ClockReading::now();
        let contact = RunLease::new(start, Duration::from_secs(10));
        assert!(!contact.is_silent(later(start, 19, 19)));
        assert_eq!(contact.time_until_silent(later(start, 19, 19)), Duration::from_secs(1));
        assert!(contact.is_silent(later(start, 20, 20)));
        assert_eq!(contact.time_until_silent(later(start, 21, 21)), Duration::ZERO);
    }

    #[test]
    fn a_suspended_machine_counts_by_the_wall_clock() {
        let start = ClockReading::now();
        assert!(RunLease::new(start, Duration::ZERO).is_lost(later(start, 1, 60)));
    }

    #[test]
    fn a_wall_clock_set_back_counts_by_the_monotonic_clock() {
        let start = ClockReading::now();
        let contact = RunLease::new(start, Duration::ZERO);
        assert!(!contact.is_lost(later(start, 59, -3600)));
        assert!(contact.is_lost(later(start, 60, -3600)));
    }

    #[test]
    fn an_absurd_age_is_only_lost() {
        let start = ClockReading::now();
        assert!(RunLease::new(start, Duration::from_millis(u64::MAX)).is_lost(start));
    }
}
