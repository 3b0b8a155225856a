//! What of a loop outlives its process, but for the transcript. Plain data; the rules are elsewhere.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::CallId;
use super::budget::{BudgetState, ProbeState};
use super::compaction::Compaction;
use super::context_window::ClearedResults;
use super::digest::HistoryDigest;
use super::doubt::HistoryDoubt;
use super::guardrails::idle_timeout::IdleClock;
use super::heartbeat::HeartbeatState;
use super::hot_state::HotStateRefresh;
use super::lifetime_counts::LifetimeCounts;
use super::loop_detection::LoopDetector;
use super::notifications::{NotificationInbox, ShownNotifications};
use super::precheck::PreCheckState;
use super::prompt_size::TokenEstimator;
use super::resources::ResourceTracker;
use super::scoring::ScoringState;
use super::tool_batch::ToolBatch;
use crate::api::failure::CallFailure;
use crate::api::status::{HandledRequests, LoopOutcome, LoopState, PauseReason};

/// Everything of an engine that outlives its process, without the transcript.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct EngineSnapshot {
    pub(super) epoch: i64,
    pub(super) lifecycle: LifecyclePhase,
    /// The public state as last journalled; a difference to the present one is a transition.
    pub(super) public: PublicState,
    pub(super) since: Option<Timestamp>,
    /// The latest `now`, to notice a clock that was set back.
    pub(super) last_now: Option<Timestamp>,
    pub(super) outcome: Option<LoopOutcome>,
    /// Stopped because of `spec.suspend`.
    pub(super) suspended: bool,
    pub(super) turns_begun: i64,
    pub(super) turns_completed: i64,
    /// Runs of tools that were sent, each once; those of them that do not only look.
    pub(super) tool_calls: i64,
    pub(super) actions: i64,
    /// What limits did, and how runs of tools ended.
    pub(super) tally: LifetimeCounts,
    /// The turn that is not finished yet.
    pub(super) turn: Option<Turn>,
    /// Runs that fill the hot state before the next turn.
    pub(super) refresh: HotStateRefresh,
    /// Notifications that wait.
    pub(super) inbox: NotificationInbox,
    /// The question whether the coming turn is worth it.
    pub(super) pre_check: PreCheckState,
    /// The signal that is scored.
    pub(super) scoring: ScoringState,
    /// When the next turn may begin, once nothing holds the loop.
    pub(super) next_turn: Option<Timestamp>,
    pub(super) sleep: Option<ChosenSleep>,
    pub(super) reasons: BTreeMap<PauseReason, ActivePause>,
    pub(super) counters: StreakCounters,
    /// What the detection of loops remembers.
    pub(super) watch: LoopDetector,
    /// What was used of resources with a rate limit.
    pub(super) used: ResourceTracker,
    /// So many of the newest messages are of turns that failed without having changed anything, and no call has been
    /// answered since.
    pub(super) unproven: usize,
    /// Whether the history may be what the server refuses.
    pub(super) doubt: HistoryDoubt,
    /// [`super::settings::EngineSettings::spec`] of the process before.
    pub(super) spec: Option<u64>,
    /// What the next turn's first message will say.
    pub(super) briefing: TurnBriefing,
    pub(super) handled: HandledRequests,
    /// What the turns that left the transcript came to, in the model's own words.
    pub(super) summary: Option<String>,
    /// What is known of messages that left without a summary.
    pub(super) digest: HistoryDigest,
    /// Whose results are left out of the prompt.
    pub(super) cleared: ClearedResults,
    /// How the server's sizes compare with the estimate.
    pub(super) sizes: TokenEstimator,
    /// The heartbeat.
    pub(super) beat: HeartbeatState,
    /// What limits the calls, as last heard.
    pub(super) budget: BudgetState,
    pub(super) last_error: Option<(Timestamp, CallFailure)>,
}

impl EngineSnapshot {
    /// The same loop for an Agent that was made again and keeps the volume of the one before: its epochs count from
    /// the start.
    #[must_use]
    pub fn inherited(self) -> Self {
        Self { epoch: 0, ..self }
    }
}

/// Whether the loop is up. Pauses and sleeps are apart from it.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LifecyclePhase {
    /// Not running.
    #[default]
    Stopped,
    /// Coming up.
    Starting,
    /// Up: running, sleeping or paused.
    Active,
    /// Finishing.
    Stopping,
}

/// A public state and its reasons, as people see them.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PublicState {
    /// One of the six.
    pub state: LoopState,
    /// In order, each once.
    pub reasons: Vec<PauseReason>,
}

impl std::fmt::Display for PublicState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.state)?;
        if self.reasons.is_empty() {
            return Ok(());
        }
        let reasons: Vec<&str> = self.reasons.iter().map(AsRef::as_ref).collect();
        write!(f, " ({})", reasons.join(", "))
    }
}

