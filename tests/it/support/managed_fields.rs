//! Whose the fields of an object are, as an API server keeps it: a field that one changes is no longer another's.
//!
//! Fields are paths to values, and a list is one value.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde_json::{Value, json};

type Leaves = BTreeMap<String, Value>;

/// Notes what one who calls himself `manager` has made of `old`. `applied`: what he applied, and not just changed.
pub fn note(old: &Value, new: &mut Value, manager: &str, applied: Option<&Value>, now: Timestamp) {
    let changed = changed(&leaves(old), &leaves(new));
    let mut entries = new["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    for entry in entries.iter_mut().filter(|entry| entry["manager"] != manager) {
        set_fields(entry, fields(entry).difference(&changed).cloned().collect());
    }
    let mine = entries.iter().position(|entry| entry["manager"] == manager);
    let operation = if applied.is_some() { "Apply" } else { "Update" };
    let mine = mine.map_or_else(
        || json!({ "manager": manager, "operation": operation }),
        |at| entries.remove(at),
    );
    let wanted: BTreeSet<String> = match applied {
        Some(applied) => leaves(applied).into_keys().collect(),
        None => fields(&mine).union(&changed).cloned().collect(),
    };
    let mut next = mine.clone();
    set_fields(&mut next, wanted);
    if next != mine || !changed.is_empty() {
        next["time"] = json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
    entries.push(next);
    entries.retain(|entry| !fields(entry).is_empty());
    entries.sort_by_key(|entry| entry["manager"].as_str().unwrap().to_owned());
    new["metadata"]["managedFields"] = json!(entries);
}

fn fields(entry: &Value) -> BTreeSet<String> {
    let fields = entry["fieldsV1"].as_object();
    fields.into_iter().flat_map(serde_json::Map::keys).cloned().collect()
}

fn set_fields(entry: &mut Value, fields: BTreeSet<String>) {
    let fields: serde_json::Map<_, _> = fields.into_iter().map(|field| (field, json!({}))).collect();
    entry["fieldsV1"] = Value::Object(fields);
}

fn changed(old: &Leaves, new: &Leaves) -> BTreeSet<String> {
    let all = old.keys().chain(new.keys());
    all.filter(|path| old.get(*path) != new.get(*path)).cloned().collect()
}

/// All but what the server itself fills in.
fn leaves(object: &Value) -> Leaves {
    let mut leaves = Leaves::new();
    for (key, value) in object.as_object().into_iter().flatten() {
        match key.as_str() {
            "apiVersion" | "kind" | "status" => {}
            "metadata" => {
                for kept in ["labels", "annotations", "ownerReferences"] {
                    collect(&value[kept], &format!("metadata.{kept}"), &mut leaves);
                }
            }
            _ => collect(value, key, &mut leaves),
        }
    }
    leaves
}

fn collect(value: &Value, path: &str, leaves: &mut Leaves) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (key, value) in fields {
                collect(value, &format!("{path}.{key}"), leaves);
            }
        }
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            leaves.insert(path.to_owned(), value.clone());
        }
    }
}
