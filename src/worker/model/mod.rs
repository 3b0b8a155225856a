//! Wire formats of models: the engine's messages out, its [`Answer`](crate::engine::message::Answer) back in.
//!
//! Pure; owns no connection. Whatever a server sends, the result is an answer or a failure, never a panic. A request is
//! its stable text first, and what a call adds comes last: two calls of one conversation share all bytes but the end.

pub mod anthropic;
mod anthropic_stream;
pub mod openai;
mod stream;
mod structured;

use std::borrow::Borrow;
use std::sync::Arc;

use serde_json::Value;

use crate::api::agent::{Model, ModelApi, ToolCalling};
use crate::api::failure::Failure;
use crate::engine::message::{Answer, Message, Tool};

/// Most tool calls taken from one answer; the rest is dropped.
const MAX_TOOL_CALLS: usize = 128;
/// Most bytes of events taken from one stream.
const MAX_STREAM_BYTES: usize = 32 * 1024 * 1024;

/// The wire format of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenAI chat completions; the script's too.
    OpenAi,
    /// The same without tool calling: answers are JSON objects.
    Structured,
    /// Anthropic messages.
    Anthropic,
}

/// A streamed answer so far.
pub enum Aggregate {
    /// Of OpenAI chat completions.
    OpenAi(stream::Aggregate),
    /// The same, with tool calls in the text.
    Structured(stream::Aggregate),
    /// Of Anthropic messages.
    Anthropic(anthropic_stream::Aggregate),
}

impl Format {
    /// The format of a call with these tools. Without any the answer is text, whatever it looks like.
    #[must_use]
    pub fn of(model: &Model, tools: &[Tool]) -> Self {
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

    /// The body of a request.
    #[must_use]
    pub fn request(self, model: &Model, messages: &[impl Borrow<Message>], tools: &[Tool]) -> Value {
        match self {
            Self::OpenAi => openai::request(model, messages, tools),
            Self::Structured => structured::request(model, messages, tools),
            Self::Anthropic => anthropic::request(model, messages, tools),
        }
    }

    /// The same with a last message that another one replaces in the next request: nothing that is to be read from a
    /// server's cache may end with it.
    #[must_use]
    pub fn request_with_state(
        self,
        model: &Model,
        messages: &[Arc<Message>],
        state: Option<String>,
        tools: &[Tool],
    ) -> Value {
        let Some(text) = state else {
            return self.request(model, messages, tools);
        };
        let mut messages = messages.to_vec();
        messages.push(Arc::new(Message::User { text }));
        let mut body = self.request(model, &messages, tools);
        match self {
            Self::OpenAi | Self::Structured => {}
            Self::Anthropic => anthropic::cache_before_last(&mut body),
        }
        body
    }

    /// Reads an answer that came in one piece.
    pub fn answer(self, body: &[u8]) -> Result<Answer, Failure> {
        match self {
            Self::OpenAi => openai::answer(body),
            Self::Structured => openai::answer(body).map(structured::read),
            Self::Anthropic => anthropic::answer(body),
        }
    }

    /// Nothing of a streamed answer yet.
    #[must_use]
    pub fn aggregate(self) -> Aggregate {
        match self {
            Self::OpenAi => Aggregate::OpenAi(stream::Aggregate::default()),
            Self::Structured => Aggregate::Structured(stream::Aggregate::default()),
            Self::Anthropic => Aggregate::Anthropic(anthropic_stream::Aggregate::default()),
        }
    }

    /// The failure of an answer that is not of this format.
    pub(super) fn bad(self, message: &str) -> Failure {
        match self {
            Self::OpenAi | Self::Structured => openai::bad(message),
            Self::Anthropic => anthropic::bad(message),
        }
    }
}

impl Aggregate {
    /// Takes the data of one event. True: the server said that it was the last.
    pub fn push(&mut self, data: &str) -> Result<bool, Failure> {
        match self {
            Self::OpenAi(aggregate) | Self::Structured(aggregate) => aggregate.push(data),
            Self::Anthropic(aggregate) => aggregate.push(data),
        }
    }

