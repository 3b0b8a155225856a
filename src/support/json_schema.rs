//! JSON schemas that others have written: those of tools, and those of responses.

use jsonschema::{FancyRegex, PatternOptions, Validator};
use serde_json::Value;

use crate::text::first_chars;

/// Maximum number of steps back of a pattern: a pattern that needs more does not match.
const MAX_BACKTRACKS: usize = 100_000;
/// Maximum number of patterns of a schema that is checked, and maximum size in bytes of each once it is compiled.
const MAX_PATTERNS: usize = 16;
const MAX_PATTERN_BYTES: usize = 2 * 1024 * 1024;
/// Maximum number of characters of a message.
const MAX_MESSAGE: usize = 300;

/// Compiles a schema. Fetches nothing: a schema that refers to another document cannot be used.
pub fn compile(schema: &Value) -> Result<Validator, String> {
    build(schema, PatternOptions::fancy_regex().backtrack_limit(MAX_BACKTRACKS))
}

/// Checks that a schema can be used, within bounds on what that costs: for a process that checks the schemas of many
/// users.
pub fn check(schema: &Value) -> Result<(), String> {
    let mut patterns = 0;
    count_patterns(schema, &mut patterns);
    if patterns > MAX_PATTERNS {
        return Err(format!(
            "it has {patterns} patterns, and {MAX_PATTERNS} are allowed: remove some"
        ));
    }
    let patterns = PatternOptions::fancy_regex()
        .backtrack_limit(MAX_BACKTRACKS)
        .size_limit(MAX_PATTERN_BYTES);
    build(schema, patterns).map(drop)
}

/// Counts what may be a pattern. Also counts properties that are called so, which need no exact number.
fn count_patterns(schema: &Value, found: &mut usize) {
    match schema {
        Value::Array(items) => items.iter().for_each(|item| count_patterns(item, found)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match (name.as_str(), value) {
                    ("pattern", Value::String(_)) => *found += 1,
                    ("patternProperties", Value::Object(patterns)) => *found += patterns.len(),
                    _ => {}
                }
                count_patterns(value, found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn build(schema: &Value, patterns: PatternOptions<FancyRegex>) -> Result<Validator, String> {
    jsonschema::options()
        .with_pattern_options(patterns)
        .build(schema)
        .map_err(|error| first_chars(&error.to_string(), MAX_MESSAGE).to_owned())
}

/// How a value violates a schema, or why the schema cannot be used; `None`: it does not.
#[must_use]
pub fn violation(schema: &Value, value: &Value) -> Option<String> {
    let validator = match compile(schema) {
        Ok(validator) => validator,
        Err(problem) => return Some(problem),
    };
    let problem = validator.validate(value).err()?;
    let (path, text) = (problem.instance_path().as_str(), problem.to_string());
    let text = first_chars(&text, MAX_MESSAGE);
    Some(if path.is_empty() {
        text.to_owned()
    } else {
        format!("{path}: {text}")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The schemas are those of users, and a stack that overflows ends the process that checks them.
    #[test]
    fn no_reference_leads_around_in_circles_for_ever() {
        let mut deep = json!({"type": "string"});
        for _ in 0..120 {
            deep = json!({"properties": {"a": deep}, "unevaluatedProperties": false});
        }
        let schemas = [
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"not": {"$ref": "#"}, "unevaluatedProperties": false}),
            json!({"$ref": "#", "unevaluatedProperties": false, "unevaluatedItems": false}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "unevaluatedProperties": false}),
            json!({"$dynamicRef": "#a", "$dynamicAnchor": "a", "unevaluatedItems": false}),
            json!({"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": true,
                "$recursiveRef": "#", "unevaluatedProperties": false}),
            json!({"$id": "urn:x", "$schema": "urn:x"}),
            json!({"$schema": "#"}),
            json!({"$id": "a", "$ref": "a", "anyOf": [{"$ref": "a#"}, {"if": {"$ref": "#"}, "then": {"$ref": "#"}}],
                "unevaluatedProperties": {"$ref": "#"}}),
            deep,
        ];
        for schema in schemas {
            // As large a stack as a worker of tokio has.
            let checked = std::thread::Builder::new().stack_size(2 * 1024 * 1024);
            let text = schema.to_string();
            let checked = checked.spawn(move || check(&schema)).unwrap().join();
            assert!(checked.is_ok(), "{text}");
        }
    }

    #[test]
    fn a_violation_names_the_place() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        assert_eq!(violation(&schema, &json!({"a": 1})), None);
        assert!(violation(&schema, &json!({"a": "x"})).is_some_and(|text| text.starts_with("/a: ")));
        assert!(violation(&schema, &json!(1)).is_some());
    }

    #[test]
    fn a_schema_that_is_none_or_refers_to_another_document_cannot_be_used() {
        for schema in [
            json!({"type": "tree"}),
            json!({"$ref": "https://example.com/schema.json"}),
        ] {
            assert!(check(&schema).is_err(), "{schema}");
            assert!(violation(&schema, &json!(1)).is_some(), "{schema}");
        }
    }

    #[test]
    fn a_schema_that_is_checked_has_a_bounded_number_of_patterns_of_a_bounded_size() {
        let of = |count: usize, pattern: &str| json!({"allOf": vec![json!({"pattern": pattern}); count]});
        assert_eq!(check(&of(MAX_PATTERNS, "^[a-z]{1,64}$")), Ok(()));
        assert!(check(&of(MAX_PATTERNS + 1, "a")).is_err_and(|error| error.contains("17 patterns")));
        assert!(check(&of(1, r"^\p{L}{900}$")).is_err());
        let names = json!({"patternProperties": {"a": {}, "b": {}}, "not": of(15, "c")});
        assert!(check(&names).is_err_and(|error| error.contains("17 patterns")));
    }
}
