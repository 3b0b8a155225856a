//! The view of the audit as this version of agentloop shows it.
//!
//! A view stores nothing, so a change of it needs no version of the tables: the worker that opens the journal replaces the
//! view by its own. Releases before that know the view of version 10 of the tables and leave any other in place; they read
//! its columns by name. So columns may be added here, and none may be removed or renamed.

use rusqlite::{Connection, OptionalExtension};
use strum::IntoEnumIterator;

use crate::engine::GateCause;

/// The definition that the journal has.
const STORED: &str = "SELECT sql FROM sqlite_master WHERE type = 'view' AND name = 'agent_execution_audit'";

/// Replaces the view, unless the journal has this one.
pub(super) fn renew(connection: &Connection) -> rusqlite::Result<()> {
    let current = definition();
    let stored: Option<String> = connection.query_row(STORED, [], |row| row.get(0)).optional()?;
    if stored.as_deref() == Some(&current) {
        return Ok(());
    }
    let transaction = connection.unchecked_transaction()?;
    transaction.execute_batch("DROP VIEW IF EXISTS agent_execution_audit")?;
    transaction.execute_batch(&current)?;
    transaction.commit()
}

/// The view of version 10 of the tables, with the rule that opened a gate, as [`GateCause::of_note`] finds it: the second word
/// of the note, or what names of tools after the gate's id and a colon say.
fn definition() -> String {
    let causes: Vec<String> = GateCause::iter().map(|cause| format!("'{cause}'")).collect();
    let (causes, changed) = (causes.join(", "), GateCause::ToolDefinitionsChanged);
    format!(
        "CREATE VIEW agent_execution_audit AS
WITH execution AS (
    SELECT turn, member, max(id) AS id FROM agent_execution_history
    WHERE task_id NOT IN ('Precheck', 'Signal', 'Judge', 'Confidence', 'LightJudge', 'LightConfidence') GROUP BY turn, member
), line AS (
    SELECT *,
        CASE WHEN kind IN ('GateOpened', 'GateResolved') THEN substr(note, 1, instr(note || ' ', ' ') - 1) END AS word,
        CASE WHEN kind = 'GateResolved' THEN substr(note, instr(note || ' ', ' ') + 1) END AS closed,
        CASE WHEN kind = 'GateOpened' AND instr(note, ' ') > 0 THEN substr(note, instr(note, ' ') + 1) END AS opened
    FROM journal
    WHERE kind IN ('ToolDenied', 'GateOpened', 'GateResolved', 'ToolsPinned', 'ToolsChanged')
        OR (kind IN ('ToolIntent', 'ToolOutcome') AND run IS NOT NULL)
)
SELECT line.seq, line.at, execution.id AS execution_id, line.turn, line.member,
    substr(line.run, 1, instr(line.run, 'r') - 1) AS call, line.run, line.tool, line.effect,
    CASE
        WHEN kind = 'ToolIntent' THEN 'Allowed'
        WHEN kind = 'ToolDenied' THEN 'Denied'
        WHEN kind = 'GateOpened' THEN 'Asked'
        WHEN kind = 'ToolsPinned' THEN 'Pinned'
        WHEN kind = 'ToolsChanged' THEN 'Accepted'
        WHEN closed GLOB 'approved*' THEN 'Approved'
        WHEN closed GLOB 'denied*' THEN 'Rejected'
        WHEN closed GLOB 'expired*' THEN 'Expired'
        WHEN closed GLOB 'superseded*' THEN 'Superseded'
        WHEN closed GLOB 'withdrawn*' THEN 'Withdrawn'
    END AS decision,
    rtrim(line.word, ':') AS gate,
    CASE
        WHEN closed GLOB 'approved by *' THEN nullif(substr(closed, 13), 'an unknown user')
        WHEN closed GLOB 'denied by *' THEN substr(closed, 11)
    END AS decided_by,
    line.key AS idempotency_key, line.arguments AS arguments_hash, line.outcome, line.note,
    CASE
        WHEN opened IS NOT NULL AND word GLOB '*:' THEN '{changed}'
        WHEN opened IN ({causes}) THEN opened
    END AS cause
FROM line LEFT JOIN execution ON execution.turn = line.turn AND execution.member = line.member"
    )
}
