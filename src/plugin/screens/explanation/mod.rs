//! Why an Agent is not running, until when, and what to do: a pure function of the object and the time.
//!
//! Invents nothing: the causes are those of the status, with the messages of its conditions; `steps` knows the commands.

mod steps;

use std::fmt::Write as _;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde::Serialize;
use strum::IntoEnumIterator;

use super::figures::{age, amount, moment, run_duration};
use super::printable::one_line;
use crate::api::agent::AgentMode;
use crate::api::amount::AmountKind;
use crate::api::annotations::STOP;
use crate::api::condition::{self, ConditionType};
use crate::api::pause::PauseReason;
use crate::api::status::{LoopOutcome, LoopState, LoopStatus, WakeType};
use crate::api::{Agent, AgentStatus};
use crate::support::text::first_chars;

/// The explanation of one Agent.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// Namespace of the Agent.
    pub namespace: String,
    /// Name of the Agent.
    pub name: String,
    /// State of the loop.
    pub state: String,
    /// Time at which the loop entered the state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// What holds the loop, the most important cause first. Empty: nothing does.
    pub causes: Vec<Cause>,
    /// Time at which the loop continues automatically.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumes_at: Option<Timestamp>,
    /// What else a user should know.
    pub notes: Vec<String>,
}

/// One cause.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Cause {
    /// Reason of the condition or of the pause.
    pub reason: String,
    /// What happened.
    pub message: String,
    /// What ends it.
    pub ends: String,
    /// What a user can do.
    pub steps: Vec<String>,
}

/// Explains an Agent.
#[must_use]
pub fn of(agent: &Agent, now: Timestamp) -> Explanation {
    let target = steps::AgentTarget::of(agent);
    let mut explanation = Explanation {
        namespace: target.namespace.clone(),
        name: target.name.clone(),
        state: "Unknown".into(),
        since: None,
        causes: Vec::new(),
        resumes_at: None,
        notes: Vec::new(),
    };
    let Some(status) = &agent.status else {
        explanation.causes.push(steps::not_reconciled());
        return explanation;
    };
    let state = status.r#loop.clone().unwrap_or_default();
    explanation.state = state.state.to_string();
    explanation.since = state.since.as_ref().map(|since| since.0);
    explanation.resumes_at = state.resumes_at.as_ref().map(|at| at.0).filter(|at| *at > now);
    explanation.causes = causes(agent, status, &state, &target);
    explanation.notes = notes(agent, status, &state);
    explanation.notes.extend(goal_run(status, now));
    explanation
}

/// What holds the loop.
fn causes(agent: &Agent, status: &AgentStatus, state: &LoopStatus, target: &steps::AgentTarget) -> Vec<Cause> {
    let conditions = &status.conditions;
    let mut causes = Vec::new();
    if status.observed_generation.is_none() {
        causes.push(steps::not_reconciled());
    }
    if agent.spec.suspend {
        causes.push(steps::of_pause(
            PauseReason::SuspendedBySpec,
            "spec.suspend is true",
            status,
            target,
        ));
    }
    if let Some(refused) = holds(conditions, ConditionType::Accepted, "False") {
        causes.push(steps::refused(refused));
    }
    if let Some(outcome) = state.outcome {
        causes.push(steps::ended(outcome, &ended_message(outcome, conditions), target));
    } else if !agent.spec.suspend {
        causes.extend(holds(conditions, ConditionType::PodReady, "False").map(|pod| steps::pod(pod, target)));
    }
    for reason in &state.reasons {
        if *reason != PauseReason::SuspendedBySpec {
            let message = pause_message(*reason, conditions);
            causes.push(steps::of_pause(*reason, &message, status, target));
        }
    }
    causes.extend(outside_pauses(state, conditions, target));
    if causes.is_empty() && state.state == LoopState::Sleeping {
        causes.push(sleeping(agent, state, target));
    }
    causes
}

fn holds<'a>(conditions: &'a [Condition], type_: ConditionType, status: &str) -> Option<&'a Condition> {
    condition::find(conditions, type_).filter(|found| found.status == status)
}

/// The message of the condition that shows a pause. Another reason of the same condition may hide it: then there is none.
fn pause_message(reason: PauseReason, conditions: &[Condition]) -> String {
    let shown = reason.facts().condition;
    let found = shown.and_then(|type_| condition::find(conditions, type_));
    // `ModelAvailable` is False while it applies, the others are True.
    let applies = |found: &&Condition| (found.status == "True") != (shown == Some(ConditionType::ModelAvailable));
    let is_of_another =
        |found: &&Condition| PauseReason::iter().any(|other| other != reason && other.as_ref() == found.reason);
    let found = found.filter(|found| applies(found) && !is_of_another(found));
    found.map(|found| found.message.clone()).unwrap_or_default()
}

fn ended_message(outcome: LoopOutcome, conditions: &[Condition]) -> String {
    let type_ = match outcome {
        LoopOutcome::Completed | LoopOutcome::Cancelled | LoopOutcome::ScaledToZero => ConditionType::Ready,
        LoopOutcome::Idle => ConditionType::IdleTimeoutReached,
        LoopOutcome::Failed | LoopOutcome::Escalated => {
            let goal = holds(conditions, ConditionType::Succeeded, "False");
            let loop_ = holds(conditions, ConditionType::LoopDetected, "True");
            return goal.or(loop_).map(|found| found.message.clone()).unwrap_or_default();
        }
    };
    condition::find(conditions, type_)
        .map(|found| found.message.clone())
        .unwrap_or_default()
}

