//! The pages about conditions and pauses name every condition, every reason and every pause, and no other.

use std::collections::{BTreeMap, BTreeSet};

use agentloop::api::condition::{ConditionType, GatewaySign, LoopSign};
use agentloop::api::failure::{FailureKind, ModelEvidence};
use agentloop::api::pause::{PauseEnd, PauseReason};
use agentloop::api::status::{GateKind, LoopOutcome};
use strum::IntoEnumIterator;

use super::page::{Page, code_spans, table_rows};
use crate::schema::reader::repository;

/// The reasons of each condition.
type Reasons = BTreeMap<String, BTreeSet<String>>;

/// For each kind its snapshot in `tests/texts`, where every condition with each of its reasons has an example, and the
/// files that write its conditions.
const KINDS: [(&str, &str, &[&str]); 3] = [
    (
        "Agents",
        "agent-conditions",
        &["agent/conditions.rs", "agent/goal_conditions.rs"],
    ),
    ("AgentBudgets", "budget-conditions", &["budget/conditions.rs"]),
    ("Sensors", "sensor-conditions", &["sensor/conditions.rs"]),
];
/// Conditions that have the reason and the message of `Ready`.
const LIKE_READY: [&str; 2] = ["Reconciling", "Stalled"];

fn snapshot(name: &str) -> Reasons {
    let text = std::fs::read_to_string(repository(&format!("tests/texts/{name}.snap"))).unwrap();
    let (mut reasons, mut type_) = (Reasons::new(), String::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("## ") {
            name.clone_into(&mut type_);
        } else if let Some(line) = line.strip_prefix("- `") {
            // `True Reason`, or `False Reason, Stalled`.
            let reason = line.split(['`', ',']).next().unwrap().split(' ').nth(1).unwrap();
            reasons.entry(type_.clone()).or_default().insert(reason.to_owned());
        }
    }
    reasons
}

/// What the enums of the API say of the reasons of Agents.
fn declared() -> Reasons {
    let mut reasons = Reasons::new();
    let mut add = |type_: ConditionType, reason: &str| {
        reasons
            .entry(type_.as_ref().to_owned())
            .or_default()
            .insert(reason.to_owned());
    };
    for reason in PauseReason::iter() {
        let shown = reason.facts().condition;
        // These name what was detected, or the call that failed.
        let by_another_name = [ConditionType::LoopDetected, ConditionType::ModelAvailable];
        if let Some(type_) = shown.filter(|type_| !by_another_name.contains(type_)) {
            add(type_, reason.as_ref());
        }
    }
    for kind in FailureKind::iter().filter(|kind| kind.facts().model == ModelEvidence::Unusable) {
        add(ConditionType::ModelAvailable, kind.as_ref());
    }
    LoopSign::iter().for_each(|sign| add(ConditionType::LoopDetected, sign.as_ref()));
    GatewaySign::iter().for_each(|sign| add(ConditionType::LoopDetected, sign.as_ref()));
    GateKind::iter().for_each(|kind| add(ConditionType::ApprovalPending, kind.as_ref()));
    for outcome in LoopOutcome::iter().filter(|outcome| *outcome != LoopOutcome::ScaledToZero) {
        add(ConditionType::Succeeded, outcome.as_ref());
    }
    reasons
}

/// What the page says of a kind: a section for each condition, with a table whose first column has the reasons.
fn documented(page: &Page, kind: &str) -> Reasons {
    let section = page.section(&format!("## {kind}"));
    let mut reasons = Reasons::new();
    for part in section.split("\n### `").skip(1) {
        let type_ = part.split('`').next().unwrap();
        let rows = table_rows(part);
        assert!(!rows.is_empty(), "{kind}: {type_} has no table");
        for row in rows {
            assert!(
                row.len() == 4 && !row[1].is_empty() && !row[3].is_empty(),
                "{kind}: {type_}: {row:?}"
            );
            let found = code_spans(&row[0]).map(str::to_owned);
            let entry = reasons.entry(type_.to_owned()).or_default();
            for reason in found {
                assert!(entry.insert(reason.clone()), "{kind}: {type_} has {reason} twice");
            }
        }
    }
    reasons
}

