//! What the commands write: annotations of Agents and AgentBudgets, `spec.suspend`, `spec.topUps`. Nothing else.
//!
//! What to write is decided by pure functions of the object; the object is read again when another client has changed it
//! in the meantime.

pub mod answers;
pub mod loop_requests;
pub mod top_up;

use axum::http::Request;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::failure::{PluginError, is_conflict};
use super::session::get;
use crate::api::NamespacedName;

/// Name under which the API server lists the fields that the plugin sets.
const MANAGER: &str = "kubectl-agentloop";
/// Maximum number of attempts while other clients change the object.
const MAX_ATTEMPTS: u32 = 5;

/// What is to be written, and the message for the user.
pub struct PlannedWrite {
    /// A merge patch (an object), or a JSON patch (a list); `None`: nothing is to be written.
    pub patch: Option<Value>,
    /// What was done.
    pub message: String,
}

/// Reads an object, plans a write, and writes it onto exactly the version that was read. Returns the message.
pub async fn write<K>(
    api: &Api<K>,
    (kind, name): (&str, &NamespacedName),
    mut plan: impl FnMut(&K) -> Result<PlannedWrite, PluginError>,
) -> Result<String, PluginError>
where
    K: Clone + DeserializeOwned + std::fmt::Debug + kube::Resource<DynamicType = ()>,
{
    let mut attempt = 1;
    loop {
        let object = get(api, kind, name).await?;
        let planned = plan(&object)?;
        let Some(patch) = planned.patch else {
            return Ok(planned.message);
        };
        let version = object.meta().resource_version.clone().unwrap_or_default();
        let written = if let Value::Array(steps) = patch {
            patch_steps(api, &name.name, steps, &version).await
        } else {
            let mut patch = patch;
            patch["metadata"]["resourceVersion"] = version.clone().into();
            let parameters = PatchParams {
                field_manager: Some(MANAGER.into()),
                ..PatchParams::default()
            };
            let written = api.patch(&name.name, &parameters, &Patch::Merge(&patch)).await;
            written.map(|_| ())
        };
        match written {
            Ok(()) => return Ok(planned.message),
            Err(error) if attempt < MAX_ATTEMPTS && has_changed(api, name, &version, &error).await => attempt += 1,
            Err(error) => return Err(PluginError::cluster(format!("change {kind} {name}"), &error)),
        }
    }
}

/// A JSON patch, which leaves alone what this version of the API does not know. It applies to this version of the object only.
async fn patch_steps<K>(api: &Api<K>, name: &str, steps: Vec<Value>, version: &str) -> Result<(), kube::Error>
where
    K: Clone + kube::Resource,
{
    let mut patch = vec![json!({"op": "test", "path": "/metadata/resourceVersion", "value": version})];
    patch.extend(steps);
    let request = Request::builder()
        .method("PATCH")
        .uri(format!("{}/{name}?fieldManager={MANAGER}", api.resource_url()))
        .header("Content-Type", "application/json-patch+json")
        .body(Value::Array(patch).to_string().into_bytes());
    let request = request.map_err(kube::Error::HttpError)?;
    api.clone().into_client().request::<Value>(request).await.map(drop)
}

/// Whether a write failed because another client has changed the object. A test in a JSON patch that fails is reported in the
/// same way as an invalid object (422), so that the version decides.
async fn has_changed<K>(api: &Api<K>, name: &NamespacedName, version: &str, error: &kube::Error) -> bool
where
    K: Clone + DeserializeOwned + std::fmt::Debug + kube::Resource,
{
    if is_conflict(error) {
        return true;
    }
    if !matches!(error, kube::Error::Api(status) if status.code == 422) {
        return false;
    }
    let now = api.get(&name.name).await;
    now.is_ok_and(|now| now.meta().resource_version.as_deref() != Some(version))
}
