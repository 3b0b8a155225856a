//! Wire formats of models: the engine's messages out, its [`ModelAnswer`] back in.
//!
//! Pure; owns no connection. Whatever a server sends, the result is an answer or a failure, never a panic. A request is
//! its stable text first, and what a call adds comes last: two calls of one conversation share all bytes but the end.
//!
//! Reasoning is kept with answers that call tools, and goes back with them to the model that wrote it: providers refuse a
//! conversation in which it is missing or changed. With other answers it is dropped, which all of them allow.

pub mod anthropic;
mod anthropic_stream;
pub mod cache;
pub mod openai;
mod openai_stream;
mod structured;
mod tool_call_ids;

use std::borrow::Borrow;

use serde_json::Value;

use crate::api::agent::{ModelApi, ModelSpec, ToolCalling};
use crate::api::failure::CallFailure;
use crate::engine::message::{Message, MessagePart, ModelAnswer, ReasoningContent, ToolDefinition};
use cache::CacheLifetime;

/// Most tool calls taken from one answer; the rest is dropped.
const MAX_TOOL_CALLS: usize = 128;
/// Most bytes of events taken from one stream.
const MAX_STREAM_BYTES: usize = 32 * 1024 * 1024;

/// The wire format of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireFormat {
    /// OpenAI chat completions; the script's too.
    OpenAi,
    /// The same without tool calling: answers are JSON objects.
    Structured,
    /// Anthropic messages.
    Anthropic,
}

/// What is put before a model.
#[derive(Clone, Copy, Debug)]
pub struct ModelPrompt<'a, M> {
    /// The conversation.
    pub messages: &'a [M],
    /// How things stand now: joins the end of the last message, and another one replaces it in the next request. Nothing
    /// that is to be read from a server's cache may end with it.
    pub state: Option<&'a str>,
    /// Tools offered.
    pub tools: &'a [ToolDefinition],
    /// How long the server is asked to keep it.
    pub lifetime: Option<CacheLifetime>,
    /// What brings calls with the same beginning to the same server; `None`: nothing does.
    pub cache_key: Option<&'a str>,
}

impl<'a, M> ModelPrompt<'a, M> {
    /// A conversation and its tools, and nothing else.
    #[must_use]
    pub fn of(messages: &'a [M], tools: &'a [ToolDefinition]) -> Self {
        Self {
            messages,
            state: None,
            tools,
            lifetime: None,
            cache_key: None,
        }
    }
}

/// A streamed answer so far.
pub enum AnswerAggregate {
    /// Of OpenAI chat completions.
    OpenAi(openai_stream::CompletionAggregate),
    /// The same, with tool calls in the text.
    Structured(openai_stream::CompletionAggregate),
    /// Of Anthropic messages.
    Anthropic(anthropic_stream::MessageAggregate),
}

impl WireFormat {
    /// The format of a call with these tools. Without any the answer is text, whatever it looks like.
    #[must_use]
    pub fn of(model: &ModelSpec, tools: &[ToolDefinition]) -> Self {
        match (model.api, model.tool_calling) {
            (ModelApi::OpenAIChat, ToolCalling::Structured) if !tools.is_empty() => Self::Structured,
            (ModelApi::OpenAIChat | ModelApi::Scripted, _) => Self::OpenAi,
            (ModelApi::AnthropicMessages, _) => Self::Anthropic,
        }
    }

