//! What the gateway changes in a request on its way to the server, and what it refuses.
//!
//! Exactly these fields change; every other value is passed on byte for byte, in its order:
//!
//! | field | becomes |
//! |---|---|
//! | `max_tokens`, `max_completion_tokens` | both leave; the one that the server knows is set to `spec.model.maxOutputTokens` |
//! | `stream_options.include_usage` | `true`, when `stream` is |
//!
//! Fields that raise the bill beyond the output limit are refused by name, and so is another model than the spec's.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

/// Fields that would raise the bill, or bring the answer by another way than the one that is metered.
const REFUSED: [&str; 9] = [
    "n",
    "best_of",
    "service_tier",
    "web_search_options",
    "modalities",
    "audio",
    "prediction",
    "background",
    "store",
];
/// Fields of which nothing comes before the model.
const UNSEEN: [&str; 5] = ["model", "stream", "stream_options", OUTPUT_LIMITS[0], OUTPUT_LIMITS[1]];
const OUTPUT_LIMITS: [&str; 2] = ["max_tokens", "max_completion_tokens"];

/// How requests are to be changed.
#[derive(Clone, Debug)]
pub struct Rules {
    /// `spec.model.name`.
    pub model: String,
    /// `spec.model.maxOutputTokens`.
    pub max_output_tokens: u32,
    /// Name of the output limit that the server knows.
    pub output_limit: &'static str,
}

/// Why a request is not sent. Names fields, quotes no values.
#[derive(thiserror::Error, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// No JSON object.
    #[error("the request is not a JSON object")]
    NotAnObject,
    /// Another model.
    #[error("the request's model is not spec.model.name")]
    OtherModel,
    /// A field that raises the bill.
    #[error("the request's field {0} is refused: it could raise the bill beyond the output limit")]
    Refused(&'static str),
    /// A field of the wrong type.
    #[error("the request's field {0} is not of the type it must be")]
    Malformed(&'static str),
}

/// A JSON object whose values stay as they were written.
struct RawObject(Vec<(String, Box<RawValue>)>);

/// A piece of what a request puts before the model, as its bytes on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptPart<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// Whether it is one message of the conversation, and not a tool or a setting.
    pub is_message: bool,
}

/// A request that may be sent. Only its output limit can still change.
pub struct Checked {
    fields: RawObject,
    output_limit: &'static str,
    max_output_tokens: u32,
}

impl Checked {
    /// Everything in it that the server may show the model: each message, each tool, each other field for itself.
    pub fn parts(&self) -> Vec<PromptPart<'_>> {
        let mut parts = Vec::new();
        for (name, value) in &self.fields.0 {
            let is_message = name == "messages";
            if UNSEEN.contains(&name.as_str()) {
                continue;
            }
            match serde_json::from_str::<Vec<&RawValue>>(value.get()) {
                Ok(items) if is_message || name == "tools" => parts.extend(items.into_iter().map(|item| PromptPart {
                    bytes: item.get().as_bytes(),
                    is_message,
                })),
                _ => parts.push(PromptPart {
                    bytes: value.get().as_bytes(),
                    is_message: false,
                }),
            }
        }
        parts
    }

    /// Most output tokens that the server may bill.
    pub fn max_output(&self) -> u32 {
        self.max_output_tokens
    }

    /// Lowers the output limit; it never rises.
    pub fn limit_output(&mut self, tokens: u32) {
        let tokens = tokens.min(self.max_output_tokens);
        let place = self.fields.0.iter_mut().find(|(name, _)| name == self.output_limit);
        if let (Some((_, value)), Ok(limit)) = (place, to_raw_value(&tokens)) {
            *value = limit;
            self.max_output_tokens = tokens;
        }
    }

    /// As it goes to the server.
    pub fn body(&self) -> Result<Vec<u8>, RequestError> {
        serde_json::to_vec(&self.fields).map_err(|_| RequestError::NotAnObject)
    }
}

