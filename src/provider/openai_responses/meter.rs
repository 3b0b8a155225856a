//! Where an answer of OpenAI Responses ends, and where its usage is.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::meter::{AnswerError, AnswerMetadata, AnswerSummary, StreamEnd, StreamProgress};
use crate::reported_error::ReportedError;

#[derive(Deserialize)]
struct MeteredEvent {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    response: Option<MeteredBody>,
}

/// A response: a whole answer, or the part of an event that describes it.
#[derive(Deserialize, Default)]
struct MeteredBody {
    #[serde(default)]
    status: Option<String>,
    #[serde(default)]
    output: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    usage: Option<Value>,
    #[serde(default)]
    model: Option<Value>,
    #[serde(default)]
    id: Option<Value>,
    #[serde(default)]
    incomplete_details: Option<Value>,
    #[serde(default)]
    error: Option<Value>,
}

impl MeteredBody {
    /// Why the response ended. The API has no such field: these are the names of chat completions for the same.
    fn finish_reason(&self) -> Option<&'static str> {
        let details = self.incomplete_details.as_ref();
        let reason = details
            .and_then(|details| details.get("reason"))
            .and_then(Value::as_str);
        Some(match (self.status.as_deref()?, reason) {
            ("completed", _) => "stop",
            ("failed" | "cancelled", _) => "error",
            (_, Some("max_output_tokens")) => "length",
            (_, Some("content_filter")) => "content_filter",
            _ => "other",
        })
    }

    fn server_error(self) -> AnswerError {
        AnswerError::ServerError(self.error.map(ReportedError::from_value).unwrap_or_default())
    }
}

/// Reads the data of one event of a stream.
pub(crate) fn read_event(progress: &mut StreamProgress, data: &[u8]) -> Result<(), AnswerError> {
    let event: MeteredEvent = serde_json::from_slice(data).map_err(|_| AnswerError::Garbage)?;
    if let Some(response) = &event.response {
        progress
            .metadata
            .complete(response.model.as_ref(), response.id.as_ref());
    }
    match event.kind.as_str() {
        "error" => return Err(AnswerError::ServerError(ReportedError::from_body(data))),
        "response.failed" => {
            let mut response = event.response.unwrap_or_default();
            // A response that failed late may have been billed.
            progress.metadata.finish_reason = Some("error");
            progress.is_final = response.usage.is_some();
            progress.usage = response.usage.take();
            progress.end = StreamEnd::Done;
            return Err(response.server_error());
        }
        "response.completed" | "response.incomplete" => {
            let response = event.response.ok_or(AnswerError::Garbage)?;
            progress.metadata.finish_reason = response.finish_reason();
            progress.content |= response.output.is_some_and(|items| !items.is_empty());
            progress.is_final = response.usage.is_some();
            progress.usage = response.usage;
            progress.end = StreamEnd::Done;
        }
        // Deltas of text, reasoning and arguments, and items, which may come without.
        kind => {
            let is_delta = kind.rsplit('.').next() == Some("delta");
            progress.content |= is_delta || kind.starts_with("response.output_item.");
        }
    }
    Ok(())
}

