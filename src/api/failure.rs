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
    /// The request does not fit into the model's context window. The same request never will: it must become shorter.
    ContextExceeded,
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
    /// An AgentBudget has no room for the call; none was made. Goes on at `resumesAt`, or when room is added.
    BudgetExhausted,
    /// `guardrails.tokensPerHour` has no room for the call; none was made.
    TokensPerHour,
    /// `guardrails.total.tokens` has no room for the call; none was made. Only a raised limit helps.
    TotalTokens,
    /// `guardrails.total.costUSD` has no room for the call; none was made. Only a raised limit helps.
    TotalCost,
    /// The call's worst case is more than a whole limit: it can never be made. A person must act.
    CallExceedsLimit,
    /// A budget is spent and a person has been asked for more; none was made.
    BudgetAsk,
    /// What limits this Agent is not known, or cannot be used: a budget is missing or required, a price is unknown.
    BudgetUnavailable,
    /// The server billed more than a call can cost by the stated bound. No more calls until `agentloop.dev/resume`.
    BoundViolated,
    /// Seen from outside the loop repeats itself or burns far above its budget's pace, and the Agent asked to be paused.
    LoopDetected,
}

impl FailureKind {
    /// Whether no call was made because of a limit on what the Agent may spend.
    #[must_use]
    pub fn is_of_a_budget(self) -> bool {
        match self {
            Self::BudgetExhausted
            | Self::TokensPerHour
            | Self::TotalTokens
            | Self::TotalCost
            | Self::CallExceedsLimit
            | Self::BudgetAsk
            | Self::BudgetUnavailable
            | Self::BoundViolated
            | Self::LoopDetected => true,
            Self::Unreachable
            | Self::Timeout
            | Self::RateLimited
            | Self::QuotaExceeded
            | Self::AuthenticationFailed
            | Self::BadResponse
            | Self::ContextExceeded
            | Self::Cancelled
            | Self::LinkLost
            | Self::Fenced
            | Self::Interrupted
            | Self::RecordFailed => false,
        }
    }

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
    /// Of a spent budget: when there is room for the call by itself. Absent: never, or not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumes_at: Option<jiff::Timestamp>,
}
