//! The ledger's time: the wall clock at the start of the term plus the time elapsed since, including suspensions of the
//! machine.
//!
//! Setting the wall clock during a term has no effect. An account whose record is ahead of this time continues from the
//! record's time ([`crate::ledger::account::Account::restore`]), so that its time never runs backwards.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// Shorter differences between the clocks are not treated as a suspension.
const SUSPENDED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub struct LeaderClock {
    base: Timestamp,
    start: Instant,
    boot: Duration,
}

impl LeaderClock {
    #[must_use]
    pub fn new(wall: Timestamp) -> Self {
        Self {
            base: wall,
            start: Instant::now(),
            boot: since_boot(),
        }
    }

    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.reading(self.start.elapsed(), since_boot())
    }

    /// The monotonic clock stops while a machine is suspended, the boot clock does not.
    fn reading(&self, elapsed: Duration, boot: Duration) -> Timestamp {
        let boot = boot.saturating_sub(self.boot);
        // The two clocks are read one after the other, so a small difference is not a suspension.
        let suspended = boot.saturating_sub(elapsed) >= SUSPENDED;
        let passed = if suspended { boot } else { elapsed };
        self.base.checked_add(passed).unwrap_or(Timestamp::MAX)
    }

    /// Time from now until `moment`.
    #[must_use]
    pub fn until(&self, moment: Timestamp) -> Duration {
        Duration::try_from(moment.duration_since(self.now())).unwrap_or(Duration::ZERO)
    }
}

fn since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn time_follows_the_monotonic_clock() {
        let clock = LeaderClock::new(Timestamp::UNIX_EPOCH);
        tokio::time::advance(Duration::from_secs(90)).await;
        assert_eq!(
            clock.reading(clock.start.elapsed(), clock.boot),
            Timestamp::constant(90, 0)
        );
        let suspended = clock.boot + Duration::from_hours(8);
        assert_eq!(
            clock.reading(clock.start.elapsed(), suspended),
            Timestamp::constant(28_800, 0)
        );
        assert_eq!(clock.until(Timestamp::constant(100, 0)), Duration::from_secs(10));
        assert_eq!(clock.until(Timestamp::constant(1, 0)), Duration::ZERO);
    }
}
