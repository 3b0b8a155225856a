//! Tests of the text that is taken from an answer while it arrives, in all formats.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::WireFormat;

/// The texts that are taken after each event, and the text of the whole answer.
fn watch(format: WireFormat, events: &[Value]) -> (Vec<String>, Option<String>) {
    let mut aggregate = format.aggregate();
    let mut texts = Vec::new();
    for event in events {
        let is_done = aggregate.push(&event.to_string()).unwrap();
        texts.push(aggregate.take_text());
        if is_done {
            break;
        }
    }
    (texts, aggregate.finish(true).unwrap().text)
}

fn chat(delta: &Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

/// A stream that has reasoning, these pieces of text, and a tool call.
fn stream(format: WireFormat, pieces: &[String]) -> Vec<Value> {
    let texts = pieces.iter().map(|piece| match format {
        WireFormat::OpenAiChat | WireFormat::JsonTools => chat(&json!({"content": piece})),
        WireFormat::AnthropicMessages => {
            json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": piece}})
        }
        WireFormat::OpenAiResponses => {
            json!({"type": "response.output_text.delta", "output_index": 1, "delta": piece})
        }
    });
    let (before, after) = match format {
        WireFormat::OpenAiChat | WireFormat::JsonTools => {
            let call = json!({"index": 0, "id": "a", "function": {"name": "secret-call", "arguments": "secret"}});
            let before = vec![chat(&json!({"reasoning_content": "secret"}))];
            (before, vec![chat(&json!({"tool_calls": [call]}))])
        }
        WireFormat::AnthropicMessages => {
            let start = |index: u64, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
            let delta =
                |index: u64, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
            let before = vec![
                start(0, json!({"type": "thinking", "thinking": "secret"})),
                delta(0, json!({"type": "thinking_delta", "thinking": "secret"})),
                start(1, json!({"type": "text", "text": ""})),
            ];
            let after = vec![
                start(
                    2,
                    json!({"type": "tool_use", "id": "a", "name": "secret-call", "input": {}}),
                ),
                delta(
                    2,
                    json!({"type": "input_json_delta", "partial_json": "{\"a\":\"secret\"}"}),
                ),
            ];
            (before, after)
        }
        WireFormat::OpenAiResponses => {
            let added = |index: u64, item: Value| json!({"type": "response.output_item.added", "output_index": index, "item": item});
            let before = vec![
                added(0, json!({"type": "reasoning", "id": "r"})),
                json!({"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": "secret"}),
                added(1, json!({"type": "message", "content": []})),
            ];
            let call = json!({"type": "function_call", "call_id": "a", "name": "secret-call", "arguments": "secret"});
            let after = vec![
                added(2, call),
                json!({"type": "response.function_call_arguments.delta", "output_index": 2, "delta": "secret"}),
                json!({"type": "response.completed", "response": {"status": "completed"}}),
            ];
            (before, after)
        }
    };
    before.into_iter().chain(texts).chain(after).collect()
}

#[test]
fn each_piece_of_text_is_returned_once_and_neither_reasoning_nor_tool_calls_are() {
    let pieces = ["hé".to_owned(), String::new(), "llo".to_owned()];
    for format in WireFormat::ENDPOINTS {
        let (texts, whole) = watch(format, &stream(format, &pieces));
        let texts: Vec<&str> = texts
            .iter()
            .map(String::as_str)
            .filter(|text| !text.is_empty())
            .collect();
        assert_eq!(texts, ["hé", "llo"], "{format:?}");
        assert_eq!(whole.as_deref(), Some("héllo"), "{format:?}");
    }
}

#[test]
fn a_text_at_the_start_of_a_block_is_returned_once_too() {
    let block = json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "he"}});
    let more = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "llo"}});
    let (texts, whole) = watch(WireFormat::AnthropicMessages, &[block.clone(), block, more]);
    assert_eq!(texts, ["he", "", "llo"], "a repeated start adds nothing");
    assert_eq!(whole.as_deref(), Some("hello"));
}

#[test]
fn an_answer_that_is_json_has_no_text_while_it_arrives() {
    let object = [r#"{"text":"hel"#.to_owned(), r#"lo","tool_calls":[]}"#.to_owned()];
    let events = object
        .iter()
        .map(|piece| chat(&json!({"content": piece})))
        .collect::<Vec<_>>();
    let (texts, whole) = watch(WireFormat::JsonTools, &events);
    assert_eq!(texts, ["", ""]);
    assert_eq!(whole.as_deref(), Some("hello"));
}

proptest! {
    #[test]
    fn the_streamed_text_equals_the_text_of_the_answer(pieces in proptest::collection::vec("\\PC{0,8}", 0..8)) {
        for format in WireFormat::ENDPOINTS {
            let (texts, whole) = watch(format, &stream(format, &pieces));
            prop_assert_eq!(texts.concat(), whole.unwrap_or_default());
        }
    }
}
