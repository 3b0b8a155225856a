//! What the check after an attempt at a step of a goal found, in the rows of that attempt.

use rusqlite::{OptionalExtension, params};

use super::history::{ExecutionKind, HistoryWriter, MemberTurn, NEWEST_STEP, first_id};
use super::write::JournalWriteError;
use crate::engine::JournalRecord;

impl HistoryWriter<'_> {
    /// The attempt at a step of a goal that was this turn is over. Its last call has the verdicts as well; a turn that failed
    /// before its first answer has none.
    pub(super) fn checked(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let Some(validation) = &record.validation else {
            return Ok(());
        };
        let of = MemberTurn::of(record);
        let validation = serde_json::to_string(validation)?;
        self.transaction
            .prepare_cached(
                "UPDATE agent_execution_history
                 SET state_snapshot = json_set(coalesce(state_snapshot, '{}'), '$.validation', json(?2)) WHERE id = ?1",
            )?
            .execute(params![self.newest(of, ExecutionKind::Turn)?, validation])?;
        let (first, next) = (first_id(of.turn), first_id(of.turn.saturating_add(1)));
        let step: Option<i64> = self
            .transaction
            .prepare_cached(NEWEST_STEP)?
            .query_row(params![first, next, of.member], |row| row.get(0))
            .optional()?;
        self.transaction
            .prepare_cached("UPDATE agent_execution_steps SET validation = ?2 WHERE rowid = ?1")?
            .execute(params![step, validation])?;
        Ok(())
    }
}
