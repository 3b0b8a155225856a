//! The managers of an applied object's fields: who changes a field takes it from its previous manager. Pure.
//!
//! Fields are paths to values, a list is one value, and their names are not those of `FieldsV1`: the controller compares
//! fields and does not parse them.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde_json::{Value, json};

use agentloop_support::clock::rfc3339_seconds;

type Leaves = BTreeMap<String, Value>;

/// Records that `manager` has changed `old` to `new`. `applied`: what it applied, if it was an apply.
pub(super) fn record(old: &Value, new: &mut Value, manager: &str, applied: Option<&Value>, now: Timestamp) {
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
        next["time"] = json!(rfc3339_seconds(now));
    }
    entries.push(next);
    entries.retain(|entry| !fields(entry).is_empty());
    entries.sort_by_key(|entry| entry["manager"].as_str().unwrap_or_default().to_owned());
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

/// The values of an object, without those that the server fills in.
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

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn managers(object: &Value) -> Vec<(String, Vec<String>)> {
        let entries = object["metadata"]["managedFields"].as_array().unwrap();
        let of = |entry: &Value| {
            (
                entry["manager"].as_str().unwrap().to_owned(),
                fields(entry).into_iter().collect(),
            )
        };
        entries.iter().map(of).collect()
    }

    #[test]
    fn a_client_that_changes_an_applied_field_manages_it_until_the_next_apply() {
        let (now, text) = (Timestamp::UNIX_EPOCH, str::to_owned);
        let applied = json!({"spec": {"a": 1, "b": 2}});
        let mut object = applied.clone();
        record(&json!({}), &mut object, "controller", Some(&applied), now);
        assert_eq!(
            managers(&object),
            [(text("controller"), vec![text("spec.a"), text("spec.b")])]
        );

        let before = object.clone();
        object["spec"]["b"] = json!(3);
        record(&before, &mut object, "user", None, now);
        let expected = [
            (text("controller"), vec![text("spec.a")]),
            (text("user"), vec![text("spec.b")]),
        ];
        assert_eq!(managers(&object), expected);

        let before = object.clone();
        object["spec"]["b"] = json!(2);
        record(&before, &mut object, "controller", Some(&applied), now);
        assert_eq!(
            managers(&object),
            [(text("controller"), vec![text("spec.a"), text("spec.b")])]
        );
    }
}
