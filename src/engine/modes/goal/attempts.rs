//! The attempts at a step: what their calls came to, when the next one may begin, and what it may not begin with.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::denials::EscalationCause;
use super::validation::EndedAttempt;
use super::{EQUAL_ERRORS, GoalState, MAX_HISTORY, MAX_SAID, goal};
use crate::context::prompt;
use crate::loop_detection::{ShortHash, signature};
use crate::modes::ModeContext;
use crate::runtime_mark::without_marks;
use crate::time_math;
use agentloop_api::status::GateKind;

/// Calls that are remembered as failed.
pub(super) const MAX_AVOIDED: usize = 32;
const MAX_WAIT: SignedDuration = SignedDuration::from_secs(1024);

/// The tool calls of the attempt under way.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub(super) struct StepAttempt {
    /// The number of its turn.
    pub(super) turn: i64,
    pub(super) began_at: Option<Timestamp>,
    pub(super) calls: u32,
    pub(super) failed: u32,
    /// Calls that were not rejected.
    pub(super) admitted: u32,
    /// Those that failed.
    pub(super) failures: Vec<ShortHash>,
    /// The result of the last one that failed.
    pub(super) error: String,
}

/// An attempt at a step, for the confidence check.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub(super) struct StepRecord {
    pub(super) step: u32,
    pub(super) attempt: u32,
    pub(super) error: Option<String>,
    /// The beginning of the text of its last answer.
    pub(super) text: String,
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttemptFailure<'a> {
    /// Its kind, for the history.
    pub(super) kind: &'a str,
    /// What the next attempt sees.
    pub(super) error: &'a str,
    /// What the agent wrote.
    pub(super) text: &'a str,
}

impl AttemptFailure<'_> {
    /// The kind of an attempt whose calls all failed. A failed turn has the kind of its failure.
    pub(super) const CALLS: &'static str = "ToolCallsFailed";
}

impl GoalState {
    /// Which attempt this is.
    pub(super) fn ended(&self, attempt: &StepAttempt) -> EndedAttempt {
        EndedAttempt {
            turn: attempt.turn,
            attempt: self.failed_attempts.saturating_add(1),
            began_at: attempt.began_at,
        }
    }

    pub(super) fn record(&mut self, error: Option<&str>, text: &str) {
        if self.history.len() >= MAX_HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(StepRecord {
            step: self.steps.saturating_add(1),
            attempt: self.failed_attempts.saturating_add(1),
            error: error.map(str::to_owned),
            text: prompt::truncate(text.trim(), MAX_SAID),
        });
    }

    /// An attempt failed: the next one begins later, or the next step.
    pub(super) fn attempt_failed(
        &mut self,
        attempt: StepAttempt,
        AttemptFailure { kind, error, text }: AttemptFailure<'_>,
        context: &ModeContext<'_>,
    ) {
        let Some(goal) = goal(context.settings) else {
            return;
        };
        self.report_failure(self.ended(&attempt), kind, context);
        let error = prompt::truncate(without_marks(error).trim(), MAX_SAID);
        self.record(Some(&error), text);
        self.avoided.extend(attempt.failures);
        let surplus = self.avoided.len().saturating_sub(MAX_AVOIDED);
        self.avoided.drain(..surplus);
        let hash = signature::text(&error);
        self.same_error = match self.same_error {
            (same, times) if same == hash => (hash, times.saturating_add(1)),
            _ => (hash, 1),
        };
        if self.same_error.1 >= EQUAL_ERRORS {
            self.repeats();
        }
        self.failed_attempts = self.failed_attempts.saturating_add(1);
        self.last_error = error;
        if self.failed_attempts >= goal.max_attempts {
            let last = std::mem::take(&mut self.last_error);
            self.next_step();
            self.last_error = format!("Failed after {} attempts, the last one: {last}", goal.max_attempts);
            self.steps = self.steps.saturating_add(1);
        } else {
            let wait = time_math::doubled(SignedDuration::from_secs(1), self.failed_attempts, MAX_WAIT);
            self.retry_at = Some(time_math::after(context.now, wait));
        }
    }

    /// The attempts at the current step are over.
    pub(super) fn next_step(&mut self) {
        self.failed_attempts = 0;
        self.retry_at = None;
        self.avoided.clear();
        self.denials.next_step();
        self.last_error.clear();
    }

    /// The loop repeats itself: a person decides.
    pub(super) fn repeats(&mut self) {
        self.approval = Some(GateKind::Escalated);
        self.because = EscalationCause::Repetition;
    }
}
