//! Whole answers of OpenAI chat completions, and what they share with streamed ones.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::usage::{input_tokens, output_tokens, tokens};
use super::{ENDPOINT, REASONING};
use crate::answer::{MAX_TOOL_CALLS, assemble, seal_reasoning};
use agentloop_api::agent::ModelApi;
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::{MessagePart, ModelAnswer, ReasoningContent, ToolCall};

/// Parses a non-streamed answer.
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
        output_tokens: completion.usage.as_ref().and_then(output_tokens),
        reasoning: reasoning(fields, extras.collect()),
        ..answer
    })
}

/// Builds the reasoning from these fields of an answer and the extras of its [`ToolCall`]s. Empty fields are also sent
/// back: servers with reasoning require the field in each answer with tool calls.
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

/// Returns the text of a content field: a string, or a list of parts.
fn content(value: &Value) -> String {
    let part = |part: &Value| part.get("text").and_then(Value::as_str).map(str::to_owned);
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(part).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

pub(super) fn bad_response(message: &str) -> CallFailure {
    ENDPOINT.bad_response(message)
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
    /// Returns the arguments as text; some servers send the object itself.
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
    use std::collections::HashSet;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::samples::call;
    use agentloop_api::failure::FailureKind;
    use agentloop_engine::message::FinishReason;

    #[test]
    fn reasoning_of_an_answer_without_calls_is_dropped() {
        let body = json!({"choices": [{"message": {"content": "hi", "reasoning_content": "hm"}}]});
        assert_eq!(answer(body.to_string().as_bytes()).unwrap().reasoning, None);
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
    fn missing_fields_parts_and_objects_are_accepted_as_they_are() {
        let body = json!({"choices": [{"message": {"content": [{"type": "text", "text": "a"}, {"text": "b"}, 3],
            "tool_calls": [{"function": {"name": "yield", "arguments": {"sleep": 1}}}]}}]});
        let read = answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(read.text.as_deref(), Some("ab"));
        assert_eq!(read.tool_calls, vec![call("call_1", r#"{"sleep":1}"#)]);
    }

    #[test]
    fn each_finish_reason_is_distinguished() {
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
    fn a_malformed_answer_is_a_bad_response() {
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
}
