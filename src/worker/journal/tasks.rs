//! The table of tasks: which wait, and the responses to those that have ended.
//!
//! Written only in the transaction of the record that changes a task, so that a task is accepted, started and answered
//! exactly once.
//!
//! A task takes its place in the table when it is accepted, and the last one when it ends: tasks are not begun in the order in
//! which they were accepted. So tasks that wait are in the order of their arrival, and those that have ended in that of their ends.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;

use super::write::JournalWriteError;
use crate::engine::tasks::{TaskChange, TaskOffer, TaskResponse};
use crate::support::text::{first_bytes, with_ellipsis};

/// Tasks that have ended and are kept, the newest first. Responses that are to be delivered are kept in any case.
pub const ENDED_TASKS: i64 = 1_000;

/// A response that has not been delivered.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitingResponse {
    /// Position in the table, in the order in which the tasks ended.
    pub seq: i64,
    pub response: TaskResponse,
}

/// A task whose id is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownTask {
    /// The line before those of the task. 0: its lines are no longer kept.
    pub after: i64,
    /// The user who requested it; `None`: it was not requested, or was begun by an older version.
    user: Option<String>,
}

impl KnownTask {
    /// Whether another user has requested it.
    #[must_use]
    pub fn is_of_another(&self, user: &str) -> bool {
        self.user.as_deref().is_some_and(|owner| owner != user)
    }
}

/// `sends`: responses have a receiver.
pub(super) fn write(
    connection: &Connection,
    now: Timestamp,
    change: &TaskChange,
    sends: bool,
) -> Result<(), JournalWriteError> {
    match change {
        TaskChange::Accepted(offer) => {
            // A task whose id is known was answered, or will be.
            connection
                .prepare_cached("INSERT OR IGNORE INTO tasks (id, at, state, offer) VALUES (?1, ?2, 'Waiting', ?3)")?
                .execute(params![offer.id, now.to_string(), serde_json::to_string(offer)?])?;
        }
        TaskChange::Started(id) => {
            // Who requested it stays: the id is that user's.
            connection
                .prepare_cached(
                    "UPDATE tasks SET state = 'Running',
                     offer = json_object('origin', json_extract(offer, '$.origin')) WHERE id = ?1",
                )?
                .execute([id])?;
        }
        TaskChange::Ended(response) => {
            connection
                .prepare_cached(
                    "UPDATE tasks SET seq = (SELECT max(seq) + 1 FROM tasks), state = 'Ended', response = ?2,
                     undelivered = ?3 WHERE id = ?1",
                )?
                .execute(params![response.id, serde_json::to_string(response)?, sends])?;
            prune(connection)?;
        }
    }
    Ok(())
}

/// The tasks that wait, in the order of their arrival.
pub(super) fn waiting(connection: &Connection) -> Result<Vec<TaskOffer>, JournalWriteError> {
    let rows: Vec<String> = connection
        .prepare("SELECT offer FROM tasks WHERE state = 'Waiting' ORDER BY seq")?
        .query_map([], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    rows.iter().map(|row| Ok(serde_json::from_str(row)?)).collect()
}

/// The task with this id; `None`: it is not known.
pub(super) fn find(connection: &Connection, id: &str) -> rusqlite::Result<Option<KnownTask>> {
    let of = "SELECT json_extract(offer, '$.origin.Request') FROM tasks WHERE id = ?1";
    let user: Option<Option<String>> = connection
        .prepare_cached(of)?
        .query_row([id], |row| row.get(0))
        .optional()?;
    let Some(user) = user else {
        return Ok(None);
    };
    let line = "SELECT coalesce(min(seq) - 1, 0) FROM journal WHERE kind = 'TaskAccepted' AND note = ?1";
    let after = connection.prepare_cached(line)?.query_row([id], |row| row.get(0))?;
    Ok(Some(KnownTask { after, user }))
}

/// The response to a task as JSON. A longer result is a text that ends with an ellipsis.
pub(super) fn response(connection: &Connection, id: &str, bytes: usize) -> Result<Option<String>, JournalWriteError> {
    let row: Option<String> = connection
        .prepare_cached("SELECT response FROM tasks WHERE id = ?1 AND response IS NOT NULL")?
        .query_row([id], |row| row.get(0))
        .optional()?;
    let text = match row {
        Some(text) if text.len() > bytes => text,
        short => return Ok(short),
    };
    let mut response: TaskResponse = serde_json::from_str(&text)?;
    response.result = response.result.map(|result| {
        let text = result.as_str().map_or_else(|| result.to_string(), str::to_owned);
        Value::String(with_ellipsis(first_bytes(&text, bytes), &text))
    });
    Ok(Some(serde_json::to_string(&response)?))
}

/// The oldest response that has not been delivered.
pub(super) fn first_undelivered(connection: &Connection) -> Result<Option<WaitingResponse>, JournalWriteError> {
    let row: Option<(i64, String)> = connection
        .prepare_cached("SELECT seq, response FROM tasks WHERE undelivered = 1 ORDER BY seq LIMIT 1")?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    row.map(|(seq, response)| {
        Ok(WaitingResponse {
            seq,
            response: serde_json::from_str(&response)?,
        })
    })
    .transpose()
}

/// How many responses have not been delivered.
pub(super) fn count_undelivered(connection: &Connection) -> rusqlite::Result<usize> {
    let count: i64 = connection.query_row("SELECT count(*) FROM tasks WHERE undelivered = 1", [], |row| row.get(0))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

pub(super) fn delivered(connection: &Connection, seq: i64) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE tasks SET undelivered = 0 WHERE seq = ?1")?
        .execute([seq])?;
    Ok(())
}

/// Without an outbox, no response is to be delivered.
pub(super) fn drop_undelivered(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute("UPDATE tasks SET undelivered = 0 WHERE undelivered = 1", [])?;
    Ok(())
}

fn prune(connection: &Connection) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "DELETE FROM tasks WHERE state = 'Ended' AND undelivered = 0
             AND seq <= (SELECT seq FROM tasks WHERE state = 'Ended' ORDER BY seq DESC LIMIT 1 OFFSET ?1)",
        )?
        .execute([ENDED_TASKS])?;
    Ok(())
}
