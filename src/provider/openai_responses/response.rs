//! Whole answers of OpenAI Responses, and what they share with streamed ones.

use serde::Deserialize;
use serde_json::Value;

use super::ENDPOINT;
use super::usage::{input_tokens, output_tokens, tokens};
use crate::answer::{MAX_TOOL_CALLS, assemble, seal_reasoning};
use agentloop_api::agent::ModelApi;
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::{MessagePart, ModelAnswer, ToolCall};

/// Parses a non-streamed answer.
pub fn answer(body: &[u8]) -> Result<ModelAnswer, CallFailure> {
    let body: ResponseBody = serde_json::from_slice(body).map_err(|_| bad_response("the answer is not a response"))?;
    if body.error.is_some() || matches!(body.status.as_deref(), Some("failed" | "cancelled")) {
        return Err(bad_response("the server sent an error instead of an answer"));
    }
    if matches!(body.status.as_deref(), Some("queued" | "in_progress")) {
        return Err(bad_response("the server sent a response that is not complete"));
    }
    let Some(items) = &body.output else {
        return Err(bad_response("the answer has no output"));
    };
    let mut output = ResponseOutput::default();
    for item in items {
        output.add(item)?;
    }
    Ok(output.end(&body))
}

pub(super) fn bad_response(message: &str) -> CallFailure {
    ENDPOINT.bad_response(message)
}

/// The output of an answer, item by item.
#[derive(Default)]
pub(super) struct ResponseOutput {
    text: String,
    calls: Vec<ToolCall>,
    parts: Vec<MessagePart>,
    refused: bool,
}

impl ResponseOutput {
    /// Adds an item. Only the fields of known types are parsed: items of later versions are ignored, whatever they contain.
    pub(super) fn add(&mut self, item: &Value) -> Result<(), CallFailure> {
        let invalid = |_| bad_response("the answer contains an invalid item");
        match item["type"].as_str() {
            Some("message") => self.add_message(&MessageItem::deserialize(item).map_err(invalid)?),
            Some("function_call") if self.calls.len() < MAX_TOOL_CALLS => {
                let call = FunctionCallItem::deserialize(item).map_err(invalid)?;
                self.parts.push(MessagePart::Call);
                self.calls.push(ToolCall {
                    arguments: call.arguments(),
                    id: call.call_id.or(call.id).unwrap_or_default(),
                    name: call.name.unwrap_or_default(),
                });
            }
            Some("reasoning") if has_reasoning_content(item) => self.parts.push(MessagePart::Opaque(item.clone())),
            _ => {}
        }
        Ok(())
    }

    fn add_message(&mut self, message: &MessageItem) {
        for part in message.content.iter().flatten() {
            let field = |name: &str| part[name].as_str().unwrap_or_default();
            self.refused |= !field("refusal").is_empty();
            self.parts.push(MessagePart::Text(field("text").len()));
            self.text.push_str(field("text"));
        }
    }

    /// Completes the answer with what the server reports about its end.
    pub(super) fn end(self, end: &ResponseBody) -> ModelAnswer {
        let reason = end
            .incomplete_details
            .as_ref()
            .and_then(|details| details.reason.as_deref());
        let finish = match (end.status.as_deref(), reason) {
            (_, Some("content_filter")) => Some("content_filter"),
            (Some("incomplete"), _) => Some("length"),
            _ => None,
        };
        let reasoning = seal_reasoning(
            ModelApi::OpenAIResponses,
            self.parts,
            Vec::new(),
            !self.calls.is_empty(),
        );
        ModelAnswer {
            tokens: end.usage.as_ref().and_then(tokens),
            input_tokens: end.usage.as_ref().and_then(input_tokens),
            output_tokens: end.usage.as_ref().and_then(output_tokens),
            reasoning,
            ..assemble(self.text, self.calls, finish, self.refused)
        }
    }
}

/// A response: a whole answer, or what the last event of a stream reports about it.
#[derive(Deserialize, Default)]
pub(super) struct ResponseBody {
    pub(super) status: Option<String>,
    pub(super) output: Option<Vec<Value>>,
    usage: Option<Value>,
    error: Option<Value>,
    incomplete_details: Option<IncompleteDetails>,
}

#[derive(Deserialize)]
struct IncompleteDetails {
    reason: Option<String>,
}

