//! OpenAI chat completions: the request, and the answer that comes in one piece.

use std::borrow::Borrow;
use std::collections::HashSet;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::tool_call_ids::ToolCallIds;
use super::{MAX_TOOL_CALLS, ModelPrompt, own, seal_reasoning};
use crate::api::agent::{ModelApi, ModelSpec, PromptCache, ReasoningEffort};
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::message::{
    FinishReason, Message, MessagePart, ModelAnswer, ReasoningContent, ToolCall, ToolDefinition,
};

/// Fields of an answer that hold reasoning, by the names of different servers.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "reasoning_details"];
/// Field of a tool call that holds a signature of reasoning, at Google.
pub(super) const EXTRA: &str = "extra_content";
/// The only host that is sure to know `prompt_cache_key`: others refuse fields that they do not know.
const KEYED: &str = "api.openai.com";

/// The body of a request. Output limits are the gateway's to write.
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
    if let Some(effort) = model.reasoning.as_ref().and_then(|reasoning| reasoning.effort) {
        let effort = match effort {
            ReasoningEffort::Minimal => "minimal",
            ReasoningEffort::Low => "low",
            ReasoningEffort::Medium => "medium",
            ReasoningEffort::High => "high",
        };
        body.insert("reasoning_effort".into(), effort.into());
    }
    // Admission lets only decimal numbers through.
    if let Some(temperature) = model.temperature.as_ref().and_then(|text| text.parse::<f64>().ok()) {
        body.insert("temperature".into(), temperature.into());
    }
    body.insert("stream".into(), model.stream.into());
    Value::Object(body)
}

fn is_keyed(model: &ModelSpec) -> bool {
    let address = model.base_url.as_deref().and_then(|url| url.split_once("://"));
    let host = address.and_then(|(_, rest)| rest.split(['/', ':']).next());
    model.prompt_cache != PromptCache::Disabled && host.is_some_and(|host| host.eq_ignore_ascii_case(KEYED))
}

