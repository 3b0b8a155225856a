//! Limits the events that a sensor pod can make take effect: `limits.perMinute` is enforced in that pod, and an
//! attacker who took over the pod would not enforce it.
//!
//! A token bucket. Many events arrive late and at once after the receiver was unavailable, so a burst of a full outbox
//! is always accepted, and in the long run no more than the limit. An honest pod never reaches the quota, whatever its
//! clock shows: only the receiver's own clock counts.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::link::deliveries::{MAX_EVENTS, MAX_NOTIFICATIONS};

/// Events that an outbox holds for a receiver that is unavailable: the size of the bucket.
pub(super) const BACKLOG: i64 = MAX_EVENTS + MAX_NOTIFICATIONS;
/// One event in the bucket's units: a limit of one event per minute refills one unit per millisecond.
const EVENT: i64 = 60_000;

/// The bucket's current debt.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct EventQuota {
    /// In units of [`EVENT`].
    taken: i64,
    at: Option<Timestamp>,
}

impl EventQuota {
    /// Takes an event of a Sensor with this limit. Returns false if a pod that enforces the limit cannot have sent it.
    pub(super) fn try_take(&mut self, per_minute: u32, now: Timestamp) -> bool {
        let per_minute = i64::from(per_minute);
        let passed = self.at.map_or(0, |at| now.duration_since(at).as_millis());
        // A clock that was set back refills nothing.
        let passed = i64::try_from(passed.max(0)).unwrap_or(i64::MAX);
        self.at = Some(now);
        self.taken = self.taken.saturating_sub(passed.saturating_mul(per_minute)).max(0);
        if self.taken > (BACKLOG + per_minute - 1) * EVENT {
            return false;
        }
        self.taken += EVENT;
        true
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_767_225_600 + seconds).expect("a moment")
    }

    fn taken(pace: &mut EventQuota, offered: usize, now: Timestamp) -> usize {
        (0..offered).filter(|_| pace.try_take(60, now)).count()
    }

    #[test]
    fn a_full_outbox_is_accepted_at_once_and_then_as_many_events_as_the_limit_allows() {
        let mut pace = EventQuota::default();
        assert_eq!(taken(&mut pace, 20_059, at(0)), 20_059);
        assert_eq!(taken(&mut pace, 10, at(0)), 1);
        assert_eq!(taken(&mut pace, 100, at(1)), 1);
        assert_eq!(taken(&mut pace, 100, at(61)), 60);
        assert_eq!(taken(&mut pace, 100, at(61)), 0);
        // 20,060 events at 60 per minute: after as many seconds the bucket is empty again.
        assert_eq!(taken(&mut pace, 30_000, at(61 + 20_060)), 20_060);
    }

    #[test]
    fn a_clock_that_was_set_back_changes_no_quota() {
        let mut pace = EventQuota::default();
        assert_eq!(taken(&mut pace, 30_000, at(3_600)), 20_060);
        assert_eq!(taken(&mut pace, 10, at(0)), 0);
        assert_eq!(taken(&mut pace, 10, at(5)), 5);
        assert_eq!(taken(&mut pace, 1, Timestamp::MAX), 1);
        assert_eq!(taken(&mut pace, 1, Timestamp::MIN), 1);
    }
}
