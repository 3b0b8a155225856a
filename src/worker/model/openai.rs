//! OpenAI chat completions: the request, and the answer that comes in one piece.

use std::borrow::Borrow;
use std::collections::HashSet;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::MAX_TOOL_CALLS;
use crate::api::agent::Model;
use crate::api::failure::{Failure, FailureKind};
use crate::engine::message::{Answer, Finish, Message, Tool, ToolCall};

/// The body of a request. Output limits are the gateway's to write.
#[must_use]
pub fn request(model: &Model, messages: &[impl Borrow<Message>], tools: &[Tool]) -> Value {
    let mut body = Map::new();
    body.insert("model".into(), model.name.clone().into());
    body.insert(
        "messages".into(),
        messages.iter().map(|shared| message(shared.borrow())).collect(),
    );
    if !tools.is_empty() {
        body.insert("tools".into(), tools.iter().map(tool).collect());
    }
    // Admission lets only decimal numbers through.
    if let Some(temperature) = model.temperature.as_ref().and_then(|text| text.parse::<f64>().ok()) {
        body.insert("temperature".into(), temperature.into());
    }
    body.insert("stream".into(), model.stream.into());
    Value::Object(body)
}

fn message(message: &Message) -> Value {
    match message {
        Message::System { text } => json!({"role": "system", "content": text}),
        Message::User { text } => json!({"role": "user", "content": text}),
        Message::Assistant { text, tool_calls } if tool_calls.is_empty() => {
            json!({"role": "assistant", "content": text.as_deref().unwrap_or_default()})
        }
        Message::Assistant { text, tool_calls } => {
            let calls: Vec<Value> = tool_calls.iter().map(tool_call).collect();
            json!({"role": "assistant", "content": text, "tool_calls": calls})
        }
        Message::Tool { id, text, .. } => json!({"role": "tool", "tool_call_id": id, "content": text}),
    }
}

fn tool_call(call: &ToolCall) -> Value {
    let function = json!({"name": call.name, "arguments": sendable(&call.arguments)});
    json!({"id": call.id, "type": "function", "function": function})
}

/// Servers refuse a whole conversation in which arguments are not a JSON object, so malformed ones are wrapped.
fn sendable(arguments: &str) -> String {
    if serde_json::from_str::<Map<String, Value>>(arguments).is_ok() {
        arguments.to_owned()
    } else if arguments.trim().is_empty() {
        "{}".to_owned()
    } else {
        json!({ "malformed": arguments }).to_string()
    }
}

fn tool(tool: &Tool) -> Value {
    let function = json!({"name": tool.name, "description": tool.description, "parameters": tool.parameters});
    json!({"type": "function", "function": function})
}

/// Reads an answer that came in one piece.
pub fn answer(body: &[u8]) -> Result<Answer, Failure> {
    let completion: Completion =
        serde_json::from_slice(body).map_err(|_| bad("the answer is not a chat completion"))?;
    if completion.error.is_some() {
        return Err(bad("the server sent an error instead of an answer"));
    }
    let choice = completion.choices.unwrap_or_default().into_iter().next();
    let message = choice.as_ref().and_then(|choice| choice.message.as_ref());
    let (Some(choice), Some(message)) = (&choice, message) else {
        return Err(bad("the answer has no choices"));
    };
    let calls = message.tool_calls.iter().flatten().take(MAX_TOOL_CALLS);
    let calls = calls.map(|call| {
        let function = call.function.as_ref();
        ToolCall {
            id: call.id.clone().unwrap_or_default(),
            name: function.and_then(|f| f.name.clone()).unwrap_or_default(),
            arguments: function.map(Function::arguments).unwrap_or_default(),
        }
    });
    let answer = assemble(
        message.content.as_ref().map(content).unwrap_or_default(),
        calls.collect(),
        choice.finish_reason.as_deref(),
        message.refusal.as_ref().is_some_and(|text| !text.is_empty()),
    );
    Ok(Answer {
        tokens: completion.usage.as_ref().and_then(tokens),
        ..answer
    })
}

