//! Wire formats of model servers: what each process has to know of them, in one place.
//!
//! A format is a directory: the request that the worker builds ([`WireFormat::body`]), the answer that it reads
//! ([`WireFormat::answer`], [`WireFormat::aggregate`]), and what the gateway needs to send a request that it does not
//! trust and to meter the answer: [`ModelEndpoint`], [`RequestSchema`], [`StreamReader`](meter::StreamReader) and
//! [`WireFormat::bill`]. Both use the same code, each in its own process.
//!
//! Pure; owns no connection. Whatever a server sends, the result is an answer or a failure, never a panic. In a request
//! the stable text comes first and new text last, so that two calls of one conversation share a prefix that the
//! provider can cache.
//!
//! Reasoning is kept with answers that call tools, and sent back to the model that wrote it: providers refuse a
//! conversation in which it is missing or changed. It is dropped from other answers, which all of them allow.

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

pub mod answer;
#[cfg(test)]
mod answer_schema_tests;
mod anthropic_messages;
pub mod endpoint;
#[cfg(test)]
mod image_tests;
pub mod images;
mod json_tools;
pub mod meter;
mod openai_chat;
mod openai_responses;
mod openai_usage;
pub mod prompt;
pub mod reported_error;
pub mod request_schema;
#[cfg(test)]
mod samples;
pub mod scripted;
#[cfg(test)]
mod taken_text_tests;
mod tool_call_ids;
pub mod usage;

use std::borrow::Borrow;

use serde_json::Value;

use agentloop_api::agent::{ModelApi, ModelSpec, ToolCalling};
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::{Message, ModelAnswer, ToolDefinition};
use agentloop_ledger::bound::CallBill;
use answer::AnswerAggregate;
use endpoint::ModelEndpoint;
use meter::{AnswerError, AnswerSummary, StreamProgress};
use prompt::ModelPrompt;
use request_schema::RequestSchema;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireFormat {
    /// OpenAI chat completions; also the format of scripted models.
    OpenAiChat,
    /// OpenAI chat completions without native tool calling: answers are JSON objects.
    JsonTools,
    AnthropicMessages,
    OpenAiResponses,
}

impl WireFormat {
    /// One format of each endpoint.
    pub const ENDPOINTS: [Self; 3] = [Self::OpenAiChat, Self::AnthropicMessages, Self::OpenAiResponses];

    /// Returns the format of a call with these tools. Without tools the answer is plain text, whatever it looks like.
    #[must_use]
    pub fn of(model: &ModelSpec, tools: &[ToolDefinition]) -> Self {
        match (Self::of_api(model.api), model.tool_calling) {
            (Self::OpenAiChat, ToolCalling::Structured) if !tools.is_empty() => Self::JsonTools,
            (format, _) => format,
        }
    }

    /// Returns the format on the wire, whatever the texts in it contain.
    #[must_use]
    pub fn of_api(api: ModelApi) -> Self {
        match api {
            ModelApi::OpenAIChat | ModelApi::Scripted => Self::OpenAiChat,
            ModelApi::AnthropicMessages => Self::AnthropicMessages,
            ModelApi::OpenAIResponses => Self::OpenAiResponses,
        }
    }

    /// Builds the body of a request from a conversation only.
    #[must_use]
    pub fn request(self, model: &ModelSpec, messages: &[impl Borrow<Message>], tools: &[ToolDefinition]) -> Value {
        self.body(model, &ModelPrompt::of(messages, tools))
    }

