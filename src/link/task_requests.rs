//! Messages that carry a task of a user from the controller's API to the worker of an Agent, and the acknowledgement back.
//!
//! | hop | carries |
//! |---|---|
//! | client → controller | `POST /v1/namespaces/{namespace}/agents/{name}/tasks` [`TaskRequestBody`] → [`AcceptedTask`], once the worker has it on disk |
//! | controller → gateway | the event `task` of `GET /v1/directives`, a [`RequestedTask`] |
//! | gateway → worker | `GET /v1/tasks` on the socket |
//! | worker → gateway | `POST /v1/tasks/ack` [`TaskAck`] |
//! | gateway → controller | `POST /v1/tasks/ack` [`RelayedTaskAck`] |
//!
//! No hop stores anything before the worker: a client that gets no answer repeats its request with the same id, which has no
//! further effect.

use serde::{Deserialize, Serialize};

/// Maximum number of bytes of the body of a request; its prompt may need escapes.
pub(super) const MAX_REQUEST_BYTES: usize = 128 * 1024;
/// Maximum number of bytes of a prompt.
pub const MAX_PROMPT_BYTES: usize = 64 * 1024;
/// Maximum number of characters of an id that a client chooses.
pub const MAX_ID_LENGTH: usize = 63;
/// Maximum number of bytes of the source of untrusted content.
pub const MAX_SOURCE_BYTES: usize = 320;
/// What the ids of such tasks begin with, so that they differ from those of other tasks.
pub const ID_PREFIX: &str = "request-";
/// Seconds that the controller waits for the [`TaskAck`].
pub const ACCEPT_SECONDS: u64 = 5;

/// The body of a request.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TaskRequestBody {
    /// The task.
    pub prompt: String,
    /// The idempotency key: a request with a known id has no effect. Absent: a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Source of untrusted content in the prompt. Absent: the user wrote all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrusted_content: Option<String>,
}

impl TaskRequestBody {
    /// What is wrong with it, and how to fix it; `None`: nothing.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if self.prompt.trim().is_empty() {
            return Some("prompt is empty".to_owned());
        }
        if self.prompt.len() > MAX_PROMPT_BYTES {
            let length = self.prompt.len();
            return Some(format!(
                "prompt has {length} bytes; the limit is {MAX_PROMPT_BYTES}: shorten it"
            ));
        }
        let source = self.untrusted_content.as_deref();
        if source.is_some_and(|source| source.trim().is_empty() || source.len() > MAX_SOURCE_BYTES) {
            return Some(format!("untrustedContent must have 1 to {MAX_SOURCE_BYTES} bytes"));
        }
        let is_valid = |id: &String| {
            let characters = id
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
            characters && (1..=MAX_ID_LENGTH).contains(&id.len())
        };
        let valid = self.id.as_ref().is_none_or(is_valid);
        (!valid).then(|| format!("id must have 1 to {MAX_ID_LENGTH} letters, digits, '.', '_' or '-'"))
    }
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskRequest {
    /// Namespace of the Agent.
    pub namespace: String,
    /// Name of the Agent.
    pub name: String,
    /// The task.
    pub body: TaskRequestBody,
}

/// A task on its way to the worker.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RequestedTask {
    /// Uid of the Agent.
    pub receiver: String,
    /// Id of the task.
    pub id: String,
    /// The user whose task it is.
    pub user: String,
    /// The task.
    pub prompt: String,
    /// Source of untrusted content in the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrusted_content: Option<String>,
}

/// What became of a task that was offered to the worker.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskReceipt {
    /// It is on disk.
    Accepted,
    /// It was on disk already.
    Repeated,
    /// Too many tasks wait.
    QueueFull,
    /// The loop is stopping or has ended.
    Stopped,
}

/// More about a task that was not accepted. A controller of an older version goes by the receipt alone.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskRefusal {
    /// Its id is that of a task of another user. The receipt is [`TaskReceipt::Stopped`].
    IdOfAnotherUser,
    /// Too many responses wait to be delivered. The receipt is [`TaskReceipt::QueueFull`].
    ResponsesWait,
    /// Of a later version.
    #[serde(other)]
    Other,
}

/// The worker's answer to a task.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TaskAck {
    /// Id of the task.
    pub id: String,
    /// What became of it.
    pub receipt: TaskReceipt,
    /// The cursor of the Agent's events after which the task's own begin; 0: unknown.
    #[serde(default)]
    pub after: i64,
    /// Why it was not accepted, if the receipt does not say it all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<TaskRefusal>,
    /// The user whose task it is; absent: of an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// An acknowledgement of a worker, relayed by its gateway.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RelayedTaskAck {
    /// Epoch of the pod.
    pub epoch: i64,
    /// The worker's acknowledgement.
    pub ack: TaskAck,
}

/// How a task was accepted.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum AcceptedTaskState {
    /// Now.
    Accepted,
    /// By an earlier request with the same id.
    Repeated,
}

/// A task that the Agent will answer, or has answered.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AcceptedTask {
    /// Id of the task, as in `status.recentActivations` and in the note of the event `task:ended`.
    pub id: String,
    /// How it was accepted.
    pub state: AcceptedTaskState,
    /// The cursor of the Agent's events after which the task's own begin.
    pub after: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(prompt: &str, id: Option<&str>) -> TaskRequestBody {
        TaskRequestBody {
            prompt: prompt.into(),
            id: id.map(Into::into),
            untrusted_content: None,
        }
    }

    #[test]
    fn a_request_is_checked_up_to_its_limits() {
        let longest = "x".repeat(MAX_PROMPT_BYTES);
        let id = "a".repeat(MAX_ID_LENGTH);
        for good in [body("x", None), body(&longest, Some("A-b_c.9")), body("x", Some(&id))] {
            assert_eq!(good.problem(), None);
        }
        for (bad, problem) in [
            (body(" \n", None), "prompt is empty"),
            (body(&(longest + "x"), None), "prompt has 65537 bytes"),
            (body("x", Some("")), "id must have"),
            (body("x", Some(&(id + "a"))), "id must have"),
            (body("x", Some("a b")), "id must have"),
        ] {
            let found = bad.problem().unwrap();
            assert!(found.starts_with(problem), "{found}");
        }
    }
}
