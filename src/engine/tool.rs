//! Tools that sources offer, and single runs of them, as engine and worker speak of both. Plain data; the gate that
//! every call passes is elsewhere.

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a tool may do to the world.
#[derive(
    Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::AsRefStr, strum::Display,
)]
pub enum ToolEffect {
    /// It only looks: a run can be repeated, and cut, without harm.
    Read,
    /// It changes something.
    Write,
    /// It changes something that cannot be brought back.
    Destructive,
}

/// What follows a run whose outcome nobody knows. A run that may be repeated anyway is never asked about.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownOutcomePolicy {
    /// The model is told that it may or may not have happened.
    #[default]
    TellModel,
    /// The same run is sent again, with the same key.
    Retry,
}

/// A tool that a source offers, with the rules that hold for it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    /// As the model calls it: `<server>__<tool>`, 1 to 64 of `a-z`, `A-Z`, `0-9`, `_` and `-`.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// What it may do.
    pub effect: ToolEffect,
    /// A second run with the same key changes nothing more.
    pub idempotent: bool,
    /// Longest that a run may take.
    pub timeout: SignedDuration,
    /// What follows a run of unknown outcome.
    pub on_unknown: UnknownOutcomePolicy,
}

/// Identity of one run of a tool; unique over the life of an Agent. Shown as `t12c1r1`.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ToolRunId {
    /// The turn, from 1.
    pub turn: i64,
    /// The model call within the turn whose answer asked for it, from 1; 0: no answer did, it fills a field of the hot
    /// state before the turn.
    pub call: u32,
    /// Its place among the tool calls of that answer, from 1.
    pub index: u32,
}

impl ToolRunId {
    /// Whether its result is for the hot state, and not for the model.
    #[must_use]
    pub fn is_refresh(self) -> bool {
        self.call == 0
    }
}

impl std::fmt::Display for ToolRunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "t{}c{}r{}", self.turn, self.call, self.index)
    }
}

/// One run of a tool, as the worker is to do it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolRun {
    /// Which.
    pub id: ToolRunId,
    /// [`ToolSpec::name`].
    pub name: String,
    /// Arguments that fit the tool's schema.
    pub arguments: Map<String, Value>,
    /// The same for each repeat of this run, and of no other run of any Agent: 32 hexadecimal digits.
    pub idempotency_key: String,
}

/// What became of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolOutcome {
    /// It ran.
    Done {
        /// What it said, for the model.
        text: String,
    },
    /// It said that it failed, or refused.
    Failed {
        /// What it said, for the model.
        text: String,
    },
    /// It certainly did not run: nothing was sent. A source that has not answered yet is waited for within the run's
    /// timeout first, since a restart repeats runs before sources are known.
    Unavailable {
        /// Why, for the model.
        message: String,
    },
    /// It was sent and gave no answer: it may have run.
    Unknown {
        /// Why, for the model.
        message: String,
    },
}
