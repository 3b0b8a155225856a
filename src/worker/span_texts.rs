//! Texts in the spans of a loop, if the operator asks for them: the messages of a turn in its root, and arguments and results in
//! the spans of tool runs.
//!
//! They are those that the journal has committed, so a restarted worker adds the same ones. A text is in one span: a model call
//! sends all messages again, so its span has none.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::journal::{JournalLine, call_id};
use crate::engine::message::{self, Message};
use crate::engine::tool::ToolRunId;
use crate::engine::{RecordKind, is_deferred_result};
use crate::otlp::{ContentAttribute, MAX_CONTENT, Span};
use crate::support::text::first_bytes;

/// Spans of runs that wait for their result at most.
const MAX_WAITING: usize = 64;
/// Texts are not cut below this length, so that names within the structure stay whole.
const MIN_TEXT: usize = 64;
/// The end of a text that is cut.
const CUT: &str = "… [cut]";

/// A turn, by its member and its number.
type TurnKey = (u16, i64);

/// Adds texts to spans that have ended.
#[derive(Default)]
pub(super) struct SpanTexts {
    /// Those that have no texts yet, in order. A result joins the messages after those of the calls before it.
    waiting: Vec<(SpanPlace, Span)>,
}

/// What a span is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpanPlace {
    Turn(TurnKey),
    Run(ToolRunId),
    /// It has no texts, or they cannot come any more.
    Other,
}

impl SpanTexts {
    /// Takes a span that ended with this line.
    pub(super) fn take(&mut self, line: &JournalLine, span: Span) {
        let turn = (line.member, line.turn);
        let run = line.run.as_deref().and_then(|run| run.parse::<ToolRunId>().ok());
        let place = match (line.kind, run) {
            _ if span.parent_span_id.is_empty() => SpanPlace::Turn(turn),
            (RecordKind::ToolOutcome, Some(run)) if !run.is_refresh() => SpanPlace::Run(run),
            _ => SpanPlace::Other,
        };
        if matches!(place, SpanPlace::Run(_)) {
            // It was repeated: the same span, with its last outcome.
            self.waiting.retain(|(known, _)| *known != place);
        }
        self.waiting.push((place, span));
    }

    /// Returns the spans that are complete, the first `room` of them with their texts. `messages` reads those of a turn.
    pub(super) fn complete(&mut self, room: usize, mut messages: impl FnMut(TurnKey) -> Vec<Message>) -> Vec<Span> {
        let waiting = std::mem::take(&mut self.waiting);
        let excess = waiting.len().saturating_sub(MAX_WAITING);
        let ended = waiting.iter().filter_map(|(place, _)| match place {
            SpanPlace::Turn(turn) => Some(*turn),
            SpanPlace::Run(_) | SpanPlace::Other => None,
        });
        let ended: BTreeSet<TurnKey> = ended.collect();
        let mut read = BTreeMap::new();
        let mut complete = Vec::new();
        for (number, (place, mut span)) in waiting.into_iter().enumerate() {
            match place {
                _ if complete.len() >= room => {}
                SpanPlace::Turn(turn) => {
                    add_messages(&mut span, read.entry(turn).or_insert_with(|| messages(turn)));
                }
                SpanPlace::Run(run) => {
                    let turn = (run.member, run.turn);
                    let texts = RunTexts::find(run, read.entry(turn).or_insert_with(|| messages(turn)));
                    if texts.lacks_result() && number >= excess && !ended.contains(&turn) {
                        self.waiting.push((place, span));
                        continue;
                    }
                    texts.add_to(&mut span);
                }
                SpanPlace::Other => {}
            }
            complete.push(span);
        }
        complete
    }
}

/// The texts of a tool run.
#[derive(Default)]
struct RunTexts<'a> {
    arguments: Option<&'a str>,
    result: Option<&'a str>,
}

impl<'a> RunTexts<'a> {
    fn find(run: ToolRunId, messages: &'a [Message]) -> Self {
        let wanted = call_id(run);
        let mut found = Self::default();
        for message in messages {
            match message {
                Message::Assistant { tool_calls, .. } => {
                    let call = tool_calls.iter().find(|call| call.id == wanted);
                    found.arguments = call.map(|call| call.arguments.as_str()).or(found.arguments);
                }
                Message::Tool { id, text, .. } if *id == wanted => found.result = Some(text),
                Message::Tool { .. } | Message::User { .. } | Message::System { .. } => {}
            }
        }
        found
    }

    /// Without the call, which the journal may no longer have, none is expected.
    fn lacks_result(&self) -> bool {
        self.arguments.is_some() && self.result.is_none()
    }

