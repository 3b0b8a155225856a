//! Events of AgentBudgets: one for each transition, made of the status before and the one written over it. Pure.

use super::words;
use crate::api::AgentBudget;
use crate::api::budget::AgentBudgetStatus;
use crate::api::condition::{self, ConditionType};
use crate::controller::agent::events::Notice;

/// What a written status has to tell.
pub(super) fn of_status(budget: &AgentBudget, old: &AgentBudgetStatus, new: &AgentBudgetStatus) -> Vec<Notice> {
    let holds = |status: &AgentBudgetStatus, type_| {
        condition::find(&status.conditions, type_).is_some_and(|condition| condition.status == "True")
    };
    let turned = |type_| {
        (holds(new, type_) && !holds(old, type_))
            .then(|| condition::find(&new.conditions, type_))
            .flatten()
    };
    let mut notices = Vec::new();
    for type_ in [ConditionType::NearLimit, ConditionType::Exhausted] {
        if let Some(now) = turned(type_) {
            notices.push(Notice::warning(type_.as_ref(), "Count", now.message.clone()));
        }
    }
    if holds(old, ConditionType::Exhausted) && !holds(new, ConditionType::Exhausted) {
        notices.push(Notice::normal("Recovered", "Count", "there is room for calls again"));
    }
    let refused = |status: &AgentBudgetStatus| {
        condition::find(&status.conditions, ConditionType::Accepted)
            .filter(|condition| condition.status == "False")
            .cloned()
    };
    if let (None, Some(now)) = (refused(old), refused(new)) {
        notices.push(Notice::warning(&now.reason, "Validate", now.message));
    }
    notices.extend(of_gates(old, new));
    notices.extend(of_limits(budget, old, new));
    notices
}

fn of_gates(old: &AgentBudgetStatus, new: &AgentBudgetStatus) -> Vec<Notice> {
    let mut notices = Vec::new();
    let answers = |status: &AgentBudgetStatus| status.last_handled_requests.clone().unwrap_or_default();
    let (before, now) = (answers(old), answers(new));
    if now.approve != before.approve {
        let by = now.approved_by.unwrap_or_default();
        notices.push(Notice::normal("AskAnswered", "Approve", format!("approved by {by}")));
    }
    if now.deny != before.deny {
        notices.push(Notice::normal(
            "AskAnswered",
            "Deny",
            "denied: its Agents wait for the window",
        ));
    }
    let asked = |status: &AgentBudgetStatus| status.gates.first().map(|gate| gate.id.clone());
    if let Some(id) = asked(new).filter(|id| asked(old).as_ref() != Some(id)) {
        let note = format!("gate {id} asks for more; the condition Exhausted says how to answer");
        notices.push(Notice::warning("AskOpened", "Ask", note));
    }
    notices
}

fn of_limits(budget: &AgentBudget, old: &AgentBudgetStatus, new: &AgentBudgetStatus) -> Option<Notice> {
    let (before, now) = (old.limits?, new.limits?);
    let kind = now
        .kinds()
        .find(|kind| now.get(*kind) > before.get(*kind) && before.get(*kind).is_some())?;
    let limit = now.get(kind)?;
    let note = format!("{} may be used in this window now", words::exact(kind, limit));
    let answered = new.last_handled_requests != old.last_handled_requests;
    let topped_up = answered || !budget.spec.top_ups.is_empty();
    let reason = if topped_up { "ToppedUp" } else { "LimitRaised" };
    Some(Notice::normal(reason, "Add", note))
}
