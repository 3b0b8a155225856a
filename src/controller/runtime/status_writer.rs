//! What the writers of all statuses share: merge patches, and the report on an object that cannot be parsed.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::Status;
use kube::{Client, Resource};
use serde_json::{Value, json};

use super::error::{ReconcileError, find};
use super::guarded::InvalidObject;
use crate::api::condition::{ConditionType, condition};
use crate::api::unreadable::describe;

/// Delay after a conflicting write of another client; by then the watch has delivered the new version.
pub(in crate::controller) const CONFLICT_RETRY: Duration = Duration::from_millis(500);
/// Reason of the conditions of an object that cannot be parsed.
const INVALID_SPEC: &str = "InvalidSpec";

/// Whether the watch, which has delivered version `seen`, lags behind the controller's own write of version `written`.
/// Resource versions are compared as numbers.
pub(in crate::controller) fn lags(seen: Option<&str>, written: &str) -> bool {
    let number = |version: &str| version.parse::<u64>().ok();
    seen.and_then(number) < number(written)
}

/// A JSON merge patch from `old` to `new`; removed fields are set to null.
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

/// Reports in the status of an object that this version cannot parse it. Returns false on a conflict: the object has
/// changed. `since`: the transition time of the conditions.
pub(in crate::controller) async fn write_unreadable<K: Resource<DynamicType = ()>>(
    client: &Client,
    object: &InvalidObject,
    since: Timestamp,
) -> Result<bool, ReconcileError> {
    let (meta, error) = (&object.metadata, describe(&object.error));
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let name = meta.name.as_deref().unwrap_or_default();
    let message = format!("this version of the controller cannot parse the object: {error}");
    let conditions = [
        (ConditionType::Ready, false),
        (ConditionType::Stalled, true),
        (ConditionType::Accepted, false),
    ]
    .map(|(type_, status)| condition(type_, status, INVALID_SPEC, message.clone(), meta.generation, since));
    let patch = json!({
        "metadata": { "resourceVersion": meta.resource_version },
        "status": { "observedGeneration": meta.generation, "conditions": conditions },
    });
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &ApiResource::erase::<K>(&()));
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    match find("write the status", api.patch_status(name, &params, &patch)).await {
        Err(error) if error.is(Status::is_conflict) => return Ok(false),
        written => written?,
    };
    tracing::error!(object = %K::kind(&()), namespace, name, error, "failed to parse an object; it is not reconciled");
    Ok(true)
}