    /// The gateway's route for it.
    #[must_use]
    pub fn route(self) -> &'static str {
        match self {
            Self::OpenAi | Self::Structured => "/v1/chat/completions",
            Self::Anthropic => "/v1/messages",
        }
    }

    /// The body of a request of a conversation and nothing else.
    #[must_use]
    pub fn request(self, model: &ModelSpec, messages: &[impl Borrow<Message>], tools: &[ToolDefinition]) -> Value {
        self.body(model, &ModelPrompt::of(messages, tools))
    }

    /// The body of a request.
    #[must_use]
    pub fn body<M: Borrow<Message>>(self, model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Value {
        match self {
            Self::OpenAi => openai::request(model, prompt),
            Self::Structured => structured::request(model, prompt),
            Self::Anthropic => anthropic::request(model, prompt),
        }
    }

    /// Reads an answer that came in one piece.
    pub fn answer(self, body: &[u8]) -> Result<ModelAnswer, CallFailure> {
        match self {
            Self::OpenAi => openai::answer(body),
            Self::Structured => openai::answer(body).map(structured::read),
            Self::Anthropic => anthropic::answer(body),
        }
    }

    /// Nothing of a streamed answer yet.
    #[must_use]
    pub fn aggregate(self) -> AnswerAggregate {
        match self {
            Self::OpenAi => AnswerAggregate::OpenAi(openai_stream::CompletionAggregate::default()),
            Self::Structured => AnswerAggregate::Structured(openai_stream::CompletionAggregate::default()),
            Self::Anthropic => AnswerAggregate::Anthropic(anthropic_stream::MessageAggregate::default()),
        }
    }

    /// The failure of an answer that is not of this format.
    pub(super) fn bad_response(self, message: &str) -> CallFailure {
        match self {
            Self::OpenAi | Self::Structured => openai::bad_response(message),
            Self::Anthropic => anthropic::bad_response(message),
        }
    }
}

/// The reasoning of a message, when this model wrote it in its present format.
fn own<'a>(model: &ModelSpec, reasoning: Option<&'a ReasoningContent>) -> Option<&'a ReasoningContent> {
    reasoning.filter(|reasoning| reasoning.api == model.api && reasoning.model == model.name)
}

/// What is to be sent back of an answer's reasoning; the driver says which model wrote it.
fn seal_reasoning(
    api: ModelApi,
    parts: Vec<MessagePart>,
    mut calls: Vec<Value>,
    calls_tools: bool,
) -> Option<ReasoningContent> {
    if calls.iter().all(Value::is_null) {
        calls.clear();
    }
    let has_reasoning = parts.iter().any(|part| matches!(part, MessagePart::Opaque(_))) || !calls.is_empty();
    (has_reasoning && calls_tools).then(|| ReasoningContent {
        api,
        model: String::new(),
        parts,
        calls,
    })
}

impl AnswerAggregate {
    /// Takes the data of one event. True: the server said that it was the last.
    pub fn push(&mut self, data: &str) -> Result<bool, CallFailure> {
        match self {
            Self::OpenAi(aggregate) | Self::Structured(aggregate) => aggregate.push(data),
            Self::Anthropic(aggregate) => aggregate.push(data),
        }
    }

