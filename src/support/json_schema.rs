//! JSON schemas that others have written: those of tools, and those of responses.

use jsonschema::{PatternOptions, ValidationError, Validator};
use serde_json::Value;

use crate::schema_bounds::{self, PatternUse};
use crate::text::first_chars;

/// Maximum number of steps back of a pattern: a pattern that needs more does not match.
const MAX_BACKTRACKS: usize = 100_000;
/// Maximum number of characters of a message.
const MAX_MESSAGE: usize = 300;

/// Compiles a schema, within bounds on what that costs. Fetches nothing: a schema that refers to another document cannot be
/// used.
pub fn compile(schema: &Value) -> Result<Validator, String> {
    let built = compile_within(schema_bounds::check(schema)?, schema);
    built.map_err(|error| first_chars(&error.to_string(), MAX_MESSAGE).to_owned())
}

fn compile_within(patterns: PatternUse, schema: &Value) -> Result<Validator, ValidationError<'_>> {
    // The engine with backtracking splits patterns into parts, and limits only these.
    let limit = patterns.part_bytes();
    if patterns.needs_backtracking {
        let patterns = PatternOptions::fancy_regex()
            .backtrack_limit(MAX_BACKTRACKS)
            .size_limit(limit);
        jsonschema::options().with_pattern_options(patterns).build(schema)
    } else {
        let patterns = PatternOptions::regex().size_limit(limit);
        jsonschema::options().with_pattern_options(patterns).build(schema)
    }
}

/// Why a schema cannot be used, in words that have nothing of it but the names of keywords; `None`: it can be used.
#[must_use]
pub fn unusable_reason(schema: &Value) -> Option<String> {
    let patterns = match schema_bounds::check(schema) {
        Ok(patterns) => patterns,
        Err(bound) => return Some(bound),
    };
    let built = compile_within(patterns, schema);
    // The compiler quotes what it refuses.
    built.is_err().then(|| {
        "it is no valid JSON schema, refers to another document, or has a pattern that is invalid or too large once it is compiled"
            .to_owned()
    })
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
    use serde_json::{Map, json};

    use super::*;

    /// Definitions of which each wraps this often a reference to the next one.
    fn chained(definitions: usize, levels: usize, wrap: fn(Value) -> Value) -> Value {
        let definition = |at: usize| {
            let mut schema = json!({"$ref": format!("#/$defs/a{}", at + 1), "unevaluatedProperties": false});
            if levels > 0 {
                schema = json!({"$ref": format!("#/$defs/a{}", at + 1)});
            }
            (0..levels).fold(schema, |inner, _| wrap(inner))
        };
        let mut defs: Map<String, Value> = (0..definitions).map(|at| (format!("a{at}"), definition(at))).collect();
        defs.insert(format!("a{definitions}"), json!({"type": "object"}));
        json!({"$defs": defs, "$ref": "#/$defs/a0"})
    }

    /// The schemas are those of users, and a stack that overflows ends the process that checks them.
    #[test]
    fn no_schema_overflows_the_stack() {
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
            chained(5, 100, |inner| json!({"unevaluatedProperties": inner})),
            chained(20, 100, |inner| json!({"properties": {"x": inner}})),
            chained(1_000, 0, |inner| inner),
            chained(100, 10, |inner| json!({"properties": {"x": inner}})),
            chained(400, 22, |inner| json!({"properties": {"x": inner}})),
            chained(8, 11, |inner| json!({"unevaluatedProperties": inner})),
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
    fn the_reason_for_which_a_schema_cannot_be_used_quotes_nothing_of_it() {
        assert_eq!(unusable_reason(&json!({"type": "object"})), None);
        for schema in [
            json!({"type": "canary"}),
            json!({"$ref": "https://example.com/canary"}),
            json!({"pattern": "canary("}),
            json!({"pattern": r"^canary\p{L}{900}$"}),
            json!({"enum": vec!["canary"; schema_bounds::MAX_NODES]}),
            json!({"$ref": "#canary", "unevaluatedProperties": false}),
        ] {
            let reason = unusable_reason(&schema).unwrap();
            assert!(!reason.contains("canary"), "{reason}");
            assert!(check(&schema).is_err());
        }
    }

    #[test]
    fn the_size_of_a_compiled_pattern_is_limited() {
        let of = |pattern: &str| json!({"pattern": pattern});
        let with_lookahead = r"^(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9]{8,64}$";
        for pattern in [r"^\p{L}[\p{L}\p{N} ._-]{1,40}$", with_lookahead, r"^(a|b)\1$"] {
            assert_eq!(check(&of(pattern)), Ok(()), "{pattern}");
        }
        assert!(check(&of(r"^\p{L}{900}$")).is_err());
        let parts = r"(?=\p{L}{40}i)".repeat(100);
        assert!(check(&of(&parts)).is_err(), "{parts}");
        let beside = json!({"allOf": [of(r"^\p{L}[\p{L}\p{N} ._-]{1,40}$"), of(with_lookahead)]});
        assert_eq!(check(&beside), Ok(()), "neither takes the room of the other");
        // As libraries write the format of a time beside its name.
        let times = vec![of(&format!("^{}$", r"(\d{4}-\d{2}-\d{2}|\d{4}-W\d{2})".repeat(8))); 100];
        assert_eq!(check(&json!({"allOf": times})), Ok(()));
    }

    #[test]
    fn a_look_ahead_is_a_condition_of_a_value() {
        let schema = json!({"pattern": "^(?!no)"});
        assert_eq!(violation(&schema, &json!("yes")), None);
        assert!(violation(&schema, &json!("no")).is_some());
    }
}
