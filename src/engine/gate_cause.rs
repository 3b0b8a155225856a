//! Which rule opened a gate: the word after the gate's id in the record, from which the audit has it.

use serde::{Deserialize, Serialize};

/// Which rule opened a gate.
#[derive(
    Serialize,
    Deserialize,
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    strum::AsRefStr,
    strum::Display,
    strum::EnumIter,
    strum::EnumString,
)]
pub enum GateCause {
    /// The rule of the tool, or `tools.approval.default` for its effect.
    #[default]
    ToolPolicy,
    /// The `approvalCondition` of the tool.
    ApprovalCondition,
    /// `tools.approval.afterUntrustedContent`.
    UntrustedContent,
    /// The call was sent and its outcome is unknown: repeating it needs an approval.
    UnknownOutcome,
    /// The definitions of a server's tools have changed.
    ToolDefinitionsChanged,
    /// In mode `Goal`, the confidence was too low or could not be read.
    LowConfidence,
    /// In mode `Goal`, the loop repeats itself.
    LoopDetected,
    /// In mode `Goal`, calls of one tool were denied repeatedly.
    CallsDenied,
}

impl GateCause {
    /// Whether plans leave it out.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
    pub(crate) fn is_policy(&self) -> bool {
        *self == Self::ToolPolicy
    }

    /// What the record of a gate says: its id, and its cause.
    pub(crate) fn note(self, gate: &str) -> String {
        format!("{gate} {}", self.as_ref())
    }

    /// The cause in the note of the record of an opened gate. `None`: an earlier version has written it, without one.
    #[must_use]
    pub fn of_note(note: &str) -> Option<Self> {
        let (gate, rest) = note.split_once(' ')?;
        if gate.ends_with(':') {
            // The names of tools follow.
            return Some(Self::ToolDefinitionsChanged);
        }
        rest.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    #[test]
    fn every_cause_is_read_from_its_note_and_a_note_without_one_has_none() {
        for cause in GateCause::iter() {
            assert_eq!(GateCause::of_note(&cause.note("e1-t7c1r1")), Some(cause));
        }
        assert_eq!(GateCause::of_note("e1-t7c1r1"), None);
        assert_eq!(GateCause::of_note("goal-e1-1 OfALaterVersion"), None);
        let definitions = "tools-a-e1-1: changed a__b; new LowConfidence";
        assert_eq!(GateCause::of_note(definitions), Some(GateCause::ToolDefinitionsChanged));
    }
}
