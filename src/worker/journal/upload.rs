//! What of the history is to be uploaded: the rows that have changed since the last acknowledgement, in batches.
//!
//! Owns the table `history_changes`, which triggers fill, and the number up to which its changes are acknowledged. An
//! acknowledged change leaves the table. The loop never reads it, and without an upload it is as bounded as the history.
//! What was sent is recorded before, so that a later process recognizes what is stored although no answer arrived.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::time::SystemTime;

use jiff::Timestamp;
use rusqlite::types::FromSql;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::write::{JournalWriteError, put};
use crate::engine::GateCause;
use crate::link::history::{
    AuditRow, ExecutionRow, HistoryAck, HistoryBatch, MAX_CHANGE_NUMBER, MAX_HISTORY_ROWS, MAX_SENDERS, SentChanges,
    StepRow,
};

/// Maximum number of containers within each other in a value that is sent as JSON; a deeper one is sent as text.
const MAX_DEPTH: usize = 32;
/// Bytes of JSON at which a batch ends.
const MAX_BYTES: usize = 128 * 1024;
/// Largest step as JSON, in bytes. Only texts of control characters are longer, since these are escaped.
const MAX_STEP: usize = 96 * 1024;
/// Key of [`UploadPosition`].
const UPLOAD_KEY: &str = "upload";

const CHANGES: &str = "SELECT seq, record, row FROM history_changes ORDER BY seq LIMIT ?1";
const EXECUTION: &str = "SELECT * FROM agent_execution_history WHERE id = ?1";
const STEP: &str = "SELECT * FROM agent_execution_steps WHERE id = ?1";
const AUDIT: &str = "SELECT * FROM agent_execution_audit WHERE seq IN (
    SELECT row FROM (SELECT record, row FROM history_changes ORDER BY seq LIMIT ?1) WHERE record = 'audit')";
/// All rows of an Agent, in their order. Lines up to `?2` belong to an earlier Agent.
const EVERYTHING: &str = "INSERT INTO history_changes (record, row)
    SELECT 'execution', id FROM agent_execution_history WHERE agent_id = ?1
    UNION ALL SELECT 'step', id FROM agent_execution_steps
        WHERE execution_id IN (SELECT id FROM agent_execution_history WHERE agent_id = ?1)
    UNION ALL SELECT 'audit', seq FROM agent_execution_audit WHERE seq > ?2";

/// What is acknowledged, for the Agent whose history it is.
#[derive(Serialize, Deserialize)]
struct UploadPosition {
    agent: String,
    /// The last change that is stored.
    stored: i64,
    /// The last line of an Agent that owned the journal before.
    line: i64,
    /// The changes are not those of the Agent yet: there was no room to list its rows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_unlisted: bool,
    /// What was sent since the last answer, by each process the highest number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sent: Vec<SentChanges>,
}

impl UploadPosition {
    fn write(&self, connection: &Connection) -> Result<(), JournalWriteError> {
        Ok(put(connection, UPLOAD_KEY, &serde_json::to_string(self)?)?)
    }
}

/// Changed rows that are to be uploaded.
#[derive(Debug, PartialEq)]
pub struct UploadBatch {
    pub batch: HistoryBatch,
    /// Further changes follow.
    pub has_more: bool,
}

/// A name for this process that no other has.
pub(super) fn new_writer() -> String {
    let hash = RandomState::new();
    let now = SystemTime::now();
    format!("{:016x}{:016x}", hash.hash_one((now, 0)), hash.hash_one((now, 1)))
}

/// Called by each new owner, before it is recorded as the owner. What another Agent, `last`, left in the journal is not the
/// history of this one.
pub(super) fn begin(connection: &Connection, agent: &str, last: Option<&str>) -> Result<(), JournalWriteError> {
    let position = position(connection)?;
    if position.as_ref().is_some_and(|position| position.agent == agent) {
        return Ok(());
    }
    let same_agent = position.is_none() && last.is_none_or(|last| last == agent);
    let newest = connection.query_row("SELECT coalesce(max(seq), 0) FROM journal", [], |row| row.get(0))?;
    let position = UploadPosition {
        agent: agent.to_owned(),
        stored: 0,
        line: if same_agent { 0 } else { newest },
        is_unlisted: true,
        sent: Vec::new(),
    };
    position.write(connection)
}

