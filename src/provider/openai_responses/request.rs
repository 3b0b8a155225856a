//! Requests of OpenAI Responses.

use std::borrow::Borrow;

use serde_json::{Map, Value, json};

use crate::images::EncodedImage;
use crate::openai_chat::request::{effort_name, is_keyed, sendable};
use crate::prompt::{ModelPrompt, images_text, own, temperature};
use crate::tool_call_ids::ToolCallIds;
use agentloop_api::agent::ModelSpec;
use agentloop_engine::answer_schema::AnswerSchema;
use agentloop_engine::message::{Message, MessagePart, ReasoningContent, ToolCall, ToolDefinition};

/// Builds the body of a request. The gateway adds the output limit.
#[must_use]
pub fn request<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Value {
    let mut body = Map::new();
    body.insert("model".into(), model.name.clone().into());
    if let Some(key) = prompt.cache_key.filter(|_| is_keyed(model)) {
        body.insert("prompt_cache_key".into(), key.into());
    }
    let system: Vec<&str> = prompt
        .messages
        .iter()
        .filter_map(|message| match message.borrow() {
            Message::System { text } => Some(text.as_str()),
            Message::User { .. } | Message::Assistant { .. } | Message::Tool { .. } => None,
        })
        .collect();
    if !system.is_empty() {
        body.insert("instructions".into(), system.join("\n\n").into());
    }
    if !prompt.tools.is_empty() {
        body.insert("tools".into(), prompt.tools.iter().map(tool).collect());
    }
    if let Some(AnswerSchema {
        name, schema, is_exact, ..
    }) = prompt.answer_schema
    {
        let format = json!({"type": "json_schema", "name": name, "schema": schema, "strict": is_exact});
        body.insert("text".into(), json!({ "format": format }));
    }
    body.insert("input".into(), conversation(model, prompt).into());
    if let Some(effort) = model.reasoning.as_ref().and_then(|reasoning| reasoning.effort) {
        body.insert("reasoning".into(), json!({"effort": effort_name(effort)}));
        // Only with reasoning: OpenAI refuses it for models that cannot reason.
        body.insert("include".into(), json!(["reasoning.encrypted_content"]));
    }
    if let Some(temperature) = temperature(model) {
        body.insert("temperature".into(), temperature.into());
    }
    body.insert("store".into(), false.into());
    body.insert("stream".into(), model.stream.into());
    Value::Object(body)
}

/// Builds the items. As in chat completions, which the same servers translate them to, consecutive texts of the runtime
/// are joined, and the hot state is appended to the last item.
fn conversation<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    let mut ids = ToolCallIds::default();
    let mut images = Vec::new();
    for message in prompt.messages {
        let message = message.borrow();
        if !matches!(message, Message::Tool { .. }) {
            items.extend(image_message(&mut images));
        }
        match message {
            Message::System { .. } => {}
            Message::User { text } => match items.last_mut().and_then(user_text) {
                Some(last) => append(last, text),
                None => items.push(user(text)),
            },
            Message::Tool {
                id, text, artifacts, ..
            } => {
                items.push(output(&ids.result(id), text));
                images.extend(prompt.shown(artifacts));
            }
            Message::Assistant {
                text,
                tool_calls,
                reasoning,
            } => {
                ids.answer();
                let calls = tool_calls
                    .iter()
                    .map(|call| function_call(&ids.call(&call.id), call))
                    .collect();
                let text = text.as_deref().unwrap_or_default();
                items.extend(answer_items(text, calls, own(model, reasoning.as_ref())));
            }
        }
    }
    items.extend(image_message(&mut images));
    if let Some(state) = prompt.state {
        match items.last_mut().and_then(last_text) {
            Some(last) => append(last, state),
            None => items.push(user(state)),
        }
    }
    items
}

/// Rebuilds the items of an answer in their original order: a server refuses reasoning that is not followed by what it
/// led to.
fn answer_items(text: &str, calls: Vec<Value>, reasoning: Option<&ReasoningContent>) -> Vec<Value> {
    let mut items = Vec::new();
    let (mut text, mut calls) = (text, calls.into_iter());
    for part in reasoning.map(|reasoning| &reasoning.parts).into_iter().flatten() {
        match part {
            MessagePart::Opaque(item) => items.push(item.clone()),
            MessagePart::Text(bytes) => {
                let (piece, rest) = text.split_at_checked(*bytes).unwrap_or((text, ""));
                items.extend(assistant(piece));
                text = rest;
            }
            MessagePart::Call => items.extend(calls.next()),
        }
    }
    items.extend(assistant(text));
    items.extend(calls);
    items
}

