//! Kinds of failed model calls, as they show in `status.lastError.kind` and as reasons of `ModelAvailable`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoStaticStr};

/// Why a model call gave no answer. A closed set: it is a label, a reason and a log field.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum FailureKind {
    /// No connection, a cut stream, or a server that failed (5xx, 408, 409). Worth another attempt.
    Unreachable,
    /// No answer within `timeoutSeconds`, or silence longer than `streamIdleTimeoutSeconds`. Worth another attempt.
    Timeout,
    /// 429 that is about rate. Worth another attempt after Retry-After.
    RateLimited,
    /// 402, or 429 that is about quota. A person must act; no attempt follows in this turn.
    QuotaExceeded,
    /// 401 or 403. A person must act; no attempt follows in this turn.
    AuthenticationFailed,
    /// The server refused the request (any other 4xx) or its answer could not be read.
    BadResponse,
    /// The worker or a stop cut the call.
    Cancelled,
    /// The pod has had no contact with the controller for the whole run lease.
    LinkLost,
    /// A newer pod runs this Agent's loop; this one may do nothing any more.
    Fenced,
    /// The gateway ended in the middle of the call: what it used is unknown, no answer is kept. Worth another attempt.
    Interrupted,
    /// The gateway's own record could not be written, so it made no call.
    RecordFailed,
}

impl FailureKind {
    /// Whether another attempt at the same call may help.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Unreachable | Self::Timeout | Self::RateLimited | Self::Interrupted
        )
    }
}

/// A failed model call. `message` names what to do and never carries text of a prompt, an answer or a secret.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {message}")]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// What kind.
    pub kind: FailureKind,
    /// What happened, at most 1 KiB.
    pub message: String,
    /// How long the server asked to wait, in milliseconds; clamped to 15 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_milliseconds: Option<u64>,
}
