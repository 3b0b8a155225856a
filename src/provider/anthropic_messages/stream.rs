//! Anthropic messages: streamed answers.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::response::{MessageBlock, bad_response, ended};
use super::usage::{input_tokens, output_tokens, tokens};
use crate::answer::{AnswerAggregate, MAX_STREAM_BYTES, MAX_TOOL_CALLS, cut_stream, seal_reasoning};
use agentloop_api::agent::ModelApi;
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::{MessagePart, ModelAnswer, ToolCall};

#[derive(Default)]
pub struct MessageAggregate {
    blocks: BTreeMap<u64, PartialBlock>,
    /// Text that was not taken yet.
    fresh: String,
    calls: usize,
    reason: Option<String>,
    usage: Map<String, Value>,
    bytes: usize,
}

enum PartialBlock {
    Text(String),
    Call(ToolCall),
    /// Reasoning: the start of the block, with its deltas applied.
    Opaque(Map<String, Value>),
}

impl AnswerAggregate for MessageAggregate {
    fn push(&mut self, data: &str) -> Result<bool, CallFailure> {
        self.bytes += data.len();
        if self.bytes > MAX_STREAM_BYTES {
            return Err(bad_response("the streamed answer is larger than 32 MiB"));
        }
        let event: MessageStreamEvent =
            serde_json::from_str(data).map_err(|_| bad_response("the stream contains an invalid event"))?;
        let index = event.index.unwrap_or(0);
        match event.kind.as_str() {
            "message_stop" => return Ok(true),
            "error" => return Err(bad_response("the server sent an error in the middle of the stream")),
            "message_start" => self.usage(event.message.and_then(|head| head.usage)),
            "content_block_start" => self.start(index, event.content_block)?,
            "content_block_delta" => self.delta(index, event.delta),
            "message_delta" => {
                self.usage(event.usage);
                let reason = event.delta.and_then(|delta| delta.stop_reason);
                self.reason = reason.or(self.reason.take());
            }
            // Pings, ends of blocks, and events of later versions.
            _ => {}
        }
        Ok(false)
    }

    fn take_text(&mut self) -> String {
        std::mem::take(&mut self.fresh)
    }

    fn finish(self: Box<Self>, done: bool) -> Result<ModelAnswer, CallFailure> {
        if self.reason.is_none() && !done {
            return Err(cut_stream());
        }
        let (mut text, mut calls, mut parts) = (String::new(), Vec::new(), Vec::new());
        for piece in self.blocks.into_values() {
            match piece {
                PartialBlock::Text(piece) => {
                    parts.push(MessagePart::Text(piece.len()));
                    text.push_str(&piece);
                }
                PartialBlock::Call(call) => {
                    parts.push(MessagePart::Call);
                    calls.push(call);
                }
                PartialBlock::Opaque(block) => parts.push(MessagePart::Opaque(block.into())),
            }
        }
        let reasoning = seal_reasoning(ModelApi::AnthropicMessages, parts, Vec::new(), !calls.is_empty());
        let usage = Value::Object(self.usage);
        Ok(ModelAnswer {
            tokens: tokens(&usage),
            input_tokens: input_tokens(&usage),
            output_tokens: output_tokens(&usage),
            reasoning,
            ..ended(text, calls, self.reason.as_deref())
        })
    }
}

impl MessageAggregate {
    /// Merges usage counts: later ones replace earlier ones.
    fn usage(&mut self, usage: Option<Map<String, Value>>) {
        let reported = usage.into_iter().flatten().filter(|(_, count)| !count.is_null());
        self.usage.extend(reported);
    }

