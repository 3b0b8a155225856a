//! What the writers of statuses share: the last known status, the guarded write, merge patches, and the report on an object
//! that cannot be parsed.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::Status;
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
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
fn lags(seen: Option<&str>, written: &str) -> bool {
    let number = |version: &str| version.parse::<u64>().ok();
    seen.and_then(number) < number(written)
}

/// A status, and the resource version of the object that has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::controller) struct LastStatus<S> {
    pub(in crate::controller) version: Option<String>,
    pub(in crate::controller) status: S,
    /// Whether this is the controller's own last write, which the watch has not delivered yet.
    pub(in crate::controller) is_ahead_of_watch: bool,
}

/// The latest status. The watch may lag behind the controller's own last write, so the newer of both is used. `written`:
/// the status last written and the resource version that the write returned.
pub(in crate::controller) fn last_status<S: Clone + Default>(
    seen: Option<String>,
    status: Option<&S>,
    written: Option<&(String, S)>,
) -> LastStatus<S> {
    match written {
        Some((version, status)) if lags(seen.as_deref(), version) => LastStatus {
            version: Some(version.clone()),
            status: status.clone(),
            is_ahead_of_watch: true,
        },
        Some(_) | None => LastStatus {
            version: seen,
            status: status.cloned().unwrap_or_default(),
            is_ahead_of_watch: false,
        },
    }
}

/// The result of [`write_status`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::controller) enum StatusWrite {
    /// Written; the object now has this resource version.
    Written(Option<String>),
    /// The object was deleted.
    Gone,
    /// The object has changed since the status was computed.
    Conflict,
}

/// Applies `changes` to the status of the object if it still has this resource version. A replaced leader that does not know
/// it yet therefore cannot overwrite what its successor wrote.
pub(in crate::controller) async fn write_status<K: Resource<DynamicType = ()> + DeserializeOwned>(
    api: &Api<K>,
    name: &str,
    version: Option<&str>,
    changes: Value,
) -> Result<StatusWrite, ReconcileError> {
    let patch = json!({ "metadata": { "resourceVersion": version }, "status": changes });
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    match find("write the status", api.patch_status(name, &params, &patch)).await {
        Ok(Some(written)) => Ok(StatusWrite::Written(written.resource_version())),
        Ok(None) => Ok(StatusWrite::Gone),
        Err(error) if error.is(Status::is_conflict) => Ok(StatusWrite::Conflict),
        Err(error) => Err(error),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_of_the_watch_and_the_own_write_is_the_last_status() {
        let written = ("10".to_owned(), "own");
        let ahead = last_status(Some("9".into()), Some(&"seen"), Some(&written));
        assert_eq!((ahead.status, ahead.version.as_deref()), ("own", Some("10")));
        assert!(ahead.is_ahead_of_watch, "9 is older than 10");
        for seen in ["10", "11"] {
            let seen = last_status(Some(seen.into()), Some(&"seen"), Some(&written));
            assert_eq!((seen.status, seen.is_ahead_of_watch), ("seen", false));
        }
        assert_eq!(
            last_status::<u8>(None, None, None),
            LastStatus::default(),
            "an object without status"
        );
    }
}
