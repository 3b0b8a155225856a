//! The modes of a loop: when a turn begins, of which kind it is, which tools of the runtime it offers, and what follows
//! its end.
//!
//! Owns the interface between the engine and its modes. A mode is pure and has no effects: it keeps its own state,
//! which is part of the snapshot, and answers the engine's questions. Everything else is shared by all modes and does
//! not depend on them: tool admission and tool runs, pauses, guardrails, loop detection, the context window, the
//! journal.

pub mod continuous;
#[cfg(test)]
pub mod countdown;
pub mod goal;
pub mod task;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::effects::{EffectBuffer, journal_line};
use super::machine::Engine;
use super::message::{ModelAnswer, ToolCall, ToolDefinition};
use super::resources::ResourceTracker;
use super::settings::{EngineSettings, ModeSettings};
use super::snapshot::{ChosenSleep, TurnBriefing};
use super::tasks::{TaskOffer, requests};
use super::tools::admission::{DenialReason, DeniedCall};
use super::turn::kind::{ModeTurnKind, TurnKind};
use super::{CallPurpose, GateCause, JournalRecord, RecordKind};
use agentloop_api::failure::CallFailure;
use agentloop_api::status::{GateKind, LoopOutcome};
use continuous::ContinuousState;
pub use goal::GoalView;
use goal::{GoalState, StepValidation};
use task::TaskState;

/// What a mode may look at.
#[derive(Clone, Copy)]
pub struct ModeContext<'a> {
    pub now: Timestamp,
    pub settings: &'a EngineSettings,
    /// Usage of resources with a rate limit.
    pub used: &'a ResourceTracker,
    /// When the agent's next own turn may begin: after the delay between turns, or the one after failures.
    pub next_turn: Option<Timestamp>,
    /// Events that can wake the loop; `None`: not known.
    pub wake_events: Option<&'a [String]>,
    /// Tool servers that have not answered yet.
    pub silent_servers: &'a [String],
    /// The task that is next, if one waits.
    pub next_task: Option<&'a TaskOffer>,
    /// The last failure of a call or a turn.
    pub last_failure: Option<&'a CallFailure>,
}

/// What comes next in a loop without an open turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// A turn of this kind begins, not before this time. Pauses and rate limits can delay it.
    Begin { kind: TurnKind, at: Timestamp },
    /// The model call of [`LoopMode::question`]; its answer goes to [`LoopMode::answered`].
    Ask,
    /// The tool run of [`LoopMode::check`]; its end goes to [`LoopMode::checked`].
    Check,
    /// The gate of [`LoopMode::approval`]; its answer goes to [`LoopMode::approval_answered`].
    RequestApproval,
    /// Nothing, until a sleep is over or an input arrives.
    Wait,
    /// The loop ends.
    Stop(LoopOutcome),
}

/// What the first message of a turn is made of.
pub struct TurnOpening<'a> {
    /// The number of the turn.
    pub number: i64,
    /// Empty for a kind of turn without a briefing.
    pub briefing: &'a TurnBriefing,
    /// One line about the hot state, for a turn with a briefing.
    pub hot_state: Option<String>,
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TurnEnd<'a> {
    Completed {
        /// What its model requested with a tool of the mode; an answer without tool calls requests `Continue`.
        pace: &'a LoopPace,
        /// The text of its last answer.
        last_text: &'a str,
    },
    /// It was given up. `acted`: a tool with side effects had run in it.
    Failed { acted: bool },
}

/// What a model requests to follow its turn.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum LoopPace {
    /// The next turn begins at once.
    Continue,
    Sleep {
        wait: SignedDuration,
        /// Events that end it early.
        wake_early_if: Vec<String>,
        /// Why, in the agent's words.
        reason: String,
    },
    /// The turn has reached its goal, with this result.
    Finish { result: Value },
    /// The end of the loop.
    Shutdown,
    /// A confidence check.
    CheckConfidence {
        /// Why, in the agent's words.
        reason: String,
    },
}

/// A question of a mode to a model, which follows from the purpose, without tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModeQuestion {
    pub purpose: CallPurpose,
    /// The system message.
    pub text: String,
    pub data: String,
}

