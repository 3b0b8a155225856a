//! One reconcile: runs the steps in order, and records in the memory what each of them leaves behind.

use jiff::Timestamp;

use super::apply::apply;
use super::decide::decide;
use super::objects;
use super::observe::observe;
use super::publish::{Publication, publish};
use super::registry::SensorRegistry;
use crate::api::{NamespacedName, Sensor};
use crate::controller::runtime::Requeue;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::guarded::InvalidObject;
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::status_writer::{CONFLICT_RETRY, write_unreadable};

/// Applies the Sensor's objects and updates its status.
pub(super) async fn reconcile(sensors: &SensorRegistry, key: &NamespacedName) -> Result<Requeue, ReconcileError> {
    Box::pin(steps(sensors, key)).await
}

async fn steps(sensors: &SensorRegistry, key: &NamespacedName) -> Result<Requeue, ReconcileError> {
    let Some(snapshot) = sensors.snapshot(key) else {
        return Ok(Requeue::AwaitChange);
    };
    let objects = objects::steps(&snapshot, &sensors.setup.pods);
    let observed = observe(sensors, snapshot, objects.needs_secrets()).await?;
    let plan = decide(&observed, objects);
    let uid = &observed.snapshot.memory.uid;
    sensors.update_memory(key, uid, |memory| memory.record_plan(&plan));

    let mut applied = Box::pin(apply(sensors, key, &plan)).await;
    sensors.update_memory(key, uid, |memory| memory.record_applied(&applied, observed.snapshot.at));
    if let Some(failure) = applied.failure.take() {
        return Err(failure);
    }
    if !plan.reports_status {
        return Ok(Requeue::AwaitChange);
    }

    let publication = Publication::of(&observed, &plan, &applied);
    sensors.update_memory(key, uid, |memory| memory.record_status(&publication));
    let recheck = Requeue::after(publication.recheck, Priority::High);
    let published = publish(sensors, &observed, publication).await?;
    let next = Requeue::after(published.next, Priority::Low);
    sensors.update_memory(key, uid, |memory| {
        memory.record_published(published, observed.snapshot.now);
    });
    Ok(next.or_sooner(recheck))
}

/// Reports in the status that this version cannot parse the object. The Sensor continues to run as last read.
pub(super) async fn report_unreadable(
    sensors: &SensorRegistry,
    object: &InvalidObject,
) -> Result<Requeue, ReconcileError> {
    // A constant time, so that a repeated write changes nothing.
    let created = object.metadata.creation_timestamp.as_ref();
    let since = created.map_or(Timestamp::UNIX_EPOCH, |at| at.0);
    let written = write_unreadable::<Sensor>(&sensors.setup.client, object, since).await?;
    Ok(Requeue::after((!written).then_some(CONFLICT_RETRY), Priority::Low))
}
