//! Reads schemas and manifests.

use std::path::PathBuf;
use std::sync::LazyLock;

use agentloop::api::crd;
use kube::ResourceExt;
use kube::core::cel::{CompiledSchema, ValidationErrors, Validator, compile_schema};
use serde::Deserialize;
use serde_json::Value;

/// A file or folder of this repository.
pub fn repository(path: &str) -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Every document of every YAML file in a folder, with the file's name.
pub fn documents(folder: &str) -> Vec<(String, Value)> {
    let mut files: Vec<_> = std::fs::read_dir(repository(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect();
    files.sort();
    let mut all = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let documents = serde_yaml::Deserializer::from_str(&text)
            .map(|document| Value::deserialize(document).unwrap_or_else(|error| panic!("{}: {error}", path.display())));
        all.extend(documents.map(|document| (path.display().to_string(), document)));
    }
    all
}

/// The schema of a resource, as it is installed.
pub struct Schema {
    root: Value,
    rules: CompiledSchema,
}

static AGENTS: LazyLock<Schema> = LazyLock::new(|| Schema::of("agents.agentloop.dev"));
static BUDGETS: LazyLock<Schema> = LazyLock::new(|| Schema::of("agentbudgets.agentloop.dev"));
static SENSORS: LazyLock<Schema> = LazyLock::new(|| Schema::of("sensors.agentloop.dev"));

impl Schema {
    fn of(name: &str) -> Self {
        let all = crd::all();
        let definition = all.iter().find(|crd| crd.name_any() == name).unwrap();
        let crd = serde_json::to_value(definition).unwrap();
        let root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
        let rules = compile_schema(&root);
        Self { root, rules }
    }

    /// That of Agents.
    pub fn of_agents() -> &'static Self {
        &AGENTS
    }

    /// That of AgentBudgets.
    pub fn of_budgets() -> &'static Self {
        &BUDGETS
    }

    /// That of Sensors.
    pub fn of_sensors() -> &'static Self {
        &SENSORS
    }

    /// All of them.
    pub fn all() -> [&'static Self; 3] {
        [&AGENTS, &BUDGETS, &SENSORS]
    }

    /// That of an object's kind.
    pub fn of_kind(kind: &str) -> &'static Self {
        match kind {
            "Agent" => &AGENTS,
            "AgentBudget" => &BUDGETS,
            "Sensor" => &SENSORS,
            other => panic!("{other} is no kind of ours"),
        }
    }

    /// The whole of it.
    pub fn root(&self) -> &Value {
        &self.root
    }

    /// What the rules say of an object; `before` is what it was before the change.
    pub fn judge(&self, object: &Value, before: Option<&Value>) -> Result<(), ValidationErrors> {
        Validator::new().validate_compiled(&self.rules, object, before)
    }

    /// Calls `look` with the path and the schema of every field, from the outside in, as long as it says true.
    pub fn walk(&self, look: &mut impl FnMut(&str, &Value) -> bool) {
        walk("", &self.root, look);
    }

    /// The messages of all rules.
    pub fn rules(&self) -> Vec<String> {
        let mut rules = Vec::new();
        self.walk(&mut |path, schema| {
            for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
                let message = rule["message"].as_str();
                rules.push(
                    message
                        .unwrap_or_else(|| panic!("a rule of {path} has no message"))
                        .into(),
                );
            }
            true
        });
        rules
    }

    /// Fields of `object` that the schema does not have: the API server would drop them.
    pub fn unknown_fields(&self, object: &Value) -> Vec<String> {
        let mut unknown = Vec::new();
        let mut object = object.clone();
        // The API server checks these by itself.
        for key in ["apiVersion", "kind", "metadata"] {
            object.as_object_mut().unwrap().remove(key);
        }
        compare("", &self.root, &object, &mut unknown);
        unknown
    }
}

fn walk(path: &str, schema: &Value, look: &mut impl FnMut(&str, &Value) -> bool) {
    if !look(path, schema) {
        return;
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        walk(&join(path, name), field, look);
    }
    if schema["items"].is_object() {
        walk(&format!("{path}[]"), &schema["items"], look);
    }
    if schema["additionalProperties"].is_object() {
        walk(&format!("{path}.*"), &schema["additionalProperties"], look);
    }
}

fn compare(path: &str, schema: &Value, value: &Value, unknown: &mut Vec<String>) {
    match value {
        Value::Object(fields) if schema["additionalProperties"].is_object() => {
            for (name, field) in fields {
                compare(&join(path, name), &schema["additionalProperties"], field, unknown);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                let path = join(path, name);
                match schema["properties"].get(name) {
                    Some(known) => compare(&path, known, field, unknown),
                    None if schema["x-kubernetes-preserve-unknown-fields"] == true => {}
                    None => unknown.push(path),
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                compare(&format!("{path}[{index}]"), &schema["items"], item, unknown);
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
