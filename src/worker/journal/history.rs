//! The history of an Agent for users: `agent_execution_history`, one row per turn (or question of a pre-check), and
//! `agent_execution_steps`, one row per answered model call.
//!
//! Derived only from the engine's records, in the transaction that commits them: every row has its lines in the
//! journal, and a crash loses none. The loop never reads these tables.

use jiff::Timestamp;
use rusqlite::{OptionalExtension, Transaction, params};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::step_results::StepResults;
use super::write::{JournalWriteError, put};
use super::{HISTORY_TURNS, STEP_BYTES};
use crate::engine::message::{Message, ToolCall};
use crate::engine::tasks::{TaskChange, TaskResponse};
use crate::engine::{CallPurpose, JournalRecord, RecordDetail, RecordKind, RecordedUsage, ids};
use crate::support::hash::sha256_u64;
use crate::support::text::first_bytes;

/// Maximum bytes of one text in a step; the complete text is in `messages`.
const MAX_TEXT: usize = 4 * 1024;
/// Approximate bound for all texts of a step together, in bytes.
const MAX_STEP: usize = 64 * 1024;
/// Key of the totals of rows that were pruned.
pub(super) const PRUNED_KEY: &str = "history";

/// Queries for the execution of a turn, the newest pre-check before it, and the newest step in it.
pub(super) const TURN: &str = "SELECT id FROM agent_execution_history
    WHERE id >= ?1 AND id < ?2 AND member = ?3 AND task_id NOT IN ('Precheck', 'Signal', 'Judge', 'Confidence', 'LightJudge', 'LightConfidence') ORDER BY id DESC LIMIT 1";
pub(super) const PRECHECK: &str = "SELECT id FROM agent_execution_history
    WHERE id >= ?1 AND id < ?2 AND member = ?3 AND task_id = 'Precheck' ORDER BY rowid DESC LIMIT 1";
pub(super) const NEWEST_STEP: &str = "SELECT rowid, json_array_length(action), result FROM agent_execution_steps
    WHERE id >= ?1 AND id < ?2 AND member = ?3 AND purpose NOT IN ('Precheck', 'Signal', 'Judge', 'Confidence', 'LightJudge', 'LightConfidence') ORDER BY id DESC LIMIT 1";
/// Query for the start of a call, among the lines in which it can be.
const STARTED: &str = "SELECT at FROM journal WHERE kind = 'CallStarted' AND call = ?1
    AND seq > (SELECT max(seq) FROM journal) - 1000 ORDER BY seq DESC LIMIT 1";

#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct HistoryTotals {
    pub executions: i64,
    pub succeeded: i64,
    pub failed: i64,
    pub steps: i64,
    /// Tokens, as far as the server reported them.
    pub tokens: i64,
    /// Micro-dollars, as far as they are known.
    pub cost: i64,
}

#[derive(Clone, Copy)]
pub(super) enum ExecutionKind {
    /// The turn, whether a heartbeat or not.
    Turn,
    /// The question of a pre-check before the turn.
    Precheck,
}

/// A turn of one member of the Agent.
#[derive(Clone, Copy)]
pub(super) struct MemberTurn {
    pub(super) member: u16,
    pub(super) turn: i64,
}

impl MemberTurn {
    pub(super) const fn of(record: &JournalRecord) -> Self {
        Self {
            member: record.member,
            turn: record.turn,
        }
    }

    const fn next(self) -> Self {
        Self {
            turn: self.turn + 1,
            ..self
        }
    }

    /// What distinguishes its execution from others of the same purpose. Without the number of the main member, as before there
    /// were others: rows of a turn that is under way must keep their ids.
    fn key(self) -> Value {
        match self.member {
            ids::MAIN => json!([self.turn]),
            member => json!([self.turn, member]),
        }
    }
}

/// Writes the tables within one batch.
pub(super) struct HistoryWriter<'a> {
    pub(super) transaction: &'a Transaction<'a>,
    pub(super) now: Timestamp,
    pub(super) agent: &'a str,
}

