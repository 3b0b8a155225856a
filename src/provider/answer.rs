//! What the answers of all formats have in common: limits, how they end, and the reasoning that goes back.

use std::collections::HashSet;

use serde_json::Value;

use agentloop_api::agent::ModelApi;
use agentloop_api::failure::{CallFailure, FailureKind};
use agentloop_engine::message::{FinishReason, MessagePart, ModelAnswer, ReasoningContent, ToolCall};

/// Maximum number of [`ToolCall`]s taken from one answer; further calls are dropped.
pub const MAX_TOOL_CALLS: usize = 128;
/// Maximum bytes of events taken from one stream.
pub const MAX_STREAM_BYTES: usize = 32 * 1024 * 1024;

/// A streamed answer that is being assembled.
pub trait AnswerAggregate: Send {
    /// Adds the data of one event. Returns true if it marks the end of the stream.
    fn push(&mut self, data: &str) -> Result<bool, CallFailure>;

    /// Takes the text that was added since the last call of this function: never reasoning, a refusal or a part of a
    /// [`ToolCall`]. For those who watch an answer arrive; [`Self::finish`] returns all of it in any case, and may put it
    /// together in another way.
    fn take_text(&mut self) -> String;

    /// Completes the answer. Fails if the stream ended without an end mark or a [`FinishReason`].
    fn finish(self: Box<Self>, done: bool) -> Result<ModelAnswer, CallFailure>;
}

/// The failure of a stream that ended without an end mark or a [`FinishReason`].
pub(super) fn cut_stream() -> CallFailure {
    CallFailure::new(FailureKind::Unreachable, "the stream ended in the middle of the answer")
}

/// Builds the answer from its parts, streamed or not.
pub(super) fn assemble(text: String, calls: Vec<ToolCall>, finish: Option<&str>, refused: bool) -> ModelAnswer {
    let finish = match finish {
        _ if refused => FinishReason::Refused,
        Some("content_filter") => FinishReason::Refused,
        Some("length") => FinishReason::Length,
        // Some servers report "stop" even though the answer has tool calls.
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

/// Replaces missing and repeated ids, so that each result matches one call.
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

/// Builds the reasoning to be sent back with an answer. The driver adds the name of the model.
pub(super) fn seal_reasoning(
    api: ModelApi,
    parts: Vec<MessagePart>,
    mut calls: Vec<Value>,
    calls_tools: bool,
) -> Option<ReasoningContent> {
    if calls.iter().all(Value::is_null) {
        calls.clear();
    }
    let has_reasoning = parts.iter().any(|part| matches!(part, MessagePart::Opaque(_))) || !calls.is_empty();
    (has_reasoning && calls_tools).then(|| ReasoningContent {
        api,
        model: String::new(),
        parts,
        calls,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::call;

    #[test]
    fn repeated_and_empty_ids_become_unique_without_reusing_a_specified_one() {
        let ids = with_unique_ids(vec![
            call("call_1", ""),
            call("", ""),
            call("call_1", ""),
            call("z", ""),
        ]);
        let ids: Vec<&str> = ids.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["call_1", "call_2", "call_3", "z"]);
    }
}
