//! Counts what limits did and how runs of tools ended, from the journal's own lines: what is counted is what was written.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use strum::IntoEnumIterator;

use super::effects::EffectBuffer;
use super::machine::Engine;
use super::tool::{ToolOutcome, ToolRunId};
use super::tool_batch::ToolSlot;
use super::{JournalRecord, OutcomeKind, RecordKind};
use crate::api::status::{LoopOutcome, PauseReason};
use crate::api::usage_counts::{self, GuardrailTrips, OTHER_TOOLS, ToolUsage};

/// Counts over the life of the Agent.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct LifetimeCounts {
    /// How often each limit was reached.
    pub trips: Vec<GuardrailTrips>,
    /// How runs of tools ended.
    pub tools: Vec<ToolUsage>,
}

impl Engine {
    /// Goes on from counts that outlived a journal.
    pub fn restore_counts(&mut self, known: &LifetimeCounts) {
        usage_counts::merge_trips(&mut self.state.tally.trips, &known.trips);
        usage_counts::merge_tools(&mut self.state.tally.tools, &known.tools);
    }

    /// Counts the lines of one input.
    pub(super) fn count_records(&mut self, out: &EffectBuffer) {
        for record in out.records() {
            if let Some((guardrail, action)) = trip(record) {
                usage_counts::of_trip(&mut self.state.tally.trips, guardrail, action).count += 1;
            }
            self.count_tool(record);
        }
    }

    /// Counts how long a run took that was sent at this moment and ended now.
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
        // A clock that was set back meanwhile says nothing.
        let length = i64::try_from(out.now.duration_since(sent).as_millis()).unwrap_or(i64::MAX);
        counted.timed = counted.timed.saturating_add(1);
        counted.milliseconds = counted.milliseconds.saturating_add(length.max(0));
    }

    /// Name of the tool of an open run.
    fn tool_of(&self, id: ToolRunId) -> Option<&str> {
        if id.is_refresh() {
            return self.refresh_tool(id);
        }
        match self.tool_batch()?.slots.get(self.place_of(id)?)? {
            ToolSlot::Open(plan) => Some(&plan.tool),
            ToolSlot::Waiting(_) | ToolSlot::Result(_) | ToolSlot::Yield(_) => None,
        }
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

/// Which limit a line says was reached, and what it did; one of [`usage_counts::TRIPS`]. A detected loop is counted by the steps
/// of its ladder, and not again by the pause or the end that a step brings.
fn trip(record: &JournalRecord) -> Option<(&'static str, &'static str)> {
    if record.kind == RecordKind::LoopDetected {
        let step = record.note.rsplit(' ').next()?;
        let action = match step {
            "Nudged" => "warn",
            "Denied" => "deny",
            "Paused" => "pause",
            _ => "kill",
        };
        return Some(("LoopDetected", action));
    }
    if record.kind != RecordKind::GuardrailTriggered {
        return None;
    }
    let note = record.note.as_str();
    if note == PauseReason::LoopDetected.as_ref() || note == LoopOutcome::Failed.as_ref() {
        return None;
    }
    if note == LoopOutcome::Idle.as_ref() {
        return Some(("IdleTimeout", "kill"));
    }
    let reason = PauseReason::iter().find(|reason| reason.as_ref() == note);
    Some(reason.map_or(("MaxCallsPerTurn", "deny"), |reason| (reason.into(), "pause")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::usage_counts::TRIPS;
    use crate::engine::effects::journal_line;
    use crate::engine::pause::is_guardrail;

    #[test]
    fn every_limit_that_can_be_reached_is_in_the_closed_set_and_nothing_else_is() {
        let mut seen = Vec::new();
        let mut note = |kind, note: &str| seen.extend(trip(&journal_line(kind, 1, note)));
        for reason in PauseReason::iter().filter(|reason| is_guardrail(*reason)) {
            note(RecordKind::GuardrailTriggered, reason.as_ref());
        }
        note(RecordKind::GuardrailTriggered, "the turn had 5 calls");
        note(RecordKind::GuardrailTriggered, "Idle");
        note(RecordKind::GuardrailTriggered, "Failed");
        for step in ["Nudged", "Denied", "Paused", "Failed"] {
            note(RecordKind::LoopDetected, &format!("RepeatedCall: {step}"));
        }
        note(RecordKind::TurnStarted, "BudgetExhausted");
        seen.sort_unstable();
        let mut all = TRIPS.to_vec();
        all.sort_unstable();
        assert_eq!(seen, all);
    }
}
