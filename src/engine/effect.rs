//! Effects: what the driver has to carry out for the engine.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use super::answer_schema::AnswerSchema;
use super::ids::CallId;
#[cfg(doc)]
use super::input::EngineInput;
use super::message::{Message, ToolDefinition};
use super::purpose::CallPurpose;
use super::record::JournalRecord;
use super::tool::{ToolRun, ToolRunId};

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
