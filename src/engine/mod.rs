//! The loop as a pure state machine: inputs in, effects out.
//!
//! Owns every rule about when a loop runs turns, sleeps, pauses and stops. It has no clock, I/O, randomness or async:
//! the time comes with each input, so that tests simulate years in microseconds. Imports only `api`, and the pure
//! functions of `support`.
//!
//! Contract with the driver (`worker`): feed one [`EngineInput`] to [`machine::Engine::handle`]; commit all
//! [`EngineEffect::Record`]s of that call together with [`machine::Engine::snapshot`] in **one** transaction **before**
//! acting on any other effect of it; then act on the rest in order. Without a Record nothing is written, not even the
//! snapshot: after [`StopCause::Fenced`] the journal belongs to another pod. A restart restores the engine from the
//! last snapshot and the live transcript, and feeds [`EngineInput::Started`].

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

pub mod answer_schema;
mod approvals;
mod calls;
mod context;
mod counters;
mod deferred;
pub mod definition_parts;
mod definitions;
mod early_snapshot;
mod effects;
mod guardrails;
mod hot_state;
pub mod ids;
mod lifecycle;
mod light_model;
mod loop_detection;
pub mod machine;
mod memory;
pub mod message;
mod mode_requests;
mod model_call;
mod modes;
pub mod notifications;
mod pauses;
pub mod precheck;
mod purpose;
pub mod replay;
mod resources;
mod retry;
mod runtime_mark;
pub mod scoring;
pub mod sensor_events;
pub mod settings;
mod snapshot;
mod stop_requests;
pub mod tasks;
#[cfg(test)]
mod tests;
mod time_math;
pub mod tool;
mod tools;
mod totals;
mod turn;
mod untrusted;
mod view;
mod wake;

use std::ops::Range;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use agentloop_api::agent::LimitedResource;
use agentloop_api::failure::CallFailure;
use agentloop_api::status::GateKind;
use agentloop_api::usage_counts::{GuardrailTrip, LoopCounts};
use answer_schema::AnswerSchema;
use budget::BudgetState;
use message::{Message, ModelAnswer, ToolDefinition};
use sensor_events::SensedEvent;
use tasks::{TaskChange, TaskOffer};
use tool::{ResultArtifacts, ToolEffect, ToolOutcome, ToolRun, ToolRunId, ToolSpec};

pub use approvals::{GateAnswer, GateTerms, OpenGate};
pub use context::budget_health::BudgetHealth;
pub use context::prompt::Skill;
pub use ids::{CallId, CallIdError};
pub use modes::GoalView;
pub use modes::goal::{CheckedArtifacts, CheckedCriterion, StepValidation, Verdict};
pub use pauses::budget;
pub use purpose::CallPurpose;
pub use stop_requests::OpenRequests;
pub use untrusted::UntrustedContent;