/// Tokens of a usage report, those read from a cache left out.
pub(super) fn tokens(usage: &Value) -> Option<u64> {
    let count = |name: &str| usage.get(name).and_then(Value::as_u64);
    let cached = usage
        .pointer("/prompt_tokens_details/cached_tokens")
        .and_then(Value::as_u64);
    let input = count("prompt_tokens")?.checked_sub(cached.unwrap_or(0))?;
    input.checked_add(count("completion_tokens")?)
}

/// Puts an answer together, however it came.
pub(super) fn assemble(text: String, calls: Vec<ToolCall>, finish: Option<&str>, refused: bool) -> Answer {
    let finish = match finish {
        _ if refused => Finish::Refused,
        Some("content_filter") => Finish::Refused,
        Some("length") => Finish::Length,
        // Some servers say "stop" although they ask for tools.
        _ if !calls.is_empty() => Finish::ToolCalls,
        _ => Finish::Stop,
    };
    Answer {
        text: Some(text).filter(|text| !text.is_empty()),
        tool_calls: with_unique_ids(calls),
        finish,
        ..Answer::default()
    }
}

/// Ids that are missing or repeated get a name of their own, so that each result finds its call.
fn with_unique_ids(mut calls: Vec<ToolCall>) -> Vec<ToolCall> {
    let given: HashSet<String> = calls.iter().map(|call| call.id.clone()).collect();
    let mut used = HashSet::new();
    let mut fresh = (1_u32..)
        .map(|number| format!("call_{number}"))
        .filter(|id| !given.contains(id));
    for call in &mut calls {
        if call.id.is_empty() || !used.insert(call.id.clone()) {
            call.id = fresh.next().unwrap_or_default();
        }
    }
    calls
}