    fn start(&mut self, index: u64, raw: Option<Map<String, Value>>) -> Result<(), CallFailure> {
        let Some(raw) = raw else { return Ok(()) };
        let kind = raw.get("type").and_then(Value::as_str).unwrap_or_default();
        let piece = match kind {
            "thinking" | "redacted_thinking" => PartialBlock::Opaque(raw),
            "text" | "tool_use" => {
                let block = MessageBlock::deserialize(Value::Object(raw))
                    .map_err(|_| bad_response("the stream contains an invalid content block"))?;
                match block.kind.as_deref() {
                    Some("text") => PartialBlock::Text(block.text.unwrap_or_default()),
                    _ if self.calls >= MAX_TOOL_CALLS => return Ok(()),
                    _ => {
                        self.calls += 1;
                        PartialBlock::Call(begun(block))
                    }
                }
            }
            // Ignore block types of later versions.
            _ => return Ok(()),
        };
        if let Entry::Vacant(free) = self.blocks.entry(index) {
            if let PartialBlock::Text(text) = &piece {
                self.fresh.push_str(text);
            }
            free.insert(piece);
        }
        Ok(())
    }

    fn delta(&mut self, index: u64, delta: Option<EventDelta>) {
        let Some(delta) = delta else { return };
        // Some servers omit the start of a text block.
        let piece = match self.blocks.entry(index) {
            Entry::Occupied(piece) => piece.into_mut(),
            Entry::Vacant(free) if delta.text.is_some() => free.insert(PartialBlock::Text(String::new())),
            Entry::Vacant(_) => return,
        };
        match piece {
            PartialBlock::Text(text) => {
                let gained = delta.text.as_deref().unwrap_or_default();
                text.push_str(gained);
                self.fresh.push_str(gained);
            }
            PartialBlock::Call(call) => call
                .arguments
                .push_str(delta.partial_json.as_deref().unwrap_or_default()),
            PartialBlock::Opaque(block) => {
                for (name, gained) in [("thinking", delta.thinking), ("signature", delta.signature)] {
                    let Some(gained) = gained else { continue };
                    let old = block.get(name).and_then(Value::as_str).unwrap_or_default();
                    let all = format!("{old}{gained}");
                    block.insert(name.into(), all.into());
                }
            }
        }
    }
}

/// Starts a [`ToolCall`]. An empty object stands for arguments that arrive as deltas.
fn begun(block: MessageBlock) -> ToolCall {
    let given = block
        .input
        .filter(|input| input.as_object().is_none_or(|object| !object.is_empty()));
    ToolCall {
        id: block.id.unwrap_or_default(),
        name: block.name.unwrap_or_default(),
        arguments: given
            .filter(|input| !input.is_null())
            .map(|input| input.to_string())
            .unwrap_or_default(),
    }
}

#[derive(Deserialize)]
struct MessageStreamEvent {
    #[serde(rename = "type")]
    kind: String,
    index: Option<u64>,
    content_block: Option<Map<String, Value>>,
    delta: Option<EventDelta>,
    message: Option<MessageStart>,
    usage: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct MessageStart {
    usage: Option<Map<String, Value>>,
}

/// The change in a delta event, of a block or of the message.
#[derive(Deserialize)]
struct EventDelta {
    text: Option<String>,
    thinking: Option<String>,
    signature: Option<String>,
    partial_json: Option<String>,
    stop_reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::WireFormat;
    use crate::samples::read_stream;
    use agentloop_api::failure::FailureKind;
    use agentloop_engine::message::FinishReason;

    fn read(events: &[Value]) -> Result<ModelAnswer, CallFailure> {
        read_stream(WireFormat::AnthropicMessages, events)
    }

    fn block(index: u64, block: &Value) -> Value {
        json!({"type": "content_block_start", "index": index, "content_block": block})
    }

    fn delta(index: u64, delta: &Value) -> Value {
        json!({"type": "content_block_delta", "index": index, "delta": delta})
    }