impl HistoryWriter<'_> {
    pub(super) fn write(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        match record.kind {
            RecordKind::TurnStarted => {
                let task = match record.detail {
                    RecordDetail::TurnStarted(purpose) => purpose,
                    RecordDetail::None
                    | RecordDetail::Trip(_)
                    | RecordDetail::UselessAnswer
                    | RecordDetail::Escalated(_)
                    | RecordDetail::NotApproved(_) => CallPurpose::Turn,
                };
                let turn = MemberTurn::of(record);
                self.begin(turn, task, &turn.key())?;
            }
            RecordKind::CallAnswered => self.answered(record)?,
            RecordKind::TaskStarted | RecordKind::TaskEnded => self.task(record)?,
            RecordKind::ToolOutcome | RecordKind::ToolDenied => self.outcome(record)?,
            RecordKind::TurnCompleted => self.end(
                MemberTurn::of(record),
                ExecutionKind::Turn,
                "success",
                &json!({"end": record.note}),
            )?,
            RecordKind::TurnFailed => self.end(
                MemberTurn::of(record),
                ExecutionKind::Turn,
                "failed",
                &json!({"failure": record.note}),
            )?,
            RecordKind::PrecheckSkipped => {
                self.end(
                    MemberTurn::of(record).next(),
                    ExecutionKind::Precheck,
                    "success",
                    &json!({"end": "skip"}),
                )?;
            }
            // A pre-check that got no answer has no row to complete.
            RecordKind::PrecheckFailed if record.detail == RecordDetail::UselessAnswer => {
                self.end(
                    MemberTurn::of(record).next(),
                    ExecutionKind::Precheck,
                    "failed",
                    &json!({"failure": record.note}),
                )?;
            }
            RecordKind::StepChecked => self.checked(record)?,
            RecordKind::GateOpened | RecordKind::GateResolved => self.escalation(record)?,
            RecordKind::ToolsPinned
            | RecordKind::ToolsChanged
            | RecordKind::Started
            | RecordKind::Transition
            | RecordKind::CallStarted
            | RecordKind::CallFailed
            | RecordKind::ToolIntent
            | RecordKind::LoopDetected
            | RecordKind::HotStateRefused
            | RecordKind::SensorUpdated
            | RecordKind::SensorFailed
            | RecordKind::SignalScored
            | RecordKind::SignalUnscored
            | RecordKind::Notified
            | RecordKind::NotificationDropped
            | RecordKind::PrecheckFailed
            | RecordKind::QuestionFailed
            | RecordKind::GuardrailTriggered
            | RecordKind::ResultsCleared
            | RecordKind::HistoryDoubted
            | RecordKind::Trimmed
            | RecordKind::Compacted
            | RecordKind::TaskAccepted
            | RecordKind::RequestHandled => {}
        }
        self.results(record)
    }

    /// The execution of a task has its id; one that a limit ended has not succeeded.
    fn task(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let of = MemberTurn::of(record);
        match record.task.as_deref() {
            Some(TaskChange::Started(id)) => {
                let execution = self.execution(of)?;
                self.transaction
                    .prepare_cached("UPDATE agent_execution_history SET task_id = ?2 WHERE id = ?1")?
                    .execute(params![execution, id])?;
                Ok(())
            }
            Some(TaskChange::Ended(TaskResponse {
                reason: Some(limit), ..
            })) => Ok(self.end(of, ExecutionKind::Turn, "failed", &json!({"failure": limit.as_ref()}))?),
            Some(TaskChange::Accepted(_) | TaskChange::Ended(_)) | None => Ok(()),
        }
    }

    /// The execution after which a person was asked whether the loop may continue.
    fn escalation(&self, record: &JournalRecord) -> rusqlite::Result<()> {
        let (kind, status) = match record.detail {
            RecordDetail::Escalated(kind) => (kind, None),
            RecordDetail::NotApproved(kind) => (kind, Some("escalated")),
            RecordDetail::None | RecordDetail::Trip(_) | RecordDetail::TurnStarted(_) | RecordDetail::UselessAnswer => {
                return Ok(());
            }
        };
        let Some(execution) = self.newest(MemberTurn::of(record), ExecutionKind::Turn)? else {
            return Ok(());
        };
        self.transaction
            .prepare_cached(
                "UPDATE agent_execution_history SET escalation_reason = ?2, final_status = coalesce(?3, final_status)
                 WHERE id = ?1",
            )?
            .execute(params![execution, kind.as_ref(), status])?;
        Ok(())
    }

    fn begin(&self, of: MemberTurn, task: CallPurpose, key: &Value) -> rusqlite::Result<String> {
        let id = id(of.turn, 0, &json!([self.agent, task, key]));
        self.transaction
            .prepare_cached(
                "INSERT OR IGNORE INTO agent_execution_history
                 (id, agent_id, task_id, turn, started_at, total_steps, member) VALUES (?1, ?2, ?3, ?4, ?5, 0, ?6)",
            )?
            .execute(params![
                id,
                self.agent,
                task.as_ref(),
                of.turn,
                self.now.to_string(),
                of.member
            ])?;
        Ok(id)
    }

    /// Returns the execution of a turn. Creates it if the turn began under a version without these tables.
    fn execution(&self, turn: MemberTurn) -> rusqlite::Result<String> {
        match self.newest(turn, ExecutionKind::Turn)? {
            Some(id) => Ok(id),
            None => self.begin(turn, CallPurpose::Turn, &turn.key()),
        }
    }

    pub(super) fn newest(&self, of: MemberTurn, kind: ExecutionKind) -> rusqlite::Result<Option<String>> {
        let sql = match kind {
            ExecutionKind::Turn => TURN,
            ExecutionKind::Precheck => PRECHECK,
        };
        let mut select = self.transaction.prepare_cached(sql)?;
        let (first, next) = (first_id(of.turn), first_id(of.turn.saturating_add(1)));
        select
            .query_row(params![first, next, of.member], |row| row.get(0))
            .optional()
    }

    fn answered(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let (Some(call), Some(used)) = (record.call, record.used) else {
            return Ok(());
        };
        let turn = MemberTurn {
            member: call.member,
            turn: call.turn,
        };
        let question = match used.purpose {
            CallPurpose::Precheck => Some("wake"),
            CallPurpose::Signal => Some("scored"),
            CallPurpose::Judge | CallPurpose::LightJudge => Some("judged"),
            CallPurpose::Confidence | CallPurpose::LightConfidence => Some("estimated"),
            CallPurpose::Turn | CallPurpose::Heartbeat | CallPurpose::Chat | CallPurpose::Compaction => None,
        };
        let execution = if let Some(end) = question {
            let execution = self.begin(turn, used.purpose, &json!([call.to_string()]))?;
            if record.detail == RecordDetail::UselessAnswer {
                self.end_of(&execution, "failed", &json!({ "failure": record.note }))?;
            } else {
                self.end_of(&execution, "success", &json!({ "end": end }))?;
            }
            execution
        } else {
            self.execution(turn)?
        };
        let (text, calls) = answer_of(record);
        let max = MAX_TEXT.min(MAX_STEP / (2 * calls.len() + 1));
        let step = ExecutionStep {
            // At most one attempt of a call is answered, so the id needs no attempt number.
            id: id(call.turn, call.call, &json!([self.agent, execution, call.call])),
            execution,
            member: call.member,
            call: call.to_string(),
            attempt: call.attempt,
            duration: self.duration(&call.to_string())?,
            error: (record.detail == RecordDetail::UselessAnswer).then(|| record.note.clone()),
            reasoning: text.map(|text| truncate(text, max)),
            action: calls.iter().map(|call| action(call, max)).collect(),
            success: calls.is_empty().then_some(record.detail != RecordDetail::UselessAnswer),
            used,
        };
        self.insert(&step)
    }

    /// Milliseconds since the call was started; `None` if its line is no longer near the end of the journal.
    fn duration(&self, call: &str) -> rusqlite::Result<Option<i64>> {
        let started: Option<String> = self
            .transaction
            .prepare_cached(STARTED)?
            .query_row([call], |row| row.get(0))
            .optional()?;
        let started = started.and_then(|at| at.parse::<Timestamp>().ok());
        Ok(started.and_then(|at| i64::try_from(self.now.duration_since(at).as_millis().max(0)).ok()))
    }

    fn insert(&self, step: &ExecutionStep) -> Result<(), JournalWriteError> {
        let tokens = step.used.tokens.map(|tokens| i64::try_from(tokens).unwrap_or(i64::MAX));
        let inserted = self
            .transaction
            .prepare_cached(
                "INSERT OR IGNORE INTO agent_execution_steps
                 (id, execution_id, step_number, timestamp, call, purpose, reasoning, action, result, success, tokens_used,
                  cost_micro_usd, member, attempt, duration_milliseconds, error)
                 SELECT ?1, ?2, total_steps + 1, ?3, ?4, ?5, ?6, ?7, '[]', ?8, ?9, ?10, ?11, ?12, ?13, ?14
                 FROM agent_execution_history WHERE id = ?2",
            )?
            .execute(params![
                step.id,
                step.execution,
                self.now.to_string(),
                step.call,
                step.used.purpose.as_ref(),
                step.reasoning,
                serde_json::to_string(&step.action)?,
                step.success,
                tokens,
                step.used.cost,
                step.member,
                step.attempt,
                step.duration,
                step.error,
            ])?;
        // The id is deterministic: the totals count a step once, even if its record is written again.
        if inserted == 0 {
            return Ok(());
        }
        self.transaction
            .prepare_cached(
                "UPDATE agent_execution_history SET total_steps = total_steps + 1,
                 total_tokens = CASE WHEN ?2 IS NULL THEN total_tokens ELSE coalesce(total_tokens, 0) + ?2 END,
                 total_cost_micro_usd = CASE WHEN ?3 IS NULL THEN total_cost_micro_usd
                     ELSE coalesce(total_cost_micro_usd, 0) + ?3 END
                 WHERE id = ?1",
            )?
            .execute(params![step.execution, tokens, step.used.cost])?;
        Ok(())
    }

    /// Records the outcome of a tool run, or of a [`ToolCall`] that was denied.
    fn outcome(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let Some(tool) = record.tool.as_ref().filter(|tool| !tool.run.is_refresh()) else {
            return Ok(());
        };
        let outcome = tool.outcome.as_ref().map_or("Denied", AsRef::as_ref);
        let place = usize::try_from(tool.run.index).unwrap_or(usize::MAX).saturating_sub(1);
        self.change(MemberTurn::of(record), |ended| {
            if let Some(result) = ended.result_at(place) {
                result["outcome"] = outcome.into();
            }
        })
    }

    /// Adds the results that join the transcript, in the order of their calls.
    fn results(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let results = record.messages.iter().filter_map(|message| match &**message {
            Message::Tool { text, .. } => Some(text.as_str()),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => None,
        });
        let results: Vec<&str> = results.collect();
        if results.is_empty() {
            return Ok(());
        }
        self.change(MemberTurn::of(record), |ended| {
            let max = MAX_TEXT.min(MAX_STEP / (2 * ended.calls + 1));
            for text in results {
                let place = ended.joined();
                if let Some(result) = ended.result_at(place) {
                    result["text"] = truncate(text, max).into();
                }
            }
        })
    }

    /// Updates the results of the newest step of a turn.
    fn change(&self, of: MemberTurn, how: impl FnOnce(&mut StepResults)) -> Result<(), JournalWriteError> {
        let (first, next) = (first_id(of.turn), first_id(of.turn.saturating_add(1)));
        let found = self
            .transaction
            .prepare_cached(NEWEST_STEP)?
            .query_row(params![first, next, of.member], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, row.get::<_, String>(2)?))
            })
            .optional()?;
        let Some((row, calls, text)) = found else {
            return Ok(());
        };
        let mut ended = StepResults {
            calls: usize::try_from(calls).unwrap_or_default(),
            results: serde_json::from_str(&text).unwrap_or_default(),
        };
        how(&mut ended);
        self.transaction
            .prepare_cached("UPDATE agent_execution_steps SET result = ?2, success = ?3, error = coalesce(?4, error) WHERE rowid = ?1")?
            .execute(params![
                row,
                serde_json::to_string(&ended.results)?,
                ended.success(),
                ended.error()
            ])?;
        Ok(())
    }

    fn end(&self, of: MemberTurn, kind: ExecutionKind, status: &str, state: &Value) -> rusqlite::Result<()> {
        let execution = match kind {
            ExecutionKind::Turn => Some(self.execution(of)?),
            ExecutionKind::Precheck => self.newest(of, kind)?,
        };
        execution.map_or(Ok(()), |execution| self.end_of(&execution, status, state))
    }

    fn end_of(&self, execution: &str, status: &str, state: &Value) -> rusqlite::Result<()> {
        self.transaction
            .prepare_cached(
                "UPDATE agent_execution_history SET completed_at = ?2, final_status = ?3, state_snapshot = ?4
                 WHERE id = ?1",
            )?
            .execute(params![execution, self.now.to_string(), status, state.to_string()])?;
        Ok(())
    }

    /// Drops the rows of turns beyond the bounds, and adds them to the totals.
    pub(super) fn prune(&self, turn: i64) -> Result<(), JournalWriteError> {
        self.drop_up_to(turn - HISTORY_TURNS)?;
        let kept: i64 = self.transaction.query_row(
            "SELECT coalesce(sum(octet_length(action) + octet_length(result) + coalesce(octet_length(reasoning), 0)), 0)
             FROM agent_execution_steps",
            [],
            |row| row.get(0),
        )?;
        if kept > STEP_BYTES {
            let middle = self.transaction.query_row(
                "SELECT (min(turn) + max(turn)) / 2 FROM agent_execution_history",
                [],
                |row| row.get(0),
            )?;
            self.drop_up_to(middle)?;
        }
        Ok(())
    }

    /// Drops the older half, but never the newest turn. Returns whether anything was dropped.
    pub(super) fn halve(&self) -> Result<bool, JournalWriteError> {
        let (first, last): (Option<i64>, Option<i64>) =
            self.transaction
                .query_row("SELECT min(turn), max(turn) FROM agent_execution_history", [], |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })?;
        let (Some(first), Some(last)) = (first, last) else {
            return Ok(false);
        };
        if first < last {
            self.drop_up_to(i64::midpoint(first, last).min(last - 1))?;
        }
        Ok(first < last)
    }

    fn drop_up_to(&self, turn: i64) -> Result<(), JournalWriteError> {
        // Turns count from 1, so there is nothing to drop.
        if turn < 1 {
            return Ok(());
        }
        let first = first_id(turn.saturating_add(1));
        let gone = self.transaction.query_row(
            "SELECT count(*), coalesce(sum(final_status = 'success'), 0), coalesce(sum(final_status = 'failed'), 0),
             coalesce(sum(total_steps), 0), coalesce(sum(total_tokens), 0), coalesce(sum(total_cost_micro_usd), 0)
             FROM agent_execution_history WHERE id < ?1",
            [&first],
            totals,
        )?;
        if gone == HistoryTotals::default() {
            return Ok(());
        }
        let before: Option<String> = self
            .transaction
            .query_row("SELECT value FROM kv WHERE key = ?1", [PRUNED_KEY], |row| row.get(0))
            .optional()?;
        let before = before.and_then(|text| serde_json::from_str(&text).ok());
        let all = gone.and(before.unwrap_or_default());
        put(self.transaction, PRUNED_KEY, &serde_json::to_string(&all)?)?;
        self.transaction
            .execute("DELETE FROM agent_execution_steps WHERE id < ?1", [&first])?;
        self.transaction
            .execute("DELETE FROM agent_execution_history WHERE id < ?1", [&first])?;
        Ok(())
    }
}