/// Builds a message of the model, unless its text is blank. The text is a string, not an `output_text` part: servers
/// accept such a part only with the id and the status of the original message, which are not kept.
fn assistant(text: &str) -> Option<Value> {
    let message = || json!({"type": "message", "role": "assistant", "content": text});
    (!text.trim().is_empty()).then(message)
}

fn user(text: &str) -> Value {
    json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
}

fn output(id: &str, text: &str) -> Value {
    json!({"type": "function_call_output", "call_id": id, "output": text})
}

fn function_call(id: &str, call: &ToolCall) -> Value {
    json!({"type": "function_call", "call_id": id, "name": call.name, "arguments": sendable(&call.arguments)})
}

fn tool(tool: &ToolDefinition) -> Value {
    json!({
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        // The server's default is true, which accepts only schemas in which each property is required.
        "strict": false,
    })
}

/// The text of a message of the user.
fn user_text(item: &mut Value) -> Option<&mut Value> {
    if item["role"] != "user" {
        return None;
    }
    let parts = item["content"].as_array_mut()?;
    // After images, text is a part of its own.
    if parts.last().is_some_and(|last| last["type"] != "input_text") {
        parts.push(json!({"type": "input_text", "text": ""}));
    }
    parts.last_mut().map(|last| &mut last["text"])
}

/// The message with these images, which are taken, as in chat completions: many servers take no images in results.
fn image_message(images: &mut Vec<(&str, &EncodedImage)>) -> Option<Value> {
    if images.is_empty() {
        return None;
    }
    let names: Vec<&str> = images.iter().map(|(name, _)| *name).collect();
    let mut parts = vec![json!({"type": "input_text", "text": images_text(&names)})];
    parts.extend(
        images
            .drain(..)
            .map(|(_, image)| json!({"type": "input_image", "image_url": image.data_url(), "detail": "high"})),
    );
    Some(json!({"type": "message", "role": "user", "content": parts}))
}

/// The text of a message of the user or of a result.
fn last_text(item: &mut Value) -> Option<&mut Value> {
    if item["type"] == "function_call_output" {
        return Some(&mut item["output"]);
    }
    user_text(item)
}