    fn add_to(&self, span: &mut Span) {
        if let Some(arguments) = self.arguments {
            ContentAttribute::ToolArguments.add_to(span, arguments_text(arguments));
        }
        // That of a deferred call says that it waits. Its own result is in the input of the turn that is told.
        if let Some(result) = self.result.filter(|result| !is_deferred_result(result)) {
            ContentAttribute::ToolResult.add_to(span, cut(result, MAX_CONTENT));
        }
    }
}

fn add_messages(span: &mut Span, messages: &[Message]) {
    let (mut input, mut output) = (Vec::new(), Vec::new());
    for message in messages {
        match message {
            Message::User { text } => input.push(json!({"role": "user", "parts": [text_part(text)]})),
            Message::Assistant { text, tool_calls, .. } => {
                let text = text.as_deref().filter(|text| !text.is_empty()).map(text_part);
                let calls = tool_calls.iter().map(|call| {
                    let arguments = arguments_value(&call.arguments);
                    json!({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments})
                });
                let parts: Vec<Value> = text.into_iter().chain(calls).collect();
                let reason = if tool_calls.is_empty() { "stop" } else { "tool_call" };
                output.push(json!({"role": "assistant", "parts": parts, "finish_reason": reason}));
            }
            // In the span of its run.
            Message::Tool { .. } | Message::System { .. } => {}
        }
    }
    for (attribute, messages) in [
        (ContentAttribute::InputMessages, input),
        (ContentAttribute::OutputMessages, output),
    ] {
        if !messages.is_empty() {
            attribute.add_to(span, messages_text(messages));
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "content": text})
}

/// As the tool gets them, or the text that the model wrote if that is no object.
fn arguments_value(text: &str) -> Value {
    message::arguments(text).map_or_else(|| text.into(), Value::Object)
}

fn arguments_text(text: &str) -> String {
    let whole = bounded(&arguments_value(text));
    // Too many fields: the beginning, as a text.
    let whole = whole.or_else(|| bounded(&Value::from(text)));
    whole.unwrap_or_default()
}

fn messages_text(messages: Vec<Value>) -> String {
    let all = Value::Array(messages);
    bounded(&all).unwrap_or_else(|| newest(&all))
}

/// The newest messages that fit, shortened, after one that says how many are left out.
fn newest(messages: &Value) -> String {
    let messages = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut note = messages.first().cloned().unwrap_or_default();
    let mut left = messages.len();
    note["parts"] = json!([text_part(&format!("[{left} older messages are left out]"))]);
    let mut bytes = note.to_string().len() + "[]".len();
    let mut kept = Vec::new();
    for message in messages.iter().rev() {
        let message = with_texts_of(message, MIN_TEXT);
        bytes += message.to_string().len() + ",".len();
        if bytes > MAX_CONTENT {
            break;
        }
        left -= 1;
        kept.push(message);
    }
    note["parts"] = json!([text_part(&format!("[{left} older messages are left out]"))]);
    kept.push(note);
    kept.reverse();
    Value::Array(kept).to_string()
}

/// The JSON of a value, with its texts as long as the bound of an attribute allows. `None`: it is too long without them.
fn bounded(value: &Value) -> Option<String> {
    let whole = value.to_string();
    if whole.len() <= MAX_CONTENT {
        return Some(whole);
    }
    let cut_to = |max: usize| Some(with_texts_of(value, max).to_string()).filter(|text| text.len() <= MAX_CONTENT);
    let mut longest = cut_to(MIN_TEXT)?;
    let (mut fits, mut exceeds) = (MIN_TEXT, MAX_CONTENT);
    while exceeds - fits > 1 {
        let middle = usize::midpoint(fits, exceeds);
        match cut_to(middle) {
            Some(text) => (longest, fits) = (text, middle),
            None => exceeds = middle,
        }
    }
    Some(longest)
}

/// The value with each text in it cut to this many bytes.
fn with_texts_of(value: &Value, max: usize) -> Value {
    match value {
        Value::String(text) => cut(text, max).into(),
        Value::Array(values) => values.iter().map(|value| with_texts_of(value, max)).collect(),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(name, value)| (name.clone(), with_texts_of(value, max)));
            Value::Object(fields.collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// A text of at most this many bytes, with a mark at its end if it is cut.
fn cut(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    format!("{}{CUT}", first_bytes(text, max.saturating_sub(CUT.len())))
}

#[cfg(test)]
#[path = "span_texts_tests.rs"]
mod tests;