/// Reads a whole answer.
pub(crate) fn read_body(body: &[u8]) -> Result<AnswerSummary, AnswerError> {
    let response: MeteredBody = serde_json::from_slice(body).map_err(|_| AnswerError::Garbage)?;
    if response.error.is_some() || matches!(response.status.as_deref(), Some("failed" | "cancelled")) {
        return Err(response.server_error());
    }
    let finish_reason = response.finish_reason();
    match (response.status.as_deref(), response.output) {
        (Some("queued" | "in_progress"), _) | (_, None) => Err(AnswerError::Garbage),
        (_, Some(items)) => Ok(AnswerSummary {
            metadata: AnswerMetadata::new(response.model.as_ref(), response.id.as_ref(), finish_reason),
            usage: response.usage,
            content: !items.is_empty(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::WireFormat;
    use crate::meter::StreamReader;

    const STREAM: &str = concat!(
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\",\"model\":\"m-1\",\"output\":[],\"usage\":null,\"error\":null}}\n\n",
        ": a comment\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"output_index\":0,\"delta\":\"é\"}\r\n\r\n",
        "event: response.output_item.done\ndata: {\"type\":\"response.output_item.done\",\"output_index\":0,\"item\":{}}\n\n",
        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"output\":[{}],\"usage\":{\"input_tokens\":1}}}\n\n",
    );

    fn reader() -> StreamReader {
        StreamReader::new(WireFormat::OpenAiResponses)
    }

    #[test]
    fn a_stream_is_the_same_however_it_is_cut_into_chunks() {
        for size in 1..STREAM.len() {
            let mut reader = reader();
            let mut passed = Vec::new();
            for chunk in STREAM.as_bytes().chunks(size) {
                passed.extend(reader.feed(chunk).unwrap());
            }
            assert_eq!(String::from_utf8(passed).unwrap(), STREAM);
            assert!(reader.is_done() && reader.has_content());
            assert_eq!(reader.usage(), Some(&json!({"input_tokens": 1})));
            assert_eq!(reader.metadata().model, "m-1");
        }
    }

    #[test]
    fn a_stream_without_its_last_event_has_no_usage() {
        let mut reader = reader();
        for event in STREAM.split_inclusive("\n\n").take(3) {
            reader.feed(event.as_bytes()).unwrap();
            assert_eq!((reader.usage(), reader.is_whole()), (None, false), "{event}");
        }
    }

    #[test]
    fn an_answer_that_was_cut_at_its_limit_is_whole_and_has_usage() {
        let mut reader = reader();
        let event = json!({"type": "response.incomplete", "response": {"status": "incomplete", "output": [], "usage": {"output_tokens": 9}}});
        reader.feed(format!("data: {event}\n\n").as_bytes()).unwrap();
        assert!(reader.is_done() && !reader.has_content());
        assert_eq!(reader.usage(), Some(&json!({"output_tokens": 9})));
    }

    #[test]
    fn a_response_that_failed_with_usage_was_processed() {
        for (usage, processed) in [(json!(null), false), (json!({"input_tokens": 1}), true)] {
            let mut reader = reader();
            let event = json!({"type": "response.failed", "response": {"status": "failed", "usage": usage}});
            assert!(reader.feed(format!("data: {event}\n").as_bytes()).is_err());
            assert_eq!(
                (reader.is_processed(), reader.usage().is_some()),
                (processed, processed)
            );
        }
    }

    #[test]
    fn garbage_and_reported_errors_are_distinguished() {
        let feed = |event: &str| reader().feed(format!("data: {event}\n").as_bytes()).unwrap_err();
        assert_eq!(feed("<html>"), AnswerError::Garbage);
        assert_eq!(feed("[DONE]"), AnswerError::Garbage);
        assert_eq!(feed(r#"{"choices":[]}"#), AnswerError::Garbage);
        assert_eq!(feed(r#"{"type":"response.completed"}"#), AnswerError::Garbage);
        let code = |error: AnswerError| match error {
            AnswerError::ServerError(error) => error.is_one_of(&["c"]),
            AnswerError::Garbage => panic!("garbage"),
        };
        assert!(code(feed(r#"{"type":"error","code":"c","message":"x","param":null}"#)));
        assert!(code(feed(r#"{"type":"error","error":{"type":"x","code":"c"}}"#)));
        assert!(code(feed(
            r#"{"type":"response.failed","response":{"status":"failed","error":{"code":"c"}}}"#
        )));
        assert!(!code(feed(r#"{"type":"error"}"#)) && !code(feed(r#"{"type":"response.failed"}"#)));
        let body = |body: &str| read_body(body.as_bytes());
        assert_eq!(body("<html>"), Err(AnswerError::Garbage));
        assert_eq!(body("{}"), Err(AnswerError::Garbage));
        assert_eq!(body(r#"{"choices":[{}]}"#), Err(AnswerError::Garbage));
        assert_eq!(body(r#"{"status":"queued","output":[]}"#), Err(AnswerError::Garbage));
        assert!(!code(body(r#"{"status":"failed","output":[]}"#).unwrap_err()));
        assert!(code(body(r#"{"error":{"code":"c"}}"#).unwrap_err()));
        let summary = body(r#"{"status":"completed","model":"m-1","error":null,"output":[{}],"usage":{"a":1}}"#);
        let expected = AnswerSummary {
            usage: Some(json!({"a": 1})),
            metadata: AnswerMetadata {
                model: "m-1".into(),
                id: String::new(),
                finish_reason: Some("stop"),
            },
            content: true,
        };
        assert_eq!(summary, Ok(expected));
    }
}
