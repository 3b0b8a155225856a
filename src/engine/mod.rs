//! The loop as a pure state machine: inputs in, effects out.
//!
//! Owns every rule about when a loop turns, sleeps, pauses and stops. No clock, no I/O, no randomness, no async:
//! time comes in with each input, so that tests drive years in microseconds. Imports nothing of ours but `api`.
//!
//! Contract with the driver (`worker`): feed one [`EngineInput`] to [`machine::Engine::handle`]; commit all
//! [`EngineEffect::Record`]s of that call together with [`machine::Engine::snapshot`] in **one** transaction **before**
//! acting on any other effect of it; then act on the rest in order. Without a Record nothing is written, the snapshot
//! neither: after [`StopCause::Fenced`] the journal belongs to another pod. A restart restores the engine from the last
//! snapshot and the live transcript, and feeds [`EngineInput::Started`].

pub mod budget;
mod budget_health;
mod compaction;
mod context_window;
mod digest;
mod doubt;
mod effects;
mod expiry;
mod guardrails;
mod heartbeat;
mod hot_state;
pub mod lifetime_counts;
mod loop_detection;
pub mod machine;
pub mod message;
pub mod notifications;
mod pause;
pub mod precheck;
mod prompt;
mod prompt_size;
mod purpose;
mod resources;
mod retry;
pub mod scoring;
pub mod sensor_events;
pub mod settings;
mod snapshot;
#[cfg(test)]
mod tests;
mod time_math;
pub mod tool;
mod tool_admission;
mod tool_batch;
mod tool_offer;
mod tool_results;
mod turn;
mod turn_failures;
mod view;
mod wake;
mod yield_tool;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::api::failure::CallFailure;
use budget::BudgetState;
use message::{Message, ModelAnswer, ToolDefinition};
use sensor_events::SensedEvent;
use tool::{ToolEffect, ToolOutcome, ToolRun, ToolRunId, ToolSpec};

pub use budget_health::BudgetHealth;
pub use prompt::Skill;
pub use purpose::CallPurpose;
pub use tool_admission::check_schema;

/// Identity of one attempt at one model call; unique over the life of an Agent. Shown as `t12c1a1`.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId {
    /// The turn, from 1.
    pub turn: i64,
    /// The call within the turn, from 1; 0 is a pre-check or a score before it.
    pub call: u32,
    /// The attempt at that call, from 1.
    pub attempt: u32,
}

impl std::fmt::Display for CallId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "t{}c{}a{}", self.turn, self.call, self.attempt)
    }
}

/// A text is not the id of a call.
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
#[error("is not the id of a call, such as t12c1a1")]
pub struct CallIdError;

impl std::str::FromStr for CallId {
    type Err = CallIdError;