#[test]
fn every_reason_of_a_condition_has_an_entry_in_troubleshooting_and_every_entry_a_reason() {
    let page = Page::read("docs/troubleshooting.md");
    for (kind, name, _) in KINDS {
        let mut expected = snapshot(name);
        if kind == "Agents" {
            for (type_, reasons) in declared() {
                expected.entry(type_).or_default().extend(reasons);
            }
        }
        let found = documented(&page, kind);
        for (type_, reasons) in &expected {
            let none = BTreeSet::new();
            let there = found.get(type_).unwrap_or(&none);
            let missing: Vec<_> = reasons.difference(there).collect();
            assert!(missing.is_empty(), "{kind}: {type_}: no entry for {missing:?}");
        }
        let known: BTreeSet<&String> = expected.values().flatten().collect();
        let written = literals(kind);
        for (type_, reasons) in &found {
            assert!(expected.contains_key(type_), "{kind}: no condition {type_}");
            for reason in reasons {
                let exists = known.contains(reason) || written.contains(reason);
                assert!(exists, "{kind}: {type_}: no reason {reason}");
            }
        }
    }
}

#[test]
fn every_condition_has_a_section_in_troubleshooting() {
    let page = Page::read("docs/troubleshooting.md");
    let found: BTreeSet<String> = KINDS
        .iter()
        .flat_map(|(kind, ..)| documented(&page, kind).into_keys())
        .collect();
    let wanted = ConditionType::iter().map(|type_| type_.as_ref().to_owned());
    let missing: Vec<_> = wanted
        .filter(|type_| !found.contains(type_) && !LIKE_READY.contains(&type_.as_str()))
        .collect();
    assert!(missing.is_empty(), "no section for {missing:?}");
}

/// Words in quotes in the files that write the conditions of a kind: reasons that are no value of an enum.
fn literals(kind: &str) -> BTreeSet<String> {
    let (_, _, files) = KINDS.iter().find(|(name, ..)| *name == kind).unwrap();
    let mut found = BTreeSet::new();
    for file in *files {
        let text = std::fs::read_to_string(repository(&format!("src/controller/{file}"))).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        for word in lines.flat_map(|line| line.split('"').skip(1).step_by(2)) {
            let is_reason = word.len() > 2
                && word.starts_with(|first: char| first.is_ascii_uppercase())
                && word.bytes().all(|letter| letter.is_ascii_alphanumeric());
            if is_reason && !["True", "False", "Unknown"].contains(&word) {
                found.insert(word.to_owned());
            }
        }
    }
    found
}

#[test]
fn every_reason_that_is_no_value_of_an_enum_has_an_entry_too() {
    let page = Page::read("docs/troubleshooting.md");
    for (kind, ..) in KINDS {
        let found: BTreeSet<String> = documented(&page, kind).into_values().flatten().collect();
        let written = literals(kind);
        let missing: Vec<_> = written.difference(&found).collect();
        assert!(missing.is_empty(), "{kind}: no entry for {missing:?}");
        assert!(written.len() > 3, "{kind}: only {written:?} were found");
    }
}

/// Words with which the page says what ends a pause.
const fn end(end: PauseEnd) -> &'static str {
    match end {
        PauseEnd::Spec => "`spec.suspend` is set to false",
        PauseEnd::ForcedSleep => "end of the forced sleep",
        PauseEnd::ActionWindow => "oldest action is 60 s old",
        PauseEnd::Recheck => "guardrail allows it again",
        PauseEnd::NextAttempt => "next attempt at the call",
        PauseEnd::Cooldown => "end of the cool-down",
        PauseEnd::Contact => "contact is restored",
        PauseEnd::Room { .. } => "room for the call",
        PauseEnd::Answer => "gate is answered or expires",
        PauseEnd::User => "only a user",
    }
}

