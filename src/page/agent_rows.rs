//! The state of loops at one moment: one row for each Agent.
//!
//! Taken from the last report of a gateway if a pod runs, otherwise from the status. Decides whether a loop can still
//! do anything without an input. Contains no text of a prompt or an answer.

use std::fmt::Write as _;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::recent::{MAX_CHARS, MAX_NAME_CHARS, shortened};
use crate::api::Agent;
use crate::api::status::{
    AgentStatus, LoopOutcome, LoopState, LoopStatus, LoopUsage, PauseReason, WakeCondition, WakeType,
};
use crate::link::messages::{LoopReport, PodReport};

/// Reasons of a pause that are shown.
const MAX_REASONS: usize = 16;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentRow {
    pub namespace: String,
    pub agent: String,
    /// State of the loop.
    pub state: LoopState,
    /// The reasons that hold it.
    pub reasons: Vec<PauseReason>,
    /// When it resumes without an input.
    pub resumes_at: Option<Timestamp>,
    /// What a sleep waits for, other than a time.
    pub wakes_on: Option<String>,
    pub outcome: Option<LoopOutcome>,
    /// Turns begun and completed.
    pub turns: (i64, i64),
    /// Tokens in and out.
    pub tokens: i64,
    /// Failed turns in a row.
    pub errors: i32,
    /// Kind of the last failure, while failures continue.
    pub last_error: Option<String>,
    /// Why it cannot run at all, or what a person has to do.
    pub message: Option<String>,
    /// It does nothing more without an input.
    pub at_rest: LoopActivity,
}

/// Whether a loop still does anything without an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoopActivity {
    /// It does.
    #[default]
    Alive,
    /// It ended, is suspended, or waits for a person.
    Resting,
    /// It cannot run: a mistake that only shows at run time.
    Refused,
}

/// What the status of an Agent without a report is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusOrigin {
    /// An earlier run of the same process: its loop is about to start again.
    EarlierRun,
    /// The present loop, as the controller last published it.
    Present,
}

/// The row of an Agent. `report`: the last report of its gateway.
#[must_use]
pub fn row(agent: &Agent, report: Option<&PodReport>, origin: StatusOrigin) -> AgentRow {
    let meta = &agent.metadata;
    let empty = AgentRow {
        namespace: meta.namespace.clone().unwrap_or_default(),
        agent: meta.name.clone().unwrap_or_default(),
        ..AgentRow::default()
    };
    let written = of_status(agent, empty, origin);
    let report = report.and_then(|report| Some((report, report.loop_.as_ref()?)));
    let mut row = match report {
        // An end that is persisted is final: the pod is terminating.
        Some((report, loop_)) if written.at_rest != LoopActivity::Refused && written.outcome.is_none() => {
            of_report(report, loop_, written)
        }
        _ => written,
    };
    if agent.spec.suspend && row.at_rest == LoopActivity::Alive {
        row.at_rest = if row.state == LoopState::Stopped {
            LoopActivity::Resting
        } else {
            LoopActivity::Alive
        };
    }
    row
}

fn of_status(agent: &Agent, empty: AgentRow, origin: StatusOrigin) -> AgentRow {
    let Some(status) = &agent.status else {
        return AgentRow {
            state: LoopState::Starting,
            ..empty
        };
    };
    let usage = status.usage.clone().unwrap_or_default();
    let refused = status
        .conditions
        .iter()
        .find(|condition| condition.type_ == "Accepted" && condition.status == "False");
    let loop_ = status.r#loop.clone().unwrap_or_default();
    // A status of an earlier run, about a loop that is to continue.
    let stale = loop_.outcome.is_none() && !agent.spec.suspend && refused.is_none();
    let rest = match (refused, loop_.outcome) {
        (Some(_), _) => LoopActivity::Refused,
        // Its next task starts it again.
        (None, Some(LoopOutcome::ScaledToZero)) => LoopActivity::Alive,
        (None, Some(_)) if status.observed_generation == agent.metadata.generation => LoopActivity::Resting,
        (None, _) => LoopActivity::Alive,
    };
    let scaled = loop_.outcome == Some(LoopOutcome::ScaledToZero);
    if origin == StatusOrigin::Present {
        return AgentRow {
            at_rest: rest,
            message: refused.map(|condition| format!("{}: {}", condition.reason, condition.message)),
            ..of_present_status(status, &loop_, &usage, empty)
        };
    }
    AgentRow {
        state: if stale { LoopState::Starting } else { loop_.state },
        outcome: loop_.outcome.filter(|_| scaled || rest == LoopActivity::Resting),
        turns: (loop_.turn, usage.counts.turns),
        tokens: usage.input_tokens + usage.output_tokens,
        message: refused.map(|condition| format!("{}: {}", condition.reason, condition.message)),
        at_rest: rest,
        ..empty
    }
}

