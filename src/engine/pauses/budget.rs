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
use crate::effects::{EffectBuffer, call_line};
use crate::machine::Engine;
use crate::snapshot::ActivePause;
use crate::{EngineEffect, RecordKind, time_math};
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

/// Whether a reason clears when there is room. `BoundViolated` and `LoopDetected` need a person.
pub(crate) fn waits_for_room(reason: PauseReason) -> bool {
    matches!(reason.facts().end, PauseEnd::Room { .. })
}

/// Whether a reason without a known end may clear at any time: other loops hold the room, or no gateway could be asked.
fn is_worth_probing(reason: PauseReason) -> bool {
    matches!(reason.facts().end, PauseEnd::Room { probed: true })
}

impl Engine {
    pub(crate) fn budget_changed(&mut self, budget: BudgetState, out: &mut EffectBuffer) {
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

    /// Handles a refusal by a limit on spending. `asked_under`: the revision of the budget when the call was sent.
    pub(crate) fn handle_budget_refusal(
        &mut self,
        reason: PauseReason,
        failure: CallFailure,
        asked_under: u64,
        out: &mut EffectBuffer,
    ) {
        if let (FailureKind::CallExceedsLimit, Some(compaction)) = (failure.kind, self.compaction()) {
            self.shorten_compaction(compaction, out);
            return;
        }
        let limit = self
            .state
            .budget
            .tokens
            .filter(|_| self.state.turn.is_some() && !self.turn_rules().own_session);
        // A prompt that exceeds a whole limit never fits: shrink it instead of waiting.
        if let (FailureKind::CallExceedsLimit, Some(limit)) = (failure.kind, limit)
            && self.shrink_for_limit(limit, out)
        {
            return;
        }
        // If several limits refuse, only the latest one is shown.
        self.state.reasons.retain(|reason, _| !waits_for_room(*reason));
        let probe = if !waits_for_room(reason) {
            None
        } else if asked_under != self.state.budget.revision {
            // The refusal may refer to the previous state of the budget.
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

    /// Schedules a probe of the held calls at this time, unless one is under way.
    fn probe_at(&mut self, moment: Timestamp) {
        for (reason, hold) in &mut self.state.reasons {
            if waits_for_room(*reason) && !matches!(hold.probe, Some(ProbeState::Sent(_))) {
                hold.probe = Some(ProbeState::At(moment));
            }
        }
    }

    /// An attempt is sent: it is the probe for every reason that has one scheduled.
    pub(crate) fn probes_sent(&mut self, now: Timestamp) {
        for hold in self.state.reasons.values_mut() {
            if let Some(ProbeState::At(_)) = hold.probe {
                hold.probe = Some(ProbeState::Sent(time_math::after(now, PROBE_TIMEOUT)));
            }
        }
    }

    /// The call in flight ended without a refusal, so there was room for it.
    pub(crate) fn clear_probed_pauses(&mut self) {
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

    /// The call in flight ended before room was checked: probe again.
    pub(crate) fn reschedule_probes(&mut self, now: Timestamp) {
        for hold in self.state.reasons.values_mut() {
            if let Some(ProbeState::Sent(_)) = hold.probe {
                hold.probe = Some(ProbeState::At(now));
            }
        }
    }

    /// The earliest time at which the pauses let the loop act: any time, the time of the next probe, or never (`None`).
    pub(crate) fn free_from(&self) -> Option<Timestamp> {
        let moment = |hold: &ActivePause| match hold.probe {
            Some(ProbeState::At(moment)) => Some(moment),
            Some(ProbeState::Sent(_)) => Some(Timestamp::MIN),
            None => None,
        };
        // A reason without a probe holds the loop. Otherwise every probe must be due, so the latest one counts.
        self.state
            .reasons
            .values()
            .try_fold(Timestamp::MIN, |latest, hold| Some(moment(hold)?.max(latest)))
    }

    /// Whether a spent budget with `onExhausted: Stop` stops the loop.
    pub(crate) fn is_stopped_by_budget(&self) -> bool {
        self.state.budget.stop.is_some() && self.state.reasons.contains_key(&PauseReason::BudgetExhausted)
    }

    /// Cancels the call in flight. Its answer is lost but its cost counts; the same call is made again once there is
    /// room. Read-only tool runs are cancelled too; others finish, and no new one starts.
    fn cancel_for_budget(&mut self, message: String, out: &mut EffectBuffer) {
        let (refusal, now_under) = (budget_stop_failure(message), self.state.budget.revision);
        let call = self.call_in_flight();
        if let Some(call) = call {
            out.push(EngineEffect::CancelCall { call });
            self.in_flight = false;
            self.close_attempt(out);
            let note = FailureKind::BudgetExhausted.as_ref();
            out.record(call_line(RecordKind::CallFailed, call, note, Vec::new()));
        } else if self.tool_batch().is_some() {
            self.cancel_runs(false, out);
        } else {
            return;
        }
        self.handle_budget_refusal(PauseReason::BudgetExhausted, refusal, now_under, out);
    }
}

/// The refusal of a budget that stops its loops.
pub(crate) fn budget_stop_failure(message: String) -> CallFailure {
    CallFailure {
        kind: FailureKind::BudgetExhausted,
        message,
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}