    /// The whole answer. A stream that ended without saying why is cut.
    pub fn finish(self, done: bool) -> Result<Answer, Failure> {
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
                reasoning: None,
            },
            Message::Assistant {
                text: Some("done".into()),
                tool_calls: vec![],
            },
        ]
    }

    #[test]
    fn the_state_is_the_last_message_and_all_before_it_stays_the_same_from_call_to_call() {
        for (api, format) in [("OpenAIChat", Format::OpenAi), ("AnthropicMessages", Format::Anthropic)] {
            let model: Model = serde_json::from_value(json!({"api": api, "name": "m"})).unwrap();
            let mut messages = vec![Arc::new(Message::System { text: "be".into() })];
            messages.extend(turn(1, "look").into_iter().map(Arc::new));
            let sent = |end: usize, state: &str| {
                let body = format.request_with_state(&model, &messages[..end], Some(state.into()), &[]);
                body["messages"].as_array().unwrap().clone()
            };
            // After the runtime's word, and after a tool's result, which the state joins in one format.
            for (end, others) in [(2, 1), (4, 3)] {
                let (one, two) = (sent(end, "7 planes"), sent(end, "8 planes"));
                let last = one.last().unwrap().to_string();
                assert!(last.contains("7 planes") && last.contains("\"user\""), "{last}");
                assert_eq!(one.len(), if format == Format::OpenAi { end + 1 } else { others });
                let before = |all: &[Value]| {
                    json!(all)
                        .to_string()
                        .split(" planes")
                        .next()
                        .unwrap()
                        .replace(['7', '8'], "")
                };
                assert_eq!(before(&one), before(&two), "{api}");
            }
        }
    }

    #[test]
    fn an_answer_to_a_call_without_tools_is_text_also_where_tools_are_called_by_json() {
        let model: Model =
            serde_json::from_value(json!({"api": "OpenAIChat", "name": "m", "toolCalling": "Structured"})).unwrap();
        let tool = Tool {
            name: "look".into(),
            description: "d".into(),
            parameters: json!({"type": "object"}),
        };
        assert_eq!(Format::of(&model, &[tool]), Format::Structured);
        let format = Format::of(&model, &[]);
        let message = json!({"role": "assistant", "content": "{\"wake\": false}"});
        let body = json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]});
        let answer = format.answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(answer.text.as_deref(), Some("{\"wake\": false}"));
    }

    #[test]
    fn the_cache_of_anthropic_ends_before_the_state() {
        let model: Model = serde_json::from_value(json!({"api": "AnthropicMessages", "name": "m"})).unwrap();
        let messages: Vec<Arc<Message>> = turn(1, "look").into_iter().take(3).map(Arc::new).collect();
        let body = Format::Anthropic.request_with_state(&model, &messages, Some("now".into()), &[]);
        assert_eq!(body.get("cache_control"), None);
        let blocks = &body["messages"][2]["content"];
        assert_eq!(blocks[0]["type"], "tool_result");
        assert_eq!(blocks[0]["cache_control"], json!({"type": "ephemeral"}));
        assert_eq!(blocks[1], json!({"type": "text", "text": "now"}));
        assert_eq!(body.as_object().unwrap().keys().next_back().unwrap(), "messages");
        let without = Format::Anthropic.request_with_state(&model, &messages, None, &[]);
        assert_eq!(without, Format::Anthropic.request(&model, &messages, &[]));
    }

    proptest! {
        #[test]
        fn what_was_sent_before_is_sent_again_byte_for_byte(texts in proptest::collection::vec("\\PC{1,20}x", 2..6)) {
            for (api, format) in [
                ("OpenAIChat", Format::OpenAi), ("OpenAIChat", Format::Structured), ("AnthropicMessages", Format::Anthropic),
            ] {
                let model: Model = serde_json::from_value(json!({"api": api, "name": "m"})).unwrap();
                let tools = [Tool { name: "look".into(), description: "d".into(), parameters: json!({"type": "object", "b": 1}) }];
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