/// A tool run of a mode between turns. It is not requested by the model and needs no approval; a run that a restart
/// interrupts is repeated, whatever its effect.
#[derive(Clone, Debug, PartialEq)]
pub struct ModeCheck {
    /// Name of the tool, as the model calls it.
    pub tool: &'static str,
    pub arguments: Map<String, Value>,
}

/// How a tool run of a mode ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckEnd<'a> {
    /// It ran, with this result.
    Ran(&'a str),
    /// It failed, was not run, or its outcome is unknown: why.
    NotRun(&'a str),
}

/// What a person must approve before the loop continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModeApproval {
    pub kind: GateKind,
    /// The rule that asks.
    pub cause: GateCause,
    /// Why the loop waits. No text of a model or a tool.
    pub message: String,
}

/// The decision on a call of one of the mode's tools.
#[derive(Clone, Debug, PartialEq)]
pub enum ModeCallDecision {
    /// The turn ends once the other calls of the answer have succeeded. If one fails, the model sees that first and has
    /// to call the tool again; of several such calls in one answer the last one counts.
    EndsTurn {
        pace: LoopPace,
        /// The result of the call.
        result: String,
        /// Its result if other calls of the answer have to run first; `None`: the same.
        result_after_runs: Option<String>,
    },
    /// Nothing follows but this result, which says how to fix the call.
    Rejected(String),
}

/// What an answer without a tool call leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextDecision {
    /// The turn ends.
    EndsTurn,
    /// The turn continues with this message to the model.
    Rejected(String),
}

/// Something that may end a sleep early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeTrigger<'a> {
    /// The event of this name.
    Event(&'a str),
    /// A notification of high priority.
    Urgent,
    /// The annotation `agentloop.dev/wake`.
    Request,
}

/// A sleep that has ended by the clock.
#[derive(Clone, Debug, PartialEq)]
pub struct SleepEnd {
    /// The cause of the next turn.
    pub cause: String,
    /// The sleep, if a pre-check may extend it.
    pub extendable: Option<ChosenSleep>,
}

/// What the answer to a pre-check leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreCheckDecision {
    /// The turn begins.
    Begin,
    /// The answer was not clear: the turn begins.
    Unreadable,
    /// The sleep was extended by this.
    Extended(SignedDuration),
}

/// A mode. The engine asks; a method with `&mut self` may change the mode's own state and nothing else.
pub trait LoopMode {
    /// How the loop works, for the system prompt. Constant, since it is read from the provider's prompt cache.
    fn runtime_text(&self) -> &'static str;

