//! OpenAI Responses: streamed answers.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::{Value, json};

use super::response::{ResponseBody, ResponseOutput, bad_response};
use crate::answer::{AnswerAggregate, MAX_STREAM_BYTES, cut_stream};
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::ModelAnswer;

#[derive(Default)]
pub struct ResponseAggregate {
    items: BTreeMap<u64, PartialItem>,
    /// Text that was not taken yet.
    fresh: String,
    /// Indexes of the items by their ids, for events without an index.
    indexes: HashMap<String, u64>,
    /// What the last event reports about the whole.
    end: Option<ResponseBody>,
    bytes: usize,
}

/// An item of the output, with its deltas applied.
#[derive(Default)]
struct PartialItem {
    /// The item as the server began or completed it.
    item: Option<Value>,
    is_complete: bool,
    text: String,
    refusal: String,
    arguments: String,
}

impl AnswerAggregate for ResponseAggregate {
    fn push(&mut self, data: &str) -> Result<bool, CallFailure> {
        self.bytes += data.len();
        if self.bytes > MAX_STREAM_BYTES {
            return Err(bad_response("the streamed answer is larger than 32 MiB"));
        }
        let event: ResponseEvent =
            serde_json::from_str(data).map_err(|_| bad_response("the stream contains an invalid event"))?;
        match event.kind.as_str() {
            "response.failed" | "error" => {
                return Err(bad_response("the server sent an error in the middle of the stream"));
            }
            "response.completed" | "response.incomplete" => {
                self.end = Some(event.response.unwrap_or_default());
                return Ok(true);
            }
            _ => self.change(event)?,
        }
        Ok(false)
    }

    fn take_text(&mut self) -> String {
        std::mem::take(&mut self.fresh)
    }

    fn finish(self: Box<Self>, _: bool) -> Result<ModelAnswer, CallFailure> {
        // Unlike in other formats, one event is both the finish reason and the end mark.
        let Some(end) = &self.end else {
            return Err(cut_stream());
        };
        let mut output = ResponseOutput::default();
        if self.items.is_empty() {
            // Some servers send only the whole.
            end.output.iter().flatten().try_for_each(|item| output.add(item))?;
        }
        for item in self.items.into_values() {
            item.whole().map_or(Ok(()), |item| output.add(&item))?;
        }
        Ok(output.end(end))
    }
}

impl ResponseAggregate {
    /// Applies an event that concerns one item. Others, and those of later versions, are ignored.
    fn change(&mut self, event: ResponseEvent) -> Result<(), CallFailure> {
        let concerns = matches!(
            event.kind.as_str(),
            "response.output_item.added"
                | "response.output_item.done"
                | "response.output_text.delta"
                | "response.refusal.delta"
                | "response.function_call_arguments.delta"
        );
        if !concerns {
            return Ok(());
        }
        let index = self.index(&event)?;
        let partial = self.items.entry(index).or_default();
        let delta = event.delta.as_ref().and_then(Value::as_str).unwrap_or_default();
        match event.kind.as_str() {
            "response.output_text.delta" => {
                partial.text.push_str(delta);
                self.fresh.push_str(delta);
            }
            "response.refusal.delta" => partial.refusal.push_str(delta),
            "response.function_call_arguments.delta" => partial.arguments.push_str(delta),
            _ => {
                partial.is_complete |= event.kind == "response.output_item.done";
                partial.item = event.item.or(partial.item.take());
            }
        }
        Ok(())
    }

    /// Returns the place of the item that an event concerns: its index, or else that of the item with its id.
    fn index(&mut self, event: &ResponseEvent) -> Result<u64, CallFailure> {
        let of_item = || event.item.as_ref().and_then(|item| item["id"].as_str());
        let id = event.item_id.as_deref().or_else(of_item);
        let known = id.and_then(|id| self.indexes.get(id).copied());
        let next = || {
            self.items
                .last_key_value()
                .map_or(0, |(last, _)| last.saturating_add(1))
        };
        let index = match (event.output_index.or(known), id) {
            (Some(index), _) => index,
            (None, Some(_)) => next(),
            (None, None) => return Err(bad_response("an event of the stream names no item")),
        };
        if let (Some(id), None) = (id, known) {
            self.indexes.insert(id.to_owned(), index);
        }
        Ok(index)
    }
}

