//! Computes the status of an Agent, as one pure function of [`AgentStatusInput`].
//!
//! Fields about which no pod has reported since this controller started keep their written values, so that a restart of
//! the controller causes no writes.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::apply::PodObstacle;
use super::conditions;
use super::gateway_loop_detection::LoopFinding;
use super::intent::{Intent, RestReason};
use super::requests::{self, LoopEnds};
use super::totals;
use super::validate::InvalidAgent;
use crate::api::status::{AgentSummary, HandledRequests, LoopOutcome, LoopState, LoopStatus, LoopUsage, PauseReason};
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::format;
use crate::controller::budget::shares::LimitShares;
use crate::controller::pod_sessions::ReceivedReport;
use crate::controller::runtime::pod_state::{PodReason, PodState};
use crate::link::messages::{LoopReport, LoopTotals};
use crate::support::text::short_number;

/// Everything that the status is computed from.
pub(super) struct AgentStatusInput<'a> {
    pub(super) agent: &'a Agent,
    /// The status as last written.
    pub(super) old: &'a AgentStatus,
    /// The result of validation.
    pub(super) verdict: &'a Result<(), InvalidAgent>,
    /// Whether the references were read in this reconcile.
    pub(super) looked: bool,
    /// The decision about the pod.
    pub(super) intent: Intent,
    /// The existing pod.
    pub(super) pod: Option<&'a PodState>,
    /// The last report of that pod.
    pub(super) last_report: Option<&'a ReceivedReport>,
    /// Totals. They never decrease, whatever a pod reports.
    pub(super) known: &'a LoopTotals,
    /// A loop detected from the gateway's counters.
    pub(super) finding: Option<&'a LoopFinding>,
    /// What remains of the Agent's limits; `None` until the ledger has loaded them.
    pub(super) shares: Option<&'a LimitShares>,
    /// Names of the Sensors that deliver to this Agent, by UID.
    pub(super) sensors: &'a BTreeMap<String, String>,
    /// Problems of Sensors that have their own pod, by Sensor name; `None` until all of them were read.
    pub(super) sensor_problems: Option<&'a [(String, String)]>,
    /// What prevents the controller from creating or deleting the pod.
    pub(super) obstacle: Option<&'a PodObstacle>,
    /// No contact with the pod for the whole run lease.
    pub(super) silent: bool,
    pub(super) now: Timestamp,
}

impl AgentStatusInput<'_> {
    /// The reason why no pod is wanted, if any.
    pub(super) fn rest(&self) -> Option<RestReason> {
        match self.intent {
            Intent::Remove(rest) | Intent::Rest(rest) => Some(rest),
            Intent::Ending { rest, .. } => rest,
            Intent::AwaitStop(_) => Some(RestReason::Suspended),
            Intent::RecordOutcome => Some(RestReason::Completed),
            Intent::Create | Intent::CreateLater(_) | Intent::Keep | Intent::KeepOutdated(_) | Intent::Replace(_) => {
                None
            }
        }
    }

    /// Whether the pod is being replaced by a new one.
    pub(super) fn replacing(&self) -> bool {
        matches!(self.intent, Intent::Ending { rest: None, .. })
            || matches!(self.intent, Intent::Replace(_)) && self.verdict.is_ok()
    }

    /// The last report of the worker.
    pub(super) fn report(&self) -> Option<&LoopReport> {
        self.last_report.and_then(|last| last.report.loop_.as_ref())
    }

    /// Whether the written status belongs to the existing pod: the epochs are equal.
    pub(super) fn same_pod(&self) -> bool {
        let recorded = self.old.r#loop.as_ref().map(|status| status.epoch);
        self.pod.is_some_and(|pod| recorded == Some(pod.epoch))
    }
}

