//! Where an answer of Anthropic messages ends, and where its usage is.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use crate::meter::{AnswerError, AnswerMetadata, AnswerSummary, StreamEnd, StreamProgress, known_reason};
use crate::reported_error::ReportedError;

/// Why an answer ended.
const STOP_REASONS: [&str; 7] = [
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "refusal",
    "model_context_window_exceeded",
];

/// An event of a streamed Anthropic message, or a whole message.
#[derive(Deserialize)]
struct MessagesPayload {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    message: Option<MessageHead>,
    #[serde(default)]
    delta: Option<MessageDelta>,
    #[serde(default)]
    usage: Option<Map<String, Value>>,
    #[serde(default)]
    content: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    model: Option<Value>,
    #[serde(default)]
    id: Option<Value>,
    #[serde(default)]
    stop_reason: Option<Value>,
    #[serde(default)]
    error: Option<Value>,
}

impl MessagesPayload {
    fn server_error(self) -> AnswerError {
        AnswerError::ServerError(self.error.map(ReportedError::from_value).unwrap_or_default())
    }
}

#[derive(Deserialize)]
struct MessageHead {
    #[serde(default)]
    model: Option<Value>,
    #[serde(default)]
    id: Option<Value>,
    #[serde(default)]
    usage: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct MessageDelta {
    #[serde(default)]
    stop_reason: Option<Value>,
}

fn stop_reason(reason: Option<&Value>) -> Option<&'static str> {
    reason.map(|reason| known_reason(&STOP_REASONS, reason))
}

/// Reads the data of one event of a stream.
pub(crate) fn read_event(progress: &mut StreamProgress, data: &[u8]) -> Result<(), AnswerError> {
    let event: MessagesPayload = serde_json::from_slice(data).map_err(|_| AnswerError::Garbage)?;
    match event.kind.as_str() {
        "error" => return Err(event.server_error()),
        "message_start" => {
            if let Some(head) = event.message {
                progress.metadata.complete(head.model.as_ref(), head.id.as_ref());
                progress.add_usage(head.usage);
            }
        }
        "content_block_delta" => {
            progress.content = true;
            progress.is_stale |= progress.is_final;
        }
        "message_delta" => {
            // `message_start` counts output that does not exist yet: only this event's count covers the whole
            // answer.
            let counts = event.usage.as_ref().and_then(|usage| usage.get("output_tokens"));
            let counts = counts.is_some_and(|count| !count.is_null());
            progress.add_usage(event.usage);
            progress.finish(event.delta.and_then(|delta| stop_reason(delta.stop_reason.as_ref())));
            progress.is_final |= counts;
            progress.is_stale &= !counts;
        }
        "message_stop" => progress.end = StreamEnd::Done,
        // Content blocks, pings, and events of later API versions.
        _ => {}
    }
    Ok(())
}

/// Reads a whole answer.
pub(crate) fn read_body(body: &[u8]) -> Result<AnswerSummary, AnswerError> {
    let message: MessagesPayload = serde_json::from_slice(body).map_err(|_| AnswerError::Garbage)?;
    if message.kind == "error" {
        return Err(message.server_error());
    }
    match (message.kind.as_str(), message.content) {
        ("message", Some(blocks)) => Ok(AnswerSummary {
            metadata: AnswerMetadata::new(
                message.model.as_ref(),
                message.id.as_ref(),
                stop_reason(message.stop_reason.as_ref()),
            ),
            usage: message.usage.map(Value::Object),
            content: !blocks.is_empty(),
        }),
        _ => Err(AnswerError::Garbage),
    }
}
