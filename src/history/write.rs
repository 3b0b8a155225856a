//! The transactions of the store: a batch, and a deletion.
//!
//! Rows travel as one JSON text per table. After an error the caller drops the connection, which ends the transaction.

use agentloop_link::history::{HistoryAck, HistoryBatch};
use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::error::HistoryError;
use super::store::{HistoryAgent, RowCounts, StoredBatch};

/// A statement that waits longer than the caller is cancelled by the server too.
const BEGIN: &str = "BEGIN; SET LOCAL statement_timeout = '8s'";

/// By how much the clock of a worker may be ahead, as an interval of Postgres.
const CLOCK_SKEW: &str = "1 hour";

const LOCK_POSITION: &str = "SELECT writer, sequence FROM agentloop_history_positions WHERE agent_id = $1 FOR UPDATE";
const ADD_POSITION: &str = "INSERT INTO agentloop_history_positions (agent_id, writer, sequence, updated_at)
    VALUES ($1, '', 0, now()) ON CONFLICT (agent_id) DO NOTHING";
const SET_POSITION: &str = "UPDATE agentloop_history_positions SET writer = $2, sequence = $3, updated_at = now()
    WHERE agent_id = $1";

// The id of the trace is derived as the crate `otlp` does it, from an uid that the worker does not choose. Rows are kept by the start
// that the worker states, so a start that lies further in the future than clocks differ is stored as the latest possible one, and the
// end with it. The same holds for lines of the audit.
const EXECUTIONS: &str = r#"
INSERT INTO agent_execution_history (agent_id, namespace, agent_name, trace_id, id, task_id, turn, member, started_at, completed_at,
    total_steps, final_status, escalation_reason, total_cost_micro_usd, total_tokens, state_snapshot)
SELECT $1, $2, $3, CASE WHEN r.turn > 0 THEN
        left(encode(sha256(convert_to('agentloop trace ' || $1 || ' ' || r.member || ' ' || r.turn, 'UTF8')), 'hex'), 32) END,
    r.id, r."taskId", r.turn, r.member, least(r."startedAt", latest.start),
    r."completedAt" - (r."startedAt" - least(r."startedAt", latest.start)), r."totalSteps", r."finalStatus", r."escalationReason",
    r."totalCostMicroUsd", r."totalTokens", r."stateSnapshot"
FROM (SELECT now() + $5::text::interval AS start) AS latest, jsonb_to_recordset($4::text::jsonb) AS r(id uuid, "taskId" text,
    turn bigint, member integer,
    "startedAt" timestamptz, "completedAt" timestamptz, "totalSteps" bigint, "finalStatus" text, "escalationReason" text,
    "totalCostMicroUsd" bigint, "totalTokens" bigint, "stateSnapshot" jsonb)
ON CONFLICT (agent_id, id) DO UPDATE SET namespace = excluded.namespace, agent_name = excluded.agent_name,
    trace_id = excluded.trace_id,
    task_id = excluded.task_id, turn = excluded.turn, member = excluded.member, started_at = excluded.started_at,
    completed_at = excluded.completed_at, total_steps = excluded.total_steps, final_status = excluded.final_status,
    escalation_reason = excluded.escalation_reason, total_cost_micro_usd = excluded.total_cost_micro_usd,
    total_tokens = excluded.total_tokens, state_snapshot = excluded.state_snapshot"#;

const STEPS: &str = r#"
INSERT INTO agent_execution_steps (agent_id, id, execution_id, step_number, "timestamp", call, purpose, member, attempt,
    duration_milliseconds, reasoning, action, result, validation, success, error, tokens_used, cost_micro_usd)
SELECT $1, r.* FROM jsonb_to_recordset($2::text::jsonb) AS r(id uuid, "executionId" uuid, "stepNumber" bigint,
    "timestamp" timestamptz, call text, purpose text, member integer, attempt bigint, "durationMilliseconds" bigint,
    reasoning text, action jsonb, result jsonb, validation jsonb, success boolean, error text, "tokensUsed" bigint,
    "costMicroUsd" bigint)
ON CONFLICT (agent_id, id) DO UPDATE SET execution_id = excluded.execution_id, step_number = excluded.step_number,
    "timestamp" = excluded."timestamp", call = excluded.call, purpose = excluded.purpose, member = excluded.member,
    attempt = excluded.attempt, duration_milliseconds = excluded.duration_milliseconds, reasoning = excluded.reasoning,
    action = excluded.action, result = excluded.result, validation = excluded.validation, success = excluded.success,
    error = excluded.error, tokens_used = excluded.tokens_used, cost_micro_usd = excluded.cost_micro_usd"#;

/// A line of a journal never changes. One that states a time in the future is stored with that of its receipt, so the time does not
/// show whether it is stored already.
const AUDIT: &str = r#"
INSERT INTO agent_execution_audit (agent_id, namespace, agent_name, trace_id, seq, at, execution_id, turn, member, call, run, tool,
    effect, decision, gate, cause, decided_by, idempotency_key, arguments_hash, outcome, note)
