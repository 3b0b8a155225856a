//! The JSON schema that an answer must match, as sent to the server.
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
    /// Maximum number of bytes of a schema that is sent. Each call pays for it, and servers compile it.
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
            CallPurpose::Judge | CallPurpose::LightJudge => (
                "verdict",
                json!({"met": {"type": "boolean"}, "reason": {"type": "string"}}),
            ),
            CallPurpose::Confidence | CallPurpose::LightConfidence => (
                "confidence",
                json!({"confidence": {"type": "integer"}, "progress": {"type": "integer"}, "reason": {"type": "string"}}),
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
    /// Characters of the names of properties and of the values that are texts.
    characters: usize,
}

impl SchemaUse {
    /// The lowest limits that a provider has had.
    const MAX_DEPTH: usize = 5;
    const MAX_PROPERTIES: usize = 100;
    const MAX_UNIONS: usize = 16;
    /// More values of one enum are limited in their length as well.
    const MAX_VALUES: usize = 250;
    const MAX_CHARACTERS: usize = 15_000;

    /// Whether a schema at this depth uses only what all providers enforce exactly.
    fn is_exact(&mut self, schema: &Value, depth: usize) -> bool {
        let Some(fields) = schema.as_object().filter(|_| depth <= Self::MAX_DEPTH) else {
            return false;
        };
        let Some(types) = fields.get("type") else {
            return self.is_exact_union(fields, depth);
        };
        let Some(types) = SchemaTypes::read(types) else {
            return false;
        };
        let is_known = |(word, value): (&String, &Value)| match word.as_str() {
            "type" => true,
            // A list without elements of a known type would be enforced by some only.
            "items" => types.has("array"),
            "properties" | "required" => types.has("object"),
            "additionalProperties" => types.has("object") && *value == Value::Bool(false),
            "enum" => self.is_exact_enum(value, &types),
            _ => is_text(word, value),
        };
        if !fields.iter().all(is_known) {
            return false;
        }
        self.unions += usize::from(types.0.len() > 1);
        self.unions <= Self::MAX_UNIONS
            && (!types.has("array") || self.has_exact_items(fields, depth))
            && (!types.has("object") || self.has_exact_properties(fields, depth))
    }

    /// An `anyOf`, which has nothing but a text beside it.
    fn is_exact_union(&mut self, fields: &Map<String, Value>, depth: usize) -> bool {
        let is_known = |(word, value): (&String, &Value)| word == "anyOf" || is_text(word, value);
        let options = fields.get("anyOf").and_then(Value::as_array);
        let Some(options) = options.filter(|options| !options.is_empty() && fields.iter().all(is_known)) else {
            return false;
        };
        self.unions += 1;
        // An option is at the depth of the anyOf itself, and is none: its objects would be options of the outer one.
        self.unions <= Self::MAX_UNIONS
            && have_different_beginnings(options)
            && options
                .iter()
                .all(|option| option.get("anyOf").is_none() && self.is_exact(option, depth))
    }

    /// Different values, each of one of the types.
    fn is_exact_enum(&mut self, values: &Value, types: &SchemaTypes<'_>) -> bool {
        let values = values.as_array().map_or(&[][..], Vec::as_slice);
        self.values += values.len();
        self.characters += values.iter().filter_map(Value::as_str).map(characters).sum::<usize>();
        let is_new = |(place, value): (usize, &Value)| !values[..place].contains(value);
        !values.is_empty()
            && self.values <= Self::MAX_VALUES
            && self.characters <= Self::MAX_CHARACTERS
            && values.iter().all(|value| types.allow(value))
            && values.iter().enumerate().all(is_new)
    }

    fn has_exact_items(&mut self, fields: &Map<String, Value>, depth: usize) -> bool {
        let items = fields.get("items");
        items.is_some_and(|items| self.is_exact(items, depth.saturating_add(1)))
    }

    /// Whether an object is closed, and requires each of its properties once.
    fn has_exact_properties(&mut self, fields: &Map<String, Value>, depth: usize) -> bool {
        let (Some(Value::Object(properties)), Some(Value::Array(required))) =
            (fields.get("properties"), fields.get("required"))
        else {
            return false;
        };
        self.properties += properties.len();
        self.characters += properties.keys().map(|name| characters(name)).sum::<usize>();
        let is_required = |name: &String| required.iter().any(|other| other.as_str() == Some(name));
        fields.contains_key("additionalProperties")
            && self.properties <= Self::MAX_PROPERTIES
            && self.characters <= Self::MAX_CHARACTERS
            && required.len() == properties.len()
            && properties.keys().all(|name| is_plain(name) && is_required(name))
            && properties
                .values()
                .all(|property| self.is_exact(property, depth.saturating_add(1)))
    }
}

/// The types in a schema, at least one, each once.
struct SchemaTypes<'a>(Vec<&'a str>);

