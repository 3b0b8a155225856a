//! The conditions of mode `Goal`: `LowConfidence` and `Succeeded`. Pure.

use super::conditions::AgentConditions;
use crate::api::agent::AgentMode;
use crate::api::condition::ConditionType;
use crate::api::goal::{GoalEnd, GoalSpec, GoalStatus};
use crate::api::status::{LoopOutcome, LoopStatus, PauseReason};
use crate::support::text::counted;

const BELOW_THRESHOLD: &str = "BelowThreshold";
const UNREADABLE: &str = "AnswerUnreadable";
/// Maximum number of missing artifacts that a message names.
const MAX_PATHS: usize = 5;
/// How to start a loop again.
const RESTART: &str = "Change the spec or set the annotation agentloop.dev/wake to restart from the first step";

/// Message about a loop that ended without success, if no condition states why.
pub(super) const ENDED_WITHOUT_SUCCESS: &str = "the loop ended without success; see kubectl agentloop history. Change \
    the spec or set the annotation agentloop.dev/wake to restart it";

/// Sets both. Without a report, `LowConfidence` is kept; `Succeeded` follows from the recorded outcome, so that it outlives
/// the pod and its report.
pub(super) fn set(conditions: &mut AgentConditions<'_>, status: &LoopStatus) {
    low_confidence(conditions);
    succeeded(conditions, status);
}

fn low_confidence(conditions: &mut AgentConditions<'_>) {
    let type_ = ConditionType::LowConfidence;
    let Some(report) = conditions.facts.report() else {
        conditions.list.keep(type_);
        return;
    };
    let held = report
        .reasons
        .iter()
        .find(|held| held.reason == PauseReason::LowConfidence);
    let Some(held) = held else {
        conditions.list.clear(type_);
        return;
    };
    let percent = report.goal.as_ref().and_then(|goal| goal.last_confidence_percent);
    let reason = percent.map_or(UNREADABLE, |_| BELOW_THRESHOLD);
    conditions.list.set(type_, true, reason, held.message.clone());
}

fn succeeded(conditions: &mut AgentConditions<'_>, status: &LoopStatus) {
    let type_ = ConditionType::Succeeded;
    let facts = conditions.facts;
    let spec = &facts.agent.spec;
    let (AgentMode::Goal, Some(outcome)) = (spec.mode, status.outcome) else {
        // The loop has started again.
        conditions.list.clear(type_);
        return;
    };
    let reported = facts.report().map(|report| &report.goal);
    let goal = reported.unwrap_or(&facts.old.goal).as_ref();
    let message = message(outcome, goal, spec.goal.as_ref());
    let met = outcome == LoopOutcome::Completed;
    conditions.list.set(type_, met, outcome.as_ref(), message);
}

/// The note of the Event for a goal that was not reached. It has no names of criteria and no paths: Events are copied to
/// where logs are.
pub(super) fn event_note(outcome: LoopOutcome, goal: Option<&GoalStatus>) -> String {
    let criteria = goal.into_iter().flat_map(|goal| &goal.criteria);
    let artifacts = goal.into_iter().flat_map(|goal| &goal.artifacts);
    let (mut left, why) = (Vec::new(), why(outcome, goal, None));
    for (what, met) in [
        (
            "criteria are not met",
            criteria.map(|found| found.met).collect::<Vec<_>>(),
        ),
        ("artifacts are missing", artifacts.map(|found| found.met).collect()),
    ] {
        let unmet = met.iter().filter(|met| !**met).count();
        if unmet > 0 {
            left.push(format!("{unmet} of {} {what}", met.len()));
        }
    }
    if left.is_empty() {
        return format!("{why}. {RESTART}");
    }
    let steps = counted(goal.map_or(0, |goal| goal.steps), "step", "steps");
    format!("{why}; after {steps} {}. {RESTART}", left.join(", and "))
}

/// What has ended the loop.
fn why(outcome: LoopOutcome, goal: Option<&GoalStatus>, spec: Option<&GoalSpec>) -> String {
    match (goal.and_then(|goal| goal.end), outcome) {
        (Some(GoalEnd::CriteriaMet), _) => "all criteria were met".to_owned(),
        (Some(GoalEnd::LoopDetected), _) => {
            "the loop repeated itself, and its continuation was not approved".to_owned()
        }
        (Some(GoalEnd::CallsDenied), _) => {
            "calls of one tool were denied too often, and the continuation of the loop was not approved".to_owned()
        }
        (Some(GoalEnd::LowConfidence), _) => {
            "the confidence that the goal will be reached was too low, and the continuation was not approved".to_owned()
        }
        (Some(GoalEnd::Timeout), _) => match spec {
            Some(goal) => format!(
                "the goal was not reached within {} s (spec.goal.timeoutSeconds)",
                goal.timeout_seconds
            ),
            None => "the goal was not reached within spec.goal.timeoutSeconds".to_owned(),
        },
        (Some(GoalEnd::CostLimit), _) => {
            "the cost reached spec.goal.maxCostUSD, or the cost of a call is unknown".to_owned()
        }
        (Some(GoalEnd::StepLimit), _) => "all steps are used (spec.goal.maxSteps)".to_owned(),
        (None, LoopOutcome::Cancelled) => "a user stopped the loop".to_owned(),
        (None, LoopOutcome::Idle) => "guardrails.idleTimeoutSeconds was reached".to_owned(),
        (None, LoopOutcome::Completed) if goal.is_none() => "the goal was reached".to_owned(),
        (None, LoopOutcome::Failed | LoopOutcome::Escalated) if goal.is_none() => "the goal was not reached".to_owned(),
        (None, LoopOutcome::Completed | LoopOutcome::Failed | LoopOutcome::Escalated | LoopOutcome::ScaledToZero) => {
            "guardrails.loopDetection ended the loop".to_owned()
        }
    }
}

fn message(outcome: LoopOutcome, goal: Option<&GoalStatus>, spec: Option<&GoalSpec>) -> String {
    let why = why(outcome, goal, spec);
    let Some(goal) = goal else {
        // No report was received: neither criteria nor steps are known.
        return if outcome == LoopOutcome::Completed {
            why
        } else {
            format!("{why}. {RESTART}")
        };
    };
    let steps = counted(goal.steps, "step", "steps");
    if goal.end == Some(GoalEnd::CriteriaMet) {
        let exist = if goal.artifacts.is_empty() {
            ""
        } else {
            " and all artifacts existed"
        };
        return format!("{why}{exist} after {steps}");
    }
    let unmet = goal.criteria.iter().filter(|found| !found.met);
    let unmet: Vec<&str> = unmet.map(|found| &*found.name).collect();
    let missing = goal.artifacts.iter().filter(|found| !found.met);
    let missing: Vec<&str> = missing.map(|found| &*found.path).collect();
    if unmet.is_empty() && missing.is_empty() {
        return if goal.criteria.is_empty() {
            format!("{why}. {RESTART}")
        } else {
            format!("{why}; after {steps} each criterion was met, but not all of them in one check. {RESTART}")
        };
    }
    let mut left = Vec::new();
    if !unmet.is_empty() {
        left.push(format!("these criteria are not met: {}", unmet.join(", ")));
    }
    if !missing.is_empty() {
        left.push(format!("these artifacts are missing: {}", first_paths(&missing)));
    }
    format!("{why}; after {steps} {}. {RESTART}", left.join(", and "))
}

/// The first of these paths, and how many more there are.
fn first_paths(paths: &[&str]) -> String {
    let shown = paths.len().min(MAX_PATHS);
    let more = match paths.len() - shown {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", paths[..shown].join(", "))
}
