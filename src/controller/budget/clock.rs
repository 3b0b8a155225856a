//! The ledger's time: the wall's at the take-over, then the monotonic clock's.
//!
//! A wall clock that is set during a term changes nothing. An account whose record is ahead of this time goes on from
//! there ([`crate::ledger::account::Account::restore`]): its time never runs back.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// The time of one leader's term.
#[derive(Clone, Copy, Debug)]
pub struct LeaderClock {
    base: Timestamp,
    start: Instant,
}

impl LeaderClock {
    /// Begins a term.
    #[must_use]
    pub fn new(wall: Timestamp) -> Self {
        Self {
            base: wall,
            start: Instant::now(),
        }
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.base.checked_add(self.start.elapsed()).unwrap_or(Timestamp::MAX)
    }

    /// From now to `moment`.
    #[must_use]
    pub fn until(&self, moment: Timestamp) -> Duration {
        Duration::try_from(moment.duration_since(self.now())).unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_goes_by_the_monotonic_clock() {
        let clock = LeaderClock::new(Timestamp::UNIX_EPOCH);
        tokio::time::advance(Duration::from_secs(90)).await;
        assert_eq!(clock.now(), Timestamp::constant(90, 0));
        assert_eq!(clock.until(Timestamp::constant(100, 0)), Duration::from_secs(10));
        assert_eq!(clock.until(Timestamp::constant(1, 0)), Duration::ZERO);
    }
}
