//! Exponential backoff, and the jitter that keeps many processes from retrying at the same moment.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Waits that double from the first to the longest.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    attempts: u32,
}

impl Backoff {
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            attempts: 0,
        }
    }

    /// Starts over with the first wait.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }

    /// The wait before the next attempt.
    pub fn next_wait(&mut self) -> Duration {
        let wait = doubled(self.first, self.attempts, self.longest);
        self.attempts = self.attempts.saturating_add(1);
        wait
    }

    /// The same, between half and all of it, by `jitter` from 0 to 1.
    pub fn next_spread(&mut self, jitter: f64) -> Duration {
        self.next_wait().mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
    }
}

/// `first`, doubled `times` times, but at most `longest`.
#[must_use]
pub fn doubled(first: Duration, times: u32, longest: Duration) -> Duration {
    let factor = 1_u32.checked_shl(times).unwrap_or(u32::MAX);
    first.saturating_mul(factor).min(longest)
}

/// A random number from 0 to 1.
#[must_use]
pub fn jitter() -> f64 {
    let bits = RandomState::new().hash_one(0_u8) >> 32;
    f64::from(u32::try_from(bits).unwrap_or(0)) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_secs(1);
    const MAX_DELAY: Duration = Duration::from_secs(30);

    #[test]
    fn waits_double_up_to_the_longest_and_start_over_after_a_reset() {
        let mut backoff = Backoff::new(FIRST, MAX_DELAY);
        let mut waits = |count: usize| -> Vec<u64> {
            let waits = (0..count).map(|_| backoff.next_wait().as_secs()).collect();
            backoff.reset();
            waits
        };
        assert_eq!(waits(7), [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(waits(2), [1, 2]);
    }

    #[test]
    fn jitter_spreads_a_wait_over_its_second_half() {
        let wait = |jitter| Backoff::new(FIRST, MAX_DELAY).next_spread(jitter);
        assert_eq!(wait(0.0), Duration::from_millis(500));
        assert_eq!(wait(1.0), Duration::from_secs(1));
        assert_eq!(wait(7.0), Duration::from_secs(1));
    }

    #[test]
    fn no_number_of_attempts_overflows() {
        for times in [31, 32, 33, u32::MAX] {
            assert_eq!(doubled(FIRST, times, MAX_DELAY), MAX_DELAY, "{times}");
        }
        assert_eq!(doubled(Duration::MAX, 1, Duration::MAX), Duration::MAX);
    }

    #[test]
    fn random_numbers_are_in_range_and_differ() {
        let numbers: Vec<f64> = (0..20).map(|_| jitter()).collect();
        assert!(numbers.iter().all(|number| (0.0..=1.0).contains(number)));
        assert!(numbers.iter().any(|number| (number - numbers[0]).abs() > f64::EPSILON));
    }
}