SELECT $1, $2, $3, CASE WHEN r.turn > 0 THEN
        left(encode(sha256(convert_to('agentloop trace ' || $1 || ' ' || r.member || ' ' || r.turn, 'UTF8')), 'hex'), 32) END,
    r.seq, least(r.at, now() + $5::text::interval), r."executionId", r.turn, r.member, r.call, r.run, r.tool, r.effect, r.decision,
    r.gate, r.cause, r."decidedBy", r."idempotencyKey", r."argumentsHash", r.outcome, r.note
FROM jsonb_to_recordset($4::text::jsonb) AS r(seq bigint, at timestamptz, "executionId" uuid,
    turn bigint, member integer, call text, run text, tool text, effect text, decision text, gate text, cause text, "decidedBy" text,
    "idempotencyKey" text, "argumentsHash" text, outcome text, note text)
WHERE r.at <= now() + $5::text::interval
    OR NOT EXISTS (SELECT FROM agent_execution_audit known WHERE known.agent_id = $1 AND known.seq = r.seq)
ON CONFLICT (agent_id, seq, at) DO NOTHING"#;

/// Steps of the oldest executions, before these: a worker chooses how many steps an execution has, and one statement that deletes
/// them all could never end in time.
const DELETE_STEPS: &str = "DELETE FROM agent_execution_steps s USING (
    SELECT step.agent_id, step.id FROM (
        SELECT agent_id, id FROM agent_execution_history WHERE started_at < $1::text::timestamptz ORDER BY started_at LIMIT $2
    ) old JOIN agent_execution_steps step ON step.agent_id = old.agent_id AND step.execution_id = old.id
    LIMIT $3 FOR UPDATE OF step SKIP LOCKED
) gone WHERE s.agent_id = gone.agent_id AND s.id = gone.id";
const DELETE_EXECUTIONS: &str = "DELETE FROM agent_execution_history h USING (
    SELECT agent_id, id FROM agent_execution_history WHERE started_at < $1::text::timestamptz
    ORDER BY started_at LIMIT $2 FOR UPDATE SKIP LOCKED
) old WHERE h.agent_id = old.agent_id AND h.id = old.id";
/// Steps in one deletion, for each execution.
const STEPS_PER_EXECUTION: i64 = 20;
const DELETE_AUDIT: &str = "DELETE FROM agent_execution_audit a USING (
    SELECT agent_id, seq, at FROM agent_execution_audit WHERE at < $1::text::timestamptz ORDER BY at LIMIT $2
) old WHERE a.agent_id = old.agent_id AND a.seq = old.seq AND a.at = old.at";
/// Agents that have not changed anything for as long: should one return, it begins again with what it has.
const DELETE_POSITIONS: &str = "DELETE FROM agentloop_history_positions WHERE updated_at < $1::text::timestamptz";

pub(crate) async fn store(
    client: &Client,
    agent: &HistoryAgent<'_>,
    batch: &HistoryBatch,
) -> Result<StoredBatch, HistoryError> {
    client.batch_execute(BEGIN).await.map_err(failed)?;
    let (writer, stored) = lock_position(client, agent.uid).await?;
    let nothing = |restart| StoredBatch {
        ack: HistoryAck { stored, restart },
        rows: RowCounts::default(),
    };
    if stored != batch.after || batch.last < batch.after {
        client.batch_execute("ROLLBACK").await.map_err(failed)?;
        return Ok(nothing(!is_lost_answer(batch, &writer, stored)));
    }
    let rows = RowCounts {
        executions: insert(client, EXECUTIONS, Some(agent), (agent.uid, rows(&batch.executions)?)).await?,
        steps: insert(client, STEPS, None, (agent.uid, rows(&batch.steps)?)).await?,
        audit: insert(client, AUDIT, Some(agent), (agent.uid, rows(&batch.audit)?)).await?,
    };
    let position: [(&(dyn ToSql + Sync), Type); 3] = [
        (&agent.uid, Type::TEXT),
        (&batch.writer, Type::TEXT),
        (&batch.last, Type::INT8),
    ];
    client.execute_typed(SET_POSITION, &position).await.map_err(failed)?;
    client.batch_execute("COMMIT").await.map_err(failed)?;
    Ok(StoredBatch {
        ack: HistoryAck {
            stored: batch.last,
            restart: false,
        },
        rows,
    })
}

/// Whether what is stored was sent from this journal, so that only the answer to it was lost: by the process that sends the
/// batch, or by an earlier one, as far as the journal has recorded it.
fn is_lost_answer(batch: &HistoryBatch, writer: &str, stored: i64) -> bool {
    let is_own = writer == batch.writer;
    let mut earlier = batch.sent_before.iter().filter(|sent| sent.writer == writer);
    stored > batch.after && (is_own || earlier.any(|sent| stored <= sent.last))
}

