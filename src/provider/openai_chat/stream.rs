//! OpenAI chat completions: streamed answers.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::REASONING;
use super::response::{FunctionCall, bad_response, reasoning};
use super::usage::{input_tokens, output_tokens, tokens};
use crate::answer::{AnswerAggregate, MAX_STREAM_BYTES, MAX_TOOL_CALLS, assemble, cut_stream};
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::{ModelAnswer, ToolCall};

#[derive(Default)]
pub struct CompletionAggregate {
    text: String,
    /// Bytes of the text that were taken.
    taken: usize,
    calls: BTreeMap<u64, ToolCall>,
    /// Extra fields of the calls, sent back with them.
    extras: BTreeMap<u64, Value>,
    /// Fields of reasoning, with their deltas applied.
    reasoning: Map<String, Value>,
    finish: Option<String>,
    refused: bool,
    tokens: Option<u64>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    bytes: usize,
}

impl AnswerAggregate for CompletionAggregate {
    fn push(&mut self, data: &str) -> Result<bool, CallFailure> {
        if data.trim() == "[DONE]" {
            return Ok(true);
        }
        self.bytes += data.len();
        if self.bytes > MAX_STREAM_BYTES {
            return Err(bad_response("the streamed answer is larger than 32 MiB"));
        }
        let chunk: CompletionChunk =
            serde_json::from_str(data).map_err(|_| bad_response("an event of the stream is not JSON"))?;
        if chunk.error.is_some() {
            return Err(bad_response("the server sent an error in the middle of the stream"));
        }
        // Later counts replace earlier ones.
        self.tokens = chunk.usage.as_ref().and_then(tokens).or(self.tokens);
        self.input_tokens = chunk.usage.as_ref().and_then(input_tokens).or(self.input_tokens);
        self.output_tokens = chunk.usage.as_ref().and_then(output_tokens).or(self.output_tokens);
        for choice in chunk.choices.unwrap_or_default() {
            if choice.index.unwrap_or(0) == 0 {
                self.choice(choice);
            }
        }
        Ok(false)
    }

    fn take_text(&mut self) -> String {
        let taken = std::mem::replace(&mut self.taken, self.text.len());
        self.text.get(taken..).unwrap_or_default().to_owned()
    }

    fn finish(self: Box<Self>, done: bool) -> Result<ModelAnswer, CallFailure> {
        if self.finish.is_none() && !done {
            return Err(cut_stream());
        }
        let extras = self
            .calls
            .keys()
            .map(|index| self.extras.get(index).cloned().unwrap_or_default());
        let reasoning = reasoning(self.reasoning, extras.collect());
        let calls = self.calls.into_values().collect();
        Ok(ModelAnswer {
            tokens: self.tokens,
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            reasoning,
            ..assemble(self.text, calls, self.finish.as_deref(), self.refused)
        })
    }
}

impl CompletionAggregate {
    fn choice(&mut self, choice: ChunkChoice) {
        if choice.finish_reason.is_some() {
            self.finish = choice.finish_reason;
        }
        let Some(delta) = choice.delta else { return };
        self.text.push_str(delta.content.as_deref().unwrap_or_default());
        for (name, gained) in delta.rest {
            if REASONING.contains(&name.as_str()) {
                gain(self.reasoning.entry(name).or_insert(Value::Null), gained);
            }
        }
        self.refused |= delta.refusal.is_some_and(|text| !text.is_empty());
        for call in delta.tool_calls.into_iter().flatten() {
            self.call(call);
        }
    }

    /// Adds a piece of a [`ToolCall`]. Servers that omit the index either send each call whole, or continue the last
    /// one.
    fn call(&mut self, piece: CallDelta) {
        let last = self
            .calls
            .last_key_value()
            .map(|(index, call)| (*index, call.id.clone()));
        let index = match (piece.index, last) {
            (Some(index), _) => index,
            (None, None) => 0,
            (None, Some((index, id))) => match &piece.id {
                Some(new) if *new != id => index.saturating_add(1),
                _ => index,
            },
        };
        if !self.calls.contains_key(&index) && self.calls.len() >= MAX_TOOL_CALLS {
            return;
        }
        let call = self.calls.entry(index).or_insert_with(|| ToolCall {
            id: String::new(),
            name: String::new(),
            arguments: String::new(),
        });
        if call.id.is_empty() {
            call.id = piece.id.unwrap_or_default();
        }
        if let Some(extra) = piece.extra_content {
            self.extras.insert(index, extra);
        }
        if let Some(function) = piece.function {
            call.arguments.push_str(&function.arguments());
            if call.name.is_empty() {
                call.name = function.name.unwrap_or_default();
            }
        }
    }
}

