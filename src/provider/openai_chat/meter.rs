//! Where an answer of OpenAI chat completions ends, and where its usage is.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::meter::{AnswerError, AnswerSummary, NonEmpty, StreamEnd, StreamProgress, model_name};
use crate::reported_error::ReportedError;

#[derive(Deserialize)]
struct ChatPayload {
    #[serde(default)]
    choices: Option<Vec<ChatChoice>>,
    #[serde(default)]
    usage: Option<Value>,
    #[serde(default)]
    model: Option<Value>,
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
    finish_reason: Option<IgnoredAny>,
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
    if progress.model.is_empty() {
        progress.model = model_name(chunk.model.as_ref());
    }
    let choices = chunk.choices.unwrap_or_default();
    let finishes = choices.iter().any(|choice| choice.finish_reason.is_some());
    let says = choices.iter().any(ChatChoice::has_content);
    progress.finish_if(finishes);
    progress.content |= says;
    if chunk.usage.is_some() {
        progress.usage = chunk.usage;
        progress.is_final = choices.is_empty() || finishes;
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
            ..
        } if !choices.is_empty() => Ok(AnswerSummary {
            model: model_name(model.as_ref()),
            usage,
            content: choices.iter().any(ChatChoice::has_content),
        }),
        ChatPayload { .. } => Err(AnswerError::Garbage),
    }
}
