//! What the rules of a Sensor remember between events. Plain data, bounded, kept by who runs the Sensor.

use std::collections::{BTreeMap, VecDeque};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::sensor::SensorTotals;

/// Ids of the senders' own that are remembered.
pub const MOST_REMEMBERED: usize = 256;
/// Seconds in which events are counted for `perMinute`.
const WINDOW_SECONDS: i64 = 60;

/// What the rules remember.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct RulesState {
    /// Number of the last accepted event.
    pub seq: i64,
    /// What was done so far.
    pub totals: SensorTotals,
    /// The last accepted event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<LastAccepted>,
    /// Failures since the last success.
    pub consecutive_failures: i64,
    /// Why the last event was not understood; never text of a payload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Payload of the last accepted event, where an expression asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) previous: Option<Value>,
    /// The newest event of those that wait for the end of `minIntervalMilliseconds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) held: Option<HeldEvent>,
    /// Keys of the newest ids, the oldest first.
    #[serde(skip_serializing_if = "VecDeque::is_empty")]
    pub(super) remembered: VecDeque<u64>,
    /// How many events were accepted in which second.
    #[serde(skip_serializing_if = "VecDeque::is_empty")]
    pub(super) accepted: VecDeque<(i64, u32)>,
    /// Until when a signal does not hold again.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) cooldowns: BTreeMap<String, Timestamp>,
}

/// The last accepted event.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LastAccepted {
    /// When it came.
    pub at: Timestamp,
    /// Its id.
    pub id: String,
}

/// An event that waits.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(super) struct HeldEvent {
    pub(super) id: String,
    /// The id is the sender's own.
    pub(super) own_id: bool,
    /// That it is no repeat is known already.
    #[serde(default)]
    pub(super) is_news: bool,
    pub(super) payload: Value,
}

impl RulesState {
    /// The clock was set back: nothing that was remembered lies in the future.
    pub(super) fn apply_clock(&mut self, now: Timestamp, longest_cooldown: SignedDuration) {
        if let Some(last) = &mut self.last {
            last.at = last.at.min(now);
        }
        let second = now.as_second();
        while self.accepted.back().is_some_and(|(at, _)| *at > second) {
            self.accepted.pop_back();
        }
        let latest = now.checked_add(longest_cooldown).unwrap_or(Timestamp::MAX);
        self.cooldowns.retain(|_, until| *until > now);
        self.cooldowns
            .values_mut()
            .for_each(|until| *until = (*until).min(latest));
    }

    /// Accepted events of the last minute: never fewer than there were.
    pub(super) fn recent(&mut self, now: Timestamp) -> u32 {
        let oldest = now.as_second() - WINDOW_SECONDS;
        while self.accepted.front().is_some_and(|(at, _)| *at < oldest) {
            self.accepted.pop_front();
        }
        self.accepted.iter().map(|(_, count)| count).sum()
    }

    /// When fewer than `most` events were accepted in the last minute.
    pub(super) fn room_from(&self, now: Timestamp, most: u32) -> Timestamp {
        let oldest = now.as_second() - WINDOW_SECONDS;
        let counted = || self.accepted.iter().filter(|(at, _)| *at >= oldest);
        let mut count: u32 = counted().map(|(_, count)| count).sum();
        let mut room = Timestamp::MIN;
        for (at, leaving) in counted() {
            if count < most {
                break;
            }
            count -= leaving;
            room = Timestamp::from_second(at + WINDOW_SECONDS + 1).unwrap_or(Timestamp::MAX);
        }
        room
    }

    pub(super) fn count_accepted(&mut self, now: Timestamp) {
        let second = now.as_second();
        match self.accepted.back_mut() {
            Some((at, count)) if *at == second => *count = count.saturating_add(1),
            _ => self.accepted.push_back((second, 1)),
        }
    }

    pub(super) fn remember(&mut self, key: u64) {
        self.remembered.push_back(key);
        let surplus = self.remembered.len().saturating_sub(MOST_REMEMBERED);
        self.remembered.drain(..surplus);
    }
}