fn append(text: &mut Value, more: &str) {
    let before = text.as_str().unwrap_or_default();
    let between = if before.is_empty() { "" } else { "\n\n" };
    *text = format!("{before}{between}{more}").into();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai_responses::response::answer;
    use crate::samples::call;
    use agentloop_api::agent::ModelApi;

    fn model(more: &Value) -> ModelSpec {
        let mut model = json!({"api": "OpenAIResponses", "name": "m", "baseURL": "http://vllm:8000/v1"});
        model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(model).unwrap()
    }

    fn request(messages: &[Message], tools: &[ToolDefinition]) -> Value {
        super::request(&model(&json!({})), &ModelPrompt::of(messages, tools))
    }

    fn result(id: &str, text: &str) -> Message {
        Message::Tool {
            id: id.into(),
            text: text.into(),
            failed: false,
            reasoning: Some("kept here".into()),
            artifacts: agentloop_engine::tool::ResultArtifacts::default(),
        }
    }

    fn user(text: &str) -> Message {
        Message::User { text: text.into() }
    }

    #[test]
    fn the_request_contains_everything_but_an_output_limit_and_disables_storage() {
        let messages = [
            Message::System { text: "be".into() },
            user("go"),
            user("on"),
            Message::Assistant {
                reasoning: None,
                text: Some("I look.".into()),
                tool_calls: vec![call("a.1", r#"{"sleep":1}"#), call("b", "{\"a\": "), call("c", " ")],
            },
            result("a.1", "ok"),
            result("b", ""),
            result("c", "ok"),
            Message::Assistant {
                reasoning: None,
                text: Some(" ".into()),
                tool_calls: vec![],
            },
            user("more"),
        ];
        let tools = [ToolDefinition {
            name: "yield".into(),
            description: "d".into(),
            parameters: json!({"type": "object"}),
        }];
        let call = |id: &str, arguments: &str| json!({"type": "function_call", "call_id": id, "name": "yield", "arguments": arguments});
        let output = |id: &str, text: &str| json!({"type": "function_call_output", "call_id": id, "output": text});
        assert_eq!(
            request(&messages, &tools),
            json!({
                "model": "m",
                "instructions": "be",
                "tools": [{"type": "function", "name": "yield", "description": "d", "parameters": {"type": "object"}, "strict": false}],
                "input": [
                    super::user("go\n\non"),
                    {"type": "message", "role": "assistant", "content": "I look."},
                    call("a_1", r#"{"sleep":1}"#),
                    call("b", r#"{"malformed":"{\"a\": "}"#),
                    call("c", "{}"),
                    output("a_1", "ok"),
                    output("b", ""),
                    output("c", "ok"),
                    super::user("more"),
                ],
                "store": false,
                "stream": true,
            })
        );
    }

    /// A conversation with the answer of a model that reasoned.
    fn thought(wrote: &str) -> Vec<Message> {
        let body = json!({"status": "completed", "output": [
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "of_a_server": 1},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hé"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "look", "arguments": "{}", "status": "completed"},
            {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "look", "arguments": "{}"}]});
        let answer = answer(body.to_string().as_bytes()).unwrap();
        let answer = answer.written_by(ModelApi::OpenAIResponses, wrote);
        vec![
            user("go"),
            Message::Assistant {
                text: answer.text,
                tool_calls: answer.tool_calls,
                reasoning: answer.reasoning,
            },
            result("a", "ok"),
            result("b", "ok"),
        ]
    }

    #[test]
    fn reasoning_is_returned_verbatim_in_its_place_only_to_the_model_that_wrote_it() {
        let items = request(&thought("m"), &[])["input"].clone();
        assert_eq!(
            items[1],
            json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "of_a_server": 1})
        );
        let second = json!({"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]});
        assert_eq!(items[4], second);
        let kinds = |items: &Value| -> Vec<String> {
            let items = items.as_array().unwrap().iter();
            items.map(|item| item["type"].as_str().unwrap().to_owned()).collect()
        };
        let output = "function_call_output";
        let all = [
            "message",
            "reasoning",
            "message",
            "function_call",
            "reasoning",
            "function_call",
            output,
            output,
        ];
        assert_eq!(kinds(&items), all);
        let other = request(&thought("other"), &[])["input"].clone();
        assert_eq!(
            kinds(&other),
            ["message", "message", "function_call", "function_call", output, output]
        );
    }

    #[test]
    fn the_state_joins_the_last_item_that_is_not_the_models() {
        let last = |messages: &[Message]| {
            let prompt = ModelPrompt {
                state: Some("now"),
                ..ModelPrompt::of(messages, &[])
            };
            let items = super::request(&model(&json!({})), &prompt)["input"].clone();
            let items = items.as_array().unwrap().clone();
            (items.len(), items.last().unwrap().clone())
        };
        let item = |text: &str| super::user(text);
        assert_eq!(last(&[user("a"), user("b")]), (1, item("a\n\nb\n\nnow")));
        assert_eq!(last(&[]), (1, item("now")));
        let thought = thought("m");
        assert_eq!(last(&thought), (8, super::output("b", "ok\n\nnow")));
        let answered = Message::Assistant {
            text: Some("done".into()),
            tool_calls: vec![],
            reasoning: None,
        };
        assert_eq!(last(&[user("a"), answered]), (3, item("now")));
    }

    #[test]
    fn reasoning_is_requested_where_specified_and_the_cache_has_a_key_where_it_is_known() {
        let body = |more: Value| {
            let prompt = ModelPrompt {
                cache_key: Some("uid"),
                ..ModelPrompt::of(&[] as &[Message], &[])
            };
            super::request(&model(&more), &prompt)
        };
        let plain = body(json!({"temperature": "0.7"}));
        assert_eq!(
            [
                plain.get("include"),
                plain.get("reasoning"),
                plain.get("prompt_cache_key")
            ],
            [None; 3]
        );
        assert_eq!(plain["temperature"], 0.7);
        let thinks = body(json!({"reasoning": {"effort": "Minimal"}, "baseURL": "https://api.openai.com/v1"}));
        assert_eq!(thinks["reasoning"], json!({"effort": "minimal"}));
        assert_eq!(thinks["include"], json!(["reasoning.encrypted_content"]));
        assert_eq!(thinks["prompt_cache_key"], "uid");
    }
}
