//! Kinds of failed model calls: values of `status.lastError.kind` and reasons of `ModelAvailable`. One table says what each
//! kind means to the gateway, the engine and the conditions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoStaticStr};

use super::pause::PauseReason;

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

/// What a failed call of one kind means for the loop and for users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureFacts {
    /// What the loop does next.
    pub next: AfterFailure,
    /// What it says about the model's server.
    pub model: ModelEvidence,
    /// The model cannot be used until a user has changed something: its key, its account, or what it bills.
    pub needs_user: bool,
}

/// What follows a failed attempt at a call, and the reason that is shown while the loop waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// A limit refused the call before it was sent: the loop pauses, and the failure does not count.
    Pause(PauseReason),
    /// Another attempt, after waits that grow. A long wait is a pause.
    Retry(PauseReason),
    /// Another attempt at once, a few times, and then as for `Retry`.
    RetryAtOnce(PauseReason),
    /// Another attempt once a minute, since a user has to act first.
    RetrySlowly(PauseReason),
    /// Another attempt once there is contact with the controller; the failure does not count.
    AwaitContact,
    /// No attempt would help: the turn has failed.
    GiveUp,
}

/// What a failed call says about the model's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelEvidence {
    /// Nothing: the call did not reach it, or was cut.
    None,
    /// It answers, but not now: `ModelAvailable` keeps its state.
    Busy,
    /// It cannot be used: `ModelAvailable` is False.
    Unusable,
}

impl FailureKind {
    /// The facts about this kind. To add a kind, add its row here.
    #[must_use]
    pub const fn facts(self) -> FailureFacts {
        use AfterFailure::{AwaitContact, GiveUp, Pause, Retry, RetryAtOnce, RetrySlowly};
        use FailureFacts as Row;
        use ModelEvidence::{Busy, Unusable};
        use PauseReason as Reason;
        match self {
            Self::Unreachable | Self::Timeout => Row::new(Retry(Reason::ModelUnreachable)).shows(Unusable),
            Self::RateLimited => Row::new(Retry(Reason::ProviderRateLimit)).shows(Busy),
            Self::QuotaExceeded => Row::new(RetrySlowly(Reason::QuotaExceeded)).shows(Unusable).for_user(),
            Self::AuthenticationFailed => Row::new(RetrySlowly(Reason::AuthenticationFailed))
                .shows(Unusable)
                .for_user(),
            Self::BadResponse | Self::ContextExceeded => Row::new(GiveUp).shows(Unusable),
            Self::Cancelled | Self::RecordFailed => Row::new(Retry(Reason::ModelUnreachable)),
            Self::LinkLost => Row::new(AwaitContact),
            Self::Fenced => Row::new(GiveUp),
            Self::Interrupted => Row::new(RetryAtOnce(Reason::ModelUnreachable)),
            Self::BudgetExhausted => Row::new(Pause(Reason::BudgetExhausted)),
            Self::TokensPerHour => Row::new(Pause(Reason::TokensPerHour)),
            Self::TotalTokens => Row::new(Pause(Reason::TotalTokens)),
            Self::TotalCost => Row::new(Pause(Reason::TotalCost)),
            Self::CallExceedsLimit => Row::new(Pause(Reason::CallExceedsLimit)),
            Self::BudgetAsk => Row::new(Pause(Reason::BudgetAsk)),
            Self::BudgetUnavailable => Row::new(Pause(Reason::BudgetUnavailable)),
            Self::BoundViolated => Row::new(Pause(Reason::BoundViolated)).shows(Unusable).for_user(),
            Self::LoopDetected => Row::new(Pause(Reason::LoopDetected)),
        }
    }

    /// The reason for which the loop pauses if a limit refused the call before it was sent. `None`: no limit did.
    #[must_use]
    pub const fn refused_by(self) -> Option<PauseReason> {
        match self.facts().next {
            AfterFailure::Pause(reason) => Some(reason),
            AfterFailure::Retry(_)
            | AfterFailure::RetryAtOnce(_)
            | AfterFailure::RetrySlowly(_)
            | AfterFailure::AwaitContact
            | AfterFailure::GiveUp => None,
        }
    }

    /// The reason for which the loop pauses between attempts at the call. `None`: there are none, or they need no pause.
    #[must_use]
    pub const fn retried_under(self) -> Option<PauseReason> {
        match self.facts().next {
            AfterFailure::Retry(reason) | AfterFailure::RetryAtOnce(reason) | AfterFailure::RetrySlowly(reason) => {
                Some(reason)
            }
            AfterFailure::Pause(_) | AfterFailure::AwaitContact | AfterFailure::GiveUp => None,
        }
    }
}

impl FailureFacts {
    const fn new(next: AfterFailure) -> Self {
        Self {
            next,
            model: ModelEvidence::None,
            needs_user: false,
        }
    }

    const fn shows(self, model: ModelEvidence) -> Self {
        Self { model, ..self }
    }

    const fn for_user(self) -> Self {
        Self {
            needs_user: true,
            ..self
        }
    }
}

/// A failed model call. `message` names the fix and never contains text of a prompt, an answer or a secret.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
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

impl CallFailure {
    /// A failure that does not say when to retry.
    #[must_use]
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            retry_after_milliseconds: None,
            resumes_at: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;
    use crate::pause::PauseEnd;

    #[test]
    fn a_pause_between_attempts_ends_with_the_next_one_and_that_of_a_limit_does_not() {
        for kind in FailureKind::iter() {
            let end = |reason: PauseReason| reason.facts().end;
            assert!(
                kind.retried_under()
                    .map(end)
                    .is_none_or(|end| end == PauseEnd::NextAttempt),
                "{kind}"
            );
            assert_ne!(kind.refused_by().map(end), Some(PauseEnd::NextAttempt), "{kind}");
        }
    }

    #[test]
    fn every_reason_that_waits_for_room_is_raised_by_a_failure_of_one_kind() {
        for reason in PauseReason::iter().filter(|reason| matches!(reason.facts().end, PauseEnd::Room { .. })) {
            let kinds = FailureKind::iter().filter(|kind| kind.refused_by() == Some(reason));
            assert_eq!(kinds.count(), 1, "{reason}");
        }
    }
}
