//! The YAML documents of a manifest file, with merge keys resolved, and what is wrong with the keys of their mappings.
//!
//! Knows no kinds of objects. The YAML is that of the library; this reads its mappings entry by entry, since a value in
//! memory no longer shows that a key was given twice.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_yaml::{Mapping, Value as YamlValue};

/// The key whose value is merged into its mapping.
const MERGE: &str = "<<";

/// A document of a file.
#[derive(Debug, Default, PartialEq)]
pub struct YamlDocument {
    pub value: Value,
    /// Mistakes that its value does not show.
    pub mistakes: Vec<KeyMistake>,
}

impl YamlDocument {
    /// Takes the mistakes out that are in the value at this path, and makes their paths those in that value.
    pub fn take_mistakes(&mut self, path: &str) -> Vec<KeyMistake> {
        let (inside, outside) = std::mem::take(&mut self.mistakes)
            .into_iter()
            .partition(|mistake| mistake.path.starts_with(path));
        self.mistakes = outside;
        let inside: Vec<KeyMistake> = inside;
        let shortened = inside.into_iter().map(|mistake| KeyMistake {
            path: mistake.path[path.len()..].trim_start_matches('.').to_owned(),
            ..mistake
        });
        shortened.collect()
    }
}

/// A mistake in the keys of a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyMistake {
    /// The path of the mapping, such as `spec.tools.servers[0]`; empty for the document itself.
    pub path: String,
    pub message: String,
}

impl fmt::Display for KeyMistake {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(formatter, "{}: ", self.path)?;
        }
        formatter.write_str(&self.message)
    }
}

/// Parses the documents of a text, each of them or why it cannot be parsed. What follows an error cannot be parsed either.
pub fn parse(text: &str) -> impl Iterator<Item = Result<YamlDocument, String>> {
    serde_yaml::Deserializer::from_str(text).map(|document| {
        let mut mistakes = Vec::new();
        let reader = NodeReader {
            path: String::new(),
            mistakes: &mut mistakes,
        };
        let value = reader.deserialize(document).map_err(|error| reason(&error))?;
        let value = serde_json::to_value(value).map_err(|error| error.to_string())?;
        Ok(YamlDocument { value, mistakes })
    })
}

/// The parser's reason, with line and column. It repeats no value, which may be a secret.
fn reason(error: &serde_yaml::Error) -> String {
    let text = error.to_string();
    let at = error.location().map_or_else(String::new, |at| {
        format!(" at line {} column {}", at.line(), at.column())
    });
    if text.contains("invalid value: ") {
        return format!("a value does not match its tag{at}: correct one of them");
    }
    // The library leaves out the first position of a text.
    if text.contains(" at ") {
        text
    } else {
        format!("{text}{at}")
    }
}

/// Reads one value and what is in it.
struct NodeReader<'a> {
    path: String,
    mistakes: &'a mut Vec<KeyMistake>,
}

impl NodeReader<'_> {
    fn inner(&mut self, path: String) -> NodeReader<'_> {
        NodeReader {
            path,
            mistakes: self.mistakes,
        }
    }

    fn report(&mut self, message: String) {
        self.mistakes.push(KeyMistake {
            path: self.path.clone(),
            message,
        });
    }

    /// Merges the value of the merge key, whose own merge keys are resolved already.
    fn merge(&mut self, mapping: Mapping, before: &BTreeSet<String>) -> YamlValue {
        let merged: BTreeSet<&str> = match mapping.get(MERGE) {
            Some(YamlValue::Sequence(items)) => items.iter().flat_map(keys).collect(),
            Some(one) => keys(one).collect(),
            None => BTreeSet::new(),
        };
        for key in before.iter().filter(|key| merged.contains(key.as_str())) {
            // The mapping's own value counts by the definition of merge keys, and for kustomize; for kubectl, the later one.
            self.report(format!(
                "key {key:?} is given before {MERGE:?}, which sets it too: put {MERGE:?} first, since tools differ in \
                 which of the two counts"
            ));
        }
        let mut whole = YamlValue::Mapping(mapping);
        if let Err(error) = whole.apply_merge() {
            self.report(format!("{MERGE:?} cannot be merged: {error}"));
        }
        whole
    }
}

fn keys(value: &YamlValue) -> impl Iterator<Item = &str> {
    let mapping = value.as_mapping();
    mapping
        .into_iter()
        .flat_map(Mapping::keys)
        .filter_map(YamlValue::as_str)
}

