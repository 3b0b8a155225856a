//! OpenAI chat completions: the answer that comes in pieces.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::api::failure::{Failure, FailureKind};
use crate::engine::message::{Answer, ToolCall};

use super::openai::{Function, assemble, bad, tokens};
use super::{MAX_STREAM_BYTES, MAX_TOOL_CALLS};

/// A streamed answer so far.
#[derive(Default)]
pub struct Aggregate {
    text: String,
    calls: BTreeMap<u64, ToolCall>,
    finish: Option<String>,
    refused: bool,
    tokens: Option<u64>,
    bytes: usize,
}

impl Aggregate {
    /// Takes the data of one event. True: the server said that it was the last.
    pub fn push(&mut self, data: &str) -> Result<bool, Failure> {
        if data.trim() == "[DONE]" {
            return Ok(true);
        }
        self.bytes += data.len();
        if self.bytes > MAX_STREAM_BYTES {
            return Err(bad("the streamed answer is larger than 32 MiB"));
        }
        let chunk: Chunk = serde_json::from_str(data).map_err(|_| bad("an event of the stream is not JSON"))?;
        if chunk.error.is_some() {
            return Err(bad("the server sent an error in the middle of the stream"));
        }
        // Counts that come on the way are replaced by those of the end.
        self.tokens = chunk.usage.as_ref().and_then(tokens).or(self.tokens);
        for choice in chunk.choices.unwrap_or_default() {
            if choice.index.unwrap_or(0) == 0 {
                self.choice(choice);
            }
        }
        Ok(false)
    }

    /// The whole answer. A stream that ended without saying why is cut.
    pub fn finish(self, done: bool) -> Result<Answer, Failure> {
        if self.finish.is_none() && !done {
            return Err(Failure {
                kind: FailureKind::Unreachable,
                message: "the stream ended in the middle of the answer".into(),
                retry_after_milliseconds: None,
                resumes_at: None,
            });
        }
        let calls = self.calls.into_values().collect();
        Ok(Answer {
            tokens: self.tokens,
            ..assemble(self.text, calls, self.finish.as_deref(), self.refused)
        })
    }

    fn choice(&mut self, choice: ChunkChoice) {
        if choice.finish_reason.is_some() {
            self.finish = choice.finish_reason;
        }
        let Some(delta) = choice.delta else { return };
        self.text.push_str(delta.content.as_deref().unwrap_or_default());
        self.refused |= delta.refusal.is_some_and(|text| !text.is_empty());
        for call in delta.tool_calls.into_iter().flatten() {
            self.call(call);
        }
    }

    /// A piece of a tool call. Servers that leave the index out send each call whole, or go on with the last.
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
        if let Some(function) = piece.function {
            call.arguments.push_str(&function.arguments());
            if call.name.is_empty() {
                call.name = function.name.unwrap_or_default();
            }
        }
    }
}

#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<ChunkChoice>>,
    usage: Option<Value>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    index: Option<u64>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    index: Option<u64>,
    id: Option<String>,
    function: Option<Function>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::message::Finish;
    use proptest::prelude::*;
    use serde_json::json;

    fn delta(delta: &Value) -> String {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]}).to_string()
    }

    fn read(events: &[String]) -> Result<Answer, Failure> {
        let mut aggregate = Aggregate::default();
        for event in events {
            if aggregate.push(event)? {
                return aggregate.finish(true);
            }
        }
        aggregate.finish(false)
    }

    fn piece(index: u64, id: Option<&str>, name: Option<&str>, arguments: &str) -> Value {
        json!({"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}]})
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
        assert_eq!(answer.finish, Finish::ToolCalls);
        assert_eq!(answer.tokens, Some(7));
        let calls: Vec<_> = answer
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), call.name.as_str(), call.arguments.as_str()))
            .collect();
        assert_eq!(calls, [("a", "yield", "{\"sleep\":1}"), ("b", "other", "{}")]);
    }

    #[test]
    fn calls_without_an_index_are_told_apart_by_their_ids() {
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
        let mut aggregate = Aggregate::default();
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
