//! What the gateway changes in a request on its way to the server, and what it refuses.
//!
//! Exactly these fields change; every other value is passed on byte for byte, in its order:
//!
//! | field | becomes |
//! |---|---|
//! | those of `spec.model.extraBody` | what that says; new ones come last |
//! | `max_tokens`, `max_completion_tokens` | both leave; the one that the server knows is set to `spec.model.maxOutputTokens`, or what is left of it |
//! | `stream_options.include_usage` | `true`, when `stream` is; of chat completions only |
//!
//! Refused are fields that raise the bill beyond its bound ([`REFUSED_FIELDS`]), another model than the spec's, content
//! that is not text, since nothing of its cost shows in the request, and tools that the server runs.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use super::dialect::Dialect;
use crate::api::agent::Model;
use crate::api::extra::{OWN_FIELDS, REFUSED_FIELDS};

/// Fields of which nothing comes before the model.
const UNSEEN: [&str; 6] = [
    "model",
    "stream",
    "stream_options",
    "cache_control",
    OUTPUT_LIMITS[0],
    OUTPUT_LIMITS[1],
];
const OUTPUT_LIMITS: [&str; 2] = ["max_tokens", "max_completion_tokens"];
/// Fields of a message that bring something else than text.
const NOT_TEXT: [&str; 4] = ["audio", "files", "images", "videos"];