impl<'de> DeserializeSeed<'de> for NodeReader<'_> {
    type Value = YamlValue;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlValue, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NodeReader<'_> {
    type Value = YamlValue;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any YAML value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<YamlValue, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<YamlValue, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<YamlValue, E> {
        Ok(value.into())
    }

    // Larger than any integer of JSON: a floating-point number, as for kubectl.
    #[expect(clippy::cast_precision_loss, reason = "the schema rejects it in either form")]
    fn visit_i128<E: Error>(self, value: i128) -> Result<YamlValue, E> {
        Ok((value as f64).into())
    }

    #[expect(clippy::cast_precision_loss, reason = "the schema rejects it in either form")]
    fn visit_u128<E: Error>(self, value: u128) -> Result<YamlValue, E> {
        Ok((value as f64).into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<YamlValue, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<YamlValue, E> {
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<YamlValue, E> {
        Ok(value.into())
    }

    fn visit_unit<E: Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_none<E: Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<YamlValue, A::Error> {
        let mut all = Vec::new();
        loop {
            let path = format!("{}[{}]", self.path, all.len());
            match items.next_element_seed(self.inner(path))? {
                Some(item) => all.push(item),
                None => return Ok(YamlValue::Sequence(all)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<YamlValue, A::Error> {
        let (mut mapping, mut repeated, mut before) = (Mapping::new(), BTreeSet::new(), BTreeSet::new());
        // Keys become strings, as in JSON.
        while let Some(key) = entries.next_key::<String>()? {
            let path = if self.path.is_empty() {
                key.clone()
            } else {
                format!("{}.{key}", self.path)
            };
            let value = entries.next_value_seed(self.inner(path))?;
            if mapping.contains_key(key.as_str()) {
                repeated.insert(key);
                continue;
            }
            if key != MERGE && !mapping.contains_key(MERGE) {
                before.insert(key.clone());
            }
            mapping.insert(key.into(), value);
        }
        for key in repeated {
            self.report(format!("key {key:?} is given twice: remove one of them"));
        }
        if mapping.contains_key(MERGE) {
            return Ok(self.merge(mapping, &before));
        }
        Ok(YamlValue::Mapping(mapping))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _: A) -> Result<YamlValue, A::Error> {
        Err(A::Error::custom(
            "a value has a tag that only its application knows: remove the tag",
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The only document of a text.
    fn only(text: &str) -> YamlDocument {
        let mut all: Vec<_> = parse(text).collect::<Result<_, _>>().unwrap();
        assert_eq!(all.len(), 1, "{text}");
        all.remove(0)
    }

    fn mistakes_in(text: &str) -> Vec<String> {
        only(text).mistakes.iter().map(ToString::to_string).collect()
    }

    fn unparsed(text: &str) -> String {
        parse(text).find_map(Result::err).unwrap()
    }

    #[test]
    fn values_are_those_that_json_has() {
        let text = "{a: 1, b: -1, c: 1.5, d: true, e: ~, f: x, g: '1', h: [x, {y: z}], 1: one, i: 18446744073709551616, \
                    j: .nan, k: 1.0}";
        let value = json!({
            "a": 1, "b": -1, "c": 1.5, "d": true, "e": null, "f": "x", "g": "1", "h": ["x", {"y": "z"}], "1": "one",
            "i": 18_446_744_073_709_551_616.0, "j": null, "k": 1.0,
        });
        assert_eq!(
            only(text),
            YamlDocument {
                value,
                mistakes: Vec::new()
            }
        );
        assert_eq!(only("# nothing\n"), YamlDocument::default());
        let values: Vec<_> = parse("a\n---\n---\nb\n")
            .map(|document| document.unwrap().value)
            .collect();
        assert_eq!(values, [json!("a"), json!(null), json!("b")]);
    }

    #[test]
    fn each_repeated_key_is_found_once_with_its_path() {
        for (text, told) in [
            (
                "{a: 1, b: 1, a: 2}",
                &["key \"a\" is given twice: remove one of them"][..],
            ),
            ("{a: 1, a: 2, a: 3}", &["key \"a\" is given twice: remove one of them"]),
            ("{1: a, '1': b}", &["key \"1\" is given twice: remove one of them"]),
            (
                "a: {b: {c: 1, c: 1}}",
                &["a.b: key \"c\" is given twice: remove one of them"],
            ),
            (
                "a: [x, {b: 1, b: 2}, [{c: 1, c: 2}]]",
                &[
                    "a[1]: key \"b\" is given twice: remove one of them",
                    "a[2][0]: key \"c\" is given twice: remove one of them",
                ],
            ),
            (
                "{<<: {a: 1}, <<: {b: 1}}",
                &["key \"<<\" is given twice: remove one of them"],
            ),
            ("a: {b: 1}\nc: {b: 1}\nd: [{b: 1}, {b: 1}]", &[]),
        ] {
            assert_eq!(mistakes_in(text), told, "{text}");
        }
    }

    #[test]
    fn merge_keys_give_what_kubectl_makes_of_them() {
        for (text, value) in [
            (
                "{m: &m {a: 1, b: 2}, x: {<<: *m, a: 3}}",
                json!({"m": {"a": 1, "b": 2}, "x": {"a": 3, "b": 2}}),
            ),
            ("{x: {c: 1, <<: {a: 1}}}", json!({"x": {"c": 1, "a": 1}})),
            ("<<: [{a: 1}, {a: 2, b: 2}]", json!({"a": 1, "b": 2})),
            // Merge keys in what is merged.
            (
                "<<: [{a: 1, <<: {b: 1}}, {<<: {b: 2, c: 2, <<: {d: 2}}}]",
                json!({"a": 1, "b": 1, "c": 2, "d": 2}),
            ),
            ("- <<: {a: 1}\n- {<<: {}}", json!([{"a": 1}, {}])),
        ] {
            assert_eq!(
                only(text),
                YamlDocument {
                    value,
                    mistakes: Vec::new()
                },
                "{text}"
            );
        }
    }

    #[test]
    fn merge_keys_that_are_read_differently_or_not_at_all_are_mistakes() {
        let differs = "x: key \"a\" is given before \"<<\", which sets it too: put \"<<\" first, since tools differ in which \
                       of the two counts";
        for text in ["x: {a: 1, <<: {a: 2}}", "x: {a: 1, c: 1, <<: [{b: 2}, {<<: {a: 2}}]}"] {
            assert_eq!(mistakes_in(text), [differs], "{text}");
        }
        for (text, what) in [
            (
                "x: {<<: y}",
                "mapping or list of mappings for merging, but found scalar",
            ),
            ("x: {<<: [y]}", "expected a mapping for merging, but found scalar"),
            ("x: {<<: [[{}]]}", "expected a mapping for merging, but found sequence"),
        ] {
            let mistakes = mistakes_in(text).join("\n");
            assert!(
                mistakes.starts_with("x: \"<<\" cannot be merged: ") && mistakes.ends_with(what),
                "{mistakes}"
            );
        }
    }

    #[test]
    fn a_text_that_is_no_yaml_is_refused_with_line_column_and_reason_and_without_its_values() {
        for (text, says) in [
            (
                "a: 1\nb: [secret\nc: 2\n",
                "did not find expected ',' or ']' at line 3 column 2, while parsing a flow sequence at line 2 column 4",
            ),
            (
                "@a",
                "found character that cannot start any token, while scanning for the next token at line 1 column 1",
            ),
            ("a:\n  b: *secret\n", "unknown anchor at line 2 column 6"),
            (
                "a:\n- !!int secret\n",
                "a value does not match its tag at line 2 column 3: correct one of them",
            ),
            (
                "a: !secret {}",
                "a: a value has a tag that only its application knows: remove the tag at line 1 column 4",
            ),
        ] {
            assert_eq!(unparsed(text), says, "{text}");
        }
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        assert!(
            unparsed(&deep).contains("recursion limit exceeded at line 1 column"),
            "{}",
            unparsed(&deep)
        );
    }

    #[test]
    fn aliases_that_multiply_are_refused() {
        let names: Vec<String> = (0..40).map(|number| format!("a{number}")).collect();
        let mut text = "a0: &a0 [x, x]\n".to_owned();
        for pair in names.windows(2) {
            let (name, before) = (&pair[1], &pair[0]);
            text.extend([name, ": &", name, " [*", before, ", *", before, ", *", before, "]\n"]);
        }
        assert!(
            unparsed(&text).contains("repetition limit exceeded"),
            "{}",
            unparsed(&text)
        );
    }
}
