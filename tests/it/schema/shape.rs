//! What holds for every field of the schema: it is described, it has bounds, and nothing in it surprises a YAML reader.

use agentloop::api::crd;
use serde_json::Value;

use super::reader::Schema;

/// Kubernetes' own types: described there, checked again when the pod is made; and what is free by design.
pub const EMBEDDED: &[&str] = &[
    "spec.lightModel.extraBody",
    "spec.model.extraBody",
    "spec.pod.affinity",
    "spec.task.responseSchema",
    "spec.pod.tolerations[]",
    "spec.pod.topologySpreadConstraints[]",
    "spec.pod.imagePullSecrets[]",
    "spec.source.poll.tool.arguments",
    "status.conditions[]",
];

fn each_field_of_ours(mut look: impl FnMut(&str, &Value)) -> usize {
    let mut count = 0;
    for schema in Schema::all() {
        schema.walk(&mut |path, schema| {
            if EMBEDDED.contains(&path) {
                return false;
            }
            count += 1;
            look(path, schema);
            true
        });
    }
    count
}

#[test]
fn every_field_is_described() {
    let fields = each_field_of_ours(|path, schema| {
        let described = schema["description"].as_str().is_some_and(|text| text.len() > 5);
        assert!(
            described || path.ends_with(".*") || path.ends_with("elector.matchExpressions[].values[]"),
            "{path} has no doc comment: `kubectl explain` says nothing"
        );
    });
    assert!(fields > 80, "only {fields} fields were looked at");
}

#[test]
fn every_text_list_map_and_number_has_bounds() {
    each_field_of_ours(|path, schema| {
        let has = |name: &str| !schema[name].is_null();
        match schema["type"].as_str() {
            Some("string") => assert!(
                has("maxLength") || has("enum") || schema["format"] == "date-time",
                "{path} is an unbounded string"
            ),
            Some("array") => {
                assert!(has("maxItems"), "{path} is an unbounded list");
                assert!(has("x-kubernetes-list-type"), "{path} does not say how it is merged");
            }
            Some("integer" | "number") => {
                let one_sided = path.starts_with("status.");
                assert!(
                    has("minimum") && (has("maximum") || one_sided) || path == "status.observedGeneration",
                    "{path} is an unbounded number"
                );
            }
            Some("object") if schema["additionalProperties"].is_object() => {
                assert!(has("maxProperties"), "{path} is an unbounded map");
            }
            Some("object") if path.ends_with("window.lifetime") => {}
            // A JSON schema of the user's own.
            Some("object") if path.ends_with("jsonSchema") => assert!(has("maxProperties"), "{path} is unbounded"),
            Some("object") => assert!(
                has("properties") || path == "metadata" || EMBEDDED.iter().any(|embedded| embedded.starts_with(path)),
                "{path} is an object without fields"
            ),
            other => assert!(
                other == Some("boolean") || schema["x-kubernetes-int-or-string"] == true,
                "{path} has type {other:?}"
            ),
        }
    });
}

#[test]
fn a_default_keeps_its_own_fields_bounds() {
    each_field_of_ours(|path, schema| {
        if let Some(number) = schema["default"].as_f64() {
            assert!(
                schema["minimum"].as_f64().is_some_and(|minimum| minimum <= number)
                    && schema["maximum"].as_f64().is_some_and(|maximum| number <= maximum),
                "the default of {path} is out of its own bounds"
            );
        }
    });
}

#[test]
fn no_string_of_a_definition_is_a_boolean_to_an_older_yaml_reader() {
    // yaml_serde writes these words bare, and kubectl's reader (YAML 1.1) takes them for booleans.
    const WORDS: &[&str] = &["y", "n", "yes", "no", "on", "off", "true", "false"];
    fn look(value: &Value) {
        match value {
            Value::String(text) => assert!(!WORDS.contains(&text.to_lowercase().as_str()), "«{text}»"),
            Value::Array(items) => items.iter().for_each(look),
            Value::Object(fields) => fields.iter().for_each(|(key, field)| {
                look(&Value::String(key.clone()));
                look(field);
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    for definition in crd::all() {
        look(&serde_json::to_value(definition).unwrap());
    }
}

#[test]
fn an_unreconciled_object_is_not_ready() {
    for schema in Schema::all() {
        let condition = &schema.root()["properties"]["status"]["default"]["conditions"][0];
        assert_eq!(condition["type"], "Ready");
        assert_eq!(condition["status"], "Unknown");
        assert_eq!(condition["reason"], "Pending");
    }
    let schema = Schema::of_budgets();
    let status: agentloop::api::budget::AgentBudgetStatus =
        serde_json::from_value(schema.root()["properties"]["status"]["default"].clone()).unwrap();
    assert_eq!(status.conditions.len(), 1);
    let schema = Schema::of_sensors();
    let status: agentloop::api::sensor::SensorStatus =
        serde_json::from_value(schema.root()["properties"]["status"]["default"].clone()).unwrap();
    assert_eq!(status.conditions.len(), 1);
    let schema = Schema::of_agents();
    let status: agentloop::api::AgentStatus =
        serde_json::from_value(schema.root()["properties"]["status"]["default"].clone()).unwrap();
    assert_eq!(status.conditions.len(), 1);
}

/// The names of a definition's columns of a priority; each reads a field that exists.
fn columns(definition: usize, schema: &Schema, priority: u64) -> Vec<String> {
    let definition = serde_json::to_value(&crd::all()[definition]).unwrap();
    let mut paths = std::collections::BTreeSet::new();
    schema.walk(&mut |path, _| {
        paths.insert(format!(".{path}"));
        true
    });
    let columns = definition["spec"]["versions"][0]["additionalPrinterColumns"].clone();
    for column in columns.as_array().unwrap() {
        let path = column["jsonPath"]
            .as_str()
            .unwrap()
            .replace("[?(@.type==\"Ready\")]", "[]");
        assert!(paths.contains(&path) || path == ".metadata.creationTimestamp", "{path}");
    }
    let of = columns.as_array().unwrap().iter();
    of.filter(|column| column["priority"].as_u64().unwrap_or(0) == priority)
        .map(|column| column["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn the_columns_fit_a_terminal_and_read_fields_that_exist() {
    let agents = Schema::of_agents();
    assert_eq!(
        columns(1, agents, 0),
        ["READY", "STATE", "MODEL", "TURNS", "TOKENS", "COST", "BUDGET", "AGE"]
    );
    assert_eq!(columns(1, agents, 1), ["REASON", "RESUMES", "POD"]);
    assert_eq!(
        columns(0, Schema::of_budgets(), 0),
        [
            "READY", "WINDOW", "LIMIT", "USED", "USED%", "RESERVED", "RESETS", "AGENTS", "AGE"
        ]
    );
    assert_eq!(
        columns(2, Schema::of_sensors(), 0),
        ["READY", "TYPE", "LAST-EVENT", "EVENTS", "ERRORS", "AGE"]
    );
}