/// How requests are to be changed.
#[derive(Clone, Debug)]
pub struct Rules {
    dialect: Dialect,
    /// `spec.model.name`.
    model: String,
    /// `spec.model.maxOutputTokens`.
    max_output_tokens: u32,
    /// Name of the output limit that the server knows.
    output_limit: &'static str,
    /// `spec.model.extraBody`.
    extra: Vec<(String, Box<RawValue>)>,
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
    /// A field that is not the spec's to say.
    #[error("the field {0} is refused: the loop or another field of the spec says it")]
    NotYours(&'static str),
    /// The name of a field reads like another's to some servers.
    #[error(
        "the request has a field whose name is only in letter case or by odd letters another than one that is checked"
    )]
    Disguised,
    /// Content whose cost does not show in the request.
    #[error(
        "the request's {0} hold something else than text (an image, a sound, a file): what that costs has no bound"
    )]
    NotText(&'static str),
    /// A tool that the server runs.
    #[error("the request's tools hold one that the server itself runs: what that costs has no bound")]
    ServerTool,
    /// A field of the wrong type.
    #[error("the request's field {0} is not of the type it must be")]
    Malformed(&'static str),
}

/// A JSON object whose values stay as they were written.
#[derive(Debug)]
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
    /// The rules of a model on this host.
    pub fn new(model: &Model, host: Option<&str>) -> Result<Self, RequestError> {
        let dialect = Dialect::of(model.api);
        let mut extra = Vec::new();
        for (name, value) in &model.extra_body {
            refuse(name)?;
            if let Some((own, _)) = OWN_FIELDS.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)) {
                return Err(RequestError::NotYours(own));
            }
            extra.push((
                name.clone(),
                to_raw_value(value).map_err(|_| RequestError::NotAnObject)?,
            ));
        }
        Ok(Self {
            dialect,
            model: model.name.clone(),
            max_output_tokens: model.max_output_tokens,
            output_limit: dialect.output_limit(model, host),
            extra,
        })
    }

    /// The request as it may go to the server.
    pub fn apply(&self, body: &[u8]) -> Result<Checked, RequestError> {
        let RawObject(mut fields) = serde_json::from_slice(body).map_err(|_| RequestError::NotAnObject)?;
        for (name, value) in &self.extra {
            match fields.iter_mut().find(|(field, _)| field == name) {
                Some((_, old)) => old.clone_from(value),
                None => fields.push((name.clone(), value.clone())),
            }
        }
        for (name, _) in &fields {
            refuse(name)?;
        }
        let mut fields = RawObject(fields);
        for (own, _) in &OWN_FIELDS {
            fields.only(own)?;
        }
        if get::<String>(&fields.0, "model")?.as_ref() != Some(&self.model) {
            return Err(RequestError::OtherModel);
        }
        self.check_text(&fields)?;
        self.limit_output(&mut fields.0)?;
        if self.dialect == Dialect::Chat && get::<bool>(&fields.0, "stream")?.unwrap_or(false) {
            include_usage(&mut fields.0)?;
        }
        Ok(Checked {
            fields,
            output_limit: self.output_limit,
            max_output_tokens: self.max_output_tokens,
        })
    }

    /// Everything that the model is shown is text, and no tool is the server's.
    fn check_text(&self, fields: &RawObject) -> Result<(), RequestError> {
        for message in get::<Vec<RawObject>>(&fields.0, "messages")?.unwrap_or_default() {
            for name in NOT_TEXT {
                if message.only(name)?.is_some_and(|value| value.get() != "null") {
                    return Err(RequestError::NotText("messages"));
                }
            }
            if let Some(content) = message.only("content")? {
                self.check_content(content, "messages", true)?;
            }
        }
        if let (Dialect::Messages, Some(system)) = (self.dialect, fields.only("system")?) {
            self.check_content(system, "system", false)?;
        }
        let own = match self.dialect {
            Dialect::Chat => "function",
            Dialect::Messages => "custom",
        };
        for tool in get::<Vec<RawObject>>(&fields.0, "tools")?.unwrap_or_default() {
            let kind = tool
                .only("type")?
                .map_or(Ok(None), |kind| read::<Option<String>>(kind, "tools"))?;
            if kind.is_some_and(|kind| kind != own && kind != "custom") {
                return Err(RequestError::ServerTool);
            }
        }
        Ok(())
    }

    /// A string, or a list of parts each of which is text or, in a message, a tool's call or result.
    fn check_content(&self, content: &RawValue, of: &'static str, in_message: bool) -> Result<(), RequestError> {
        if content.get().starts_with('"') || content.get() == "null" {
            return Ok(());
        }
        for part in read::<Vec<RawObject>>(content, of)? {
            let kind = part
                .only("type")?
                .map_or(Ok(String::new()), |kind| read::<String>(kind, of))?;
            match (self.dialect, kind.as_str()) {
                (_, "text") | (Dialect::Chat, "refusal") => {}
                (Dialect::Messages, "tool_use" | "thinking" | "redacted_thinking") if in_message => {}
                (Dialect::Messages, "tool_result") if in_message => {
                    if let Some(content) = part.only("content")? {
                        self.check_content(content, of, false)?;
                    }
                }
                _ => return Err(RequestError::NotText(of)),
            }
        }
        Ok(())
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

/// Names are compared without regard to case: some servers read them so. For the same reason they are plain letters.
fn refuse(name: &str) -> Result<(), RequestError> {
    if !name.is_ascii() {
        return Err(RequestError::Disguised);
    }
    let refused = REFUSED_FIELDS
        .iter()
        .find(|(refused, _)| refused.eq_ignore_ascii_case(name));
    refused.map_or(Ok(()), |(refused, _)| Err(RequestError::Refused(refused)))
}

fn read<'a, T: Deserialize<'a>>(value: &'a RawValue, of: &'static str) -> Result<T, RequestError> {
    serde_json::from_str(value.get()).map_err(|_| RequestError::Malformed(of))
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

impl RawObject {
    /// The value of a field that no other one can be taken for.
    fn only(&self, name: &'static str) -> Result<Option<&RawValue>, RequestError> {
        let mut found = None;
        for (field, value) in &self.0 {
            if field == name {
                found = Some(&**value);
            } else if !field.is_ascii() || field.eq_ignore_ascii_case(name) {
                return Err(RequestError::Disguised);
            }
        }
        Ok(found)
    }
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

    fn rules(fields: &Value) -> Result<Rules, RequestError> {
        let mut model = serde_json::json!({"api": "OpenAIChat", "name": "m", "maxOutputTokens": 77});
        for (name, value) in fields.as_object().unwrap() {
            model[name] = value.clone();
        }
        Rules::new(&serde_json::from_value(model).unwrap(), None)
    }

    fn checked(body: &str) -> Result<Checked, RequestError> {
        rules(&serde_json::json!({}))?.apply(body.as_bytes())
    }

    /// The same of Anthropic messages.
    fn message(body: &str) -> Result<String, RequestError> {
        let rules = rules(&serde_json::json!({"api": "AnthropicMessages"}))?;
        let checked = rules.apply(body.as_bytes())?;
        Ok(String::from_utf8(checked.body()?).unwrap())
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

    #[rstest]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"input_audio"}]}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"text":"no type"}]}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":{"type":"text"}}]}"#,
        RequestError::Malformed("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"assistant","audio":{"id":"x"}}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":"x","Content":[]}]}"#,
        RequestError::Disguised
    )]
    #[case(r#"{"model":"m","messages":"x"}"#, RequestError::Malformed("messages"))]
    #[case(r#"{"model":"m","tools":[{"type":"web_search"}]}"#, RequestError::ServerTool)]
    #[case(r#"{"model":"m","Max_Tokens":9}"#, RequestError::Disguised)]
    #[case(r#"{"model":"m","max_tokenſ":9}"#, RequestError::Disguised)]
    #[case(r#"{"model":"m","N":9}"#, RequestError::Refused("n"))]
    #[case(r#"{"model":"m","n_predict":9}"#, RequestError::Refused("n_predict"))]
    fn what_has_no_bound_or_hides_is_refused(#[case] body: &str, #[case] expected: RequestError) {
        assert_eq!(apply(body).unwrap_err(), expected);
    }

    #[test]
    fn text_in_parts_and_tools_of_the_worker_pass() {
        let body = r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]},{"role":"assistant","content":null,"audio":null}],"tools":[{"type":"function","function":{}}],"max_tokens":77}"#;
        assert_eq!(apply(body).unwrap(), body);
        let body = r#"{"model":"m","system":[{"type":"text","text":"x"}],"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":{"type":"image"}},{"type":"thinking","thinking":"x"}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"x"}]}]},{"role":"user","content":"x"}],"tools":[{"name":"a","input_schema":{}},{"type":"custom","name":"b"}],"stream":true,"max_tokens":77}"#;
        assert_eq!(message(body).unwrap(), body);
    }

    #[rstest]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"image"}]}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"document"}]}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"container_upload"}]}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"image"}]}]}]}"#,
        RequestError::NotText("messages")
    )]
    #[case(r#"{"model":"m","system":[{"type":"document"}]}"#, RequestError::NotText("system"))]
    #[case(
        r#"{"model":"m","tools":[{"type":"web_search_20250305","name":"web_search"}]}"#,
        RequestError::ServerTool
    )]
    #[case(
        r#"{"model":"m","tools":[{"type":"bash_20250124","name":"bash"}]}"#,
        RequestError::ServerTool
    )]
    #[case(r#"{"model":"m","service_tier":"auto"}"#, RequestError::Refused("service_tier"))]
    #[case(r#"{"model":"m","mcp_servers":[]}"#, RequestError::Refused("mcp_servers"))]
    #[case(r#"{"model":"m","inference_geo":"us"}"#, RequestError::Refused("inference_geo"))]
    #[case(r#"{"model":"m","speed":"fast"}"#, RequestError::Refused("speed"))]
    #[case(r#"{"model":"m","fallbacks":[]}"#, RequestError::Refused("fallbacks"))]
    #[case(
        r#"{"model":"m","context_management":{}}"#,
        RequestError::Refused("context_management")
    )]
    #[case(r#"{"model":"m","container":"x"}"#, RequestError::Refused("container"))]
    #[case(r#"{"model":"other"}"#, RequestError::OtherModel)]
    fn what_raises_the_bill_of_a_message_is_refused(#[case] body: &str, #[case] expected: RequestError) {
        assert_eq!(message(body).unwrap_err(), expected);
    }

    #[test]
    fn extra_fields_replace_the_workers_and_are_refused_by_the_same_names() {
        let rules_with = |extra: Value| rules(&serde_json::json!({"extraBody": extra}));
        let passed = rules_with(serde_json::json!({"top_p": 0.5, "rag_enabled": true}))
            .unwrap()
            .apply(br#"{"model":"m","top_p":1,"z":0.10}"#)
            .unwrap();
        let expected = r#"{"model":"m","top_p":0.5,"z":0.10,"rag_enabled":true,"max_tokens":77}"#;
        assert_eq!(String::from_utf8(passed.body().unwrap()).unwrap(), expected);
        for (name, _) in REFUSED_FIELDS {
            assert_eq!(
                rules_with(serde_json::json!({name: 1})).unwrap_err(),
                RequestError::Refused(name)
            );
        }
        for (name, _) in OWN_FIELDS {
            assert_eq!(
                rules_with(serde_json::json!({name.to_uppercase(): 1})).unwrap_err(),
                RequestError::NotYours(name)
            );
        }
    }
}
