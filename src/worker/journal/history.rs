//! The history of an Agent for people: `agent_execution_history`, one row a turn (or question of a pre-check), and
//! `agent_execution_steps`, one row a model call that was answered.
//!
//! A pure reading of the engine's records, written in the transaction that commits them: there is no row of a call that
//! the journal does not have, and none of it is lost with a process. Nothing here is ever read back by the loop.

use jiff::Timestamp;
use ring::digest::{SHA256, digest};
use rusqlite::{OptionalExtension, Transaction, params};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::write::{JournalWriteError, put};
use super::{HISTORY_TURNS, STEP_BYTES};
use crate::engine::message::{Message, ToolCall};
use crate::engine::precheck::UNREADABLE;
use crate::engine::{CallPurpose, JournalRecord, RecordKind, RecordedUsage};

/// Most bytes of a text that a step keeps; the whole is in `messages`.
const MOST_TEXT: usize = 4 * 1024;
/// Most bytes of all texts of a step together, about.
const MOST_STEP: usize = 64 * 1024;
/// Key of what the rows came to that are no longer kept.
pub(super) const PRUNED_KEY: &str = "history";

/// The execution of a turn, the newest question before it, and the newest step in it.
pub(super) const TURN: &str = "SELECT id FROM agent_execution_history
    WHERE id >= ?1 AND id < ?2 AND task_id NOT IN ('Precheck', 'Signal') ORDER BY id DESC LIMIT 1";
pub(super) const PRECHECK: &str = "SELECT id FROM agent_execution_history
    WHERE id >= ?1 AND id < ?2 AND task_id = 'Precheck' ORDER BY rowid DESC LIMIT 1";
pub(super) const NEWEST_STEP: &str = "SELECT rowid, json_array_length(action), result FROM agent_execution_steps
    WHERE id >= ?1 AND id < ?2 AND purpose NOT IN ('Precheck', 'Signal') ORDER BY id DESC LIMIT 1";

/// What executions came to.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct HistoryTotals {
    /// Executions.
    pub executions: i64,
    /// Those that succeeded.
    pub succeeded: i64,
    /// Those that failed.
    pub failed: i64,
    /// Steps.
    pub steps: i64,
    /// Tokens, as far as the server said.
    pub tokens: i64,
    /// Micro-dollars, as far as they are known.
    pub cost: i64,
}

/// Which execution.
#[derive(Clone, Copy)]
enum ExecutionKind {
    /// The turn, heartbeat or not.
    Turn,
    /// The question of a pre-check before it.
    Precheck,
}

/// One batch's hand on the tables.
pub(super) struct HistoryWriter<'a> {
    pub(super) transaction: &'a Transaction<'a>,
    pub(super) now: Timestamp,
    /// Uid of the Agent.
    pub(super) agent: &'a str,
}

