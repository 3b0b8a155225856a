//! The lines of the journal about tool calls. Safe to log: hashes and names, no text of a model or a tool.

use super::batch::ToolRunPlan;
use crate::effects::journal_line;
use crate::tool::ToolRunId;
use crate::{JournalRecord, OutcomeKind, RecordKind, ToolLine};

/// A line about a call; `fill` says more about it.
pub(crate) fn tool_line(
    kind: RecordKind,
    id: ToolRunId,
    note: &str,
    fill: impl FnOnce(&mut ToolLine),
) -> JournalRecord {
    let mut tool = ToolLine {
        run: id,
        tool: None,
        effect: None,
        key: None,
        arguments: None,
        outcome: None,
    };
    fill(&mut tool);
    JournalRecord {
        member: id.member,
        tool: Some(tool),
        ..journal_line(kind, id.turn, note)
    }
}

/// A line about a run.
pub(crate) fn plan_line(
    kind: RecordKind,
    id: ToolRunId,
    note: &str,
    plan: &ToolRunPlan,
    outcome: Option<OutcomeKind>,
) -> JournalRecord {
    tool_line(kind, id, note, |line| {
        line.tool = Some(plan.tool.clone());
        line.effect = Some(plan.effect);
        line.key = Some(plan.key.clone());
        line.arguments = Some(plan.arguments.clone());
        line.outcome = outcome;
    })
}
