//! What happens in a row before a pause that is a cool-down, and how long that is. One mechanism for all such pauses: a
//! streak has the reason of the pause that it leads to.
//!
//! Each cool-down of one reason is twice as long as the one before, up to an hour, until the streak ends. After a cool-down
//! what led to it has to happen as often again: with a limit of five, five failed turns, a minute of rest, five failed turns,
//! two minutes. Refusals are the exception: each further one in a row brings the next cool-down.

use std::collections::BTreeMap;

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use super::{FIRST_COOLDOWN, MAX_COOLDOWN};
use crate::time_math;
use agentloop_api::pause::PauseReason;

/// The streaks of a loop.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct Streaks(BTreeMap<PauseReason, Streak>);

#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
struct Streak {
    /// How often it happened, since the last cool-down.
    count: u32,
    /// Cool-downs since the streak began.
    cooldowns: u32,
    /// Whether a cool-down is under way.
    cooling: bool,
}

impl Streaks {
    /// How often in a row it happened, since the last cool-down.
    pub fn count(&self, reason: PauseReason) -> u32 {
        self.0.get(&reason).map_or(0, |streak| streak.count)
    }

    /// It happened once more. Returns how often in a row.
    pub fn add(&mut self, reason: PauseReason) -> u32 {
        let streak = self.0.entry(reason).or_default();
        streak.count = streak.count.saturating_add(1);
        streak.count
    }

    /// The cool-down, once it happened `limit` times in a row. `None`: it did not, or the cool-down is under way.
    pub fn cooldown_at(&mut self, reason: PauseReason, limit: u32) -> Option<SignedDuration> {
        let streak = self.0.get(&reason).copied().unwrap_or_default();
        (streak.count >= limit.max(1) && !streak.cooling).then(|| self.cooldown(reason))
    }

    /// A cool-down begins now.
    pub fn cooldown(&mut self, reason: PauseReason) -> SignedDuration {
        let streak = self.0.entry(reason).or_default();
        let wait = time_math::doubled(FIRST_COOLDOWN, streak.cooldowns, MAX_COOLDOWN);
        streak.cooldowns = streak.cooldowns.saturating_add(1);
        streak.cooling = true;
        wait
    }

    /// The streak ends: the next cool-down is as short as the first. One that is under way continues.
    pub fn end(&mut self, reason: PauseReason) {
        let cooling = self.0.remove(&reason).is_some_and(|streak| streak.cooling);
        if cooling {
            let streak = Streak {
                cooling,
                ..Streak::default()
            };
            self.0.insert(reason, streak);
        }
    }

    /// A turn completed.
    pub fn turn_completed(&mut self) {
        for reason in [
            PauseReason::ConsecutiveErrors,
            PauseReason::CrashLoop,
            PauseReason::ModelRefused,
        ] {
            self.end(reason);
        }
    }

    /// The pause for this reason is over.
    pub(super) fn cooled_down(&mut self, reason: PauseReason) {
        if let Some(streak) = self.0.get_mut(&reason) {
            streak.cooling = false;
            if reason != PauseReason::ModelRefused {
                streak.count = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REASON: PauseReason = PauseReason::ConsecutiveErrors;

    #[test]
    fn an_event_during_a_cool_down_starts_no_second_one_and_does_not_shorten_it() {
        let mut streaks = Streaks::default();
        streaks.add(REASON);
        assert_eq!(streaks.cooldown_at(REASON, 1), Some(FIRST_COOLDOWN));
        streaks.add(REASON);
        assert_eq!(streaks.cooldown_at(REASON, 1), None);
        streaks.end(REASON);
        streaks.add(REASON);
        assert_eq!(streaks.cooldown_at(REASON, 1), None);
        streaks.cooled_down(REASON);
        assert_eq!(streaks.count(REASON), 0);
        streaks.add(REASON);
        assert_eq!(
            streaks.cooldown_at(REASON, 1),
            Some(FIRST_COOLDOWN),
            "the streak ended meanwhile"
        );
    }
}