pub(super) fn compute(facts: &AgentStatusInput<'_>) -> AgentStatus {
    let old = facts.old;
    let mut status = loop_status(facts);
    let usage = (facts.known.usage != LoopUsage::default()).then(|| facts.known.usage.clone());
    let ends = LoopEnds {
        before: old.r#loop.as_ref().is_some_and(|old| old.outcome.is_some()),
        now: status.outcome.is_some(),
    };
    let handled = facts.report().map(|report| &report.handled);
    let handled = requests::remember(facts.agent, old.last_handled_requests.as_ref(), handled, ends);
    let stop = |handled: Option<&HandledRequests>| handled.and_then(|handled| handled.stop.clone());
    let is_newly_stopped =
        ends.before && ends.now && stop(handled.as_ref()) != stop(old.last_handled_requests.as_ref());
    if is_newly_stopped && status.outcome == Some(LoopOutcome::ScaledToZero) {
        // The next task no longer starts it.
        status.outcome = Some(LoopOutcome::Cancelled);
    }
    let new = AgentStatus {
        observed_generation: facts.agent.metadata.generation,
        conditions: conditions::compute(facts, &status),
        summary: Some(summary(facts, &status, usage.as_ref())),
        r#loop: Some(status),
        gates: facts
            .report()
            .map_or_else(|| old.gates.clone(), |report| report.gates.clone()),
        recent_activations: facts.report().map_or_else(
            || old.recent_activations.clone(),
            |report| report.recent_activations.clone(),
        ),
        goal: facts
            .report()
            .map_or_else(|| old.goal.clone(), |report| report.goal.clone()),
        budgets: facts
            .shares
            .map_or_else(|| old.budgets.clone(), |shares| shares.budgets.clone()),
        usage,
        pod: facts.pod.map(PodState::status),
        last_error: facts
            .report()
            .and_then(|report| report.last_error.clone())
            .or_else(|| old.last_error.clone()),
        last_handled_requests: handled,
        // Owned by the ledger. Unchanged here, so the status patch does not contain it.
        ledger: old.ledger.clone(),
    };
    suppress_minor_changes(old, new)
}

/// Drops a change that consists only of what remains of shared budgets. That changes with every call of any other
/// Agent; one write per call would not scale. It is written together with the next change of this Agent, or once a
/// budget becomes exhausted or available again.
fn suppress_minor_changes(old: &AgentStatus, mut new: AgentStatus) -> AgentStatus {
    let spent = |status: &AgentStatus| -> Vec<(String, bool)> {
        let budgets = status.budgets.iter();
        budgets.map(|share| (share.name.clone(), share.exhausted)).collect()
    };
    if spent(old) != spent(&new) {
        return new;
    }
    let tightest = |status: &AgentStatus| status.summary.as_ref().and_then(|summary| summary.budget.clone());
    let (budgets, budget) = (new.budgets.clone(), tightest(&new));
    new.budgets.clone_from(&old.budgets);
    if let Some(summary) = &mut new.summary {
        summary.budget = tightest(old);
    }
    if new != *old {
        new.budgets = budgets;
        if let Some(summary) = &mut new.summary {
            summary.budget = budget;
        }
    }
    new
}

fn loop_status(facts: &AgentStatusInput<'_>) -> LoopStatus {
    let old = facts.old.r#loop.clone().unwrap_or_default();
    let mut status = match facts.rest() {
        Some(RestReason::Suspended) => LoopStatus {
            state: if facts.pod.is_some() {
                LoopState::Stopping
            } else {
                LoopState::Stopped
            },
            reasons: vec![PauseReason::SuspendedBySpec],
            outcome: old.outcome,
            ..LoopStatus::default()
        },
        Some(RestReason::Completed) => LoopStatus {
            state: LoopState::Stopped,
            outcome: match (facts.report().and_then(|report| report.outcome), old.outcome) {
                // A user has stopped it after its last report.
                (Some(LoopOutcome::ScaledToZero), Some(LoopOutcome::Cancelled)) => old.outcome,
                (reported, recorded) => reported.or(recorded),
            },
            ..LoopStatus::default()
        },
        None => live(facts, &old),
    };
    // Epochs fence older pods, so the recorded one never decreases, even while there is no pod.
    status.epoch = old.epoch.max(facts.pod.map_or(0, |pod| pod.epoch));
    let report = facts.report();
    status.turn = facts.known.turn;
    status.last_turn_time = if status.turn > old.turn {
        Some(Time(facts.now))
    } else {
        old.last_turn_time
    };
    status.consecutive_errors = report.map_or(old.consecutive_errors, |report| report.consecutive_errors);
    status.consecutive_turns = report.map_or(old.consecutive_turns, |report| report.consecutive_turns);
    // Content outlives the pod, with the history; so do tasks, in the journal.
    (status.untrusted_content, status.waiting_tasks) = match report {
        Some(report) => (
            report.untrusted_content.clone(),
            Some(report.waiting_tasks).filter(|tasks| *tasks > 0),
        ),
        None => (old.untrusted_content.clone(), old.waiting_tasks),
    };
    if status.since.is_none() {
        let same = facts.old.r#loop.is_some() && status.state == old.state;
        status.since = if same { old.since } else { Some(Time(facts.now)) };
    }
    status
}

