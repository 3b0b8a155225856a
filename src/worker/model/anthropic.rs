//! Anthropic messages: the request, and the answer that comes in one piece.

use std::borrow::Borrow;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::MAX_TOOL_CALLS;
use super::openai::assemble;
use crate::api::agent::Model;
use crate::api::failure::{Failure, FailureKind};
use crate::engine::message::{Answer, Message, Tool, ToolCall};

/// The body of a request. The output limit is the gateway's to change; the format wants one.
#[must_use]
pub fn request(model: &Model, messages: &[impl Borrow<Message>], tools: &[Tool]) -> Value {
    let mut body = Map::new();
    body.insert("model".into(), model.name.clone().into());
    body.insert("max_tokens".into(), model.max_output_tokens.into());
    // Everything up to the last message is to be read from the server's cache next time.
    body.insert("cache_control".into(), json!({"type": "ephemeral"}));
    // Admission lets only decimal numbers through.
    if let Some(temperature) = model.temperature.as_ref().and_then(|text| text.parse::<f64>().ok()) {
        body.insert("temperature".into(), temperature.into());
    }
    body.insert("stream".into(), model.stream.into());
    if !tools.is_empty() {
        body.insert("tools".into(), tools.iter().map(tool).collect());
    }
    let system: Vec<&str> = messages
        .iter()
        .filter_map(|message| match message.borrow() {
            Message::System { text } if !text.trim().is_empty() => Some(text.as_str()),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } | Message::Tool { .. } => None,
        })
        .collect();
    if !system.is_empty() {
        body.insert("system".into(), system.join("\n\n").into());
    }
    body.insert("messages".into(), conversation(messages));
    Value::Object(body)
}

/// Lets the server's cache end before the last block, which the next request does not have. The mark is no content: it
/// changes nothing of what is cached.
pub fn cache_before_last(body: &mut Value) {
    let Some(body) = body.as_object_mut() else {
        return;
    };
    // The other fields keep their places: the conversation stays the last of them.
    let mark = body.shift_remove("cache_control");
    let blocks = body
        .get_mut("messages")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
        .filter_map(|message| message.get_mut("content")?.as_array_mut())
        .flatten();
    let mut blocks: Vec<&mut Value> = blocks.collect();
    blocks.pop();
    if let (Some(block), Some(mark)) = (blocks.pop().and_then(Value::as_object_mut), mark) {
        block.insert("cache_control".into(), mark);
    }
}

fn tool(tool: &Tool) -> Value {
    json!({"name": tool.name, "description": tool.description, "input_schema": tool.parameters})
}

/// The messages with roles that alternate: results of tools are the user's, and what follows of the same role joins.
fn conversation(messages: &[impl Borrow<Message>]) -> Value {
    let mut all: Vec<(&str, Vec<Value>)> = Vec::new();
    for message in messages {
        let (role, mut blocks) = match message.borrow() {
            Message::System { .. } => continue,
            Message::User { text } => ("user", text_block(text).into_iter().collect()),
            Message::Tool { id, text, .. } => ("user", vec![tool_result(id, text)]),
            Message::Assistant { text, tool_calls } => {
                let text = text.as_deref().and_then(text_block);
                (
                    "assistant",
                    text.into_iter()
                        .chain(tool_calls.iter().map(tool_use))
                        .collect::<Vec<_>>(),
                )
            }
        };
        match all.last_mut() {
            Some((last, joined)) if *last == role => joined.append(&mut blocks),
            // A message without content is refused.
            _ if blocks.is_empty() => {}
            _ => all.push((role, blocks)),
        }
    }
    all.into_iter()
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect()
}

/// Blank text is refused.
fn text_block(text: &str) -> Option<Value> {
    (!text.trim().is_empty()).then(|| json!({"type": "text", "text": text}))
}

fn tool_use(call: &ToolCall) -> Value {
    json!({"type": "tool_use", "id": known_id(&call.id), "name": call.name, "input": input(&call.arguments)})
}

fn tool_result(id: &str, text: &str) -> Value {
    json!({"type": "tool_result", "tool_use_id": known_id(id), "content": text})
}

