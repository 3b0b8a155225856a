//! Waiting for room in a budget: how a refused call holds the loop, and when it is retried.
//!
//! A refused call was never made: its turn stays as it is, no error is counted, and the call is retried as its next
//! attempt. It is retried at the time that the refusal named; when the [`BudgetState`] changed; and, if other loops
//! hold the room for an unknown time, every [`PROBE_INTERVAL`]. Except in the first case the attempt is a probe: it is
//! made while the reason still holds, and the reason clears once the call was let through. A loop that competes with
//! many others is therefore Paused the whole time, and not Running for an instant whenever one of them releases some
//! room.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::context::budget_health::BudgetHealth;
use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_api::pause::{PauseEnd, PauseReason};

/// Time between two attempts at a call while other loops hold the room that it needs.
pub const PROBE_INTERVAL: SignedDuration = SignedDuration::from_secs(15);
/// Delay before the next attempt if the budget changed while the refused one was under way.
pub const PROBE_DELAY: SignedDuration = SignedDuration::from_secs(1);
/// A probe that is not refused within this time was let through: a gateway reserves before it calls, and waits at most
/// ten seconds for room.
pub const PROBE_TIMEOUT: SignedDuration = SignedDuration::from_secs(15);

/// The limits on calls, as far as the loop needs them. A level: a repeated value has no effect.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct BudgetState {
    /// Changes whenever a refused call may have become possible.
    pub revision: u64,
    /// The smallest token limit that a whole call must fit into; `None`: not limited.
    pub tokens: Option<u64>,
    /// A person must act before any call is made: waiting frees no room.
    pub held: bool,
    /// Set while a budget with `onExhausted: Stop` is spent, which stops the loop until room is added: what happened,
    /// and how to fix it.
    pub stop: Option<String>,
    /// What is left of each limit, for the model.
    #[serde(skip)]
    pub health: Vec<BudgetHealth>,
}

/// When a held call is probed although its reason still holds.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeState {
    /// Due at this time.
    At(Timestamp),
    /// Sent; if it is not refused by this time, the reason clears.
    Sent(Timestamp),
}

/// Whether a reason without a known end may clear at any time: other loops hold the room, or no gateway could be asked.
pub(super) fn is_worth_probing(reason: PauseReason) -> bool {
    matches!(reason.facts().end, PauseEnd::Room { probed: true })
}

/// The refusal of a budget that stops its loops.
pub(crate) fn budget_stop_failure(message: String) -> CallFailure {
    CallFailure::new(FailureKind::BudgetExhausted, message)
}
