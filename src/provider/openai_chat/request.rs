//! Requests of OpenAI chat completions.

use std::borrow::Borrow;

use serde_json::{Map, Value, json};

use super::EXTRA;
use crate::images::EncodedImage;
use crate::prompt::{ModelPrompt, images_text, own, temperature};
use crate::tool_call_ids::ToolCallIds;
use agentloop_api::agent::{ModelSpec, PromptCache, ReasoningEffort};
use agentloop_engine::message::{Message, MessagePart, ToolCall, ToolDefinition};

/// The only host that is known to support `prompt_cache_key`: other servers may refuse unknown fields.
const KEYED: &str = "api.openai.com";

/// Builds the body of a request. The gateway adds the output limit.
#[must_use]
pub fn request<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Value {
    let mut body = Map::new();
    body.insert("model".into(), model.name.clone().into());
    if let Some(key) = prompt.cache_key.filter(|_| is_keyed(model)) {
        body.insert("prompt_cache_key".into(), key.into());
    }
    body.insert("messages".into(), conversation(model, prompt).into());
    if !prompt.tools.is_empty() {
        body.insert("tools".into(), prompt.tools.iter().map(tool).collect());
    }
    if let Some(schema) = prompt.answer_schema {
        let format = json!({"name": schema.name, "schema": schema.schema, "strict": schema.is_exact});
        let format = json!({"type": "json_schema", "json_schema": format});
        body.insert("response_format".into(), format);
    }
    if let Some(effort) = model.reasoning.as_ref().and_then(|reasoning| reasoning.effort) {
        body.insert("reasoning_effort".into(), effort_name(effort).into());
    }
    if let Some(temperature) = temperature(model) {
        body.insert("temperature".into(), temperature.into());
    }
    body.insert("stream".into(), model.stream.into());
    Value::Object(body)
}

pub(crate) fn effort_name(effort: ReasoningEffort) -> &'static str {
    match effort {
        ReasoningEffort::Minimal => "minimal",
        ReasoningEffort::Low => "low",
        ReasoningEffort::Medium => "medium",
        ReasoningEffort::High => "high",
    }
}

/// Whether the server is known to route calls by `prompt_cache_key`.
pub(crate) fn is_keyed(model: &ModelSpec) -> bool {
    let address = model.base_url.as_deref().and_then(|url| url.split_once("://"));
    let host = address.and_then(|(_, rest)| rest.split(['/', ':']).next());
    model.prompt_cache != PromptCache::Disabled && host.is_some_and(|host| host.eq_ignore_ascii_case(KEYED))
}

/// Builds the messages. Templates of some models require alternating user and assistant messages, and no user message
/// after a tool result. So consecutive texts of the runtime are joined, and the hot state is appended to the last
/// message. Results contain no images, so those of one answer follow its results, as a message of the user.
fn conversation<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::new();
    let mut ids = ToolCallIds::default();
    let mut images = Vec::new();
    for message in prompt.messages {
        let message = message.borrow();
        if !matches!(message, Message::Tool { .. }) {
            all.extend(image_message(&mut images));
        }
        match message {
            Message::System { text } => all.push(json!({"role": "system", "content": text})),
            Message::User { text } => join(&mut all, &["user"], text),
            Message::Tool {
                id, text, artifacts, ..
            } => {
                all.push(json!({"role": "tool", "tool_call_id": ids.result(id), "content": text}));
                images.extend(prompt.shown(artifacts));
            }
            Message::Assistant { text, tool_calls, .. } if tool_calls.is_empty() => {
                all.push(json!({"role": "assistant", "content": text.as_deref().unwrap_or_default()}));
            }
            Message::Assistant {
                text,
                tool_calls,
                reasoning,
            } => {
                ids.answer();
                let reasoning = own(model, reasoning.as_ref());
                let calls = tool_calls.iter().enumerate().map(|(place, call)| {
                    let extra = reasoning.and_then(|reasoning| reasoning.calls.get(place));
                    tool_call(&ids.call(&call.id), call, extra)
                });
                let calls: Vec<Value> = calls.collect();
                let mut message = json!({"role": "assistant", "content": text, "tool_calls": calls});
                for part in reasoning.map(|reasoning| &reasoning.parts).into_iter().flatten() {
                    if let (MessagePart::Opaque(Value::Object(fields)), Some(message)) = (part, message.as_object_mut())
                    {
                        message.extend(fields.clone());
                    }
                }
                all.push(message);
            }
        }
    }
    all.extend(image_message(&mut images));
    if let Some(state) = prompt.state {
        join(&mut all, &["user", "tool"], state);
    }
    all
}