    /// Builds the body of a request.
    #[must_use]
    pub fn body<M: Borrow<Message>>(self, model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Value {
        match self {
            Self::OpenAiChat => openai_chat::request::request(model, prompt),
            Self::JsonTools => json_tools::request::request(model, prompt),
            Self::AnthropicMessages => anthropic_messages::request::request(model, prompt),
            Self::OpenAiResponses => openai_responses::request::request(model, prompt),
        }
    }

    /// Parses a non-streamed answer.
    pub fn answer(self, body: &[u8]) -> Result<ModelAnswer, CallFailure> {
        match self {
            Self::OpenAiChat => openai_chat::response::answer(body),
            Self::JsonTools => openai_chat::response::answer(body).map(json_tools::response::read),
            Self::AnthropicMessages => anthropic_messages::response::answer(body),
            Self::OpenAiResponses => openai_responses::response::answer(body),
        }
    }

    /// Starts a streamed answer.
    #[must_use]
    pub fn aggregate(self) -> Box<dyn AnswerAggregate> {
        match self {
            Self::OpenAiChat => Box::<openai_chat::stream::CompletionAggregate>::default(),
            Self::JsonTools => Box::<json_tools::response::ObjectAggregate>::default(),
            Self::AnthropicMessages => Box::<anthropic_messages::stream::MessageAggregate>::default(),
            Self::OpenAiResponses => Box::<openai_responses::stream::ResponseAggregate>::default(),
        }
    }

    /// Returns where and how its servers are called.
    #[must_use]
    pub fn endpoint(self) -> &'static ModelEndpoint {
        match self {
            Self::OpenAiChat | Self::JsonTools => &openai_chat::limits::ENDPOINT,
            Self::AnthropicMessages => &anthropic_messages::limits::ENDPOINT,
            Self::OpenAiResponses => &openai_responses::limits::ENDPOINT,
        }
    }

