//! Parses an answer as it passes through: where it ends, its usage, and whether it is a valid answer.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::WireFormat;
use super::reported_error::ReportedError;

/// Longest name of a model, in characters.
const MAX_NAME: usize = 256;
/// Longest id of an answer.
const MAX_ID: usize = 128;
/// The reason for which an answer ended that is not one of its API.
const OTHER_REASON: &str = "other";

/// Why bytes are not an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerError {
    /// Not in this [`WireFormat`].
    Garbage,
    /// The server reported an error within its answer.
    ServerError(ReportedError),
}

/// What an answer says about itself. Nothing of its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerMetadata {
    /// The model that it names; empty if none.
    pub model: String,
    /// Its id; empty if it has none that looks like one.
    pub id: String,
    /// Why it ended, by the names of its API; `other` for one that is not known.
    pub finish_reason: Option<&'static str>,
}

/// Summary of a complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerSummary {
    pub usage: Option<Value>,
    pub metadata: AnswerMetadata,
    /// Whether it has any content: text, reasoning, or tool calls.
    pub content: bool,
}

/// Parses a streamed answer line by line as it arrives.
pub struct StreamReader {
    format: WireFormat,
    tail: Vec<u8>,
    progress: StreamProgress,
}

/// What is known of a streamed answer so far.
#[derive(Default)]
pub(super) struct StreamProgress {
    pub(super) usage: Option<Value>,
    pub(super) metadata: AnswerMetadata,
    /// The usage came in the place where servers report that of the whole answer.
    pub(super) is_final: bool,
    /// Content came after the usage, which therefore does not include it.
    pub(super) is_stale: bool,
    pub(super) content: bool,
    pub(super) end: StreamEnd,
}

/// Progress towards the end of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StreamEnd {
    #[default]
    NotYet,
    /// A finish reason came; the usage may follow.
    Finished,
    /// The end mark came; nothing after it matters.
    Done,
}

/// Whether a value is present and not empty. Its content is discarded.
#[derive(Clone, Copy, Default)]
pub(super) struct NonEmpty(pub(super) bool);

impl<'de> Deserialize<'de> for NonEmpty {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NonEmptyVisitor;
        impl<'de> Visitor<'de> for NonEmptyVisitor {
            type Value = NonEmpty;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("any value")
            }

            fn visit_bool<E>(self, _: bool) -> Result<NonEmpty, E> {
                Ok(NonEmpty(true))
            }

            fn visit_i64<E>(self, _: i64) -> Result<NonEmpty, E> {
                Ok(NonEmpty(true))
            }

            fn visit_u64<E>(self, _: u64) -> Result<NonEmpty, E> {
                Ok(NonEmpty(true))
            }

            fn visit_f64<E>(self, _: f64) -> Result<NonEmpty, E> {
                Ok(NonEmpty(true))
            }

            fn visit_str<E>(self, text: &str) -> Result<NonEmpty, E> {
                Ok(NonEmpty(!text.is_empty()))
            }

            fn visit_unit<E>(self) -> Result<NonEmpty, E> {
                Ok(NonEmpty(false))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<NonEmpty, A::Error> {
                let mut filled = false;
                while items.next_element::<IgnoredAny>()?.is_some() {
                    filled = true;
                }
                Ok(NonEmpty(filled))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<NonEmpty, A::Error> {
                let mut filled = false;
                while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    filled = true;
                }
                Ok(NonEmpty(filled))
            }
        }
        deserializer.deserialize_any(NonEmptyVisitor)
    }
}

impl StreamReader {
    #[must_use]
    pub fn new(format: WireFormat) -> Self {
        Self {
            format,
            tail: Vec::new(),
            progress: StreamProgress::default(),
        }
    }

