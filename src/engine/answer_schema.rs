//! The JSON schema that an answer must match, as it is told to the server.
//!
//! Owns which answers have one and which schemas can be sent. The engine validates every answer itself, so a schema that is
//! not sent, or that a server ignores, costs an attempt and never lets a wrong answer through.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::CallPurpose;

/// The JSON schema of an answer. Its root is an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerSchema {
    /// What the server calls it: letters only.
    pub name: &'static str,
    pub schema: Value,
    /// Whether it uses only what all providers enforce exactly: each object is closed and each of its properties is required,
    /// and no keyword limits a value further. Other schemas are rejected by some providers, or enforced in part.
    pub is_exact: bool,
    /// Bytes of the schema as JSON.
    bytes: usize,
}

impl AnswerSchema {
    /// The most bytes of a schema that is sent. Each call pays for it, and servers compile it.
    pub const MAX_BYTES: usize = 32 * 1024;

    /// Creates the schema of an answer. `None`: it cannot be sent, because it is too large or its root is not an object.
    #[must_use]
    pub fn new(name: &'static str, schema: &Value) -> Option<Self> {
        let bytes = schema.to_string().len();
        let is_sendable = bytes <= Self::MAX_BYTES && schema["type"] == "object";
        is_sendable.then(|| Self {
            name,
            schema: schema.clone(),
            is_exact: SchemaUse::default().is_exact(schema, 1),
            bytes,
        })
    }

    /// The schema of the answer to a question without tools. It must say the same as the text of the question.
    pub(crate) fn of_question(purpose: CallPurpose) -> Option<Arc<Self>> {
        let (name, fields) = match purpose {
            CallPurpose::Precheck => ("decision", json!({"wake": {"type": "boolean"}})),
            CallPurpose::Signal => ("score", json!({"score": {"type": "integer"}})),
            CallPurpose::Judge => (
                "verdict",
                json!({"met": {"type": "boolean"}, "reason": {"type": "string"}}),
            ),
            CallPurpose::Confidence => (
                "confidence",
                json!({"confidence": {"type": "integer"}, "reason": {"type": "string"}}),
            ),
            CallPurpose::Turn | CallPurpose::Heartbeat | CallPurpose::Chat | CallPurpose::Compaction => return None,
        };
        let required: Vec<&String> = fields.as_object().into_iter().flat_map(Map::keys).collect();
        let schema = json!({
            "type": "object",
            "properties": fields,
            "required": required,
            "additionalProperties": false,
        });
        Self::new(name, &schema).map(Arc::new)
    }

    /// The bytes that it adds to a prompt, since servers show it to the model.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.name.len() + self.bytes
    }
}

/// What a schema contains, as far as providers limit it.
#[derive(Default)]
struct SchemaUse {
    properties: usize,
    unions: usize,
    values: usize,
}

impl SchemaUse {
    /// The lowest limits of the providers.
    const MAX_DEPTH: usize = 5;
    const MAX_PROPERTIES: usize = 100;
    const MAX_UNIONS: usize = 16;
    const MAX_VALUES: usize = 500;

    /// Whether a schema at this depth uses only what all providers enforce exactly.
    fn is_exact(&mut self, schema: &Value, depth: usize) -> bool {
        let Some(fields) = schema.as_object().filter(|_| depth <= Self::MAX_DEPTH) else {
            return false;
        };
        let is_known = |(word, value): (&String, &Value)| match word.as_str() {
            "type" | "anyOf" | "properties" | "required" | "items" => true,
            "additionalProperties" => *value == Value::Bool(false),
            "description" | "title" => value.is_string(),
            "enum" => {
                let values = value.as_array().map_or(&[][..], Vec::as_slice);
                self.values += values.len();
                !values.is_empty() && values.iter().all(|value| !value.is_array() && !value.is_object())
            }
            _ => false,
        };
        if !fields.iter().all(is_known) || self.values > Self::MAX_VALUES {
            return false;
        }
        let types: Vec<&str> = match (&fields.get("type"), fields.get("anyOf")) {
            (Some(Value::String(name)), None) => vec![name],
            (Some(Value::Array(names)), None) => names.iter().filter_map(Value::as_str).collect(),
            (None, Some(Value::Array(options))) if !options.is_empty() => {
                self.unions += 1;
                // The option of an anyOf is at the depth of the anyOf itself.
                return self.unions <= Self::MAX_UNIONS && options.iter().all(|option| self.is_exact(option, depth));
            }
            _ => return false,
        };
        self.unions += usize::from(types.len() > 1);
        self.unions <= Self::MAX_UNIONS
            && !types.is_empty()
            && types.iter().all(|name| self.is_exact_type(name, fields, depth))
    }