    /// A process has started. `restarted`: the loop had ended, and starts again.
    fn started(&mut self, _restarted: bool, _context: &ModeContext<'_>) {}

    /// The clock was set back by this: times move with it, and nothing may last longer from now on than its own limit.
    fn clock_set_back(&mut self, _back: SignedDuration, _context: &ModeContext<'_>) {}

    /// What comes next. Asked whenever no turn is open, any number of times.
    fn next(&self, context: &ModeContext<'_>) -> NextStep;

    /// A turn begins, as decided by [`LoopMode::next`]. Returns its first message.
    fn begin_turn(&mut self, kind: ModeTurnKind, opening: &TurnOpening<'_>, context: &ModeContext<'_>) -> String;

    /// A turn has ended. Returns what follows it. `Stop` ends the loop at once, whatever holds it.
    fn turn_ended(&mut self, kind: ModeTurnKind, end: &TurnEnd<'_>, context: &ModeContext<'_>) -> NextStep;

    /// The tools of the mode, which come before all others in a prompt. `events`: those that can wake the loop, if
    /// known.
    fn tools(&self, settings: &EngineSettings, events: Option<&[String]>) -> Vec<ToolDefinition>;

    /// Decides on a call in a turn of this kind. `None`: it is not a call of a tool of the mode.
    fn decide_call(&self, kind: ModeTurnKind, call: &ToolCall, context: &ModeContext<'_>) -> Option<ModeCallDecision>;

    /// Decides on an answer without a tool call.
    fn decide_text(&self, _text: &str, _context: &ModeContext<'_>) -> TextDecision {
        TextDecision::EndsTurn
    }

    /// The note to the model when turns without a tool call are delayed more and more. `None`: they are not.
    fn text_turn_note(&self) -> Option<&'static str> {
        None
    }

    /// What the system prompt says after [`LoopMode::runtime_text`]. The same in every call of a loop.
    fn assignment(&self, _settings: &EngineSettings) -> Option<String> {
        None
    }

    /// A call of the turn under way has its result. `was_admitted`: it was not rejected by the mode or as a repetition.
    fn call_ended(&mut self, _call: &ToolCall, _text: &str, _was_admitted: bool, _has_failed: bool) {}

    /// Why a call of another tool is not admitted in a turn of the mode, whatever the rules of its tool say.
    fn denies(&self, _call: &ToolCall) -> Option<DeniedCall> {
        None
    }

    /// A call of another tool was denied.
    fn call_denied(&mut self, _call: &ToolCall, _why: DenialReason) {}

    /// Something may change the world beside the mode's work: a turn that answers a request, a deferred call, or another pod,
    /// whose workspace may be empty. A check that it interrupts starts over afterwards: what was found before may no longer
    /// hold.
    fn environment_changed(&mut self, _context: &ModeContext<'_>) {}

    /// The loop answered a request for this long, which is not the mode's work.
    fn interrupted(&mut self, _time: SignedDuration, _context: &ModeContext<'_>) {}

    /// An attempt at a model call of the mode's work was sent, whatever its purpose.
    fn call_sent(&mut self) {}

    /// The attempt was not made after all.
    fn call_refused(&mut self) {}

    /// A model call of the mode's work was answered.
    fn call_answered(&mut self, _answer: &ModelAnswer) {}

    /// Whether a person decides on a detected loop once its turn has ended, instead of a forced sleep.
    fn escalates_loops(&self) -> bool {
        false
    }

    /// A loop was detected on which a person decides.
    fn loop_detected(&mut self) {}

    /// The loop ends.
    fn loop_ended(&mut self, _context: &ModeContext<'_>) {}

    /// The question that [`NextStep::Ask`] is about. An answer counts only if this is still the question then.
    fn question(&self, _context: &ModeContext<'_>) -> Option<ModeQuestion> {
        None
    }

    /// The question was answered; `None`: there is no answer, and no retry would bring one. Whether it could be read.
    fn answered(&mut self, _answer: Option<&str>, _context: &ModeContext<'_>) -> bool {
        false
    }

    /// The run that [`NextStep::Check`] is about.
    fn check(&self, _context: &ModeContext<'_>) -> Option<ModeCheck> {
        None
    }

    /// The run has ended.
    fn checked(&mut self, _end: CheckEnd<'_>, _context: &ModeContext<'_>) {}

    /// What [`NextStep::RequestApproval`] is about.
    fn approval(&self, _context: &ModeContext<'_>) -> Option<ModeApproval> {
        None
    }

    /// A person has answered, or the gate has expired, after this long.
    fn approval_answered(&mut self, _approved: bool, _waited: SignedDuration) {}

    /// An attempt at a step that is over and has to be recorded. Asked after everything that can end one.
    fn take_validation(&mut self) -> Option<StepValidation> {
        None
    }

    /// The progress towards a goal, for people.
    fn goal_view(&self, _settings: &EngineSettings) -> Option<GoalView> {
        None
    }

    /// The sleep that the loop is in, if any.
    fn sleep(&self) -> Option<&ChosenSleep> {
        None
    }

    /// Ends the sleep if its time has come, even if a pause holds the loop.
    fn end_sleep_if_over(&mut self, _context: &ModeContext<'_>) -> Option<SleepEnd> {
        None
    }

    /// Whether this would have ended that sleep early.
    fn would_end(&self, _sleep: &ChosenSleep, _trigger: WakeTrigger<'_>) -> bool {
        false
    }

    /// Ends the sleep if this ends it. `cause`: what happened, in words. Returns the cause of the next turn.
    fn wake(&mut self, _trigger: WakeTrigger<'_>, _cause: &str) -> Option<String> {
        None
    }

    /// The question of the pre-check after this sleep: the task and the data for the light model. `None`: none is made.
    fn pre_check(&self, _sleep: &ChosenSleep, _changes: &str, _context: &ModeContext<'_>) -> Option<[String; 2]> {
        None
    }

    /// The light model has answered. `sleep`: the one that its answer may extend.
    fn pre_check_answered(
        &mut self,
        _sleep: Option<ChosenSleep>,
        _answer: Option<&str>,
        _context: &ModeContext<'_>,
    ) -> PreCheckDecision {
        PreCheckDecision::Begin
    }
}

/// The state of the loop's mode.
///
/// That of `Continuous` is stored in fields of the snapshot itself, as before there were modes; that of any other mode
/// in a separate field.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(untagged, from = "StoredModeState")]
pub enum ModeState {
    Continuous(ContinuousState),
    Task {
        task: TaskState,
    },
    Goal {
        goal: Box<GoalState>,
    },
    #[cfg(test)]
    Countdown {
        countdown: countdown::CountdownState,
    },
}

/// The fields of a snapshot that can hold a [`ModeState`].
#[derive(Deserialize)]
struct StoredModeState {
    #[serde(flatten)]
    continuous: ContinuousState,
    task: Option<TaskState>,
    goal: Option<Box<GoalState>>,
    #[cfg(test)]
    countdown: Option<countdown::CountdownState>,
}

impl From<StoredModeState> for ModeState {
    fn from(stored: StoredModeState) -> Self {
        #[cfg(test)]
        if let Some(countdown) = stored.countdown {
            return Self::Countdown { countdown };
        }
        if let Some(task) = stored.task {
            return Self::Task { task };
        }
        if let Some(goal) = stored.goal {
            return Self::Goal { goal };
        }
        Self::Continuous(stored.continuous)
    }
}

impl ModeSettings {
    /// The tool with which the agent itself slows its loop down, for texts that recommend it. `None`: there is none.
    #[must_use]
    pub fn sleep_tool(&self) -> Option<&'static str> {
        match self {
            Self::Continuous => Some(continuous::yield_tool::NAME),
            Self::Task(_) => None,
            Self::Goal(_) => None,
            #[cfg(test)]
            Self::Countdown { .. } => None,
        }
    }
}

impl Default for ModeState {
    fn default() -> Self {
        Self::Continuous(ContinuousState::default())
    }
}

impl ModeState {
    /// The state of a loop that has never run.
    fn new(settings: &ModeSettings) -> Self {
        match settings {
            ModeSettings::Continuous => Self::default(),
            ModeSettings::Task(_) => Self::Task {
                task: TaskState::default(),
            },
            ModeSettings::Goal(_) => Self::Goal { goal: Box::default() },
            #[cfg(test)]
            ModeSettings::Countdown { .. } => Self::Countdown {
                countdown: countdown::CountdownState::default(),
            },
        }
    }

    /// This state if it is of the mode in the settings, otherwise a new one: an Agent can be recreated with another
    /// mode on the volume of the previous one.
    pub(super) fn in_mode(self, settings: &ModeSettings) -> Self {
        let new = Self::new(settings);
        if std::mem::discriminant(&new) == std::mem::discriminant(&self) {
            self
        } else {
            new
        }
    }

    pub(super) fn mode(&self) -> &dyn LoopMode {
        match self {
            Self::Continuous(state) => state,
            Self::Task { task } => task,
            Self::Goal { goal } => &**goal,
            #[cfg(test)]
            Self::Countdown { countdown } => countdown,
        }
    }

    fn mode_mut(&mut self) -> &mut dyn LoopMode {
        match self {
            Self::Continuous(state) => state,
            Self::Task { task } => task,
            Self::Goal { goal } => &mut **goal,
            #[cfg(test)]
            Self::Countdown { countdown } => countdown,
        }
    }
}

impl Engine {
    pub(super) fn mode(&self) -> &dyn LoopMode {
        self.state.mode.mode()
    }

    pub(super) fn mode_context(&self, now: Timestamp) -> ModeContext<'_> {
        ModeContext {
            now,
            settings: &self.settings,
            used: &self.state.used,
            next_turn: self.state.next_turn,
            wake_events: self.offer.wake_events(),
            silent_servers: self.offer.toolbox().silent(),
            next_task: self.next_task(),
            last_failure: self.state.last_error.as_ref().map(|(_, failure)| failure),
        }
    }

    /// Asks the mode something that may change its state.
    pub(super) fn ask_mode<T>(
        &mut self,
        now: Timestamp,
        ask: impl FnOnce(&mut dyn LoopMode, &ModeContext<'_>) -> T,
    ) -> T {
        // Taken out meanwhile, so that it can look at the rest of the engine.
        let mut state = std::mem::take(&mut self.state.mode);
        let answer = ask(state.mode_mut(), &self.mode_context(now));
        self.state.mode = state;
        answer
    }

    /// The decision of the mode on a call; `None`: it is not of one of its tools. The mode decides as soon as the
    /// answer is there: such a call is not a run, and its result joins the transcript with those of the other calls.
    pub(super) fn mode_decision(&self, wanted: &ToolCall, now: Timestamp) -> Option<ModeCallDecision> {
        let kind = self.state.turn.as_ref()?.kind();
        let Some(kind) = kind.of_mode() else {
            let tools = self.mode().tools(&self.settings, None);
            let is_offered = tools.iter().any(|tool| tool.name == wanted.name);
            return is_offered.then(|| requests::reject_mode_tool(&wanted.name));
        };
        self.mode().decide_call(kind, wanted, &self.mode_context(now))
    }

    /// Why the mode does not admit a call of the turn under way.
    pub(super) fn denied_by_mode(&self, call: &ToolCall) -> Option<DeniedCall> {
        self.turn_rules().is_of_mode.then(|| self.mode().denies(call))?
    }

    /// Notifies the mode that a call was denied, unless it is one of a turn beside the mode's work.
    pub(super) fn mode_call_denied(&mut self, call: &ToolCall, why: DenialReason, now: Timestamp) {
        if self.state.turn.is_none() || self.turn_rules().is_of_mode {
            self.ask_mode(now, |mode, _| mode.call_denied(call, why));
        }
    }

    /// Notifies the mode that a call of its turn has its result.
    pub(super) fn mode_call_ended(
        &mut self,
        call: &ToolCall,
        text: &str,
        was_admitted: bool,
        has_failed: bool,
        now: Timestamp,
    ) {
        if self.turn_rules().is_of_mode {
            self.ask_mode(now, |mode, _| mode.call_ended(call, text, was_admitted, has_failed));
        }
    }

    /// Records what the mode has found about an attempt at a step that is over.
    pub(super) fn record_validation(&mut self, out: &mut EffectBuffer) {
        if let Some(validation) = self.ask_mode(out.now, |mode, _| mode.take_validation()) {
            out.record(JournalRecord {
                validation: Some(Box::new(validation.clone())),
                ..journal_line(RecordKind::StepChecked, validation.turn, validation.note())
            });
        }
    }

    /// What comes next if no turn is open.
    pub(super) fn next_step(&self, now: Timestamp) -> NextStep {
        let next = self.mode().next(&self.mode_context(now));
        // People wait for the answers to requests. Only what completes a turn comes before them, and a turn that is due after
        // each of them. A question or a check comes before them until its model or its tool has been unavailable for long.
        let is_first = match next {
            NextStep::Stop(_) | NextStep::RequestApproval => true,
            NextStep::Ask => !self.state.requests.lets_request_in(),
            NextStep::Check if self.state.requests.lets_request_in() => false,
            NextStep::Check => self.state.reasons.allow_actions() && !self.is_deferred_under_way(),
            NextStep::Begin { at, .. } => self.state.tasks.is_own_turn_first() && at <= now,
            NextStep::Wait => false,
        };
        if is_first || !self.has_request() {
            return next;
        }
        NextStep::Begin {
            kind: TurnKind::Chat,
            at: now,
        }
    }
}
