//! Step five, its half with I/O: writes the status when it is due, as the difference to what is there.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::Status;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use super::apply::AppliedPlan;
use super::error::{ReconcileError, find};
use super::intent::Intent;
use super::observe::ObservedAgent;
use super::pod_state::PodReason;
use super::reconcile::{ReconcileContext, ReconciledAgent, until};
use super::status::{AgentStatusInput, compute};
use super::status_throttle::WriteTiming;
use super::validate::{InvalidAgent, InvalidReason};
use super::{events, liveness};
use crate::api::condition::{ConditionType, condition};
use crate::api::{Agent, AgentStatus};
use crate::controller::pod_sessions::AgentKey;

/// When to look again after somebody else wrote the Agent first: the watch has that by then.
pub(in crate::controller) const CONFLICT_RETRY: Duration = Duration::from_millis(500);

/// What the steps before came to.
pub(super) struct ReconcileOutcome<'a> {
    /// The status as last written.
    pub(super) old: &'a AgentStatus,
    /// The version of the Agent that has it.
    pub(super) version: Option<&'a str>,
    /// What was read.
    pub(super) observed: &'a ObservedAgent,
    /// Whether the Agent can run.
    pub(super) verdict: &'a Result<(), InvalidAgent>,
    /// What was done.
    pub(super) applied: &'a AppliedPlan,
    /// When the reconcile began.
    pub(super) now: Timestamp,
}

/// Writes the status when it is due, tells its transitions, and says when to look again.
pub(super) async fn publish(
    ctx: &ReconcileContext,
    subject: &ReconciledAgent<'_>,
    outcome: &ReconcileOutcome<'_>,
) -> Result<Option<Duration>, ReconcileError> {
    let (old, now) = (outcome.old, outcome.now);
    let memory = ctx.shared.memory.load(&subject.key, subject.uid, now);
    let pod = outcome.applied.pod.as_ref();
    let running = pod.filter(|pod| pod.reason == PodReason::Running);
    let silent = running.is_some_and(|pod| {
        let contact = ctx.shared.loops.last_contact(&subject.key, &pod.uid);
        let listening = memory.listening.as_ref().filter(|(uid, _)| *uid == pod.uid);
        listening.is_some_and(|(_, since)| liveness::is_silent(contact, *since, now))
    });
    subject.update_state(ctx, |memory| {
        memory.silent = silent;
        memory.known = Some(outcome.observed.known.clone());
        if running.is_some() {
            memory.failed_pods = 0;
        }
    });
    let decided = ctx.shared.budgets.has_decided();
    let shares = decided.then(|| ctx.shared.budgets.shares(&subject.key));
    let sensors = ctx.shared.sensors.names(&subject.key);
    let troubles = ctx.shared.sensors.pod_problems(&subject.key);
    let new = compute(&AgentStatusInput {
        agent: subject.agent,
        old,
        verdict: outcome.verdict,
        looked: outcome.observed.references.is_some(),
        intent: outcome.observed.intent,
        pod,
        heard: outcome.observed.heard.as_ref(),
        known: &outcome.observed.known,
        finding: outcome.observed.finding.as_ref(),
        shares: shares.as_ref(),
        sensors: &sensors,
        troubles: troubles.as_deref(),
        obstacle: outcome.applied.obstacle.as_ref(),
        silent,
        now,
    });
    let about = subject.agent.object_ref(&());
    ctx.shared.events.send(events::from_pod(outcome.applied), &about);
    match memory.pace.due(old, &new, now) {
        WriteTiming::Never => Ok(None),
        WriteTiming::At(_) | WriteTiming::Now if memory.not_kept.as_deref() == Some(&new) => Ok(None),
        WriteTiming::At(moment) => Ok(Some(until(moment, now))),
        WriteTiming::Now => {
            let notices = events::from_status(old, &new);
            if !write(ctx, subject, outcome, new).await? {
                return Ok(Some(CONFLICT_RETRY));
            }
            ctx.shared.events.send(notices, &about);
            // The pod of a loop that ended goes once that is written.
            Ok((outcome.observed.intent == Intent::RecordOutcome).then_some(Duration::ZERO))
        }
    }
}

/// Writes a status in place of the one it was computed from, and of no other; false: that is not the present one any more.
/// A leader that was replaced without knowing it yet thus undoes nothing that its successor wrote.
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
        // The Agent was deleted meanwhile.
        Ok(None) => return Ok(true),
        Err(error) if error.is(Status::is_conflict) => return Ok(false),
        Err(error) => return Err(error),
    };
    subject.update_state(ctx, |memory| {
        memory.pace.record_write(outcome.now);
        let version = written.resource_version();
        if version.as_deref() == outcome.version {
            memory.not_kept = Some(Arc::new(new));
        } else {
            memory.not_kept = None;
            memory.written = version.map(|version| Arc::new((version, new)));
        }
    });
    Ok(true)
}

/// A JSON merge patch that makes `new` of `old`: what is gone is set to null.
pub(in crate::controller) fn merge_patch(old: &Value, new: &Value) -> Value {
    let (Value::Object(old), Value::Object(new)) = (old, new) else {
        return new.clone();
    };
    let gone = old
        .keys()
        .filter(|key| !new.contains_key(*key))
        .map(|key| (key.clone(), Value::Null));
    let changed = new
        .iter()
        .filter(|(key, value)| old.get(*key) != Some(*value))
        .map(|(key, value)| (key.clone(), merge_patch(old.get(key).unwrap_or(&Value::Null), value)));
    gone.chain(changed).collect()
}

/// An object that this version cannot read says so itself, once per version of the object.
pub(super) async fn unreadable(ctx: &ReconcileContext, object: &InvalidObject) -> Result<Action, ReconcileError> {
    let (meta, error) = (&object.metadata, object.error.as_str());
    let key = AgentKey {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
    };
    let now = (ctx.shared.clock)();
    let uid = meta.uid.as_deref().unwrap_or_default();
    let memory = ctx.shared.memory.load(&key, uid, now);
    if memory.accepted_generation == meta.generation {
        return Ok(Action::await_change());
    }
    let message = format!("this version of the controller cannot read the object: {error}");
    let reason = InvalidReason::InvalidSpec;
    let conditions: Vec<_> = [
        (ConditionType::Ready, false),
        (ConditionType::Stalled, true),
        (ConditionType::Accepted, false),
    ]
    .map(|(type_, status)| condition(type_, status, reason.as_ref(), message.clone(), meta.generation, now))
    .into();
    let patch = json!({
        "metadata": { "resourceVersion": meta.resource_version },
        "status": { "observedGeneration": meta.generation, "conditions": conditions },
    });
    let api: Api<DynamicObject> = Api::namespaced_with(
        ctx.shared.client.clone(),
        &key.namespace,
        &ApiResource::erase::<Agent>(&()),
    );
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let patched = api.patch_status(&key.name, &params, &patch);
    match find("write the status", patched).await {
        Err(error) if error.is(Status::is_conflict) => return Ok(Action::requeue(CONFLICT_RETRY)),
        written => written?,
    };
    tracing::error!(
        namespace = key.namespace,
        agent = key.name,
        error,
        "an Agent cannot be read"
    );
    ctx.shared
        .memory
        .update(&key, uid, |memory| memory.accepted_generation = meta.generation);
    Ok(Action::await_change())
}
