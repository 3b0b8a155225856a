//! Bounds on the schemas that are compiled. They are those of tenants and of tool servers, and the compiler has no bounds of
//! its own: it recurses with each level, and the keywords `unevaluatedProperties` and `unevaluatedItems` compile whatever is
//! beside them a second time, with each reference in full. A stack that overflows ends the process.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Maximum number of objects, lists and values of a schema; with `unevaluated…` each counts as often as it may be compiled.
pub(crate) const MAX_NODES: usize = 10_000;
/// Maximum number of levels of JSON in a schema.
pub(crate) const MAX_LEVELS: usize = 48;
/// Maximum number of levels along references, with `unevaluated…`.
pub(crate) const MAX_LEVELS_WITH_REFERENCES: usize = 96;
/// Maximum number of patterns, and maximum size in bytes of all of them.
pub(crate) const MAX_PATTERNS: usize = 256;
pub(crate) const MAX_PATTERN_BYTES: usize = 32 * 1024;
/// Maximum size in bytes of all compiled patterns, and of each part of one.
const MAX_COMPILED_BYTES: usize = 32 * 1024 * 1024;
const MAX_PART_BYTES: usize = 2 * 1024 * 1024;
/// The keywords that compile what is beside them a second time.
const UNEVALUATED: [&str; 2] = ["unevaluatedProperties", "unevaluatedItems"];

/// The patterns of a schema that may be compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PatternUse {
    /// Maximum number of parts that are compiled.
    parts: usize,
    /// Whether there may be look-around, back-references or the like, which the engine without backtracking does not have.
    pub(crate) needs_backtracking: bool,
}

impl PatternUse {
    fn add(&mut self, pattern: &str) {
        let bytes = pattern.as_bytes();
        let groups = ["(?=", "(?!", "(?<", "(?>", "(?("].map(|group| pattern.matches(group).count());
        let pairs = bytes.windows(2).filter(|pair| match pair {
            [b'\\', next] => next.is_ascii_digit() || b"kgKGZ".contains(next),
            [before, b'+'] => b"+*?}".contains(before),
            _ => false,
        });
        let special = groups.iter().sum::<usize>() + pairs.count();
        // Each is a part, and splits what is around it.
        self.parts += 1 + 2 * special;
        self.needs_backtracking |= special > 0;
    }

    /// Maximum size in bytes of a compiled part.
    pub(crate) fn part_bytes(self) -> usize {
        (MAX_COMPILED_BYTES / self.parts.max(1)).min(MAX_PART_BYTES)
    }
}

/// The patterns of a schema, or why it must not be compiled.
pub(crate) fn check(schema: &Value) -> Result<PatternUse, String> {
    let mut written = SchemaSize::default();
    written.add(schema, 1)?;
    if written.patterns > MAX_PATTERNS {
        return Err(format!(
            "it has {} patterns, and {MAX_PATTERNS} are allowed: remove some",
            written.patterns
        ));
    }
    if written.pattern_bytes > MAX_PATTERN_BYTES {
        return Err(format!(
            "its patterns have {} bytes, and {MAX_PATTERN_BYTES} are allowed: shorten them",
            written.pattern_bytes
        ));
    }
    let unevaluated: Vec<&'static str> = written.unevaluated.into_iter().collect();
    check_expanded(schema, &unevaluated)?;
    Ok(written.used)
}

