//! Counts how often limits were reached and how tool runs ended, from the journal's own records: what is counted is
//! what was written.

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

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

impl LifetimeCounts {
    /// Continues from counts that outlived a journal.
    pub(super) fn merge(&mut self, known: &Self) {
        usage_counts::merge_trips(&mut self.trips, &known.trips);
        usage_counts::merge_tools(&mut self.tools, &known.tools);
    }

    /// Counts the records of one input.
    pub(super) fn count_records(&mut self, records: &[JournalRecord]) {
        for record in records {
            if let RecordDetail::Trip(trip) = record.detail {
                let (guardrail, action) = trip.labels();
                usage_counts::of_trip(&mut self.trips, guardrail, action).count += 1;
            }
            self.count_tool(record);
        }
    }

    /// Counts how long a run of a tool took. The clock may have been set back meanwhile: a negative duration counts as
    /// zero.
    pub(super) fn count_run_time(&mut self, tool: &str, length: SignedDuration) {
        let counted = usage_counts::of_tool(&mut self.tools, tool);
        let length = i64::try_from(length.as_millis()).unwrap_or(i64::MAX);
        counted.timed = counted.timed.saturating_add(1);
        counted.milliseconds = counted.milliseconds.saturating_add(length.max(0));
    }

    fn count_tool(&mut self, record: &JournalRecord) {
        let Some(line) = &record.tool else { return };
        let tools = &mut self.tools;
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