    /// Reads what `Display` writes, and nothing else.
    fn from_str(text: &str) -> Result<Self, CallIdError> {
        let parts = || {
            let (turn, rest) = text.strip_prefix('t')?.split_once('c')?;
            let (call, attempt) = rest.split_once('a')?;
            Some(Self {
                turn: turn.parse().ok()?,
                call: call.parse().ok()?,
                attempt: attempt.parse().ok()?,
            })
        };
        parts().filter(|id| id.to_string() == text).ok_or(CallIdError)
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineInput {
    /// The worker is up, for the first time or again.
    Started {
        /// Uid of the Agent: runs of tools have keys that no other Agent's have.
        agent: String,
        /// Epoch of the pod. The same as before: the container restarted. Higher: a new pod.
        epoch: i64,
        /// What the controller knows of, which a new journal goes on from.
        known: KnownTotals,
        /// What limits the calls.
        budget: BudgetState,
        /// Whether [`EngineInput::LinkSilent`] holds.
        link_silent: bool,
    },
    /// A model call gave an answer.
    Answered {
        /// Which.
        call: CallId,
        /// The answer.
        answer: ModelAnswer,
    },
    /// A model call gave none.
    Failed {
        /// Which.
        call: CallId,
        /// Why.
        failure: CallFailure,
    },
    /// What the sources of tools offer, whenever it has changed. A level, heard at any time and without effects; feed it
    /// before [`EngineInput::Started`] as far as it is known, since an answer that was kept over a restart may ask for tools at
    /// once.
    ToolsChanged {
        /// All of it, in the order of the prompt.
        tools: Vec<ToolSpec>,
        /// Servers that have not answered yet, by name.
        silent: Vec<String>,
    },
    /// The events that can wake the loop, whenever they have changed. A level like [`EngineInput::ToolsChanged`]. Until it is fed
    /// any well-formed name may be waited for.
    WakeEventsChanged {
        /// Their names, such as `sensor/prices` and `signal/prices/spike`.
        names: Vec<String>,
    },
    /// An event of a Sensor, whole. Always journalled while the loop runs, see [`machine::Engine::accepts_input`].
    Sensed(SensedEvent),
    /// A Sensor does not hear or understand what comes, for the first time since it last did.
    SensorFailed {
        /// Its name.
        sensor: String,
    },
    /// An event of a Sensor wants a score of a signal. Repeat it until [`machine::Engine::score_outcome`] has its outcome.
    Score(scoring::ScoreQuestion),
    /// The outcome of this question is kept: the engine may forget it.
    ScoreTaken {
        /// Its id.
        id: String,
    },
    /// A run of a tool came to an end.
    ToolFinished {
        /// Which.
        run: ToolRunId,
        /// How.
        outcome: ToolOutcome,
    },
    /// The moment of the last [`EngineEffect::SetTimer`] has come. Harmless when early or repeated.
    Timer,
    /// The request `agentloop.dev/wake`, handled once per token: ends a sleep, and nothing else.
    WakeRequested {
        /// Value of the annotation.
        token: String,
    },
    /// The request `agentloop.dev/resume`, handled once per token: ends a cool-down, or what a person had to look at.
    ResumeRequested {
        /// Value of the annotation.
        token: String,
    },
    /// What limits the calls, whenever it may have changed. A level: repeats do nothing.
    BudgetChanged {
        /// All of it.
        budget: BudgetState,
    },
    /// No contact with the controller for half the run lease: no tool with side effects starts.
    LinkSilent,
    /// No contact with the controller for the whole run lease: nothing starts.
    LinkLost,
    /// Contact again.
    LinkBack,
    /// Finish.
    Stop {
        /// Why, and how fast.
        cause: StopCause,
    },
    /// The drain time of [`StopCause::Drain`] is over: cut what still runs.
    DrainEnded,
}

/// Totals that outlive a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownTotals {
    /// `status.loop.turn`.
    pub turn: i64,
    /// `status.usage.toolCalls`.
    pub tool_calls: i64,
    /// `status.usage.actions`.
    pub actions: i64,
}

/// Why a loop is to stop. Runs of tools that only look are cut with it, others may finish within the drain time.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// SIGTERM: the call in flight may finish within the drain time. The next pod goes on.
    Drain,
    /// `spec.suspend`: the call in flight is cut at once. The next pod goes on.
    Suspend,
    /// A newer pod has taken over: cut, and write nothing more.
    Fenced,
}

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEffect {
    /// Journal this; see the module's contract for when.
    Record(JournalRecord),
    /// Send a call to the model. The engine has at most one in flight.
    CallModel {
        /// Its id.
        call: CallId,
        /// What it is for.
        purpose: CallPurpose,
        /// The whole prompt, the system message first; shared with the engine, since it may be large.
        messages: Vec<Arc<Message>>,
        /// The runtime's word on how things stand now: the last message of all, after `messages`. Never part of the
        /// transcript, so that what is before it stays the same from call to call.
        state: Option<String>,
        /// Tools offered; shared with the engine, since their schemas may be large.
        tools: Arc<[ToolDefinition]>,
    },
    /// Run a tool, for so long at most; an end by that time is an unknown outcome. Several at a time: the engine says how
    /// many.
    RunTool(ToolRun, SignedDuration),
    /// Cut a run; whatever it still says means nothing.
    CancelTool(ToolRunId),
    /// Cut the call in flight; its end is reported as [`EngineInput::Failed`] with kind `Cancelled`, or not at all.
    CancelCall {
        /// Which.
        call: CallId,
    },
    /// The journal holds the outcome of this call: the gateway may forget it.
    Acknowledge {
        /// Which.
        call: CallId,
    },
    /// Feed [`EngineInput::Timer`] at this moment; replaces the one set before. `None`: no timer.
    SetTimer(Option<Timestamp>),
    /// The state changed: report it.
    Report,
    /// The loop has stopped. The driver reports, closes the journal, and ends (Drain, Fenced) or idles (Suspend, an
    /// outcome) until its pod goes.
    Stopped,
}

