//! Rewrites a request on its way to the server, and rejects what must not be sent.
//!
//! Exactly these fields change; all other values are passed on byte for byte and in order:
//!
//! | field | becomes |
//! |---|---|
//! | those of `spec.model.extraBody` | their values there; new ones are appended |
//! | the output limits ([`RequestSchema::output_limits`]) | all are removed; the one that the server supports is set to `spec.model.maxOutputTokens`, or to what is left of it |
//! | those that the format forces ([`RequestSchema::forced`]) | their values there, such as `stream_options` of chat completions |
//!
//! A request may contain the fields that the worker writes ([`RequestSchema::fields`]) and those of
//! `spec.model.extraBody`; any other field is rejected, since it may raise the bill in a way that only its server
//! knows. Also rejected: a model other than the spec's, non-text content, whose cost the request does not show, except
//! for images that the spec allows, server-side tools, and a request that is too long for `spec.model.contextTokens`.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::images::{self, ImageCount};
use super::model_field::ModelField;
use super::raw_object::RawObject;
use crate::api::agent::{ImageInput, ModelSpec, ToolCalling};
use crate::api::extra::{OWN_FIELDS, REFUSED_FIELDS};
use crate::provider::WireFormat;
use crate::provider::request_schema::{ForcedField, MAX_ANSWER_SCHEMA, PartSchema, RequestSchema};

/// Fields whose content is not shown to the model, in any format.
const UNSEEN: [&str; 5] = ["model", "stream", "stream_options", "cache_control", "prompt_cache_key"];
/// Fields of a message that carry reasoning back. Servers may count it in one request and drop it in another.
const REASONING: [&str; 3] = ["reasoning", "reasoning_content", "reasoning_details"];
/// Fields of a tool call that carry no reasoning.
const CALL_FIELDS: [&str; 4] = ["function", "id", "index", "type"];
/// A field with a template in the request, which could render text of any length.
const TEMPLATE: &str = "chat_template";
/// Bytes of a request per token of the context, in addition to [`SPARE_BYTES`]. Text has about four; only text for
/// which no tokenizer was made has more than eight.
const BYTES_PER_TOKEN: usize = 8;
/// Bytes that any request may have: field names, and text that compresses well.
const SPARE_BYTES: usize = 64 * 1024;
/// Longest name of a field that a message repeats.
const MAX_NAME: usize = 64;

/// The rules by which requests are rewritten.
#[derive(Clone, Debug)]
pub struct RequestRules {
    schema: &'static RequestSchema,
    model: String,
    max_output_tokens: u32,
    /// Maximum number of bytes of a request that can fit into `spec.model.contextTokens`, beside its images.
    max_bytes: usize,
    /// Which images it may have; `None`: none.
    image_input: Option<ImageInput>,
    tool_calling: ToolCalling,
    /// Name of the output limit that the server supports.
    output_limit: &'static str,
    extra: Vec<(String, Box<RawValue>)>,
}

