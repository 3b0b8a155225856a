//! One reconcile, and its last step: writes the status when it is due, as a patch of the differences, and sends Events
//! for its transitions.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::Api;
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::apply::{ApplyOutcome, SensorObstacle, apply, keep};
use super::children::SensorChildren;
use super::conditions;
use super::events;
use super::index::SensorKey;
use super::pod;
use super::registry::{ObservedSensor, SensorRegistry};
use super::status::{self, ComputedStatus, OwnPod, SensorStatusInput, compute, urgent};
use crate::api::Sensor;
use crate::api::condition::{self, ConditionType};
use crate::api::sensor::SensorStatus;
use crate::controller::delivery_relay::SILENCE;
use crate::controller::pod_sessions::AgentKey;
use crate::controller::runtime::Requeue;
use crate::controller::runtime::backoff::{REFERENCES, until};
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::guarded::InvalidObject;
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::status_writer::{
    CONFLICT_RETRY, StatusWrite, last_status, merge_patch, write_status, write_unreadable,
};

/// Applies the Sensor's objects and updates its status.
pub(super) async fn reconcile(sensors: &SensorRegistry, key: &SensorKey) -> Result<Requeue, ReconcileError> {
    let Some(observed) = sensors.observe(key) else {
        return Ok(Requeue::AwaitChange);
    };
    let sensor = &observed.known.object;
    if sensor.metadata.deletion_timestamp.is_some() {
        // Its objects are garbage-collected through their owner references.
        sensors.setup.relay.forget(key);
        return Ok(Requeue::AwaitChange);
    }
    if observed.known.is_pending() {
        // The verdict asks for another reconcile. Until then the status stays that of the generation that it names.
        if let Some(children) = &observed.children {
            keep(sensors, key, &observed, children);
        }
        return Ok(Requeue::AwaitChange);
    }
    let has_pod = pod::has_pod(&sensor.spec.source);
    let ApplyOutcome { obstacle, again: waits } = match &observed.children {
        Some(children) => Box::pin(apply(sensors, key, &observed, children)).await?,
        // The listing of the child objects requests another reconcile.
        None if has_pod => return Ok(Requeue::AwaitChange),
        None => ApplyOutcome::default(),
    };
    let uid = &observed.memory.uid;
    let obstructed = obstacle.as_ref().map(|_| observed.memory.obstructed.saturating_add(1));
    sensors.remember(key, uid, |memory| memory.obstructed = obstructed.unwrap_or_default());
    let next = publish(sensors, key, &observed, obstacle.as_ref()).await?;
    sensors.remember(key, uid, |memory| memory.errors = 0);
    // Obstacles are not watched, so they are checked again with backoff.
    let again = obstructed.map(|times| REFERENCES.delay(times, uid));
    let objects = [again, waits].into_iter().flatten().min();
    Ok(Requeue::after(next, Priority::Low).or_sooner(Requeue::after(objects, Priority::High)))
}

/// Computes the status and writes it if it is due; otherwise returns the time until it is.
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
    let last = last_status(
        sensor.resource_version(),
        sensor.status.as_ref(),
        observed.memory.written.as_ref(),
    );
    let (version, old) = (last.version, last.status);
    let computed = compute(&SensorStatusInput {
        sensor,
        old: &old,
        problem: observed.known.problem(),
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
    // Three speeds: conditions as soon as the throttle allows, figures after 15 s, and counters that may grow without
    // news after 5 min. So neither a busy source nor refused requests cause a write each.
    let due = if status::news(&old) == status::news(new) {
        pace.next_minor()
    } else {
        pace.next(urgent(&old) != urgent(new))
    };
    if due > now {
        return Ok(Some(earliest(until(due, now), look_again)));
    }
    let about = sensor.object_ref(&());
    // Events are derived from the written transition and sent after the write: a failed write is computed again, and
    // its Events are not sent twice.
    let notices = events::from_status(&old, new);
    if !write(sensors, key, observed, (version.as_deref(), &old), computed, now).await? {
        return Ok(Some(CONFLICT_RETRY));
    }
    sensors.setup.events.send(notices, &about);
    Ok(look_again)
}

/// Whether the Sensor's own pod is silent, and when to check again: the sweep covers no pod that never came up.
fn silence(sensors: &SensorRegistry, key: &SensorKey, observed: &ObservedSensor) -> (bool, Option<Duration>) {
    if let Some(silent) = sensors.setup.relay.is_silent(key) {
        return (silent, None);
    }
    let left = SILENCE.saturating_sub(observed.memory.since.elapsed());
    (left.is_zero(), (!left.is_zero()).then_some(left))
}

/// A failure of the Sensor's own pod is a condition of its receivers too: reconciles them when it begins and ends.
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

/// Replaces the status that the new one was computed from. Returns false on a conflict: the object changed meanwhile.
async fn write(
    sensors: &SensorRegistry,
    key: &SensorKey,
    observed: &ObservedSensor,
    (version, old): (Option<&str>, &SensorStatus),
    computed: ComputedStatus,
    now: Timestamp,
) -> Result<bool, ReconcileError> {
    let api: Api<Sensor> = Api::namespaced(sensors.setup.client.clone(), &key.namespace);
    // The first write is complete, so that no printer column is empty where it should say 0.
    let before = if old.observed_generation.is_some() {
        json!(old)
    } else {
        json!({})
    };
    let changes = merge_patch(&before, &json!(computed.status));
    let version = match write_status(&api, &key.name, version, changes).await? {
        StatusWrite::Written(version) => version,
        StatusWrite::Gone => return Ok(true),
        StatusWrite::Conflict => return Ok(false),
    };
    sensors.remember(key, &observed.memory.uid, |memory| {
        memory.pace.record_write(now);
        memory.beyond = computed.beyond;
        memory.written = version.map(|version| (version, computed.status));
    });
    Ok(true)
}

/// When to reconcile again: for the write that is due, or for the check that comes first. A status whose counters may
/// wait for minutes must not delay the report of a silent pod.
fn earliest(write: Duration, look_again: Option<Duration>) -> Duration {
    look_again.map_or(write, |look_again| look_again.min(write))
}

/// Reports in the status that this version cannot parse the object. The Sensor continues to run as last read.
pub(super) async fn unreadable(sensors: &SensorRegistry, object: &InvalidObject) -> Result<Requeue, ReconcileError> {
    // A constant time, so that a repeated write changes nothing.
    let created = object.metadata.creation_timestamp.as_ref();
    let since = created.map_or(Timestamp::UNIX_EPOCH, |at| at.0);
    let written = write_unreadable::<Sensor>(&sensors.setup.client, object, since).await?;
    Ok(Requeue::after((!written).then_some(CONFLICT_RETRY), Priority::Low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_wait_for_minutes_do_not_delay_the_check_for_a_silent_pod() {
        let (minutes, seconds) = (Duration::from_mins(5), Duration::from_secs(20));
        assert_eq!(earliest(minutes, Some(seconds)), seconds);
        assert_eq!(earliest(seconds, Some(minutes)), seconds);
        assert_eq!(earliest(minutes, None), minutes);
    }
}