    /// Takes the next bytes and returns the complete lines that may be passed on. An incomplete line is held back, so
    /// that a stream that is cut never ends in the middle of an event.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<u8>, AnswerError> {
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.tail.extend_from_slice(piece);
            if self.is_done() || !piece.ends_with(b"\n") {
                continue;
            }
            let line = std::mem::take(&mut self.tail);
            self.read_line(&line)?;
            lines.extend_from_slice(&line);
            if self.is_done() {
                // The blank line that ends the event may come late or never.
                lines.push(b'\n');
            }
        }
        Ok(lines)
    }

    /// Whether the end mark `[DONE]` or `message_stop` came: nothing after it matters.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.progress.end == StreamEnd::Done
    }

    /// Whether the answer is complete: it has its end mark or a finish reason.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.progress.end > StreamEnd::NotYet
    }

    /// The usage of the whole answer. Interim counts are less than the bill, so the usage is unknown if the stream is
    /// cut after them, or if content follows without a later usage report.
    #[must_use]
    pub fn usage(&self) -> Option<&Value> {
        let progress = &self.progress;
        let is_whole = if self.format.has_interim_totals() {
            progress.is_final || self.is_whole()
        } else {
            progress.is_final && self.is_whole()
        };
        progress.usage.as_ref().filter(|_| is_whole && !progress.is_stale)
    }

    /// What the answer says about itself so far.
    #[must_use]
    pub fn metadata(&self) -> &AnswerMetadata {
        &self.progress.metadata
    }

    /// Whether content or a count of tokens came, so that the request was processed at least in part.
    #[must_use]
    pub fn is_processed(&self) -> bool {
        self.progress.content || self.progress.usage.is_some()
    }

    #[must_use]
    pub fn has_content(&self) -> bool {
        self.progress.content
    }

    fn read_line(&mut self, line: &[u8]) -> Result<(), AnswerError> {
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(());
        };
        self.format.read_event(&mut self.progress, data.trim_ascii())
    }
}

impl AnswerMetadata {
    pub(super) fn new(model: Option<&Value>, id: Option<&Value>, finish_reason: Option<&'static str>) -> Self {
        Self {
            model: model_name(model),
            id: answer_id(id),
            finish_reason,
        }
    }

    /// Takes the names that are not known yet: some servers send empty ones first.
    pub(super) fn complete(&mut self, model: Option<&Value>, id: Option<&Value>) {
        if self.model.is_empty() {
            self.model = model_name(model);
        }
        if self.id.is_empty() {
            self.id = answer_id(id);
        }
    }
}

impl StreamProgress {
    /// Takes the reason for which the answer ended, if there is one.
    pub(super) fn finish(&mut self, reason: Option<&'static str>) {
        if reason.is_some() {
            self.metadata.finish_reason = reason;
            self.end = self.end.max(StreamEnd::Finished);
        }
    }

    /// Merges a usage report. Counts are totals, so later values replace earlier ones.
    pub(super) fn add_usage(&mut self, usage: Option<Map<String, Value>>) {
        let Some(usage) = usage else { return };
        let known = self.usage.get_or_insert_with(|| Map::new().into());
        for (name, value) in usage.into_iter().filter(|(_, value)| !value.is_null()) {
            known[name] = value;
        }
    }
}

/// The name of a model, truncated to [`MAX_NAME`].
fn model_name(model: Option<&Value>) -> String {
    let name = model.and_then(Value::as_str).unwrap_or_default();
    name.chars().take(MAX_NAME).collect()
}

/// The id of an answer. Empty if it is too long or has other characters than ids have: it may be a text.
fn answer_id(id: Option<&Value>) -> String {
    let is_of_id = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    let id = id.and_then(Value::as_str);
    let id = id.filter(|id| id.len() <= MAX_ID && id.bytes().all(is_of_id));
    id.unwrap_or_default().to_owned()
}

