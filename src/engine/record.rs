//! What the engine writes to the journal.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ids::CallId;
use super::message::Message;
#[cfg(doc)]
use super::message::ModelAnswer;
use super::modes::goal::StepValidation;
use super::purpose::CallPurpose;
use super::tasks::TaskChange;
use super::tool::{ToolEffect, ToolRunId};
use agentloop_api::status::GateKind;
use agentloop_api::usage_counts::GuardrailTrip;

/// One line of the journal. Its [`Self::kind`] and ids are safe to log; the messages are not.
#[derive(Clone, Debug, PartialEq)]
pub struct JournalRecord {
    pub kind: RecordKind,
    /// The member of the Agent that it belongs to.
    pub member: u16,
    /// The turn it belongs to.
    pub turn: i64,
    /// The call it belongs to.
    pub call: Option<CallId>,
    /// A short note without text of a prompt or an answer: `Running -> Sleeping`, a failure kind. For people: code
    /// reads [`Self::detail`].
    pub note: String,
    /// What code reads from the record besides its kind. Not written to the journal.
    pub detail: RecordDetail,
    /// The tool call it belongs to.
    pub tool: Option<ToolLine>,
    /// Only in the record of an answered call: what it was for, and what it used.
    pub used: Option<RecordedUsage>,
    /// Messages that join the transcript.
    pub messages: Vec<Arc<Message>>,
    /// How many of the newest messages leave the live transcript before [`Self::messages`] join it, because their turn
    /// failed. They stay in the journal's history.
    pub retract: usize,
    /// Which messages then leave the live transcript, counted from the oldest (they stay in the journal's history).
    pub forget: Range<usize>,
    /// The change of a task that it commits. In a box, since few records have one.
    pub task: Option<Box<TaskChange>>,
    /// In the record of a step of mode `Goal`: what its check found. In a box, since few records have one.
    pub validation: Option<Box<StepValidation>>,
}

/// What code reads from a record besides its kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecordDetail {
    /// Nothing.
    #[default]
    None,
    /// A limit was reached, or a detected loop led to a step: what is counted.
    Trip(GuardrailTrip),
    /// A turn of this kind begins, by the purpose of its calls.
    TurnStarted(CallPurpose),
    /// The answer has no use: it is empty or a refusal, or, of a pre-check, neither yes nor no.
    UselessAnswer,
    /// The mode asks a person whether the loop may continue.
    Escalated(GateKind),
    /// A person denied it, or it expired.
    NotApproved(GateKind),
}

/// What an answered call was for, and what it used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedUsage {
    pub purpose: CallPurpose,
    /// Tokens as the server reported them, see [`ModelAnswer::tokens`].
    pub tokens: Option<u64>,
    /// All input tokens, read from a cache or not, and the output tokens. `None`: not known.
    pub input_and_output: Option<(u64, u64)>,
    /// Cost in micro-dollars, see [`ModelAnswer::cost`].
    pub cost: Option<i64>,
}

/// What a journal record says about a tool call; safe to log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolLine {
    pub run: ToolRunId,
    /// Name of the tool; `None` if the model called an unknown one.
    pub tool: Option<String>,
    pub effect: Option<ToolEffect>,
    pub key: Option<String>,
    /// Hash of its arguments.
    pub arguments: Option<String>,
    /// Set once the run has ended.
    pub outcome: Option<OutcomeKind>,
}

/// The outcome of a tool run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum OutcomeKind {
    Ok,
    /// It reported a failure.
    Error,
    /// It certainly did not run: nothing was sent.
    Unavailable,
    /// It may have run.
    Unknown,
}

/// Kinds of journal records.
#[derive(
    Serialize,
    Deserialize,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    strum::AsRefStr,
    strum::EnumString,
    strum::Display,
    strum::EnumIter,
)]
pub enum RecordKind {
    Started,
    /// The public state or its reasons changed.
    Transition,
    TurnStarted,
    /// A call is about to be sent: the intent. Its note is the call's [`CallPurpose`].
    CallStarted,
    /// A call was answered: the outcome.
    CallAnswered,
    /// A call failed: the outcome. Its note is the kind of the failure.
    CallFailed,
    /// A tool is about to be run, for the first time or again: the intent.
    ToolIntent,
    /// A tool run ended: the outcome. A run whose intent has no outcome may have happened.
    ToolOutcome,
    /// A tool call was denied: nothing was run.
    ToolDenied,
    /// A tool run, or other definitions of tools, wait for the approval of a person. Its note is the id of the gate, and which
    /// tools have changed.
    GateOpened,
    /// A gate has closed. Its note is the id of the gate, and how it closed.
    GateResolved,
    /// The definitions of a server's tools were accepted as the first ones. Its note is the server, and how many.
    ToolsPinned,
    /// A server has changed or added tools, which was accepted. Its note is the server, and which tools.
    ToolsChanged,
    /// A loop was detected, or continued: the sign, and the step that followed.
    LoopDetected,
    /// A field of the hot state did not get its value; recorded once until it does.
    HotStateRefused,
    /// A Sensor event arrived. Its note says how many fields and notifications it had.
    SensorUpdated,
    /// A Sensor began to fail. Its note is the Sensor's name.
    SensorFailed,
    /// A notification arrived. Its note is the priority.
    Notified,
    /// A signal was scored. Its note is the signal and its score.
    SignalScored,
    /// A signal could not be scored. Its note is the signal and the failure's kind, `Unreadable` or `NoLightModel`.
    SignalUnscored,
    /// Notifications were dropped before the model saw them: too many waited, or every turn that showed them was
    /// refused.
    NotificationDropped,
    /// A guardrail was reached. Its note is the reason that it raised, or the limit.
    GuardrailTriggered,
    /// In mode `Goal`, an attempt at a step is over, and what could be checked after it was. Its note says what was found.
    StepChecked,
    /// A question of the mode got no clear answer. Its note is the purpose of the call, and the kind of the failure or
    /// `Unreadable`.
    QuestionFailed,
    /// The pre-check found nothing that matters: the next turn is skipped, and the sleep continues.
    PrecheckSkipped,
    /// The pre-check had no clear answer: the turn runs. Its note is the failure's kind, or `Unreadable`.
    PrecheckFailed,
    TurnCompleted,
    /// A turn failed and was given up. Its note is the kind of the failure, or `Refused`.
    TurnFailed,
    /// Tool results that the model has seen are left out of further prompts. Its note says how much that saves.
    ResultsCleared,
    /// The next turn is tried without a part of the history, since turns with it were refused. Its note names the part.
    HistoryDoubted,
    /// A task was accepted, and waits. Its note is the id of the task.
    TaskAccepted,
    /// The work on a task has begun. Its note is the id of the task.
    TaskStarted,
    /// A task has its response. Its note is the id of the task, and how it ended.
    TaskEnded,
    /// Old messages left the live transcript.
    Trimmed,
    /// Old messages left the live transcript, replaced by a summary.
    Compacted,
    /// A request annotation was handled.
    RequestHandled,
}
