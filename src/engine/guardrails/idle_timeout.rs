//! `guardrails.idleTimeoutSeconds`: counts the time that the loop is awake without an effective action; at the limit the
//! loop ends with outcome `Idle`. A sleep of the agent's own choice and [`IdleClock::effective_action`] begin anew.
//!
//! Awake is Running, from the end of one answer to the end of the next. Pauses do not count, nor does the time that
//! failed calls take: a provider that is down for a day must not end its loops. What a restart cuts off does not count.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::Guardrail;
use crate::api::status::Outcome;
use crate::engine::{settings::Settings, snapshot::Counters};

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

    /// The clock was set back by so much.
    pub fn moved(&mut self, back: SignedDuration) {
        self.from = self.from.and_then(|from| from.checked_sub(back).ok());
    }
}
