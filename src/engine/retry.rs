//! What follows a failed attempt at a call: another attempt, after how long, or none.

use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::{SignedDuration, Timestamp};

use super::{CallId, clock};
use crate::api::failure::{Failure, FailureKind};

/// Attempts at one call within a turn.
pub const MAX_ATTEMPTS: u32 = 5;
/// A wait longer than this is shown as a pause.
pub const LONG_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// Longest wait a server can ask for.
pub const LONGEST_RETRY_AFTER: SignedDuration = SignedDuration::from_mins(15);
/// How long a call waits when the gateway says that the link is lost and the worker has not seen it yet.
pub const LINK_PROBE: SignedDuration = SignedDuration::from_secs(10);
const FIRST_WAIT: SignedDuration = SignedDuration::from_secs(1);
const LONGEST_WAIT: SignedDuration = SignedDuration::from_secs(60);

/// What follows a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another attempt after this wait.
    Retry(SignedDuration),
    /// Another attempt once the link is back; the failure does not count.
    AwaitLink,
    /// None: the turn has failed.
    GiveUp,
}

/// Decides, but for refusals of a budget, which are no failures, after attempt `call` failed, the `failures`-th of this call that counts (from 1).
pub fn next(failure: &Failure, call: CallId, failures: u32, now: Timestamp) -> Next {
    match failure.kind {
        FailureKind::LinkLost => Next::AwaitLink,
        FailureKind::QuotaExceeded
        | FailureKind::AuthenticationFailed
        | FailureKind::BadResponse
        | FailureKind::RecordFailed
        | FailureKind::Fenced
        | FailureKind::BudgetExhausted
        | FailureKind::TokensPerHour
        | FailureKind::TotalTokens
        | FailureKind::TotalCost
        | FailureKind::CallExceedsLimit
        | FailureKind::BudgetAsk
        | FailureKind::BudgetUnavailable
        | FailureKind::BoundViolated
        | FailureKind::LoopDetected => Next::GiveUp,
        FailureKind::Unreachable
        | FailureKind::Timeout
        | FailureKind::RateLimited
        | FailureKind::Cancelled
        | FailureKind::Interrupted
            if failures >= MAX_ATTEMPTS =>
        {
            Next::GiveUp
        }
        FailureKind::Interrupted => Next::Retry(SignedDuration::ZERO),
        FailureKind::Unreachable | FailureKind::Timeout | FailureKind::RateLimited | FailureKind::Cancelled => {
            Next::Retry(jitter(call, failures, now).max(retry_after(failure)))
        }
    }
}

/// How long the server asked to wait; zero when it did not.
pub fn retry_after(failure: &Failure) -> SignedDuration {
    failure
        .retry_after_milliseconds
        .map_or(SignedDuration::ZERO, |milliseconds| {
            SignedDuration::from_millis(i64::try_from(milliseconds).unwrap_or(i64::MAX)).min(LONGEST_RETRY_AFTER)
        })
}

/// Full jitter: anything from nothing to the doubled wait. Hashed from the call and the moment, so that the engine
/// stays deterministic and yet many loops that failed together do not come back together.
fn jitter(call: CallId, failures: u32, now: Timestamp) -> SignedDuration {
    let longest = clock::doubled(FIRST_WAIT, failures.saturating_sub(1), LONGEST_WAIT);
    let mut hasher = DefaultHasher::new();
    (call, now).hash(&mut hasher);
    let steps = u64::try_from(longest.as_millis()).unwrap_or(0).saturating_add(1);
    SignedDuration::from_millis(i64::try_from(hasher.finish() % steps).unwrap_or(0))
}