/// Ids are letters, digits, `_` and `-` here; what another format gave may have more.
fn known_id(id: &str) -> String {
    let known = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    id.chars()
        .map(|letter| if known(letter) { letter } else { '_' })
        .collect()
}

/// Arguments must be an object; malformed ones are wrapped.
fn input(arguments: &str) -> Value {
    match serde_json::from_str::<Map<String, Value>>(arguments) {
        Ok(object) => Value::Object(object),
        Err(_) if arguments.trim().is_empty() => json!({}),
        Err(_) => json!({"malformed": arguments}),
    }
}

/// Reads an answer that came in one piece.
pub fn answer(body: &[u8]) -> Result<Answer, Failure> {
    let message: Reply = serde_json::from_slice(body).map_err(|_| bad("the answer is no message"))?;
    if message.error.is_some() {
        return Err(bad("the server sent an error instead of an answer"));
    }
    let Some(blocks) = message.content else {
        return Err(bad("the answer has no content"));
    };
    let mut text = String::new();
    let mut calls = Vec::new();
    for block in blocks {
        match block.kind.as_deref() {
            Some("text") => text.push_str(block.text.as_deref().unwrap_or_default()),
            Some("tool_use") if calls.len() < MAX_TOOL_CALLS => calls.push(ToolCall {
                id: block.id.unwrap_or_default(),
                name: block.name.unwrap_or_default(),
                arguments: block.input.map(|input| input.to_string()).unwrap_or_default(),
            }),
            // Reasoning, and blocks of a later version.
            _ => {}
        }
    }
    Ok(Answer {
        tokens: message.usage.as_ref().and_then(tokens),
        ..ended(text, calls, message.stop_reason.as_deref())
    })
}

/// Tokens of a usage report; input excludes what was read from or written to a cache.
pub(super) fn tokens(usage: &Value) -> Option<u64> {
    let count = |name: &str| usage.get(name).and_then(Value::as_u64);
    let written = count("cache_creation_input_tokens").unwrap_or(0);
    let input = count("input_tokens")?.checked_add(written)?;
    input.checked_add(count("output_tokens")?)
}

/// Puts an answer together, however it came.
pub(super) fn ended(text: String, calls: Vec<ToolCall>, reason: Option<&str>) -> Answer {
    let finish = match reason {
        Some("max_tokens" | "model_context_window_exceeded") => Some("length"),
        other => other,
    };
    assemble(text, calls, finish, reason == Some("refusal"))
}

