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
pub mod task;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::machine::Engine;
use super::message::{ToolCall, ToolDefinition};
use super::resources::ResourceTracker;
use super::settings::{EngineSettings, ModeSettings};
use super::snapshot::{ChosenSleep, TurnBriefing};
use super::tasks::TaskOffer;
use super::turn::kind::TurnKind;
use agentloop_api::status::LoopOutcome;
use continuous::ContinuousState;
use serde_json::Value;
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
    /// The task that waits longest.
    pub next_task: Option<&'a TaskOffer>,
}

/// What comes next in a loop without an open turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// A turn of this kind begins, not before this time. Pauses and rate limits can delay it.
    Begin { kind: TurnKind, at: Timestamp },
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
        /// The text of its last answer, if the turn has its own conversation.
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

    /// The clock was set back: nothing may last longer from now on than its own limit.
    fn clock_set_back(&mut self, _context: &ModeContext<'_>) {}

    /// What comes next. Asked whenever no turn is open, any number of times.
    fn next(&self, context: &ModeContext<'_>) -> NextStep;

    /// A turn begins, as [`LoopMode::next`] has said. Returns its first message.
    fn begin_turn(&mut self, kind: TurnKind, opening: &TurnOpening<'_>, context: &ModeContext<'_>) -> String;

    /// A turn has ended. Returns what follows it. `Stop` ends the loop at once, whatever holds it.
    fn turn_ended(&mut self, kind: TurnKind, end: &TurnEnd<'_>, context: &ModeContext<'_>) -> NextStep;

    /// The tools of the mode, which come before all others in a prompt. `events`: those that can wake the loop, if
    /// known.
    fn tools(&self, settings: &EngineSettings, events: Option<&[String]>) -> Vec<ToolDefinition>;

    /// Decides on a call in a turn of this kind. `None`: it is not a call of a tool of the mode.
    fn decide_call(&self, kind: TurnKind, call: &ToolCall, context: &ModeContext<'_>) -> Option<ModeCallDecision>;

    /// Decides on an answer without a tool call.
    fn decide_text(&self, _text: &str, _context: &ModeContext<'_>) -> TextDecision {
        TextDecision::EndsTurn
    }

    /// What the model is told when turns without a tool call are delayed more and more. `None`: they do not.
    fn text_turn_note(&self) -> Option<&'static str> {
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
    Task {
        task: TaskState,
    },
    #[cfg(test)]
    Countdown {
        countdown: countdown::CountdownState,
    },
    Continuous(ContinuousState),
}

/// The fields of a snapshot that can hold a [`ModeState`].
#[derive(Deserialize)]
struct StoredModeState {
    #[serde(flatten)]
    continuous: ContinuousState,
    task: Option<TaskState>,
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
            #[cfg(test)]
            Self::Countdown { countdown } => countdown,
        }
    }

    fn mode_mut(&mut self) -> &mut dyn LoopMode {
        match self {
            Self::Continuous(state) => state,
            Self::Task { task } => task,
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
            next_task: self.tasks.first(),
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

    /// What comes next if no turn is open.
    pub(super) fn next_step(&self, now: Timestamp) -> NextStep {
        self.mode().next(&self.mode_context(now))
    }
}