/// Why a request is rejected.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(Debug, PartialEq, Eq)]
pub enum RequestError {
    NotAnObject,
    OtherModel,
    /// A field that the worker does not write.
    Unknown(String),
    /// A field that raises the bill.
    Refused(&'static str),
    /// A field that the loop or another field of the spec sets.
    NotYours(&'static str),
    /// A non-ASCII field name, which some servers may read as another name.
    Disguised,
    /// Content whose cost the request does not show.
    NotText(&'static str),
    /// An image beyond those that the spec allows.
    Image,
    /// A JSON schema of the answer with this many bytes, which exceed the limit.
    AnswerSchema(usize),
    /// A tool that the server runs.
    ServerTool,
    Malformed(&'static str),
    /// It cannot fit into the context.
    TooLong {
        bytes: usize,
        max: usize,
    },
}

impl RequestError {
    /// Describes it for a model in this field of the spec. Names fields, never quotes values.
    pub fn message(&self, model: ModelField) -> String {
        match self {
            Self::NotAnObject => "the request is not a JSON object".to_owned(),
            Self::OtherModel => format!("the request's model is not {model}.name"),
            Self::Unknown(field) => {
                format!("the request has the unknown field {field}: set it in {model}.extraBody")
            }
            Self::Refused(field) => {
                format!("the field {field} is not allowed: it could raise the bill beyond the output limit")
            }
            Self::NotYours(field) => {
                format!("the field {field} is not allowed: the loop or another field of the spec sets it")
            }
            Self::Disguised => "field names must be ASCII".to_owned(),
            Self::NotText(field) => format!(
                "the request has non-text content (an image, audio or a file) in {field}: its cost has no bound"
            ),
            Self::Image => format!(
                "the request has an image that {model}.imageInput does not allow, or too many: allowed are PNG and JPEG in \
                 base64, within maxImages and tokensPerImage"
            ),
            Self::AnswerSchema(bytes) => {
                format!("the JSON schema of the answer has {bytes} bytes, but at most {MAX_ANSWER_SCHEMA} are allowed")
            }
            Self::ServerTool => "the request has a tool that the server itself runs: its cost has no bound".to_owned(),
            Self::Malformed(field) => format!("the request field {field} has the wrong type"),
            Self::TooLong { bytes, max } => format!(
                "the request has {bytes} bytes, but at most {max} fit into {model}.contextTokens: raise it to the \
                 context length of the model, or lower spec.tools.maxResultBytes"
            ),
        }
    }
}

/// A part of what a request shows the model, as bytes on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptPart<'a> {
    pub bytes: &'a [u8],
    /// Whether it is a message of the conversation, rather than a tool or a setting.
    pub is_message: bool,
    /// Cost-related properties of a message.
    pub traits: MessageTraits,
}

/// Properties of a message that affect its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageTraits {
    /// Bytes of tool arguments, which templates may re-render with other whitespace.
    pub rewritten: usize,
    /// Its images, whose tokens have no relation to their bytes.
    pub images: ImageCount,
    /// It carries reasoning, which a server may count in one request and drop in another.
    pub unsteady: bool,
}

/// A request that may be sent. Only its output limit can still be lowered.
pub struct CheckedRequest {
    schema: &'static RequestSchema,
    fields: RawObject,
    /// One per message.
    traits: Vec<MessageTraits>,
    image_input: Option<ImageInput>,
    output_limit: &'static str,
    max_output_tokens: u32,
    is_streamed: bool,
}

impl CheckedRequest {
    /// Everything that the server may show the model: each message, each tool and each other field is one part.
    pub fn parts(&self) -> Vec<PromptPart<'_>> {
        let mut parts = Vec::new();
        for (name, value) in &self.fields.0 {
            let is_message = name == self.schema.conversation;
            let unseen = [&UNSEEN, self.schema.unseen, self.schema.output_limits];
            if unseen.iter().any(|names| names.contains(&name.as_str())) {
                continue;
            }
            let part = |bytes, traits| PromptPart {
                bytes,
                is_message,
                traits,
            };
            match serde_json::from_str::<Vec<&RawValue>>(value.get()) {
                Ok(items) if is_message => {
                    let traits = self
                        .traits
                        .iter()
                        .copied()
                        .chain(std::iter::repeat(MessageTraits::default()));
                    parts.extend(
                        items
                            .into_iter()
                            .zip(traits)
                            .map(|(item, traits)| part(item.get().as_bytes(), traits)),
                    );
                }
                Ok(items) if name == "tools" => {
                    parts.extend(
                        items
                            .into_iter()
                            .map(|item| part(item.get().as_bytes(), MessageTraits::default())),
                    );
                }
                _ => parts.push(PromptPart {
                    is_message: false,
                    ..part(value.get().as_bytes(), MessageTraits::default())
                }),
            }
        }
        parts
    }

    /// Which images it may have.
    pub fn image_input(&self) -> Option<ImageInput> {
        self.image_input
    }

    /// Maximum number of output tokens that the server may bill.
    pub fn max_output(&self) -> u32 {
        self.max_output_tokens
    }

    /// Whether the answer is to be streamed.
    pub fn is_streamed(&self) -> bool {
        self.is_streamed
    }

    /// Lowers the output limit; never raises it.
    pub fn limit_output(&mut self, tokens: u32) {
        let tokens = tokens.min(self.max_output_tokens);
        let place = self.fields.0.iter_mut().find(|(name, _)| name == self.output_limit);
        if let (Some((_, value)), Ok(limit)) = (place, to_raw_value(&tokens)) {
            *value = limit;
            self.max_output_tokens = tokens;
        }
    }

    /// The body to send to the server.
    pub fn body(&self) -> Result<Vec<u8>, RequestError> {
        serde_json::to_vec(&self.fields).map_err(|_| RequestError::NotAnObject)
    }
}

impl RequestRules {
    /// The rules for a model on this host.
    pub fn new(model: &ModelSpec, host: Option<&str>) -> Result<Self, RequestError> {
        let format = WireFormat::of_api(model.api);
        let schema = format.schema();
        let mut extra = Vec::new();
        for (name, value) in &model.extra_body {
            refuse(schema, name, value)?;
            extra.push((
                name.clone(),
                to_raw_value(value).map_err(|_| RequestError::NotAnObject)?,
            ));
        }
        let context = usize::try_from(model.context_tokens).unwrap_or(usize::MAX);
        Ok(Self {
            schema,
            model: model.name.clone(),
            max_output_tokens: model.output_limit(),
            max_bytes: context.saturating_mul(BYTES_PER_TOKEN).saturating_add(SPARE_BYTES),
            image_input: model.image_input,
            tool_calling: model.tool_calling,
            output_limit: format.output_limit(model, host),
            extra,
        })
    }