/// Merges a piece of reasoning: texts are appended, and list items are matched by type and index.
fn gain(all: &mut Value, gained: Value) {
    match (all, gained) {
        (_, Value::Null) => {}
        (Value::String(text), Value::String(more)) => text.push_str(&more),
        (Value::Array(items), Value::Array(more)) => gain_items(items, more),
        (all @ Value::Null, Value::Array(more)) => {
            let mut items = Vec::new();
            gain_items(&mut items, more);
            *all = items.into();
        }
        (all, gained) => *all = gained,
    }
}

fn gain_items(items: &mut Vec<Value>, gained: Vec<Value>) {
    for item in gained {
        gain_item(items, item);
    }
}

fn gain_item(items: &mut Vec<Value>, gained: Value) {
    let same = |item: &Value| ["type", "index"].iter().all(|name| item.get(name) == gained.get(name));
    let known = items
        .iter_mut()
        .rev()
        .find(|item| gained.get("index").is_some() && same(item));
    let (Some(Value::Object(known)), Value::Object(fields)) = (known, &gained) else {
        items.push(gained);
        return;
    };
    for (name, value) in fields {
        let grows = ["text", "summary", "data"].contains(&name.as_str());
        match (known.get_mut(name), value) {
            (_, Value::Null) => {}
            (Some(Value::String(text)), Value::String(more)) if grows => text.push_str(more),
            _ => {
                known.insert(name.clone(), value.clone());
            }
        }
    }
}

