//! Usage of each limited resource in rolling windows: the state of the rate limits. Pure.
//!
//! For limits of up to [`PIECES`], each use is stored with its time. A larger limit counts its window in that many
//! pieces and parts of two more, so that a limit of a million costs the snapshot no more than one of sixty. A piece
//! expires when all of it is outside the window: never early, and late by at most one piece.

use std::collections::{BTreeMap, VecDeque};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use agentloop_api::agent::{LimitedResource, RateLimit};

/// Pieces of a window.
const PIECES: i64 = 60;
/// Milliseconds of the shortest piece.
const MIN_PIECE: i64 = 50;

/// A limit on one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceLimit {
    pub resource: LimitedResource,
    /// At least 1.
    pub amount: u64,
    seconds: u32,
}

impl From<&RateLimit> for ResourceLimit {
    fn from(limit: &RateLimit) -> Self {
        Self {
            resource: limit.resource,
            amount: limit.amount.max(1),
            seconds: limit.window_seconds.max(1),
        }
    }
}

impl ResourceLimit {
    /// The limit on tool runs with side effects per minute.
    pub fn of_actions_per_minute(amount: u32) -> Self {
        Self {
            resource: LimitedResource::Actions,
            amount: amount.max(1).into(),
            seconds: 60,
        }
    }
}

impl std::fmt::Display for ResourceLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} in {} s", self.amount, self.resource, self.seconds)
    }
}

impl ResourceLimit {
    /// Identifies its window, whatever the amount: an edited amount keeps the usage.
    fn key(self) -> String {
        format!("{}/{}", self.resource, self.seconds)
    }

    fn window(self) -> i64 {
        i64::from(self.seconds) * 1000
    }

    fn piece(self) -> i64 {
        if self.amount <= PIECES.unsigned_abs() {
            return 1;
        }
        // Rounded up, so that there are at most PIECES.
        (self.window() + PIECES - 1).div_euclid(PIECES).max(MIN_PIECE)
    }

    /// The last millisecond of the current piece.
    fn piece_ends(self, now: Timestamp) -> i64 {
        let now = rounded_up(now);
        now - now.rem_euclid(self.piece()) + self.piece() - 1
    }

    /// When a piece leaves the window.
    fn leaves(self, end: i64) -> i64 {
        end.saturating_add(self.window())
    }
}

/// Milliseconds, rounded up so that nothing expires early.
fn rounded_up(now: Timestamp) -> i64 {
    let is_between = now.subsec_nanosecond() % 1_000_000 != 0;
    now.as_millisecond().saturating_add(i64::from(is_between))
}

/// A sleeping loop's wait for room, written `resource/<resource>/<amount>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceWait(LimitedResource, u64);

impl ResourceWait {
    /// Parses a name; `None`: it has another form.
    #[must_use]
    pub fn read(name: &str) -> Option<Self> {
        let (resource, amount) = name.strip_prefix("resource/")?.split_once('/')?;
        let amount: u64 = amount.parse().ok().filter(|amount| *amount > 0)?;
        Some(Self(resource.parse().ok()?, amount))
    }

    /// The resource and the amount.
    #[must_use]
    pub fn parts(self) -> (LimitedResource, u64) {
        (self.0, self.1)
    }

    /// When all limits have that much room, if nothing is used meanwhile. `None`: now.
    #[must_use]
    pub fn comes_at(self, used: &ResourceTracker, limits: &[ResourceLimit], now: Timestamp) -> Option<Timestamp> {
        let (resource, amount) = self.parts();
        let limits = limits.iter().filter(|limit| limit.resource == resource);
        limits.filter_map(|limit| used.room_at(*limit, amount, now)).max()
    }
}

/// Usage by window: the last millisecond of each piece, and the amount used in it. Persisted, in milliseconds of Unix
/// time.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct ResourceTracker(BTreeMap<String, VecDeque<(i64, u64)>>);

impl ResourceTracker {
    /// Drops the windows that no limit has any more.
    pub fn retain_limits(&mut self, limits: &[ResourceLimit]) {
        let keys: Vec<String> = limits.iter().map(|limit| limit.key()).collect();
        self.0.retain(|key, _| keys.contains(key));
    }

