//! `spec.skills`: texts of the system prompt that several Agents can share.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::agent::KeyRef;
use super::bounds::DNS_LABEL;

/// A named text of the system prompt.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SkillSpec {
    /// Name of the skill and its heading in the system prompt: at most 63 lower-case letters, digits and '-'.
    #[schemars(length(min = 1, max = 63), regex(pattern = DNS_LABEL))]
    pub name: String,
    /// The ConfigMap and its key.
    pub config_map_key_ref: KeyRef,
}
