//! JSON schemas that others have written: those of tools, and those of responses.

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

use crate::text::first_chars;

/// Most steps back of a pattern: a pattern that needs more does not match.
const MAX_BACKTRACKS: usize = 100_000;
/// Most characters of a message.
const MAX_MESSAGE: usize = 300;

/// Compiles a schema. Fetches nothing: a schema that refers to another document cannot be used.
pub fn compile(schema: &Value) -> Result<Validator, String> {
    jsonschema::options()
        .with_pattern_options(PatternOptions::fancy_regex().backtrack_limit(MAX_BACKTRACKS))
        .build(schema)
        .map_err(|error| first_chars(&error.to_string(), MAX_MESSAGE).to_owned())
}

/// Checks that a schema can be used.
pub fn check(schema: &Value) -> Result<(), String> {
    compile(schema).map(drop)
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
}