fn of_present_status(status: &AgentStatus, loop_: &LoopStatus, usage: &LoopUsage, empty: AgentRow) -> AgentRow {
    let is_failing = loop_.consecutive_errors > 0 || loop_.state == LoopState::Stopped;
    AgentRow {
        state: loop_.state,
        reasons: loop_.reasons.clone(),
        resumes_at: loop_.resumes_at.as_ref().map(|at| at.0),
        wakes_on: loop_.wake.as_ref().and_then(names_of_wake),
        outcome: loop_.outcome,
        turns: (loop_.turn, usage.counts.turns),
        tokens: usage.input_tokens + usage.output_tokens,
        errors: loop_.consecutive_errors,
        last_error: status
            .last_error
            .as_ref()
            .filter(|_| is_failing)
            .map(|error| error.kind.clone()),
        ..empty
    }
}

/// What a sleep waits for, other than a time.
fn names_of_wake(wake: &WakeCondition) -> Option<String> {
    (wake.r#type != WakeType::Time).then(|| shortened(&wake.value, MAX_CHARS))
}

/// A worker may report any texts, and as many reasons as a frame holds.
fn of_report(report: &PodReport, loop_: &LoopReport, written: AgentRow) -> AgentRow {
    let held = || loop_.reasons.iter();
    let waits_for_person = waits_for_person(loop_);
    let message = held()
        .find(|held| held.until.is_none())
        .map(|held| shortened(&held.message, MAX_CHARS));
    AgentRow {
        state: loop_.state,
        reasons: held().map(|held| held.reason).take(MAX_REASONS).collect(),
        resumes_at: loop_.resumes_at,
        wakes_on: loop_.wake.as_ref().and_then(names_of_wake),
        outcome: loop_.outcome,
        turns: (loop_.turn, loop_.counts.turns),
        tokens: report.usage.input_tokens + report.usage.output_tokens,
        errors: loop_.consecutive_errors,
        last_error: loop_
            .last_error
            .as_ref()
            .filter(|_| loop_.consecutive_errors > 0 || loop_.state == LoopState::Stopped)
            .map(|error| shortened(&error.kind, MAX_NAME_CHARS)),
        message: message.filter(|_| waits_for_person),
        at_rest: if waits_for_person
            || loop_
                .outcome
                .is_some_and(|outcome| outcome != LoopOutcome::ScaledToZero)
        {
            LoopActivity::Resting
        } else {
            LoopActivity::Alive
        },
        ..written
    }
}

/// Paused without a known end: a person has to change something. A lost link and limits that are not known yet recover
/// without one.
fn waits_for_person(loop_: &LoopReport) -> bool {
    loop_.state == LoopState::Paused
        && loop_.resumes_at.is_none()
        && !loop_.reasons.is_empty()
        && loop_.reasons.iter().all(|held| !held.reason.facts().recovers)
}

impl AgentRow {
    /// What it waits for, as a short text.
    #[must_use]
    pub fn waits_for(&self, zone: &TimeZone) -> String {
        let mut text = String::new();
        let reasons: Vec<&str> = self.reasons.iter().map(AsRef::as_ref).collect();
        if let Some(outcome) = self.outcome {
            return outcome.as_ref().to_owned();
        }
        text.push_str(&reasons.join(", "));
        if let Some(error) = &self.last_error {
            let space = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{space}{error} ({} in a row)", self.errors);
        }
        if let Some(names) = &self.wakes_on {
            let space = if text.is_empty() { "" } else { " " };
            let _ = write!(text, "{space}wakes on {names}");
        }
        if let Some(moment) = self.resumes_at {
            let space = if text.is_empty() { "" } else { " " };
            let clock = moment.to_zoned(zone.clone()).strftime("%H:%M:%S").to_string();
            let _ = write!(text, "{space}until {clock}");
        }
        if let Some(message) = &self.message {
            let space = if text.is_empty() { "" } else { ": " };
            let _ = write!(text, "{space}{message}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::link::messages::HeldReason;

    fn agent(generation: i64, status: &serde_json::Value) -> Agent {
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": { "name": "a", "namespace": "default", "generation": generation },
            "spec": {
                "instructions": "Watch.",
                "model": { "api": "Scripted", "name": "m", "scripted": { "configMapKeyRef": { "name": "s", "key": "k" } } },
            },
            "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    fn paused(reasons: &[PauseReason], resumes_at: Option<Timestamp>) -> PodReport {
        let held = reasons.iter().map(|reason| HeldReason {
            reason: *reason,
            until: resumes_at,
            message: "do something".into(),
        });
        let loop_ = LoopReport {
            state: LoopState::Paused,
            reasons: held.collect(),
            resumes_at,
            ..LoopReport::default()
        };
        PodReport {
            loop_: Some(loop_),
            ..PodReport::default()
        }
    }

    #[test]
    fn a_paused_loop_rests_when_only_a_person_can_resume_it() {
        let moment = Some(Timestamp::UNIX_EPOCH);
        for (reasons, resumes_at, rest) in [
            (&[PauseReason::BudgetExhausted][..], None, LoopActivity::Resting),
            (&[PauseReason::BudgetExhausted], moment, LoopActivity::Alive),
            (&[PauseReason::LinkLost], None, LoopActivity::Alive),
            (
                &[PauseReason::LoopDetected, PauseReason::LinkLost],
                None,
                LoopActivity::Alive,
            ),
            (&[PauseReason::LoopDetected], None, LoopActivity::Resting),
            (&[], None, LoopActivity::Alive),
        ] {
            let row = row(
                &agent(1, &json!({})),
                Some(&paused(reasons, resumes_at)),
                StatusOrigin::EarlierRun,
            );
            assert_eq!(row.at_rest, rest, "{reasons:?} {resumes_at:?}");
            assert_eq!(row.message.is_some(), rest == LoopActivity::Resting);
        }
    }

    #[test]
    fn an_end_that_is_written_is_final_until_the_spec_is_another() {
        let status =
            json!({ "observedGeneration": 1, "loop": { "state": "Stopped", "outcome": "Completed", "epoch": 1 } });
        let before = row(&agent(1, &status), None, StatusOrigin::EarlierRun);
        assert_eq!(
            (before.at_rest, before.waits_for(&TimeZone::UTC)),
            (LoopActivity::Resting, "Completed".into())
        );
        let changed = row(&agent(2, &status), None, StatusOrigin::EarlierRun);
        assert_eq!((changed.at_rest, changed.outcome), (LoopActivity::Alive, None));
    }

    #[test]
    fn a_loop_of_an_earlier_run_is_starting_and_one_that_cannot_run_has_a_reason() {
        let status = json!({ "loop": { "state": "Sleeping", "epoch": 1, "turn": 7 } });
        let earlier = row(&agent(1, &status), None, StatusOrigin::EarlierRun);
        assert_eq!(
            (earlier.state, earlier.turns.0, earlier.at_rest),
            (LoopState::Starting, 7, LoopActivity::Alive)
        );
        let refused = json!({ "conditions": [{
            "type": "Accepted", "status": "False", "reason": "PriceUnknown", "message": "set a price",
            "lastTransitionTime": "2026-11-22T12:00:00Z",
        }] });
        let refused = row(&agent(1, &refused), None, StatusOrigin::EarlierRun);
        assert_eq!(refused.at_rest, LoopActivity::Refused);
        assert_eq!(refused.message.as_deref(), Some("PriceUnknown: set a price"));
    }

    #[test]
    fn in_a_cluster_a_status_without_a_report_is_about_the_present_loop() {
        let status = json!({
            "loop": {
                "state": "Paused", "epoch": 1, "turn": 7, "reasons": ["ConsecutiveErrors"], "consecutiveErrors": 3,
                "resumesAt": "2026-11-22T12:00:05Z",
            },
            "lastError": { "kind": "Timeout", "message": "none", "at": "2026-11-22T12:00:00Z" },
        });
        let row = row(&agent(1, &status), None, StatusOrigin::Present);
        assert_eq!((row.state, row.turns.0), (LoopState::Paused, 7));
        assert_eq!(
            row.waits_for(&TimeZone::UTC),
            "ConsecutiveErrors, Timeout (3 in a row) until 12:00:05"
        );
    }

    #[test]
    fn the_reason_of_a_wait_is_short() {
        let row = AgentRow {
            reasons: vec![PauseReason::ConsecutiveErrors],
            last_error: Some("Timeout".into()),
            errors: 5,
            resumes_at: Some("2026-11-22T12:00:05Z".parse().unwrap()),
            ..AgentRow::default()
        };
        let text = row.waits_for(&TimeZone::UTC);
        assert_eq!(text, "ConsecutiveErrors, Timeout (5 in a row) until 12:00:05");
    }
}
