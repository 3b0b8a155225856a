//! Messages of a conversation, independent of any provider's format.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use agentloop_api::agent::ModelApi;

use super::tool::ResultArtifacts;

/// One message of the conversation.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(tag = "role", rename_all = "lowercase")]
pub enum Message {
    /// The instructions, always first; never part of the transcript.
    System { text: String },
    /// A message of the runtime.
    User { text: String },
    /// The model's answer.
    Assistant {
        /// Visible text, when there is any.
        text: Option<String>,
        /// The tools it calls, in its order.
        tool_calls: Vec<ToolCall>,
        /// The reasoning before the answer, opaque. Sent back with the message, only to the model that wrote it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reasoning: Option<ReasoningContent>,
    },
    /// The result of one [`ToolCall`]; always follows the assistant message that requested it.
    Tool {
        /// [`ToolCall::id`] of the call.
        id: String,
        text: String,
        /// It failed, or was not run.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        failed: bool,
        /// Why the model requested it, in its own words. Kept in the journal's history; never sent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reasoning: Option<String>,
        /// What the worker has stored of it.
        #[serde(default, skip_serializing_if = "ResultArtifacts::is_empty")]
        artifacts: ResultArtifacts,
    },
}

impl Message {
    /// Bytes that it adds to a prompt.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::System { text } | Self::User { text } => text.len(),
            Self::Tool { id, text, .. } => id.len() + text.len(),
            Self::Assistant {
                text,
                tool_calls,
                reasoning,
            } => {
                let calls = tool_calls.iter().map(ToolCall::bytes).sum::<usize>();
                text.as_ref().map_or(0, String::len) + calls + reasoning.as_ref().map_or(0, ReasoningContent::len)
            }
        }
    }
}

/// A tool call that the model requests.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The id of the call: unique within one answer as the server gives it, and within the journal as the engine keeps
    /// it ([`call_id`]).
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments as the JSON text the model wrote; may be malformed.
    pub arguments: String,
}

impl ToolCall {
    fn bytes(&self) -> usize {
        self.id.len() + self.name.len() + self.arguments.len()
    }
}

/// The reasoning of a model before its answer, as its server wrote it: text, signatures, encrypted blocks. It is
/// neither read nor changed. Providers verify it, so it is sent back byte for byte, and only to the model and wire
/// format that it came from; for all others the message is sent without it.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ReasoningContent {
    /// The wire format that it came in.
    pub api: ModelApi,
    /// `spec.model.name` of the model that wrote it.
    pub model: String,
    /// The message in its original order, where that contains reasoning.
    pub parts: Vec<MessagePart>,
    /// What the server attached to the [`ToolCall`]s, by position; `null` for a call without. Empty: nothing attached.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<Value>,
}

/// One part of a message that contains reasoning. Text and [`ToolCall`]s are in the message itself and not stored
/// twice.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum MessagePart {
    /// A block of reasoning. In OpenAI chat completions: an object whose fields are fields of the message.
    Opaque(Value),
    /// The next bytes of the message's text.
    Text(usize),
    /// The next [`ToolCall`].
    Call,
}

impl ReasoningContent {
    /// Bytes that it adds to a prompt.
    #[must_use]
    pub fn len(&self) -> usize {
        let opaque = self.parts.iter().filter_map(|part| match part {
            MessagePart::Opaque(value) => Some(value),
            MessagePart::Text(_) | MessagePart::Call => None,
        });
        opaque
            .chain(&self.calls)
            .filter(|value| !value.is_null())
            .map(|value| value.to_string().len())
            .sum()
    }

    /// Whether there is nothing to send back.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The id of an answer's [`ToolCall`], unique within the journal: nine letters and digits, which every server accepts
/// and some require. They encode the turn, the call within it, and the position within the answer, in base 36.
#[must_use]
pub fn call_id(turn: i64, call: u32, place: usize) -> String {
    let place = u64::try_from(place).unwrap_or(u64::MAX);
    let [turn, call, place] = [
        base_36(turn.unsigned_abs(), 5),
        base_36(call.into(), 2),
        base_36(place, 2),
    ];
    format!("{turn}{call}{place}")
}

/// The last digits of a number.
fn base_36(mut number: u64, digits: usize) -> String {
    let mut text = String::new();
    for _ in 0..digits {
        let digit = u32::try_from(number % 36).unwrap_or_default();
        text.insert(0, char::from_digit(digit, 36).unwrap_or('0'));
        number /= 36;
    }
    text
}

impl ModelAnswer {
    /// Marks the answer's reasoning as written by this model.
    #[must_use]
    pub fn written_by(mut self, api: ModelApi, model: &str) -> Self {
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.api = api;
            model.clone_into(&mut reasoning.model);
        }
        self
    }
}