    /// The whole answer. A stream that ended without saying why is cut.
    pub fn finish(self, done: bool) -> Result<ModelAnswer, CallFailure> {
        match self {
            Self::OpenAi(aggregate) => aggregate.finish(done),
            Self::Structured(aggregate) => aggregate.finish(done).map(structured::read),
            Self::Anthropic(aggregate) => aggregate.finish(done),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::engine::message::ToolCall;

    fn turn(number: usize, text: &str) -> [Message; 4] {
        let id = format!("call{number}");
        [
            Message::User { text: text.into() },
            Message::Assistant {
                reasoning: None,
                text: number.is_multiple_of(2).then(|| "thinking".into()),
                tool_calls: vec![ToolCall {
                    id: id.clone(),
                    name: "look".into(),
                    arguments: r#"{"z":1.0e2,"a":[1,2]}"#.into(),
                }],
            },
            Message::Tool {
                id,
                text: "seen".into(),
                failed: false,
                reasoning: None,
            },
            Message::Assistant {
                reasoning: None,
                text: Some("done".into()),
                tool_calls: vec![],
            },
        ]
    }

    #[test]
    fn all_before_the_state_stays_the_same_from_call_to_call() {
        for (api, format) in [
            ("OpenAIChat", WireFormat::OpenAi),
            ("OpenAIChat", WireFormat::Structured),
            ("AnthropicMessages", WireFormat::Anthropic),
        ] {
            let model: ModelSpec = serde_json::from_value(json!({"api": api, "name": "m"})).unwrap();
            let mut messages = vec![Message::System { text: "be".into() }];
            messages.extend(turn(1, "look"));
            let sent = |end: usize, state: &str| {
                let prompt = ModelPrompt {
                    messages: &messages[..end],
                    state: Some(state),
                    tools: &[],
                    lifetime: Some(CacheLifetime::FiveMinutes),
                    cache_key: None,
                };
                format.body(&model, &prompt)["messages"].to_string()
            };
            // After the runtime's word, and after a tool's result.
            for end in [2, 4] {
                let (one, two) = (sent(end, "7 planes"), sent(end, "8 planes"));
                let place = one.find("7 planes").unwrap();
                assert_eq!(one[..place], two[..place], "{api}");
                let plain = format.request(&model, &messages[..end], &[])["messages"].to_string();
                assert!(!one[place..].contains("\"role\"") && plain.len() < one.len(), "{one}");
            }
        }
    }

    #[test]
    fn an_answer_to_a_call_without_tools_is_text_also_where_tools_are_called_by_json() {
        let model: ModelSpec =
            serde_json::from_value(json!({"api": "OpenAIChat", "name": "m", "toolCalling": "Structured"})).unwrap();
        let tool = ToolDefinition {
            name: "look".into(),
            description: "d".into(),
            parameters: json!({"type": "object"}),
        };
        assert_eq!(WireFormat::of(&model, &[tool]), WireFormat::Structured);
        let format = WireFormat::of(&model, &[]);
        let message = json!({"role": "assistant", "content": "{\"wake\": false}"});
        let body = json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]});
        let answer = format.answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(answer.text.as_deref(), Some("{\"wake\": false}"));
    }

    proptest! {
        #[test]
        fn what_was_sent_before_is_sent_again_byte_for_byte(texts in proptest::collection::vec("\\PC{1,20}x", 2..6)) {
            for (api, format) in [
                ("OpenAIChat", WireFormat::OpenAi), ("OpenAIChat", WireFormat::Structured), ("AnthropicMessages", WireFormat::Anthropic),
            ] {
                let model: ModelSpec = serde_json::from_value(json!({"api": api, "name": "m"})).unwrap();
                let tools = [ToolDefinition { name: "look".into(), description: "d".into(), parameters: json!({"type": "object", "b": 1}) }];
                let mut messages = vec![Message::System { text: "be".into() }];
                messages.extend(texts.iter().enumerate().flat_map(|(number, text)| turn(number, text)));
                // Each prefix that ends where a call is made: after the runtime's word, and after a result.
                let ends = (1..messages.len()).filter(|end| !matches!(messages[*end - 1], Message::Assistant { .. } | Message::System { .. }));
                let bodies: Vec<Value> = ends.map(|end| format.request(&model, &messages[..end], &tools)).collect();
                for pair in bodies.windows(2) {
                    let [before, after] = pair else { unreachable!() };
                    let sent = |body: &Value| -> Vec<String> {
                        body["messages"].as_array().unwrap().iter().map(Value::to_string).collect()
                    };
                    prop_assert!(sent(after).starts_with(&sent(before)), "{before} and {after}");
                    for (name, value) in before.as_object().unwrap().iter().filter(|(name, _)| *name != "messages") {
                        prop_assert_eq!(after[name].to_string(), value.to_string());
                    }
                    // The conversation is the last of what changes: all before it is the same text.
                    let head = |body: &Value| {
                        let text = body.to_string();
                        let place = text.find("\"messages\"").unwrap_or_default();
                        text[..place].to_owned()
                    };
                    prop_assert_eq!(head(before), head(after));
                }
            }
        }
    }
}