impl PartialItem {
    /// The item with all that is known of it. `None`: nothing that could be kept.
    fn whole(self) -> Option<Value> {
        if self.is_complete {
            return self.item;
        }
        let kind = self.item.as_ref().and_then(|item| item["type"].as_str());
        match (kind, self.item.as_ref()) {
            // Without its last event it has no content.
            (Some("reasoning"), _) => None,
            (Some("function_call"), Some(item)) => {
                let mut item = item.clone();
                if !self.arguments.is_empty() {
                    item["arguments"] = self.arguments.into();
                }
                Some(item)
            }
            _ => {
                let content = json!([{"text": self.text, "refusal": self.refusal}]);
                Some(json!({"type": "message", "content": content}))
            }
        }
    }
}

#[derive(Deserialize)]
struct ResponseEvent {
    #[serde(rename = "type")]
    kind: String,
    output_index: Option<u64>,
    item_id: Option<String>,
    item: Option<Value>,
    /// A string in the events that are read here.
    delta: Option<Value>,
    response: Option<ResponseBody>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::WireFormat;
    use crate::samples::read_stream;
    use agentloop_api::failure::FailureKind;
    use agentloop_engine::message::{FinishReason, MessagePart};

    fn read(events: &[Value]) -> Result<ModelAnswer, CallFailure> {
        read_stream(WireFormat::OpenAiResponses, events)
    }

    fn added(index: u64, item: &Value) -> Value {
        json!({"type": "response.output_item.added", "output_index": index, "item": item})
    }

    fn done(index: u64, item: &Value) -> Value {
        json!({"type": "response.output_item.done", "output_index": index, "item": item})
    }

    fn delta(kind: &str, index: u64, delta: &str) -> Value {
        json!({"type": format!("response.{kind}.delta"), "output_index": index, "content_index": 0, "delta": delta})
    }

    fn completed() -> Value {
        let usage = json!({"input_tokens": 3, "output_tokens": 9, "total_tokens": 12});
        json!({"type": "response.completed", "response": {"status": "completed", "output": [], "usage": usage}})
    }

    fn cut(reason: &str) -> Value {
        let details = json!({"reason": reason});
        json!({"type": "response.incomplete", "response": {"status": "incomplete", "incomplete_details": details}})
    }

    #[test]
    fn text_reasoning_and_tool_calls_come_together_by_index() {
        let thought = json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"});
        let call = |arguments: &str| json!({"type": "function_call", "id": "fc_1", "call_id": "a", "name": "yield", "arguments": arguments});
        let message = |text: &str| json!({"type": "message", "content": [{"type": "output_text", "text": text}]});
        let answer = read(&[
            json!({"type": "response.created", "response": {"status": "in_progress", "output": [], "error": null}}),
            added(0, &json!({"type": "reasoning", "id": "rs_1", "summary": []})),
            delta("reasoning_summary_text", 0, "hm"),
            done(0, &thought),
            added(1, &json!({"type": "message", "content": []})),
            delta("output_text", 1, "hel"),
            added(2, &call("")),
            delta("output_text", 1, "lo"),
            delta("function_call_arguments", 2, "{\"sl"),
            json!({"type": "response.of_a_later_version", "output_index": 2, "delta": {"x": 1}}),
            delta("function_call_arguments", 2, "eep\":1}"),
            json!({"type": "response.function_call_arguments.done", "output_index": 2, "arguments": "{\"sleep\":1}"}),
            done(1, &message("hello")),
            done(2, &call("{\"sleep\":1}")),
            completed(),
        ])
        .unwrap();
        assert_eq!(
            (answer.text.as_deref(), answer.finish),
            (Some("hello"), FinishReason::ToolCalls)
        );
        assert_eq!(answer.tokens, Some(12));
        assert_eq!(answer.tool_calls.len(), 1);
        assert_eq!(answer.tool_calls[0].arguments, "{\"sleep\":1}");
        let parts = [MessagePart::Opaque(thought), MessagePart::Text(5), MessagePart::Call];
        assert_eq!(answer.reasoning.unwrap().parts, parts);
    }

