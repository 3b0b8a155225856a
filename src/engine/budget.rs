//! Waiting for room in a budget: what a refused call does to the loop, and when it is tried again.
//!
//! A refused call was never made: its turn stays as it is, no error is counted, and the same call is tried again with
//! its next attempt. That happens when the refusal's own moment has come; when the [`BudgetState`] changed; and, where
//! others hold the room and nobody knows for how long, every [`PROBE_INTERVAL`]. But for the first, such an attempt is made
//! while the reason still holds, and the reason goes once the call was let through: a loop that waits among many is
//! Paused the whole time, and not Running for an instant each time somebody gave something back.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::budget_health::BudgetHealth;
use super::effects::{EffectBuffer, call_line};
use super::machine::Engine;
use super::snapshot::{ActivePause, CallStep};
use super::{EngineEffect, RecordKind, time_math};
use crate::api::failure::{CallFailure, FailureKind};
use crate::api::status::PauseReason;

/// Time between two attempts at a call while others hold the room that it needs.
pub const PROBE_INTERVAL: SignedDuration = SignedDuration::from_secs(15);
/// Wait before another attempt when the budget changed while the refused one was under way.
pub const PROBE_DELAY: SignedDuration = SignedDuration::from_secs(1);
/// An attempt that was not refused for so long was let through: a gateway reserves before it calls, and waits ten seconds
/// for room at most.
pub const PROBE_TIMEOUT: SignedDuration = SignedDuration::from_secs(15);

/// What limits the calls, as far as the loop has to know. A level: hearing it twice does nothing more.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct BudgetState {
    /// Another number whenever a refused call may have become possible.
    pub revision: u64,
    /// The smallest number of tokens that a whole limit leaves to one call; `None`: not limited.
    pub tokens: Option<u64>,
    /// A person must act before any call is made: time alone brings no room.
    pub held: bool,
    /// A budget with `onExhausted: Stop` is spent: the loop is Stopped until room was added. What happened, and what to
    /// do.
    pub stop: Option<String>,
    /// What limits have left, for the model.
    #[serde(skip)]
    pub health: Vec<BudgetHealth>,
}

/// When a held call is tried although its reason holds.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeState {
    /// At this moment.
    At(Timestamp),
    /// It was sent; when nobody has refused it by this moment, the reason is gone.
    Sent(Timestamp),
}

/// The reason that a refusal of this kind gives the loop; `None`: it is not of a budget.
pub(super) fn reason_of(kind: FailureKind) -> Option<PauseReason> {
    match kind {
        FailureKind::BudgetExhausted => Some(PauseReason::BudgetExhausted),
        FailureKind::TokensPerHour => Some(PauseReason::TokensPerHour),
        FailureKind::TotalTokens => Some(PauseReason::TotalTokens),
        FailureKind::TotalCost => Some(PauseReason::TotalCost),
        FailureKind::CallExceedsLimit => Some(PauseReason::CallExceedsLimit),
        FailureKind::BudgetAsk => Some(PauseReason::BudgetAsk),
        FailureKind::BudgetUnavailable => Some(PauseReason::BudgetUnavailable),
        FailureKind::BoundViolated => Some(PauseReason::BoundViolated),
        FailureKind::LoopDetected => Some(PauseReason::LoopDetected),
        FailureKind::Unreachable
        | FailureKind::Timeout
        | FailureKind::RateLimited
        | FailureKind::QuotaExceeded
        | FailureKind::AuthenticationFailed
        | FailureKind::BadResponse
        | FailureKind::ContextExceeded
        | FailureKind::Cancelled
        | FailureKind::LinkLost
        | FailureKind::Fenced
        | FailureKind::Interrupted
        | FailureKind::RecordFailed => None,
    }
}

/// Whether a reason goes when there is room. `BoundViolated` and `LoopDetected` are a person's to clear.
pub(super) fn waits_for_room(reason: PauseReason) -> bool {
    match reason {
        PauseReason::BudgetExhausted
        | PauseReason::TokensPerHour
        | PauseReason::TotalTokens
        | PauseReason::TotalCost
        | PauseReason::CallExceedsLimit
        | PauseReason::BudgetAsk
        | PauseReason::BudgetUnavailable => true,
        PauseReason::BoundViolated
        | PauseReason::LoopDetected
        | PauseReason::SuspendedBySpec
        | PauseReason::ProviderRateLimit
        | PauseReason::ModelUnreachable
        | PauseReason::AuthenticationFailed
        | PauseReason::QuotaExceeded
        | PauseReason::ModelRefused
        | PauseReason::MaxConsecutiveTurns
        | PauseReason::ActionsPerMinute
        | PauseReason::RateWindow
        | PauseReason::OutsideActiveHours
        | PauseReason::ConsecutiveErrors
        | PauseReason::CrashLoop
        | PauseReason::LinkLost => false,
    }
}

/// Whether a reason of unknown end may be gone any moment: others hold the room, or nobody could be asked for it.
fn is_worth_probing(reason: PauseReason) -> bool {
    matches!(
        reason,
        PauseReason::BudgetExhausted | PauseReason::TokensPerHour | PauseReason::BudgetUnavailable
    )
}

impl Engine {
    /// The newest word about what limits the calls.
    pub(super) fn budget_changed(&mut self, budget: BudgetState, out: &mut EffectBuffer) {
        if budget == self.state.budget {
            return;
        }
        let before = std::mem::replace(&mut self.state.budget, budget);
        if before.revision != self.state.budget.revision {
            self.probe_at(out.now);
        }
        if let Some(message) = self.state.budget.stop.clone() {
            self.cancel_for_budget(message, out);
        }
    }

