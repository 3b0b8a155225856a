//! Counts that only grow over the life of an Agent.

use serde::{Deserialize, Serialize};

use super::KnownTotals;
use super::lifetime_counts::LifetimeCounts;

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct Totals {
    turns_begun: i64,
    turns_completed: i64,
    /// Tool runs that were sent, each counted once; [`Self::actions`] are those with side effects.
    tool_calls: i64,
    actions: i64,
    /// How often limits were reached, and how tool runs ended.
    pub tally: LifetimeCounts,
}

impl Totals {
    /// Continues from what the controller knows: a new journal begins with zeros.
    pub fn merge(&mut self, known: KnownTotals) {
        self.turns_begun = self.turns_begun.max(known.turn);
        self.tool_calls = self.tool_calls.max(known.tool_calls);
        self.actions = self.actions.max(known.actions);
    }

    /// Turns that have begun, which is the number of the latest.
    pub fn turns_begun(&self) -> i64 {
        self.turns_begun
    }

    pub fn next_turn(&self) -> i64 {
        self.turns_begun.saturating_add(1)
    }

    pub fn turns_completed(&self) -> i64 {
        self.turns_completed
    }

    pub fn tool_calls(&self) -> i64 {
        self.tool_calls
    }

    pub fn actions(&self) -> i64 {
        self.actions
    }

    /// A turn begins. Returns its number.
    pub fn begin_turn(&mut self) -> i64 {
        self.turns_begun = self.next_turn();
        self.turns_begun
    }

    pub fn complete_turn(&mut self) {
        self.turns_completed = self.turns_completed.saturating_add(1);
    }

    /// A tool run is sent for the first time.
    pub fn count_run(&mut self, acts: bool) {
        self.tool_calls = self.tool_calls.saturating_add(1);
        self.actions = self.actions.saturating_add(i64::from(acts));
    }
}
