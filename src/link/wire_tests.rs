//! The shapes of all messages on the link, as one snapshot per version of the protocol.
//!
//! A change of a shape fails here. `docs/development/link-protocol.md` says whether it needs a new version.

use schemars::generate::SchemaGenerator;
use serde_json::{Map, Value, json};

use super::deliveries::{DeliveryAck, DeliveryRequest, RelayedDeliveryAck, SensorDirectives, SensorPodReport};
use super::events::{EventsPage, EventsResponse};
use super::history::{HistoryAck, HistoryBatch};
use super::messages::{
    AttachRequest, AttachResponse, Directives, LeaseRequest, LeaseResponse, PROTOCOL, PodRefusal, PodReport,
};
use super::task_requests::{RelayedTaskAck, RequestedTask};
use super::text_fragments::RelayedTextFragment;
use agentloop_sensor_pipeline::delivery::Delivery;

/// Keywords that say what a message looks like. Texts, defaults and rules of the custom resources do not.
const KEYWORDS: [&str; 13] = [
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "format",
    "items",
    "maxItems",
    "oneOf",
    "prefixItems",
    "required",
    "type",
];

/// A schema without everything that is not on the wire.
fn shape(schema: &Value) -> Value {
    match schema {
        Value::Object(schema) => {
            let mut kept = Map::new();
            for (keyword, value) in schema {
                match (keyword.as_str(), value) {
                    // Their keys are names.
                    ("properties", Value::Object(fields)) => {
                        let fields = fields.iter().map(|(name, field)| (name.clone(), shape(field)));
                        kept.insert(keyword.clone(), fields.collect());
                    }
                    (keyword, value) if KEYWORDS.contains(&keyword) => {
                        kept.insert(keyword.to_owned(), shape(value));
                    }
                    _ => {}
                }
            }
            Value::Object(kept)
        }
        Value::Array(schemas) => schemas.iter().map(shape).collect(),
        // A field of any shape: with a description it is an object without further keywords.
        Value::Bool(true) => json!({}),
        Value::Null | Value::Bool(false) | Value::Number(_) | Value::String(_) => schema.clone(),
    }
}

#[test]
fn the_messages_of_a_version_keep_their_shapes() {
    let mut generator = SchemaGenerator::default();
    let mut messages = Map::new();
    macro_rules! messages {
        ($($route:literal: $message:ty),* $(,)?) => {
            $(messages.insert($route.into(), shape(generator.subschema_for::<$message>().as_value()));)*
        };
    }
    messages! {
        "POST /v1/attach": AttachRequest,
        "POST /v1/attach, answer": AttachResponse,
        "POST /v1/report": PodReport,
        "POST /v1/lease": LeaseRequest,
        "POST /v1/lease, answer": LeaseResponse,
        "GET /v1/directives, event directives": Directives,
        "GET /v1/directives, event delivery": Delivery,
        "POST /v1/events": EventsPage,
        "POST /v1/events, answer": EventsResponse,
        "GET /v1/directives, event task": RequestedTask,
        "POST /v1/tasks/ack": RelayedTaskAck,
        "POST /v1/text": RelayedTextFragment,
        "POST /v1/history": HistoryBatch,
        "POST /v1/history, answer": HistoryAck,
        "POST /v1/delivered": RelayedDeliveryAck,
        "GET /v1/sensor, event directives": SensorDirectives,
        "POST /v1/sensor/report": SensorPodReport,
        "POST /v1/deliver": DeliveryRequest,
        "POST /v1/deliver, answer": DeliveryAck,
        "refusal": PodRefusal,
    }
    let types: Map<String, Value> = generator
        .definitions()
        .iter()
        .map(|(name, schema)| (name.clone(), shape(schema)))
        .collect();
    // The order of fields is not on the wire.
    insta::with_settings!({sort_maps => true}, {
        insta::assert_json_snapshot!(format!("version_{PROTOCOL}"), json!({"messages": messages, "types": types}));
    });
}