    /// The gateway refused a call for a limit on what may be spent.
    pub(super) fn handle_budget_refusal(&mut self, reason: PauseReason, failure: CallFailure, out: &mut EffectBuffer) {
        if let (FailureKind::CallExceedsLimit, Some(compaction)) = (failure.kind, self.compaction()) {
            self.shorten_compaction(compaction, out);
            return;
        }
        let limit = self
            .state
            .budget
            .tokens
            .filter(|_| self.state.turn.is_some() && !self.is_heartbeat());
        if let (FailureKind::CallExceedsLimit, Some(limit)) = (failure.kind, limit)
            && self.shrink_for_limit(limit, out)
        {
            return;
        }
        // Of several limits, the one that refused last is named.
        self.state.reasons.retain(|reason, _| !waits_for_room(*reason));
        let turn = self.state.turn.as_ref();
        let asked_under = turn.map_or(self.state.pre_check.asked_under, |turn| turn.asked_under);
        let probe = if !waits_for_room(reason) {
            None
        } else if asked_under != self.state.budget.revision {
            // The refusal may speak of the budget as it was.
            Some(ProbeState::At(time_math::after(out.now, PROBE_DELAY)))
        } else if failure.resumes_at.is_none() && is_worth_probing(reason) && !self.state.budget.held {
            Some(ProbeState::At(time_math::after(out.now, PROBE_INTERVAL)))
        } else {
            None
        };
        let hold = ActivePause {
            until: failure.resumes_at.filter(|_| waits_for_room(reason)),
            message: failure.message,
            probe,
        };
        self.state.reasons.insert(reason, hold);
    }

    /// Tries held calls from this moment on, unless one is under way.
    fn probe_at(&mut self, moment: Timestamp) {
        for (reason, hold) in &mut self.state.reasons {
            if waits_for_room(*reason) && !matches!(hold.probe, Some(ProbeState::Sent(_))) {
                hold.probe = Some(ProbeState::At(moment));
            }
        }
    }

    /// An attempt goes out: reasons that are tried know.
    pub(super) fn probes_sent(&mut self, now: Timestamp) {
        for hold in self.state.reasons.values_mut() {
            if let Some(ProbeState::At(_)) = hold.probe {
                hold.probe = Some(ProbeState::Sent(time_math::after(now, PROBE_TIMEOUT)));
            }
        }
        self.note_revision();
    }

    /// What is asked now is asked under the budget as it is.
    fn note_revision(&mut self) {
        let revision = self.state.budget.revision;
        match &mut self.state.turn {
            Some(turn) => turn.asked_under = revision,
            None => self.state.pre_check.asked_under = revision,
        }
    }

    /// The call in flight came to an end that is no refusal: there was room for it.
    pub(super) fn clear_probed_pauses(&mut self) {
        let sent = |hold: &ActivePause| matches!(hold.probe, Some(ProbeState::Sent(_)));
        let reasons: Vec<PauseReason> = self
            .state
            .reasons
            .iter()
            .filter(|(_, hold)| sent(hold))
            .map(|(reason, _)| *reason)
            .collect();
        for reason in reasons {
            self.clear_pause(reason);
        }
    }

    /// The call in flight came to an end before anybody looked for room.
    pub(super) fn reschedule_probes(&mut self, now: Timestamp) {
        for hold in self.state.reasons.values_mut() {
            if let Some(ProbeState::Sent(_)) = hold.probe {
                hold.probe = Some(ProbeState::At(now));
            }
        }
    }

    /// From when on the loop may act as far as its reasons go: at any time, not before a probe, or `None`.
    pub(super) fn free_from(&self) -> Option<Timestamp> {
        let moment = |hold: &ActivePause| match hold.probe {
            Some(ProbeState::At(moment)) => Some(moment),
            Some(ProbeState::Sent(_)) => Some(Timestamp::MIN),
            None => None,
        };
        self.state
            .reasons
            .values()
            .try_fold(Timestamp::MIN, |latest, hold| Some(moment(hold)?.max(latest)))
    }

    /// Whether a spent budget with `onExhausted: Stop` keeps the loop down.
    pub(super) fn is_stopped_by_budget(&self) -> bool {
        self.state.budget.stop.is_some() && self.state.reasons.contains_key(&PauseReason::BudgetExhausted)
    }

    /// Cuts the call in flight. Its answer is lost and what it cost is not; the same call is made again once there is
    /// room. So are runs of tools that only look; others finish, and no further one begins.
    fn cancel_for_budget(&mut self, message: String, out: &mut EffectBuffer) {
        if let Some(turn) = self.state.turn.as_mut().filter(|turn| turn.step == CallStep::Tools) {
            turn.asked_under = self.state.budget.revision;
            self.cancel_runs(false, out);
            self.handle_budget_refusal(PauseReason::BudgetExhausted, budget_stop_failure(message), out);
            return;
        }
        let Some(call) = self.call_in_flight() else {
            return;
        };
        out.push(EngineEffect::CancelCall { call });
        self.in_flight = false;
        match &mut self.state.turn {
            Some(turn) => turn.step = CallStep::Due(out.now),
            None => self.close_call_before_turn(out.now),
        }
        self.note_revision();
        let note = FailureKind::BudgetExhausted.as_ref();
        out.record(call_line(RecordKind::CallFailed, call, note, Vec::new()));
        self.handle_budget_refusal(PauseReason::BudgetExhausted, budget_stop_failure(message), out);
    }
}

/// The refusal of a budget that stops its loops.
pub(super) fn budget_stop_failure(message: String) -> CallFailure {
    CallFailure {
        kind: FailureKind::BudgetExhausted,
        message,
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}
