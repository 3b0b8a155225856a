//! Why a loop is paused, and what each reason means: one table, read by the engine, the conditions and the counts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoStaticStr};

use super::condition::ConditionType;

/// Why a loop is Paused or Stopped. Each reason is cleared by its own rule only.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum PauseReason {
    /// `spec.suspend`; cleared by setting it to false.
    SuspendedBySpec,
    /// The provider asked for a delay (Retry-After); cleared at its end.
    ProviderRateLimit,
    /// The model's server does not respond; the open turn waits, and the call is retried with exponential backoff of up
    /// to 5 minutes. Cleared at the next retry or by a resume request.
    ModelUnreachable,
    /// The server rejects the API key (401, 403); the open turn waits, and the call is retried once a minute. Cleared
    /// at the next retry or by a resume request.
    AuthenticationFailed,
    /// The account at the server has no credit or quota (402, or 429 because of a quota); the open turn waits, and the
    /// call is retried once a minute. Cleared at the next retry or by a resume request.
    QuotaExceeded,
    /// The model refused two or more consecutive turns; cleared by the cool-down or a resume request.
    ModelRefused,
    /// `guardrails.maxConsecutiveTurns`; cleared when the forced sleep ends.
    MaxConsecutiveTurns,
    /// `guardrails.actionsPerMinute`; cleared when the oldest of the counted actions is 60 s old.
    ActionsPerMinute,
    /// `guardrails.rateLimits`; cleared when there is room for the waiting call or tool run.
    RateWindow,
    /// `guardrails.activeHours`; cleared when the next window starts.
    OutsideActiveHours,
    /// `loop.maxConsecutiveErrors`; cleared by the cool-down or a resume request.
    ConsecutiveErrors,
    /// `guardrails.maxConsecutiveToolFailures`; cleared by the cool-down or a resume request.
    ConsecutiveToolFailures,
    /// The same turn ended the worker three times; cleared by the cool-down or a resume request.
    CrashLoop,
    /// No contact with the controller for 60 s; cleared when the link is restored.
    LinkLost,
    /// An AgentBudget has no room for the next call; cleared when it has, by its window, a top-up or a raised limit.
    BudgetExhausted,
    /// `guardrails.tokensPerHour` has no room for the next call; cleared when it has.
    TokensPerHour,
    /// `guardrails.total.tokens` has no room for the next call; cleared when the limit is raised.
    TotalTokens,
    /// `guardrails.total.costUSD` has no room for the next call; cleared when the limit is raised.
    TotalCost,
    /// The bound of the next call exceeds a whole limit; cleared when the limit is raised.
    CallExceedsLimit,
    /// A budget is exhausted and an approval was requested; cleared by the answer, or when the window has room.
    BudgetAsk,
    /// A tool call waits for an approval; cleared when it is approved or denied, or its gate expires.
    ToolCallNeedsApproval,
    /// The outcome of a tool call is unknown, and its repetition waits for an approval; cleared when it is approved or
    /// denied, or its gate expires.
    UnknownOutcome,
    /// The confidence that the goal will be reached is too low, or its estimate cannot be read, and the loop waits for an
    /// approval to continue; cleared when it is approved or denied, or its gate expires.
    LowConfidence,
    /// A loop in mode `Goal` repeats itself and waits for an approval to continue; cleared when it is approved or denied, or
    /// its gate expires.
    Escalated,
    /// The limits of the Agent are unknown or unusable; cleared when they are usable.
    BudgetUnavailable,
    /// The server billed more than the bound of a call; cleared by the request `agentloop.dev/resume`.
    BoundViolated,
    /// The loop repeats itself: cleared at the end of a forced sleep, or by `agentloop.dev/resume`. If detected by the
    /// gateway or the controller: cleared by `agentloop.dev/resume` only.
    LoopDetected,
}

/// What a pause for one reason means for the loop and for users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseFacts {
    /// It is a limit that was reached, as opposed to an outage or a user's request.
    pub is_guardrail: bool,
    /// What ends it. A resume request may end it earlier.
    pub end: PauseEnd,
    /// The annotation `agentloop.dev/resume` ends it.
    pub ends_on_resume: bool,
    /// It ends without a user even if the time of its end is unknown.
    pub recovers: bool,
    /// The condition of the Agent that shows it. `None`: it has none; `status.loop.reasons` names it.
    pub condition: Option<ConditionType>,
}

