//! Where an answer of OpenAI chat completions ends, and where its usage is.

use serde::Deserialize;
use serde_json::Value;

use crate::meter::{AnswerError, AnswerMetadata, AnswerSummary, NonEmpty, StreamEnd, StreamProgress, known_reason};
use crate::reported_error::ReportedError;

/// Why an answer ended.
const FINISH_REASONS: [&str; 5] = ["stop", "length", "tool_calls", "content_filter", "function_call"];

#[derive(Deserialize)]
struct ChatPayload {
    #[serde(default)]
    choices: Option<Vec<ChatChoice>>,
    #[serde(default)]
    usage: Option<Value>,
    #[serde(default)]
    model: Option<Value>,
    #[serde(default)]
    id: Option<Value>,
    #[serde(default)]
    error: Option<Value>,
    #[serde(default)]
    object: Option<Value>,
}

impl ChatPayload {
    /// The error in it. Some servers put its fields at the top level, in an object of the type `error`.
    fn reported_error(&mut self, data: &[u8]) -> Option<AnswerError> {
        let is_error = self.object.as_ref().is_some_and(|object| object == "error");
        let of_object = is_error.then(|| ReportedError::from_body(data));
        let error = self.error.take().map(ReportedError::from_value).or(of_object);
        error.map(AnswerError::ServerError)
    }
}

#[derive(Deserialize)]
struct ChatChoice {
    #[serde(default)]
    finish_reason: Option<Value>,
    #[serde(default)]
    delta: Option<OutputFields>,
    #[serde(default)]
    message: Option<OutputFields>,
}

/// All fields of a chat completion that hold output.
#[derive(Deserialize, Default)]
#[serde(default)]
struct OutputFields {
    content: NonEmpty,
    function_call: NonEmpty,
    reasoning: NonEmpty,
    reasoning_content: NonEmpty,
    refusal: NonEmpty,
    tool_calls: NonEmpty,
}

impl ChatChoice {
    fn finish_reason(&self) -> Option<&'static str> {
        let reason = self.finish_reason.as_ref()?;
        Some(known_reason(&FINISH_REASONS, reason))
    }

    fn has_content(&self) -> bool {
        let parts = [&self.delta, &self.message];
        parts.into_iter().flatten().any(|part| {
            let OutputFields {
                content,
                function_call,
                reasoning,
                reasoning_content,
                refusal,
                tool_calls,
            } = part;
            [
                content,
                function_call,
                reasoning,
                reasoning_content,
                refusal,
                tool_calls,
            ]
            .iter()
            .any(|field| field.0)
        })
    }
}

/// Reads the data of one event of a stream.
pub(crate) fn read_event(progress: &mut StreamProgress, data: &[u8]) -> Result<(), AnswerError> {
    if data == b"[DONE]" {
        progress.end = StreamEnd::Done;
        return Ok(());
    }
    let mut chunk: ChatPayload = serde_json::from_slice(data).map_err(|_| AnswerError::Garbage)?;
    if let Some(error) = chunk.reported_error(data) {
        return Err(error);
    }
    progress.metadata.complete(chunk.model.as_ref(), chunk.id.as_ref());
    let choices = chunk.choices.unwrap_or_default();
    let reason = choices.iter().find_map(ChatChoice::finish_reason);
    let says = choices.iter().any(ChatChoice::has_content);
    progress.finish(reason);
    progress.content |= says;
    if chunk.usage.is_some() {
        progress.usage = chunk.usage;
        progress.is_final = choices.is_empty() || reason.is_some();
        progress.is_stale = false;
    } else {
        progress.is_stale |= says;
    }
    Ok(())
}

/// Reads a whole answer.
pub(crate) fn read_body(body: &[u8]) -> Result<AnswerSummary, AnswerError> {
    let mut chunk: ChatPayload = serde_json::from_slice(body).map_err(|_| AnswerError::Garbage)?;
    if let Some(error) = chunk.reported_error(body) {
        return Err(error);
    }
    match chunk {
        ChatPayload {
            choices: Some(choices),
            usage,
            model,
            id,
            ..
        } if !choices.is_empty() => Ok(AnswerSummary {
            metadata: AnswerMetadata::new(
                model.as_ref(),
                id.as_ref(),
                choices.first().and_then(ChatChoice::finish_reason),
            ),
            usage,
            content: choices.iter().any(ChatChoice::has_content),
        }),
        ChatPayload { .. } => Err(AnswerError::Garbage),
    }
}