/// Appends text of the user to the last message if that has one of these roles, otherwise as a new message.
fn join(all: &mut Vec<Value>, roles: &[&str], text: &str) {
    let last = all
        .last_mut()
        .filter(|last| last["role"].as_str().is_some_and(|role| roles.contains(&role)));
    match last {
        Some(last) => {
            let content = &mut last["content"];
            if let Some(parts) = content.as_array_mut() {
                // After images.
                parts.push(json!({"type": "text", "text": text}));
            } else {
                let before = content.as_str().unwrap_or_default();
                *content = format!("{before}\n\n{text}").into();
            }
        }
        None => all.push(json!({"role": "user", "content": text})),
    }
}

/// The message with these images, which are taken. `None`: there are none. With `high`, the bill of an image is bounded;
/// other values may use the image as it is.
fn image_message(images: &mut Vec<(&str, &EncodedImage)>) -> Option<Value> {
    if images.is_empty() {
        return None;
    }
    let names: Vec<&str> = images.iter().map(|(name, _)| *name).collect();
    let mut parts = vec![json!({"type": "text", "text": images_text(&names)})];
    parts.extend(
        images
            .drain(..)
            .map(|(_, image)| json!({"type": "image_url", "image_url": {"url": image.data_url(), "detail": "high"}})),
    );
    Some(json!({"role": "user", "content": parts}))
}

fn tool_call(id: &str, call: &ToolCall, extra: Option<&Value>) -> Value {
    let function = json!({"name": call.name, "arguments": sendable(&call.arguments)});
    let mut wire = json!({"id": id, "type": "function", "function": function});
    if let Some(extra) = extra.filter(|extra| !extra.is_null()) {
        wire[EXTRA] = extra.clone();
    }
    wire
}

/// Returns arguments that servers accept: they refuse a whole conversation if any arguments are not a JSON object, so
/// malformed ones are wrapped in one.
pub(crate) fn sendable(arguments: &str) -> String {
    if serde_json::from_str::<Map<String, Value>>(arguments).is_ok() {
        arguments.to_owned()
    } else if arguments.trim().is_empty() {
        "{}".to_owned()
    } else {
        json!({ "malformed": arguments }).to_string()
    }
}