    fn is_exact_type(&mut self, name: &str, fields: &Map<String, Value>, depth: usize) -> bool {
        match name {
            "string" | "number" | "integer" | "boolean" | "null" => true,
            "array" => fields
                .get("items")
                .is_some_and(|items| self.is_exact(items, depth.saturating_add(1))),
            "object" => {
                let (Some(Value::Object(properties)), Some(Value::Array(required))) =
                    (fields.get("properties"), fields.get("required"))
                else {
                    return false;
                };
                self.properties += properties.len();
                let is_required = |name: &String| required.iter().any(|other| other.as_str() == Some(name));
                fields.contains_key("additionalProperties")
                    && self.properties <= Self::MAX_PROPERTIES
                    && required.len() == properties.len()
                    && properties.keys().all(is_required)
                    && properties
                        .values()
                        .all(|property| self.is_exact(property, depth.saturating_add(1)))
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(properties: &Value) -> Value {
        let names: Vec<&String> = properties.as_object().unwrap().keys().collect();
        json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false})
    }

    fn is_exact(schema: &Value) -> bool {
        AnswerSchema::new("response", schema).unwrap().is_exact
    }

    /// An object with this property.
    fn with(property: &Value) -> Value {
        object(&json!({ "a": property }))
    }

    #[test]
    fn a_schema_is_exact_if_all_providers_enforce_all_of_it() {
        for property in [
            json!({"type": "string", "enum": ["low", "high"], "description": "How bad."}),
            json!({"type": ["string", "null"]}),
            json!({"type": "array", "items": {"type": "integer"}}),
            json!({"anyOf": [{"type": "null"}, object(&json!({"b": {"type": "boolean"}}))]}),
            object(&json!({})),
        ] {
            assert!(is_exact(&with(&property)), "{property}");
        }
        for property in [
            json!({}),
            json!(true),
            json!({"enum": ["low", "high"]}),
            json!({"type": "string", "enum": []}),
            json!({"type": "string", "enum": [["low"]]}),
            json!({"type": "string", "minLength": 1}),
            json!({"type": "string", "pattern": "^a"}),
            json!({"type": "number", "minimum": 0}),
            json!({"type": "array"}),
            json!({"type": "object"}),
            json!({"type": []}),
            json!({"type": "tree"}),
            json!({"$ref": "#"}),
            json!({"anyOf": []}),
            json!({"type": "object", "properties": {"b": {"type": "string"}}, "required": [], "additionalProperties": false}),
            json!({"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}),
            json!({"type": "object", "properties": {}, "required": [], "additionalProperties": {}}),
        ] {
            assert!(!is_exact(&with(&property)), "{property}");
        }
    }

    #[test]
    fn a_schema_beyond_the_limits_of_a_provider_is_not_exact() {
        let many = |count: usize| -> Value {
            let fields = (0..count).map(|number| (format!("p{number}"), json!({"type": "string"})));
            object(&fields.collect())
        };
        let deep = |count: usize| (1..count).fold(json!({"type": "string"}), |inner, _| with(&inner));
        let unions = |count: usize| -> Value {
            let fields = (0..count).map(|number| (format!("p{number}"), json!({"type": ["string", "null"]})));
            object(&fields.collect())
        };
        let values = |count: usize| with(&json!({"type": "integer", "enum": (0..count).collect::<Vec<_>>()}));
        for (build, most) in [
            (&many as &dyn Fn(usize) -> Value, SchemaUse::MAX_PROPERTIES),
            (&deep, SchemaUse::MAX_DEPTH),
            (&unions, SchemaUse::MAX_UNIONS),
            (&values, SchemaUse::MAX_VALUES),
        ] {
            assert_eq!(
                [is_exact(&build(most)), is_exact(&build(most + 1))],
                [true, false],
                "{most}"
            );
        }
    }

    #[test]
    fn only_an_object_within_the_bound_is_sent() {
        let sized = |bytes: usize| {
            let build = |text: &str| json!({"type": "object", "title": text});
            let spare = build("").to_string().len();
            AnswerSchema::new("response", &build(&"x".repeat(bytes - spare)))
        };
        assert!(sized(AnswerSchema::MAX_BYTES).is_some() && sized(AnswerSchema::MAX_BYTES + 1).is_none());
        for schema in [json!({"type": "array", "items": {}}), json!({"enum": [1]}), json!(true)] {
            assert_eq!(AnswerSchema::new("response", &schema), None);
        }
    }

    #[test]
    fn each_question_has_an_exact_schema_and_no_turn_has_one() {
        use CallPurpose::{Chat, Compaction, Confidence, Heartbeat, Judge, Precheck, Signal, Turn};
        for purpose in [Precheck, Signal, Judge, Confidence] {
            assert!(AnswerSchema::of_question(purpose).unwrap().is_exact, "{purpose}");
        }
        for purpose in [Turn, Heartbeat, Chat, Compaction] {
            assert_eq!(AnswerSchema::of_question(purpose), None);
        }
    }
}
