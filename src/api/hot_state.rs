//! `spec.hotState`: typed fields with the present state of the outside world.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A field's name, which precedes its value in the prompt.
const FIELD: &str = "^[a-zA-Z][a-zA-Z0-9_]*$";
/// A tool's name, as the model calls it, or as its server has it.
const TOOL: &str = "^[!-~]+$";

/// Typed fields with the present state of the outside world, shown to the model with each call, after the conversation.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct HotStateSpec {
    /// Fields, in the order in which the prompt shows them, at most 32. Undeclared fields are never shown. Values are
    /// kept in memory only and are lost when the pod restarts. A value may have at most 8,192 bytes as JSON, all values
    /// together at most 32,768.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub fields: Vec<HotField>,
}

/// One field of the hot state.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.maxItems) || self.type == 'Array'").message(
        "spec.hotState.fields[].maxItems is supported with type Array only: remove it, or set type to Array"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct HotField {
    /// Name of the field: at most 63 letters, digits and '_', starting with a letter.
    #[schemars(length(min = 1, max = 63), regex(pattern = FIELD))]
    pub name: String,
    /// Type of the value. A value of another type is rejected, and the last valid one is kept.
    pub r#type: FieldType,
    /// Age in seconds, 1 to 2,592,000, from which on a value is marked as stale: `(stale: 2m ago)`. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub ttl_seconds: Option<u32>,
    /// Maximum number of items of an Array, 1 to 1,000; the oldest are dropped. Absent: limited only by size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_items: Option<u32>,
    /// Tool that is run without arguments before a turn when the field is stale or has no value. Its result becomes the
    /// value. The name as the model calls it (`<server>__<tool>`), or the tool's own name if only one server has it.
    /// Only tools with effect `Read` are run. If the tool fails, the last valid value is kept and the turn starts
    /// nevertheless.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), regex(pattern = TOOL))]
    pub refresh_tool: Option<String>,
}

/// Type of a field's value.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr, strum::Display)]
pub enum FieldType {
    /// A JSON object.
    Object,
    /// A number.
    Number,
    /// A text.
    String,
    /// True or false.
    Boolean,
    /// A list.
    Array,
}