/// One of the reasons of an API, never a text of the server.
pub(super) fn known_reason(known: &[&'static str], reason: &Value) -> &'static str {
    let found = known.iter().copied().find(|known| reason == known);
    found.unwrap_or(OTHER_REASON)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// An answer without content.
    const SILENT: AnswerSummary = AnswerSummary {
        usage: None,
        metadata: AnswerMetadata {
            model: String::new(),
            id: String::new(),
            finish_reason: None,
        },
        content: false,
    };

    const STREAM: &str = concat!(
        ": a comment\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"é\"},\"finish_reason\":null}],\"usage\":null}\r\n\r\n",
        "data:{\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n",
        "data: [DONE]\n\n",
    );

    #[test]
    fn a_stream_is_the_same_however_it_is_cut_into_chunks() {
        for size in 1..STREAM.len() {
            let mut reader = StreamReader::new(WireFormat::OpenAiChat);
            let mut passed = Vec::new();
            for chunk in STREAM.as_bytes().chunks(size) {
                passed.extend(reader.feed(chunk).unwrap());
            }
            assert_eq!(String::from_utf8(passed).unwrap(), STREAM);
            assert!(reader.is_done());
            assert_eq!(reader.usage(), Some(&json!({"prompt_tokens": 1})));
        }
    }

    #[test]
    fn half_a_line_waits_for_its_rest() {
        let mut reader = StreamReader::new(WireFormat::OpenAiChat);
        assert_eq!(reader.feed(b"data: {\"cho").unwrap(), b"");
        assert_eq!(
            reader.feed(b"ices\":[]}\ndata: {").unwrap(),
            b"data: {\"choices\":[]}\n"
        );
        assert!(!reader.is_whole());
    }

    #[test]
    fn nothing_after_the_end_is_passed_on() {
        let mut reader = StreamReader::new(WireFormat::OpenAiChat);
        assert_eq!(reader.feed(b"data: [DONE]\nmore\n").unwrap(), b"data: [DONE]\n\n");
        assert_eq!(reader.feed(b"\n\nmore\n").unwrap(), b"");
    }

    #[test]
    fn a_finish_reason_makes_an_answer_whole_without_the_end_mark() {
        let mut reader = StreamReader::new(WireFormat::OpenAiChat);
        reader
            .feed(b"data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n")
            .unwrap();
        assert!(reader.is_whole() && !reader.is_done());
    }

    #[test]
    fn garbage_and_reported_errors_are_distinguished() {
        let feed = |line: &[u8]| StreamReader::new(WireFormat::OpenAiChat).feed(line).unwrap_err();
        assert_eq!(feed(b"data: <html>\n"), AnswerError::Garbage);
        let reported = |line: &[u8], code: &str| match feed(line) {
            AnswerError::ServerError(error) => error.is_one_of(&[code]),
            AnswerError::Garbage => false,
        };
        assert!(reported(b"data: {\"error\":{\"code\":\"c\"}}\n", "c"));
        assert!(reported(
            b"data: {\"object\":\"error\",\"type\":\"c\",\"code\":400}\n",
            "c"
        ));
        assert_eq!(WireFormat::OpenAiChat.read_body(b"<html>"), Err(AnswerError::Garbage));
        assert_eq!(WireFormat::OpenAiChat.read_body(b"{}"), Err(AnswerError::Garbage));
        assert_eq!(
            WireFormat::OpenAiChat.read_body(b"{\"choices\":[]}"),
            Err(AnswerError::Garbage)
        );
        let Err(AnswerError::ServerError(error)) = WireFormat::OpenAiChat.read_body(b"{\"error\":{\"code\":429}}")
        else {
            panic!("no error")
        };
        assert_eq!(error.status(), Some(429));
        assert_eq!(WireFormat::OpenAiChat.read_body(b"{\"choices\":[{}]}"), Ok(SILENT));
    }

    const MESSAGE: &str = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3,\"cache_read_input_tokens\":5,\"output_tokens\":1}}}\n\n",
        "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"é\"}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":7}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":9,\"input_tokens\":null}}\n\n",
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    );

    #[test]
    fn a_streamed_message_is_the_same_however_it_is_cut_into_chunks() {
        for size in 1..MESSAGE.len() {
            let mut reader = StreamReader::new(WireFormat::AnthropicMessages);
            let mut passed = Vec::new();
            for chunk in MESSAGE.as_bytes().chunks(size) {
                passed.extend(reader.feed(chunk).unwrap());
            }
            assert_eq!(String::from_utf8(passed).unwrap(), MESSAGE);
            assert!(reader.is_done());
            let usage = json!({"input_tokens": 3, "cache_read_input_tokens": 5, "output_tokens": 9});
            assert_eq!(reader.usage(), Some(&usage));
        }
    }

    #[test]
    fn counts_on_the_way_are_not_the_usage_of_an_answer_that_is_cut() {
        let mut reader = StreamReader::new(WireFormat::AnthropicMessages);
        for event in MESSAGE.split_inclusive("\n\n").take(4) {
            reader.feed(event.as_bytes()).unwrap();
            assert_eq!((reader.usage(), reader.is_whole()), (None, false), "{event}");
        }
        let mut reader = StreamReader::new(WireFormat::OpenAiChat);
        let on_the_way = b"data: {\"choices\":[{\"delta\":{}}],\"usage\":{\"completion_tokens\":1}}\n";
        reader.feed(on_the_way).unwrap();
        assert_eq!(reader.usage(), None);
        reader.feed(b"data: [DONE]\n").unwrap();
        assert_eq!(reader.usage(), Some(&json!({"completion_tokens": 1})));
    }

    /// The usage reported by a stream of these chunks: when cut, and with its end mark.
    fn usage_of(chunks: &[Value]) -> [Option<i64>; 2] {
        let mut reader = StreamReader::new(WireFormat::OpenAiChat);
        for chunk in chunks {
            reader.feed(format!("data: {chunk}\n").as_bytes()).unwrap();
        }
        let of = |reader: &StreamReader| reader.usage().map(|usage| usage["completion_tokens"].as_i64().unwrap());
        let cut = of(&reader);
        reader.feed(b"data: [DONE]\n").unwrap();
        [cut, of(&reader)]
    }

    #[test]
    fn usage_counts_only_what_came_before_it() {
        let says = json!({"choices": [{"delta": {"content": "x"}}]});
        let ends = json!({"choices": [{"delta": {}, "finish_reason": "stop"}]});
        let usage = |tokens: i64| json!({"choices": [], "usage": {"completion_tokens": tokens}});
        let both = |tokens: i64| json!({"choices": says["choices"], "usage": {"completion_tokens": tokens}});
        let last = |tokens: i64| json!({"choices": ends["choices"], "usage": {"completion_tokens": tokens}});
        for (chunks, expected) in [
            (vec![says.clone(), ends.clone(), usage(2)], [Some(2); 2]),
            (vec![usage(0), says.clone()], [None; 2]),
            (vec![usage(0), says.clone(), ends.clone()], [None; 2]),
            (vec![usage(0), says.clone(), ends.clone(), usage(3)], [Some(3); 2]),
            (vec![both(1), both(2)], [None, Some(2)]),
            (vec![both(1), both(2), last(2)], [Some(2); 2]),
            (vec![both(1), says.clone(), ends.clone()], [None; 2]),
            (vec![says, ends], [None; 2]),
        ] {
            assert_eq!(usage_of(&chunks), expected, "{chunks:?}");
        }
    }

    #[test]
    fn the_beginning_of_a_message_is_no_count_of_its_output() {
        let mut reader = StreamReader::new(WireFormat::AnthropicMessages);
        let stripped = MESSAGE.replace(",\"usage\":{\"output_tokens\":7}", "");
        let stripped = stripped.replace(",\"usage\":{\"output_tokens\":9,\"input_tokens\":null}", "");
        reader.feed(stripped.as_bytes()).unwrap();
        assert!(reader.is_done() && reader.has_content());
        assert_eq!(reader.usage(), None);
    }

    #[test]
    fn an_answer_names_its_model() {
        let chunk = json!({"model": "m-1", "choices": [{"message": {}}]}).to_string();
        assert_eq!(
            WireFormat::OpenAiChat
                .read_body(chunk.as_bytes())
                .unwrap()
                .metadata
                .model,
            "m-1"
        );
        let message = json!({"type": "message", "content": [], "model": "c".repeat(300)}).to_string();
        assert_eq!(
            WireFormat::AnthropicMessages
                .read_body(message.as_bytes())
                .unwrap()
                .metadata
                .model,
            "c".repeat(256)
        );
        let mut reader = StreamReader::new(WireFormat::OpenAiChat);
        reader
            .feed(b"data: {\"model\":\"m-1\"}\ndata: {\"model\":\"m-2\"}\n")
            .unwrap();
        assert_eq!(reader.metadata().model, "m-1");
        let mut reader = StreamReader::new(WireFormat::AnthropicMessages);
        reader
            .feed(b"data: {\"type\":\"message_start\",\"message\":{\"model\":\"c\"}}\n")
            .unwrap();
        assert_eq!(reader.metadata().model, "c");
    }

    /// What a whole answer and a streamed one of each format say about themselves, with this id and this end.
    fn named(id: &Value, reason: &Value) -> [[AnswerMetadata; 2]; 3] {
        let whole = |format: WireFormat, body: &Value| format.read_body(body.to_string().as_bytes()).unwrap().metadata;
        let streamed = |format: WireFormat, events: &[Value]| {
            let mut reader = StreamReader::new(format);
            for event in events {
                reader.feed(format!("data: {event}\n").as_bytes()).unwrap();
            }
            reader.metadata().clone()
        };
        let chat = [
            json!({"id": "", "model": "", "choices": []}),
            json!({"id": id, "model": "m", "choices": [{"delta": {"content": "x"}, "finish_reason": null}]}),
            json!({"id": id, "choices": [{"delta": {}, "finish_reason": reason}]}),
            json!({"id": id, "choices": [], "usage": {}}),
        ];
        let message = [
            json!({"type": "message_start", "message": {"id": id, "model": "m", "stop_reason": null}}),
            json!({"type": "message_delta", "delta": {"stop_reason": reason}}),
            json!({"type": "message_stop"}),
        ];
        let details = json!({"id": id, "model": "m", "output": [], "status": "incomplete", "incomplete_details": {"reason": reason}});
        let response = [
            json!({"type": "response.created", "response": {"id": id, "model": "m", "status": "in_progress"}}),
            json!({"type": "response.incomplete", "response": details}),
        ];
        let body = json!({"id": id, "model": "m", "choices": [{"message": {}, "finish_reason": reason}]});
        let content = json!({"type": "message", "id": id, "model": "m", "content": [], "stop_reason": reason});
        [
            [
                whole(WireFormat::OpenAiChat, &body),
                streamed(WireFormat::OpenAiChat, &chat),
            ],
            [
                whole(WireFormat::AnthropicMessages, &content),
                streamed(WireFormat::AnthropicMessages, &message),
            ],
            [
                whole(WireFormat::OpenAiResponses, &details),
                streamed(WireFormat::OpenAiResponses, &response),
            ],
        ]
    }

    #[test]
    fn an_answer_has_an_id_and_a_reason_for_its_end_in_each_format_streamed_or_not() {
        let id = json!("resp_0-A.b:c");
        for (reason, expected) in [
            ("stop", ["stop", "other", "other"]),
            ("tool_calls", ["tool_calls", "other", "other"]),
            ("end_turn", ["other", "end_turn", "other"]),
            ("max_tokens", ["other", "max_tokens", "other"]),
            ("max_output_tokens", ["other", "other", "length"]),
            ("content_filter", ["content_filter", "other", "content_filter"]),
        ] {
            for (both, expected) in named(&id, &json!(reason)).into_iter().zip(expected) {
                for found in both {
                    let expected = AnswerMetadata {
                        model: "m".into(),
                        id: "resp_0-A.b:c".into(),
                        finish_reason: Some(expected),
                    };
                    assert_eq!(found, expected, "{reason}");
                }
            }
        }
    }

    #[test]
    fn an_id_that_may_be_a_text_and_a_reason_that_is_not_known_are_not_repeated() {
        let longest = "i".repeat(MAX_ID);
        for (id, kept) in [
            (json!(longest), &*longest),
            (json!(format!("{longest}i")), ""),
            (json!("what the user asked"), ""),
            (json!("line\nbreak"), ""),
            (json!("\u{e9}"), ""),
            (json!(7), ""),
            (Value::Null, ""),
        ] {
            for reason in [json!("because the user asked"), json!(7), json!({"text": "x"})] {
                for found in named(&id, &reason).into_iter().flatten() {
                    assert_eq!(
                        (&*found.id, found.finish_reason),
                        (kept, Some("other")),
                        "{id} {reason}"
                    );
                }
            }
        }
        let [chat, message, response] = named(&json!("a"), &Value::Null);
        assert!(chat.iter().chain(&message).all(|found| found.finish_reason.is_none()));
        assert!(response.iter().all(|found| found.finish_reason == Some("other")));
    }

    #[test]
    fn a_response_that_is_complete_stopped_and_one_that_failed_ended_in_an_error() {
        let body = json!({"id": "a", "status": "completed", "output": []}).to_string();
        let whole = WireFormat::OpenAiResponses.read_body(body.as_bytes()).unwrap();
        assert_eq!(whole.metadata.finish_reason, Some("stop"));
        let mut reader = StreamReader::new(WireFormat::OpenAiResponses);
        let failed = json!({"type": "response.failed", "response": {"id": "a", "status": "failed"}});
        assert!(reader.feed(format!("data: {failed}\n").as_bytes()).is_err());
        let found = reader.metadata();
        assert_eq!((&*found.id, found.finish_reason), ("a", Some("error")));
    }

    #[test]
    fn every_kind_of_output_counts_as_content() {
        let content = |message: Value| {
            let body = json!({"choices": [{"message": message}]}).to_string();
            WireFormat::OpenAiChat.read_body(body.as_bytes()).unwrap().content
        };
        for filled in [
            json!({"content": "x"}),
            json!({"content": [{"type": "text"}]}),
            json!({"tool_calls": [{}]}),
            json!({"reasoning_content": "hm", "content": null}),
            json!({"refusal": "no"}),
        ] {
            assert!(content(filled.clone()), "{filled}");
        }
        for empty in [
            json!({}),
            json!({"content": null}),
            json!({"content": "", "tool_calls": []}),
        ] {
            assert!(!content(empty.clone()), "{empty}");
        }
        let message = json!({"type": "message", "content": [{"type": "text"}]}).to_string();
        assert!(
            WireFormat::AnthropicMessages
                .read_body(message.as_bytes())
                .unwrap()
                .content
        );
    }

    #[test]
    fn garbage_and_reported_errors_of_messages_are_distinguished() {
        let feed = |line: &[u8]| StreamReader::new(WireFormat::AnthropicMessages).feed(line).unwrap_err();
        assert_eq!(feed(b"data: <html>\n"), AnswerError::Garbage);
        assert_eq!(feed(b"data: [DONE]\n"), AnswerError::Garbage);
        let reported = |error: &AnswerError| match error {
            AnswerError::ServerError(error) => error.is_one_of(&["overloaded_error"]),
            AnswerError::Garbage => false,
        };
        assert!(reported(&feed(
            b"data: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n"
        )));
        let body = |body: &str| WireFormat::AnthropicMessages.read_body(body.as_bytes());
        assert_eq!(body("<html>"), Err(AnswerError::Garbage));
        assert_eq!(body("{\"choices\":[{}]}"), Err(AnswerError::Garbage));
        assert_eq!(body("{\"type\":\"message\"}"), Err(AnswerError::Garbage));
        assert!(
            body("{\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}").is_err_and(|error| reported(&error))
        );
        assert_eq!(body("{\"type\":\"message\",\"content\":[]}"), Ok(SILENT));
    }
}
