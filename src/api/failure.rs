//! Kinds of failed model calls: values of `status.lastError.kind` and reasons of `ModelAvailable`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoStaticStr};

/// Why a model call failed. A closed set: it is a label, a reason and a log field.
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
    /// No connection, an interrupted stream, or a server error (5xx, 408, 409). Retryable.
    Unreachable,
    /// No answer within `timeoutSeconds`, or no data for `streamIdleTimeoutSeconds`. Retryable.
    Timeout,
    /// 429 because of a rate limit. Retryable after Retry-After.
    RateLimited,
    /// 402, or 429 because of a quota. User action is required; not retried in this turn.
    QuotaExceeded,
    /// 401 or 403. User action is required; not retried in this turn.
    AuthenticationFailed,
    /// The server rejected the request (any other 4xx), or its answer could not be parsed.
    BadResponse,
    /// The request exceeds the model's context window. It must be shortened before a retry.
    ContextExceeded,
    /// The worker or a stop cancelled the call.
    Cancelled,
    /// The pod has had no contact with the controller for the whole run lease.
    LinkLost,
    /// A newer pod runs this Agent's loop; this one is fenced.
    Fenced,
    /// The gateway ended during the call: its usage is unknown and no answer is kept. Retryable.
    Interrupted,
    /// The gateway could not write its own record, so it made no call.
    RecordFailed,
    /// An AgentBudget has no room for the call; none was made. Continues at `resumesAt`, or when room is added.
    BudgetExhausted,
    /// `guardrails.tokensPerHour` has no room for the call; none was made.
    TokensPerHour,
    /// `guardrails.total.tokens` has no room for the call; none was made. The limit must be raised.
    TotalTokens,
    /// `guardrails.total.costUSD` has no room for the call; none was made. The limit must be raised.
    TotalCost,
    /// The bound of the call exceeds a whole limit, so that it can never be made. User action is required.
    CallExceedsLimit,
    /// A budget is exhausted and an approval was requested; no call was made.
    BudgetAsk,
    /// The limits of this Agent are unknown or unusable: a budget is missing or required, or a price is unknown.
    BudgetUnavailable,
    /// The server billed more than the bound of the call. No more calls until `agentloop.dev/resume`.
    BoundViolated,
    /// The gateway saw the loop repeat itself or spend far above the pace of its budget, and `loopDetection.mode`
    /// pauses it.
    LoopDetected,
}

impl FailureKind {
    /// Whether the call was refused by a limit on the Agent's spending.
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

    /// Whether a retry of the same call may succeed.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Unreachable | Self::Timeout | Self::RateLimited | Self::Interrupted
        )
    }
}

/// A failed model call. `message` names the fix and never contains text of a prompt, an answer or a secret.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {message}")]
#[serde(rename_all = "camelCase")]
pub struct CallFailure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// What happened, at most 1 KiB.
    pub message: String,
    /// Delay that the server requested, in milliseconds; clamped to 15 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_milliseconds: Option<u64>,
    /// For an exhausted budget: when there is room for the call. Absent: the budget does not reset, or the time is
    /// unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumes_at: Option<jiff::Timestamp>,
}
