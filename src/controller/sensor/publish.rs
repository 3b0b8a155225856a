//! One reconcile, and its last step: writes the status when it is due, as the difference to what is there, and tells its
//! transitions.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::Status;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::apply::{ApplyOutcome, SensorObstacle, apply};
use super::children::SensorChildren;
use super::conditions::{self, INVALID_SPEC};
use super::events;
use super::index::SensorKey;
use super::pod;
use super::registry::{ObservedSensor, SensorRegistry};
use super::status::{self, ComputedStatus, OwnPod, SensorStatusInput, compute, urgent};
use crate::api::Sensor;
use crate::api::condition::{self, ConditionType, condition};
use crate::api::sensor::SensorStatus;
use crate::controller::agent::backoff::REFERENCES;
use crate::controller::agent::error::{ReconcileError, find};
use crate::controller::agent::publish::{CONFLICT_RETRY, merge_patch};
use crate::controller::delivery_relay::SILENCE;
use crate::controller::pod_sessions::AgentKey;

/// Makes what a Sensor needs, and says how it is.
pub(super) async fn reconcile(sensors: &SensorRegistry, key: &SensorKey) -> Result<Action, ReconcileError> {
    let Some(observed) = sensors.observe(key) else {
        return Ok(Action::await_change());
    };
    let sensor = &observed.known.object;
    if sensor.metadata.deletion_timestamp.is_some() {
        // Its objects go by their owner references.
        sensors.setup.relay.forget(key);
        return Ok(Action::await_change());
    }
    let has_pod = pod::has_pod(&sensor.spec.source);
    let ApplyOutcome { obstacle, again: waits } = match &observed.children {
        Some(children) => Box::pin(apply(sensors, key, &observed, children)).await?,
        // It is asked for again when they are known.
        None if has_pod => return Ok(Action::await_change()),
        None => ApplyOutcome::default(),
    };
    let uid = &observed.memory.uid;
    let obstructed = obstacle.as_ref().map(|_| observed.memory.obstructed.saturating_add(1));
    sensors.remember(key, uid, |memory| memory.obstructed = obstructed.unwrap_or_default());
    let next = publish(sensors, key, &observed, obstacle.as_ref()).await?;
    sensors.remember(key, uid, |memory| memory.errors = 0);
    // What stands in the way is not watched, so it is looked at.
    let again = obstructed.map(|times| REFERENCES.delay(times, uid));
    let delays = [next, again, waits].into_iter().flatten().min();
    Ok(delays.map_or_else(Action::await_change, Action::requeue))
}

/// Computes and, when it is due, writes the status of a Sensor; else says when it is.
async fn publish(
    sensors: &SensorRegistry,
    key: &SensorKey,
    observed: &ObservedSensor,
    obstacle: Option<&SensorObstacle>,
) -> Result<Option<Duration>, ReconcileError> {
    let now = (sensors.setup.clock)();
    let sensor = &observed.known.object;
    let (said, none) = (sensors.setup.relay.last_report(key), SensorChildren::default());
    let (silent, look_again) = silence(sensors, key, observed);
    let own = pod::has_pod(&sensor.spec.source).then(|| OwnPod {
        silent,
        pod: observed.children.as_ref().unwrap_or(&none).pod.as_ref(),
        said: said.as_ref(),
        obstacle,
    });
    let (version, old) = last_status(observed);
    let computed = compute(&SensorStatusInput {
        sensor,
        old: &old,
        problem: observed.known.problem.as_deref(),
        own,
        receivers: &observed.receivers,
        absent: &observed.absent,
        agents: &observed.agents,
        beyond: &observed.memory.beyond,
        now,
    });
    let new = &computed.status;
    wake_receivers(sensors, key, observed, new);
    let look_again = look_again.filter(|_| own.is_some());
    if old == *new {
        return Ok(look_again);
    }
    let pace = observed.memory.pace;
    let due = if status::news(&old) == status::news(new) {
        pace.next_minor()
    } else {
        pace.next(urgent(&old) != urgent(new))
    };
    if due > now {
        return Ok(Some(until(due, now)));
    }
    let about = sensor.object_ref(&());
    let notices = events::from_status(&old, new);
    if !write(sensors, key, observed, (version.as_deref(), &old), computed, now).await? {
        return Ok(Some(CONFLICT_RETRY));
    }
    sensors.setup.events.send(notices, &about);
    Ok(look_again)
}

