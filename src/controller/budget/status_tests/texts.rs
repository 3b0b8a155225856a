//! The conditions and Events of AgentBudgets, as users read them.

use agentloop_texts::TextRows;
use strum::IntoEnumIterator;

use super::super::events;
use super::*;
use crate::controller::kstatus::{KstatusVerdict, assert_computed};

fn conditions(rows: &mut TextRows, status: &AgentBudgetStatus) {
    let copied = |message: &str| {
        let of = [ConditionType::Accepted, ConditionType::Exhausted]
            .into_iter()
            .find(|type_| find(&status.conditions, *type_).is_some_and(|condition| condition.message == message));
        of.map_or_else(
            || message.to_owned(),
            |type_| format!("(the message of {})", type_.as_ref()),
        )
    };
    for type_ in ConditionType::iter().filter(|type_| *type_ != ConditionType::Stalled) {
        let Some(condition) = find(&status.conditions, type_).filter(|condition| condition.reason != "Inactive") else {
            continue;
        };
        let stalled = type_ == ConditionType::Ready && find(&status.conditions, ConditionType::Stalled).is_some();
        let also = if stalled { ", Stalled" } else { "" };
        let name = format!("{} {}{also}", condition.status, condition.reason);
        let message = if type_ == ConditionType::Ready {
            copied(&condition.message)
        } else {
            condition.message.clone()
        };
        rows.push(text!(type_.as_ref(), name, message));
    }
}

/// Budgets of which all is used.
fn exhausted() -> Vec<StatusHarness> {
    let specs = [
        json!({}),
        json!({"window": {"lifetime": {}}}),
        json!({"onExhausted": "Stop"}),
        json!({"onExhausted": "Ask"}),
        json!({"topUps": [{"id": "more-1", "tokens": 1}]}),
    ];
    let used = |spec: &Value| {
        let mut harness = StatusHarness::new(spec);
        harness.spend("reader", 1, 800, 1);
        harness.spend("writer", 2, 200, 2);
        harness.write(3);
        harness
    };
    specs.iter().map(used).collect()
}

fn statuses() -> Vec<AgentBudgetStatus> {
    let mut fresh = StatusHarness::new(&json!({}));
    let mut statuses = vec![fresh.write(0).clone()];
    statuses.extend(exhausted().into_iter().map(|harness| harness.status));
    for spec in [
        json!({"limits": {"tokens": 0}}),
        json!({"limits": {"tokens": 1000, "calls": 0}}),
        json!({"perAgent": {"tokens": 0}}),
        json!({"topUps": [{"id": "more-1", "calls": 1}]}),
    ] {
        let mut harness = StatusHarness::new(&spec);
        harness.ask("reader", 1, 1);
        statuses.push(harness.write(2).clone());
    }
    let foreign = StatusHarness::new(&json!({"selector": {}, "namespaceSelector": {}}));
    let mut inputs = [foreign.input(1), fresh.input(1), fresh.input(1)];
    inputs[1].entry =
        Err("spec.window.calendar.timeZone Mars/Base is not an IANA time zone: use for example Europe/Berlin or UTC");
    inputs[2].problem = Some("the API server answered 422: status.ledger: Invalid value");
    statuses.extend(inputs.iter().map(compute));
    statuses
}

#[test]
fn kstatus_reads_each_status_of_a_budget_as_its_conditions_mean_it() {
    use KstatusVerdict::{Current, Failed};
    assert_computed("AgentBudget", &statuses(), &[Current, Failed]);
}

#[test]
fn the_texts_of_budgets() {
    let mut rows = TextRows::new();
    for status in statuses() {
        conditions(&mut rows, &status);
    }
    assert_texts!("budget-conditions", "Conditions of AgentBudgets", rows);
}

#[test]
fn the_texts_of_events_of_budgets() {
    let mut rows = TextRows::new();
    let mut add = |harness: &StatusHarness, old: &AgentBudgetStatus, new: &AgentBudgetStatus| {
        for event in events::from_status(&harness.budget, old, new) {
            let type_ = if event.warning { "Warning" } else { "Normal" };
            let copied = [
                ConditionType::NearLimit,
                ConditionType::Exhausted,
                ConditionType::Accepted,
            ]
            .into_iter()
            .find(|type_| find(&new.conditions, *type_).is_some_and(|condition| condition.message == event.note));
            let note = copied.map_or(event.note, |type_| format!("(the message of {})", type_.as_ref()));
            rows.push(text!(type_, format!("{} {}", event.reason, event.action), note));
        }
    };
    let calm = StatusHarness::new(&json!({})).write(0).clone();
    for mut harness in exhausted() {
        add(&harness, &calm, &harness.status);
        let before = harness.status.clone();
        harness.edit(&json!({"limits": {"tokens": 2000}}), 4);
        harness.write(5);
        add(&harness, &before, &harness.status);
        if let Some(gate) = before.gates.first() {
            let answers = [
                (approval::APPROVE, format!("{}:{}", gate.id, gate.arguments_hash)),
                (approval::DENY, gate.id.clone()),
            ];
            for (key, value) in answers {
                let mut asked = StatusHarness::new(&json!({"onExhausted": "Ask"}));
                asked.spend("reader", 1, 1000, 1);
                asked.write(3);
                let before = asked.status.clone();
                asked.annotate(&[(key, &value), (approval::APPROVED_BY, "ann")]);
                asked.write(4);
                add(&asked, &before, &asked.status);
            }
        }
    }
    let mut unusable = StatusHarness::new(&json!({"selector": {}, "namespaceSelector": {}}));
    unusable.write(1);
    add(&unusable, &calm, &unusable.status);
    rows.sort();
    assert_texts!("budget-events", "Events of AgentBudgets", rows);
}
