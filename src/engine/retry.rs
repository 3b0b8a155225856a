//! What follows a failed attempt at a call: another attempt, after how long, or none.
//!
//! Trouble outside the turn (a server that is away, a rate limit, a key that is refused) never ends it: what the turn has
//! done so far was paid for, and is still right when the trouble is over.

use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::{SignedDuration, Timestamp};

use super::{CallId, time_math};
use crate::api::failure::{CallFailure, FailureKind};
use crate::api::status::PauseReason;

/// Attempts at one call after which a server that is away is shown as a pause.
pub const QUICK_ATTEMPTS: u32 = 5;
/// A wait longer than this is shown as a pause.
pub const LONG_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// Longest wait a server can ask for.
pub const LONGEST_RETRY_AFTER: SignedDuration = SignedDuration::from_mins(15);
/// How long a call waits when the gateway says that the link is lost and the worker has not seen it yet.
pub const LINK_PROBE: SignedDuration = SignedDuration::from_secs(10);
const FIRST_WAIT: SignedDuration = SignedDuration::from_secs(1);
const LONGEST_WAIT: SignedDuration = SignedDuration::from_secs(60);
/// The first wait for a server that is away; each further one is twice as long.
const FIRST_OUTAGE_WAIT: SignedDuration = SignedDuration::from_secs(15);
/// The longest of them.
const LONGEST_OUTAGE_WAIT: SignedDuration = SignedDuration::from_mins(5);
/// Between two attempts with a key or an account that a person has to mend.
pub const PERSON_WAIT: SignedDuration = SignedDuration::from_secs(60);

/// What follows a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// Another attempt after this wait.
    Retry(SignedDuration),
    /// Another attempt after this wait, which is long enough to be shown: the loop is paused for this reason.
    Pause(PauseReason, SignedDuration),
    /// Another attempt once the link is back; the failure does not count.
    AwaitLink,
    /// None: the turn has failed.
    GiveUp,
}

/// Decides, but for refusals of a budget, which are no failures, after attempt `call` failed, the `failures`-th of this call that counts (from 1).
pub fn decide(failure: &CallFailure, call: CallId, failures: u32, now: Timestamp) -> RetryDecision {
    let asked = retry_after(failure);
    match failure.kind {
        FailureKind::LinkLost => RetryDecision::AwaitLink,
        FailureKind::AuthenticationFailed => {
            RetryDecision::Pause(PauseReason::AuthenticationFailed, PERSON_WAIT.max(asked))
        }
        FailureKind::QuotaExceeded => RetryDecision::Pause(PauseReason::QuotaExceeded, PERSON_WAIT.max(asked)),
        FailureKind::BadResponse
        | FailureKind::ContextExceeded
        | FailureKind::Fenced
        | FailureKind::BudgetExhausted
        | FailureKind::TokensPerHour
        | FailureKind::TotalTokens
        | FailureKind::TotalCost
        | FailureKind::CallExceedsLimit
        | FailureKind::BudgetAsk
        | FailureKind::BudgetUnavailable
        | FailureKind::BoundViolated
        | FailureKind::LoopDetected => RetryDecision::GiveUp,
        FailureKind::Interrupted if failures < QUICK_ATTEMPTS => RetryDecision::Retry(SignedDuration::ZERO),
        FailureKind::Unreachable
        | FailureKind::Timeout
        | FailureKind::RateLimited
        | FailureKind::Cancelled
        | FailureKind::Interrupted
        | FailureKind::RecordFailed => {
            let away = failures >= QUICK_ATTEMPTS;
            let own = if away {
                outage_wait(call, failures - QUICK_ATTEMPTS, now)
            } else {
                let longest = time_math::doubled(FIRST_WAIT, failures.saturating_sub(1), LONGEST_WAIT);
                up_to(longest, call, now)
            };
            let wait = own.max(asked);
            if !away && wait <= LONG_WAIT {
                RetryDecision::Retry(wait)
            } else if failure.kind == FailureKind::RateLimited {
                RetryDecision::Pause(PauseReason::ProviderRateLimit, wait)
            } else {
                RetryDecision::Pause(PauseReason::ModelUnreachable, wait)
            }
        }
    }
}

/// The wait before the attempt after `pauses` others in one outage: from half of the doubled wait to all of it.
fn outage_wait(call: CallId, pauses: u32, now: Timestamp) -> SignedDuration {
    let half = time_math::doubled(FIRST_OUTAGE_WAIT, pauses, LONGEST_OUTAGE_WAIT) / 2;
    half + up_to(half, call, now)
}

/// How long the server asked to wait; zero when it did not.
pub fn retry_after(failure: &CallFailure) -> SignedDuration {
    failure
        .retry_after_milliseconds
        .map_or(SignedDuration::ZERO, |milliseconds| {
            SignedDuration::from_millis(i64::try_from(milliseconds).unwrap_or(i64::MAX)).min(LONGEST_RETRY_AFTER)
        })
}

/// Full jitter: anything from nothing to `longest`. Hashed from the call and the moment, so that the engine stays
/// deterministic and yet many loops that failed together do not come back together.
fn up_to(longest: SignedDuration, call: CallId, now: Timestamp) -> SignedDuration {
    let mut hasher = DefaultHasher::new();
    (call, now).hash(&mut hasher);
    let steps = u64::try_from(longest.as_millis()).unwrap_or(0).saturating_add(1);
    SignedDuration::from_millis(i64::try_from(hasher.finish() % steps).unwrap_or(0))
}