    fn end(reason: &str) -> Value {
        json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null}, "usage": {"output_tokens": 9}})
    }

    #[test]
    fn text_reasoning_and_tool_calls_come_together_by_index() {
        let piece = |index, text: &str| delta(index, &json!({"type": "input_json_delta", "partial_json": text}));
        let answer = read(&[
            json!({"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}}),
            json!({"type": "ping"}),
            block(0, &json!({"type": "thinking", "thinking": ""})),
            delta(0, &json!({"type": "thinking_delta", "thinking": "hm"})),
            delta(0, &json!({"type": "signature_delta", "signature": "s"})),
            block(1, &json!({"type": "text", "text": ""})),
            delta(1, &json!({"type": "text_delta", "text": "hel"})),
            delta(1, &json!({"type": "text_delta", "text": "lo"})),
            block(2, &json!({"type": "tool_use", "id": "a", "name": "yield", "input": {}})),
            piece(2, ""),
            block(3, &json!({"type": "tool_use", "id": "b", "name": "other", "input": {}})),
            piece(2, "{\"sl"),
            piece(2, "eep\":1}"),
            json!({"type": "content_block_stop", "index": 2}),
            block(4, &json!({"type": "tool_use", "id": "c", "name": "whole", "input": {"x": 1}})),
            json!({"type": "of_a_later_version", "index": 3}),
            end("tool_use"),
            json!({"type": "message_stop"}),
        ])
        .unwrap();
        assert_eq!(answer.text.as_deref(), Some("hello"));
        let parts = [
            MessagePart::Opaque(json!({"type": "thinking", "thinking": "hm", "signature": "s"})),
            MessagePart::Text(5),
            MessagePart::Call,
            MessagePart::Call,
            MessagePart::Call,
        ];
        assert_eq!(answer.reasoning.unwrap().parts, parts);
        assert_eq!(answer.finish, FinishReason::ToolCalls);
        assert_eq!(answer.tokens, Some(12), "later counts replace earlier ones");
        let calls: Vec<_> = answer
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), call.name.as_str(), call.arguments.as_str()))
            .collect();
        let expected = [
            ("a", "yield", "{\"sleep\":1}"),
            ("b", "other", ""),
            ("c", "whole", "{\"x\":1}"),
        ];
        assert_eq!(calls, expected);
    }

    #[test]
    fn a_stream_that_ends_without_a_reason_is_cut_and_one_with_a_reason_is_not() {
        let text = block(0, &json!({"type": "text", "text": "x"}));
        assert_eq!(
            read(std::slice::from_ref(&text)).unwrap_err().kind,
            FailureKind::Unreachable
        );
        assert_eq!(
            read(&[text.clone(), end("max_tokens")]).unwrap().finish,
            FinishReason::Length
        );
        assert_eq!(read(&[text, end("refusal")]).unwrap().finish, FinishReason::Refused);
    }

    #[test]
    fn errors_and_garbage_within_the_stream_are_bad_responses_without_their_text() {
        for event in [
            "SECRET",
            "[]",
            "{}",
            r#"{"type":"error","error":{"type":"overloaded_error","message":"SECRET"}}"#,
        ] {
            let failure = MessageAggregate::default().push(event).unwrap_err();
            assert_eq!(failure.kind, FailureKind::BadResponse, "{event}");
            assert!(!failure.message.contains("SECRET"));
        }
    }

    #[test]
    fn an_endless_answer_is_refused_at_32_mib_and_not_before() {
        let mut aggregate = MessageAggregate::default();
        let event = |length: usize| delta(0, &json!({"type": "text_delta", "text": "x".repeat(length)})).to_string();
        let event = event(1024 * 1024 - event(0).len());
        assert_eq!(event.len(), 1024 * 1024);
        for _ in 0..32 {
            aggregate.push(&event).unwrap();
        }
        assert!(aggregate.push(r#"{"type":"ping"}"#).is_err());
    }

    proptest! {
        #[test]
        fn no_events_make_it_panic(events in proptest::collection::vec(".*", 0..8)) {
            let mut aggregate = MessageAggregate::default();
            for event in events {
                let _ = aggregate.push(&event);
            }
        }

        #[test]
        fn no_order_of_indexes_makes_it_panic(
            pieces in proptest::collection::vec((any::<Option<u64>>(), any::<bool>(), ".{0,3}"), 0..300),
        ) {
            let mut events: Vec<Value> = pieces.iter().map(|(index, starts, text)| if *starts {
                json!({"type": "content_block_start", "index": index, "content_block": {"type": "tool_use", "input": text}})
            } else {
                json!({"type": "content_block_delta", "index": index, "delta": {"partial_json": text}})
            }).collect();
            events.push(json!({"type": "message_stop"}));
            prop_assert!(read(&events).unwrap().tool_calls.len() <= MAX_TOOL_CALLS);
        }
    }
}
