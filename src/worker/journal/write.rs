//! The transactions of the journal: batches and pruning.

use std::ops::Range;

use jiff::Timestamp;
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use crate::engine::machine::EngineSnapshot;
use crate::engine::{JournalRecord, RecordKind};

use super::history::HistoryWriter;
use super::line_usage::{AskedModels, LineUsage};
use super::sensor_records::{self, SensorRecord};
use super::tasks;
use super::{HISTORY_BYTES, HISTORY_TURNS, JOURNAL_LINES, JournalLine, PRUNE_EVERY_TURNS};

/// Lines that are kept even on a full volume.
const MIN_LINES: i64 = 1_000;

#[derive(Debug, thiserror::Error)]
pub(super) enum JournalWriteError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

#[derive(Clone, Copy)]
pub(super) struct JournalBatch<'a> {
    pub(super) agent: &'a str,
    pub(super) now: Timestamp,
    pub(super) records: &'a [JournalRecord],
    pub(super) snapshot: &'a EngineSnapshot,
    /// The new record of a Sensor, if its event caused the batch.
    pub(super) kept: Option<&'a SensorRecord>,
    /// Whether responses to tasks have a receiver.
    pub(super) sends_responses: bool,
    /// The models that calls ask.
    pub(super) models: Option<&'a AskedModels>,
}

/// Writes one batch, completely or not at all. Returns its [`JournalLine`]s.
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
        sends_responses,
        models,
    } = batch;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let history = HistoryWriter {
        transaction: &transaction,
        now,
        agent,
    };
    let mut lines = Vec::with_capacity(records.len());
    for record in records {
        let usage = LineUsage::of(record.used, models);
        line(&transaction, now, record, &usage)?;
        lines.push(JournalLine::of(transaction.last_insert_rowid(), now, record, usage));
        messages(&transaction, record)?;
        history.write(record)?;
        if let Some(change) = &record.task {
            tasks::write(&transaction, now, change, sends_responses)?;
        }
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

pub(super) fn put(connection: &Connection, key: &str, value: &str) -> rusqlite::Result<()> {
    connection
        .prepare_cached("INSERT INTO kv (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2")?
        .execute(params![key, value])?;
    Ok(())
}

fn line(
    transaction: &Transaction<'_>,
    now: Timestamp,
    record: &JournalRecord,
    usage: &LineUsage,
) -> rusqlite::Result<()> {
    let tool = record.tool.as_ref();
    transaction
        .prepare_cached(
            "INSERT INTO journal (at, kind, turn, call, note, run, tool, effect, key, arguments, outcome, member,
             model, input_tokens, output_tokens, cost_micro_usd)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
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
            record.member,
            usage.model,
            usage.input_tokens,
            usage.output_tokens,
            usage.cost,
        ])?;
    Ok(())
}

fn messages(transaction: &Transaction<'_>, record: &JournalRecord) -> Result<(), JournalWriteError> {
    retire(transaction, record.member, &(0..record.retract), "DESC")?;
    for message in &record.messages {
        transaction
            .prepare_cached("INSERT INTO messages (turn, live, json, member) VALUES (?1, 1, ?2, ?3)")?
            .execute(params![record.turn, serde_json::to_string(&**message)?, record.member])?;
    }
    retire(transaction, record.member, &record.forget, "ASC")?;
    Ok(())
}

/// Takes messages out of the live transcript of a member, counted from its newest (`DESC`) or its oldest (`ASC`).
fn retire(
    transaction: &Transaction<'_>,
    member: u16,
    places: &Range<usize>,
    order: &'static str,
) -> rusqlite::Result<()> {
    if places.is_empty() {
        return Ok(());
    }
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    transaction.prepare_cached(&retiring(order))?.execute([
        number(places.len()),
        number(places.start),
        member.into(),
    ])?;
    Ok(())
}

pub(super) fn retiring(order: &'static str) -> String {
    format!(
        "UPDATE messages SET live = 0
         WHERE id IN (SELECT id FROM messages WHERE live = 1 AND member = ?3 ORDER BY id {order} LIMIT ?1 OFFSET ?2)"
    )
}

/// Prunes the file to its bounds, independent of when it was last pruned.
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

/// Makes room within a file that cannot grow: drops the older half of the history and of the [`JournalLine`]s. Returns
/// whether anything was dropped.
pub(super) fn make_room(connection: &mut Connection, agent: &str) -> Result<bool, JournalWriteError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let messages = transaction.execute(
        "DELETE FROM messages WHERE live = 0
         AND turn <= (SELECT (min(turn) + max(turn)) / 2 FROM messages WHERE live = 0)",
        [],
    )?;
    let lines = transaction.execute(
        "DELETE FROM journal WHERE seq <= (SELECT min((min(seq) + max(seq)) / 2, max(seq) - ?1) FROM journal)",
        [MIN_LINES],
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

/// Drops what exceeds the bounds of the journal. Never touches the live transcript.
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
