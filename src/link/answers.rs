//! Answers of people to gates, as clients send them to the controller.
//!
//! | route | does |
//! |---|---|
//! | `POST /v1/namespaces/{namespace}/agents/{name}/gates/{gate}`, controller | a [`GateAnswerBody`] → [`AnsweredGate`] |
//!
//! An answer names the hash of the arguments that the person saw, so it is never one to another call. Repeats are harmless.

use serde::{Deserialize, Serialize};

/// Maximum number of bytes of the body of an answer.
pub(super) const MAX_ANSWER_BYTES: usize = 4 * 1024;

/// What a person decided.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum GateVerdict {
    /// The call may run, once.
    Approve,
    /// The call does not run.
    Deny,
}

/// The body of an answer.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GateAnswerBody {
    /// The decision.
    pub answer: GateVerdict,
    /// Hash of the arguments that the person saw, from `status.gates`.
    pub arguments_hash: String,
}

/// An answer to a gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateAnswerRequest {
    /// Namespace of the Agent.
    pub namespace: String,
    /// Name of the Agent.
    pub name: String,
    /// Id of the gate.
    pub gate: String,
    /// The decision, and what it is about.
    pub body: GateAnswerBody,
}

/// An answer that is recorded.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AnsweredGate {
    /// Id of the gate.
    pub gate: String,
    /// The decision.
    pub answer: GateVerdict,
    /// The user whose decision it is. Absent for a denial by annotation, which has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}
