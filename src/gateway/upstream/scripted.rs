//! Answers from the script, metered like those of a server.

use std::path::Path;

use axum::body::Bytes;
use jiff::Timestamp;
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{AnswerTail, EVENT_STREAM, JSON};
use crate::api::failure::{CallFailure, FailureKind};
use crate::gateway::failures::failure_from_status;
use crate::gateway::in_flight::{InFlightCall, SendStatus};
use crate::gateway::model_field::ModelField;
use crate::gateway::request::{MessageTraits, PromptPart, RequestError};
use crate::ledger::bound::CallBill;
use crate::provider::WireFormat;
use crate::provider::meter::StreamReader;
use crate::provider::scripted::wire::{self, ScriptedCompletion};
use crate::provider::scripted::{ModelScript, ScriptedFailure, ScriptedReply};

/// The format of a [`ModelScript`].
const FORMAT: WireFormat = WireFormat::OpenAiChat;

pub(super) fn read(field: ModelField, path: &Path) -> Result<ModelScript, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{field}.scripted: {} cannot be read: {error}", path.display()))?;
    ModelScript::parse(&text).map_err(|error| format!("{field}.scripted: {error}"))
}

/// A request to the [`ModelScript`].
pub struct ScriptedRequest {
    messages: Value,
    /// The messages as the worker wrote them.
    raw: Vec<Box<RawValue>>,
    stream: bool,
    /// Turns of the [`ModelScript`] used before this one.
    taken: u64,
    bill: CallBill,
}

impl ScriptedRequest {
    pub(super) fn parts(&self) -> Vec<PromptPart<'_>> {
        let bytes = self.raw.iter().map(|message| message.get().as_bytes());
        bytes
            .map(|bytes| PromptPart {
                bytes,
                is_message: true,
                traits: MessageTraits::default(),
            })
            .collect()
    }

    pub(super) fn is_streamed(&self) -> bool {
        self.stream
    }

    /// The usage that the answer will report, as the [`ModelScript`] defines it.
    pub(super) fn bill(&self) -> CallBill {
        self.bill
    }
}

pub(super) fn prepare(script: &ModelScript, taken: u64, body: &[u8]) -> Result<ScriptedRequest, RequestError> {
    #[derive(Deserialize)]
    struct ChatRequestBody {
        messages: Vec<Box<RawValue>>,
        #[serde(default)]
        stream: bool,
    }
    let unreadable = |_| RequestError::NotAnObject;
    let ChatRequestBody { messages: raw, stream } = serde_json::from_slice(body).map_err(unreadable)?;
    let values = raw.iter().map(|message| serde_json::from_str::<Value>(message.get()));
    let messages: Value = values.collect::<Result<_, _>>().map_err(unreadable)?;
    let bill = match script.turn(taken).map(|turn| &turn.reply) {
        Some(ScriptedReply::Answer(answer)) => {
            let used = wire::used(answer, &messages);
            let count = |tokens| i64::try_from(tokens).unwrap_or(i64::MAX);
            CallBill {
                input: count(used.input_tokens),
                cache_read: count(used.cache_read_tokens),
                output: count(used.output_tokens),
                reasoning: count(used.reasoning_tokens),
                ..CallBill::default()
            }
        }
        Some(ScriptedReply::Fail(_)) | None => CallBill::default(),
    };
    Ok(ScriptedRequest {
        messages,
        raw,
        stream,
        taken,
        bill,
    })
}

pub(super) async fn run(
    (script, field): (&ModelScript, ModelField),
    request: &ScriptedRequest,
    flight: &InFlightCall,
    now: Timestamp,
) -> Result<AnswerTail, CallFailure> {
    let taken = request.taken;
    flight.note_sent(SendStatus::Yes);
    let Some(turn) = script.turn(taken) else {
        flight.note_sent(SendStatus::Refused);
        return Err(CallFailure::new(
            FailureKind::BadResponse,
            "the script has ended (atEnd: Fail); add turns, or set another atEnd",
        ));
    };
    tokio::time::sleep(turn.delay).await;
    let answer = match &turn.reply {
        ScriptedReply::Answer(answer) => answer,
        ScriptedReply::Fail(fail) => {
            flight.note_sent(SendStatus::Refused);
            return Err(failed(field, *fail, now));
        }
    };
    let completion = ScriptedCompletion {
        answer,
        taken,
        created: now.as_second(),
        messages: &request.messages,
    };
    let unreadable = |_| CallFailure::new(FailureKind::BadResponse, "the script's answer cannot be parsed");
    if !request.stream {
        let body = completion.body();
        let parsed = FORMAT.read_body(body.as_bytes()).map_err(unreadable)?;
        flight.note_bill(bill(parsed.usage.as_ref()));
        flight.note_answered(&parsed.metadata);
        return Ok(AnswerTail {
            content_type: JSON,
            rest: body.into(),
        });
    }
    let mut reader = StreamReader::new(FORMAT);
    for event in completion.events() {
        let bytes = Bytes::from(reader.feed(event.as_bytes()).map_err(unreadable)?);
        if reader.is_done() {
            flight.note_bill(bill(reader.usage()));
            flight.note_answered(reader.metadata());
            return Ok(AnswerTail {
                content_type: EVENT_STREAM,
                rest: bytes,
            });
        }
        flight.push(EVENT_STREAM, bytes);
    }
    Err(CallFailure::new(
        FailureKind::BadResponse,
        "the script's answer is incomplete",
    ))
}

/// The usage of an answer. A [`ModelScript`] may report none at all.
fn bill(usage: Option<&Value>) -> Option<(CallBill, String)> {
    Some((FORMAT.bill(usage?)?, usage?.to_string()))
}

/// The [`CallFailure`] for which an answer of a server with this status would be taken.
fn failed(field: ModelField, fail: ScriptedFailure, now: Timestamp) -> CallFailure {
    let mut headers = HeaderMap::new();
    if let Some(seconds) = fail.retry_after_seconds {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    let status = StatusCode::from_u16(fail.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut failure = failure_from_status(field, (status, &headers), b"", now);
    failure.message.push_str(" (set by the script)");
    failure
}
