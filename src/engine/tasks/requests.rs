//! Requests: tasks in a loop whose mode is not Task. A request is answered in a turn of its own conversation, beside the
//! agent's own work, which continues as if there had been none.
//!
//! Owns its first message, its limits, and what happens to requests when the loop ends. The sleep of the loop, its schedule
//! and its history stay as they are.

use jiff::{SignedDuration, Timestamp};

use super::response::TaskEnding;
use super::{EndedTask, TaskChange, TaskOffer, TaskOrigin, TaskResponse};
use crate::effects::{EffectBuffer, journal_line};
use crate::machine::Engine;
use crate::modes::ModeCallDecision;
use crate::runtime_mark::without_marks;
use crate::settings::TaskSettings;
use crate::{JournalRecord, RecordKind};
use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_support::clock::rfc3339_seconds;

/// The limits of a request, which are the defaults of `spec.task`. Of model calls, `guardrails.maxCallsPerTurn` is the limit.
pub static REQUEST_LIMITS: TaskSettings = TaskSettings {
    prompt: None,
    min_interval: None,
    idle_pod: None,
    max_iterations: u32::MAX,
    max_tokens: 100_000,
    max_duration: SignedDuration::from_secs(300),
    response_schema: None,
    answer_schema: None,
};

/// The result of a call of a tool of the mode, which are offered in each turn since the provider's prompt cache begins with
/// them.
pub(crate) fn reject_mode_tool(name: &str) -> ModeCallDecision {
    ModeCallDecision::Rejected(format!(
        "not run: {name} is for your own work; answer the request with a text and without a tool call"
    ))
}

impl Engine {
    /// Whether a request waits to be answered beside the agent's own work.
    pub(crate) fn has_request(&self) -> bool {
        !self.runs_tasks() && !self.tasks.is_empty()
    }

    /// The first message of the turn that answers the next request.
    pub(crate) fn request_opening(&self, now: Timestamp) -> String {
        let Some(TaskOffer { id, origin, prompt, .. }) = self.next_task() else {
            return String::new();
        };
        let from = match origin {
            TaskOrigin::Request(user) => format!(" from {user}"),
            TaskOrigin::Spec | TaskOrigin::Sensor(_) => String::new(),
        };
        format!(
            "Turn {}, {}: request {id}{from}, beside your own work. Your first answer that calls no tool is sent to whoever \
             asked, and ends this conversation: answer this request and nothing else. Your own work continues afterwards.\n\n{}",
            self.state.totals.next_turn(),
            rfc3339_seconds(now),
            without_marks(prompt)
        )
    }

    /// The loop ends: requests that wait fail, in the order of their arrival.
    pub(crate) fn fail_waiting_requests(&mut self, out: &mut EffectBuffer) {
        if self.runs_tasks() {
            return;
        }
        for TaskOffer { id, origin, .. } in self.tasks.drain() {
            let failure = CallFailure::new(FailureKind::Cancelled, "the loop has ended");
            let ending = TaskEnding::Failed(failure);
            let ended = EndedTask {
                id,
                kind: origin.kind(),
                started_at: out.now,
                completed_at: out.now,
                outcome: ending.outcome(),
                reason: None,
                iterations: 0,
                tokens: 0,
                cost: 0,
            };
            let note = format!("{}: {}", ended.id, ended.outcome);
            out.record(JournalRecord {
                task: Some(Box::new(TaskChange::Ended(TaskResponse::new(&ended, ending, None)))),
                ..journal_line(RecordKind::TaskEnded, self.turn_number(), note)
            });
            self.state.tasks.ended(ended);
        }
    }
}
