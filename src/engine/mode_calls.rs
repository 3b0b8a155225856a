//! Calls of the tools of the loop's mode, such as `yield`. The mode decides on them as soon as the answer is there; they
//! are not runs, and their results join the transcript with those of the other calls.

use jiff::Timestamp;

use super::machine::Engine;
use super::message::ToolCall;
use super::modes::ModeCallDecision;
use super::tools::{ToolBatch, ToolSlot};

impl Engine {
    /// The decision of the mode; `None`: the call is not of one of its tools.
    pub(super) fn mode_decision(&self, wanted: &ToolCall, now: Timestamp) -> Option<ModeCallDecision> {
        let kind = self.state.turn.as_ref()?.kind;
        self.mode().decide_call(kind, wanted, &self.mode_context(now))
    }
}

impl ToolBatch {
    /// Applies the decisions of the mode, each with the position of its call. Of the calls that end the turn, the last
    /// one counts, and the model is told.
    pub(super) fn apply_decisions(&mut self, decisions: Vec<(usize, ModeCallDecision)>, calls: &[ToolCall]) {
        let has_runs = self.slots.iter().any(|slot| matches!(slot, ToolSlot::Waiting(_)));
        let ends = |(_, decision): &&(usize, ModeCallDecision)| matches!(decision, ModeCallDecision::EndsTurn { .. });
        let last = decisions.iter().rfind(ends).map(|(place, _)| *place);
        let name = last.and_then(|last| calls.get(last)).map_or("", |call| &call.name);
        let replaced = format!("Replaced by a later {name} in the same answer.");
        for (place, decision) in decisions {
            let result = match decision {
                ModeCallDecision::Rejected(text) => ToolSlot::Result(text),
                ModeCallDecision::EndsTurn { .. } if last != Some(place) => ToolSlot::Result(replaced.clone()),
                ModeCallDecision::EndsTurn {
                    pace,
                    result,
                    result_after_runs,
                } => {
                    self.pace = Some(pace);
                    ToolSlot::Yield(result_after_runs.filter(|_| has_runs).unwrap_or(result))
                }
            };
            if let Some(slot) = self.slots.get_mut(place) {
                *slot = result;
            }
        }
    }
}
