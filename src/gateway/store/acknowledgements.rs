//! Acknowledgements: up to which call of each member the worker has the outcomes, so that nothing is kept of them.
//!
//! Calls of one member are acknowledged in order, and those of two members independently of each other.

use std::collections::BTreeMap;

use rusqlite::{Transaction, params};

use super::meta::set_meta;
use super::{CallStore, CallStoreError, CallStoreState, KEPT_CALLS, WriteDurability};
use crate::engine::CallId;

/// Name of the last acknowledgement of the main member, 0.
const ACKED: &str = "acked";

impl CallStore {
    /// The worker has the outcomes of this call and all earlier ones of its member: their answers are deleted.
    pub fn acknowledge(&self, id: CallId) -> Result<(), CallStoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        if inner.counts.is_acknowledged(id) {
            return Ok(());
        }
        inner.write(WriteDurability::MayLoseIt, |change, counts| {
            set_meta(change, &name(id.member), &id.to_string())?;
            // Nothing is kept of calls before the last acknowledgement.
            let before = counts.acked.insert(id.member, id);
            let before = before.map_or((0, 0, 0), |before| (before.turn, before.call, before.attempt));
            let mut forget = change.prepare_cached(
                "UPDATE calls SET answer = NULL WHERE answer IS NOT NULL AND member = ?1
                 AND (turn, call, attempt) <= (?2, ?3, ?4) AND (turn, call, attempt) > (?5, ?6, ?7)",
            )?;
            forget.execute(params![
                id.member, id.turn, id.call, id.attempt, before.0, before.1, before.2
            ])?;
            let mut delete = change.prepare_cached(
                "DELETE FROM calls WHERE state <> 'Open' AND member = ?1 AND (turn, call, attempt) <= (?2, ?3, ?4)
                 AND number <= (SELECT max(number) FROM calls) - ?5",
            )?;
            delete.execute(params![id.member, id.turn, id.call, id.attempt, KEPT_CALLS])?;
            Ok(())
        })?;
        inner.tidy();
        Ok(())
    }
}

impl CallStoreState {
    pub(super) fn is_acknowledged(&self, id: CallId) -> bool {
        self.acked.get(&id.member).is_some_and(|last| id.is_up_to(*last))
    }
}

/// The last acknowledged call of each member.
pub(super) fn load(change: &Transaction<'_>) -> rusqlite::Result<BTreeMap<u16, CallId>> {
    let mut select = change.prepare("SELECT value FROM meta WHERE name = ?1 OR name GLOB ?1 || '-*'")?;
    let ids = select.query_map([ACKED], |row| row.get::<_, String>(0))?;
    ids.map(|id| {
        let id: CallId = id?.parse().map_err(|_| rusqlite::Error::InvalidQuery)?;
        Ok((id.member, id))
    })
    .collect()
}

/// The name of the last acknowledgement of a member. That of the main one has no number: records from before there were
/// others hold it under this name.
fn name(member: u16) -> String {
    match member {
        0 => ACKED.to_owned(),
        member => format!("{ACKED}-{member}"),
    }
}