/// The messages. Templates of some models want user and assistant in turn, and no user after the result of a tool: what
/// the runtime says twice in a row is one message, and the state joins the end of the last one.
fn conversation<M: Borrow<Message>>(model: &ModelSpec, prompt: &ModelPrompt<'_, M>) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::new();
    let mut ids = ToolCallIds::default();
    for message in prompt.messages {
        match message.borrow() {
            Message::System { text } => all.push(json!({"role": "system", "content": text})),
            Message::User { text } => join(&mut all, &["user"], text),
            Message::Tool { id, text, .. } => {
                all.push(json!({"role": "tool", "tool_call_id": ids.result(id), "content": text}));
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
    if let Some(state) = prompt.state {
        join(&mut all, &["user", "tool"], state);
    }
    all
}

/// Text of the user: at the end of the last message where that has one of these roles.
fn join(all: &mut Vec<Value>, roles: &[&str], text: &str) {
    let last = all
        .last_mut()
        .filter(|last| last["role"].as_str().is_some_and(|role| roles.contains(&role)));
    match last {
        Some(last) => {
            let before = last["content"].as_str().unwrap_or_default();
            last["content"] = format!("{before}\n\n{text}").into();
        }
        None => all.push(json!({"role": "user", "content": text})),
    }
}

fn tool_call(id: &str, call: &ToolCall, extra: Option<&Value>) -> Value {
    let function = json!({"name": call.name, "arguments": sendable(&call.arguments)});
    let mut wire = json!({"id": id, "type": "function", "function": function});
    if let Some(extra) = extra.filter(|extra| !extra.is_null()) {
        wire[EXTRA] = extra.clone();
    }
    wire
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

fn tool(tool: &ToolDefinition) -> Value {
    let function = json!({"name": tool.name, "description": tool.description, "parameters": tool.parameters});
    json!({"type": "function", "function": function})
}

/// Reads an answer that came in one piece.
pub fn answer(body: &[u8]) -> Result<ModelAnswer, CallFailure> {
    let completion: ChatCompletion =
        serde_json::from_slice(body).map_err(|_| bad_response("the answer is not a chat completion"))?;
    if completion.error.is_some() {
        return Err(bad_response("the server sent an error instead of an answer"));
    }
    let choice = completion.choices.unwrap_or_default().into_iter().next();
    let message = choice.as_ref().and_then(|choice| choice.message.as_ref());
    let (Some(choice), Some(message)) = (&choice, message) else {
        return Err(bad_response("the answer has no choices"));
    };
    let wanted = || message.tool_calls.iter().flatten().take(MAX_TOOL_CALLS);
    let calls = wanted().map(|call| {
        let function = call.function.as_ref();
        ToolCall {
            id: call.id.clone().unwrap_or_default(),
            name: function.and_then(|f| f.name.clone()).unwrap_or_default(),
            arguments: function.map(FunctionCall::arguments).unwrap_or_default(),
        }
    });
    let answer = assemble(
        message.content.as_ref().map(content).unwrap_or_default(),
        calls.collect(),
        choice.finish_reason.as_deref(),
        message.refusal.as_ref().is_some_and(|text| !text.is_empty()),
    );
    let extras = wanted().map(|call| call.extra_content.clone().unwrap_or_default());
    let fields = message
        .rest
        .iter()
        .filter(|(name, _)| REASONING.contains(&name.as_str()));
    let fields = fields.map(|(name, value)| (name.clone(), value.clone())).collect();
    Ok(ModelAnswer {
        tokens: completion.usage.as_ref().and_then(tokens),
        input_tokens: completion.usage.as_ref().and_then(input_tokens),
        reasoning: reasoning(fields, extras.collect()),
        ..answer
    })
}

/// The reasoning of an answer with these fields and with these extras of its tool calls. A field that is there and empty
/// is sent back as well: servers that think want it in each answer with tool calls.
pub(super) fn reasoning(fields: Map<String, Value>, extras: Vec<Value>) -> Option<ReasoningContent> {
    let fields: Map<String, Value> = fields.into_iter().filter(|(_, value)| !value.is_null()).collect();
    let parts = if fields.is_empty() {
        Vec::new()
    } else {
        vec![MessagePart::Opaque(fields.into())]
    };
    let calls_tools = !extras.is_empty();
    seal_reasoning(ModelApi::OpenAIChat, parts, extras, calls_tools)
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

/// All input tokens of a usage report, read from a cache or not. Zero is no word of a prompt's size.
pub(super) fn input_tokens(usage: &Value) -> Option<u64> {
    usage.get("prompt_tokens")?.as_u64().filter(|tokens| *tokens > 0)
}

/// Puts an answer together, however it came.
pub(super) fn assemble(text: String, calls: Vec<ToolCall>, finish: Option<&str>, refused: bool) -> ModelAnswer {
    let finish = match finish {
        _ if refused => FinishReason::Refused,
        Some("content_filter") => FinishReason::Refused,
        Some("length") => FinishReason::Length,
        // Some servers say "stop" although they ask for tools.
        _ if !calls.is_empty() => FinishReason::ToolCalls,
        _ => FinishReason::Stop,
    };
    ModelAnswer {
        text: Some(text).filter(|text| !text.is_empty()),
        tool_calls: with_unique_ids(calls),
        finish,
        ..ModelAnswer::default()
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

pub(super) fn bad_response(message: &str) -> CallFailure {
    CallFailure {
        kind: FailureKind::BadResponse,
        message: format!("{message}: check that model.baseURL is an OpenAI chat-completions server"),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}

#[derive(Deserialize)]
struct ChatCompletion {
    choices: Option<Vec<CompletionChoice>>,
    usage: Option<Value>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct CompletionChoice {
    message: Option<CompletionMessage>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct CompletionMessage {
    content: Option<Value>,
    refusal: Option<String>,
    tool_calls: Option<Vec<WireCall>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
struct WireCall {
    id: Option<String>,
    extra_content: Option<Value>,
    function: Option<FunctionCall>,
}

#[derive(Deserialize)]
pub(super) struct FunctionCall {
    pub(super) name: Option<String>,
    arguments: Option<Value>,
}

impl FunctionCall {
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

    fn request(model: &ModelSpec, messages: &[Message], tools: &[ToolDefinition]) -> Value {
        super::request(model, &ModelPrompt::of(messages, tools))
    }

    fn model() -> ModelSpec {
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
                reasoning: None,
                text: None,
                tool_calls: vec![call("a", r#"{"sleep":1}"#)],
            },
            Message::Tool {
                id: "a".into(),
                text: "ok".into(),
                failed: false,
                reasoning: Some("kept here".into()),
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

    /// What the server says with two calls, whole.
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
    fn reasoning_and_signatures_go_back_verbatim_to_the_model_that_wrote_them_and_to_no_other() {
        let signed = json!({"google": {"thought_signature": "c2ln"}});
        for (fields, extra) in [
            (json!({"reasoning_content": "hm"}), Value::Null),
            // Wanted back by servers that think, also when there was nothing to think about.
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
    fn reasoning_of_an_answer_without_calls_is_dropped() {
        let body = json!({"choices": [{"message": {"content": "hi", "reasoning_content": "hm"}}]});
        assert_eq!(answer(body.to_string().as_bytes()).unwrap().reasoning, None);
    }

    #[test]
    fn what_the_user_says_twice_is_one_message_and_the_state_joins_the_last_one() {
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
        };
        let last = |messages: &[Message]| {
            let prompt = ModelPrompt {
                messages,
                state: Some("now"),
                tools: &[],
                lifetime: None,
                cache_key: None,
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
    fn a_key_of_the_cache_goes_where_it_is_known_and_an_effort_where_the_spec_has_one() {
        let body = |url: &str, more: Value| {
            let mut model = json!({"api": "OpenAIChat", "name": "m", "baseURL": url});
            model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let model: ModelSpec = serde_json::from_value(model).unwrap();
            let prompt = ModelPrompt {
                messages: &[] as &[Message],
                state: None,
                tools: &[],
                lifetime: None,
                cache_key: Some("uid"),
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
        assert_eq!(read.finish, FinishReason::ToolCalls);
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
        assert_eq!(finish(json!("stop"), Value::Null), FinishReason::Stop);
        assert_eq!(finish(Value::Null, Value::Null), FinishReason::Stop);
        assert_eq!(finish(json!("length"), Value::Null), FinishReason::Length);
        assert_eq!(finish(json!("content_filter"), Value::Null), FinishReason::Refused);
        assert_eq!(finish(json!("stop"), json!("no")), FinishReason::Refused);
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
    fn input_tokens_are_all_of_the_prompt() {
        let usage =
            json!({"prompt_tokens": 500, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 480}});
        assert_eq!(input_tokens(&usage), Some(500));
        assert_eq!(input_tokens(&json!({"prompt_tokens": 0})), None);
        assert_eq!(input_tokens(&json!({"completion_tokens": 4})), None);
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