    /// Counts the use of an amount.
    pub fn count(&mut self, limits: &[ResourceLimit], resource: LimitedResource, amount: u64, now: Timestamp) {
        for limit in windows(limits, resource) {
            let pieces = self.0.entry(limit.key()).or_default();
            while pieces
                .front()
                .is_some_and(|(end, _)| limit.leaves(*end) <= now.as_millisecond())
            {
                pieces.pop_front();
            }
            match pieces.back_mut().filter(|(end, _)| *end >= rounded_up(now)) {
                Some((_, used)) => *used = used.saturating_add(amount),
                None => pieces.push_back((limit.piece_ends(now), amount)),
            }
        }
    }

    /// Takes back an amount of what was counted last.
    pub fn give_back(&mut self, limits: &[ResourceLimit], resource: LimitedResource, amount: u64) {
        for limit in windows(limits, resource) {
            let pieces = self.0.get_mut(&limit.key());
            if let Some((_, used)) = pieces.and_then(VecDeque::back_mut) {
                *used = used.saturating_sub(amount);
            }
        }
    }

    /// The amount of a limit that is used now.
    #[must_use]
    pub fn used(&self, limit: ResourceLimit, now: Timestamp) -> u64 {
        let now = now.as_millisecond();
        let pieces = self.0.get(&limit.key()).into_iter().flatten();
        let inside = pieces.filter(|(end, _)| limit.leaves(*end) > now);
        inside.fold(0, |sum, (_, used)| sum.saturating_add(*used))
    }

    /// When a limit has room for that much more. `None`: now. For more than the whole limit: once the window is empty.
    #[must_use]
    pub fn room_at(&self, limit: ResourceLimit, amount: u64, now: Timestamp) -> Option<Timestamp> {
        let now = now.as_millisecond();
        let pieces = self.0.get(&limit.key())?;
        let inside = pieces.iter().filter(|(end, _)| limit.leaves(*end) > now);
        let mut used = inside.clone().fold(0_u64, |sum, (_, used)| sum.saturating_add(*used));
        let mut room_at = None;
        // Pieces expire from the oldest on: the wait ends once enough of them have left.
        for (end, amount_of_piece) in inside {
            if used.saturating_add(amount) <= limit.amount {
                break;
            }
            used = used.saturating_sub(*amount_of_piece);
            room_at = Some(limit.leaves(*end));
        }
        room_at.map(|at| Timestamp::from_millisecond(at).unwrap_or(Timestamp::MAX))
    }

    /// The clock was set back: no use may lie in the future.
    pub fn handle_clock_rollback(&mut self, now: Timestamp) {
        for (end, _) in self.0.values_mut().flatten() {
            *end = (*end).min(rounded_up(now));
        }
    }
}