    #[test]
    fn events_without_an_index_belong_to_the_item_that_they_name() {
        let call = |id: &str| json!({"type": "function_call", "id": id, "call_id": id, "name": "look"});
        let delta = |id: &str, delta: &str| json!({"type": "response.function_call_arguments.delta", "item_id": id, "delta": delta});
        let answer = read(&[
            json!({"type": "response.output_item.added", "item": call("a")}),
            added(1, &call("b")),
            delta("a", "{\"at\""),
            delta("b", "{}"),
            delta("a", ":1}"),
            completed(),
        ])
        .unwrap();
        let calls: Vec<_> = answer
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), call.arguments.as_str()))
            .collect();
        assert_eq!(calls, [("a", "{\"at\":1}"), ("b", "{}")]);
        let lost = json!({"type": "response.output_text.delta", "delta": "SECRET"});
        let failure = read(&[lost, completed()]).unwrap_err();
        assert_eq!(failure.kind, FailureKind::BadResponse);
        assert!(!failure.message.contains("SECRET"));
    }

    #[test]
    fn the_beginning_of_a_cut_answer_is_kept_without_its_reasoning() {
        let answer = read(&[
            added(0, &json!({"type": "reasoning", "id": "rs_1", "summary": []})),
            delta("output_text", 1, "hel"),
            added(
                2,
                &json!({"type": "function_call", "call_id": "a", "name": "look", "arguments": ""}),
            ),
            delta("function_call_arguments", 2, "{\"at"),
            cut("max_output_tokens"),
        ])
        .unwrap();
        assert_eq!(
            (answer.text.as_deref(), answer.finish),
            (Some("hel"), FinishReason::Length)
        );
        assert_eq!(answer.tool_calls[0].arguments, "{\"at");
        assert_eq!(answer.reasoning, None);
        assert_eq!(read(&[cut("content_filter")]).unwrap().finish, FinishReason::Refused);
        let refused = read(&[delta("refusal", 0, "no"), completed()]).unwrap();
        assert_eq!(refused.finish, FinishReason::Refused);
    }

    #[test]
    fn a_stream_of_nothing_but_the_whole_is_an_answer() {
        let mut end = completed();
        end["response"]["output"] =
            json!([{"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}]);
        assert_eq!(read(&[end]).unwrap().tool_calls.len(), 1);
    }

    #[test]
    fn a_stream_without_its_last_event_is_cut_wherever_it_ends() {
        let call = json!({"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"});
        let events = [
            added(0, &call),
            delta("function_call_arguments", 0, "{}"),
            done(0, &call),
            completed(),
        ];
        for end in 0..events.len() {
            assert_eq!(
                read(&events[..end]).unwrap_err().kind,
                FailureKind::Unreachable,
                "{end}"
            );
        }
        assert_eq!(read(&events).unwrap().tool_calls.len(), 1);
    }

    #[test]
    fn errors_and_garbage_within_the_stream_are_bad_responses_without_their_text() {
        for event in [
            "SECRET",
            "[]",
            "{}",
            r#"{"type":"error","code":"SECRET","message":"SECRET","param":null}"#,
            r#"{"type":"response.failed","response":{"status":"failed","error":{"message":"SECRET"}}}"#,
        ] {
            let failure = ResponseAggregate::default().push(event).unwrap_err();
            assert_eq!(failure.kind, FailureKind::BadResponse, "{event}");
            assert!(!failure.message.contains("SECRET"));
        }
    }

    #[test]
    fn an_endless_answer_is_refused_at_32_mib_and_not_before() {
        let mut aggregate = ResponseAggregate::default();
        let event = |length: usize| delta("output_text", 0, &"x".repeat(length)).to_string();
        let event = event(1024 * 1024 - event(0).len());
        assert_eq!(event.len(), 1024 * 1024);
        for _ in 0..32 {
            aggregate.push(&event).unwrap();
        }
        assert!(aggregate.push("{}").is_err());
    }

    proptest! {
        #[test]
        fn no_events_make_it_panic(events in proptest::collection::vec(".*", 0..8)) {
            let mut aggregate = ResponseAggregate::default();
            for event in events {
                let _ = aggregate.push(&event);
            }
        }

        #[test]
        fn no_order_of_indexes_makes_it_panic(
            pieces in proptest::collection::vec((any::<Option<u64>>(), 0..4_usize, ".{0,3}"), 0..300), id in "[ab]",
        ) {
            let mut events: Vec<Value> = pieces.iter().map(|(index, kind, text)| match kind {
                0 => json!({"type": "response.output_item.added", "output_index": index, "item_id": id, "item": {"type": "function_call", "name": text}}),
                1 => json!({"type": "response.output_item.done", "output_index": index, "item_id": id, "item": null}),
                2 => json!({"type": "response.output_text.delta", "output_index": index, "item_id": id, "delta": text}),
                _ => json!({"type": "response.function_call_arguments.delta", "output_index": index, "item_id": id, "delta": text}),
            }).collect();
            events.push(completed());
            prop_assert!(read(&events).unwrap().tool_calls.len() <= 128);
        }
    }
}