/// One line of the journal. Its `kind` and ids are safe to log; the messages are not.
#[derive(Clone, Debug, PartialEq)]
pub struct JournalRecord {
    /// What.
    pub kind: RecordKind,
    /// The turn it belongs to.
    pub turn: i64,
    /// The call it belongs to.
    pub call: Option<CallId>,
    /// A short note without any text of a prompt or an answer: `Running -> Sleeping`, a failure kind.
    pub note: String,
    /// The tool call it belongs to.
    pub tool: Option<ToolLine>,
    /// What the call was for and used; of a line that says that it was answered.
    pub used: Option<RecordedUsage>,
    /// Messages that join the transcript.
    pub messages: Vec<Arc<Message>>,
    /// How many of the newest messages leave the live transcript, before `messages` join it: those of a turn that
    /// failed (they stay in the journal's history).
    pub retract: usize,
    /// How many of the oldest messages leave the live transcript (they stay in the journal's history).
    pub forget: usize,
}

/// What an answered call was for, and what it used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedUsage {
    /// What for.
    pub purpose: CallPurpose,
    /// Tokens by the server's own word, see [`ModelAnswer::tokens`].
    pub tokens: Option<u64>,
    /// What it cost in micro-dollars, see [`ModelAnswer::cost`].
    pub cost: Option<i64>,
}

/// What a journal line says of a tool call; safe to log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolLine {
    /// Which.
    pub run: ToolRunId,
    /// Name of the tool; none where the model called one that there is not.
    pub tool: Option<String>,
    /// What it may do.
    pub effect: Option<ToolEffect>,
    /// Its idempotency key.
    pub key: Option<String>,
    /// Hash of its arguments.
    pub arguments: Option<String>,
    /// What became of it.
    pub outcome: Option<OutcomeKind>,
}

/// What became of a run, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum OutcomeKind {
    /// It ran.
    Ok,
    /// It said that it failed.
    Error,
    /// It certainly did not run.
    Unavailable,
    /// It may have run.
    Unknown,
}

/// Kinds of journal lines.
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
    /// The worker started.
    Started,
    /// The public state or its reasons changed.
    Transition,
    /// A turn began.
    TurnStarted,
    /// A call is about to be sent: the intent. Its note is the call's [`CallPurpose`].
    CallStarted,
    /// A call gave an answer: the outcome.
    CallAnswered,
    /// A call gave none: the outcome.
    CallFailed,
    /// A tool is about to be run, for the first time or again: the intent.
    ToolIntent,
    /// A run of a tool came to an end: the outcome. A run whose intent has none may have happened.
    ToolOutcome,
    /// A tool call was denied: nothing was run.
    ToolDenied,
    /// A loop was detected, or went on: what showed it, and the step that followed.
    LoopDetected,
    /// A field of the hot state did not get its value; said once until it gets one.
    HotStateRefused,
    /// An event of a Sensor came. Its note says how much it gave.
    SensorUpdated,
    /// A Sensor began to fail. Its note is the Sensor's name.
    SensorFailed,
    /// A notification came. Its note is the priority.
    Notified,
    /// A signal was scored. Its note is the signal and its score.
    SignalScored,
    /// A signal got no score. Its note is the signal and the failure's kind, `Unreadable` or `NoLightModel`.
    SignalUnscored,
    /// Notifications left before the model saw them: too many waited, or each turn that showed them was refused.
    NotificationDropped,
    /// A guardrail was reached. Its note is the reason that it raised, or the limit.
    GuardrailTriggered,
    /// The pre-check saw nothing that matters: the coming turn is skipped, and the sleep goes on.
    PrecheckSkipped,
    /// The pre-check gave no clear answer: the turn runs. Its note is the failure's kind, or `Unreadable`.
    PrecheckFailed,
    /// A turn ended.
    TurnCompleted,
    /// A turn was given up after its calls failed.
    TurnFailed,
    /// Results of tools that the model has seen are left out of the prompt from now on. Its note is how much that saves.
    ResultsCleared,
    /// The next turn is tried without the older half of the history, since turns with it were refused. Its note says how
    /// much that is.
    HistoryDoubted,
    /// Old messages left the live transcript.
    Trimmed,
    /// Old messages left the live transcript, and a summary has taken their place.
    Compacted,
    /// A request annotation was handled.
    RequestHandled,
}