/// The limits on a resource, one for each window: two limits on one window count the same uses.
fn windows(limits: &[ResourceLimit], resource: LimitedResource) -> impl Iterator<Item = &ResourceLimit> {
    limits.iter().enumerate().filter_map(move |(place, limit)| {
        let known = limits[..place].iter().any(|earlier| earlier.key() == limit.key());
        (limit.resource == resource && !known).then_some(limit)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limit(amount: u64, seconds: u32) -> ResourceLimit {
        ResourceLimit::from(&RateLimit {
            resource: LimitedResource::LLMCalls,
            amount,
            window_seconds: seconds,
        })
    }

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(milliseconds).unwrap()
    }

    fn used(tracker: &mut ResourceTracker, limit: ResourceLimit, amount: u64, now: i64) {
        tracker.count(&[limit], LimitedResource::LLMCalls, amount, at(now));
    }

    #[test]
    fn room_ends_with_the_last_of_an_amount_and_is_back_when_the_window_has_passed() {
        let three = limit(3, 60);
        let mut tracker = ResourceTracker::default();
        for second in [0, 10, 20] {
            assert_eq!(tracker.room_at(three, 1, at(second * 1000)), None);
            used(&mut tracker, three, 1, second * 1000);
        }
        assert_eq!(tracker.room_at(three, 1, at(20_000)), Some(at(60_000)));
        assert_eq!(tracker.room_at(three, 2, at(20_000)), Some(at(70_000)));
        assert_eq!(
            [20_000, 59_999, 60_000].map(|now| tracker.used(three, at(now))),
            [3, 3, 2]
        );
        assert_eq!(tracker.room_at(three, 1, at(59_999)), Some(at(60_000)));
        assert_eq!(tracker.room_at(three, 1, at(60_000)), None);
        assert_eq!(
            tracker.room_at(three, 9, at(60_000)),
            Some(at(80_000)),
            "once it is empty"
        );
    }

    #[test]
    fn a_large_amount_is_counted_in_pieces_and_an_edited_one_keeps_them() {
        let many = limit(61, 60);
        let mut tracker = ResourceTracker::default();
        (0..61).for_each(|_| used(&mut tracker, many, 1, 10_500));
        // A piece of a minute is a second.
        assert_eq!(tracker.room_at(many, 1, at(20_000)), Some(at(70_999)));
        assert_eq!(tracker.room_at(limit(60, 60), 1, at(20_000)), Some(at(70_999)));
    }

    #[test]
    fn two_limits_of_one_window_count_a_use_once_and_the_smaller_one_holds() {
        let both = [limit(3, 60), limit(2, 60)];
        let mut tracker = ResourceTracker::default();
        tracker.count(&both, LimitedResource::LLMCalls, 1, at(0));
        assert_eq!(both.map(|limit| tracker.used(limit, at(0))), [1, 1]);
        assert_eq!(tracker.room_at(both[1], 1, at(0)), None);
        tracker.count(&both, LimitedResource::LLMCalls, 1, at(0));
        assert_eq!(tracker.room_at(both[0], 1, at(0)), None);
        assert_eq!(tracker.room_at(both[1], 1, at(0)), Some(at(60_000)));
        tracker.give_back(&both, LimitedResource::LLMCalls, 1);
        assert_eq!(both.map(|limit| tracker.used(limit, at(0))), [1, 1]);
    }

    #[test]
    fn returned_capacity_is_available_and_other_resources_and_windows_are_independent() {
        let (one, hour) = (limit(1, 60), limit(2, 3600));
        let tokens = ResourceLimit {
            resource: LimitedResource::LLMTokens,
            ..one
        };
        let all = [one, hour, tokens];
        let mut tracker = ResourceTracker::default();
        tracker.count(&all, LimitedResource::LLMCalls, 1, at(0));
        assert!(tracker.room_at(one, 1, at(0)).is_some());
        assert_eq!(tracker.room_at(hour, 1, at(0)), None);
        assert_eq!(tracker.room_at(tokens, 1, at(0)), None);
        tracker.give_back(&all, LimitedResource::LLMCalls, 1);
        assert_eq!(tracker.room_at(one, 1, at(0)), None);
        tracker.count(&all, LimitedResource::LLMTokens, 5, at(0));
        assert!(tracker.room_at(tokens, 1, at(0)).is_some());
        tracker.retain_limits(&[one, hour]);
        assert_eq!(tracker.room_at(tokens, 1, at(0)), None);
        let raised = limit(5, 60);
        tracker.count(&[one], LimitedResource::LLMCalls, 5, at(0));
        assert!(
            tracker.room_at(raised, 1, at(0)).is_some(),
            "an edited amount keeps what was used"
        );
    }

    #[test]
    fn a_clock_that_is_set_back_makes_no_wait_longer_than_the_window_and_a_piece() {
        let one = limit(1, 60);
        let mut tracker = ResourceTracker::default();
        used(&mut tracker, one, 1, 10_000_000);
        tracker.handle_clock_rollback(at(5_000));
        assert_eq!(tracker.room_at(one, 1, at(5_000)), Some(at(65_000)));
    }

    proptest! {
        /// Compared with a plain list of all uses: never more than the amount in any window, and no wait longer than
        /// needed by more than a piece.
        #[test]
        fn it_keeps_every_window_and_wastes_a_piece_at_most(
            (amount, seconds) in (1_u64..90, 1_u32..200),
            longest in 2_i64..20_000,
            waits in prop::collection::vec(0.0..1.0_f64, 1..200),
        ) {
            let limit = limit(amount, seconds);
            let (window, piece) = (limit.window(), limit.piece());
            let mut tracker = ResourceTracker::default();
            let mut uses: Vec<i64> = Vec::new();
            let mut now = 1_000_000_000_000_i64;
            for wait in waits {
                #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
                let wait = (wait * longest as f64) as i64;
                now += wait;
                let young = |at: i64| uses.iter().filter(|used| **used + window > at).count() as u64;
                match tracker.room_at(limit, 1, at(now)) {
                    None => {
                        prop_assert!(young(now) < limit.amount);
                        used(&mut tracker, limit, 1, now);
                        uses.push(now);
                    }
                    Some(later) => {
                        prop_assert!(uses.iter().filter(|used| **used + window + piece > now).count() as u64 >= limit.amount);
                        let later = later.as_millisecond();
                        prop_assert!(later > now && later <= now + window + piece);
                        prop_assert_eq!(tracker.room_at(limit, 1, at(later)), None);
                    }
                }
                prop_assert!(tracker.0.values().all(|pieces| pieces.len() <= 63));
            }
        }
    }
}
