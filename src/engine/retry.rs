//! What follows a failed attempt at a call: another attempt and after how long, or none.
//!
//! A failure outside the turn (a server that is down, a rate limit, a rejected key) never ends it: the work of the turn
//! so far was paid for, and is still valid when the failure is over.

use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::{SignedDuration, Timestamp};

use super::{CallId, time_math};
use agentloop_api::failure::{AfterFailure, CallFailure};
use agentloop_api::pause::PauseReason;

/// Attempts at one call after which an unreachable server is shown as a pause.
pub const QUICK_ATTEMPTS: u32 = 5;
/// A wait longer than this is shown as a pause.
pub const LONG_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// The longest wait that a server can request.
pub const MAX_RETRY_AFTER: SignedDuration = SignedDuration::from_mins(15);
/// How long a call waits if the gateway reports a lost link before the worker has noticed.
pub const LINK_PROBE: SignedDuration = SignedDuration::from_secs(10);
const FIRST_WAIT: SignedDuration = SignedDuration::from_secs(1);
const MAX_WAIT: SignedDuration = SignedDuration::from_secs(60);
/// The first wait for an unreachable server; each further one doubles it.
const FIRST_OUTAGE_WAIT: SignedDuration = SignedDuration::from_secs(15);
/// The longest wait for an unreachable server.
const MAX_OUTAGE_WAIT: SignedDuration = SignedDuration::from_mins(5);
/// Between two attempts with a key or an account that a person has to fix.
pub const PERSON_WAIT: SignedDuration = SignedDuration::from_secs(60);

/// What follows a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// Another attempt after this wait.
    Retry(SignedDuration),
    /// Another attempt after this wait, which is long enough to be shown as a pause for this reason.
    Pause(PauseReason, SignedDuration),
    /// Another attempt once the link is restored; the failure does not count.
    AwaitLink,
    /// No further attempt: the turn has failed.
    GiveUp,
}

/// Decides what follows a failed attempt `call`, the `failures`-th of this call that counts (from 1). Budget refusals
/// are not failures and are handled elsewhere.
pub fn decide(failure: &CallFailure, call: CallId, failures: u32, now: Timestamp) -> RetryDecision {
    let asked = retry_after(failure);
    match failure.kind.facts().next {
        AfterFailure::AwaitContact => RetryDecision::AwaitLink,
        AfterFailure::RetrySlowly(reason) => RetryDecision::Pause(reason, PERSON_WAIT.max(asked)),
        AfterFailure::GiveUp | AfterFailure::Pause(_) => RetryDecision::GiveUp,
        AfterFailure::RetryAtOnce(_) if failures < QUICK_ATTEMPTS => RetryDecision::Retry(SignedDuration::ZERO),
        AfterFailure::Retry(reason) | AfterFailure::RetryAtOnce(reason) => {
            // The first attempts follow quickly, with full jitter. From then on the outage is shown as a pause, with
            // longer waits.
            let away = failures >= QUICK_ATTEMPTS;
            let own = if away {
                outage_wait(call, failures - QUICK_ATTEMPTS, now)
            } else {
                let longest = time_math::doubled(FIRST_WAIT, failures.saturating_sub(1), MAX_WAIT);
                up_to(longest, call, now)
            };
            let wait = own.max(asked);
            if !away && wait <= LONG_WAIT {
                RetryDecision::Retry(wait)
            } else {
                RetryDecision::Pause(reason, wait)
            }
        }
    }
}

/// The wait before the attempt after `pauses` earlier ones in the same outage: between half of the doubled wait and all
/// of it.
fn outage_wait(call: CallId, pauses: u32, now: Timestamp) -> SignedDuration {
    let half = time_math::doubled(FIRST_OUTAGE_WAIT, pauses, MAX_OUTAGE_WAIT) / 2;
    half + up_to(half, call, now)
}

/// How long the server asked to wait; zero if it did not.
pub fn retry_after(failure: &CallFailure) -> SignedDuration {
    failure
        .retry_after_milliseconds
        .map_or(SignedDuration::ZERO, |milliseconds| {
            SignedDuration::from_millis(i64::try_from(milliseconds).unwrap_or(i64::MAX)).min(MAX_RETRY_AFTER)
        })
}

/// Full jitter: between zero and `longest`. A hash of the call and the time keeps the engine deterministic, and still
/// spreads the retries of many loops that failed together.
fn up_to(longest: SignedDuration, call: CallId, now: Timestamp) -> SignedDuration {
    let mut hasher = DefaultHasher::new();
    (call, now).hash(&mut hasher);
    let steps = u64::try_from(longest.as_millis()).unwrap_or(0).saturating_add(1);
    SignedDuration::from_millis(i64::try_from(hasher.finish() % steps).unwrap_or(0))
}