impl HistoryTotals {
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            executions: self.executions.saturating_add(other.executions),
            succeeded: self.succeeded.saturating_add(other.succeeded),
            failed: self.failed.saturating_add(other.failed),
            steps: self.steps.saturating_add(other.steps),
            tokens: self.tokens.saturating_add(other.tokens),
            cost: self.cost.saturating_add(other.cost),
        }
    }
}

pub(super) fn totals(row: &rusqlite::Row<'_>) -> rusqlite::Result<HistoryTotals> {
    Ok(HistoryTotals {
        executions: row.get(0)?,
        succeeded: row.get(1)?,
        failed: row.get(2)?,
        steps: row.get(3)?,
        tokens: row.get(4)?,
        cost: row.get(5)?,
    })
}

struct ExecutionStep {
    id: String,
    execution: String,
    member: u16,
    call: String,
    attempt: u32,
    duration: Option<i64>,
    error: Option<String>,
    reasoning: Option<String>,
    action: Vec<Value>,
    success: Option<bool>,
    used: RecordedUsage,
}

/// Returns the text and the [`ToolCall`]s of an answer.
fn answer_of(record: &JournalRecord) -> (Option<&str>, &[ToolCall]) {
    let mut answers = record.messages.iter().filter_map(|message| match &**message {
        Message::Assistant { text, tool_calls, .. } => Some((text.as_deref(), tool_calls.as_slice())),
        Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
    });
    answers.next_back().unwrap_or((None, &[]))
}

