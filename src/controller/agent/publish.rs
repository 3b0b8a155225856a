//! Writes the computed status when it is due, as a merge patch, and sends the Events of its transitions.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use kube::core::Status;
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::apply::AppliedPlan;
use super::desired::ReconcilePlan;
use super::events;
use super::intent::Intent;
use super::observe::ObservedAgent;
use super::reconcile::{ReconcileContext, ReconciledAgent, until};
use super::status::{AgentStatusInput, compute};
use super::write_timing::WriteTiming;
use crate::api::{Agent, AgentStatus};
use crate::controller::pod_sessions::AgentKey;
use crate::controller::runtime::Requeue;
use crate::controller::runtime::error::{ReconcileError, find};
use crate::controller::runtime::guarded::InvalidObject;
use crate::controller::runtime::pod_state::PodReason;
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::status_writer::{CONFLICT_RETRY, merge_patch, write_unreadable};

/// The results of the previous steps.
pub(super) struct ReconcileOutcome<'a> {
    /// The status as last written.
    pub(super) old: &'a AgentStatus,
    /// The resource version of the Agent that has `old`.
    pub(super) version: Option<&'a str>,
    /// What was read.
    pub(super) observed: &'a ObservedAgent,
    /// What was to be done.
    pub(super) plan: &'a ReconcilePlan<'a>,
    /// What was done.
    pub(super) applied: &'a AppliedPlan,
    /// Start of the reconcile.
    pub(super) now: Timestamp,
}

/// Writes the status if it is due and sends the Events. Returns when to reconcile again: for a pending
/// write, for example.
pub(super) async fn publish(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    outcome: &ReconcileOutcome<'_>,
) -> Result<Requeue, ReconcileError> {
    let (old, now) = (outcome.old, outcome.now);
    let memory = ctx.shared.memory.load(&subject.key, subject.uid, now);
    let pod = outcome.applied.pod.as_ref();
    let running = pod.filter(|pod| pod.reason == PodReason::Running);
    subject.update_state(ctx, |memory| {
        memory.silent = outcome.plan.silent;
        memory.known = Some(outcome.observed.known.clone());
        if running.is_some() {
            memory.failed_pods = 0;
        }
    });
    let (observed, plan) = (outcome.observed, outcome.plan);
    let new = compute(&AgentStatusInput {
        agent: subject.agent,
        old,
        verdict: &plan.verdict,
        looked: observed.references.is_some(),
        intent: observed.intent,
        pod,
        heard: observed.heard.as_ref(),
        known: &observed.known,
        finding: observed.finding.as_ref(),
        shares: observed.limits.as_ref().map(|limits| &limits.shares),
        sensors: &observed.sensors.names,
        troubles: observed.sensors.problems.as_deref(),
        obstacle: outcome.applied.obstacle.as_ref(),
        silent: plan.silent,
        now,
    });
    let about = subject.agent.object_ref(&());
    ctx.shared.events.send(events::from_pod(outcome.applied), &about);
    match memory.pace.due(old, &new, now) {
        WriteTiming::Never => Ok(Requeue::AwaitChange),
        WriteTiming::At(_) | WriteTiming::Now if memory.not_kept.as_deref() == Some(&new) => Ok(Requeue::AwaitChange),
        WriteTiming::At(moment) => Ok(Requeue::After(until(moment, now), Priority::Low)),
        // Other Agents wait for their pods. By the time that they have them, this status may already say that the pod runs.
        WriteTiming::Now if outcome.applied.created && ctx.scopes.queue.has_urgent() => {
            Ok(Requeue::After(Duration::ZERO, Priority::Low))
        }
        WriteTiming::Now => {
            let notices = events::from_status(old, &new);
            if !write(ctx, subject, outcome, new).await? {
                return Ok(Requeue::After(CONFLICT_RETRY, Priority::Low));
            }
            ctx.shared.events.send(notices, &about);
            // A pod whose loop has ended is deleted only after the outcome is written: reconcile again at once.
            let ended = outcome.observed.intent == Intent::RecordOutcome;
            Ok(Requeue::after(ended.then_some(Duration::ZERO), Priority::High))
        }
    }
}

/// Writes a status with the resource version that it was computed from as a precondition; false on a conflict. A
/// replaced leader that does not know it yet therefore cannot overwrite what its successor wrote.
async fn write(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    outcome: &ReconcileOutcome<'_>,
    new: AgentStatus,
) -> Result<bool, ReconcileError> {
    let api: Api<Agent> = subject.api(ctx);
    let patch = json!({
        "metadata": { "resourceVersion": outcome.version },
        "status": merge_patch(&json!(outcome.old), &json!(new)),
    });
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let patched = api.patch_status(&subject.key.name, &params, &patch);
    let written = match find("write the status", patched).await {
        Ok(Some(written)) => written,
        // The Agent was deleted in the meantime.
        Ok(None) => return Ok(true),
        Err(error) if error.is(Status::is_conflict) => return Ok(false),
        Err(error) => return Err(error),
    };
    subject.update_state(ctx, |memory| {
        memory.pace.record_write(outcome.now);
        let version = written.resource_version();
        // An unchanged version means that the API server dropped every changed field, for example because its CRD is
        // older.
        if version.as_deref() == outcome.version {
            memory.not_kept = Some(Arc::new(new));
        } else {
            memory.not_kept = None;
            memory.written = version.map(|version| Arc::new((version, new)));
        }
    });
    Ok(true)
}

/// Reports an object that this version cannot parse in the status of the object, once per generation.
pub(super) async fn unreadable(ctx: &ReconcileContext, object: &InvalidObject) -> Result<Requeue, ReconcileError> {
    let meta = &object.metadata;
    let key = AgentKey {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
    };
    let now = (ctx.shared.clock)();
    let uid = meta.uid.as_deref().unwrap_or_default();
    let memory = ctx.shared.memory.load(&key, uid, now);
    // Already reported for this generation.
    if memory.accepted_generation == meta.generation {
        return Ok(Requeue::AwaitChange);
    }
    if !write_unreadable::<Agent>(&ctx.shared.client, object, now).await? {
        return Ok(Requeue::After(CONFLICT_RETRY, Priority::Low));
    }
    ctx.shared
        .memory
        .update(&key, uid, |memory| memory.accepted_generation = meta.generation);
    Ok(Requeue::AwaitChange)
}
