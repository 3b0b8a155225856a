//! `guardrails.maxConsecutiveTurns`: counts completed turns since the last sleep; at the limit the loop is forced to
//! sleep. Clears only when that sleep ends. A sleep that the agent chose resets the length of forced sleeps. Naps of
//! less than a minute add up: each minute of them takes one turn off the count.

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use super::{Guardrail, RestKind, TrippedGuardrail};
use crate::{counters::StreakCounters, settings::EngineSettings, time_math};
use agentloop_api::status::PauseReason;

const FIRST_SLEEP: SignedDuration = SignedDuration::from_secs(60);

/// Turns without a sleep.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct TurnStreak {
    /// Completed turns since the last sleep.
    turns: u32,
    /// Forced sleeps since the agent last chose to sleep.
    forced_sleeps: u32,
}

impl TurnStreak {
    /// Completed turns since the last sleep.
    pub fn count(&self) -> u32 {
        self.turns
    }
}

pub struct ConsecutiveTurns;

impl Guardrail for ConsecutiveTurns {
    fn after_turn(
        &self,
        settings: &EngineSettings,
        counters: &mut StreakCounters,
        rest: RestKind,
    ) -> Option<TrippedGuardrail> {
        let counters = &mut counters.turns;
        match rest {
            RestKind::Sleep => {
                counters.turns = 0;
                counters.forced_sleeps = 0;
                return None;
            }
            RestKind::Naps => {
                // The turn itself counts, and a minute of naps takes one off.
                counters.forced_sleeps = 0;
                return None;
            }
            RestKind::None => {}
        }
        counters.turns = counters.turns.saturating_add(1);
        if counters.turns < settings.max_consecutive_turns {
            return None;
        }
        let wait = time_math::doubled(FIRST_SLEEP, counters.forced_sleeps, settings.max_sleep);
        counters.forced_sleeps = counters.forced_sleeps.saturating_add(1);
        Some(TrippedGuardrail {
            reason: PauseReason::MaxConsecutiveTurns,
            wait,
            message: format!(
                "{} turns without a sleep reached guardrails.maxConsecutiveTurns; the loop is forced to sleep. \
                 Raise the limit{}",
                counters.turns,
                settings
                    .mode
                    .sleep_tool()
                    .map(|tool| format!(", or instruct the agent to sleep with `{tool}`"))
                    .unwrap_or_default()
            ),
        })
    }

    fn cleared(&self, reason: PauseReason, counters: &mut StreakCounters) {
        if reason == PauseReason::MaxConsecutiveTurns {
            counters.turns.turns = 0;
        }
    }
}