impl Rules {
    /// The name of the output limit at this host: OpenAI's own new models know only the new one, others the old.
    pub fn output_limit_for(host: Option<&str>) -> &'static str {
        if host == Some("api.openai.com") {
            OUTPUT_LIMITS[1]
        } else {
            OUTPUT_LIMITS[0]
        }
    }

    /// The request as it may go to the server.
    pub fn apply(&self, body: &[u8]) -> Result<Checked, RequestError> {
        let RawObject(mut fields) = serde_json::from_slice(body).map_err(|_| RequestError::NotAnObject)?;
        if let Some(refused) = REFUSED
            .iter()
            .find(|name| fields.iter().any(|(field, _)| field == *name))
        {
            return Err(RequestError::Refused(refused));
        }
        if get::<String>(&fields, "model")?.as_ref() != Some(&self.model) {
            return Err(RequestError::OtherModel);
        }
        self.limit_output(&mut fields)?;
        if get::<bool>(&fields, "stream")?.unwrap_or(false) {
            include_usage(&mut fields)?;
        }
        Ok(Checked {
            fields: RawObject(fields),
            output_limit: self.output_limit,
            max_output_tokens: self.max_output_tokens,
        })
    }

    fn limit_output(&self, fields: &mut Vec<(String, Box<RawValue>)>) -> Result<(), RequestError> {
        let malformed = |_| RequestError::Malformed(self.output_limit);
        let limit = to_raw_value(&self.max_output_tokens).map_err(malformed)?;
        let place = fields
            .iter()
            .position(|(name, _)| OUTPUT_LIMITS.contains(&name.as_str()));
        fields.retain(|(name, _)| !OUTPUT_LIMITS.contains(&name.as_str()));
        // Nothing before the first one left, so its place is still the same.
        fields.insert(place.unwrap_or(fields.len()), (self.output_limit.into(), limit));
        Ok(())
    }
}

fn get<'a, T: Deserialize<'a>>(
    fields: &'a [(String, Box<RawValue>)],
    name: &'static str,
) -> Result<Option<T>, RequestError> {
    let Some((_, value)) = fields.iter().find(|(field, _)| field == name) else {
        return Ok(None);
    };
    serde_json::from_str(value.get()).map_err(|_| RequestError::Malformed(name))
}

fn include_usage(fields: &mut Vec<(String, Box<RawValue>)>) -> Result<(), RequestError> {
    const NAME: &str = "stream_options";
    let malformed = |_| RequestError::Malformed(NAME);
    let mut options = get::<Map<String, Value>>(fields, NAME)?.unwrap_or_default();
    options.insert("include_usage".into(), true.into());
    let options = to_raw_value(&options).map_err(malformed)?;
    match fields.iter_mut().find(|(field, _)| field == NAME) {
        Some((_, value)) => *value = options,
        None => fields.push((NAME.into(), options)),
    }
    Ok(())
}

impl<'de> Deserialize<'de> for RawObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = RawObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawObject, A::Error> {
                let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, _>()? {
                    // Of two fields of one name a server might read the other one than we check.
                    if fields.iter().any(|(field, _)| *field == name) {
                        return Err(serde::de::Error::custom("a field is there twice"));
                    }
                    fields.push((name, value));
                }
                Ok(RawObject(fields))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

impl Serialize for RawObject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;

    fn checked(body: &str) -> Result<Checked, RequestError> {
        let rules = Rules {
            model: "m".into(),
            max_output_tokens: 77,
            output_limit: Rules::output_limit_for(None),
        };
        rules.apply(body.as_bytes())
    }

    fn apply(body: &str) -> Result<String, RequestError> {
        checked(body).map(|checked| String::from_utf8(checked.body().unwrap()).unwrap())
    }

