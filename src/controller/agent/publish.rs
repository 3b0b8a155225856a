//! Writes the computed status when it is due, as a merge patch, and sends the Events of its transitions.

use std::time::Duration;

use kube::Resource;
use kube::api::Api;
use serde_json::json;

use super::apply::AppliedPlan;
use super::decide::ReconcilePlan;
use super::events;
use super::intent::Intent;
use super::observe::ObservedAgent;
use super::reconcile::{ReconcileContext, ReconciledAgent};
use super::status::{AgentStatusInput, compute};
use super::write_timing::WriteTiming;
use crate::api::{Agent, AgentStatus};
use crate::controller::runtime::Requeue;
use crate::controller::runtime::backoff::until;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::status_throttle::StatusStep;
use crate::controller::runtime::status_writer::{CONFLICT_RETRY, StatusWrite, merge_patch, write_status};

/// The result of [`publish`].
pub(super) struct PublishedAgentStatus {
    /// When to reconcile again: for a pending write, for example.
    pub(super) requeue: Requeue,
    /// The status that was written, and the resource version that the Agent has since.
    pub(super) written: Option<(Option<String>, AgentStatus)>,
}

impl PublishedAgentStatus {
    fn nothing(requeue: Requeue) -> Self {
        Self { requeue, written: None }
    }
}

/// The status that follows from what was observed, decided and done. Pure.
fn status(agent: &Agent, observed: &ObservedAgent, plan: &ReconcilePlan<'_>, applied: &AppliedPlan) -> AgentStatus {
    let snapshot = &observed.snapshot;
    compute(&AgentStatusInput {
        agent,
        old: snapshot.status(),
        verdict: &plan.verdict,
        looked: observed.references.is_some(),
        intent: plan.intent,
        pod: applied.pod.as_ref(),
        last_report: snapshot.report.as_ref(),
        known: &plan.known,
        finding: plan.finding.as_ref(),
        shares: snapshot.limits.as_ref().map(|limits| &limits.shares),
        sensors: &snapshot.sensors.names,
        sensor_problems: snapshot.sensors.problems.as_deref(),
        obstacle: applied.obstacle.as_ref(),
        silent: plan.silent,
        now: snapshot.now,
    })
}

/// Whether the status is written now. Pure.
fn step(observed: &ObservedAgent, applied: &AppliedPlan, new: &AgentStatus) -> StatusStep {
    let (snapshot, memory) = (&observed.snapshot, &observed.snapshot.memory);
    match memory.pace.due(snapshot.status(), new, snapshot.now) {
        WriteTiming::Never => StatusStep::Keep,
        WriteTiming::At(_) | WriteTiming::Now if memory.not_kept.as_deref() == Some(new) => StatusStep::Keep,
        WriteTiming::At(moment) => StatusStep::Postpone(until(moment, snapshot.now)),
        // Other Agents wait for their pods. By the time that they have them, this status may already say that the pod runs.
        WriteTiming::Now if applied.created.is_some() && snapshot.others_wait => StatusStep::Postpone(Duration::ZERO),
        WriteTiming::Now => StatusStep::Write,
    }
}

/// Writes the status if it is due and sends the Events.
pub(super) async fn publish(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    observed: &ObservedAgent,
    plan: &ReconcilePlan<'_>,
    applied: &AppliedPlan,
) -> Result<PublishedAgentStatus, ReconcileError> {
    let (events, about) = (&ctx.shared.events, subject.agent.object_ref(&()));
    events.send(events::from_pod(applied), &about);
    let new = status(subject.agent, observed, plan, applied);
    match step(observed, applied, &new) {
        StatusStep::Keep => return Ok(PublishedAgentStatus::nothing(Requeue::AwaitChange)),
        StatusStep::Postpone(delay) => return Ok(PublishedAgentStatus::nothing(Requeue::After(delay, Priority::Low))),
        StatusStep::Write => {}
    }
    let last = &observed.snapshot.last;
    let api: Api<Agent> = subject.api(ctx);
    let changes = merge_patch(&json!(last.status), &json!(new));
    let written = write_status(&api, &subject.key.name, last.version.as_deref(), changes).await?;
    if written == StatusWrite::Conflict {
        return Ok(PublishedAgentStatus::nothing(Requeue::After(
            CONFLICT_RETRY,
            Priority::Low,
        )));
    }
    events.send(events::from_status(&last.status, &new), &about);
    // A pod whose loop has ended is deleted only after the outcome is written: reconcile again at once.
    let ended = plan.intent == Intent::RecordOutcome;
    Ok(PublishedAgentStatus {
        requeue: Requeue::after(ended.then_some(Duration::ZERO), Priority::High),
        written: match written {
            StatusWrite::Written(version) => Some((version, new)),
            StatusWrite::Gone | StatusWrite::Conflict => None,
        },
    })
}
