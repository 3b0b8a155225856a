//! The ledger's time: the wall's at the take-over, then the time that has passed, also while the machine was suspended.
//!
//! A wall clock that is set during a term changes nothing. An account whose record is ahead of this time goes on from
//! there ([`crate::ledger::account::Account::restore`]): its time never runs back.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// A shorter suspension is none.
const SUSPENDED: Duration = Duration::from_secs(1);

/// The time of one leader's term.
#[derive(Clone, Copy, Debug)]
pub struct LeaderClock {
    base: Timestamp,
    start: Instant,
    boot: Duration,
}

impl LeaderClock {
    /// Begins a term.
    #[must_use]
    pub fn new(wall: Timestamp) -> Self {
        Self {
            base: wall,
            start: Instant::now(),
            boot: since_boot(),
        }
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.reading(self.start.elapsed(), since_boot())
    }

    /// The monotonic clock stands still while a machine is suspended, the clock of the boot does not.
    fn reading(&self, elapsed: Duration, boot: Duration) -> Timestamp {
        let boot = boot.saturating_sub(self.boot);
        // They are read one after the other.
        let suspended = boot.saturating_sub(elapsed) >= SUSPENDED;
        let passed = if suspended { boot } else { elapsed };
        self.base.checked_add(passed).unwrap_or(Timestamp::MAX)
    }

    /// From now to `moment`.
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
    async fn it_goes_by_the_monotonic_clock() {
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