pub(super) fn bad(message: &str) -> Failure {
    Failure {
        kind: FailureKind::BadResponse,
        message: format!("{message}: check that model.baseURL is an Anthropic messages server"),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}

#[derive(Deserialize)]
struct Reply {
    content: Option<Vec<Block>>,
    stop_reason: Option<String>,
    usage: Option<Value>,
    error: Option<Value>,
}

/// A block of content, or its beginning in a stream.
#[derive(Deserialize)]
pub(super) struct Block {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) text: Option<String>,
    pub(super) id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) input: Option<Value>,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::engine::message::Finish;

    fn model() -> Model {
        let model = json!({"api": "AnthropicMessages", "name": "m", "temperature": "0.7", "maxOutputTokens": 9});
        serde_json::from_value(model).unwrap()
    }

    fn call(id: &str, arguments: &str) -> ToolCall {
        ToolCall {
            id: id.into(),
            name: "yield".into(),
            arguments: arguments.into(),
        }
    }

    #[test]
    fn roles_alternate_and_results_are_the_users() {
        let messages = [
            Message::System { text: "be".into() },
            Message::User { text: "go".into() },
            Message::Assistant {
                text: Some("I look.".into()),
                tool_calls: vec![call("a.1", r#"{"sleep":1}"#), call("b", "{\"a\": "), call("c", " ")],
            },
            Message::Tool {
                id: "a.1".into(),
                text: "ok".into(),
                reasoning: Some("kept here".into()),
            },
            Message::Tool {
                id: "b".into(),
                text: String::new(),
                reasoning: None,
            },
            Message::User { text: "next".into() },
            Message::Assistant {
                text: Some(" ".into()),
                tool_calls: vec![],
            },
            Message::User { text: "more".into() },
        ];
        let tools = [Tool {
            name: "yield".into(),
            description: "d".into(),
            parameters: json!({"type": "object"}),
        }];
        assert_eq!(
            request(&model(), &messages, &tools),
            json!({
                "model": "m",
                "max_tokens": 9,
                "cache_control": {"type": "ephemeral"},
                "temperature": 0.7,
                "stream": true,
                "tools": [{"name": "yield", "description": "d", "input_schema": {"type": "object"}}],
                "system": "be",
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "go"}]},
                    {"role": "assistant", "content": [
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "a_1", "name": "yield", "input": {"sleep": 1}},
                        {"type": "tool_use", "id": "b", "name": "yield", "input": {"malformed": "{\"a\": "}},
                        {"type": "tool_use", "id": "c", "name": "yield", "input": {}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "a_1", "content": "ok"},
                        {"type": "tool_result", "tool_use_id": "b", "content": ""},
                        {"type": "text", "text": "next"},
                        {"type": "text", "text": "more"}]},
                ],
            })
        );
    }

    #[test]
    fn what_is_empty_is_left_out_because_servers_refuse_it() {
        let body = request(&model(), &[Message::System { text: " ".into() }], &[]);
        assert_eq!((body.get("system"), body.get("tools")), (None, None));
        assert_eq!(body["messages"], json!([]));
    }

    #[test]
    fn an_answer_with_text_reasoning_and_tools_is_read_whole() {
        let body = json!({"type": "message", "role": "assistant", "stop_reason": "tool_use", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "hi "},
            {"type": "tool_use", "id": "x", "name": "yield", "input": {"sleep": 1}}, {"type": "text", "text": "you"},
            {"type": "of_a_later_version"}]});
        let read = answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(read.text.as_deref(), Some("hi you"));
        assert_eq!(read.tool_calls, vec![call("x", r#"{"sleep":1}"#)]);
        assert_eq!(read.finish, Finish::ToolCalls);
    }

    #[test]
    fn each_way_to_finish_is_told_apart() {
        let finish = |reason: Value| {
            let body = json!({"content": [{"type": "text", "text": "x"}], "stop_reason": reason});
            answer(body.to_string().as_bytes()).unwrap().finish
        };
        for (reason, expected) in [
            (json!("end_turn"), Finish::Stop),
            (json!("stop_sequence"), Finish::Stop),
            (Value::Null, Finish::Stop),
            (json!("max_tokens"), Finish::Length),
            (json!("model_context_window_exceeded"), Finish::Length),
            (json!("refusal"), Finish::Refused),
        ] {
            assert_eq!(finish(reason.clone()), expected, "{reason}");
        }
    }

    #[test]
    fn what_is_no_answer_is_a_bad_response() {
        for body in [
            "",
            "<html>",
            "[]",
            "{}",
            r#"{"content":"SECRET"}"#,
            r#"{"type":"error","error":{"m":"SECRET"}}"#,
        ] {
            let failure = answer(body.as_bytes()).unwrap_err();
            assert_eq!(failure.kind, FailureKind::BadResponse, "{body}");
            assert!(!failure.message.contains("SECRET") && failure.message.contains("Anthropic"));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(body in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = answer(&body);
        }

        #[test]
        fn no_json_of_the_right_shape_makes_it_panic(id in proptest::option::of(".*"), calls in 0_usize..300) {
            let block = json!({"type": "tool_use", "id": id, "name": null, "input": 3});
            let read = answer(json!({"content": vec![block; calls]}).to_string().as_bytes()).unwrap();
            let ids: HashSet<_> = read.tool_calls.iter().map(|call| &call.id).collect();
            prop_assert_eq!(ids.len(), calls.min(MAX_TOOL_CALLS));
        }
    }

    #[test]
    fn tokens_are_all_that_were_not_read_from_a_cache() {
        let usage = json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 500});
        assert_eq!(tokens(&usage), Some(27));
        assert_eq!(
            tokens(&json!({"input_tokens": 3, "output_tokens": 4, "cache_creation_input_tokens": null})),
            Some(7)
        );
        assert_eq!(tokens(&json!({"input_tokens": 3})), None);
    }
}
