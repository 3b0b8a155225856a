//! The state of a Sensor's rules between events. Plain data, bounded, stored by the process that runs the Sensor.

use std::collections::{BTreeMap, VecDeque};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use agentloop_api::sensor::SensorTotals;
use agentloop_support::bounded::push_latest;

/// Sender ids that are remembered.
pub const MAX_REMEMBERED: usize = 256;
/// Length of the window of `perMinute`, in seconds.
const WINDOW_SECONDS: i64 = 60;

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct RulesState {
    /// Number of the last accepted event.
    pub seq: i64,
    pub totals: SensorTotals,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<LastAccepted>,
    pub consecutive_failures: i64,
    /// Why the last event could not be processed; never text of a payload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Payload of the last accepted event, if an expression uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) previous: Option<Value>,
    /// The newest event that is held for `minIntervalMilliseconds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) held: Option<HeldEvent>,
    /// Keys of the newest ids, oldest first.
    #[serde(skip_serializing_if = "VecDeque::is_empty")]
    pub(super) remembered: VecDeque<u64>,
    /// Number of accepted events, by second.
    #[serde(skip_serializing_if = "VecDeque::is_empty")]
    pub(super) accepted: VecDeque<(i64, u32)>,
    /// The end of each signal's cooldown.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) cooldowns: BTreeMap<String, Timestamp>,
}

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LastAccepted {
    pub at: Timestamp,
    pub id: String,
}

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(super) struct HeldEvent {
    pub(super) id: String,
    /// Whether the id is the sender's own.
    pub(super) own_id: bool,
    /// Whether it is already known not to be a repeat.
    #[serde(default)]
    pub(super) is_news: bool,
    pub(super) payload: Value,
}

impl RulesState {
    /// After the clock was set back: moves remembered moments out of the future, which would block events until then.
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

    /// Accepted events of the last minute; counts whole seconds, so never too few.
    pub(super) fn recent(&mut self, now: Timestamp) -> u32 {
        let oldest = now.as_second() - WINDOW_SECONDS;
        while self.accepted.front().is_some_and(|(at, _)| *at < oldest) {
            self.accepted.pop_front();
        }
        self.accepted.iter().map(|(_, count)| count).sum()
    }

    /// When fewer than `max` events were accepted in the last minute.
    pub(super) fn below_limit_from(&self, now: Timestamp, max: u32) -> Timestamp {
        let oldest = now.as_second() - WINDOW_SECONDS;
        let counted = || self.accepted.iter().filter(|(at, _)| *at >= oldest);
        let mut count: u32 = counted().map(|(_, count)| count).sum();
        let mut free_from = Timestamp::MIN;
        for (at, leaving) in counted() {
            if count < max {
                break;
            }
            count -= leaving;
            free_from = Timestamp::from_second(at + WINDOW_SECONDS + 1).unwrap_or(Timestamp::MAX);
        }
        free_from
    }

    pub(super) fn count_accepted(&mut self, now: Timestamp) {
        let second = now.as_second();
        match self.accepted.back_mut() {
            Some((at, count)) if *at == second => *count = count.saturating_add(1),
            _ => self.accepted.push_back((second, 1)),
        }
    }

    pub(super) fn remember(&mut self, key: u64) {
        push_latest(&mut self.remembered, key, MAX_REMEMBERED);
    }
}
