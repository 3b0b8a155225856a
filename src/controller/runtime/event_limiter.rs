//! Limits how many Events with one reason are written about one object: a burst, then one per interval.
//!
//! The figures are those of the spam filter in client-go's `EventCorrelator`. Its key is the source and the object; here the
//! reason is part of it, so that an object that has many Events of one reason loses none of another one, such as the answer
//! to a request for approval. Reasons are constants of this program, so an object has few.

use std::collections::HashMap;

use jiff::Timestamp;

use super::events::EventHash;

/// Maximum number of Events at once.
pub(super) const BURST: u16 = 25;
/// Time after which another Event is admitted, in milliseconds: five minutes.
pub(super) const REFILL: i64 = 5 * 60 * 1000;
/// Maximum number of keys with fewer than [`BURST`] Events left; beyond them, the one that has most left begins with a
/// full burst again.
pub(super) const MAX_KEYS: usize = 4096;

/// A token bucket of each object and reason.
#[derive(Default)]
pub(super) struct EventLimiter {
    /// When each bucket will be full again, in milliseconds of Unix time. One without an entry is full.
    full_at: HashMap<EventHash, i64>,
}

impl EventLimiter {
    /// Whether an Event with this key may be written now. If so, it is counted.
    pub(super) fn admit(&mut self, key: EventHash, now: Timestamp) -> bool {
        let now = now.as_millisecond();
        self.full_at.retain(|_, full_at| *full_at > now);
        let empty = now.saturating_add(REFILL.saturating_mul(BURST.into()));
        // A clock that was set back must not leave a bucket more than empty.
        let full_at = self.full_at.get(&key).map_or(now, |full_at| *full_at.min(&empty));
        let after = full_at.saturating_add(REFILL);
        if after > empty {
            self.full_at.insert(key, full_at);
            return false;
        }
        if !self.full_at.contains_key(&key) {
            self.make_room();
        }
        self.full_at.insert(key, after);
        true
    }

    fn make_room(&mut self) {
        if self.full_at.len() < MAX_KEYS {
            return;
        }
        let fullest = self.full_at.iter().min_by_key(|(_, full_at)| **full_at);
        if let Some(fullest) = fullest.map(|(key, _)| *key) {
            self.full_at.remove(&fullest);
        }
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::support::hash;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(milliseconds).unwrap()
    }

    fn key(name: &str) -> EventHash {
        hash::sha256(name)
    }

    /// How many of 100 Events at this time are admitted.
    fn admitted(limiter: &mut EventLimiter, name: &str, milliseconds: i64) -> usize {
        let admit = |_: &usize| limiter.admit(key(name), at(milliseconds));
        (0..100).filter(admit).count()
    }

    #[test]
    fn twenty_five_at_once_and_then_one_every_five_minutes() {
        let mut limiter = EventLimiter::default();
        assert_eq!(admitted(&mut limiter, "a", 0), 25);
        assert_eq!(admitted(&mut limiter, "b", 0), 25, "another key has a burst of its own");
        assert_eq!(admitted(&mut limiter, "a", REFILL - 1), 0);
        assert_eq!(admitted(&mut limiter, "a", REFILL), 1);
        assert_eq!(admitted(&mut limiter, "a", 2 * REFILL - 1), 0);
        assert_eq!(admitted(&mut limiter, "a", 4 * REFILL), 3);
        // Refused ones cost nothing, and no more than a burst is saved up.
        assert_eq!(admitted(&mut limiter, "a", 28 * REFILL), 24);
        assert_eq!(admitted(&mut limiter, "a", 100 * REFILL), 25);
    }

    #[test]
    fn a_clock_that_is_set_back_delays_no_event_by_more_than_an_empty_bucket_does() {
        let mut limiter = EventLimiter::default();
        assert_eq!(admitted(&mut limiter, "a", 1_000 * REFILL), 25);
        assert_eq!(admitted(&mut limiter, "a", 0), 0);
        assert_eq!(admitted(&mut limiter, "a", REFILL - 1), 0);
        assert_eq!(admitted(&mut limiter, "a", REFILL), 1);
    }

    #[test]
    fn full_buckets_take_no_memory_and_of_too_many_others_the_fullest_is_forgotten() {
        let mut limiter = EventLimiter::default();
        assert_eq!(admitted(&mut limiter, "noisy", 0), 25);
        for number in 1..MAX_KEYS {
            assert!(limiter.admit(key(&number.to_string()), at(0)));
        }
        assert_eq!(limiter.full_at.len(), MAX_KEYS);
        assert!(limiter.full_at.contains_key(&key("noisy")));
        assert!(limiter.admit(key("one more"), at(0)));
        assert_eq!(limiter.full_at.len(), MAX_KEYS);
        assert_eq!(admitted(&mut limiter, "noisy", 0), 0, "still limited");
        assert!(limiter.admit(key("later"), at(REFILL)));
        assert_eq!(limiter.full_at.len(), 2);
    }
}