    /// Returns what a request may contain.
    #[must_use]
    pub fn schema(self) -> &'static RequestSchema {
        match self {
            Self::OpenAiChat | Self::JsonTools => &openai_chat::limits::SCHEMA,
            Self::AnthropicMessages => &anthropic_messages::limits::SCHEMA,
            Self::OpenAiResponses => &openai_responses::limits::SCHEMA,
        }
    }

    /// Returns the name of the output limit that a server on this host supports.
    #[must_use]
    pub fn output_limit(self, model: &ModelSpec, host: Option<&str>) -> &'static str {
        match self {
            Self::OpenAiChat | Self::JsonTools => openai_chat::limits::output_limit(model, host),
            Self::AnthropicMessages => anthropic_messages::limits::OUTPUT_LIMIT,
            Self::OpenAiResponses => openai_responses::limits::OUTPUT_LIMIT,
        }
    }

    /// Parses the `usage` of an answer. `None` if a count is missing, negative, not an integer, or contradicts another.
    #[must_use]
    pub fn bill(self, usage: &Value) -> Option<CallBill> {
        match self {
            Self::OpenAiChat | Self::JsonTools => openai_chat::usage::bill(usage),
            Self::AnthropicMessages => anthropic_messages::usage::bill(usage),
            Self::OpenAiResponses => openai_responses::usage::bill(usage),
        }
    }

    /// Reads a whole answer as it passes through.
    pub fn read_body(self, body: &[u8]) -> Result<AnswerSummary, AnswerError> {
        match self {
            Self::OpenAiChat | Self::JsonTools => openai_chat::meter::read_body(body),
            Self::AnthropicMessages => anthropic_messages::meter::read_body(body),
            Self::OpenAiResponses => openai_responses::meter::read_body(body),
        }
    }

    /// Reads the data of one event of a stream as it passes through.
    fn read_event(self, progress: &mut StreamProgress, data: &[u8]) -> Result<(), AnswerError> {
        match self {
            Self::OpenAiChat | Self::JsonTools => openai_chat::meter::read_event(progress, data),
            Self::AnthropicMessages => anthropic_messages::meter::read_event(progress, data),
            Self::OpenAiResponses => openai_responses::meter::read_event(progress, data),
        }
    }

    /// Whether the last of several usage reports is that of the whole answer, in whichever event it came.
    fn has_interim_totals(self) -> bool {
        match self {
            Self::OpenAiChat | Self::JsonTools => true,
            Self::AnthropicMessages | Self::OpenAiResponses => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::prompt::CacheLifetime;
    use agentloop_engine::message::ToolCall;

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
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
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
            ("OpenAIChat", WireFormat::OpenAiChat),
            ("OpenAIChat", WireFormat::JsonTools),
            ("AnthropicMessages", WireFormat::AnthropicMessages),
            ("OpenAIResponses", WireFormat::OpenAiResponses),
        ] {
            let model: ModelSpec = serde_json::from_value(json!({"api": api, "name": "m"})).unwrap();
            let mut messages = vec![Message::System { text: "be".into() }];
            messages.extend(turn(1, "look"));
            let sent = |end: usize, state: &str| {
                let prompt = ModelPrompt {
                    images: None,
                    messages: &messages[..end],
                    state: Some(state),
                    tools: &[],
                    lifetime: Some(CacheLifetime::FiveMinutes),
                    cache_key: None,
                    answer_schema: None,
                };
                format.body(&model, &prompt)[format.schema().conversation].to_string()
            };
            // After a message of the runtime, and after a tool's result.
            for end in [2, 4] {
                let (one, two) = (sent(end, "7 planes"), sent(end, "8 planes"));
                let place = one.find("7 planes").unwrap();
                assert_eq!(one[..place], two[..place], "{api}");
                let plain = format.request(&model, &messages[..end], &[])[format.schema().conversation].to_string();
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
        assert_eq!(WireFormat::of(&model, &[tool]), WireFormat::JsonTools);
        let format = WireFormat::of(&model, &[]);
        let message = json!({"role": "assistant", "content": "{\"wake\": false}"});
        let body = json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]});
        let answer = format.answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(answer.text.as_deref(), Some("{\"wake\": false}"));
    }

    proptest! {
        #[test]
        fn earlier_messages_are_sent_again_byte_for_byte(texts in proptest::collection::vec("\\PC{1,20}x", 2..6)) {
            for (api, format) in [
                ("OpenAIChat", WireFormat::OpenAiChat), ("OpenAIChat", WireFormat::JsonTools), ("AnthropicMessages", WireFormat::AnthropicMessages),
                ("OpenAIResponses", WireFormat::OpenAiResponses),
            ] {
                let model: ModelSpec = serde_json::from_value(json!({"api": api, "name": "m"})).unwrap();
                let tools = [ToolDefinition { name: "look".into(), description: "d".into(), parameters: json!({"type": "object", "b": 1}) }];
                let mut messages = vec![Message::System { text: "be".into() }];
                messages.extend(texts.iter().enumerate().flat_map(|(number, text)| turn(number, text)));
                // Each prefix that ends where a call is made: after a message of the runtime, and after a result.
                let ends = (1..messages.len()).filter(|end| !matches!(messages[*end - 1], Message::Assistant { .. } | Message::System { .. }));
                let conversation = format.schema().conversation;
                let bodies: Vec<Value> = ends.map(|end| format.request(&model, &messages[..end], &tools)).collect();
                for pair in bodies.windows(2) {
                    let [before, after] = pair else { unreachable!() };
                    let sent = |body: &Value| -> Vec<String> {
                        body[conversation].as_array().unwrap().iter().map(Value::to_string).collect()
                    };
                    prop_assert!(sent(after).starts_with(&sent(before)), "{before} and {after}");
                    for (name, value) in before.as_object().unwrap().iter().filter(|(name, _)| *name != conversation) {
                        prop_assert_eq!(after[name].to_string(), value.to_string());
                    }
                    // The conversation is the last part that changes: everything before it is the same text.
                    let head = |body: &Value| {
                        let text = body.to_string();
                        let place = text.find(&format!("\"{conversation}\":")).unwrap();
                        text[..place].to_owned()
                    };
                    prop_assert_eq!(head(before), head(after));
                }
            }
        }
    }
}
