//! Counts how often limits were reached and how tool runs ended, from the journal's own records: what is counted is
//! what was written.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::effects::EffectBuffer;
use super::machine::Engine;
use super::tool::{ToolOutcome, ToolRunId};
use super::{JournalRecord, OutcomeKind, RecordDetail, RecordKind};
use agentloop_api::usage_counts::{self, GuardrailTrips, OTHER_TOOLS, ToolUsage};

/// Counts over the life of the Agent.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct LifetimeCounts {
    /// How often each limit was reached.
    pub trips: Vec<GuardrailTrips>,
    /// How tool runs ended.
    pub tools: Vec<ToolUsage>,
}

impl Engine {
    /// Continues from counts that outlived a journal.
    pub fn restore_counts(&mut self, known: &LifetimeCounts) {
        usage_counts::merge_trips(&mut self.state.tally.trips, &known.trips);
        usage_counts::merge_tools(&mut self.state.tally.tools, &known.tools);
    }

    /// Counts the records of one input.
    pub(super) fn count_records(&mut self, out: &EffectBuffer) {
        for record in out.records() {
            if let RecordDetail::Trip(trip) = record.detail {
                let (guardrail, action) = trip.labels();
                usage_counts::of_trip(&mut self.state.tally.trips, guardrail, action).count += 1;
            }
            self.count_tool(record);
        }
    }

    /// Counts how long a run took that was sent at this time and ended now.
    pub(super) fn record_run_time(
        &mut self,
        id: ToolRunId,
        sent: Timestamp,
        outcome: &ToolOutcome,
        out: &EffectBuffer,
    ) {
        if matches!(outcome, ToolOutcome::Unavailable { .. }) {
            return;
        }
        let Some(tool) = self.tool_of(id).map(str::to_owned) else {
            return;
        };
        let counted = usage_counts::of_tool(&mut self.state.tally.tools, &tool);
        // The clock may have been set back meanwhile: a negative duration counts as zero.
        let length = i64::try_from(out.now.duration_since(sent).as_millis()).unwrap_or(i64::MAX);
        counted.timed = counted.timed.saturating_add(1);
        counted.milliseconds = counted.milliseconds.saturating_add(length.max(0));
    }

    /// Name of the tool of an open run.
    fn tool_of(&self, id: ToolRunId) -> Option<&str> {
        if id.is_refresh() {
            return self.refresh_tool(id);
        }
        Some(&self.tool_batch()?.open(self.place_of(id)?)?.tool)
    }

    fn count_tool(&mut self, record: &JournalRecord) {
        let Some(line) = &record.tool else { return };
        let tools = &mut self.state.tally.tools;
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
