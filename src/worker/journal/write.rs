//! What one transaction of the journal writes.

use jiff::Timestamp;
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use crate::engine::machine::EngineSnapshot;
use crate::engine::{JournalRecord, RecordKind};

use super::history::HistoryWriter;
use super::sensor_records::{self, SensorRecord};
use super::{HISTORY_BYTES, HISTORY_TURNS, JOURNAL_LINES, JournalLine, PRUNE_EVERY_TURNS};

/// Lines that stay however little room there is.
const LEAST_LINES: i64 = 1_000;

/// Why a batch was not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum JournalWriteError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// A batch of the engine.
#[derive(Clone, Copy)]
pub(super) struct JournalBatch<'a> {
    /// Uid of the Agent.
    pub(super) agent: &'a str,
    pub(super) now: Timestamp,
    pub(super) records: &'a [JournalRecord],
    pub(super) snapshot: &'a EngineSnapshot,
    /// What is to be remembered of a Sensor.
    pub(super) kept: Option<&'a SensorRecord>,
}

/// Writes one batch: all of it, or nothing. Its lines.
pub(super) fn write_batch(
    connection: &mut Connection,
    batch: JournalBatch<'_>,
) -> Result<Vec<JournalLine>, JournalWriteError> {
    let JournalBatch {
        agent,
        now,
        records,
        snapshot,
        kept,
    } = batch;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let history = HistoryWriter {
        transaction: &transaction,
        now,
        agent,
    };
    let mut lines = Vec::with_capacity(records.len());
    for record in records {
        line(&transaction, now, record)?;
        lines.push(JournalLine::of(transaction.last_insert_rowid(), now, record));
        messages(&transaction, record)?;
        history.write(record)?;
    }
    if let Some(kept) = kept {
        sensor_records::put(&transaction, now, kept)?;
    }
    put(&transaction, super::SNAPSHOT_KEY, &serde_json::to_string(snapshot)?)?;
    if let Some(turn) = records.iter().find_map(turn_to_prune_at) {
        prune(&transaction, turn)?;
        history.prune(turn)?;
    }
    transaction.commit()?;
    Ok(lines)
}

/// Sets one key of `kv`.
pub(super) fn put(connection: &Connection, key: &str, value: &str) -> rusqlite::Result<()> {
    connection
        .prepare_cached("INSERT INTO kv (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2")?
        .execute(params![key, value])?;
    Ok(())
}

fn line(transaction: &Transaction<'_>, now: Timestamp, record: &JournalRecord) -> rusqlite::Result<()> {
    let tool = record.tool.as_ref();
    transaction
        .prepare_cached(
            "INSERT INTO journal (at, kind, turn, call, note, run, tool, effect, key, arguments, outcome)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute(params![
            now.to_string(),
            record.kind.as_ref(),
            record.turn,
            record.call.map(|call| call.to_string()),
            record.note,
            tool.map(|tool| tool.run.to_string()),
            tool.and_then(|tool| tool.tool.as_deref()),
            tool.and_then(|tool| tool.effect).as_ref().map(AsRef::<str>::as_ref),
            tool.and_then(|tool| tool.key.as_deref()),
            tool.and_then(|tool| tool.arguments.as_deref()),
            tool.and_then(|tool| tool.outcome).as_ref().map(AsRef::<str>::as_ref),
        ])?;
    Ok(())
}

fn messages(transaction: &Transaction<'_>, record: &JournalRecord) -> Result<(), JournalWriteError> {
    retire(transaction, record.retract, "DESC")?;
    for message in &record.messages {
        transaction
            .prepare_cached("INSERT INTO messages (turn, live, json) VALUES (?1, 1, ?2)")?
            .execute(params![record.turn, serde_json::to_string(&**message)?])?;
    }
    retire(transaction, record.forget, "ASC")?;
    Ok(())
}

/// Takes messages out of the live transcript, from its newest end (`DESC`) or its oldest (`ASC`).
fn retire(transaction: &Transaction<'_>, count: usize, order: &'static str) -> rusqlite::Result<()> {
    if count == 0 {
        return Ok(());
    }
    transaction
        .prepare_cached(&retiring(order))?
        .execute([i64::try_from(count).unwrap_or(i64::MAX)])?;
    Ok(())
}

pub(super) fn retiring(order: &'static str) -> String {
    format!(
        "UPDATE messages SET live = 0
         WHERE id IN (SELECT id FROM messages WHERE live = 1 ORDER BY id {order} LIMIT ?1)"
    )
}

/// Keeps the file within its bounds, whenever its last pruning was.
pub(super) fn prune_now(connection: &mut Connection, agent: &str) -> Result<(), JournalWriteError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let turn: i64 = transaction.query_row("SELECT coalesce(max(turn), 0) FROM journal", [], |row| row.get(0))?;
    prune(&transaction, turn)?;
    HistoryWriter {
        transaction: &transaction,
        now: Timestamp::UNIX_EPOCH,
        agent,
    }
    .prune(turn)?;
    transaction.commit()?;
    Ok(())
}

/// Makes room within a file that cannot grow: the older half of what is only history goes, and of the lines. Whether
/// there was any.
pub(super) fn make_room(connection: &mut Connection, agent: &str) -> Result<bool, JournalWriteError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let messages = transaction.execute(
        "DELETE FROM messages WHERE live = 0
         AND turn <= (SELECT (min(turn) + max(turn)) / 2 FROM messages WHERE live = 0)",
        [],
    )?;
    let lines = transaction.execute(
        "DELETE FROM journal WHERE seq <= (SELECT min((min(seq) + max(seq)) / 2, max(seq) - ?1) FROM journal)",
        [LEAST_LINES],
    )?;
    let history = HistoryWriter {
        transaction: &transaction,
        now: Timestamp::UNIX_EPOCH,
        agent,
    };
    let executions = history.halve()?;
    transaction.commit()?;
    Ok(messages + lines > 0 || executions)
}

fn turn_to_prune_at(record: &JournalRecord) -> Option<i64> {
    (record.kind == RecordKind::TurnStarted && record.turn % PRUNE_EVERY_TURNS == 0).then_some(record.turn)
}

/// Drops what is older than the bounds of the journal. The live transcript is never touched.
fn prune(transaction: &Transaction<'_>, turn: i64) -> rusqlite::Result<()> {
    transaction.execute(
        "DELETE FROM messages WHERE live = 0 AND turn <= ?1",
        [turn - HISTORY_TURNS],
    )?;
    transaction.execute(
        "DELETE FROM journal WHERE seq <= (SELECT max(seq) FROM journal) - ?1",
        [JOURNAL_LINES],
    )?;
    let kept: i64 = transaction.query_row("SELECT coalesce(sum(octet_length(json)), 0) FROM messages", [], |row| {
        row.get(0)
    })?;
    if kept > HISTORY_BYTES {
        transaction.execute(
            "DELETE FROM messages WHERE live = 0
             AND turn <= (SELECT (min(turn) + max(turn)) / 2 FROM messages WHERE live = 0)",
            [],
        )?;
    }
    Ok(())
}
