//! The history of an Agent's executions, as its worker uploads it: the rows that have changed, in the order of their
//! changes.
//!
//! | route | does |
//! |---|---|
//! | `POST /v1/history`, worker → gateway → controller | a [`HistoryBatch`] → [`HistoryAck`]; 503: the database is not reachable now |
//!
//! Every change of a row has a number, and a later change of the same row replaces the earlier one. A batch is stored only
//! if it begins where the stored changes end, so repeats, late copies and journals from a backup have no effect.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use agentloop_api::first_elements::first_elements;

/// Maximum number of rows of a [`HistoryBatch`], the executions of its steps not counted.
pub const MAX_HISTORY_ROWS: usize = 200;
/// Most rows of a [`HistoryBatch`] with the executions of its steps: each changed step has one.
pub const MAX_BATCH_ROWS: usize = 2 * MAX_HISTORY_ROWS;
/// How many rows of a kind are read: one more than there may be in all, which shows that there are too many.
const READ_ROWS: usize = MAX_BATCH_ROWS + 1;
/// Most processes of a worker in [`HistoryBatch::sent_before`]. What a further one sends is sent again if its answer is lost.
pub const MAX_SENDERS: usize = 16;
/// The highest number of a change. A journal that has used them all would need thousands of years.
pub const MAX_CHANGE_NUMBER: i64 = 1 << 53;
/// The highest number of steps of an execution.
pub const MAX_EXECUTION_STEPS: i64 = 1 << 31;

/// Rows of the history that have changed, as they are now.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct HistoryBatch {
    /// Epoch of the pod.
    pub epoch: i64,
    /// Identifies the process of the worker: within it, changes with the same number are the same.
    pub writer: String,
    /// Number of the last change that was acknowledged; 0: none.
    pub after: i64,
    /// Number of the last change in this batch.
    pub last: i64,
    /// What earlier processes of the worker have sent since the last answer. If the database stores one of these changes as its
    /// last, the journal has all up to it, and only the answer was lost.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_SENDERS, _, _>"
    )]
    pub sent_before: Vec<SentChanges>,
    /// Executions, including those of all `steps`.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<READ_ROWS, _, _>"
    )]
    pub executions: Vec<ExecutionRow>,
    /// Steps of executions.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<READ_ROWS, _, _>"
    )]
    pub steps: Vec<StepRow>,
    /// Decisions about tool calls, and outcomes of tool runs.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<READ_ROWS, _, _>"
    )]
    pub audit: Vec<AuditRow>,
}

impl HistoryBatch {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.executions.len() + self.steps.len() + self.audit.len()
    }
}

/// Changes that a process of a worker has sent.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct SentChanges {
    /// Identifies the process, as in a [`HistoryBatch`].
    pub writer: String,
    /// The highest number of a change that it has sent.
    pub last: i64,
}

/// The answer to a [`HistoryBatch`].
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HistoryAck {
    /// Number of the last change that is stored.
    pub stored: i64,
    /// The stored changes are not those of this journal, since one of the two was restored from a backup or is new.
    /// Nothing of the batch was stored: the worker sends all rows that it has, with numbers above `stored`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restart: bool,
}

/// A row of `agent_execution_history`.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ExecutionRow {
    /// A UUID.
    pub id: String,
    /// Id of the task, or purpose of the execution.
    pub task_id: String,
    /// Number of the turn.
    pub turn: i64,
    /// Member of the Agent.
    pub member: i32,
    /// When the execution began.
    pub started_at: Timestamp,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<Timestamp>,
    /// Number of its steps.
    pub total_steps: i64,
    /// `success`, `failed` or `escalated`; absent: not completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_status: Option<String>,
    /// Why a person was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub escalation_reason: Option<String>,
    /// Known costs of its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_cost_micro_usd: Option<i64>,
    /// Known tokens of its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_tokens: Option<i64>,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_snapshot: Option<Value>,
}

/// A row of `agent_execution_steps`.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct StepRow {
    /// A UUID.
    pub id: String,
    /// Its execution.
    pub execution_id: String,
    /// Position in the execution, from 1.
    pub step_number: i64,
    /// When the answer was committed.
    pub timestamp: Timestamp,
    /// The model call, such as `t12c1a1`.
    pub call: String,
    /// Purpose of the call.
    pub purpose: String,
    /// Member of the Agent.
    pub member: i32,
    /// Attempt at the call that was answered, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<i64>,
    /// Time from the request of the call to its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_milliseconds: Option<i64>,
    /// Text of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The tools that the answer called.
    #[serde(default)]
    pub action: Value,
    /// How these ended.
    #[serde(default)]
    pub result: Value,
    /// How the checks after the step ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Value>,
    /// Whether all tools ended well; absent: not all have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub success: Option<bool>,
    /// Why it did not succeed: kinds of failures, without texts of a model or a tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Tokens, if reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_used: Option<i64>,
    /// Cost, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_micro_usd: Option<i64>,
}

/// A row of `agent_execution_audit`.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AuditRow {
    /// Number of the line in the journal.
    pub seq: i64,
    /// When it was committed.
    pub at: Timestamp,
    /// The execution of the turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<String>,
    /// Number of the turn.
    pub turn: i64,
    /// Member of the Agent.
    pub member: i32,
    /// The model call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// The tool call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// Its effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
    /// The decision; absent: the row is an outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    /// Id of the gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<String>,
    /// The rule that opened the gate; absent: the row opens none, or an earlier version has written it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// User who decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<String>,
    /// Key of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// Hash of the arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments_hash: Option<String>,
    /// The outcome; absent: the row is a decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Why a call was denied, or how a gate closed.
    pub note: String,
}