    /// The request as it may be sent to the server.
    pub fn apply(&self, body: &[u8]) -> Result<CheckedRequest, RequestError> {
        let max_image_bytes = images::max_bytes(self.image_input);
        self.check_length(body.len().saturating_sub(max_image_bytes))?;
        let mut fields: RawObject = serde_json::from_slice(body).map_err(|_| RequestError::NotAnObject)?;
        fields.has_only(self.schema.fields)?;
        if get::<String>(&fields.0, "model")?.as_ref() != Some(&self.model) {
            return Err(RequestError::OtherModel);
        }
        let traits = self.check_content_of_fields(&fields)?;
        let mut images = ImageCount::default();
        for traits in &traits {
            images.add(traits.images);
        }
        let max = self.image_input.map_or(0, |input| input.max_images);
        if images.images > usize::try_from(max).unwrap_or(usize::MAX) {
            return Err(RequestError::Image);
        }
        self.check_length(body.len().saturating_sub(images.bytes))?;
        for (name, value) in &self.extra {
            match fields.0.iter_mut().find(|(field, _)| field == name) {
                Some((_, old)) => old.clone_from(value),
                None => fields.0.push((name.clone(), value.clone())),
            }
        }
        self.limit_output(&mut fields.0)?;
        let is_streamed = get::<bool>(&fields.0, "stream")?.unwrap_or(false);
        for field in self.schema.forced {
            if is_streamed || !field.only_streamed {
                force(&mut fields.0, *field)?;
            }
        }
        Ok(CheckedRequest {
            schema: self.schema,
            fields,
            traits,
            image_input: self.image_input,
            output_limit: self.output_limit,
            max_output_tokens: self.max_output_tokens,
            is_streamed,
        })
    }

    /// Checks the length of a request without its images.
    fn check_length(&self, bytes: usize) -> Result<(), RequestError> {
        let max = self.max_bytes;
        if bytes > max {
            return Err(RequestError::TooLong { bytes, max });
        }
        Ok(())
    }

    /// Checks that the model is shown only text and allowed images, and that no tool is server-side. Returns the
    /// cost-related properties of each message.
    fn check_content_of_fields(&self, fields: &RawObject) -> Result<Vec<MessageTraits>, RequestError> {
        let schema = self.schema;
        let messages = get::<Vec<RawObject>>(&fields.0, schema.conversation)?.unwrap_or_default();
        let traits = messages.iter().map(|message| self.check_message(message));
        let traits = traits.collect::<Result<_, _>>()?;
        if let Some((name, text)) = schema.text.and_then(|name| Some((name, fields.get(name)?))) {
            self.check_content(text, name, &mut MessageTraits::default())?;
        }
        for (name, known) in schema.settings {
            if let Some(setting) = get::<Option<RawObject>>(&fields.0, name)?.flatten() {
                setting.has_only(known)?;
            }
        }
        self.check_answer_schema(fields)?;
        for tool in get::<Vec<RawObject>>(&fields.0, "tools")?.unwrap_or_default() {
            let kind = tool
                .get("type")
                .map_or(Ok(None), |kind| read::<Option<String>>(kind, "tools"))?;
            if kind.is_some_and(|kind| kind != schema.tool_type) {
                return Err(RequestError::ServerTool);
            }
            tool.has_only(schema.tool_fields)?;
        }
        Ok(traits)
    }

    /// Checks that the form of the answer is that of the worker, which is a JSON schema, and that the schema is not too large.
    fn check_answer_schema(&self, fields: &RawObject) -> Result<(), RequestError> {
        let mut inner: Option<RawObject> = None;
        for (name, known) in self.schema.answer {
            let Some(value) = inner.as_ref().unwrap_or(fields).get(name) else {
                return Ok(());
            };
            let object: RawObject = read(value, name)?;
            object.has_only(known)?;
            if !matches!(object.kind(name)?.as_str(), "" | "json_schema") {
                return Err(RequestError::Malformed(name));
            }
            inner = Some(object);
        }
        let schema = inner.as_ref().and_then(|format| format.get("schema"));
        let bytes = schema.map_or(0, |schema| schema.get().len());
        // With `Structured` it contains those of all tools.
        let is_small = bytes <= MAX_ANSWER_SCHEMA || self.tool_calling == ToolCalling::Structured;
        is_small.then_some(()).ok_or(RequestError::AnswerSchema(bytes))
    }