#[test]
fn the_page_about_pauses_states_the_end_of_each_reason() {
    let page = Page::read("docs/tasks/pausing-and-resuming.md");
    let rows = table_rows(&page.section("## What ends each pause"));
    let named: Vec<&str> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
    let all: Vec<&str> = PauseReason::iter().map(Into::into).collect();
    assert_eq!(
        BTreeSet::from_iter(named.clone()),
        BTreeSet::from_iter(all),
        "rows for each reason and no other"
    );
    for row in &rows {
        let reason = PauseReason::iter()
            .find(|reason| reason.as_ref() == row[0].trim_matches('`'))
            .unwrap();
        let facts = reason.facts();
        let condition = facts
            .condition
            .map_or("-".to_owned(), |type_| format!("`{}`", type_.as_ref()));
        assert_eq!(row[1], condition, "{reason}");
        assert!(
            row[2].contains(end(facts.end)),
            "{reason}: «{}» does not say «{}»",
            row[2],
            end(facts.end)
        );
        assert_eq!(row[3], if facts.ends_on_resume { "yes" } else { "no" }, "{reason}");
    }
}

#[test]
fn every_kind_of_a_last_error_has_an_entry() {
    let page = Page::read("docs/troubleshooting.md");
    let rows = table_rows(&page.section("## Last errors"));
    let found: Vec<String> = rows
        .iter()
        .flat_map(|row| code_spans(&row[0]).map(str::to_owned))
        .collect();
    let mut wanted: BTreeSet<String> = FailureKind::iter().map(|kind| kind.as_ref().to_owned()).collect();
    for file in ["worker/journal/error.rs", "worker/startup.rs"] {
        let text = std::fs::read_to_string(repository(&format!("src/{file}"))).unwrap();
        let kinds = text
            .split("fn kind(&self)")
            .nth(1)
            .unwrap()
            .split("\n    }")
            .next()
            .unwrap();
        wanted.extend(kinds.split('"').skip(1).step_by(2).map(str::to_owned));
    }
    assert!(
        wanted.contains("JournalFull") && wanted.contains("WorkerFailed"),
        "{wanted:?}"
    );
    assert_eq!(found.iter().cloned().collect::<BTreeSet<_>>(), wanted);
    assert_eq!(found.len(), wanted.len(), "a kind is there twice");
}

#[test]
fn every_reason_of_an_event_is_that_of_a_condition_or_has_an_entry() {
    let page = Page::read("docs/troubleshooting.md");
    let mut known: BTreeSet<String> = ConditionType::iter().map(|type_| type_.as_ref().to_owned()).collect();
    for (kind, ..) in KINDS {
        known.extend(documented(&page, kind).into_values().flatten());
    }
    let rows = table_rows(&page.section("## Events"));
    let entries: BTreeSet<String> = rows
        .iter()
        .flat_map(|row| code_spans(&row[0]).map(str::to_owned))
        .collect();
    let mut published = BTreeSet::new();
    for name in ["agent-events", "budget-events", "sensor-events"] {
        let text = std::fs::read_to_string(repository(&format!("tests/texts/{name}.snap"))).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("- `"));
        published.extend(lines.map(|line| line.split(' ').next().unwrap().to_owned()));
    }
    let missing: Vec<_> = published
        .iter()
        .filter(|reason| !known.contains(*reason) && !entries.contains(*reason))
        .collect();
    assert!(missing.is_empty(), "no entry for {missing:?}");
    // An answer and the end of a suspension have no sample among the texts.
    let without_sample = ["AskAnswered", "Resumed"].map(str::to_owned);
    let unknown: Vec<_> = entries
        .iter()
        .filter(|reason| !published.contains(*reason) && !without_sample.contains(reason))
        .collect();
    assert!(unknown.is_empty(), "no Event has the reason {unknown:?}");
}