/// Lists all rows of the Agent as changes, once. This needs room, unlike [`begin`].
pub(super) fn list(connection: &mut Connection, agent: &str) -> Result<(), JournalWriteError> {
    let position = position(connection)?.filter(|position| position.is_unlisted && position.agent == agent);
    let Some(position) = position else {
        return Ok(());
    };
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute("DELETE FROM history_changes", [])?;
    transaction.execute(EVERYTHING, params![agent, position.line])?;
    let position = UploadPosition {
        is_unlisted: false,
        ..position
    };
    position.write(&transaction)?;
    transaction.commit()?;
    Ok(())
}

/// The position of the Agent, once its rows are listed.
fn own_position(connection: &Connection, agent: &str) -> Result<Option<UploadPosition>, JournalWriteError> {
    let own = |position: &UploadPosition| position.agent == agent && !position.is_unlisted;
    Ok(position(connection)?.filter(own))
}

/// Records that a batch is sent.
pub(super) fn sent(connection: &Connection, agent: &str, batch: &HistoryBatch) -> Result<(), JournalWriteError> {
    let Some(mut position) = own_position(connection, agent)? else {
        return Ok(());
    };
    if let Some(known) = position.sent.iter_mut().find(|sent| sent.writer == batch.writer) {
        if known.last >= batch.last {
            return Ok(());
        }
        known.last = batch.last;
    } else if position.sent.len() < MAX_SENDERS {
        position.sent.push(SentChanges {
            writer: batch.writer.clone(),
            last: batch.last,
        });
    } else {
        return Ok(());
    }
    position.write(connection)
}

/// Reads the oldest changes; `None` if there are none, or the rows of the Agent are not listed yet.
pub(super) fn next_batch(
    connection: &Connection,
    agent: &str,
    writer: &str,
) -> Result<Option<UploadBatch>, JournalWriteError> {
    let Some(position) = own_position(connection, agent)? else {
        return Ok(None);
    };
    let changes = changes(connection)?;
    let mut has_more = changes.len() >= MAX_HISTORY_ROWS;
    if changes.is_empty() {
        return Ok(None);
    }
    let mut audit = audit(connection)?;
    let mut batch = HistoryBatch {
        writer: writer.to_owned(),
        after: position.stored,
        sent_before: position.sent,
        ..HistoryBatch::default()
    };
    batch.sent_before.retain(|sent| sent.writer != writer);
    let mut executions = BTreeMap::new();
    let mut bytes = 0;
    for Change { seq, record } in changes {
        let before = bytes;
        let mut step = None;
        match &record {
            ChangedRow::Execution(id) => bytes += with_execution(connection, (agent, id), &mut executions)?,
            ChangedRow::Step(id) => {
                step = read(connection, STEP, id, step_row)?.map(bounded).transpose()?;
                if let Some((step, size)) = &step {
                    bytes += size + with_execution(connection, (agent, &step.execution_id), &mut executions)?;
                }
            }
            ChangedRow::Audit(line) => bytes += audit.get(line).map_or(Ok(0), size)?,
        }
        if bytes > MAX_BYTES && before > 0 {
            has_more = true;
            break;
        }
        if let ChangedRow::Audit(line) = record {
            batch.audit.extend(audit.remove(&line));
        }
        let step = step.map(|(step, _)| step);
        // A step of an execution that is not of this Agent.
        batch
            .steps
            .extend(step.filter(|step| executions.contains_key(&step.execution_id)));
        batch.last = seq;
    }
    batch.executions = executions.into_values().collect();
    Ok(Some(UploadBatch { batch, has_more }))
}

