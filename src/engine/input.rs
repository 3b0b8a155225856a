//! What the driver feeds to the engine.

use serde::{Deserialize, Serialize};

use super::approvals::EngineGateAnswer;
use super::budget::BudgetState;
#[cfg(doc)]
use super::effect::EngineEffect;
use super::ids::CallId;
#[cfg(doc)]
use super::machine::Engine;
use super::message::ModelAnswer;
use super::scoring::ScoreQuestion;
use super::sensor_events::SensedEvent;
use super::stop_requests::OpenRequests;
use super::tasks::TaskOffer;
use super::tool::{ResultArtifacts, ToolOutcome, ToolRunId, ToolSpec};
use agentloop_api::agent::LimitedResource;
use agentloop_api::failure::CallFailure;
use agentloop_api::usage_counts::LoopCounts;

/// What the driver feeds to the engine.
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
    /// A complete event of a Sensor. Always journalled while the loop runs, see [`Engine::accepts_input`].
    Sensed(SensedEvent),
    /// A task. Fed until its acceptance is journalled; a repetition is ignored as long as the task is not over.
    /// [`Engine::accepts_task_of`] says whether there is room.
    TaskOffered(TaskOffer),
    /// Nothing outside the loop needs the pod: it ends if [`Engine::scale_down_due`] says so.
    ScaleDown,
    /// A Sensor fails: it no longer receives or understands events. Fed once per outage.
    SensorFailed { sensor: String },
    /// A signal of a Sensor's event needs a score. Repeat it until [`Engine::score_outcome`] has the outcome.
    Score(ScoreQuestion),
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
    GateAnswered(EngineGateAnswer),
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
