//! Counts that only grow over the life of an Agent. Limits and ends of tool runs are counted from the journal's own records:
//! what is counted is what was written.

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use super::tasks::TaskChange;
use super::{JournalRecord, KnownTotals, OutcomeKind, RecordDetail, RecordKind};
use agentloop_api::usage_counts::{self, LoopCounts, OTHER_TOOLS};

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct Totals {
    turns_begun: i64,
    pub counts: LoopCounts,
}

impl Totals {
    /// Continues from what the controller knows: a new journal begins with zeros.
    pub fn merge(&mut self, known: &KnownTotals) {
        self.turns_begun = self.turns_begun.max(known.turn);
        self.counts.merge(&known.counts);
    }

    /// Turns that have begun, which is the number of the latest.
    pub fn turns_begun(&self) -> i64 {
        self.turns_begun
    }

    pub fn next_turn(&self) -> i64 {
        self.turns_begun.saturating_add(1)
    }

    /// A turn begins. Returns its number.
    pub fn begin_turn(&mut self) -> i64 {
        self.turns_begun = self.next_turn();
        self.turns_begun
    }

    pub fn complete_turn(&mut self) {
        self.counts.turns = self.counts.turns.saturating_add(1);
    }

    /// A tool run is sent for the first time.
    pub fn count_run(&mut self, acts: bool) {
        self.counts.tool_calls = self.counts.tool_calls.saturating_add(1);
        self.counts.actions = self.counts.actions.saturating_add(i64::from(acts));
    }

    /// A tool call of the model was not admitted.
    pub fn count_denied_call(&mut self) {
        self.counts.denied_tool_calls = self.counts.denied_tool_calls.saturating_add(1);
    }

    /// Counts the records of one input.
    pub(super) fn count_records(&mut self, records: &[JournalRecord]) {
        for record in records {
            if let RecordDetail::Trip(trip) = record.detail {
                let (guardrail, action) = trip.labels();
                usage_counts::of_trip(&mut self.counts.guardrail_trips, guardrail, action).count += 1;
            }
            if let Some(TaskChange::Ended(response)) = record.task.as_deref() {
                self.counts.tasks.add(response.outcome);
            }
            if record.kind == RecordKind::TurnFailed {
                self.counts.failed_turns = self.counts.failed_turns.saturating_add(1);
            }
            self.count_tool(record);
        }
    }

    /// Counts how long a run of a tool took. The clock may have been set back meanwhile: a negative duration counts as
    /// zero.
    pub(super) fn count_run_time(&mut self, tool: &str, length: SignedDuration) {
        let counted = usage_counts::of_tool(&mut self.counts.by_tool, tool);
        let length = i64::try_from(length.as_millis()).unwrap_or(i64::MAX);
        counted.timed = counted.timed.saturating_add(1);
        counted.milliseconds = counted.milliseconds.saturating_add(length.max(0));
    }

    fn count_tool(&mut self, record: &JournalRecord) {
        let Some(line) = &record.tool else { return };
        let tools = &mut self.counts.by_tool;
        let tool = line.tool.as_deref().unwrap_or(OTHER_TOOLS);
        match (record.kind, line.outcome) {
            (RecordKind::ToolDenied, _) => usage_counts::of_tool(tools, tool).denied += 1,
            (RecordKind::ToolOutcome, Some(OutcomeKind::Ok)) => usage_counts::of_tool(tools, tool).ok += 1,
            (RecordKind::ToolOutcome, Some(OutcomeKind::Error)) => usage_counts::of_tool(tools, tool).error += 1,
            (RecordKind::ToolOutcome, Some(OutcomeKind::Unavailable)) => {
                usage_counts::of_tool(tools, tool).unavailable += 1;
            }
            (RecordKind::ToolOutcome, Some(OutcomeKind::Unknown)) => usage_counts::of_tool(tools, tool).unknown += 1,
            _ => {}
        }
    }
}