#[derive(Deserialize)]
struct CompletionChunk {
    choices: Option<Vec<ChunkChoice>>,
    usage: Option<Value>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    index: Option<u64>,
    delta: Option<ChoiceDelta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct ChoiceDelta {
    content: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
struct CallDelta {
    index: Option<u64>,
    id: Option<String>,
    function: Option<FunctionCall>,
    extra_content: Option<Value>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WireFormat;
    use crate::samples::read_stream;
    use agentloop_api::failure::FailureKind;
    use agentloop_engine::message::{FinishReason, MessagePart};
    use proptest::prelude::*;
    use serde_json::json;

    fn delta(delta: &Value) -> String {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]}).to_string()
    }

    fn read(events: &[String]) -> Result<ModelAnswer, CallFailure> {
        read_stream(WireFormat::OpenAiChat, events)
    }

    fn piece(index: u64, id: Option<&str>, name: Option<&str>, arguments: &str) -> Value {
        json!({"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}]})
    }

    #[test]
    fn reasoning_and_signatures_come_together_in_pieces() {
        let text = |text: &str, signature: Value| {
            delta(&json!({"reasoning_content": text, "reasoning_details": [
                {"type": "reasoning.text", "index": 0, "text": text, "signature": signature}]}))
        };
        let mut call = piece(0, Some("a"), Some("yield"), "{}");
        call["tool_calls"][0]["extra_content"] = json!({"google": {"thought_signature": "c2ln"}});
        let encrypted = json!({"type": "reasoning.encrypted", "index": 1, "data": "x"});
        let end = [
            delta(&json!({"reasoning_content": null, "reasoning_details": [encrypted]})),
            delta(&call),
            delta(&piece(1, Some("b"), Some("yield"), "{}")),
            "[DONE]".into(),
        ];
        let events = [vec![text("h", Value::Null), text("m", json!("s"))], end.to_vec()].concat();
        let reasoning = read(&events).unwrap().reasoning.unwrap();
        let details = [
            json!({"type": "reasoning.text", "index": 0, "text": "hm", "signature": "s"}),
            encrypted,
        ];
        let fields = json!({"reasoning_content": "hm", "reasoning_details": details});
        assert_eq!(reasoning.parts, [MessagePart::Opaque(fields)]);
        assert_eq!(
            reasoning.calls,
            [json!({"google": {"thought_signature": "c2ln"}}), Value::Null]
        );
        let without = read(&[
            text("h", Value::Null),
            delta(&json!({"content": "hi"})),
            "[DONE]".into(),
        ]);
        assert_eq!(without.unwrap().reasoning, None);
    }

    #[test]
    fn text_and_interleaved_tool_calls_come_together_by_index() {
        let answer = read(&[
            delta(&json!({"role": "assistant", "content": "he"})),
            delta(&json!({"content": "llo"})),
            delta(&piece(0, Some("a"), Some("yield"), "{\"sl")),
            delta(&piece(1, Some("b"), Some("other"), "{")),
            delta(&piece(0, None, None, "eep\":1}")),
            delta(&piece(1, None, None, "}")),
            json!({"choices": [{"index": 1, "delta": {"content": "another choice"}}]}).to_string(),
            json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}).to_string(),
            json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}).to_string(),
            "[DONE]".into(),
        ])
        .unwrap();
        assert_eq!(answer.text.as_deref(), Some("hello"));
        assert_eq!(answer.finish, FinishReason::ToolCalls);
        assert_eq!(answer.tokens, Some(7));
        let calls: Vec<_> = answer
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), call.name.as_str(), call.arguments.as_str()))
            .collect();
        assert_eq!(calls, [("a", "yield", "{\"sleep\":1}"), ("b", "other", "{}")]);
    }

    #[test]
    fn calls_without_an_index_are_distinguished_by_their_ids() {
        let piece = |id: Option<&str>, arguments: &str| {
            delta(&json!({"tool_calls": [{"id": id, "function": {"name": "yield", "arguments": arguments}}]}))
        };
        let answer = read(&[
            piece(Some("a"), "{"),
            piece(None, "}"),
            piece(Some("b"), "{}"),
            "[DONE]".into(),
        ])
        .unwrap();
        let calls: Vec<_> = answer
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), call.arguments.as_str()))
            .collect();
        assert_eq!(calls, [("a", "{}"), ("b", "{}")]);
    }

    #[test]
    fn a_stream_that_ends_without_a_reason_is_cut_and_one_with_a_reason_is_not() {
        let text = delta(&json!({"content": "x"}));
        assert_eq!(
            read(std::slice::from_ref(&text)).unwrap_err().kind,
            FailureKind::Unreachable
        );
        let end = json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}).to_string();
        assert_eq!(read(&[text, end]).unwrap().text.as_deref(), Some("x"));
    }

    #[test]
    fn errors_and_garbage_within_the_stream_are_bad_responses_without_their_text() {
        for event in ["SECRET", r#"{"error": "SECRET"}"#, "[]", r#"{"choices": "SECRET"}"#] {
            let failure = read(&[event.into()]).unwrap_err();
            assert_eq!(failure.kind, FailureKind::BadResponse, "{event}");
            assert!(!failure.message.contains("SECRET"));
        }
    }

    #[test]
    fn an_endless_answer_is_refused_at_32_mib_and_not_before() {
        let mut aggregate = CompletionAggregate::default();
        let event = delta(&json!({"content": "x".repeat(1024 * 1024 - 69)}));
        assert_eq!(event.len(), 1024 * 1024);
        for _ in 0..32 {
            aggregate.push(&event).unwrap();
        }
        assert!(aggregate.push("{}").is_err());
    }

    proptest! {
        #[test]
        fn no_events_make_it_panic(events in proptest::collection::vec(".*", 0..8)) {
            let _ = read(&events);
        }

        #[test]
        fn no_order_of_indexes_makes_it_panic(
            pieces in proptest::collection::vec((any::<Option<u64>>(), any::<Option<u8>>(), ".{0,3}"), 0..300),
        ) {
            let mut events: Vec<String> = pieces.iter().map(|(index, id, arguments)| {
                let id = id.map(|id| id.to_string());
                delta(&json!({"tool_calls": [{"index": index, "id": id, "function": {"arguments": arguments}}]}))
            }).collect();
            events.push("[DONE]".into());
            let answer = read(&events).unwrap();
            prop_assert!(answer.tool_calls.len() <= MAX_TOOL_CALLS);
        }
    }
}
