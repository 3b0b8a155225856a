//! The response to a task.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::EndedTask;
use crate::machine::Engine;
use crate::message::Message;
use crate::modes::LoopPace;
use crate::modes::task::finish_tool;
use crate::turn::Turn;
use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_api::task::{TaskLimit, TaskOutcome};

/// How the turn of a task ended.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskEnding {
    /// With this result: a text, or what `spec.task.responseSchema` describes.
    Completed(Value),
    Failed(CallFailure),
    Limited(TaskLimit),
}

impl TaskEnding {
    #[must_use]
    pub const fn outcome(&self) -> TaskOutcome {
        match self {
            Self::Completed(_) => TaskOutcome::Completed,
            Self::Failed(_) => TaskOutcome::Failed,
            Self::Limited(_) => TaskOutcome::LimitReached,
        }
    }

    /// Why it failed.
    #[must_use]
    pub const fn failure(&self) -> Option<&CallFailure> {
        match self {
            Self::Failed(failure) => Some(failure),
            Self::Completed(_) | Self::Limited(_) => None,
        }
    }

    #[must_use]
    pub const fn limit(&self) -> Option<TaskLimit> {
        match self {
            Self::Limited(limit) => Some(*limit),
            Self::Completed(_) | Self::Failed(_) => None,
        }
    }
}

/// The response to a task, as it is stored and sent. Has the text of the model: never logged.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TaskResponse {
    pub id: String,
    pub outcome: TaskOutcome,
    /// Set only with [`TaskOutcome::Completed`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// Why there is no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Set only with [`TaskOutcome::LimitReached`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<TaskLimit>,
    /// Model calls.
    pub iterations: u32,
    /// Tokens, as far as the server reported them.
    pub tokens_used: u64,
    /// Source of untrusted content that the model had been shown: the result may repeat it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrusted_content: Option<String>,
}

impl TaskResponse {
    pub(super) fn new(ended: &EndedTask, ending: TaskEnding, untrusted_content: Option<String>) -> Self {
        let (result, error) = match ending {
            TaskEnding::Completed(result) => (Some(result), None),
            TaskEnding::Failed(failure) => (None, Some(failure.to_string())),
            TaskEnding::Limited(limit) => (None, Some(limit_message(limit).to_owned())),
        };
        Self {
            id: ended.id.clone(),
            outcome: ended.outcome,
            result,
            error,
            reason: ended.reason,
            iterations: ended.iterations,
            tokens_used: ended.tokens,
            untrusted_content,
        }
    }
}

impl Engine {
    /// How a task ends whose turn has ended with this pace: its conversation is the transcript's newest part.
    pub(crate) fn task_ending(&self, turn: &Turn, pace: &LoopPace) -> TaskEnding {
        if let LoopPace::Finish { result } = pace {
            return TaskEnding::Completed(result.clone());
        }
        if let Some(limit) = turn.limit() {
            return TaskEnding::Limited(limit);
        }
        let schema = self.settings.task().and_then(|task| task.response_schema.as_ref());
        match self.transcript.last().map(|message| &**message) {
            Some(Message::Assistant {
                text: Some(text),
                tool_calls,
                ..
            }) if tool_calls.is_empty() => TaskEnding::Completed(finish_tool::result_of(text, schema)),
            _ => {
                let message = "the model ended the task without an answer";
                TaskEnding::Failed(CallFailure::new(FailureKind::BadResponse, message))
            }
        }
    }
}

const fn limit_message(limit: TaskLimit) -> &'static str {
    match limit {
        TaskLimit::MaxIterations => "Task exceeded iteration limit",
        TaskLimit::MaxTokens => "Task exceeded token limit",
        TaskLimit::MaxDuration => "Task exceeded time limit",
        TaskLimit::LoopDetected => "Task was ended because the agent repeated itself",
    }
}