impl<'a> SchemaTypes<'a> {
    const KNOWN: [&'static str; 7] = ["string", "number", "integer", "boolean", "null", "array", "object"];

    fn read(value: &'a Value) -> Option<Self> {
        let names = match value {
            Value::Array(names) => names.as_slice(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => {
                std::slice::from_ref(value)
            }
        };
        let mut types = Vec::new();
        for name in names {
            let name = name.as_str().filter(|name| Self::KNOWN.contains(name))?;
            if types.contains(&name) {
                return None;
            }
            types.push(name);
        }
        (!types.is_empty()).then_some(Self(types))
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains(&name)
    }

    /// Whether a value of an enum is of one of the types. Lists and objects are allowed in none.
    fn allow(&self, value: &Value) -> bool {
        match value {
            Value::Null => self.has("null"),
            Value::Bool(_) => self.has("boolean"),
            Value::String(_) => self.has("string"),
            Value::Number(number) => self.has("number") || (self.has("integer") && !number.is_f64()),
            Value::Array(_) | Value::Object(_) => false,
        }
    }
}

/// Whether the objects among the options of an `anyOf` differ in their first property, by which OpenAI distinguishes them.
fn have_different_beginnings(options: &[Value]) -> bool {
    let objects: Vec<_> = options
        .iter()
        .filter(|option| option.get("properties").is_some())
        .collect();
    let properties = |option: &Value| {
        option["properties"]
            .as_object()
            .and_then(|all| all.keys().next().cloned())
    };
    let required = |option: &Value| option["required"][0].as_str().map(str::to_owned);
    objects.iter().enumerate().all(|(place, option)| {
        objects[..place]
            .iter()
            .all(|other| properties(option) != properties(other) && required(option) != required(other))
    })
}

/// A text for the model, which limits nothing.
fn is_text(word: &str, value: &Value) -> bool {
    matches!(word, "description" | "title") && value.is_string()
}

/// Whether the name of a property is one that Anthropic accepts in any schema.
fn is_plain(name: &str) -> bool {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || matches!(char, '_' | '.' | '-');
    (1..=64).contains(&name.len()) && name.chars().all(is_plain)
}

fn characters(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

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

    #[rstest]
    #[case::texts(json!({"type": "string", "title": "Level", "description": "How bad."}))]
    #[case::values(json!({"type": "string", "enum": ["low", "high"]}))]
    #[case::values_of_two_types(json!({"type": ["integer", "null"], "enum": [1, 2, null]}))]
    #[case::whole_number_as_number(json!({"type": "number", "enum": [1, 2.5]}))]
    #[case::boolean_value(json!({"type": "boolean", "enum": [true]}))]
    #[case::nullable(json!({"type": ["string", "null"]}))]
    #[case::list_with_one_type(json!({"type": ["string"]}))]
    #[case::elements(json!({"type": "array", "items": {"type": "integer"}}))]
    #[case::nullable_elements(json!({"type": ["array", "null"], "items": {"type": "integer"}}))]
    #[case::options(json!({"anyOf": [{"type": "null"}, object(&json!({"b": {"type": "boolean"}}))], "description": "b"}))]
    #[case::options_that_begin_differently(json!({"anyOf": [object(&json!({"a": {"type": "null"}})), object(&json!({"b": {"type": "null"}}))]}))]
    #[case::no_properties(object(&json!({})))]
    #[case::nullable_object(json!({"type": ["object", "null"], "properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": false}))]
    #[case::any_order(json!({"type": "object", "properties": {"b": {"type": "null"}, "c": {"type": "null"}}, "required": ["c", "b"], "additionalProperties": false}))]
    fn a_schema_is_exact_if_all_providers_enforce_all_of_it(#[case] property: Value) {
        assert!(is_exact(&with(&property)));
    }

    #[rstest]
    #[case::nothing(json!({}))]
    #[case::boolean_schema(json!(true))]
    #[case::only_values(json!({"enum": ["low", "high"]}))]
    #[case::no_values(json!({"type": "string", "enum": []}))]
    #[case::values_are_no_list(json!({"type": "string", "enum": "low"}))]
    #[case::list_as_value(json!({"type": "array", "items": {"type": "string"}, "enum": [["low"]]}))]
    #[case::object_as_value(json!({"type": "string", "enum": [{}]}))]
    #[case::value_of_another_type(json!({"type": "integer", "enum": ["1"]}))]
    #[case::fraction_as_integer(json!({"type": "integer", "enum": [1.5]}))]
    #[case::null_is_not_a_string(json!({"type": "string", "enum": ["low", null]}))]
    #[case::value_twice(json!({"type": "string", "enum": ["low", "low"]}))]
    #[case::length(json!({"type": "string", "minLength": 1}))]
    #[case::pattern(json!({"type": "string", "pattern": "^a"}))]
    #[case::minimum(json!({"type": "number", "minimum": 0}))]
    #[case::default_value(json!({"type": "number", "default": 0}))]
    #[case::description_is_no_text(json!({"type": "number", "description": 0}))]
    #[case::list_without_items(json!({"type": "array"}))]
    #[case::any_items(json!({"type": "array", "items": true}))]
    #[case::items_of_a_string(json!({"type": "string", "items": {"type": "string"}}))]
    #[case::items_of_an_object(json!({"type": "object", "properties": {}, "required": [], "additionalProperties": false, "items": {"type": "string"}}))]
    #[case::properties_of_a_string(json!({"type": "string", "properties": {}}))]
    #[case::required_of_a_string(json!({"type": "string", "required": []}))]
    #[case::closed_string(json!({"type": "string", "additionalProperties": false}))]
    #[case::no_type(json!({"type": []}))]
    #[case::unknown_type(json!({"type": "tree"}))]
    #[case::type_is_no_text(json!({"type": 1}))]
    #[case::type_in_a_list_is_no_text(json!({"type": ["string", 1]}))]
    #[case::type_twice(json!({"type": ["string", "string"]}))]
    #[case::reference(json!({"$ref": "#"}))]
    #[case::no_options(json!({"anyOf": []}))]
    #[case::options_are_no_list(json!({"anyOf": {"type": "null"}}))]
    #[case::type_beside_options(json!({"type": "string", "anyOf": [{"type": "string"}]}))]
    #[case::items_beside_options(json!({"anyOf": [{"type": "string"}], "items": {"type": "string"}}))]
    #[case::properties_beside_options(json!({"anyOf": [{"type": "string"}], "properties": {}}))]
    #[case::values_beside_options(json!({"anyOf": [{"type": "string"}], "enum": ["a"]}))]
    #[case::options_within_options(json!({"anyOf": [{"anyOf": [{"type": "string"}]}]}))]
    #[case::options_that_begin_alike(json!({"anyOf": [object(&json!({"b": {"type": "null"}})), object(&json!({"b": {"type": "boolean"}}))]}))]
    #[case::two_empty_options(json!({"anyOf": [object(&json!({})), object(&json!({}))]}))]
    #[case::object_without_properties(json!({"type": "object"}))]
    #[case::optional_property(json!({"type": "object", "properties": {"b": {"type": "string"}}, "required": [], "additionalProperties": false}))]
    #[case::required_twice(json!({"type": "object", "properties": {"b": {"type": "null"}, "c": {"type": "null"}}, "required": ["b", "b"], "additionalProperties": false}))]
    #[case::required_is_no_text(json!({"type": "object", "properties": {"b": {"type": "null"}}, "required": [1], "additionalProperties": false}))]
    #[case::required_is_no_property(json!({"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b", "c"], "additionalProperties": false}))]
    #[case::open_object(json!({"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}))]
    #[case::other_properties(json!({"type": "object", "properties": {}, "required": [], "additionalProperties": {}}))]
    #[case::name_with_a_space(object(&json!({"b c": {"type": "null"}})))]
    #[case::empty_name(object(&json!({"": {"type": "null"}})))]
    fn another_schema_is_not_exact(#[case] property: Value) {
        assert!(!is_exact(&with(&property)));
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
        // In two enums: what counts is all of them.
        let more_values = |count: usize| -> Value {
            let values = |range: std::ops::Range<usize>| json!({"type": "integer", "enum": range.collect::<Vec<_>>()});
            object(&json!({"a": values(0..100), "b": values(100..count)}))
        };
        let long_value = |count: usize| with(&json!({"type": "string", "enum": ["ä".repeat(count - 1)]}));
        let long_names = |count: usize| {
            let fields = (0..90).map(|number| (format!("{number:0>60}"), json!({"type": "string"})));
            let values = json!({"type": "string", "enum": ["x".repeat(count - 90 * 60 - 1)]});
            object(&fields.chain([("a".to_owned(), values)]).collect())
        };
        let long_name = |count: usize| object(&json!({"x".repeat(count): {"type": "null"}}));
        for (build, max) in [
            (&many as &dyn Fn(usize) -> Value, SchemaUse::MAX_PROPERTIES),
            (&deep, SchemaUse::MAX_DEPTH),
            (&unions, SchemaUse::MAX_UNIONS),
            (&values, SchemaUse::MAX_VALUES),
            (&more_values, SchemaUse::MAX_VALUES),
            (&long_value, SchemaUse::MAX_CHARACTERS),
            (&long_names, SchemaUse::MAX_CHARACTERS),
            (&long_name, 64),
        ] {
            assert_eq!(
                [is_exact(&build(max)), is_exact(&build(max + 1))],
                [true, false],
                "{max}"
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