/// Whether its own pod is silent, and when to look again: a pod that does not come to be is in no sweep.
fn silence(sensors: &SensorRegistry, key: &SensorKey, observed: &ObservedSensor) -> (bool, Option<Duration>) {
    if let Some(silent) = sensors.setup.relay.is_silent(key) {
        return (silent, None);
    }
    let left = SILENCE.saturating_sub(observed.memory.since.elapsed());
    (left.is_zero(), (!left.is_zero()).then_some(left))
}

/// What keeps a Sensor's own pod from listening is a condition of its receivers too: they look when it begins and ends.
fn wake_receivers(sensors: &SensorRegistry, key: &SensorKey, observed: &ObservedSensor, status: &SensorStatus) {
    let own = pod::has_pod(&observed.known.object.spec.source);
    let connected = condition::find(&status.conditions, ConditionType::Connected).filter(|_| own);
    let trouble = connected.filter(|held| conditions::is_failing(&held.reason));
    let trouble = trouble.map(|held| held.message.clone());
    if observed.memory.looked && observed.memory.trouble == trouble {
        return;
    }
    sensors.remember(key, &observed.memory.uid, |memory| {
        (memory.trouble, memory.looked) = (trouble, true);
    });
    for receiver in &observed.receivers {
        sensors.setup.loops.request_reconcile(&AgentKey {
            namespace: key.namespace.clone(),
            name: receiver.name.clone(),
        });
    }
}

/// The status as it is, and the version of the object that has it: the watch may lag behind our own last write.
fn last_status(observed: &ObservedSensor) -> (Option<String>, SensorStatus) {
    let sensor = &observed.known.object;
    let seen = sensor.resource_version();
    if let Some((version, status)) = &observed.memory.written
        && seen.as_deref().and_then(number) < number(version)
    {
        return (Some(version.clone()), status.clone());
    }
    (seen, sensor.status.clone().unwrap_or_default())
}

fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

/// Writes a status in place of the one it was computed from, and of no other; false: that is not the present one any more.
async fn write(
    sensors: &SensorRegistry,
    key: &SensorKey,
    observed: &ObservedSensor,
    (version, old): (Option<&str>, &SensorStatus),
    computed: ComputedStatus,
    now: Timestamp,
) -> Result<bool, ReconcileError> {
    let api: Api<Sensor> = Api::namespaced(sensors.setup.client.clone(), &key.namespace);
    // The first time all is written, so that no column is empty where it should say 0.
    let before = if old.observed_generation.is_some() {
        json!(old)
    } else {
        json!({})
    };
    let patch = json!({
        "metadata": { "resourceVersion": version },
        "status": merge_patch(&before, &json!(computed.status)),
    });
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let patched = api.patch_status(&key.name, &params, &patch);
    let written = match find("write the status of a Sensor", patched).await {
        Ok(Some(written)) => written,
        // The Sensor was deleted meanwhile.
        Ok(None) => return Ok(true),
        Err(error) if error.is(Status::is_conflict) => return Ok(false),
        Err(error) => return Err(error),
    };
    sensors.remember(key, &observed.memory.uid, |memory| {
        memory.pace.record_write(now);
        memory.beyond = computed.beyond;
        memory.written = written.resource_version().map(|version| (version, computed.status));
    });
    Ok(true)
}

fn until(moment: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(moment.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// An object that this version cannot read says so itself; it is watched as it was last read.
pub(super) async fn unreadable(sensors: &SensorRegistry, object: &InvalidObject) -> Result<Action, ReconcileError> {
    let (meta, error) = (&object.metadata, object.error.as_str());
    let (namespace, name) = (
        meta.namespace.clone().unwrap_or_default(),
        meta.name.clone().unwrap_or_default(),
    );
    // A constant, so that saying it again changes nothing.
    let since = meta
        .creation_timestamp
        .as_ref()
        .map_or(Timestamp::UNIX_EPOCH, |at| at.0);
    let message = format!("this version of the controller cannot read the object: {error}");
    let conditions: Vec<_> = [
        (ConditionType::Ready, false),
        (ConditionType::Stalled, true),
        (ConditionType::Accepted, false),
    ]
    .map(|(type_, status)| condition(type_, status, INVALID_SPEC, message.clone(), meta.generation, since))
    .into();
    let patch = json!({ "status": { "observedGeneration": meta.generation, "conditions": conditions } });
    let resource = ApiResource::erase::<Sensor>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(sensors.setup.client.clone(), &namespace, &resource);
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let patched = api.patch_status(&name, &params, &patch);
    find("write the status of a Sensor", patched).await?;
    tracing::error!(namespace, sensor = name, error, "a Sensor cannot be read");
    Ok(Action::await_change())
}
