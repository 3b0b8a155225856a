//! Delays of reconciles, above all exponential backoff. Pure: the jitter is a hash of the object, so that many objects do not retry at
//! the same moment, and tests are deterministic.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use jiff::Timestamp;

use crate::support::backoff::doubled;

#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct ReconcileBackoff {
    /// Delay before the second attempt.
    pub(in crate::controller) first: Duration,
    /// Upper limit of the delay.
    pub(in crate::controller) max: Duration,
}

/// After an error of the API server.
pub(in crate::controller) const ERRORS: ReconcileBackoff = ReconcileBackoff {
    first: Duration::from_secs(1),
    max: Duration::from_mins(5),
};
/// While a referenced object is missing. Referenced objects are not watched, so they are polled.
pub(in crate::controller) const REFERENCES: ReconcileBackoff = ReconcileBackoff {
    first: Duration::from_secs(1),
    max: Duration::from_secs(30),
};
/// Before a pod is recreated that failed or that the API server rejected.
pub(in crate::controller) const PODS: ReconcileBackoff = ReconcileBackoff {
    first: Duration::from_secs(1),
    max: Duration::from_mins(5),
};

/// The time from `now` to `moment`; zero if that is in the past.
pub(in crate::controller) fn until(moment: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(moment.duration_since(now)).unwrap_or(Duration::ZERO)
}

impl ReconcileBackoff {
    /// The delay after `attempts` failed attempts (1 or more): 80 to 100 % of the doubled value.
    pub(in crate::controller) fn delay(self, attempts: u32, object: &str) -> Duration {
        let doubled = doubled(self.first, attempts.saturating_sub(1), self.max);
        let mut hasher = DefaultHasher::new();
        (object, attempts).hash(&mut hasher);
        let percent = u32::try_from(hasher.finish() % 21).unwrap_or(0);
        doubled * (100 - percent) / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_limit_and_stay_within_a_fifth() {
        for (attempts, full) in [(1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (7, 30), (1000, 30)] {
            let delay = REFERENCES.delay(attempts, "uid");
            let full = Duration::from_secs(full);
            assert!(delay <= full && delay >= full * 8 / 10, "{attempts}: {delay:?}");
        }
    }

    #[test]
    fn two_objects_do_not_wait_in_step() {
        let delays: std::collections::BTreeSet<_> = (0..20).map(|n| REFERENCES.delay(6, &format!("uid-{n}"))).collect();
        assert!(delays.len() > 5);
    }
}
