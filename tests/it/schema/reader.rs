//! Reads schemas and manifests.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::LazyLock;

use agentloop::api_server::ObjectSchema;
use serde::Deserialize;
use serde_json::Value;

/// A file or directory of this repository.
pub fn repository(path: &str) -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Every document of every YAML file in a directory, with the file's name.
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
pub struct Schema(ObjectSchema);

static AGENTS: LazyLock<Schema> = LazyLock::new(|| Schema::of("agents.agentloop.dev"));
static BUDGETS: LazyLock<Schema> = LazyLock::new(|| Schema::of("agentbudgets.agentloop.dev"));
static SENSORS: LazyLock<Schema> = LazyLock::new(|| Schema::of("sensors.agentloop.dev"));

impl Deref for Schema {
    type Target = ObjectSchema;

    fn deref(&self) -> &ObjectSchema {
        &self.0
    }
}

impl Schema {
    fn of(name: &str) -> Self {
        Self(ObjectSchema::of(name).unwrap())
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

    /// Calls `look` with the path and the schema of every field, from the outside in, as long as it says true.
    pub fn walk(&self, look: &mut impl FnMut(&str, &Value) -> bool) {
        walk("", self.root(), look);
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

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.into()
    } else {
        format!("{path}.{name}")
    }
}