/// Forgets the changes that are stored, or begins again with all rows.
pub(super) fn stored(connection: &mut Connection, agent: &str, ack: HistoryAck) -> Result<(), JournalWriteError> {
    if !(0..=MAX_CHANGE_NUMBER).contains(&ack.stored) {
        // Numbers that the journal would continue from: beyond the last one, no change could be recorded.
        return Ok(());
    }
    let Some(position) = own_position(connection, agent)? else {
        return Ok(());
    };
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if ack.restart {
        transaction.execute("DELETE FROM history_changes", [])?;
        // The next number is above all that this journal and the other end have used.
        transaction.execute(
            "UPDATE sqlite_sequence SET seq = max(seq, ?1) WHERE name = 'history_changes'",
            [ack.stored],
        )?;
        transaction.execute(
            "INSERT INTO sqlite_sequence (name, seq) SELECT 'history_changes', ?1
             WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'history_changes')",
            [ack.stored],
        )?;
        transaction.execute(EVERYTHING, params![agent, position.line])?;
    } else {
        transaction.execute("DELETE FROM history_changes WHERE seq <= ?1", [ack.stored])?;
    }
    let position = UploadPosition {
        stored: ack.stored,
        sent: Vec::new(),
        ..position
    };
    position.write(&transaction)?;
    transaction.commit()?;
    Ok(())
}

struct Change {
    seq: i64,
    record: ChangedRow,
}

enum ChangedRow {
    Execution(String),
    Step(String),
    Audit(i64),
}

fn changes(connection: &Connection) -> rusqlite::Result<Vec<Change>> {
    let mut select = connection.prepare_cached(CHANGES)?;
    let changes = select.query_map([max_changes()], |row| {
        let record = match row.get::<_, String>("record")?.as_str() {
            "execution" => ChangedRow::Execution(row.get("row")?),
            "step" => ChangedRow::Step(row.get("row")?),
            _ => ChangedRow::Audit(row.get("row")?),
        };
        let seq = row.get("seq")?;
        Ok(Change { seq, record })
    })?;
    changes.collect()
}

/// Changes in one batch.
fn max_changes() -> i64 {
    MAX_HISTORY_ROWS.try_into().unwrap_or(i64::MAX)
}

/// The lines of the next batch, in one query: the view is not made for single rows.
fn audit(connection: &Connection) -> rusqlite::Result<BTreeMap<i64, AuditRow>> {
    let mut select = connection.prepare_cached(AUDIT)?;
    let rows = select.query_map([max_changes()], |row| audit_row(row).map(|line| (line.seq, line)))?;
    rows.collect()
}

fn position(connection: &Connection) -> Result<Option<UploadPosition>, JournalWriteError> {
    let mut select = connection.prepare_cached(super::VALUE)?;
    let text: Option<String> = select.query_row([UPLOAD_KEY], |row| row.get(0)).optional()?;
    Ok(text.map(|text| serde_json::from_str(&text)).transpose()?)
}

/// Adds an execution of the Agent, and returns its size.
fn with_execution(
    connection: &Connection,
    (agent, id): (&str, &str),
    executions: &mut BTreeMap<String, ExecutionRow>,
) -> Result<usize, JournalWriteError> {
    if executions.contains_key(id) {
        return Ok(0);
    }
    let found = read(connection, EXECUTION, id, |row| {
        let owner: String = row.get("agent_id")?;
        execution_row(row).map(|execution| (owner == agent).then_some(execution))
    })?;
    let Some(execution) = found.flatten() else {
        return Ok(0);
    };
    let size = size(&execution)?;
    executions.insert(id.to_owned(), execution);
    Ok(size)
}

