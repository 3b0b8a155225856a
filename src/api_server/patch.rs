//! The kinds of patches that the controller sends: RFC 7386, the operations `test`, `add` and `remove` of RFC 6902 on
//! fields, and server-side apply. Pure.
//!
//! As in Kubernetes, a `test` for null succeeds on a missing field.

use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub enum ObjectPatch {
    /// RFC 7386.
    Merge(Value),
    /// RFC 6902.
    Json(Value),
    /// Server-side apply with `force`. It merges: a list is one value, and a field that is no longer applied stays.
    Apply(Value),
}

/// Changes `object`, or returns why that is impossible; it may then be partly changed and must not be used.
pub fn change(object: &mut Value, patch: &ObjectPatch) -> Result<(), String> {
    match patch {
        ObjectPatch::Merge(patch) | ObjectPatch::Apply(patch) => {
            if !patch.is_object() {
                return Err("the patch must be an object".into());
            }
            merge(object, patch);
            Ok(())
        }
        ObjectPatch::Json(operations) => operations
            .as_array()
            .ok_or("a JSON patch must be a list")?
            .iter()
            .try_for_each(|operation| step(object, operation)),
    }
}

/// RFC 7386.
pub fn merge(old: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *old = patch.clone();
        return;
    };
    if !old.is_object() {
        *old = Value::Object(serde_json::Map::new());
    }
    let Some(old) = old.as_object_mut() else { return };
    for (key, value) in patch {
        if value.is_null() {
            old.remove(key);
        } else {
            merge(old.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

fn step(object: &mut Value, operation: &Value) -> Result<(), String> {
    let (path, value) = (operation["path"].as_str().unwrap_or_default(), &operation["value"]);
    let there = object.pointer(path).unwrap_or(&Value::Null);
    match operation["op"].as_str() {
        Some("test") if there == value => return Ok(()),
        Some("test") => return Err(format!("the test of {path} failed")),
        _ => {}
    }
    let (parent, field) = path
        .rsplit_once('/')
        .ok_or_else(|| format!("{path} is not a valid path"))?;
    let field = field.replace("~1", "/").replace("~0", "~");
    if let ("add", "-", Some(list)) = (
        operation["op"].as_str().unwrap_or_default(),
        &*field,
        object.pointer_mut(parent).and_then(Value::as_array_mut),
    ) {
        list.push(value.clone());
        return Ok(());
    }
    let parent = object.pointer_mut(parent).and_then(Value::as_object_mut);
    let parent = parent.ok_or_else(|| format!("the parent of {path} does not exist"))?;
    match operation["op"].as_str() {
        Some("add") => {
            parent.insert(field, value.clone());
            Ok(())
        }
        Some("remove") => {
            let removed = parent.remove(&field);
            removed.map(drop).ok_or_else(|| format!("{path} does not exist"))
        }
        other => Err(format!("unsupported operation {}", other.unwrap_or("without a name"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn changed(object: Value, patch: &ObjectPatch) -> Result<Value, String> {
        let mut object = object;
        change(&mut object, patch).map(|()| object)
    }

    #[test]
    fn a_merge_adds_replaces_and_removes() {
        let patch = ObjectPatch::Merge(json!({"a": {"b": null, "c": {"d": 1}}, "e": [2]}));
        let new = changed(json!({"a": {"b": 1, "f": 3}, "e": [1, 1]}), &patch);
        assert_eq!(new.unwrap(), json!({"a": {"f": 3, "c": {"d": 1}}, "e": [2]}));
    }

    #[test]
    fn a_json_patch_tests_adds_and_removes_and_null_is_what_is_not_there() {
        let patch = ObjectPatch::Json(json!([
            {"op": "test", "path": "/status", "value": null},
            {"op": "add", "path": "/status", "value": {}},
            {"op": "add", "path": "/status/a~1b", "value": 1},
            {"op": "test", "path": "/status/a~1b", "value": 1},
            {"op": "remove", "path": "/spec"},
        ]));
        assert_eq!(
            changed(json!({"spec": {}}), &patch).unwrap(),
            json!({"status": {"a/b": 1}})
        );
        assert!(changed(json!({"status": {}, "spec": {}}), &patch).is_err());
        let appends = ObjectPatch::Json(json!([{"op": "add", "path": "/spec/list/-", "value": 2}]));
        assert_eq!(
            changed(json!({"spec": {"list": [1]}}), &appends).unwrap(),
            json!({"spec": {"list": [1, 2]}})
        );
        assert!(changed(json!({"spec": {}}), &appends).is_err());
    }

    #[test]
    fn a_body_that_is_not_an_object_changes_nothing() {
        for patch in [ObjectPatch::Merge(Value::Null), ObjectPatch::Apply(json!([]))] {
            assert!(changed(json!({"a": 1}), &patch).is_err());
        }
    }

    #[test]
    fn a_patch_that_cannot_be_applied_is_reported() {
        for (operation, says) in [
            (json!({"op": "test", "path": "/a", "value": 2}), "the test of /a"),
            (json!({"op": "remove", "path": "/b"}), "/b does not exist"),
            (
                json!({"op": "add", "path": "/b/c", "value": 2}),
                "parent of /b/c does not exist",
            ),
            (json!({"op": "move", "path": "/a", "value": 2}), "unsupported operation"),
        ] {
            let error = changed(json!({"a": 1}), &ObjectPatch::Json(json!([operation]))).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