    fn check_message(&self, message: &RawObject) -> Result<MessageTraits, RequestError> {
        let of = self.schema.conversation;
        let kind = message.kind(of)?;
        match (self.schema.entry)(&kind).ok_or(RequestError::NotText(of))? {
            PartSchema::Fields(known) => message.has_only(known)?,
            PartSchema::Reasoning => {
                return Ok(MessageTraits {
                    unsteady: true,
                    ..MessageTraits::default()
                });
            }
            PartSchema::Image => return Err(RequestError::NotText(of)),
        }
        let is_there = |name: &&str| message.get(name).is_some_and(|value| value.get() != "null");
        let mut traits = MessageTraits {
            unsteady: REASONING.iter().any(is_there),
            ..MessageTraits::default()
        };
        // `output` is the content of a result in Responses.
        for content in ["content", "output"].iter().filter_map(|name| message.get(name)) {
            self.check_content(content, of, &mut traits)?;
        }
        // Calls are messages of their own in Responses, and fields of a message in chat completions.
        traits.rewritten += message.get("arguments").map_or(0, |arguments| arguments.get().len());
        let calls = message.get("tool_calls");
        let calls = calls.map_or(Ok(None), |calls| read::<Option<Vec<RawObject>>>(calls, of))?;
        for call in calls.into_iter().flatten() {
            // Signatures of reasoning, in whichever field a server puts them.
            traits.unsteady |= call.has_only(&CALL_FIELDS).is_err();
            if let Some(function) = call.get("function") {
                let arguments = read::<RawObject>(function, of)?;
                traits.rewritten += arguments.get("arguments").map_or(0, |arguments| arguments.get().len());
            }
        }
        Ok(traits)
    }

    /// Accepts a string, or a list of parts that are text or, in a message, an image, a tool call or its result.
    fn check_content(
        &self,
        content: &RawValue,
        of: &'static str,
        traits: &mut MessageTraits,
    ) -> Result<(), RequestError> {
        if content.get() == "null" {
            return Ok(());
        }
        if content.get().starts_with('"') {
            let text = read::<DecodedText<'_>>(content, of)?;
            // Templates drop such text from all but the last messages.
            traits.unsteady |= text.0.contains("</think>");
            return Ok(());
        }
        let in_entry = of == self.schema.conversation;
        for part in read::<Vec<RawObject>>(content, of)? {
            match (self.schema.part)(&part.kind(of)?, in_entry).ok_or(RequestError::NotText(of))? {
                PartSchema::Fields(known) => part.has_only(known)?,
                PartSchema::Reasoning => {
                    traits.unsteady = true;
                    continue;
                }
                PartSchema::Image => {
                    traits.images.add(self.check_image(&part, of)?);
                    continue;
                }
            }
            traits.rewritten += part.get("input").map_or(0, |input| input.get().len());
            if let Some(content) = part.get("content") {
                // A tool result may contain only text and images.
                self.check_content_of_result(content, of, traits)?;
            }
            if let Some(text) = part.get("text") {
                traits.unsteady |= read::<DecodedText<'_>>(text, of)?.0.contains("</think>");
            }
        }
        Ok(())
    }

    fn check_content_of_result(
        &self,
        content: &RawValue,
        of: &'static str,
        traits: &mut MessageTraits,
    ) -> Result<(), RequestError> {
        if content.get().starts_with('[') {
            for part in read::<Vec<RawObject>>(content, of)? {
                match (self.schema.part)(&part.kind(of)?, false) {
                    Some(PartSchema::Fields(known)) => part.has_only(known)?,
                    Some(PartSchema::Image) => traits.images.add(self.check_image(&part, of)?),
                    Some(PartSchema::Reasoning) | None => return Err(RequestError::NotText(of)),
                }
            }
            return Ok(());
        }
        self.check_content(content, of, traits)
    }

    fn check_image(&self, part: &RawObject, of: &'static str) -> Result<ImageCount, RequestError> {
        let input = self.image_input.filter(|_| of == self.schema.conversation);
        let input = input.ok_or(RequestError::NotText(of))?;
        let fields = part.0.iter().map(|(name, value)| (name.as_str(), &**value));
        images::read(fields, input).ok_or(RequestError::Image)
    }

