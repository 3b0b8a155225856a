//! What outlives the process of a loop, except for the transcript: a list of states, each with its own rules.

use jiff::{SignedDuration, Timestamp};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::context::digest::HistoryDigest;
use super::context::history_exclusion::HistoryExclusion;
use super::context::prompt_size::TokenEstimator;
use super::context::window::ClearedResults;
use super::counters::StreakCounters;
use super::deferred::DeferredCalls;
use super::definitions::DefinitionPins;
use super::early_snapshot;
use super::hot_state::HotStateRefresh;
use super::lifecycle::Lifecycle;
use super::light_model::LightModelOutage;
use super::loop_detection::LoopDetector;
use super::memory::notes::MemoryNotes;
use super::mode_requests::ModeRequests;
use super::model_call::CallSlot;
use super::modes::ModeState;
use super::notifications::NotificationInbox;
use super::pauses::budget::BudgetState;
use super::pauses::holds::Pauses;
use super::precheck::PreCheckState;
use super::resources::ResourceTracker;
use super::scoring::ScoringState;
use super::tasks::TaskLog;
use super::totals::Totals;
use super::turn::Turn;
use super::untrusted::ContentTrust;
use agentloop_api::failure::CallFailure;
use agentloop_api::status::HandledRequests;

/// Everything of an engine that outlives its process, except for the transcript.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default, remote = "Self")]
pub struct EngineSnapshot {
    #[serde(flatten)]
    pub(super) life: Lifecycle,
    #[serde(flatten)]
    pub(super) totals: Totals,
    /// The model call that is due or open.
    pub(super) call: CallSlot,
    /// The turn under way.
    pub(super) turn: Option<Turn>,
    /// Tool runs that fill the hot state before the next turn.
    pub(super) refresh: HotStateRefresh,
    /// Waiting notifications.
    pub(super) inbox: NotificationInbox,
    /// The pre-check before the next turn.
    pub(super) pre_check: PreCheckState,
    /// The signal that is being scored.
    pub(super) scoring: ScoringState,
    /// What the mode has requested between two turns.
    pub(super) requests: ModeRequests,
    /// When the next own turn may begin, if neither a pause nor a sleep holds the loop.
    pub(super) next_turn: Option<Timestamp>,
    pub(super) reasons: Pauses,
    pub(super) counters: StreakCounters,
    /// The memory of loop detection.
    pub(super) watch: LoopDetector,
    /// Usage of resources with a rate limit.
    pub(super) used: ResourceTracker,
    /// How many of the newest messages are of failed turns without side effects, with no call answered since.
    pub(super) unproven: usize,
    /// Whether the server may be refusing the history.
    pub(super) doubt: HistoryExclusion,
    /// The content of the next turn's first message.
    pub(super) briefing: TurnBriefing,
    pub(super) handled: HandledRequests,
    /// The model's own summary of the turns that left the transcript.
    pub(super) summary: Option<String>,
    /// What remains of messages that left without a summary.
    pub(super) digest: HistoryDigest,
    /// Whose results are left out of the prompt.
    pub(super) cleared: ClearedResults,
    /// Whether the conversation has untrusted content.
    pub(super) trust: ContentTrust,
    /// Calls that wait for an approval while the loop continues.
    pub(super) deferred: DeferredCalls,
    /// The accepted definitions of tools.
    pub(super) definitions: DefinitionPins,
    /// How the server's token counts compare with the estimate.
    pub(super) sizes: TokenEstimator,
    /// The task under way, and the last ones.
    #[serde(skip_serializing_if = "TaskLog::is_empty")]
    pub(super) tasks: TaskLog,
    /// The notes of the tool `memory`.
    #[serde(skip_serializing_if = "MemoryNotes::is_empty")]
    pub(super) memory: MemoryNotes,
    /// What the loop's mode keeps between turns.
    #[serde(flatten)]
    pub(super) mode: ModeState,
    /// The latest limits on calls.
    pub(super) budget: BudgetState,
    pub(super) last_error: Option<(Timestamp, CallFailure)>,
    /// Why the light model cannot be used, if only a user can fix that.
    pub(super) light_model: Option<LightModelOutage>,
}

impl Serialize for EngineSnapshot {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for EngineSnapshot {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let stored = early_snapshot::convert(Value::deserialize(deserializer)?);
        Self::deserialize(stored).map_err(D::Error::custom)
    }
}

impl EngineSnapshot {
    /// The same loop for an Agent that was recreated and keeps the volume of the previous one: its epochs start again
    /// from zero, and requests with the same values are other requests.
    #[must_use]
    pub fn inherited(self) -> Self {
        Self {
            life: self.life.inherited(),
            tasks: self.tasks.inherited(),
            handled: HandledRequests::default(),
            ..self
        }
    }
}

/// A sleep that the agent chose.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct ChosenSleep {
    /// The wall-clock time of its end.
    pub until: Timestamp,
    /// The length that was requested.
    #[serde(default)]
    pub length: SignedDuration,
    /// What ends it early.
    pub wake_early_if: Vec<String>,
    /// When a resource that it waits for has room; nothing is used during a sleep.
    #[serde(default)]
    pub room_at: Option<Timestamp>,
    /// Why, in the agent's words; shown only to the agent.
    pub reason: String,
}

impl ChosenSleep {
    /// When it ends without an input.
    pub fn ends(&self) -> Timestamp {
        self.room_at.map_or(self.until, |room_at| room_at.min(self.until))
    }
}

/// What a turn's first message contains for the model.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct TurnBriefing {
    /// Why this turn begins, in words.
    cause: String,
    cause_kind: CauseKind,
    /// Further notes for the model, without duplicates.
    notes: Vec<String>,
}

/// Why a turn begins.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CauseKind {
    /// Only because the loop starts or continues.
    Loop,
    /// A pause is over.
    Pause,
    /// Something that says more to the model, such as the end of a sleep.
    #[default]
    Event,
}

impl TurnBriefing {
    pub fn set_cause(&mut self, kind: CauseKind, cause: impl Into<String>) {
        self.cause = cause.into();
        self.cause_kind = kind;
    }

    /// Why the turn begins, in words.
    pub fn cause(&self) -> &str {
        &self.cause
    }

    pub fn cause_kind(&self) -> CauseKind {
        self.cause_kind
    }

    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    pub fn add_note(&mut self, note: &str) {
        if !self.notes.iter().any(|known| known == note) {
            self.notes.push(note.to_owned());
        }
    }

    /// The turn with the briefing `failed` left no message: the next one says the same, and what was noted since.
    pub fn repeat(&mut self, mut failed: Self) {
        failed.notes.append(&mut self.notes);
        failed.notes.dedup();
        *self = failed;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_briefing_without_a_kind_keeps_its_cause() {
        let read: TurnBriefing = serde_json::from_value(json!({"cause": "the loop goes on", "notes": ["n"]})).unwrap();
        assert_eq!(
            (read.cause.as_str(), read.cause_kind),
            ("the loop goes on", CauseKind::Event)
        );
        assert_eq!(read.notes, ["n"]);
    }

    #[test]
    fn a_briefing_keeps_its_kind_whatever_its_text_contains() {
        let mut briefing = TurnBriefing::default();
        briefing.set_cause(CauseKind::Event, "a pause (of the model's own making) is over");
        let text = serde_json::to_string(&briefing).unwrap();
        assert_eq!(serde_json::from_str::<TurnBriefing>(&text).unwrap(), briefing);
    }
}
