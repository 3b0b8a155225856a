//! Exponential backoff of a source: its interval, doubled with each failure, up to 300 s.

use std::time::Duration;

use agentloop_support::backoff::Backoff;

/// Longest wait after a failure, unless the interval is longer.
pub const MAX_PAUSE: Duration = Duration::from_mins(5);

/// The backoff of a source that is read at an interval.
#[derive(Clone, Copy, Debug)]
pub struct SourceBackoff(Backoff);

impl SourceBackoff {
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self(Backoff::new(interval.saturating_mul(2), MAX_PAUSE.max(interval)))
    }

    /// Resets the wait to the interval.
    pub fn succeed(&mut self) {
        self.0.reset();
    }

    /// Records a failure and returns the wait until the next attempt. `jitter`, 0 to 1, shortens it by up to a tenth,
    /// so that Sensors whose source failed at the same time do not all retry at once.
    pub fn fail(&mut self, jitter: f64) -> Duration {
        self.0.next_wait().mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 10.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(interval: u64, failures: usize) -> Vec<u64> {
        let mut backoff = SourceBackoff::new(Duration::from_secs(interval));
        (0..failures).map(|_| backoff.fail(0.0).as_secs()).collect()
    }

    #[test]
    fn the_wait_doubles_up_to_300_seconds() {
        assert_eq!(waits(5, 8), [10, 20, 40, 80, 160, 300, 300, 300]);
    }

    #[test]
    fn an_interval_above_300_seconds_stays_as_it_is() {
        assert_eq!(waits(3_600, 3), [3_600, 3_600, 3_600]);
        assert_eq!(waits(300, 2), [300, 300]);
        assert_eq!(waits(299, 2), [300, 300]);
    }

    #[test]
    fn only_a_success_brings_the_interval_back() {
        let mut backoff = SourceBackoff::new(Duration::from_secs(5));
        backoff.fail(0.0);
        backoff.fail(0.0);
        backoff.succeed();
        assert_eq!(backoff.fail(0.0).as_secs(), 10);
    }

    #[test]
    fn jitter_subtracts_at_most_a_tenth_and_adds_nothing() {
        let wait = |jitter| SourceBackoff::new(Duration::from_secs(50)).fail(jitter);
        assert_eq!(wait(0.0), Duration::from_secs(100));
        assert_eq!(wait(1.0), Duration::from_secs(90));
        assert_eq!(wait(7.0), Duration::from_secs(90));
    }

    #[test]
    fn the_backoff_stays_at_its_maximum_after_thousands_of_failures() {
        let mut backoff = SourceBackoff::new(Duration::from_secs(1));
        let last = (0..100_000).map(|_| backoff.fail(0.0)).last();
        assert_eq!(last, Some(MAX_PAUSE));
    }
}
