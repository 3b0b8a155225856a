//! `spec.hotState`: what the loop knows of the present moment, field by field.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A field's name: it stands before its value in the prompt.
const FIELD: &str = "^[a-zA-Z][a-zA-Z0-9_]*$";
/// A tool's name, as the model calls it, or as its server has it.
const TOOL: &str = "^[!-~]+$";

/// What the loop knows of the present moment. Shown to the model with each call, after the conversation.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct HotState {
    /// Its fields, in the order of the prompt; at most 32. Nothing else is ever shown. Values are kept in memory only: each
    /// start of the pod begins without them. A value may have 8,192 bytes as JSON, all of them together 32,768.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub fields: Vec<HotField>,
}

/// One field.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.maxItems) || self.type == 'Array'").message(
        "spec.hotState.fields[].maxItems is for type Array only: remove it, or set type to Array"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct HotField {
    /// Name of the field: at most 63 letters, digits and '_', the first one a letter.
    #[schemars(length(min = 1, max = 63), regex(pattern = FIELD))]
    pub name: String,
    /// Type of its value; a value of another type is refused, and the last good one stays.
    pub r#type: FieldType,
    /// Seconds, 1 to 2,592,000, after which a value is marked `(stale: 2m ago)`. Absent: it never is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub ttl_seconds: Option<u32>,
    /// Items of an Array, 1 to 1,000: the last ones stay. Absent: only its size bounds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_items: Option<u32>,
    /// Tool that is run without arguments before a turn when the field is stale or has no value; its result becomes the
    /// value. Its name as the model calls it (`<server>__<tool>`), or the tool's own where only one server has it. Only a
    /// tool with effect `Read` is run. When it fails, the last good value stays, and the turn begins all the same.
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
