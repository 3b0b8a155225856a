//! Denied calls: the same call is not requested twice in a step, a tool that is denied too often is hidden for the rest
//! of the step, and in the end a person decides.
//!
//! Counts what the rules or a person have denied: a missing grant, an approval that was denied or has expired, and a call that
//! loop detection rejects. A call that is wrong, such as one with bad arguments, is corrected, not denied. No approval changes
//! a count.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::GoalState;
use crate::loop_detection::{ShortHash, signature};
use crate::message::ToolCall;
use crate::tools::admission::{DenialReason, DeniedCall};
use agentloop_api::status::GateKind;

/// Denials of one tool in a step after which it is hidden until the next step.
pub const HIDDEN_AFTER: u32 = 3;
/// Denials of one tool in a loop after which, and after each further one, a person decides on its continuation.
pub const ESCALATED_AFTER: u32 = 6;
/// Denied calls that are remembered.
const MAX_CALLS: usize = 32;

/// Why a person is asked with a gate of kind `Escalated`.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub(super) enum EscalationCause {
    /// The loop repeats itself.
    #[default]
    Repetition,
    /// This tool was denied too often.
    Denials(String),
}

/// What was denied. Tools are those that a source has, so their number is bounded.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub(super) struct DenialCounts {
    /// By tool, in the attempts at this step.
    in_step: BTreeMap<String, u32>,
    /// By tool, in this loop.
    in_loop: BTreeMap<String, u32>,
    /// The calls that were denied in this step.
    calls: Vec<ShortHash>,
}

impl DenialCounts {
    /// The next step begins.
    pub(super) fn next_step(&mut self) {
        self.in_step.clear();
        self.calls.clear();
    }

    /// How often a tool was denied in this loop.
    pub(super) fn in_loop(&self, tool: &str) -> u32 {
        self.in_loop.get(tool).copied().unwrap_or(0)
    }

    /// Whether no call of a tool is admitted in this step.
    fn hides(&self, tool: &str) -> bool {
        self.in_step.get(tool).is_some_and(|denials| *denials >= HIDDEN_AFTER)
    }

    /// Why a call is not admitted, if so.
    pub(super) fn denies(&self, call: &ToolCall) -> Option<DeniedCall> {
        let tool = &call.name;
        if self.hides(tool) {
            return Some(DeniedCall::not_run(
                DenialReason::Hidden,
                &format!("{tool} was denied {HIDDEN_AFTER} times in this step and is unavailable until the next one"),
                "continue without it, in another way",
            ));
        }
        let print = signature::call(tool, &call.arguments).raw;
        self.calls.contains(&print).then(|| {
            DeniedCall::not_run(
                DenialReason::DeniedBefore,
                &format!("this call of {tool} was denied earlier in this step"),
                "take another approach: another tool, or other arguments",
            )
        })
    }

    fn count(&mut self, call: &ToolCall, why: DenialReason) {
        for counts in [&mut self.in_step, &mut self.in_loop] {
            let count = counts.entry(call.name.clone()).or_default();
            *count = count.saturating_add(1);
        }
        let print = signature::call(&call.name, &call.arguments).raw;
        // Loop detection has its own ladder for a call that it denies.
        let is_kept = why != DenialReason::Repeated && !self.calls.contains(&print);
        if is_kept && self.calls.len() < MAX_CALLS {
            self.calls.push(print);
        }
    }
}

impl GoalState {
    /// A call was denied.
    pub(super) fn count_denial(&mut self, call: &ToolCall, why: DenialReason) {
        // A tool that wrong calls have closed for the turn is not denied by anyone.
        let is_closed = why == DenialReason::Hidden && !self.denials.hides(&call.name);
        if !why.is_decision() || is_closed {
            return;
        }
        self.denials.count(call, why);
        if self.denials.in_loop(&call.name) >= ESCALATED_AFTER && self.approval != Some(GateKind::Escalated) {
            self.approval = Some(GateKind::Escalated);
            self.because = EscalationCause::Denials(call.name.clone());
        }
    }
}