fn read<T>(
    connection: &Connection,
    sql: &str,
    id: &str,
    row: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Option<T>> {
    connection.prepare_cached(sql)?.query_row([id], row).optional()
}

fn size(row: &impl Serialize) -> Result<usize, JournalWriteError> {
    Ok(serde_json::to_vec(row)?.len())
}

/// Leaves out the texts of a step that would be too large, so that it never holds up the others.
fn bounded(mut step: StepRow) -> Result<(StepRow, usize), JournalWriteError> {
    if size(&step)? > MAX_STEP {
        step.reasoning = None;
        step.action = Value::Null;
        step.result = Value::Null;
    }
    let size = size(&step)?;
    Ok((step, size))
}

fn execution_row(row: &Row<'_>) -> rusqlite::Result<ExecutionRow> {
    Ok(ExecutionRow {
        id: row.get("id")?,
        task_id: row.get("task_id")?,
        turn: row.get("turn")?,
        member: row.get("member")?,
        started_at: time(row, "started_at")?.unwrap_or_default(),
        completed_at: time(row, "completed_at")?,
        total_steps: row.get("total_steps")?,
        final_status: row.get("final_status")?,
        escalation_reason: row.get("escalation_reason")?,
        total_cost_micro_usd: row.get("total_cost_micro_usd")?,
        total_tokens: row.get("total_tokens")?,
        state_snapshot: json(row, "state_snapshot")?,
    })
}

fn step_row(row: &Row<'_>) -> rusqlite::Result<StepRow> {
    Ok(StepRow {
        id: row.get("id")?,
        execution_id: row.get("execution_id")?,
        step_number: row.get("step_number")?,
        timestamp: time(row, "timestamp")?.unwrap_or_default(),
        call: row.get("call")?,
        purpose: row.get("purpose")?,
        member: row.get("member")?,
        attempt: row.get("attempt")?,
        duration_milliseconds: row.get("duration_milliseconds")?,
        reasoning: row.get("reasoning")?,
        action: json(row, "action")?.unwrap_or_default(),
        result: json(row, "result")?.unwrap_or_default(),
        validation: json(row, "validation")?,
        success: row.get("success")?,
        error: row.get("error")?,
        tokens_used: row.get("tokens_used")?,
        cost_micro_usd: row.get("cost_micro_usd")?,
    })
}

fn audit_row(row: &Row<'_>) -> rusqlite::Result<AuditRow> {
    Ok(AuditRow {
        seq: row.get("seq")?,
        at: time(row, "at")?.unwrap_or_default(),
        execution_id: row.get("execution_id")?,
        turn: row.get("turn")?,
        member: row.get("member")?,
        call: text(row, "call")?,
        run: row.get("run")?,
        tool: row.get("tool")?,
        effect: row.get("effect")?,
        decision: row.get("decision")?,
        gate: text(row, "gate")?,
        cause: gate_cause(row)?,
        decided_by: row.get("decided_by")?,
        idempotency_key: row.get("idempotency_key")?,
        arguments_hash: row.get("arguments_hash")?,
        outcome: row.get("outcome")?,
        note: row.get("note")?,
    })
}

/// The rule that opened the gate of a row of the audit. No column has it: it follows from the note.
pub(super) fn gate_cause(row: &Row<'_>) -> rusqlite::Result<Option<String>> {
    let decision: Option<String> = row.get("decision")?;
    if decision.as_deref() != Some("Asked") {
        return Ok(None);
    }
    let cause = GateCause::of_note(&row.get::<_, String>("note")?);
    Ok(cause.map(|cause| cause.to_string()))
}

/// A text; `None` also if it is empty.
fn text(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<String>> {
    let text: Option<String> = row.get(column)?;
    Ok(text.filter(|text| !text.is_empty()))
}

/// A time; the epoch if it cannot be read, which only a damaged file has.
fn time(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Timestamp>> {
    parsed::<String, _>(row, column, |text| text.parse().unwrap_or_default())
}

fn json(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Value>> {
    parsed::<String, _>(row, column, |text| match serde_json::from_str(&text) {
        Ok(value) if !is_deeper_than(&value, MAX_DEPTH) => value,
        // On its way it stands within other containers, and parsers limit their depth.
        Ok(_) | Err(_) => Value::String(text),
    })
}

/// Whether containers are nested deeper than this.
fn is_deeper_than(value: &Value, depth: usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else {
        return value.is_array() || value.is_object();
    };
    match value {
        Value::Array(values) => values.iter().any(|value| is_deeper_than(value, depth)),
        Value::Object(fields) => fields.values().any(|value| is_deeper_than(value, depth)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn parsed<T: FromSql, V>(row: &Row<'_>, column: &str, parse: impl FnOnce(T) -> V) -> rusqlite::Result<Option<V>> {
    row.get::<_, Option<T>>(column).map(|found| found.map(parse))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_depth_of_a_value_is_that_of_its_containers() {
        let nested = |depth: usize| -> Value {
            serde_json::from_str(&format!("{}1{}", "[".repeat(depth), "]".repeat(depth))).unwrap()
        };
        assert!(!is_deeper_than(&nested(MAX_DEPTH), MAX_DEPTH));
        assert!(is_deeper_than(&nested(MAX_DEPTH + 1), MAX_DEPTH));
        assert!(!is_deeper_than(&Value::Null, 0));
    }
}
