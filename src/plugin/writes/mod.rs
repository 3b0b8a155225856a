//! What the commands write: annotations of Agents and AgentBudgets, `spec.suspend`, `spec.topUps`. Nothing else.
//!
//! What to write is decided by pure functions of the object; the object is read again when another client has changed it
//! in the meantime.

pub mod answers;
pub mod loop_requests;
pub mod top_up;

use kube::Api;
use kube::api::{Patch, PatchParams};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::failure::{PluginError, is_conflict};
use super::session::get;
use crate::api::NamespacedName;

/// Name under which the API server lists the fields that the plugin sets.
const MANAGER: &str = "kubectl-agentloop";
/// Most attempts while other clients change the object.
const MAX_ATTEMPTS: u32 = 5;

/// What is to be written, and what the user is told.
pub struct PlannedWrite {
    /// A merge patch; `None`: nothing is to be written.
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
    K: Clone + DeserializeOwned + std::fmt::Debug + kube::Resource,
{
    let mut attempt = 1;
    loop {
        let object = get(api, kind, name).await?;
        let planned = plan(&object)?;
        let Some(mut patch) = planned.patch else {
            return Ok(planned.message);
        };
        patch["metadata"]["resourceVersion"] = object.meta().resource_version.clone().into();
        let parameters = PatchParams {
            field_manager: Some(MANAGER.into()),
            ..PatchParams::default()
        };
        match api.patch(&name.name, &parameters, &Patch::Merge(&patch)).await {
            Ok(_) => return Ok(planned.message),
            Err(error) if is_conflict(&error) && attempt < MAX_ATTEMPTS => attempt += 1,
            Err(error) => return Err(PluginError::cluster(format!("change {kind} {name}"), &error)),
        }
    }
}
