//! What must hold when calls of a goal are denied: a person decides on the loop once one tool was denied too often, and only
//! then can denials end it.

use std::collections::BTreeMap;

use crate::api::goal::GoalEnd;
use crate::api::status::GateKind;
use crate::engine::RecordKind;
use crate::engine::machine::LoopView;
use crate::worker::journal::JournalLine;

/// Denials of one tool in a loop after which a person decides on its continuation.
const MAX_DENIALS: u32 = 6;
/// The reasons of denials by a rule or a person.
const DECISIONS: [&str; 5] = [
    "NotApproved",
    "ApprovalExpired",
    "DeniedBefore",
    "MissingGrant",
    "Repeated",
];
/// A tool is hidden after decisions, and also after calls that were wrong.
const HIDDEN: &str = "Hidden";

/// Counts the denials of one loop by what it commits. Goes back with the volume.
#[derive(Clone, Debug, Default)]
pub(super) struct DenialWatch {
    /// Those that certainly count, by tool.
    certain: BTreeMap<String, u32>,
    /// All that may count.
    possible: BTreeMap<String, u32>,
    /// A person has to be asked before the next step.
    is_due: bool,
    /// The loop had ended after the last step on disk.
    has_ended: bool,
    /// Denials in all loops, and loops that they have ended.
    pub(super) denials: usize,
    pub(super) ends: usize,
}

impl DenialWatch {
    /// A step of a loop in mode `Goal` is on disk. `is_request`: a request was being answered before it.
    pub(super) fn committed(&mut self, lines: &[JournalLine], view: &LoopView, is_request: bool) {
        let (mut is_request, mut began) = (is_request, false);
        for line in lines {
            #[expect(clippy::wildcard_enum_match_arm, reason = "the other kinds have no rule here")]
            match line.kind {
                RecordKind::TaskStarted => (is_request, began) = (true, false),
                RecordKind::TaskEnded => is_request = false,
                RecordKind::TurnStarted => began = self.is_due,
                RecordKind::ToolDenied => self.count(line, is_request),
                _ => {}
            }
        }
        assert!(
            !began,
            "a step begins although calls of one tool were denied {MAX_DENIALS} times: {:?}",
            self.certain
        );
        if view.gates.iter().any(|open| open.gate.kind == GateKind::Escalated) {
            self.is_due = false;
        }
        let had_ended = std::mem::replace(&mut self.has_ended, view.outcome.is_some());
        if self.has_ended {
            let end = view.goal.as_ref().and_then(|goal| goal.end);
            self.loop_ended(end.filter(|_| !had_ended));
        }
    }

    fn count(&mut self, line: &JournalLine, is_request: bool) {
        let Some(tool) = &line.tool else { return };
        let is_decision = DECISIONS.contains(&&*line.note);
        if !is_decision && line.note != HIDDEN {
            return;
        }
        self.denials += 1;
        *self.possible.entry(tool.clone()).or_default() += 1;
        if is_decision && !is_request {
            let times = self.certain.entry(tool.clone()).or_default();
            *times += 1;
            self.is_due |= *times >= MAX_DENIALS;
        }
    }

    /// The next loop counts anew. `end`: what has ended this one just now.
    fn loop_ended(&mut self, end: Option<GoalEnd>) {
        if end == Some(GoalEnd::CallsDenied) {
            let max = self.possible.values().max().copied().unwrap_or(0);
            assert!(max >= MAX_DENIALS, "ended after {:?}", self.possible);
            self.ends += 1;
        }
        *self = Self {
            has_ended: true,
            denials: self.denials,
            ends: self.ends,
            ..Self::default()
        };
    }
}