fn action(call: &ToolCall, max: usize) -> Value {
    // Arguments of the model may be invalid JSON, and truncated ones are: these are kept as a string.
    let arguments = Some(&call.arguments)
        .filter(|arguments| arguments.len() <= max)
        .and_then(|arguments| serde_json::from_str::<Value>(arguments).ok())
        .unwrap_or_else(|| truncate(&call.arguments, max).into());
    json!({"tool": truncate(&call.name, 64), "arguments": arguments})
}

fn truncate(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let kept = first_bytes(text, max);
    format!("{kept}[cut: the first {} of {} bytes]", kept.len(), text.len())
}

/// Builds a UUID (version 8) that sorts by turn and call. Deterministic, so that writing a row again is a no-op.
fn id(turn: i64, call: u32, of: &Value) -> String {
    let low = sha256_u64(of.to_string()) & (u64::MAX >> 2) | 1 << 63;
    let first = first_id(turn);
    format!(
        "{first}-8{:03x}-{:04x}-{:012x}",
        call.min(0xfff),
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

/// Returns the common prefix of the ids of a turn.
pub(super) fn first_id(turn: i64) -> String {
    let turn = turn.max(0);
    format!("{:08x}-{:04x}", turn >> 16 & 0xffff_ffff, turn & 0xffff)
}