#[derive(Deserialize)]
struct MessageItem {
    /// Parts, which may have types of later versions.
    content: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct FunctionCallItem {
    id: Option<String>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<Value>,
}

impl FunctionCallItem {
    /// The arguments as JSON text; some servers send the object itself.
    fn arguments(&self) -> String {
        match &self.arguments {
            None => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        }
    }
}

/// Whether reasoning can be sent back. Without content it is a reference to what the server was asked not to store: it
/// would not find it.
fn has_reasoning_content(item: &Value) -> bool {
    item["encrypted_content"].is_string() || item["content"].as_array().is_some_and(|parts| !parts.is_empty())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use agentloop_api::failure::FailureKind;
    use agentloop_engine::message::FinishReason;

    fn read(body: &Value) -> ModelAnswer {
        answer(body.to_string().as_bytes()).unwrap()
    }

    fn text(part: &Value) -> Value {
        json!({"type": "message", "role": "assistant", "content": [part]})
    }

    #[test]
    fn an_answer_with_text_reasoning_and_tools_is_read_whole() {
        let thought = json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"});
        let read = read(
            &json!({"status": "completed", "error": null, "incomplete_details": null, "output": [
            thought,
            {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "only a reference"}]},
            text(&json!({"type": "output_text", "text": "hi", "annotations": []})),
            {"type": "of_a_later_version"},
            {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "yield", "arguments": "{\"sleep\":1}"},
            {"type": "function_call", "id": "fc_2", "name": "other", "arguments": ""}],
            "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3}}),
        );
        assert_eq!(
            (read.text.as_deref(), read.finish),
            (Some("hi"), FinishReason::ToolCalls)
        );
        assert_eq!((read.tokens, read.input_tokens), (Some(7), Some(9)));
        let calls: Vec<_> = read
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), call.name.as_str(), call.arguments.as_str()))
            .collect();
        assert_eq!(calls, [("a", "yield", "{\"sleep\":1}"), ("fc_2", "other", "")]);
        let parts = [
            MessagePart::Opaque(thought),
            MessagePart::Text(2),
            MessagePart::Call,
            MessagePart::Call,
        ];
        assert_eq!(read.reasoning.unwrap().parts, parts);
    }

    #[test]
    fn an_unknown_item_does_not_spoil_an_answer_whatever_its_fields_are() {
        let unknown = json!({"type": "of_a_later_version", "id": 3, "call_id": {}, "name": [], "content": "text",
            "arguments": {"a": 1}, "encrypted_content": true});
        let part = json!({"type": "of_a_later_version", "text": {"a": 1}, "refusal": 7});
        let call = json!({"type": "function_call", "call_id": "a", "name": "look", "arguments": {"at": 1}});
        let message = json!({"type": "message", "content": [part, {"type": "output_text", "text": "hi"}]});
        let read = read(&json!({"output": [unknown, "no object", message, call]}));
        assert_eq!(read.text.as_deref(), Some("hi"));
        assert_eq!(read.tool_calls[0].arguments, r#"{"at":1}"#);
    }

    #[test]
    fn reasoning_of_an_answer_without_calls_is_dropped() {
        let thought = json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"});
        assert_eq!(read(&json!({"output": [thought]})).reasoning, None);
    }

    #[test]
    fn each_finish_reason_is_distinguished() {
        let message = json!({"type": "output_text", "text": "x"});
        let finish = |status: &str, reason: Value, part: &Value| {
            read(&json!({"status": status, "incomplete_details": {"reason": reason}, "output": [text(part)]})).finish
        };
        for (status, reason, expected) in [
            ("completed", Value::Null, FinishReason::Stop),
            ("incomplete", json!("max_output_tokens"), FinishReason::Length),
            ("incomplete", json!("content_filter"), FinishReason::Refused),
            ("incomplete", json!("of_a_later_version"), FinishReason::Length),
            ("incomplete", Value::Null, FinishReason::Length),
        ] {
            assert_eq!(finish(status, reason.clone(), &message), expected, "{status} {reason}");
        }
        let refusal = json!({"type": "refusal", "refusal": "no"});
        assert_eq!(finish("completed", Value::Null, &refusal), FinishReason::Refused);
    }

    #[test]
    fn a_malformed_answer_is_a_bad_response() {
        for body in [
            "",
            "<html>",
            "[]",
            "{}",
            r#"{"choices":[{"message":{"content":"SECRET"}}]}"#,
            r#"{"status":"completed","output":"SECRET"}"#,
            r#"{"status":"completed","output":[{"type":"message","content":"SECRET"}]}"#,
            r#"{"status":"failed","output":[],"error":{"code":"server_error","message":"SECRET"}}"#,
            r#"{"status":"queued","output":[]}"#,
            r#"{"error":{"m":"SECRET"}}"#,
        ] {
            let failure = answer(body.as_bytes()).unwrap_err();
            assert_eq!(failure.kind, FailureKind::BadResponse, "{body}");
            assert!(!failure.message.contains("SECRET") && failure.message.contains("OpenAI Responses"));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(body in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = answer(&body);
        }

        #[test]
        fn no_json_of_the_right_shape_makes_it_panic(id in proptest::option::of(".*"), text in ".*", calls in 0_usize..300) {
            let call = json!({"type": "function_call", "call_id": id, "name": null, "arguments": text});
            let read = read(&json!({"status": text, "output": vec![call; calls]}));
            let ids: HashSet<_> = read.tool_calls.iter().map(|call| &call.id).collect();
            prop_assert_eq!(ids.len(), calls.min(MAX_TOOL_CALLS));
        }
    }
}