    fn limit_output(&self, fields: &mut Vec<(String, Box<RawValue>)>) -> Result<(), RequestError> {
        let malformed = |_| RequestError::Malformed(self.output_limit);
        let limit = to_raw_value(&self.max_output_tokens).map_err(malformed)?;
        let place = fields
            .iter()
            .position(|(name, _)| self.schema.output_limits.contains(&name.as_str()));
        fields.retain(|(name, _)| !self.schema.output_limits.contains(&name.as_str()));
        // No field before the first limit was removed, so its position is still valid.
        fields.insert(place.unwrap_or(fields.len()), (self.output_limit.into(), limit));
        Ok(())
    }
}

/// Checks a field of `spec.model.extraBody`. Names are compared case-insensitively, as some servers do. For the same
/// reason they must be ASCII.
fn refuse(schema: &RequestSchema, name: &str, value: &Value) -> Result<(), RequestError> {
    if !name.is_ascii() {
        return Err(RequestError::Disguised);
    }
    let is_it = |(known, _): &&(&str, &str)| known.eq_ignore_ascii_case(name);
    if let Some((refused, _)) = REFUSED_FIELDS.iter().find(is_it) {
        return Err(RequestError::Refused(refused));
    }
    if let Some((own, _)) = OWN_FIELDS.iter().find(is_it) {
        return Err(RequestError::NotYours(own));
    }
    if let Some(own) = schema.reserved.iter().find(|own| own.eq_ignore_ascii_case(name)) {
        return Err(RequestError::NotYours(own));
    }
    if has_template(value) {
        return Err(RequestError::Refused(TEMPLATE));
    }
    Ok(())
}

/// Whether it contains a template at any depth, such as in `chat_template_kwargs`.
fn has_template(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields
            .iter()
            .any(|(name, value)| name.eq_ignore_ascii_case(TEMPLATE) || has_template(value)),
        Value::Array(items) => items.iter().any(has_template),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// A string with its escapes decoded, as a server reads it.
#[derive(Deserialize)]
struct DecodedText<'a>(#[serde(borrow)] Cow<'a, str>);

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

fn force(fields: &mut Vec<(String, Box<RawValue>)>, forced: ForcedField) -> Result<(), RequestError> {
    let malformed = |_| RequestError::Malformed(forced.name);
    let value = RawValue::from_string(forced.value.into()).map_err(malformed)?;
    match fields.iter_mut().find(|(field, _)| field == forced.name) {
        Some((_, old)) => *old = value,
        None => fields.push((forced.name.into(), value)),
    }
    Ok(())
}

impl RawObject {
    /// Its `type`; empty if it has none.
    fn kind(&self, of: &'static str) -> Result<String, RequestError> {
        self.get("type").map_or(Ok(String::new()), |kind| read(kind, of))
    }

