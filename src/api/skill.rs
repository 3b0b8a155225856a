//! `spec.skills`: texts of the system prompt that several Agents can share.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::agent::KeyRef;

/// A skill's name: it becomes a file's name, and a heading of the system prompt.
const SKILL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";

/// A text that joins the system prompt under a name.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Skill {
    /// Name of the skill, its heading in the system prompt: at most 63 lower-case letters, digits and '-'.
    #[schemars(length(min = 1, max = 63), regex(pattern = SKILL))]
    pub name: String,
    /// The ConfigMap and its key.
    pub config_map_key_ref: KeyRef,
}