/// Checks what is compiled with these keywords. The error names those that are at fault.
fn check_expanded(schema: &Value, keywords: &[&'static str]) -> Result<(), String> {
    let check = |keywords: &[&'static str]| {
        let mut expanded = ExpandedSize {
            schema,
            keywords: keywords.to_vec(),
            references: Vec::new(),
            nodes: 0,
        };
        expanded.add(schema, 1)
    };
    if keywords.is_empty() {
        return Ok(());
    }
    let Err(error) = check(keywords) else { return Ok(()) };
    let alone = keywords.iter().copied().filter(|keyword| check(&[keyword]).is_err());
    let alone: Vec<&'static str> = alone.collect();
    if alone.is_empty() {
        // Only both together are.
        return Err(error);
    }
    check(&alone)
}

/// What a schema has, as it is written.
#[derive(Default)]
struct SchemaSize {
    nodes: usize,
    patterns: usize,
    pattern_bytes: usize,
    used: PatternUse,
    /// Which of [`UNEVALUATED`] there are, those that are names of properties included.
    unevaluated: BTreeSet<&'static str>,
}

impl SchemaSize {
    fn add(&mut self, value: &Value, level: usize) -> Result<(), String> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(format!("it is too large: {MAX_NODES} values are allowed"));
        }
        if level > MAX_LEVELS {
            return Err(format!(
                "it is nested too deeply: {MAX_LEVELS} levels of JSON are allowed"
            ));
        }
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.add(item, level + 1)),
            Value::Object(fields) => fields.iter().try_for_each(|(name, value)| {
                self.add_patterns(name, value);
                self.unevaluated
                    .extend(UNEVALUATED.into_iter().find(|keyword| *keyword == name));
                self.add(value, level + 1)
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
        }
    }

    /// Also counts properties that are called so, which need no exact number.
    fn add_patterns(&mut self, name: &str, value: &Value) {
        match (name, value) {
            ("pattern", Value::String(pattern)) => {
                self.add_pattern(pattern);
            }
            ("patternProperties", Value::Object(patterns)) => {
                patterns.keys().for_each(|pattern| self.add_pattern(pattern));
            }
            _ => {}
        }
    }

    fn add_pattern(&mut self, pattern: &str) {
        self.patterns += 1;
        self.pattern_bytes += pattern.len();
        self.used.add(pattern);
    }
}

/// What is compiled of a schema with some of [`UNEVALUATED`]: each reference is followed wherever it is, except to what it is
/// within.
struct ExpandedSize<'a> {
    schema: &'a Value,
    keywords: Vec<&'static str>,
    /// The references that lead to where the walk is.
    references: Vec<&'a str>,
    nodes: usize,
}