    fn has_only(&self, known: &[&str]) -> Result<(), RequestError> {
        let other = self.0.iter().find(|(name, _)| !known.contains(&name.as_str()));
        other.map_or(Ok(()), |(name, _)| {
            // Any other name could be text of the conversation.
            let is_plain = name.len() <= MAX_NAME
                && name
                    .chars()
                    .all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
            let name = if is_plain {
                name.as_str()
            } else {
                "with a name that is not a plain word"
            };
            Err(RequestError::Unknown(name.to_owned()))
        })
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;

    fn rules(fields: &Value) -> Result<RequestRules, RequestError> {
        let mut model = serde_json::json!({"api": "OpenAIChat", "name": "m", "maxOutputTokens": 77});
        for (name, value) in fields.as_object().unwrap() {
            model[name] = value.clone();
        }
        RequestRules::new(&serde_json::from_value(model).unwrap(), None)
    }

    fn unknown(name: &str) -> RequestError {
        RequestError::Unknown(name.into())
    }

    fn checked(body: &str) -> Result<CheckedRequest, RequestError> {
        rules(&serde_json::json!({}))?.apply(body.as_bytes())
    }

    /// The same for Anthropic messages.
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
        let mut checked = checked(r#"{"model":"m","messages":[],"temperature":1}"#).unwrap();
        assert_eq!(checked.max_output(), 77);
        for (asked, set) in [(78, 77), (30, 30), (50, 30)] {
            checked.limit_output(asked);
            assert_eq!(checked.max_output(), set);
            let body = format!(r#"{{"model":"m","messages":[],"temperature":1,"max_tokens":{set}}}"#);
            assert_eq!(String::from_utf8(checked.body().unwrap()).unwrap(), body);
        }
    }

    #[test]
    fn each_message_each_tool_and_each_other_field_is_a_part_of_the_prompt() {
        let checked = checked(
            r#"{"model":"m","stream":true,"messages":[{"role":"user"}, {"name": "x"}],"tools":[{"type":"function"},{"function":2}],"tool_choice":{"x":[1]}}"#,
        )
        .unwrap();
        let parts = checked.parts();
        let parts = parts
            .iter()
            .map(|part| (std::str::from_utf8(part.bytes).unwrap(), part.is_message));
        let expected = [
            (r#"{"role":"user"}"#, true),
            (r#"{"name": "x"}"#, true),
            (r#"{"type":"function"}"#, false),
            (r#"{"function":2}"#, false),
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
        r#"{"model":"m","max_completion_tokens":5,"temperature":1,"max_tokens":9}"#,
        r#"{"model":"m","max_tokens":77,"temperature":1}"#
    )]
    #[case(
        r#"{"model":"m","stream":true}"#,
        r#"{"model":"m","stream":true,"max_tokens":77,"stream_options":{"include_usage":true}}"#
    )]
    #[case(
        r#"{"stream_options":{"include_usage":false,"x":1},"model":"m","stream":true}"#,
        r#"{"stream_options":{"include_usage":true},"model":"m","stream":true,"max_tokens":77}"#
    )]
    #[case(r#"{"model":"m","stream":false}"#, r#"{"model":"m","stream":false,"max_tokens":77}"#)]
    fn exactly_the_named_fields_change(#[case] body: &str, #[case] expected: &str) {
        assert_eq!(apply(body).unwrap(), expected);
    }

    #[test]
    fn other_values_pass_byte_for_byte() {
        let odd = r#"{"b": 1.0e2,  "a":[ 12345678901234567890123,"\u00e9é" ]}"#;
        let passed = apply(&format!(r#"{{"model":"m","tool_choice":{odd},"temperature":0.10}}"#)).unwrap();
        assert_eq!(
            passed,
            format!(r#"{{"model":"m","tool_choice":{odd},"temperature":0.10,"max_tokens":77}}"#)
        );
    }

    #[rstest]
    #[case(r#"{"model":"m","n":2}"#, unknown("n"))]
    #[case(r#"{"model":"m","chat_template":"{% for %}"}"#, unknown("chat_template"))]
    #[case(r#"{"model":"m","chat_template_kwargs":{}}"#, unknown("chat_template_kwargs"))]
    #[case(r#"{"model":"m","enable_search":true}"#, unknown("enable_search"))]
    #[case(r#"{"model":"m","of_a_vendor_of_tomorrow":1}"#, unknown("of_a_vendor_of_tomorrow"))]
    #[case(r#"{"model":"m","system":"x"}"#, unknown("system"))]
    #[case(r#"{"model":"m","said: it":1}"#, unknown("with a name that is not a plain word"))]
    #[case(r#"{"model":"other"}"#, RequestError::OtherModel)]
    #[case("{}", RequestError::OtherModel)]
    #[case(r#"{"model":5}"#, RequestError::Malformed("model"))]
    #[case(r#"{"model":"m","stream":"yes"}"#, RequestError::Malformed("stream"))]
    #[case(r#"{"model":"m","model":"m"}"#, RequestError::NotAnObject)]
    #[case("[]", RequestError::NotAnObject)]
    #[case("{", RequestError::NotAnObject)]
    fn a_field_that_could_raise_the_bill_is_refused_by_name(#[case] body: &str, #[case] expected: RequestError) {
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
        unknown("audio")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":"x","Content":[]}]}"#,
        unknown("Content")
    )]
    #[case(r#"{"model":"m","messages":"x"}"#, RequestError::Malformed("messages"))]
    #[case(r#"{"model":"m","tools":[{"type":"web_search"}]}"#, RequestError::ServerTool)]
    #[case(
        r#"{"model":"m","tools":[{"type":"function","function":{},"max_uses":9}]}"#,
        unknown("max_uses")
    )]
    #[case(
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x","image_url":"y"}]}]}"#,
        unknown("image_url")
    )]
    #[case(r#"{"model":"m","Max_Tokens":9}"#, unknown("Max_Tokens"))]
    #[case(r#"{"model":"m","max_tokenſ":9}"#, unknown("with a name that is not a plain word"))]
    fn an_unbounded_or_unknown_part_of_a_request_is_refused(#[case] body: &str, #[case] expected: RequestError) {
        assert_eq!(apply(body).unwrap_err(), expected);
    }