/// Locks the position of an Agent: two batches of one Agent are stored one after the other.
async fn lock_position(client: &Client, uid: &str) -> Result<(String, i64), HistoryError> {
    let uid: [(&(dyn ToSql + Sync), Type); 1] = [(&uid, Type::TEXT)];
    let mut found = client.query_typed(LOCK_POSITION, &uid).await.map_err(failed)?;
    if found.is_empty() {
        client.execute_typed(ADD_POSITION, &uid).await.map_err(failed)?;
        found = client.query_typed(LOCK_POSITION, &uid).await.map_err(failed)?;
    }
    let found = found.first();
    Ok(found.map_or_else(|| (String::new(), 0), |row| (row.get(0), row.get(1))))
}

/// Inserts rows. `dated`: rows with names of the Agent and a time by which they are kept.
async fn insert(
    client: &Client,
    sql: &str,
    dated: Option<&HistoryAgent<'_>>,
    (uid, rows): (&str, Option<String>),
) -> Result<u64, HistoryError> {
    let Some(rows) = rows else { return Ok(0) };
    let mut parameters: Vec<(&(dyn ToSql + Sync), Type)> = vec![(&uid, Type::TEXT)];
    if let Some(agent) = dated {
        parameters.extend([
            (&agent.namespace as &(dyn ToSql + Sync), Type::TEXT),
            (&agent.name, Type::TEXT),
        ]);
    }
    parameters.push((&rows, Type::TEXT));
    if dated.is_some() {
        parameters.push((&CLOCK_SKEW, Type::TEXT));
    }
    client.execute_typed(sql, &parameters).await.map_err(failed)
}

/// Rows as one JSON text; `None` if there are none.
fn rows<T: serde::Serialize>(rows: &[T]) -> Result<Option<String>, HistoryError> {
    if rows.is_empty() {
        return Ok(None);
    }
    let unwritable = |_| HistoryError::Rejected("22030".into());
    let text = serde_json::to_string(rows).map_err(unwritable)?;
    if !text.contains(r"\u0000") {
        return Ok(Some(text));
    }
    // Postgres has no character 0, and models write it.
    let mut value = serde_json::from_str(&text).map_err(unwritable)?;
    replace_zeros(&mut value);
    serde_json::to_string(&value).map(Some).map_err(unwritable)
}

fn replace_zeros(value: &mut Value) {
    let replaced = |text: &str| text.replace('\0', "\u{fffd}");
    match value {
        Value::String(text) => *text = replaced(text),
        Value::Array(values) => values.iter_mut().for_each(replace_zeros),
        Value::Object(fields) => {
            *fields = std::mem::take(fields)
                .into_iter()
                .map(|(key, mut value)| {
                    replace_zeros(&mut value);
                    (replaced(&key), value)
                })
                .collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Nothing that is added up is a number of a worker.
pub(crate) async fn delete_before(client: &Client, cutoff: Timestamp, most: u32) -> Result<RowCounts, HistoryError> {
    let (cutoff, most) = (cutoff.to_string(), i64::from(most));
    let most_steps = most * STEPS_PER_EXECUTION;
    let bounded: [(&(dyn ToSql + Sync), Type); 3] =
        [(&cutoff, Type::TEXT), (&most, Type::INT8), (&most_steps, Type::INT8)];
    let limited = &bounded[..2];
    let steps = client.execute_typed(DELETE_STEPS, &bounded).await.map_err(failed)?;
    let is_rest = i64::try_from(steps).is_ok_and(|steps| steps < most_steps);
    let executions = if is_rest {
        client.execute_typed(DELETE_EXECUTIONS, limited).await.map_err(failed)?
    } else {
        0
    };
    let audit = client.execute_typed(DELETE_AUDIT, limited).await.map_err(failed)?;
    client
        .execute_typed(DELETE_POSITIONS, &bounded[..1])
        .await
        .map_err(failed)?;
    Ok(RowCounts {
        executions,
        steps,
        audit,
    })
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: tokio_postgres::Error) -> HistoryError {
    HistoryError::of_statement(&error)
}

#[cfg(test)]
mod tests {
    use agentloop_link::history::SentChanges;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::of_this_process("now", 8, true)]
    #[case::nothing_new("now", 5, false)]
    #[case::all_that_an_earlier_process_sent("before", 9, true)]
    #[case::a_part_of_it("before", 6, true)]
    #[case::nothing_new_of_it("before", 5, false)]
    #[case::more_than_it_sent_from_this_journal("before", 10, false)]
    #[case::of_a_process_before_that("first", 7, true)]
    #[case::of_another_journal("other", 7, false)]
    #[case::of_a_deleted_position("", 0, false)]
    fn what_is_stored_and_was_sent_from_the_same_journal_is_a_lost_answer(
        #[case] writer: &str,
        #[case] stored: i64,
        #[case] lost: bool,
    ) {
        let sent = |writer: &str, last| SentChanges {
            writer: writer.into(),
            last,
        };
        let batch = HistoryBatch {
            writer: "now".into(),
            after: 5,
            last: 11,
            sent_before: vec![sent("first", 7), sent("before", 9)],
            ..HistoryBatch::default()
        };
        assert_eq!(is_lost_answer(&batch, writer, stored), lost);
    }
}
