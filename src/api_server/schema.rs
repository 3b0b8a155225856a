//! The admission checks of an API server: the structural schema with its bounds, unknown fields, and the CEL rules with
//! their own messages. Pure.
//!
//! Reads the same definitions that are installed in a cluster. Never repeats a value, since it may be a prompt.

use std::collections::BTreeSet;

use jsonschema::Validator;
use kube::ResourceExt;
use kube::core::cel::{self, CompiledSchema, ValidationErrors, compile_schema};
use serde_json::{Value, json};

use agentloop_api::crd;

/// The schema of one of the project's kinds.
pub struct ObjectSchema {
    root: Value,
    structure: Validator,
    rules: CompiledSchema,
}

impl ObjectSchema {
    /// The schema of the definition with this name, such as `agents.agentloop.dev`.
    #[must_use]
    pub fn of(definition: &str) -> Option<Self> {
        let all = crd::all();
        let found = all.iter().find(|found| found.name_any() == definition)?;
        let mut whole = serde_json::to_value(found).ok()?;
        let root = whole.pointer_mut("/spec/versions/0/schema/openAPIV3Schema")?.take();
        Some(Self {
            structure: jsonschema::validator_for(&standard(&root)).ok()?,
            rules: compile_schema(&root),
            root,
        })
    }

    /// The whole schema, as it is installed.
    #[must_use]
    pub fn root(&self) -> &Value {
        &self.root
    }

    /// Fields that are not in the schema: an API server would drop them. Without metadata, which it checks itself, and
    /// the status, which users do not write.
    #[must_use]
    pub fn unknown_fields(&self, object: &Value) -> Vec<String> {
        let mut ours = object.clone();
        if let Some(fields) = ours.as_object_mut() {
            fields.retain(|name, _| !["apiVersion", "kind", "metadata", "status"].contains(&name.as_str()));
        }
        let mut found = Vec::new();
        unknown("", &self.root, &ours, &mut found);
        found
    }

    /// Evaluates the CEL rules, which assume an object that matches the schema. `before`: the previous object, for
    /// transition rules.
    pub fn check_rules(&self, object: &Value, before: Option<&Value>) -> Result<(), ValidationErrors> {
        cel::Validator::new().validate_compiled(&self.rules, object, before)
    }

    /// All problems of an object, each with its field. `before`: the previous object, for transition rules.
    #[must_use]
    pub fn problems(&self, object: &Value, before: Option<&Value>) -> Vec<String> {
        let unknown = self.unknown_fields(object).into_iter();
        let mut problems: Vec<String> = unknown
            .map(|path| format!("{path}: unknown field: correct its name, or remove it"))
            .collect();
        repeated("spec", &self.root["properties"]["spec"], &object["spec"], &mut problems);
        let errors = self.structure.iter_errors(object);
        problems.extend(errors.map(|error| {
            let path = dotted(error.instance_path().as_str());
            format!(
                "{}: {}",
                if path.is_empty() { "the object" } else { &path },
                error.masked()
            )
        }));
        if problems.is_empty()
            && let Err(errors) = self.check_rules(object, before)
        {
            problems.extend(errors.as_slice().iter().map(|error| error.message.clone()));
        }
        problems
    }
}

/// The same schema in plain JSON Schema: extensions of Kubernetes are translated.
fn standard(schema: &Value) -> Value {
    let fields = match schema {
        Value::Object(fields) => fields,
        Value::Array(items) => return items.iter().map(standard).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => return schema.clone(),
    };
    let own = |name: &str| name.starts_with("x-kubernetes-") || ["default", "example", "nullable"].contains(&name);
    let mut new: serde_json::Map<String, Value> = fields
        .iter()
        .filter(|(name, value)| !own(name) || value.is_object() && name.as_str() == "default")
        .map(|(name, value)| (name.clone(), standard(value)))
        .collect();
    if fields.get("nullable") == Some(&json!(true))
        && let Some(type_) = new.get("type").cloned()
    {
        new.insert("type".into(), json!([type_, "null"]));
    }
    if fields.get("x-kubernetes-int-or-string") == Some(&json!(true)) {
        new.remove("type");
        new.remove("anyOf");
        new.insert("type".into(), json!(["integer", "string"]));
    }
    Value::Object(new)
}

