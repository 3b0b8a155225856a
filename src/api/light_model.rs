//! `spec.lightModel`: the shape of `spec.model` under its own name.

use schemars::Schema;
use serde_json::Value;

/// What `spec.model` says of its window, and what holds for this one: it has no conversation.
const WINDOW: &str = "A summary takes the place of the oldest turns before it is full.";
const LIGHT_WINDOW: &str = "What a pre-check or a score tells it is cut to fit.";

/// Lets texts and rules of the schema speak of `spec.lightModel`.
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