/// The arguments of a call by name; `None`: they are not one JSON object. Some servers write empty arguments as an
/// empty text.
#[must_use]
pub fn arguments(text: &str) -> Option<Map<String, Value>> {
    if text.trim().is_empty() {
        return Some(Map::new());
    }
    serde_json::from_str(text).ok()
}

/// The JSON object that a model was requested to answer with. Reasoning before it, in `<think>` tags, and text around it are
/// ignored.
///
/// `None`: there is none with this field, one is not well-formed or has a field twice, or two differ in the field. What such an answer means is not
/// known: a model that says no may quote an object of the text that it judges, which says yes.
#[must_use]
pub fn answered_object(text: &str, field: &str) -> Option<Map<String, Value>> {
    let mut found: Option<Map<String, Value>> = None;
    let mut rest = without_reasoning(text)?;
    while let Some(start) = rest.find('{') {
        rest = &rest[start..];
        let mut objects = serde_json::Deserializer::from_str(rest).into_iter::<DistinctFields>();
        let DistinctFields(object) = objects.next()?.ok()?;
        rest = &rest[objects.byte_offset()..];
        match &found {
            Some(before) if object.get(field).is_some_and(|value| before.get(field) != Some(value)) => return None,
            None if object.contains_key(field) => found = Some(object),
            Some(_) | None => {}
        }
    }
    found
}

/// A JSON object in which no field occurs twice.
struct DistinctFields(Map<String, Value>);

impl<'de> Deserialize<'de> for DistinctFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = DistinctFields;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<DistinctFields, A::Error> {
                let mut object = Map::new();
                while let Some((name, value)) = fields.next_entry::<String, Value>()? {
                    if object.insert(name, value).is_some() {
                        return Err(A::Error::custom("a field occurs twice"));
                    }
                }
                Ok(DistinctFields(object))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// What follows the reasoning at the beginning of an answer. Some servers leave out its opening tag. `None`: it does not end.
fn without_reasoning(text: &str) -> Option<&str> {
    const END: &str = "</think>";
    if let Some(reasoning) = text.trim_start().strip_prefix("<think>") {
        return reasoning.split_once(END).map(|(_, answer)| answer);
    }
    match text.split_once(END) {
        Some((reasoning, answer)) if !reasoning.contains('{') => Some(answer),
        Some(_) | None => Some(text),
    }
}

/// A tool as offered to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolDefinition {
    pub name: Cow<'static, str>,
    /// What it does, for the model.
    pub description: Cow<'static, str>,
    /// JSON schema of its arguments.
    pub parameters: Value,
}

/// A model's answer.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelAnswer {
    pub text: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    /// Its reasoning, to be sent back with its text and [`ToolCall`]s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<ReasoningContent>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Billed tokens as reported by the server: uncached input, cache writes and output. `None`: not reported.
    #[serde(default)]
    pub tokens: Option<u64>,
    /// All input tokens as reported by the server, read from a cache or not. `None`: not reported.
    #[serde(default)]
    pub input_tokens: Option<u64>,
    /// Output tokens as they are billed, with reasoning. `None`: not reported, or not credible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u64>,
    /// Its cost in micro-dollars. `None`: its price or its usage is unknown.
    #[serde(default)]
    pub cost: Option<i64>,
}

/// Why an answer ended.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FinishReason {
    /// It was complete.
    #[default]
    Stop,
    /// Truncated at the output limit.
    Length,
    /// It waits for tool results.
    ToolCalls,
    /// The provider filtered or refused it.
    Refused,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_of_calls_are_nine_letters_and_digits_and_no_two_are_the_same() {
        let mut all = HashSet::new();
        for turn in [1, 35, 36, 1_000_000, 60_000_000] {
            for call in [1, 25, 1_000] {
                for place in [0, 1, 127] {
                    let id = call_id(turn, call, place);
                    assert!(
                        id.len() == 9 && id.bytes().all(|letter| letter.is_ascii_alphanumeric()),
                        "{id}"
                    );
                    assert!(all.insert(id));
                }
            }
        }
    }
}