fn tool(tool: &ToolDefinition) -> Value {
    let function = json!({"name": tool.name, "description": tool.description, "parameters": tool.parameters});
    json!({"type": "function", "function": function})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai_chat::response::answer;
    use crate::samples::call;
    use agentloop_api::agent::ModelApi;
    use agentloop_engine::message::ModelAnswer;

    fn request(model: &ModelSpec, messages: &[Message], tools: &[ToolDefinition]) -> Value {
        super::request(model, &ModelPrompt::of(messages, tools))
    }

    fn model() -> ModelSpec {
        serde_json::from_value(json!({"api": "OpenAIChat", "name": "m", "temperature": "0.7"})).unwrap()
    }

    #[test]
    fn the_request_carries_everything_but_an_output_limit() {
        let messages = [
            Message::System { text: "be".into() },
            Message::User { text: "go".into() },
            Message::Assistant {
                reasoning: None,
                text: None,
                tool_calls: vec![call("a", r#"{"sleep":1}"#)],
            },
            Message::Tool {
                id: "a".into(),
                text: "ok".into(),
                failed: false,
                reasoning: Some("kept here".into()),
                artifacts: agentloop_engine::tool::ResultArtifacts::default(),
            },
            Message::Assistant {
                reasoning: None,
                text: Some("done".into()),
                tool_calls: vec![],
            },
        ];
        let tools = [ToolDefinition {
            name: "yield".into(),
            description: "d".into(),
            parameters: json!({"type": "object"}),
        }];
        assert_eq!(
            request(&model(), &messages, &tools),
            json!({
                "model": "m",
                "messages": [
                    {"role": "system", "content": "be"},
                    {"role": "user", "content": "go"},
                    {"role": "assistant", "content": null, "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "yield", "arguments": "{\"sleep\":1}"}}]},
                    {"role": "tool", "tool_call_id": "a", "content": "ok"},
                    {"role": "assistant", "content": "done"},
                ],
                "tools": [{"type": "function",
                    "function": {"name": "yield", "description": "d", "parameters": {"type": "object"}}}],
                "temperature": 0.7,
                "stream": true,
            })
        );
    }

    /// A non-streamed answer with two calls.
    fn thought(fields: &Value, extra: &Value) -> Vec<u8> {
        let call = |id: &str, extra: &Value| {
            json!({"id": id, "type": "function", "extra_content": extra,
            "function": {"name": "yield", "arguments": "{}"}})
        };
        let mut message = json!({"content": null, "tool_calls": [call("x", extra), call("y", &Value::Null)]});
        message
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        json!({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
            .to_string()
            .into_bytes()
    }

    fn sent_back(answer: ModelAnswer, wrote: &str) -> Value {
        let answer = answer.written_by(ModelApi::OpenAIChat, wrote);
        let message = Message::Assistant {
            text: answer.text,
            tool_calls: answer.tool_calls,
            reasoning: answer.reasoning,
        };
        request(&model(), &[message], &[])["messages"][0].clone()
    }

    #[test]
    fn reasoning_and_signatures_are_returned_verbatim_only_to_the_model_that_wrote_them() {
        let signed = json!({"google": {"thought_signature": "c2ln"}});
        for (fields, extra) in [
            (json!({"reasoning_content": "hm"}), Value::Null),
            // Reasoning servers require the field even if it is empty.
            (json!({"reasoning_content": ""}), Value::Null),
            (
                json!({"reasoning": "hm", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}),
                Value::Null,
            ),
            (json!({}), signed),
        ] {
            let body = thought(&fields, &extra);
            let message = sent_back(answer(&body).unwrap(), "m");
            for (name, value) in fields.as_object().unwrap() {
                assert_eq!(message[name], *value);
            }
            assert_eq!(
                message["tool_calls"][0].get(EXTRA),
                Some(&extra).filter(|extra| !extra.is_null())
            );
            assert_eq!(message["tool_calls"][1].get(EXTRA), None);
            let other = sent_back(answer(&body).unwrap(), "other").to_string();
            assert!(!other.contains("reasoning") && !other.contains(EXTRA), "{other}");
        }
        assert_eq!(
            answer(&thought(&json!({"reasoning_content": null}), &Value::Null))
                .unwrap()
                .reasoning,
            None
        );
    }

    #[test]
    fn consecutive_user_messages_are_merged_and_the_state_joins_the_last_one() {
        let user = |text: &str| Message::User { text: text.into() };
        let system = Message::System { text: "be".into() };
        let asked = Message::Assistant {
            text: None,
            tool_calls: vec![call("a", "{}")],
            reasoning: None,
        };
        let result = Message::Tool {
            id: "a".into(),
            text: "ok".into(),
            failed: false,
            reasoning: None,
            artifacts: agentloop_engine::tool::ResultArtifacts::default(),
        };
        let last = |messages: &[Message]| {
            let prompt = ModelPrompt {
                images: None,
                messages,
                state: Some("now"),
                tools: &[],
                lifetime: None,
                cache_key: None,
                answer_schema: None,
            };
            let body = super::request(&model(), &prompt);
            let all = body["messages"].as_array().unwrap().clone();
            (all.len(), all.last().unwrap().clone())
        };
        assert_eq!(
            last(&[system.clone(), user("a"), user("b")]),
            (2, json!({"role": "user", "content": "a\n\nb\n\nnow"}))
        );
        assert_eq!(
            last(&[user("a"), asked, result]),
            (3, json!({"role": "tool", "tool_call_id": "a", "content": "ok\n\nnow"}))
        );
        assert_eq!(last(&[system]), (2, json!({"role": "user", "content": "now"})));
    }

    #[test]
    fn a_cache_key_is_sent_where_it_is_known_and_an_effort_where_specified() {
        let body = |url: &str, more: Value| {
            let mut model = json!({"api": "OpenAIChat", "name": "m", "baseURL": url});
            model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let model: ModelSpec = serde_json::from_value(model).unwrap();
            let prompt = ModelPrompt {
                images: None,
                messages: &[] as &[Message],
                state: None,
                tools: &[],
                lifetime: None,
                cache_key: Some("uid"),
                answer_schema: None,
            };
            super::request(&model, &prompt)
        };
        for (url, sent) in [
            ("https://api.openai.com/v1", true),
            ("https://API.openai.com:443/v1", true),
            ("https://api.openai.com.evil.example/v1", false),
            ("http://vllm:8000/v1", false),
        ] {
            assert_eq!(body(url, json!({})).get("prompt_cache_key").is_some(), sent, "{url}");
        }
        let off = body(
            "https://api.openai.com/v1",
            json!({"promptCache": "Disabled", "reasoning": {"effort": "High"}}),
        );
        assert_eq!(off.get("prompt_cache_key"), None);
        assert_eq!(off["reasoning_effort"], "high");
    }

    #[test]
    fn an_empty_list_of_tools_is_left_out_because_servers_refuse_it() {
        assert!(request(&model(), &[] as &[Message], &[]).get("tools").is_none());
    }

    #[test]
    fn malformed_arguments_of_the_past_are_sent_as_a_json_object() {
        assert_eq!(sendable("{\"a\": "), r#"{"malformed":"{\"a\": "}"#);
        assert_eq!(sendable("[1]"), r#"{"malformed":"[1]"}"#);
        assert_eq!(sendable(" "), "{}");
        assert_eq!(sendable(r#"{ "a":1}"#), r#"{ "a":1}"#);
    }
}