/// What ends a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseEnd {
    /// A change of `spec.suspend`.
    Spec,
    /// The end of a forced sleep, which is never longer than the longest sleep that an agent may choose.
    ForcedSleep,
    /// The oldest of the counted actions is 60 s old.
    ActionWindow,
    /// Its guardrail, which is asked again on each input.
    Recheck,
    /// The next attempt at the call, at the latest after the longest delay that a server may request.
    NextAttempt,
    /// The end of a cool-down. Each one in a row is longer, up to an hour.
    Cooldown,
    /// Contact with the controller.
    Contact,
    /// Room for the next call under a limit on spending. The leader knows when that is, so the clock of the loop does not
    /// bound the pause.
    Room {
        /// Room may come at any time without a change of the limits, since other loops release it: the call is tried
        /// regularly.
        probed: bool,
    },
    /// The answer to a gate, at the latest when the gate expires.
    Answer,
    /// Only a user.
    User,
}

impl PauseReason {
    /// The facts about this reason. To add a reason, add its row here.
    #[must_use]
    pub const fn facts(self) -> PauseFacts {
        use ConditionType as Shown;
        use PauseEnd::{ActionWindow, Answer, Contact, Cooldown, ForcedSleep, NextAttempt, Recheck, Room, Spec, User};
        use PauseFacts as Row;
        match self {
            Self::SuspendedBySpec => Row::outage(Spec, Some(Shown::Suspended)),
            Self::ProviderRateLimit => Row::outage(NextAttempt, Some(Shown::RateLimited)),
            Self::ModelUnreachable | Self::AuthenticationFailed | Self::QuotaExceeded => {
                Row::outage(NextAttempt, Some(Shown::ModelAvailable)).or_resume()
            }
            Self::ModelRefused => Row::outage(Cooldown, Some(Shown::ErrorLimitReached)).or_resume(),
            Self::MaxConsecutiveTurns => Row::guardrail(ForcedSleep, Shown::TurnLimitReached),
            Self::ActionsPerMinute => Row::guardrail(ActionWindow, Shown::RateLimited),
            Self::RateWindow => Row::guardrail(Recheck, Shown::RateLimited),
            Self::OutsideActiveHours => Row::guardrail(Recheck, Shown::OutsideActiveHours),
            Self::ConsecutiveErrors | Self::CrashLoop => Row::guardrail(Cooldown, Shown::ErrorLimitReached).or_resume(),
            Self::ConsecutiveToolFailures => Row::guardrail(Cooldown, Shown::ToolFailureLimitReached).or_resume(),
            Self::LinkLost => Row::outage(Contact, Some(Shown::LinkLost)).recovering(),
            Self::BudgetExhausted | Self::TokensPerHour => {
                Row::guardrail(Room { probed: true }, Shown::BudgetExhausted)
            }
            Self::TotalTokens | Self::TotalCost | Self::CallExceedsLimit => {
                Row::guardrail(Room { probed: false }, Shown::BudgetExhausted)
            }
            Self::BudgetAsk => Row::guardrail(Room { probed: false }, Shown::ApprovalPending),
            Self::LowConfidence | Self::Escalated => Row::guardrail(Answer, Shown::ApprovalPending),
            Self::ToolCallNeedsApproval | Self::UnknownOutcome => Row::outage(Answer, Some(Shown::ApprovalPending)),
            // `Accepted` shows what is wrong with the limits, since the controller finds it.
            Self::BudgetUnavailable => Row::outage(Room { probed: true }, None).recovering(),
            Self::BoundViolated => Row::outage(User, Some(Shown::ModelAvailable)).or_resume(),
            Self::LoopDetected => Row::guardrail(ForcedSleep, Shown::LoopDetected).or_resume(),
        }
    }
}

impl PauseFacts {
    const fn outage(end: PauseEnd, condition: Option<ConditionType>) -> Self {
        Self {
            is_guardrail: false,
            end,
            ends_on_resume: false,
            recovers: false,
            condition,
        }
    }

    const fn guardrail(end: PauseEnd, condition: ConditionType) -> Self {
        Self {
            is_guardrail: true,
            ..Self::outage(end, Some(condition))
        }
    }

    const fn or_resume(self) -> Self {
        Self {
            ends_on_resume: true,
            ..self
        }
    }

    const fn recovering(self) -> Self {
        Self { recovers: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    #[test]
    fn pauses_that_only_a_user_ends_and_cool_downs_end_on_resume() {
        for reason in PauseReason::iter() {
            let facts = reason.facts();
            if matches!(facts.end, PauseEnd::User | PauseEnd::Cooldown) {
                assert!(facts.ends_on_resume, "{reason}");
            }
        }
    }

    #[test]
    fn a_resume_request_ends_no_limit_on_spending() {
        for reason in PauseReason::iter() {
            let facts = reason.facts();
            assert!(
                !(facts.ends_on_resume && matches!(facts.end, PauseEnd::Room { .. })),
                "{reason}"
            );
        }
    }
}