/// What no pause shows: a model that failed the last call, and a loop that the controller detected.
fn outside_pauses(state: &LoopStatus, conditions: &[Condition], target: &steps::AgentTarget) -> Vec<Cause> {
    let paused_by = |type_| {
        state
            .reasons
            .iter()
            .any(|reason| reason.facts().condition == Some(type_))
    };
    let mut causes = Vec::new();
    if state.outcome.is_some() {
        return causes;
    }
    let model = holds(conditions, ConditionType::ModelAvailable, "False");
    if let Some(model) = model.filter(|_| !paused_by(ConditionType::ModelAvailable)) {
        causes.push(steps::model(model));
    }
    let detected = holds(conditions, ConditionType::LoopDetected, "True");
    if let Some(detected) = detected.filter(|_| !paused_by(ConditionType::LoopDetected)) {
        causes.push(steps::detected(detected, target));
    }
    let lost = holds(conditions, ConditionType::LinkLost, "True");
    if let Some(lost) = lost.filter(|_| !paused_by(ConditionType::LinkLost)) {
        causes.push(steps::lost(lost));
    }
    causes
}

fn sleeping(agent: &Agent, state: &LoopStatus, target: &steps::AgentTarget) -> Cause {
    let events = state.wake.as_ref().filter(|wake| wake.r#type != WakeType::Time);
    let events = events.map(|wake| wake.value.as_str());
    if agent.spec.mode == AgentMode::Task {
        return steps::waits_for_task(target);
    }
    steps::sleeps(events, target)
}

fn notes(agent: &Agent, status: &AgentStatus, state: &LoopStatus) -> Vec<String> {
    let mut notes = Vec::new();
    if status.observed_generation.is_some() && status.observed_generation != agent.metadata.generation {
        notes.push(
            "the status is of an earlier version of the spec; the controller has not seen the newest one yet".into(),
        );
    }
    if is_stop_pending(agent, status) {
        notes.push("stop requested, not yet confirmed by the loop".into());
    }
    let not_paused = state.state != LoopState::Paused;
    if not_paused && !status.gates.is_empty() {
        notes.push(format!(
            "{} open: the loop continues without them; see kubectl agentloop approvals",
            plural(status.gates.len(), "gate is", "gates are")
        ));
    }
    if let Some(error) = status.last_error.as_ref().filter(|_| state.consecutive_errors > 0) {
        let count = plural(
            usize::try_from(state.consecutive_errors).unwrap_or(0),
            "turn has failed",
            "turns in a row have failed",
        );
        notes.push(format!("{count}, the last one with {}: {}", error.kind, error.message));
    }
    if let Some(sensors) = holds(&status.conditions, ConditionType::SensorsHealthy, "False") {
        notes.push(sensors.message.clone());
    }
    notes
}

/// What the run of a goal has taken.
fn goal_run(status: &AgentStatus, now: Timestamp) -> Option<String> {
    let goal = status.goal.as_ref()?;
    let (took, usage) = (run_duration(goal, now)?, goal.usage.unwrap_or_default());
    let verb = if goal.ended_at.is_some() { "took" } else { "has taken" };
    let count = |number: i64, one, many| plural(usize::try_from(number).unwrap_or(0), one, many);
    let steps = count(goal.steps.into(), "step", "steps");
    let calls = count(usage.calls, "call", "calls");
    let tokens = amount(AmountKind::Tokens, usage.tokens);
    // 0 without prices.
    let cost = Some(usage.cost).filter(|cost| *cost > 0);
    let cost = cost.map_or_else(String::new, |cost| format!(", {}", amount(AmountKind::Cost, cost)));
    Some(format!(
        "this run of the goal {verb} {took}: {steps}, {calls}, {tokens} tokens{cost}"
    ))
}

/// Whether a user has requested that the loop ends, which it has not reported yet.
pub(super) fn is_stop_pending(agent: &Agent, status: &AgentStatus) -> bool {
    let requested = agent.annotations().get(STOP).filter(|value| !value.is_empty());
    let handled = status.last_handled_requests.as_ref();
    let handled = handled.and_then(|handled| handled.stop.as_deref());
    let has_ended = status.r#loop.as_ref().is_some_and(|state| state.outcome.is_some());
    // The status has the beginning of a long value.
    let requested = requested.map(|value| first_chars(value, 256));
    !has_ended && requested.is_some() && requested != handled
}

fn plural(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

impl Explanation {
    /// The text for people.
    #[must_use]
    pub fn text(&self, now: Timestamp) -> String {
        let since = self.since.map(|since| {
            let age = age(Some(&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(since)), now);
            format!(", for {age}")
        });
        let (namespace, name, state) = (&self.namespace, &self.name, &self.state);
        let mut text = format!("Agent {namespace}/{name}: {state}{}\n", since.unwrap_or_default());
        if self.causes.is_empty() {
            text.push_str("\nNothing prevents the loop from running.\n");
        }
        for cause in &self.causes {
            let _ = write!(text, "\n{}", cause.reason);
            if !cause.message.is_empty() {
                let _ = write!(text, ": {}", one_line(&cause.message));
            }
            let _ = writeln!(text, "\n  ends: {}", cause.ends);
            for step in &cause.steps {
                let _ = writeln!(text, "  do:   {step}");
            }
        }
        if let Some(at) = self.resumes_at {
            let _ = writeln!(text, "\nContinues automatically at {}.", moment(at, now));
        }
        for note in &self.notes {
            let _ = writeln!(text, "\nNote: {}", one_line(note));
        }
        text
    }
}

#[cfg(test)]
mod tests;