    #[test]
    fn the_output_limit_can_be_lowered_late_and_never_raised() {
        let mut checked = checked(r#"{"model":"m","messages":[],"z":1}"#).unwrap();
        assert_eq!(checked.max_output(), 77);
        for (asked, set) in [(78, 77), (30, 30), (50, 30)] {
            checked.limit_output(asked);
            assert_eq!(checked.max_output(), set);
            let body = format!(r#"{{"model":"m","messages":[],"z":1,"max_tokens":{set}}}"#);
            assert_eq!(String::from_utf8(checked.body().unwrap()).unwrap(), body);
        }
    }

    #[test]
    fn each_message_each_tool_and_each_other_field_is_a_part_of_the_prompt() {
        let checked = checked(
            r#"{"model":"m","stream":true,"messages":[{"role":"user"}, {"a": 1}],"tools":[{"t":1},{"u":2}],"response_format":{"x":[1]}}"#,
        )
        .unwrap();
        let parts = checked.parts();
        let parts = parts
            .iter()
            .map(|part| (std::str::from_utf8(part.bytes).unwrap(), part.is_message));
        let expected = [
            (r#"{"role":"user"}"#, true),
            (r#"{"a": 1}"#, true),
            (r#"{"t":1}"#, false),
            (r#"{"u":2}"#, false),
            (r#"{"x":[1]}"#, false),
        ];
        assert_eq!(parts.collect::<Vec<_>>(), expected);
    }

    #[rstest]
    #[case(r#"{"model":"m","messages":[]}"#, r#"{"model":"m","messages":[],"max_tokens":77}"#)]
    #[case(
        r#"{"model":"m","max_tokens":5,"temperature":0.70}"#,
        r#"{"model":"m","max_tokens":77,"temperature":0.70}"#
    )]
    #[case(
        r#"{"model":"m","max_completion_tokens":5,"top_p":1,"max_tokens":9}"#,
        r#"{"model":"m","max_tokens":77,"top_p":1}"#
    )]
    #[case(
        r#"{"model":"m","stream":true}"#,
        r#"{"model":"m","stream":true,"max_tokens":77,"stream_options":{"include_usage":true}}"#
    )]
    #[case(
        r#"{"stream_options":{"include_usage":false,"x":1},"model":"m","stream":true}"#,
        r#"{"stream_options":{"include_usage":true,"x":1},"model":"m","stream":true,"max_tokens":77}"#
    )]
    #[case(r#"{"model":"m","stream":false}"#, r#"{"model":"m","stream":false,"max_tokens":77}"#)]
    fn exactly_the_named_fields_change(#[case] body: &str, #[case] expected: &str) {
        assert_eq!(apply(body).unwrap(), expected);
    }

    #[test]
    fn other_values_pass_byte_for_byte() {
        let odd = r#"{"b": 1.0e2,  "a":[ 12345678901234567890123,"\u00e9é" ]}"#;
        let passed = apply(&format!(r#"{{"model":"m","odd":{odd},"z":0.10}}"#)).unwrap();
        assert_eq!(
            passed,
            format!(r#"{{"model":"m","odd":{odd},"z":0.10,"max_tokens":77}}"#)
        );
    }

    #[rstest]
    #[case(r#"{"model":"m","n":2}"#, RequestError::Refused("n"))]
    #[case(r#"{"model":"m","n":1}"#, RequestError::Refused("n"))]
    #[case(r#"{"model":"m","service_tier":"priority"}"#, RequestError::Refused("service_tier"))]
    #[case(r#"{"model":"other"}"#, RequestError::OtherModel)]
    #[case("{}", RequestError::OtherModel)]
    #[case(r#"{"model":5}"#, RequestError::Malformed("model"))]
    #[case(r#"{"model":"m","stream":"yes"}"#, RequestError::Malformed("stream"))]
    #[case(r#"{"model":"m","model":"m"}"#, RequestError::NotAnObject)]
    #[case("[]", RequestError::NotAnObject)]
    #[case("{", RequestError::NotAnObject)]
    fn what_could_raise_the_bill_is_refused_by_name(#[case] body: &str, #[case] expected: RequestError) {
        assert_eq!(apply(body).unwrap_err(), expected);
    }

    #[test]
    fn only_openai_itself_gets_the_new_name_of_the_limit() {
        assert_eq!(Rules::output_limit_for(Some("api.openai.com")), "max_completion_tokens");
        assert_eq!(
            Rules::output_limit_for(Some("api.openai.com.example.org")),
            "max_tokens"
        );
        assert_eq!(Rules::output_limit_for(None), "max_tokens");
    }
}
