//! Errors of deserializers, without the content of the document.
//!
//! Errors of `serde` quote the value that does not fit. Status and logs have more readers than the document.

/// What may be found where something else is expected.
const FOUND: [&str; 17] = [
    "boolean",
    "integer",
    "floating point",
    "character",
    "string",
    "byte array",
    "unit value",
    "Option value",
    "newtype struct",
    "sequence",
    "map",
    "enum",
    "unit variant",
    "newtype variant",
    "tuple variant",
    "struct variant",
    "null",
];

/// The kind of an error of `serde`, and what was expected. Both come from the type that was to be read.
#[must_use]
pub fn describe(error: &str) -> String {
    for kind in ["missing field", "duplicate field"] {
        let name = error.strip_prefix(kind).and_then(|rest| rest.strip_prefix(" `"));
        if let Some((name, _)) = name.and_then(|rest| rest.split_once('`')) {
            return format!("{kind} `{name}`");
        }
    }
    let Some(kind) = kind(error) else {
        return "malformed".into();
    };
    if error.ends_with("there are no fields") || error.ends_with("there are no variants") {
        return kind;
    }
    // The last one: what was found stands before it.
    match error.rsplit_once(", expected ") {
        Some((_, expected)) => format!("{kind}, expected {expected}"),
        None => kind,
    }
}

fn kind(error: &str) -> Option<String> {
    let plain = ["unknown field", "unknown variant", "invalid length"];
    if let Some(kind) = plain.into_iter().find(|kind| error.starts_with(kind)) {
        return Some(kind.into());
    }
    let (kind, rest) = ["invalid type: ", "invalid value: "]
        .into_iter()
        .find_map(|kind| Some((kind, error.strip_prefix(kind)?)))?;
    let found = FOUND.into_iter().find(|found| rest.starts_with(found));
    Some(format!("{kind}{}", found.unwrap_or("another one")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rstest::rstest;
    use serde::Deserialize;
    use serde::de::DeserializeOwned;

    use super::*;

    #[derive(Deserialize, Debug)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Document {
        count: u8,
        #[serde(default)]
        mode: Mode,
        #[serde(default)]
        at: Option<jiff::Timestamp>,
        #[serde(default)]
        none: Option<Nothing>,
        #[serde(default)]
        named: BTreeMap<u8, u8>,
    }

    #[derive(Deserialize, Debug, Default)]
    enum Mode {
        #[default]
        Fast,
        Slow,
    }

    #[derive(Deserialize, Debug)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}

    fn error<T: DeserializeOwned + std::fmt::Debug>(document: &str) -> String {
        let value: serde_json::Value = serde_json::from_str(document).unwrap();
        serde_json::from_value::<T>(value).unwrap_err().to_string()
    }

    #[rstest]
    #[case(r#"{"mode": "Fast"}"#, "missing field `count`")]
    #[case(r#"{"count": "canary"}"#, "invalid type: string, expected u8")]
    #[case(r#"{"count": "canary, expected canary"}"#, "invalid type: string, expected u8")]
    #[case(r#"{"count": 70000}"#, "invalid value: integer, expected u8")]
    #[case(r#"{"count": null}"#, "invalid type: null, expected u8")]
    #[case(
        r#"{"count": 1, "canary": 1}"#,
        "unknown field, expected one of `count`, `mode`, `at`, `none`, `named`"
    )]
    #[case(
        r#"{"count": 1, "mode": "canary`, expected `canary"}"#,
        "unknown variant, expected `Fast` or `Slow`"
    )]
    #[case(r#"{"count": 1, "none": {"canary, expected canary": 1}}"#, "unknown field")]
    #[case(r#"{"count": 1, "at": "canary"}"#, "malformed")]
    #[case(r#"{"count": 1, "named": {"canary": 1}}"#, "invalid value: another one")]
    #[case(r#"["canary"]"#, "invalid type: string, expected u8")]
    #[case(r#""canary""#, "invalid type: string, expected struct Document")]
    #[case("[]", "invalid length, expected struct Document with 5 elements")]
    fn an_error_names_kind_and_expectation_and_quotes_nothing_of_the_document(
        #[case] document: &str,
        #[case] expected: &str,
    ) {
        let error = error::<Document>(document);
        assert_eq!(describe(&error), expected, "{error}");
    }

    #[test]
    fn an_error_of_another_kind_is_reported_as_malformed_only() {
        for error in [
            "canary",
            "invalid type: canary",
            "missing field canary",
            "duplicate entry `canary`",
        ] {
            let words = describe(error);
            assert!(!words.contains("canary"), "{words}");
        }
    }
}
