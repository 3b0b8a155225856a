//! What the limits count from turn to turn. Each part belongs to the rule that counts it, and only that rule reads it.

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use super::guardrails::RestKind;
use super::guardrails::consecutive_turns::TurnStreak;
use super::guardrails::idle_timeout::IdleClock;
use super::pauses::cooldowns::Streaks;

/// A chosen sleep of at least this length resets the limits.
pub const WHOLE_SLEEP: SignedDuration = SignedDuration::from_secs(60);

/// Streaks, and how often each limit was reached in a row.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct StreakCounters {
    /// What leads to cool-downs.
    pub streaks: Streaks,
    #[serde(flatten)]
    pub turns: TurnStreak,
    #[serde(flatten)]
    pub rest: RestStreak,
    /// Time awake without an effective action.
    pub idle: IdleClock,
}

/// Turns that called no tool, and naps.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct RestStreak {
    /// Completed turns in a row that called no tool.
    words: u32,
    /// Naps since the last time that they added up to a minute.
    napped: SignedDuration,
}

impl RestStreak {
    /// The model called a tool, or had a reason to answer with text.
    pub fn end_text_turns(&mut self) {
        self.words = 0;
    }

    /// A turn ended with text.
    pub fn count_text_turn(&mut self) {
        self.words = self.words.saturating_add(1);
    }

    /// Turns in a row without a tool call, beyond those that are not slowed down.
    pub fn slow_turns(&self, quick: u32) -> u32 {
        self.words.saturating_sub(quick)
    }

    /// Records a rest that the agent chose. A minute or more resets what the limits count; naps do so each time they add
    /// up to a minute, so that naps cannot evade the limits: after naps of 40 s and 30 s the limits are reset, and 10 s
    /// count towards the next minute.
    pub fn rested(&mut self, wait: SignedDuration) -> RestKind {
        self.words = 0;
        if wait >= WHOLE_SLEEP {
            self.napped = SignedDuration::ZERO;
            return RestKind::Sleep;
        }
        self.napped += wait;
        if self.napped < WHOLE_SLEEP {
            return RestKind::None;
        }
        self.napped -= WHOLE_SLEEP;
        RestKind::Naps
    }
}