/// The status of a loop that should be running.
fn live(facts: &AgentStatusInput<'_>, old: &LoopStatus) -> LoopStatus {
    let plain = |state| LoopStatus {
        state,
        ..LoopStatus::default()
    };
    let Some(pod) = facts.pod else {
        return plain(match facts.verdict {
            Ok(()) => LoopState::Starting,
            Err(_) => LoopState::Stopped,
        });
    };
    if facts.replacing() {
        return plain(LoopState::Stopping);
    }
    if pod.reason != PodReason::Running {
        return plain(LoopState::Starting);
    }
    let mut status = match facts.report() {
        Some(report) => reported(report),
        None if facts.same_pod() => LoopStatus {
            since: old.since.clone(),
            ..old.clone()
        },
        None => plain(LoopState::Starting),
    };
    // A worker without contact pauses itself when its run lease expires, so its state is known without a report.
    if facts.silent {
        if status.state != LoopState::Paused {
            status.since = None;
        }
        status.state = LoopState::Paused;
        status.resumes_at = None;
        status.wake = None;
        status.reasons.push(PauseReason::LinkLost);
    }
    status.reasons.sort();
    status.reasons.dedup();
    status
}

fn reported(report: &LoopReport) -> LoopStatus {
    LoopStatus {
        state: report.state,
        reasons: report.reasons.iter().map(|held| held.reason).collect(),
        since: report.since.map(Time),
        resumes_at: report.resumes_at.map(Time),
        wake: report.wake.clone(),
        outcome: report.outcome,
        ..LoopStatus::default()
    }
}

fn summary(facts: &AgentStatusInput<'_>, status: &LoopStatus, usage: Option<&LoopUsage>) -> AgentSummary {
    let reasons: Vec<&str> = status.reasons.iter().map(AsRef::as_ref).collect();
    let reason = if !reasons.is_empty() {
        Some(reasons.join(","))
    } else if let Some(outcome) = status.outcome {
        Some(outcome.as_ref().to_owned())
    } else if let Err(invalid) = facts.verdict {
        Some(invalid.reason.as_ref().to_owned())
    } else {
        let pod_reason = facts.pod.map(|pod| pod.reason);
        let calm = [PodReason::Starting, PodReason::Running, PodReason::Absent];
        pod_reason
            .filter(|reason| !calm.contains(reason))
            .map(|reason| reason.as_ref().to_owned())
    };
    AgentSummary {
        cost: usage
            .filter(|usage| usage.cost > 0)
            .map(|usage| format::dollars(usage.cost)),
        budget: facts.shares.map_or_else(
            || facts.old.summary.as_ref().and_then(|old| old.budget.clone()),
            |shares| shares.used_percent.map(|percent| format!("{percent}%")),
        ),
        tokens: short_number(usage.map_or(0, totals::tokens)),
        resumes: status
            .resumes_at
            .as_ref()
            .map(|at| at.0.strftime("%H:%M UTC").to_string()),
        reason,
    }
}
