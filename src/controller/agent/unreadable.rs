//! Reports Agents that this version cannot parse.

use super::reconcile::ReconcileContext;
use crate::api::{Agent, NamespacedName};
use crate::controller::runtime::Requeue;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::guarded::InvalidObject;
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::status_writer::{CONFLICT_RETRY, write_unreadable};

/// Reports an object that this version cannot parse in the status of the object, once per generation.
pub(super) async fn report_unreadable(
    ctx: &ReconcileContext,
    object: &InvalidObject,
) -> Result<Requeue, ReconcileError> {
    let meta = &object.metadata;
    let key = NamespacedName::of_metadata(meta);
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