/// What the driver passes to the engine: everything from outside that can change a loop.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineInput {
    /// The worker has started, for the first time or again.
    Started {
        /// UID of the Agent, part of the idempotency keys of tool runs.
        agent: String,
        /// Epoch of the pod. The same as before: the container restarted. Higher: a new pod.
        epoch: i64,
        /// Totals known to the controller, which a new journal continues.
        known: KnownTotals,
        /// The limits on calls.
        budget: BudgetState,
        /// Whether [`EngineInput::LinkSilent`] holds.
        link_silent: bool,
        /// The requests of users that the controller does not know to be handled.
        open: OpenRequests,
    },
    /// A model call was answered.
    Answered { call: CallId, answer: ModelAnswer },
    /// A model call failed.
    Failed { call: CallId, failure: CallFailure },
    /// The tools that the sources offer have changed. A level, accepted at any time and without effects. Feed it before
    /// [`EngineInput::Started`] as far as it is known, since an answer that was kept over a restart may call tools at
    /// once.
    ToolsChanged {
        /// All tools, in the order of the prompt.
        tools: Vec<ToolSpec>,
        /// Servers that have not answered yet, by name.
        silent: Vec<String>,
    },
    /// The events that can wake the loop have changed. A level like [`EngineInput::ToolsChanged`]. Until it is fed,
    /// `yield` accepts any well-formed name.
    WakeEventsChanged {
        /// Such as `sensor/prices` and `signal/prices/spike`.
        names: Vec<String>,
    },
    /// A complete event of a Sensor. Always journalled while the loop runs, see [`machine::Engine::accepts_input`].
    Sensed(SensedEvent),
    /// A task. Fed until its acceptance is journalled; a repetition is ignored as long as the task is not over.
    /// [`machine::Engine::accepts_task_of`] says whether there is room.
    TaskOffered(TaskOffer),
    /// Nothing outside the loop needs the pod: it ends if [`machine::Engine::scale_down_due`] says so.
    ScaleDown,
    /// A Sensor fails: it no longer receives or understands events. Fed once per outage.
    SensorFailed { sensor: String },
    /// A signal of a Sensor's event needs a score. Repeat it until [`machine::Engine::score_outcome`] has the outcome.
    Score(scoring::ScoreQuestion),
    /// The outcome of this question is stored: the engine may forget it.
    ScoreTaken { id: String },
    /// A tool run used a resource whose amount is known only when it has ended. Fed before
    /// [`EngineInput::ToolFinished`].
    ResourceUsed { resource: LimitedResource, amount: u64 },
    /// A tool run ended.
    ToolFinished {
        run: ToolRunId,
        outcome: ToolOutcome,
        /// What is stored of the result.
        artifacts: ResultArtifacts,
    },
    /// The time of the last [`EngineEffect::SetTimer`] has come. Harmless when early or repeated.
    Timer,
    /// The annotation `agentloop.dev/wake`, handled once per token. Ends only a sleep.
    WakeRequested {
        /// Value of the annotation.
        token: String,
    },
    /// The annotation `agentloop.dev/resume`, handled once per token. Ends cool-downs and pauses that need a person.
    ResumeRequested {
        /// Value of the annotation.
        token: String,
    },
    /// The annotation `agentloop.dev/stop`, handled once per token: ends the loop, after the open turn or at once.
    StopRequested {
        /// Value of the annotation.
        token: String,
    },
    /// A person answered a gate. Has no effect if the gate is not open.
    GateAnswered(GateAnswer),
    /// The limits on calls may have changed. A level: repeats have no effect.
    BudgetChanged { budget: BudgetState },
    /// No contact with the controller for half the run lease: no tool with side effects starts.
    LinkSilent,
    /// No contact with the controller for the whole run lease: nothing starts.
    LinkLost,
    /// Contact with the controller is restored.
    LinkBack,
    /// Stop the loop.
    Stop {
        /// Why, and how fast.
        cause: StopCause,
    },
    /// The drain time of [`StopCause::Drain`] is over: cancel what still runs.
    DrainEnded,
}

/// Totals that outlive a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownTotals {
    /// `status.loop.turn`.
    pub turn: i64,
    /// What `status.usage` counts of the loop. In a box, so that a further count enlarges no input.
    pub counts: Box<LoopCounts>,
}

/// Why a loop is to stop. Read-only tool runs are cancelled with it; others may finish within the drain time.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// SIGTERM: the call in flight may finish within the drain time. The next pod continues the loop.
    Drain,
    /// `spec.suspend`: the call in flight is cancelled at once. The next pod continues the loop.
    Suspend,
    /// A newer pod has taken over: cancel everything, and write nothing more.
    Fenced,
}

/// What the driver must do.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEffect {
    /// Commit this to the journal, as the module's contract says.
    Record(JournalRecord),
    /// Send a call to the model. The engine has at most one in flight.
    CallModel {
        call: CallId,
        purpose: CallPurpose,
        /// The whole prompt, the system message first; shared with the engine, since it may be large.
        messages: Vec<Arc<Message>>,
        /// The runtime's state block: the last message, after `messages`. Never part of the transcript, so that what
        /// precedes it stays the same from call to call and can be read from the provider's cache.
        state: Option<String>,
        /// The tools offered; shared with the engine, since their schemas may be large.
        tools: Arc<[ToolDefinition]>,
        /// What the answer must look like, if the spec says that the server can enforce it.
        answer_schema: Option<Arc<AnswerSchema>>,
    },
    /// Run a tool, for at most this long; a run cut off by then has an unknown outcome. The engine decides how many run
    /// concurrently.
    RunTool(ToolRun, SignedDuration),
    /// Cancel a run; a later result of it is ignored.
    CancelTool(ToolRunId),
    /// Cancel the call in flight. Its end is reported as [`EngineInput::Failed`] with kind `Cancelled`, or not at all.
    CancelCall { call: CallId },
    /// The journal holds the outcome of this call: the gateway may forget it.
    Acknowledge { call: CallId },
    /// Feed [`EngineInput::Timer`] at this time; replaces the previous timer. `None`: no timer.
    SetTimer(Option<Timestamp>),
    /// The state changed: send a report.
    Report,
    /// The loop has stopped. The driver reports, closes the journal, and exits (Drain, Fenced) or idles (Suspend, an
    /// outcome) until its pod is deleted.
    Stopped,
}

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