/// A turn that is not finished.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Turn {
    /// Its number, from 1.
    pub number: i64,
    /// Number of its present call, from 1: so many calls were or are being made.
    pub call: u32,
    /// Attempts at that call that were sent.
    pub attempt: u32,
    /// Attempts at that call that failed and count against its limit.
    pub failures: u32,
    /// Where that call stands.
    pub step: CallStep,
    /// How many messages at the end of the transcript are this turn's.
    pub messages: usize,
    /// How often the worker ended in the middle of it.
    pub crashes: u32,
    /// [`BudgetState::revision`] when the last attempt was sent.
    #[serde(default)]
    pub asked_under: u64,
    /// Tool calls of its last answer; only in [`CallStep::Tools`].
    #[serde(default)]
    pub work: Option<ToolBatch>,
    /// The summary that is made before its own next call.
    #[serde(default)]
    pub compaction: Option<Compaction>,
    /// How many of its calls were for a summary.
    #[serde(default)]
    pub compactions: u32,
    /// A summary was asked for in it, and there was none to be had.
    #[serde(default)]
    pub unsummed: bool,
    /// Prompts of its present call that the server refused as too long.
    #[serde(default)]
    pub refusals: u32,
    /// Of so many of its messages the results are cleared; only of a heartbeat, whose messages are apart.
    #[serde(default)]
    pub cleared: usize,
    /// How often each tool was denied in it.
    #[serde(default)]
    pub denials: BTreeMap<String, u32>,
    /// A tool that does not only look was run in it: its messages stay, however it ends.
    #[serde(default)]
    pub acted: bool,
    /// Notifications that it has shown.
    #[serde(default)]
    pub shown: ShownNotifications,
    /// What came since the attempt last sent, which did not show it.
    #[serde(default)]
    pub unseen: UnseenEvents,
    /// How often its first call was answered with nothing at all.
    #[serde(default)]
    pub silent: u32,
    /// Why tool calls with side effects in the answer to its open call are not run without being asked for again: the
    /// answer may be older than what has changed since.
    #[serde(default)]
    pub outdated: Option<String>,
    /// It is a heartbeat, with a conversation of its own.
    #[serde(default)]
    pub heartbeat: bool,
    /// What its first message said; the next turn says it again when this one fails.
    pub briefing: TurnBriefing,
}

impl Turn {
    /// The attempt last sent.
    pub fn call_id(&self) -> CallId {
        CallId {
            turn: self.number,
            call: self.call,
            attempt: self.attempt,
        }
    }
}

/// What came up that would end a sleep, and that no prompt has shown.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct UnseenEvents {
    /// Names of events, each once.
    pub events: Vec<String>,
    /// Among it was a notification of high priority.
    pub urgent: bool,
}

/// Where the present call of a turn stands.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallStep {
    /// The next attempt is to be sent at this moment.
    Due(Timestamp),
    /// An attempt was sent, and its outcome is not known.
    Open,
    /// It was answered, and tool calls of its answer have no result yet.
    Tools,
}

/// A sleep that the agent chose.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct ChosenSleep {
    /// Wall-clock moment of its end.
    pub until: Timestamp,
    /// How long it was to last.
    #[serde(default)]
    pub length: SignedDuration,
    /// What ends it early.
    pub wake_early_if: Vec<String>,
    /// When a resource in there has the room that it waits for; nothing is used during a sleep.
    #[serde(default)]
    pub room_at: Option<Timestamp>,
    /// Why, in the agent's words; told back to it, and to nobody else.
    pub reason: String,
}

impl ChosenSleep {
    /// When it ends by itself.
    pub fn ends(&self) -> Timestamp {
        self.room_at.map_or(self.until, |room_at| room_at.min(self.until))
    }
}

/// What is behind a reason that holds the loop.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ActivePause {
    /// When it clears by itself.
    pub until: Option<Timestamp>,
    /// What happened and what to do.
    pub message: String,
    /// When the held call is tried all the same.
    #[serde(default)]
    pub probe: Option<ProbeState>,
}

impl ActivePause {
    /// When it goes by itself, as far as is known here.
    pub fn ends(&self) -> Option<Timestamp> {
        let let_through = match self.probe {
            Some(ProbeState::Sent(moment)) => Some(moment),
            Some(ProbeState::At(_)) | None => None,
        };
        [self.until, let_through].into_iter().flatten().min()
    }
}

/// Streaks, and how often each limit was reached in a row (the `n` of its cool-down).
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct StreakCounters {
    /// Failed turns in a row.
    pub errors: u32,
    /// Cool-downs after errors since the last completed turn.
    pub error_cooldowns: u32,
    /// Turns in a row that the model or its provider refused.
    pub refusals: u32,
    /// Cool-downs after crashes since the last completed turn.
    pub crash_cooldowns: u32,
    /// Completed turns since the last sleep.
    pub turns: u32,
    /// Completed turns in a row that called no tool.
    pub words: u32,
    /// Naps since the last time that they came to a minute.
    pub napped: SignedDuration,
    /// Forced sleeps since the agent last slept of its own choice.
    pub forced_sleeps: u32,
    /// Time awake without an effective action.
    pub idle: IdleClock,
}

/// What a turn's first message tells the model.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct TurnBriefing {
    /// Why this turn begins.
    pub cause: String,
    /// What else it should know.
    pub notes: Vec<String>,
}