impl<'a> ExpandedSize<'a> {
    fn add(&mut self, value: &'a Value, level: usize) -> Result<(), String> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(format!(
                "it is too large: with {} {MAX_NODES} values are allowed, what is beside it counts twice, and references count in full",
                self.named()
            ));
        }
        if level > MAX_LEVELS_WITH_REFERENCES {
            return Err(format!(
                "it is nested too deeply: with {} {MAX_LEVELS_WITH_REFERENCES} levels along references are allowed",
                self.named()
            ));
        }
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.add(item, level + 1)),
            Value::Object(fields) => {
                let doubles = self.keywords.iter().any(|keyword| fields.contains_key(*keyword));
                let times = if doubles { 2 } else { 1 };
                (0..times).try_for_each(|_| self.add_fields(fields, level))
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
        }
    }

    fn add_fields(&mut self, fields: &'a Map<String, Value>, level: usize) -> Result<(), String> {
        for (name, value) in fields {
            match (name.as_str(), value) {
                ("$ref", Value::String(reference)) => self.add_reference(reference, level)?,
                ("$dynamicRef" | "$recursiveRef", Value::String(_)) => {
                    return Err(format!("{name} cannot be used with {}: use $ref", self.named()));
                }
                // References below it would be relative to it.
                ("$id" | "id", Value::String(_)) if level > 1 => {
                    return Err(format!(
                        "{name} below the root cannot be used with {}: remove it",
                        self.named()
                    ));
                }
                _ => self.add(value, level + 1)?,
            }
        }
        Ok(())
    }

    fn add_reference(&mut self, reference: &'a str, level: usize) -> Result<(), String> {
        if self.references.contains(&reference) {
            return Ok(());
        }
        let target = reference.strip_prefix('#').and_then(|at| self.schema.pointer(at));
        let Some(target) = target.filter(|_| !reference.contains('%')) else {
            return Err(format!(
                "with {} each $ref must have the form #/$defs/name, and what it names must exist",
                self.named()
            ));
        };
        self.references.push(reference);
        self.add(target, level + 1)?;
        self.references.pop();
        Ok(())
    }

    fn named(&self) -> String {
        self.keywords.join(" and ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A schema with this many levels of JSON, of which each pair is a property.
    fn nested(levels: usize) -> Value {
        let mut schema = if levels.is_multiple_of(2) {
            json!({"not": {}})
        } else {
            json!({})
        };
        for _ in 0..(levels - 1) / 2 {
            schema = json!({"properties": {"a": schema}});
        }
        schema
    }

    /// References of which each names the next one this many times.
    fn repeated(references: usize, times: usize) -> Value {
        let mut defs = Map::new();
        for at in 0..references {
            let next = json!({"$ref": format!("#/$defs/a{}", at + 1)});
            defs.insert(format!("a{at}"), json!({"allOf": vec![next; times]}));
        }
        defs.insert(format!("a{references}"), json!({"type": "object"}));
        json!({"$defs": defs, "$ref": "#/$defs/a0"})
    }

    fn with_unevaluated(mut schema: Value) -> Value {
        schema["unevaluatedProperties"] = json!(false);
        schema
    }

    #[test]
    fn levels_are_limited() {
        assert_eq!(check(&nested(MAX_LEVELS)).map(drop), Ok(()));
        assert!(check(&nested(MAX_LEVELS + 1)).is_err_and(|error| error.contains("48 levels")));
    }

    #[test]
    fn values_are_limited() {
        let of = |items: usize| json!({"enum": vec![1; items]});
        assert_eq!(check(&of(MAX_NODES - 2)).map(drop), Ok(()));
        assert!(check(&of(MAX_NODES - 1)).is_err_and(|error| error.contains("too large")));
    }

    #[test]
    fn with_unevaluated_keywords_values_behind_references_count_wherever_they_are_referenced() {
        assert_eq!(check(&repeated(20, 2)).map(drop), Ok(()));
        assert!(check(&with_unevaluated(repeated(20, 2))).is_err_and(|error| error.contains("too large")));
        assert_eq!(check(&with_unevaluated(repeated(20, 1))).map(drop), Ok(()));
        assert!(
            check(&with_unevaluated(repeated(40, 1))).is_err_and(|error| error.contains("96 levels along references"))
        );
    }

    #[test]
    fn nested_unevaluated_keywords_double_each_other() {
        let of = |levels: usize| {
            let mut schema = json!({"type": "object"});
            for _ in 0..levels {
                schema = json!({"anyOf": [schema], "unevaluatedProperties": false});
            }
            schema
        };
        assert_eq!(check(&of(8)).map(drop), Ok(()));
        assert!(check(&of(15)).is_err_and(|error| error.contains("too large")));
    }

    #[test]
    fn with_unevaluated_keywords_references_that_are_not_followed_are_refused() {
        let base = json!({"$defs": {"a%b": {}, "a": {"$anchor": "a"}}});
        for (field, value, part) in [
            ("$ref", json!("#a"), "#/$defs/name"),
            ("$ref", json!("#/$defs/a%25b"), "#/$defs/name"),
            ("$ref", json!("#/$defs/absent"), "#/$defs/name"),
            ("$ref", json!("other.json"), "#/$defs/name"),
            ("$dynamicRef", json!("#a"), "$dynamicRef"),
            ("not", json!({"$id": "urn:a"}), "$id below the root"),
        ] {
            let mut schema = base.clone();
            schema[field] = value;
            assert_eq!(check(&schema).map(drop), Ok(()), "{schema}");
            let schema = with_unevaluated(schema);
            assert!(check(&schema).is_err_and(|error| error.contains(part)), "{schema}");
        }
    }

    #[test]
    fn the_keyword_at_fault_is_named_and_no_other() {
        let doubled = |keyword: &str, levels: usize| {
            (0..levels).fold(
                json!({"type": "object"}),
                |inner, _| json!({"anyOf": [inner], keyword: false}),
            )
        };
        let [properties, items] = UNEVALUATED;
        for keyword in UNEVALUATED {
            for (schema, part) in [
                (doubled(keyword, 15), "too large"),
                (
                    json!({"$defs": {"a": {"$anchor": "a"}}, "$ref": "#a", keyword: false}),
                    "#/$defs/name",
                ),
                (json!({"$dynamicRef": "#a", keyword: false}), "$dynamicRef"),
                (json!({"not": {"$id": "urn:a"}, keyword: false}), "$id below the root"),
            ] {
                let error = check(&schema).unwrap_err();
                let named: Vec<_> = UNEVALUATED.into_iter().filter(|name| error.contains(name)).collect();
                assert!(error.contains(part) && named == [keyword], "{schema} {error}");
            }
        }
        // One of both, and both together.
        let innocent = json!({"anyOf": [doubled(items, 15), {"unevaluatedProperties": false}]});
        let error = check(&innocent).unwrap_err();
        assert!(error.contains(items) && !error.contains(properties), "{error}");
        let together = (0..8).fold(
            doubled(items, 6),
            |inner, _| json!({"anyOf": [inner], properties: false}),
        );
        assert_eq!(check(&doubled(items, 8)).map(drop), Ok(()));
        let error = check(&together).unwrap_err();
        assert!(
            error.contains("with unevaluatedItems and unevaluatedProperties "),
            "{error}"
        );
        // One that is as large without them is not their fault.
        let large = json!({"enum": vec![1; MAX_NODES], properties: false});
        assert!(check(&large).is_err_and(|error| !error.contains("unevaluated")));
    }

    #[test]
    fn a_recursive_schema_and_one_that_extends_another_are_allowed() {
        for schema in [
            json!({"type": "object", "properties": {"next": {"$ref": "#"}}, "unevaluatedProperties": false}),
            json!({"$id": "urn:x", "$defs": {"base": {"properties": {"id": {"type": "string"}}}},
                "allOf": [{"$ref": "#/$defs/base"}], "unevaluatedProperties": false}),
            json!({"properties": {"id": {"type": "string"}, "pattern": {"type": "string"}}}),
        ] {
            assert_eq!(check(&schema).map(drop), Ok(()), "{schema}");
        }
    }

    #[test]
    fn patterns_share_the_size_of_what_is_compiled() {
        let of = |patterns: &[&str]| {
            let mut used = PatternUse::default();
            for pattern in patterns {
                used.add(pattern);
            }
            used
        };
        let plain = of(&["^(a|b)[+]$"; 16]);
        assert_eq!((plain.part_bytes(), plain.needs_backtracking), (MAX_PART_BYTES, false));
        assert_eq!(of(&["a"; 32]).part_bytes(), MAX_COMPILED_BYTES / 32);
        for special in [
            "(?=a)", "(?!a)", "(?<=a)", "(?>a)", r"(a)\1", r"\k<a>", "a++", "a*+", "a{2}+",
        ] {
            let used = of(&[special]);
            assert!(used.needs_backtracking && used.parts == 3, "{special}");
        }
        assert!(of(&[&"(?=a)".repeat(1_000)]).part_bytes() < 20 * 1024);
    }

    #[test]
    fn patterns_are_limited_by_number_and_bytes() {
        let of = |patterns: &[String]| json!({"allOf": patterns.iter().map(|pattern| json!({"pattern": pattern})).collect::<Vec<_>>()});
        let short = |count: usize| vec!["a".to_owned(); count];
        assert_eq!(check(&of(&short(MAX_PATTERNS))).map(drop), Ok(()));
        assert!(check(&of(&short(MAX_PATTERNS + 1))).is_err_and(|error| error.contains("257 patterns")));
        let names = json!({"patternProperties": {"a": {}, "b": {}}, "not": of(&short(255))});
        assert!(check(&names).is_err_and(|error| error.contains("257 patterns")));
        let half = "a".repeat(MAX_PATTERN_BYTES / 2);
        assert_eq!(check(&of(&[half.clone(), half.clone()])).map(drop), Ok(()));
        let above = of(&[half.clone(), format!("{half}a")]);
        assert!(check(&above).is_err_and(|error| error.contains("32769 bytes")));
    }
}
