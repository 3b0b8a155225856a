//! Events of AgentBudgets: one for each transition, derived from the previous status and the new one. Pure.

use super::format;
use crate::api::AgentBudget;
use crate::api::budget::AgentBudgetStatus;
use crate::api::condition::{self, ConditionType};
use crate::controller::runtime::KubeEvent;

pub(super) fn from_status(budget: &AgentBudget, old: &AgentBudgetStatus, new: &AgentBudgetStatus) -> Vec<KubeEvent> {
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
            notices.push(KubeEvent::warning(type_.as_ref(), "Count", now.message.clone()));
        }
    }
    if holds(old, ConditionType::Exhausted) && !holds(new, ConditionType::Exhausted) {
        notices.push(KubeEvent::normal(
            "Recovered",
            "Count",
            "the budget has room for calls again",
        ));
    }
    let refused = |status: &AgentBudgetStatus| {
        condition::find(&status.conditions, ConditionType::Accepted)
            .filter(|condition| condition.status == "False")
            .cloned()
    };
    if let (None, Some(now)) = (refused(old), refused(new)) {
        notices.push(KubeEvent::warning(&now.reason, "Validate", now.message));
    }
    notices.extend(from_gates(old, new));
    notices.extend(from_limits(budget, old, new));
    notices
}

fn from_gates(old: &AgentBudgetStatus, new: &AgentBudgetStatus) -> Vec<KubeEvent> {
    let mut notices = Vec::new();
    let answers = |status: &AgentBudgetStatus| status.last_handled_requests.clone().unwrap_or_default();
    let (before, now) = (answers(old), answers(new));
    if now.approve != before.approve {
        let by = now.approved_by.unwrap_or_default();
        notices.push(KubeEvent::normal("AskAnswered", "Approve", format!("approved by {by}")));
    }
    if now.deny != before.deny {
        notices.push(KubeEvent::normal(
            "AskAnswered",
            "Deny",
            "denied: the Agents wait until the window has room",
        ));
    }
    let asked = |status: &AgentBudgetStatus| status.gates.first().map(|gate| gate.id.clone());
    if let Some(id) = asked(new).filter(|id| asked(old).as_ref() != Some(id)) {
        let note = format!("gate {id} asks for a top-up; see the condition Exhausted for how to answer");
        notices.push(KubeEvent::warning("AskOpened", "Ask", note));
    }
    notices
}

fn from_limits(budget: &AgentBudget, old: &AgentBudgetStatus, new: &AgentBudgetStatus) -> Option<KubeEvent> {
    let (before, now) = (old.limits?, new.limits?);
    let kind = now
        .kinds()
        .find(|kind| now.get(*kind) > before.get(*kind) && before.get(*kind).is_some())?;
    let limit = now.get(kind)?;
    let note = format!("the limit of this window is now {}", format::exact(kind, limit));
    let answered = new.last_handled_requests != old.last_handled_requests;
    let topped_up = answered || !budget.spec.top_ups.is_empty();
    let reason = if topped_up { "ToppedUp" } else { "LimitRaised" };
    Some(KubeEvent::normal(reason, "Add", note))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn status(fields: &Value) -> AgentBudgetStatus {
        serde_json::from_value(fields.clone()).unwrap()
    }

    fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
        json!({"conditions": [{
            "type": type_, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]})
    }

    /// Lines of `reason: note`; those of warnings start with `!`.
    fn notices(spec: &Value, old: &Value, new: &Value) -> Vec<String> {
        let mut all = json!({"limits": {"tokens": 5}, "window": {"lifetime": {}}});
        for (key, value) in spec.as_object().unwrap() {
            all[key] = value.clone();
        }
        let budget = AgentBudget::new("team", serde_json::from_value(all).unwrap());
        let made = from_status(&budget, &status(old), &status(new));
        let line = |notice: KubeEvent| {
            let mark = if notice.warning { "!" } else { "" };
            format!("{mark}{}: {}", notice.reason, notice.note)
        };
        made.into_iter().map(line).collect()
    }

    #[test]
    fn a_condition_that_turns_is_one_event_and_one_that_stays_none() {
        let none = json!({});
        for type_ in ["NearLimit", "Exhausted"] {
            let held = condition(type_, "True", "Why", "the message");
            let cleared = condition(type_, "False", "Inactive", "");
            for before in [&none, &cleared] {
                assert_eq!(notices(&none, before, &held), [format!("!{type_}: the message")]);
            }
            let later = condition(type_, "True", "Why", "another message");
            assert_eq!(notices(&none, &held, &later), [""; 0]);
            let recovered = notices(&none, &held, &cleared);
            let expected: &[&str] = match type_ {
                "Exhausted" => &["Recovered: the budget has room for calls again"],
                _ => &[],
            };
            assert_eq!(recovered, expected);
        }
    }

    #[test]
    fn a_spec_that_is_refused_is_a_warning_once_with_its_reason() {
        let (none, good) = (json!({}), condition("Accepted", "True", "Accepted", ""));
        let bad = condition("Accepted", "False", "InvalidSpec", "spec.window is wrong");
        assert_eq!(notices(&none, &good, &bad), ["!InvalidSpec: spec.window is wrong"]);
        assert_eq!(notices(&none, &bad, &bad), [""; 0]);
        assert_eq!(notices(&none, &bad, &good), [""; 0]);
    }

    #[test]
    fn each_gate_and_each_answer_causes_one_event() {
        let none = json!({});
        let gate = |id: &str| {
            json!({"gates": [{
                "id": id, "kind": "BudgetAsk", "argumentsHash": "ab", "openedAt": "2026-01-01T00:00:00Z",
            }]})
        };
        let opened = notices(&none, &none, &gate("ask-1"));
        assert_eq!(
            opened,
            ["!AskOpened: gate ask-1 asks for a top-up; see the condition Exhausted for how to answer"]
        );
        assert_eq!(notices(&none, &gate("ask-1"), &gate("ask-1")), [""; 0]);
        assert_eq!(notices(&none, &gate("ask-1"), &gate("ask-2")).len(), 1);
        let approved = json!({"lastHandledRequests": {"approve": "ask-1:ab", "approvedBy": "ann"}});
        assert_eq!(
            notices(&none, &gate("ask-1"), &approved),
            ["AskAnswered: approved by ann"]
        );
        assert_eq!(notices(&none, &approved, &approved), [""; 0]);
        let denied = json!({"lastHandledRequests": {"deny": "ask-1"}});
        assert_eq!(
            notices(&none, &gate("ask-1"), &denied),
            ["AskAnswered: denied: the Agents wait until the window has room"]
        );
    }

    #[test]
    fn a_raised_limit_causes_an_event_and_a_lowered_one_does_not() {
        let none = json!({});
        let limits = |tokens: i64| json!({"limits": {"tokens": tokens}});
        let more = "the limit of this window is now 11 tokens";
        assert_eq!(
            notices(&none, &limits(10), &limits(11)),
            [format!("LimitRaised: {more}")]
        );
        let topped_up = json!({"topUps": [{"id": "a", "tokens": 1}]});
        assert_eq!(
            notices(&topped_up, &limits(10), &limits(11)),
            [format!("ToppedUp: {more}")]
        );
        assert_eq!(notices(&none, &limits(10), &limits(9)), [""; 0]);
        assert_eq!(
            notices(&none, &none, &limits(9)),
            [""; 0],
            "the first status raises nothing"
        );
    }
}
