//! `spec.lightModel`: the schema of `spec.model` under its own name.

use schemars::Schema;
use serde_json::Value;

/// The sentence of `spec.model.contextTokens` that does not apply here, and its replacement: there is no conversation.
const WINDOW: &str = "The oldest turns are replaced with a summary before it is full.";
const LIGHT_WINDOW: &str = "The input of a pre-check or a score is truncated to fit.";

/// Replaces `spec.model` with `spec.lightModel` in the texts and rules of the schema.
pub(super) fn rename(schema: &mut Schema) {
    let mut value = std::mem::take(schema).to_value();
    rename_in(&mut value);
    if let Ok(renamed) = Schema::try_from(value) {
        *schema = renamed;
    }
}

fn rename_in(value: &mut Value) {
    match value {
        Value::String(text) => {
            *text = text
                .replace("spec.model", "spec.lightModel")
                .replace(WINDOW, LIGHT_WINDOW);
        }
        Value::Array(items) => items.iter_mut().for_each(rename_in),
        Value::Object(fields) => fields.values_mut().for_each(rename_in),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
