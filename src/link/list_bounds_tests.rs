//! Every list in a message of a pod is bounded while it is read.
//!
//! The lists are found in the schemas, so a new one fails here until it has a bound.

use schemars::generate::SchemaGenerator;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::deliveries::{DeliveryRequest, RelayedDeliveryAck, SensorPodReport};
use super::events::EventsPage;
use super::history::HistoryBatch;
use super::lease_bounds::MAX_ACCOUNTS;
use super::messages::{AttachRequest, LeaseRequest, PodReport};
use super::server::MAX_BODY_BYTES;
use super::task_requests::RelayedTaskAck;
use super::text_fragments::RelayedTextFragment;

/// Most elements that the reader of any list keeps, of the many that fit into a body.
const MOST_KEPT: usize = MAX_ACCOUNTS + 1;

/// The types of the messages of pods.
struct MessageSchemas(Map<String, Value>);

impl MessageSchemas {
    /// The schema itself, in place of its name, and of an optional value.
    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        if let Some(name) = schema["$ref"].as_str() {
            return self.resolved(&self.0[name.rsplit('/').next().unwrap()]);
        }
        let choices = ["anyOf", "oneOf", "allOf"].map(|keyword| schema[keyword].as_array());
        let mut choices = choices.into_iter().flatten().flatten();
        let first = choices.find(|choice| choice["type"] != "null");
        first.map_or(schema, |first| self.resolved(first))
    }

    fn kind(schema: &Value) -> Option<&str> {
        let kind = &schema["type"];
        kind.as_str().or_else(|| kind[0].as_str())
    }

    /// The shortest value of this schema.
    fn shortest(&self, schema: &Value) -> Value {
        let schema = self.resolved(schema);
        if let Some(value) = schema.get("const").or_else(|| schema["enum"].get(0)) {
            return value.clone();
        }
        match (Self::kind(schema), schema["format"].as_str()) {
            (Some("string"), Some("date-time")) => json!("2026-01-02T03:04:05Z"),
            (Some("string"), _) => json!("a"),
            (Some("integer" | "number"), _) => json!(1),
            (Some("boolean"), _) => json!(true),
            (Some("array"), _) => json!([]),
            (Some("object"), _) => {
                let required = schema["required"].as_array().into_iter().flatten();
                let fields = required.filter_map(Value::as_str);
                let value = |name: &str| (name.to_owned(), self.shortest(&schema["properties"][name]));
                fields.map(value).collect()
            }
            _ => Value::Null,
        }
    }

    /// Values with one list of many elements each, and where that list is.
    fn with_lists(&self, schema: &Value) -> Vec<(String, Value)> {
        let schema = self.resolved(schema);
        let mut found = Vec::new();
        if Self::kind(schema) == Some("array") {
            let items = &schema["items"];
            let element = self.shortest(items);
            let length = MAX_BODY_BYTES / (element.to_string().len() + 1);
            found.push((String::new(), vec![element; length].into()));
            let inner = self.with_lists(items).into_iter();
            found.extend(inner.map(|(path, value)| (format!("/0{path}"), json!([value]))));
        }
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            for (path, value) in self.with_lists(field) {
                let mut outer = self.shortest(schema);
                outer[name] = value;
                found.push((format!("/{name}{path}"), outer));
            }
        }
        found
    }
}

/// The lists of a message that are read completely, and the number of all.
fn unbounded<T: DeserializeOwned + Serialize + schemars::JsonSchema>() -> (Vec<String>, usize) {
    let mut generator = SchemaGenerator::default();
    let schema = generator.subschema_for::<T>().as_value().clone();
    let schemas = MessageSchemas(generator.definitions().clone());
    let lists = schemas.with_lists(&schema);
    let all = lists.len();
    let is_kept = |(path, message): (String, Value)| {
        let read: T = serde_json::from_value(message).unwrap_or_else(|error| panic!("{path}: {error}"));
        let read = serde_json::to_value(&read).unwrap();
        let kept = read.pointer(&path).and_then(Value::as_array).map_or(0, Vec::len);
        assert!(kept > 0, "{path} is not read");
        (kept > MOST_KEPT).then_some(path)
    };
    (lists.into_iter().filter_map(is_kept).collect(), all)
}

#[test]
fn of_every_list_in_a_message_of_a_pod_only_the_first_elements_are_kept() {
    let mut lists = 0;
    macro_rules! check {
        ($($message:ty),* $(,)?) => {
            $(
                let (kept, all) = unbounded::<$message>();
                assert!(kept.is_empty(), "{}: {kept:?}", stringify!($message));
                lists += all;
            )*
        };
    }
    check! {
        AttachRequest,
        DeliveryRequest,
        EventsPage,
        HistoryBatch,
        LeaseRequest,
        PodReport,
        RelayedDeliveryAck,
        RelayedTaskAck,
        RelayedTextFragment,
        SensorPodReport,
    }
    assert!(lists > 30, "{lists} lists were found");
}
