//! `guardrails.idleTimeoutSeconds`: counts the time that the loop is awake without an effective action; at the limit the
//! loop ends with outcome `Idle`. A sleep of the agent's own choice and a tool's result that was not seen lately begin anew.
//!
//! Awake is Running: the waits between two calls, and of each answered call 30 s at most, since a slow model is not idle.
//! Runs of tools do not count, nor do pauses or failed calls: a provider that is down for a day must not end its loops.
//! What a restart cuts off does not count.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use super::Guardrail;
use crate::api::status::LoopOutcome;
use crate::engine::{settings::EngineSettings, snapshot::StreakCounters};

/// Results of tools that are remembered: a loop that goes round among so many gets nothing done.
const SEEN: usize = 32;

/// Of one call so much counts at most.
const LONGEST_COUNTED_CALL: SignedDuration = SignedDuration::from_secs(30);

/// The limit.
pub struct IdleTimeout;

impl Guardrail for IdleTimeout {
    fn ends(&self, settings: &EngineSettings, counters: &StreakCounters) -> Option<LoopOutcome> {
        (counters.idle.counted >= settings.idle_timeout).then_some(LoopOutcome::Idle)
    }
}

/// The time counted so far.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct IdleClock {
    counted: SignedDuration,
    /// From when on the loop has been awake and is not counted yet.
    from: Option<Timestamp>,
    /// Hashes of the newest results of tools, each once.
    seen: VecDeque<u64>,
}

/// The same in every version, since it is persisted.
fn hash(tool: &str, text: &str) -> u64 {
    let digest = digest(&SHA256, format!("{tool}\n{text}").as_bytes());
    let first = digest.as_ref().iter().take(8);
    first.fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

impl IdleClock {
    /// The loop is awake, if it was not before.
    pub fn awake(&mut self, now: Timestamp) {
        self.from.get_or_insert(now);
    }

    /// What was not counted yet does not count: the loop was held, or its call failed.
    pub fn interrupted(&mut self) {
        self.from = None;
    }

    /// The time until now counts: the loop waited.
    pub fn count(&mut self, now: Timestamp) {
        self.count_up_to(SignedDuration::MAX, now);
    }

    /// The time until now was a call that was answered.
    pub fn count_call(&mut self, now: Timestamp) {
        self.count_up_to(LONGEST_COUNTED_CALL, now);
    }

    /// The time until now does not count: something was done.
    pub fn skip(&mut self, now: Timestamp) {
        self.from = self.from.map(|_| now);
    }

    fn count_up_to(&mut self, most: SignedDuration, now: Timestamp) {
        if let Some(from) = self.from {
            let more = now.duration_since(from).clamp(SignedDuration::ZERO, most);
            self.counted = self.counted.saturating_add(more);
            self.from = Some(now);
        }
    }

    /// Something came of being awake: a sleep of the agent's own choice, an outcome of a tool that was not seen before, be it
    /// a failure.
    pub fn effective_action(&mut self, now: Timestamp) {
        self.counted = SignedDuration::ZERO;
        self.skip(now);
    }

    /// A tool gave this result. One that was not seen lately is an effective action.
    pub fn observe_result(&mut self, tool: &str, text: &str, now: Timestamp) {
        let hash = hash(tool, text);
        if self.seen.contains(&hash) {
            return;
        }
        if self.seen.len() >= SEEN {
            self.seen.pop_front();
        }
        self.seen.push_back(hash);
        self.effective_action(now);
    }

    /// The clock was set back by so much.
    pub fn moved(&mut self, back: SignedDuration) {
        self.from = self.from.and_then(|from| from.checked_sub(back).ok());
    }
}
