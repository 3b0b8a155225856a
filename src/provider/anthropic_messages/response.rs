//! Whole answers of Anthropic messages, and what they share with streamed ones.

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
    let message: MessageResponse =
        serde_json::from_slice(body).map_err(|_| bad_response("the answer is not a message"))?;
    if message.error.is_some() {
        return Err(bad_response("the server sent an error instead of an answer"));
    }
    let Some(blocks) = message.content else {
        return Err(bad_response("the answer has no content"));
    };
    let mut text = String::new();
    let mut calls = Vec::new();
    let mut parts = Vec::new();
    for raw in blocks {
        let block = MessageBlock::deserialize(&raw)
            .map_err(|_| bad_response("the answer contains an invalid content block"))?;
        match block.kind.as_deref() {
            Some("text") => {
                let piece = block.text.unwrap_or_default();
                parts.push(MessagePart::Text(piece.len()));
                text.push_str(&piece);
            }
            Some("tool_use") if calls.len() < MAX_TOOL_CALLS => {
                parts.push(MessagePart::Call);
                calls.push(ToolCall {
                    id: block.id.unwrap_or_default(),
                    name: block.name.unwrap_or_default(),
                    arguments: block.input.map(|input| input.to_string()).unwrap_or_default(),
                });
            }
            Some("thinking" | "redacted_thinking") => parts.push(MessagePart::Opaque(raw)),
            // Ignore block types of later versions.
            _ => {}
        }
    }
    let reasoning = seal_reasoning(ModelApi::AnthropicMessages, parts, Vec::new(), !calls.is_empty());
    Ok(ModelAnswer {
        tokens: message.usage.as_ref().and_then(tokens),
        input_tokens: message.usage.as_ref().and_then(input_tokens),
        output_tokens: message.usage.as_ref().and_then(output_tokens),
        reasoning,
        ..ended(text, calls, message.stop_reason.as_deref())
    })
}

/// Builds the answer from its parts, streamed or not.
pub(super) fn ended(text: String, calls: Vec<ToolCall>, reason: Option<&str>) -> ModelAnswer {
    let finish = match reason {
        Some("max_tokens" | "model_context_window_exceeded") => Some("length"),
        other => other,
    };
    assemble(text, calls, finish, reason == Some("refusal"))
}

pub(super) fn bad_response(message: &str) -> CallFailure {
    ENDPOINT.bad_response(message)
}

#[derive(Deserialize)]
struct MessageResponse {
    content: Option<Vec<Value>>,
    stop_reason: Option<String>,
    usage: Option<Value>,
    error: Option<Value>,
}

/// A content block, or the start of one in a stream.
#[derive(Deserialize)]
pub(super) struct MessageBlock {
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
    use serde_json::json;

    use super::*;
    use crate::samples::call;
    use agentloop_api::failure::FailureKind;
    use agentloop_engine::message::FinishReason;

    #[test]
    fn an_answer_with_text_reasoning_and_tools_is_read_whole() {
        let body = json!({"type": "message", "role": "assistant", "stop_reason": "tool_use", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "hi "},
            {"type": "tool_use", "id": "x", "name": "yield", "input": {"sleep": 1}}, {"type": "text", "text": "you"},
            {"type": "of_a_later_version"}]});
        let read = answer(body.to_string().as_bytes()).unwrap();
        assert_eq!(read.text.as_deref(), Some("hi you"));
        assert_eq!(read.tool_calls, vec![call("x", r#"{"sleep":1}"#)]);
        assert_eq!(read.finish, FinishReason::ToolCalls);
        let parts = [
            MessagePart::Opaque(json!({"type": "thinking", "thinking": "hm", "signature": "s"})),
            MessagePart::Text(3),
            MessagePart::Call,
            MessagePart::Text(3),
        ];
        assert_eq!(read.reasoning.unwrap().parts, parts);
    }

    /// An answer with reasoning between its other parts, and the result of its call.
    #[test]
    fn each_finish_reason_is_distinguished() {
        let finish = |reason: Value| {
            let body = json!({"content": [{"type": "text", "text": "x"}], "stop_reason": reason});
            answer(body.to_string().as_bytes()).unwrap().finish
        };
        for (reason, expected) in [
            (json!("end_turn"), FinishReason::Stop),
            (json!("stop_sequence"), FinishReason::Stop),
            (Value::Null, FinishReason::Stop),
            (json!("max_tokens"), FinishReason::Length),
            (json!("model_context_window_exceeded"), FinishReason::Length),
            (json!("refusal"), FinishReason::Refused),
        ] {
            assert_eq!(finish(reason.clone()), expected, "{reason}");
        }
    }

    #[test]
    fn a_malformed_answer_is_a_bad_response() {
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
}