    #[test]
    fn text_in_parts_and_tools_of_the_worker_pass() {
        let body = r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]},{"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[{"id":"a","type":"function","function":{"name":"b","arguments":"{}"},"extra_content":{"google":{"thought_signature":"s"}}}]},{"role":"tool","tool_call_id":"a","content":""}],"tools":[{"type":"function","function":{}}],"tool_choice":"auto","reasoning_effort":"low","prompt_cache_key":"uid","max_tokens":77}"#;
        assert_eq!(apply(body).unwrap(), body);
        let body = r#"{"model":"m","system":[{"type":"text","text":"x"}],"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":{"type":"image"}},{"type":"thinking","thinking":"x","signature":"s","of_a_server":1},{"type":"redacted_thinking","data":"d"}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"x"}]}]},{"role":"user","content":"x"}],"tools":[{"name":"a","input_schema":{}},{"type":"custom","name":"b","cache_control":{"type":"ephemeral"}}],"stream":true,"thinking":{"type":"enabled","budget_tokens":40},"output_config":{"effort":"low"},"max_tokens":77}"#;
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
    #[case(r#"{"model":"m","service_tier":"auto"}"#, unknown("service_tier"))]
    #[case(r#"{"model":"m","mcp_servers":[]}"#, unknown("mcp_servers"))]
    #[case(r#"{"model":"m","inference_geo":"us"}"#, unknown("inference_geo"))]
    #[case(r#"{"model":"m","speed":"fast"}"#, unknown("speed"))]
    #[case(r#"{"model":"m","fallbacks":[]}"#, unknown("fallbacks"))]
    #[case(r#"{"model":"m","context_management":{}}"#, unknown("context_management"))]
    #[case(r#"{"model":"m","container":"x"}"#, unknown("container"))]
    #[case(r#"{"model":"other"}"#, RequestError::OtherModel)]
    fn a_field_of_the_messages_api_that_raises_the_bill_is_refused(#[case] body: &str, #[case] expected: RequestError) {
        assert_eq!(message(body).unwrap_err(), expected);
    }

    #[test]
    fn extra_fields_replace_the_workers_and_are_refused_by_name() {
        let rules_with = |extra: Value| rules(&serde_json::json!({"extraBody": extra}));
        let extra = serde_json::json!({"tool_choice": "none", "rag_enabled": true, "chat_template_kwargs": {"enable_thinking": false}});
        let passed = rules_with(extra)
            .unwrap()
            .apply(br#"{"model":"m","tool_choice":"auto","temperature":0.10}"#)
            .unwrap();
        let expected = r#"{"model":"m","tool_choice":"none","temperature":0.10,"rag_enabled":true,"chat_template_kwargs":{"enable_thinking":false},"max_tokens":77}"#;
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
        for hidden in [
            serde_json::json!({"chat_template_kwargs": {"chat_template": "{% for %}"}}),
            serde_json::json!({"x": [{"Chat_Template": "{% for %}"}]}),
        ] {
            assert_eq!(rules_with(hidden).unwrap_err(), RequestError::Refused("chat_template"));
        }
        assert_eq!(
            rules_with(serde_json::json!({"tıer": 1})).unwrap_err(),
            RequestError::Disguised
        );
    }

    #[test]
    fn a_request_that_cannot_fit_into_the_context_is_refused_and_one_byte_less_is_not() {
        let rules = rules(&serde_json::json!({"contextTokens": 1_000})).unwrap();
        let max = 1_000 * 8 + 64 * 1024;
        let body = |length: usize| {
            let body = |text: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
            body(&"x".repeat(length - body("").len()))
        };
        assert!(rules.apply(body(max).as_bytes()).is_ok());
        let error = rules.apply(body(max + 1).as_bytes()).err();
        assert_eq!(error, Some(RequestError::TooLong { bytes: max + 1, max }));
    }

    /// A request of this API that asks for an answer of this schema.
    fn schema_in_request(api: &str, schema: &str) -> String {
        match api {
            "OpenAIChat" => format!(
                r#"{{"model":"m","response_format":{{"type":"json_schema","json_schema":{{"name":"a","schema":{schema},"strict":true}}}},"max_tokens":77}}"#
            ),
            "OpenAIResponses" => format!(
                r#"{{"model":"m","text":{{"format":{{"type":"json_schema","name":"a","schema":{schema},"strict":true}}}},"max_output_tokens":77,"store":false}}"#
            ),
            _ => format!(
                r#"{{"model":"m","output_config":{{"effort":"low","format":{{"type":"json_schema","schema":{schema}}}}},"max_tokens":77}}"#
            ),
        }
    }

    #[rstest]
    #[case("OpenAIChat")]
    #[case("OpenAIResponses")]
    #[case("AnthropicMessages")]
    fn a_schema_of_the_answer_passes_up_to_its_bound_and_counts_with_all_its_bytes(#[case] api: &str) {
        let apply = |more: &Value, body: &str| {
            let mut model = serde_json::json!({"api": api});
            model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            rules(&model)?.apply(body.as_bytes())
        };
        let schema = |bytes: usize| format!(r#"{{"title":"{}"}}"#, "x".repeat(bytes - r#"{"title":""}"#.len()));
        let body = schema_in_request(api, &schema(MAX_ANSWER_SCHEMA));
        let checked = apply(&serde_json::json!({}), &body).unwrap();
        assert_eq!(String::from_utf8(checked.body().unwrap()).unwrap(), body);
        let counted = |checked: &CheckedRequest| checked.parts().iter().map(|part| part.bytes.len()).sum::<usize>();
        let small = apply(&serde_json::json!({}), &schema_in_request(api, &schema(100))).unwrap();
        assert_eq!(counted(&checked) - counted(&small), MAX_ANSWER_SCHEMA - 100);
        assert!(
            checked.parts().iter().all(|part| !part.is_message),
            "it counts like a tool"
        );
        let large = schema_in_request(api, &schema(MAX_ANSWER_SCHEMA + 1));
        let error = apply(&serde_json::json!({}), &large).err();
        assert_eq!(error, Some(RequestError::AnswerSchema(MAX_ANSWER_SCHEMA + 1)));
        // Such a schema contains those of all tools, and only the length of the request bounds it.
        if api == "OpenAIChat" {
            assert!(apply(&serde_json::json!({"toolCalling": "Structured"}), &large).is_ok());
        }
    }

    #[rstest]
    #[case(
        "OpenAIChat",
        r#""response_format":{"type":"grammar"}"#,
        RequestError::Malformed("response_format")
    )]
    #[case(
        "OpenAIChat",
        r#""response_format":"json""#,
        RequestError::Malformed("response_format")
    )]
    #[case(
        "OpenAIChat",
        r#""response_format":{"type":"json_schema","grammar":"x"}"#,
        unknown("grammar")
    )]
    #[case(
        "OpenAIChat",
        r#""response_format":{"json_schema":{"description":"x"}}"#,
        unknown("description")
    )]
    #[case("OpenAIResponses", r#""text":{"verbosity":"high"}"#, unknown("verbosity"))]
    #[case(
        "OpenAIResponses",
        r#""text":{"format":{"type":"text"}}"#,
        RequestError::Malformed("format")
    )]
    #[case("AnthropicMessages", r#""output_config":{"task_budget":{}}"#, unknown("task_budget"))]
    #[case(
        "AnthropicMessages",
        r#""output_config":{"format":{"type":"x"}}"#,
        RequestError::Malformed("format")
    )]
    fn another_form_of_the_answer_is_refused(#[case] api: &str, #[case] field: &str, #[case] expected: RequestError) {
        let body = format!(r#"{{"model":"m",{field}}}"#);
        let rules = rules(&serde_json::json!({ "api": api })).unwrap();
        assert_eq!(rules.apply(body.as_bytes()).err(), Some(expected));
    }

    #[test]
    fn arguments_and_reasoning_of_a_message_show_in_its_traits() {
        let traits = |rules: &RequestRules, message: &str| {
            let body = format!(r#"{{"model":"m","messages":[{message}]}}"#);
            let checked = rules.apply(body.as_bytes()).unwrap();
            let traits = checked.parts()[0].traits;
            (traits.rewritten, traits.unsteady)
        };
        let chat = rules(&serde_json::json!({})).unwrap();
        let messages = rules(&serde_json::json!({"api": "AnthropicMessages"})).unwrap();
        for (rules, message, expected) in [
            (&chat, r#"{"role":"user","content":"\"thinking\""}"#, (0, false)),
            (
                &chat,
                r#"{"role":"assistant","content":"<think>a<\/th\u0069nk>b"}"#,
                (0, true),
            ),
            (&chat, r#"{"role":"assistant","reasoning_content":"x"}"#, (0, true)),
            (&chat, r#"{"role":"assistant","reasoning_content":null}"#, (0, false)),
            (
                &chat,
                r#"{"tool_calls":[{"function":{"arguments":"[1,1]"}},{"function":{"arguments":"{}"}}]}"#,
                (11, false),
            ),
            (
                &chat,
                r#"{"tool_calls":[{"function":{},"extra_content":{}}]}"#,
                (0, true),
            ),
            (
                &messages,
                r#"{"content":[{"type":"th\u0069nking","thinking":"x"}]}"#,
                (0, true),
            ),
            (
                &messages,
                r#"{"content":[{"type":"redacted_thinking","data":"x"}]}"#,
                (0, true),
            ),
            (
                &messages,
                r#"{"content":[{"type":"tool_use","input":{"thinking":[1,1]}}]}"#,
                (18, false),
            ),
        ] {
            assert_eq!(traits(rules, message), expected, "{message}");
        }
    }
}
