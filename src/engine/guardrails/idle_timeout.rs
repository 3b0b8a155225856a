//! `guardrails.idleTimeoutSeconds`: counts the time that the loop is awake without an effective action; at the limit the
//! loop ends with outcome `Idle`. A sleep of the agent's own choice and a tool's result that was not seen lately begin anew.
//!
//! Awake is Running, from the end of one answer to the end of the next. Pauses do not count, nor does the time that
//! failed calls take: a provider that is down for a day must not end its loops. What a restart cuts off does not count.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use super::Guardrail;
use crate::api::status::Outcome;
use crate::engine::{settings::Settings, snapshot::Counters};

/// Results of tools that are remembered: a loop that goes round among so many gets nothing done.
const SEEN: usize = 32;

/// The limit.
pub struct IdleTimeout;

impl Guardrail for IdleTimeout {
    fn ends(&self, settings: &Settings, counters: &Counters) -> Option<Outcome> {
        (counters.idle.counted >= settings.idle_timeout).then_some(Outcome::Idle)
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

    /// The time until now counts.
    pub fn count(&mut self, now: Timestamp) {
        if let Some(from) = self.from {
            let more = now.duration_since(from).max(SignedDuration::ZERO);
            self.counted = self.counted.saturating_add(more);
            self.from = Some(now);
        }
    }

    /// Something came of being awake: a sleep of the agent's own choice, a tool's result that was not seen before.
    pub fn effective_action(&mut self, now: Timestamp) {
        self.counted = SignedDuration::ZERO;
        self.from = self.from.map(|_| now);
    }

    /// A tool gave this result. One that was not seen lately is an effective action.
    pub fn result(&mut self, tool: &str, text: &str, now: Timestamp) {
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
