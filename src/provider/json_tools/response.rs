//! Answers that are one JSON object with text and tool calls.

use serde::Deserialize;
use serde_json::Value;

use crate::answer::{AnswerAggregate, MAX_TOOL_CALLS};
use crate::openai_chat::stream::CompletionAggregate;
use agentloop_api::failure::CallFailure;
use agentloop_engine::message::{FinishReason, ModelAnswer, ToolCall};

/// A chat completion with [`ToolCall`]s in its text.
#[derive(Default)]
pub(crate) struct ObjectAggregate(CompletionAggregate);

impl AnswerAggregate for ObjectAggregate {
    fn push(&mut self, data: &str) -> Result<bool, CallFailure> {
        self.0.push(data)
    }

    /// Nothing: what arrives is JSON, whose text is known only at its end.
    fn take_text(&mut self) -> String {
        String::new()
    }

    fn finish(self: Box<Self>, done: bool) -> Result<ModelAnswer, CallFailure> {
        Box::new(self.0).finish(done).map(read)
    }
}

/// Parses a complete answer. Text that is not such an object stays the model's text, as with a server that ignores the
/// schema. A truncated object calls no tools.
#[must_use]
pub fn read(answer: ModelAnswer) -> ModelAnswer {
    let object = answer.text.as_deref().and_then(object);
    let (Some(parsed), FinishReason::Stop) = (object, answer.finish) else {
        return answer;
    };
    let calls: Vec<ToolCall> = parsed
        .tool_calls
        .into_iter()
        .take(MAX_TOOL_CALLS)
        .enumerate()
        .map(|(place, call)| ToolCall {
            id: format!("call_{}", place + 1),
            name: call.name,
            arguments: arguments(&call.arguments),
        })
        .collect();
    ModelAnswer {
        text: Some(parsed.text.unwrap_or_default()).filter(|text| !text.is_empty()),
        finish: if calls.is_empty() {
            FinishReason::Stop
        } else {
            FinishReason::ToolCalls
        },
        tool_calls: calls,
        ..answer
    }
}

/// Parses the object, with or without a code fence: models of servers that ignore the schema tend to add one.
fn object(text: &str) -> Option<StructuredAnswer> {
    let text = text.trim();
    let inner = text
        .strip_prefix("```json")
        .or_else(|| text.strip_prefix("```"))
        .and_then(|rest| rest.strip_suffix("```"));
    serde_json::from_str(inner.unwrap_or(text).trim()).ok()
}

/// Returns arguments as text, of whatever type; the engine's admission reports what is wrong with them.
fn arguments(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

#[derive(Deserialize)]
struct StructuredAnswer {
    text: Option<String>,
    #[serde(default)]
    tool_calls: Vec<StructuredCall>,
}

#[derive(Deserialize)]
struct StructuredCall {
    name: String,
    #[serde(default)]
    arguments: Value,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn stopped(text: &str) -> ModelAnswer {
        ModelAnswer {
            text: Some(text.into()),
            tokens: Some(7),
            ..ModelAnswer::default()
        }
    }

    #[test]
    fn an_object_is_read_as_text_and_calls_also_within_a_fence() {
        let object = r#"{"text": "hm", "tool_calls": [{"name": "look", "arguments": {"at": 1}}, {"name": "yield"}]}"#;
        for text in [
            object.to_owned(),
            format!("```json\n{object}\n```"),
            format!("```{object}```"),
        ] {
            let answer = read(stopped(&text));
            assert_eq!(answer.text.as_deref(), Some("hm"));
            let calls: Vec<_> = answer
                .tool_calls
                .iter()
                .map(|call| (call.id.as_str(), call.name.as_str(), call.arguments.as_str()))
                .collect();
            assert_eq!(calls, [("call_1", "look", r#"{"at":1}"#), ("call_2", "yield", "")]);
            assert_eq!((answer.finish, answer.tokens), (FinishReason::ToolCalls, Some(7)));
        }
        let quiet = read(stopped(r#"{"text": "all is well", "tool_calls": []}"#));
        assert_eq!(
            (quiet.text.as_deref(), quiet.finish),
            (Some("all is well"), FinishReason::Stop)
        );
    }

    #[test]
    fn an_answer_that_is_not_such_an_object_stays_text_and_calls_no_tool() {
        for text in [
            "plain words",
            "{\"text\": \"cut",
            "[1]",
            "{\"tool_calls\": 3}",
            "{\"tool_calls\": [{\"name\": 3}]}",
        ] {
            assert_eq!(read(stopped(text)), stopped(text));
        }
        let cut = ModelAnswer {
            finish: FinishReason::Length,
            ..stopped(r#"{"text": "", "tool_calls": [{"name": "look"}]}"#)
        };
        assert_eq!(read(cut.clone()), cut);
        let refused = ModelAnswer {
            finish: FinishReason::Refused,
            ..stopped("no")
        };
        assert_eq!(read(refused.clone()), refused);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_and_calls_are_bounded(text in ".*", calls in 0_usize..300) {
            let _ = read(stopped(&text));
            let many = json!({"text": text, "tool_calls": vec![json!({"name": text, "arguments": text}); calls]});
            prop_assert_eq!(read(stopped(&many.to_string())).tool_calls.len(), calls.min(MAX_TOOL_CALLS));
        }
    }
}