/// Finds fields that are not in the schema.
fn unknown(path: &str, schema: &Value, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let path = join(path, name);
                let known = schema["properties"].get(name);
                let of_map = Some(&schema["additionalProperties"]).filter(|values| values.is_object());
                match known.or(of_map) {
                    Some(known) => unknown(&path, known, field, found),
                    None if schema["x-kubernetes-preserve-unknown-fields"] == true => {}
                    None => found.push(path),
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                unknown(&format!("{path}[{index}]"), &schema["items"], item, found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Finds duplicate items in lists that are sets or maps.
fn repeated(path: &str, schema: &Value, value: &Value, problems: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let of_map = &schema["additionalProperties"];
                let inner = schema["properties"].get(name).unwrap_or(of_map);
                repeated(&join(path, name), inner, field, problems);
            }
        }
        Value::Array(items) => {
            let keys = schema["x-kubernetes-list-map-keys"].as_array();
            let is_set = schema["x-kubernetes-list-type"] == "set";
            let mut seen = BTreeSet::new();
            for (index, item) in items.iter().enumerate() {
                let path = format!("{path}[{index}]");
                let key = match keys {
                    Some(keys) => Some(
                        keys.iter()
                            .map(|key| item[key.as_str().unwrap_or_default()].to_string())
                            .collect(),
                    ),
                    None => is_set.then(|| vec![item.to_string()]),
                };
                if key.is_some_and(|key: Vec<String>| !seen.insert(key)) {
                    problems.push(format!("{path}: duplicate of an earlier item: remove one of them"));
                }
                repeated(&path, &schema["items"], item, problems);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.into()
    } else {
        format!("{path}.{name}")
    }
}

/// A JSON pointer as a readable path.
fn dotted(pointer: &str) -> String {
    pointer.split('/').skip(1).fold(String::new(), |path, part| {
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            format!("{path}[{part}]")
        } else {
            join(&path, &part.replace("~1", "/").replace("~0", "~"))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(spec: &Value) -> Vec<String> {
        let mut whole = json!({
            "instructions": "Watch.",
            "model": {"api": "Scripted", "name": "m", "scripted": {"configMapKeyRef": {"name": "c", "key": "k"}}},
        });
        for (name, value) in spec.as_object().unwrap() {
            whole[name] = value.clone();
        }
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": "a"}, "spec": whole,
        });
        ObjectSchema::of("agents.agentloop.dev")
            .unwrap()
            .problems(&object, None)
    }

    #[test]
    fn a_good_agent_has_no_problem() {
        assert_eq!(problems(&json!({})), Vec::<String>::new());
        let resources = json!({"limits": {"memory": "64Mi", "cpu": 1}});
        assert_eq!(
            problems(&json!({"pod": {"resources": resources}})),
            Vec::<String>::new()
        );
    }

    #[test]
    fn each_mistake_names_its_field() {
        for (spec, says) in [
            (json!({"guardrail": {}}), "spec.guardrail: unknown field"),
            (
                json!({"guardrails": {"maxCallsPerTurn": 0}}),
                "spec.guardrails.maxCallsPerTurn: ",
            ),
            (json!({"suspend": "yes"}), "spec.suspend: value is not of type"),
            (json!({"mode": "Fast"}), "spec.mode: "),
            (
                json!({"budgetRefs": [{"name": "a"}, {"name": "a"}]}),
                "spec.budgetRefs[1]: duplicate",
            ),
            (
                json!({"instructionsFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}),
                "both set: keep exactly one",
            ),
        ] {
            let problems = problems(&spec);
            assert!(
                problems.iter().any(|problem| problem.contains(says)),
                "{says}: {problems:?}"
            );
        }
    }

    #[test]
    fn a_field_beside_the_spec_is_unknown_too_and_a_status_is_not_checked() {
        let schema = ObjectSchema::of("agents.agentloop.dev").unwrap();
        let object = json!({ "kind": "Agent", "metadata": { "x": 1 }, "data": {}, "status": { "x": 1 } });
        assert_eq!(schema.unknown_fields(&object), ["data"]);
    }

    #[test]
    fn no_message_repeats_a_value() {
        let problems = problems(&json!({"instructions": format!("canary{}", "x".repeat(40_000)), "mode": "canary"}));
        assert_eq!(problems.len(), 2);
        assert!(!problems.concat().contains("canary"), "{problems:?}");
    }
}