/// Text of a content field: a string, or a list of parts.
fn content(value: &Value) -> String {
    let part = |part: &Value| part.get("text").and_then(Value::as_str).map(str::to_owned);
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(part).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

pub(super) fn bad(message: &str) -> Failure {
    Failure {
        kind: FailureKind::BadResponse,
        message: format!("{message}: check that model.baseURL is an OpenAI chat-completions server"),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}

#[derive(Deserialize)]
struct Completion {
    choices: Option<Vec<Choice>>,
    usage: Option<Value>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    message: Option<Reply>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Reply {
    content: Option<Value>,
    refusal: Option<String>,
    tool_calls: Option<Vec<WireCall>>,
}

#[derive(Deserialize)]
struct WireCall {
    id: Option<String>,
    function: Option<Function>,
}

#[derive(Deserialize)]
pub(super) struct Function {
    pub(super) name: Option<String>,
    arguments: Option<Value>,
}

impl Function {
    /// The arguments as text; some servers send the object itself.
    pub(super) fn arguments(&self) -> String {
        match &self.arguments {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model() -> Model {
        serde_json::from_value(json!({"api": "OpenAIChat", "name": "m", "temperature": "0.7"})).unwrap()
    }

    fn call(id: &str, arguments: &str) -> ToolCall {
        ToolCall {
            id: id.into(),
            name: "yield".into(),
            arguments: arguments.into(),
        }
    }

    #[test]
    fn the_request_carries_everything_but_an_output_limit() {
        let messages = [
            Message::System { text: "be".into() },
            Message::User { text: "go".into() },
            Message::Assistant {
                text: None,
                tool_calls: vec![call("a", r#"{"sleep":1}"#)],
            },
            Message::Tool {
                id: "a".into(),
                text: "ok".into(),
                reasoning: Some("kept here".into()),
            },
            Message::Assistant {
                text: Some("done".into()),
                tool_calls: vec![],
            },
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

    #[test]
    fn an_answer_with_text_and_tools_is_read_whole() {
        let body = json!({"choices": [
            {"message": {"content": "hi", "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "yield", "arguments": "{}"}}]},
             "finish_reason": "stop"},
            {"message": {"content": "another choice"}}]});
        let read = answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(read.text.as_deref(), Some("hi"));
        assert_eq!(read.tool_calls, vec![call("x", "{}")]);
        assert_eq!(read.finish, Finish::ToolCalls);
    }

    #[test]
    fn missing_fields_parts_and_objects_are_taken_as_they_come() {
        let body = json!({"choices": [{"message": {"content": [{"type": "text", "text": "a"}, {"text": "b"}, 3],
            "tool_calls": [{"function": {"name": "yield", "arguments": {"sleep": 1}}}]}}]});
        let read = answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(read.text.as_deref(), Some("ab"));
        assert_eq!(read.tool_calls, vec![call("call_1", r#"{"sleep":1}"#)]);
    }

    #[test]
    fn each_way_to_finish_is_told_apart() {
        let finish = |reason: Value, refusal: Value| {
            let body = json!({"choices": [{"message": {"content": "x", "refusal": refusal}, "finish_reason": reason}]});
            answer(body.to_string().as_bytes()).unwrap().finish
        };
        assert_eq!(finish(json!("stop"), Value::Null), Finish::Stop);
        assert_eq!(finish(Value::Null, Value::Null), Finish::Stop);
        assert_eq!(finish(json!("length"), Value::Null), Finish::Length);
        assert_eq!(finish(json!("content_filter"), Value::Null), Finish::Refused);
        assert_eq!(finish(json!("stop"), json!("no")), Finish::Refused);
    }

    #[test]
    fn repeated_and_empty_ids_become_unique_without_taking_a_given_one() {
        let ids = with_unique_ids(vec![
            call("call_1", ""),
            call("", ""),
            call("call_1", ""),
            call("z", ""),
        ]);
        let ids: Vec<&str> = ids.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["call_1", "call_2", "call_3", "z"]);
    }

    #[test]
    fn what_is_no_answer_is_a_bad_response() {
        for body in [
            "",
            "<html>",
            "[]",
            "{}",
            r#"{"choices":[]}"#,
            r#"{"choices":[{}]}"#,
            r#"{"error":{"m":"SECRET"}}"#,
        ] {
            let failure = answer(body.as_bytes()).unwrap_err();
            assert_eq!(failure.kind, FailureKind::BadResponse, "{body}");
            assert!(!failure.message.contains("SECRET"));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(body in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = answer(&body);
        }

        #[test]
        fn no_json_of_the_right_shape_makes_it_panic(
            content in ".*", id in proptest::option::of(".*"), reason in ".*", arguments in ".*", calls in 0_usize..300,
        ) {
            let call = json!({"id": id, "function": {"name": null, "arguments": arguments}});
            let body = json!({"choices": [{"message": {"content": content, "tool_calls": vec![call; calls]},
                "finish_reason": reason}]});
            let read = answer(body.to_string().as_bytes()).unwrap();
            let ids: HashSet<_> = read.tool_calls.iter().map(|call| &call.id).collect();
            prop_assert_eq!(ids.len(), calls.min(MAX_TOOL_CALLS));
        }
    }

    #[test]
    fn tokens_are_all_that_were_not_read_from_a_cache_and_unknown_where_the_server_contradicts_itself() {
        let read = |usage: Value| tokens(&usage);
        assert_eq!(read(json!({"prompt_tokens": 10, "completion_tokens": 5})), Some(15));
        let cached =
            json!({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}});
        assert_eq!(read(cached), Some(7));
        let absurd = json!({"prompt_tokens": 1, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}});
        for unknown in [
            absurd,
            json!({}),
            json!(null),
            json!({"prompt_tokens": 3}),
            json!({"prompt_tokens": -1, "completion_tokens": 5}),
        ] {
            assert_eq!(read(unknown), None);
        }
    }
}
