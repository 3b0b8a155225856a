//! What a run of a goal takes: from when to when, and what its calls use.
//!
//! What is seen of the usage changes only together with something else that is seen: each change is a write to the API server.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::GoalState;
use crate::message::ModelAnswer;
use crate::time_math;
use agentloop_api::goal::GoalUsage;

/// A run, from its first step to the end of the loop.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub(super) struct RunTotals {
    /// When its first turn began.
    started_at: Option<Timestamp>,
    ended_at: Option<Timestamp>,
    counted: GoalUsage,
    /// What is seen of it.
    shown: GoalUsage,
}

impl RunTotals {
    pub(super) fn started_at(&self) -> Option<Timestamp> {
        self.started_at
    }

    pub(super) fn ended_at(&self) -> Option<Timestamp> {
        self.ended_at
    }

    /// What is seen of the usage; `None`: no turn has begun.
    pub(super) fn usage(&self) -> Option<GoalUsage> {
        self.started_at.map(|_| self.shown)
    }

    pub(super) fn clock_set_back(&mut self, back: SignedDuration) {
        for at in [&mut self.started_at, &mut self.ended_at] {
            *at = at.map(|at| time_math::before(at, back));
        }
    }

    pub(super) fn turn_begins(&mut self, now: Timestamp) {
        self.started_at.get_or_insert(now);
        self.shown = self.counted;
    }

    pub(super) fn loop_ended(&mut self, now: Timestamp) {
        self.ended_at = Some(now);
        self.shown = self.counted;
    }

    pub(super) fn call_sent(&mut self) {
        self.counted.calls = self.counted.calls.saturating_add(1);
    }

    pub(super) fn call_refused(&mut self) {
        self.counted.calls = self.counted.calls.saturating_sub(1).max(0);
    }

    pub(super) fn call_answered(&mut self, answer: &ModelAnswer) {
        let tokens = answer.tokens.unwrap_or(0);
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        self.counted.tokens = self.counted.tokens.saturating_add(tokens);
        self.counted.cost = self.counted.cost.saturating_add(answer.cost.unwrap_or(0));
    }
}

impl GoalState {
    /// Something else that is seen changes now.
    pub(super) fn show_usage(&mut self) {
        if let Some(totals) = &mut self.totals {
            totals.shown = totals.counted;
        }
    }
}
