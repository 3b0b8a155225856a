//! The engine: one loop's state, and the one function that changes it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Effect, Input, message::Message, settings::Settings};

/// Everything of an engine that outlives its process, without the transcript.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct Snapshot {}

/// One loop.
pub struct Engine {}

impl Engine {
    /// A loop that has never run.
    #[must_use]
    pub fn new(_settings: Settings) -> Self {
        Self {}
    }

    /// A loop as its journal left it; feed [`Input::Started`] next.
    #[must_use]
    pub fn restore(_settings: Settings, _snapshot: Snapshot, _transcript: Vec<Message>) -> Self {
        Self {}
    }

    /// Takes the newest instructions; used from the next call on. Never journalled.
    pub fn set_instructions(&mut self, _text: String) {}

    /// What to persist, see the module's contract.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }

    /// The one transition function. `now` may be earlier than before (a clock that was set back).
    pub fn handle(&mut self, _now: Timestamp, _input: Input) -> Vec<Effect> {
        Vec::new()
    }

    /// What the loop looks like from outside.
    #[must_use]
    pub fn view(&self) -> View {
        View::default()
    }
}

/// A loop as seen from outside; the worker turns it into a report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// One of the six states.
    pub state: crate::api::status::LoopState,
    /// Reasons that hold.
    pub reasons: Vec<Held>,
    /// Since when the state holds.
    pub since: Option<Timestamp>,
    /// When the loop goes on by itself: the latest `until` of all reasons, or the end of the sleep.
    pub resumes_at: Option<Timestamp>,
    /// What a sleep waits for.
    pub wake: Option<crate::api::status::Wake>,
    /// How the loop ended.
    pub outcome: Option<crate::api::status::Outcome>,
    /// Turns begun.
    pub turn: i64,
    /// Turns completed.
    pub turns_completed: i64,
    /// Failed turns in a row.
    pub consecutive_errors: u32,
    /// Turns since the last sleep.
    pub consecutive_turns: u32,
    /// Requests handled.
    pub handled: crate::api::status::HandledRequests,
    /// The last failure: when and what.
    pub last_error: Option<(Timestamp, crate::api::failure::Failure)>,
}

/// A reason that holds the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Which.
    pub reason: crate::api::status::PauseReason,
    /// When it clears by itself.
    pub until: Option<Timestamp>,
    /// What happened and what to do.
    pub message: String,
}
