//! `guardrails.idleTimeoutSeconds`: counts the time that the loop is awake without an effective action; at the limit
//! the loop ends with outcome `Idle`. A sleep that the agent chose and a tool result that was not seen recently reset
//! the count.
//!
//! Awake means Running: the waits between two calls, and at most 30 s of each answered call, since a slow model is not
//! idle. Tool runs do not count, nor do pauses or failed calls: a provider outage of a day must not end its loops. Time
//! that a restart cuts off does not count.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{EndedToolRun, Guardrail, TrippedGuardrail};
use crate::{counters::StreakCounters, settings::EngineSettings};
use agentloop_api::status::LoopOutcome;
use agentloop_support::hash::sha256_u64;

/// Tool results that are remembered: a loop that cycles among this many gets nothing done.
const SEEN: usize = 32;

/// Maximum time that one call counts.
const MAX_COUNTED_CALL: SignedDuration = SignedDuration::from_secs(30);

pub struct IdleTimeout;

impl Guardrail for IdleTimeout {
    fn ends(&self, settings: &EngineSettings, counters: &StreakCounters) -> Option<LoopOutcome> {
        (counters.idle.counted >= settings.idle_timeout).then_some(LoopOutcome::Idle)
    }

    fn after_tool_run(
        &self,
        _settings: &EngineSettings,
        counters: &mut StreakCounters,
        run: &EndedToolRun<'_>,
    ) -> Option<TrippedGuardrail> {
        if run.in_counted_turn {
            counters.idle.observe_result(run.tool, run.result, run.at);
        }
        None
    }
}

/// The time counted so far.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct IdleClock {
    counted: SignedDuration,
    /// Beginning of the awake time that is not counted yet.
    from: Option<Timestamp>,
    /// Hashes of the newest tool results, without duplicates.
    seen: VecDeque<u64>,
}

/// Must stay the same in every version, since it is persisted.
fn hash(tool: &str, text: &str) -> u64 {
    sha256_u64(format!("{tool}\n{text}"))
}

impl IdleClock {
    /// Marks the loop as awake, if it was not.
    pub fn awake(&mut self, now: Timestamp) {
        self.from.get_or_insert(now);
    }

    /// Discards the time that is not counted yet: the loop was held, or its call failed.
    pub fn interrupted(&mut self) {
        self.from = None;
    }

    /// Counts the time until now: the loop waited.
    pub fn count(&mut self, now: Timestamp) {
        self.count_up_to(SignedDuration::MAX, now);
    }

    /// Counts the time until now as one answered call.
    pub fn count_call(&mut self, now: Timestamp) {
        self.count_up_to(MAX_COUNTED_CALL, now);
    }

    /// Skips the time until now: work was done.
    pub fn skip(&mut self, now: Timestamp) {
        self.from = self.from.map(|_| now);
    }

    fn count_up_to(&mut self, max: SignedDuration, now: Timestamp) {
        if let Some(from) = self.from {
            let more = now.duration_since(from).clamp(SignedDuration::ZERO, max);
            self.counted = self.counted.saturating_add(more);
            self.from = Some(now);
        }
    }

    /// Resets the count: the agent chose to sleep, or a tool had an outcome that was not seen before, even a failure.
    pub fn effective_action(&mut self, now: Timestamp) {
        self.counted = SignedDuration::ZERO;
        self.skip(now);
    }

    /// Records the result of a tool. One that was not seen recently is an effective action.
    fn observe_result(&mut self, tool: &str, text: &str, now: Timestamp) {
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

    /// The clock was set back by this much.
    pub fn moved(&mut self, back: SignedDuration) {
        self.from = self.from.and_then(|from| from.checked_sub(back).ok());
    }
}