impl HistoryWriter<'_> {
    /// Writes what a record says.
    pub(super) fn write(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        match record.kind {
            RecordKind::TurnStarted => {
                let task = if record.note.is_empty() {
                    CallPurpose::Turn
                } else {
                    CallPurpose::Heartbeat
                };
                self.begin(record.turn, task, &json!([record.turn]))?;
            }
            RecordKind::CallAnswered => self.answered(record)?,
            RecordKind::ToolOutcome | RecordKind::ToolDenied => self.outcome(record)?,
            RecordKind::TurnCompleted => self.end(
                record.turn,
                ExecutionKind::Turn,
                "success",
                &json!({"end": record.note}),
            )?,
            RecordKind::TurnFailed => self.end(
                record.turn,
                ExecutionKind::Turn,
                "failed",
                &json!({"failure": record.note}),
            )?,
            RecordKind::PrecheckSkipped => {
                self.end(
                    record.turn + 1,
                    ExecutionKind::Precheck,
                    "success",
                    &json!({"end": "skip"}),
                )?;
            }
            // Without an answer there is no row of it.
            RecordKind::PrecheckFailed if record.note == UNREADABLE => {
                self.end(
                    record.turn + 1,
                    ExecutionKind::Precheck,
                    "failed",
                    &json!({"failure": record.note}),
                )?;
            }
            RecordKind::Started
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
            | RecordKind::GuardrailTriggered
            | RecordKind::ResultsCleared
            | RecordKind::HistoryDoubted
            | RecordKind::Trimmed
            | RecordKind::Compacted
            | RecordKind::RequestHandled => {}
        }
        self.results(record)
    }

    fn begin(&self, turn: i64, task: CallPurpose, of: &Value) -> rusqlite::Result<String> {
        let id = id(turn, 0, &json!([self.agent, task, of]));
        self.transaction
            .prepare_cached(
                "INSERT OR IGNORE INTO agent_execution_history (id, agent_id, task_id, turn, started_at, total_steps)
                 VALUES (?1, ?2, ?3, ?4, ?5, 0)",
            )?
            .execute(params![id, self.agent, task.as_ref(), turn, self.now.to_string()])?;
        Ok(id)
    }

    /// The execution of a turn. One that began under a version without these tables begins here.
    fn execution(&self, turn: i64) -> rusqlite::Result<String> {
        match self.newest(turn, ExecutionKind::Turn)? {
            Some(id) => Ok(id),
            None => self.begin(turn, CallPurpose::Turn, &json!([turn])),
        }
    }

    fn newest(&self, turn: i64, of: ExecutionKind) -> rusqlite::Result<Option<String>> {
        let sql = match of {
            ExecutionKind::Turn => TURN,
            ExecutionKind::Precheck => PRECHECK,
        };
        let mut select = self.transaction.prepare_cached(sql)?;
        let turn = [first_id(turn), first_id(turn.saturating_add(1))];
        select.query_row(turn, |row| row.get(0)).optional()
    }

    fn answered(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let (Some(call), Some(used)) = (record.call, record.used) else {
            return Ok(());
        };
        let question = match used.purpose {
            CallPurpose::Precheck => Some("wake"),
            CallPurpose::Signal => Some("scored"),
            CallPurpose::Turn | CallPurpose::Heartbeat | CallPurpose::Compaction => None,
        };
        let execution = if let Some(end) = question {
            let execution = self.begin(call.turn, used.purpose, &json!([call.to_string()]))?;
            self.end_of(&execution, "success", &json!({ "end": end }))?;
            execution
        } else {
            self.execution(call.turn)?
        };
        let (text, calls) = said(record);
        let most = MOST_TEXT.min(MOST_STEP / (2 * calls.len() + 1));
        let step = ExecutionStep {
            // An attempt that is answered is the only one.
            id: id(call.turn, call.call, &json!([self.agent, execution, call.call])),
            execution,
            call: call.to_string(),
            reasoning: text.map(|text| truncate(text, most)),
            action: calls.iter().map(|call| action(call, most)).collect(),
            success: calls
                .is_empty()
                .then(|| record.note != "empty" && record.note != "Refused"),
            used,
        };
        self.insert(&step)
    }

    fn insert(&self, step: &ExecutionStep) -> Result<(), JournalWriteError> {
        let tokens = step.used.tokens.map(|tokens| i64::try_from(tokens).unwrap_or(i64::MAX));
        let inserted = self
            .transaction
            .prepare_cached(
                "INSERT OR IGNORE INTO agent_execution_steps
                 (id, execution_id, step_number, timestamp, call, purpose, reasoning, action, result, success, tokens_used,
                  cost_micro_usd)
                 SELECT ?1, ?2, total_steps + 1, ?3, ?4, ?5, ?6, ?7, '[]', ?8, ?9, ?10 FROM agent_execution_history
                 WHERE id = ?2",
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
            ])?;
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

    /// A run of a tool came to an end, or there was none.
    fn outcome(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let Some(tool) = record.tool.as_ref().filter(|tool| !tool.run.is_refresh()) else {
            return Ok(());
        };
        let outcome = tool.outcome.as_ref().map_or("Denied", AsRef::as_ref);
        let place = usize::try_from(tool.run.index).unwrap_or(usize::MAX).saturating_sub(1);
        self.change(record.turn, |ended| {
            if let Some(result) = ended.result_at(place) {
                result["outcome"] = outcome.into();
            }
        })
    }

    /// Results that join the transcript, in the order of their calls.
    fn results(&self, record: &JournalRecord) -> Result<(), JournalWriteError> {
        let results = record.messages.iter().filter_map(|message| match &**message {
            Message::Tool { text, .. } => Some(text.as_str()),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => None,
        });
        let results: Vec<&str> = results.collect();
        if results.is_empty() {
            return Ok(());
        }
        self.change(record.turn, |ended| {
            let most = MOST_TEXT.min(MOST_STEP / (2 * ended.calls + 1));
            for text in results {
                let place = ended.joined();
                if let Some(result) = ended.result_at(place) {
                    result["text"] = truncate(text, most).into();
                }
            }
        })
    }

    /// Changes the results of the newest step of a turn.
    fn change(&self, turn: i64, how: impl FnOnce(&mut StepResults)) -> Result<(), JournalWriteError> {
        let found = self
            .transaction
            .prepare_cached(NEWEST_STEP)?
            .query_row([first_id(turn), first_id(turn + 1)], |row| {
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
            .prepare_cached("UPDATE agent_execution_steps SET result = ?2, success = ?3 WHERE rowid = ?1")?
            .execute(params![row, serde_json::to_string(&ended.results)?, ended.success()])?;
        Ok(())
    }

    fn end(&self, turn: i64, of: ExecutionKind, status: &str, state: &Value) -> rusqlite::Result<()> {
        let execution = match of {
            ExecutionKind::Turn => Some(self.execution(turn)?),
            ExecutionKind::Precheck => self.newest(turn, of)?,
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

    /// Drops the rows of turns beyond the bounds, and counts what they came to.
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

    /// Drops the older half, but never the newest turn. Whether there was any.
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
        // Turns count from 1.
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
    /// Both together.
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

/// Totals of a row: executions, succeeded, failed, steps, tokens, cost.
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
    call: String,
    reasoning: Option<String>,
    action: Vec<Value>,
    success: Option<bool>,
    used: RecordedUsage,
}

/// How the calls of a step ended, as far as they have.
struct StepResults {
    calls: usize,
    results: Vec<Value>,
}

impl StepResults {
    /// The result of a call by its place; made when there is none yet.
    fn result_at(&mut self, place: usize) -> Option<&mut Value> {
        if place >= self.calls {
            return None;
        }
        if self.results.len() <= place {
            self.results.resize_with(place + 1, || json!({}));
        }
        self.results.get_mut(place).filter(|result| result.is_object())
    }

    /// So many results have their text.
    fn joined(&self) -> usize {
        let has_text = |result: &&Value| result.get("text").is_some();
        self.results.iter().take_while(has_text).count()
    }

    /// `None`: it goes on. What the runtime itself answers, such as a `yield`, has no outcome.
    fn success(&self) -> Option<bool> {
        let good = |result: &Value| matches!(result["outcome"].as_str(), None | Some("Ok"));
        (self.joined() == self.calls).then(|| self.results.iter().all(good))
    }
}

/// Text and tool calls of an answer.
fn said(record: &JournalRecord) -> (Option<&str>, &[ToolCall]) {
    let mut answers = record.messages.iter().filter_map(|message| match &**message {
        Message::Assistant { text, tool_calls, .. } => Some((text.as_deref(), tool_calls.as_slice())),
        Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
    });
    answers.next_back().unwrap_or((None, &[]))
}

fn action(call: &ToolCall, most: usize) -> Value {
    // What the model wrote may be no JSON, and what is cut is none.
    let arguments = Some(&call.arguments)
        .filter(|arguments| arguments.len() <= most)
        .and_then(|arguments| serde_json::from_str::<Value>(arguments).ok())
        .unwrap_or_else(|| truncate(&call.arguments, most).into());
    json!({"tool": truncate(&call.name, 64), "arguments": arguments})
}

fn truncate(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(most);
    format!("{}[cut: the first {end} of {} bytes]", &text[..end], text.len())
}

/// A UUID (version 8) that sorts by turn and call, and is the same whenever the same row is written.
fn id(turn: i64, call: u32, of: &Value) -> String {
    let hash = digest(&SHA256, of.to_string().as_bytes());
    let mut low = [0; 8];
    low.copy_from_slice(&hash.as_ref()[..8]);
    let low = u64::from_be_bytes(low) & (u64::MAX >> 2) | 1 << 63;
    let first = first_id(turn);
    format!(
        "{first}-8{:03x}-{:04x}-{:012x}",
        call.min(0xfff),
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

/// What the ids of a turn begin with.
fn first_id(turn: i64) -> String {
    let turn = turn.max(0);
    format!("{:08x}-{:04x}", turn >> 16 & 0xffff_ffff, turn & 0xffff)
}
