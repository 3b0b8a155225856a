//! Kubernetes Events of an Agent: one for each transition that a user may want to know about. They never contain text
//! of prompts. Pure.
//!
//! The first start of an Agent emits only `LoopStarted`, after its status is written, because each Event is a write
//! too. A recreated pod emits `PodCreated`. Events are sent in the background and may be lost; the status is
//! authoritative.

use super::apply::AppliedPlan;
use super::goal_conditions;
use super::intent::ReplaceReason;
use crate::api::AgentStatus;
use crate::api::condition::{self, ConditionType};
use crate::api::status::{LoopOutcome, LoopState};
use crate::controller::runtime::events::KubeEvent;

/// Guardrail conditions that emit an Event when they become True.
const GUARDRAILS: [ConditionType; 7] = [
    ConditionType::BudgetExhausted,
    ConditionType::ApprovalPending,
    ConditionType::RateLimited,
    ConditionType::TurnLimitReached,
    ConditionType::ErrorLimitReached,
    ConditionType::ToolFailureLimitReached,
    ConditionType::LinkLost,
];

/// The Events for the transitions between two statuses. Pure.
pub(super) fn from_status(old: &AgentStatus, new: &AgentStatus) -> Vec<KubeEvent> {
    let mut notices = Vec::new();
    let turned = |type_, status: &str| {
        let now = condition::find(&new.conditions, type_).filter(|now| now.status == status)?;
        let before = condition::find(&old.conditions, type_).is_some_and(|before| before.status == status);
        (!before).then_some(now)
    };
    for type_ in GUARDRAILS {
        if let Some(held) = turned(type_, "True") {
            notices.push(KubeEvent::warning(&held.type_, "Pause", held.message.clone()));
        }
    }
    if let Some(held) = turned(ConditionType::LoopDetected, "True") {
        notices.push(KubeEvent::warning(&held.type_, "Watch", held.message.clone()));
    }
    for (type_, action) in [
        (ConditionType::Accepted, "Validate"),
        (ConditionType::ModelAvailable, "CallModel"),
        (ConditionType::LightModelAvailable, "CallModel"),
    ] {
        if let Some(held) = turned(type_, "False") {
            notices.push(KubeEvent::warning(&held.reason, action, held.message.clone()));
        }
    }
    // Expected every day, so not a warning.
    if let Some(held) = turned(ConditionType::OutsideActiveHours, "True") {
        notices.push(KubeEvent::normal(&held.type_, "Pause", held.message.clone()));
    }
    if turned(ConditionType::Suspended, "True").is_some() {
        notices.push(KubeEvent::normal(
            "Suspended",
            "Suspend",
            "spec.suspend was set; the state is kept",
        ));
    }
    let was_suspended = condition::find(&old.conditions, ConditionType::Suspended).is_some_and(|c| c.status == "True");
    if was_suspended && turned(ConditionType::Suspended, "False").is_some() {
        notices.push(KubeEvent::normal("Resumed", "Resume", "spec.suspend was cleared"));
    }
    notices.extend(from_loop(old, new));
    notices
}

fn from_loop(old: &AgentStatus, new: &AgentStatus) -> Option<KubeEvent> {
    let (before, now) = (old.r#loop.as_ref()?, new.r#loop.as_ref()?);
    match (before.outcome, now.outcome) {
        (None, Some(LoopOutcome::Completed)) => {
            let note = "the agent ended its loop";
            return Some(KubeEvent::normal(LoopOutcome::Completed.as_ref(), "End", note));
        }
        (None, Some(LoopOutcome::Cancelled)) => {
            let note = "a user stopped the loop";
            return Some(KubeEvent::normal(LoopOutcome::Cancelled.as_ref(), "End", note));
        }
        (None, Some(LoopOutcome::Idle)) => {
            let held = condition::find(&new.conditions, ConditionType::IdleTimeoutReached)?;
            return Some(KubeEvent::warning(&held.type_, "End", held.message.clone()));
        }
        (None, Some(outcome @ (LoopOutcome::Failed | LoopOutcome::Escalated))) => {
            let is_goal = condition::find(&new.conditions, ConditionType::Succeeded).is_some();
            let note = if is_goal {
                goal_conditions::event_note(outcome, new.goal.as_ref())
            } else {
                let held = condition::find(&new.conditions, ConditionType::LoopDetected);
                let note = held.map_or(goal_conditions::ENDED_WITHOUT_SUCCESS, |held| held.message.as_str());
                note.to_owned()
            };
            return Some(KubeEvent::warning(outcome.as_ref(), "End", note));
        }
        // Neither the end nor the next start is worth an Event: both are regular, and frequent.
        (None, Some(LoopOutcome::ScaledToZero)) => return None,
        (Some(_), _) | (None, None) => {}
    }
    let up = matches!(now.state, LoopState::Running | LoopState::Sleeping | LoopState::Paused);
    (before.state == LoopState::Starting && up).then(|| {
        let note = format!("the loop is running in epoch {}", now.epoch);
        KubeEvent::normal("LoopStarted", "Start", note)
    })
}

/// The Event for leases that a gateway lost with its volume. Its journal is on the same one. Pure.
pub(in crate::controller) fn volume_restored(leases: u64) -> KubeEvent {
    let plural = if leases == 1 { "" } else { "s" };
    let note = format!(
        "the volume was reset to an earlier state, for example from a snapshot: the rest of its {leases} lease{plural} \
         counts as spent, and what the loop did since then is missing from its journal"
    );
    KubeEvent::warning("VolumeRestored", "Watch", note)
}

/// The Event for what was done to the pod, if any. Pure.
pub(super) fn from_pod(applied: &AppliedPlan) -> Option<KubeEvent> {
    let epoch = applied.pod.as_ref().map_or(0, |pod| pod.epoch);
    if applied.created.is_some() && epoch > 1 {
        let note = format!("created the pod of epoch {epoch}");
        return Some(KubeEvent::normal("PodCreated", "Create", note));
    }
    let why = match applied.replaced? {
        ReplaceReason::Outdated => "the spec changed",
        ReplaceReason::Stopped => "its loop was stopped and is being resumed",
        ReplaceReason::Ended => "the pod had terminated",
        ReplaceReason::Foreign => "it was created for an earlier Agent of this name",
    };
    Some(KubeEvent::normal(
        "PodReplaced",
        "Delete",
        format!("deleted the pod; a new one will be created: {why}"),
    ))
}
