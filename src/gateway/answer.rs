//! Reads an answer on its way through: where it ends, what it used, whether it is one at all.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::dialect::ProviderDialect;

/// Longest name of a model, in letters.
const MAX_NAME: usize = 256;

/// Why bytes are no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerError {
    /// Not what a server of this format sends.
    Garbage,
    /// The server reports an error in the middle of its stream.
    ServerError,
}

/// What a whole answer says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerSummary {
    /// Its usage report.
    pub usage: Option<Value>,
    /// The model that it names; empty: none.
    pub model: String,
    /// Whether it has any content: text, reasoning, or calls of tools.
    pub content: bool,
}

/// Reads a streamed answer line by line, as it comes.
pub struct StreamReader {
    dialect: ProviderDialect,
    tail: Vec<u8>,
    usage: Option<Value>,
    model: String,
    /// The usage came where servers report that of the whole answer.
    is_final: bool,
    /// Content came after the usage, which therefore does not count it.
    is_stale: bool,
    content: bool,
    end: StreamEnd,
}

/// How far the end of a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StreamEnd {
    /// It is not there.
    NotYet,
    /// It said why it finished; its usage may follow.
    Finished,
    /// Nothing after it matters.
    Done,
}

#[derive(Deserialize)]
struct ChatPayload {
    #[serde(default)]
    choices: Option<Vec<ChatChoice>>,
    #[serde(default)]
    usage: Option<Value>,
    #[serde(default)]
    model: Option<Value>,
    #[serde(default)]
    error: Option<IgnoredAny>,
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

/// Everything in a chat completion that takes output.
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

/// Whether a value is there and not empty. Nothing of it is kept.
#[derive(Clone, Copy, Default)]
struct NonEmpty(bool);

/// An event of an Anthropic message, or the whole of one.
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
}

#[derive(Deserialize)]
struct MessageHead {
    #[serde(default)]
    model: Option<Value>,
    #[serde(default)]
    usage: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct MessageDelta {
    #[serde(default)]
    stop_reason: Option<IgnoredAny>,
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
    /// Nothing read yet.
    pub fn new(dialect: ProviderDialect) -> Self {
        Self {
            dialect,
            tail: Vec::new(),
            usage: None,
            model: String::new(),
            is_final: false,
            is_stale: false,
            content: false,
            end: StreamEnd::NotYet,
        }
    }

    /// Takes the next bytes and gives the whole lines that may be passed on. A part of a line waits for its rest, so
    /// that a stream which is cut never ends in half an event.
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

    /// Whether the end mark came, `[DONE]` or `message_stop`: nothing after it matters.
    pub fn is_done(&self) -> bool {
        self.end == StreamEnd::Done
    }

    /// Whether the answer is whole: its end mark, or a reason why it finished.
    pub fn is_whole(&self) -> bool {
        self.end > StreamEnd::NotYet
    }

    /// The usage of the whole answer. Counts that a server gives on the way are less than what it will bill: of a
    /// stream that is cut after them nothing is known, nor of one that says more and then no usage any more.
    pub fn usage(&self) -> Option<&Value> {
        let is_whole = match self.dialect {
            ProviderDialect::Chat => self.is_final || self.is_whole(),
            ProviderDialect::Messages => self.is_final && self.is_whole(),
        };
        self.usage.as_ref().filter(|_| is_whole && !self.is_stale)
    }

    /// The model that the answer names; empty: none.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Whether any content came.
    pub fn has_content(&self) -> bool {
        self.content
    }

    fn read_line(&mut self, line: &[u8]) -> Result<(), AnswerError> {
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(());
        };
        let data = data.trim_ascii();
        match self.dialect {
            ProviderDialect::Chat => self.read_chunk(data),
            ProviderDialect::Messages => self.read_event(data),
        }
    }

    fn read_chunk(&mut self, data: &[u8]) -> Result<(), AnswerError> {
        if data == b"[DONE]" {
            self.end = StreamEnd::Done;
            return Ok(());
        }
        let chunk: ChatPayload = serde_json::from_slice(data).map_err(|_| AnswerError::Garbage)?;
        if chunk.error.is_some() {
            return Err(AnswerError::ServerError);
        }
        if self.model.is_empty() {
            self.model = name(chunk.model.as_ref());
        }
        let choices = chunk.choices.unwrap_or_default();
        let finishes = choices.iter().any(|choice| choice.finish_reason.is_some());
        let says = choices.iter().any(ChatChoice::has_content);
        self.finish_if(finishes);
        self.content |= says;
        if chunk.usage.is_some() {
            self.usage = chunk.usage;
            self.is_final = choices.is_empty() || finishes;
            self.is_stale = false;
        } else {
            self.is_stale |= says;
        }
        Ok(())
    }

    fn read_event(&mut self, data: &[u8]) -> Result<(), AnswerError> {
        let event: MessagesPayload = serde_json::from_slice(data).map_err(|_| AnswerError::Garbage)?;
        match event.kind.as_str() {
            "error" => return Err(AnswerError::ServerError),
            "message_start" => {
                if let Some(head) = event.message {
                    self.model = name(head.model.as_ref());
                    self.add_usage(head.usage);
                }
            }
            "content_block_delta" => {
                self.content = true;
                self.is_stale |= self.is_final;
            }
            "message_delta" => {
                // The beginning counts the output that is not there yet: only this one is of the whole answer.
                let counts = event.usage.as_ref().and_then(|usage| usage.get("output_tokens"));
                let counts = counts.is_some_and(|count| !count.is_null());
                self.add_usage(event.usage);
                self.finish_if(event.delta.is_some_and(|delta| delta.stop_reason.is_some()));
                self.is_final |= counts;
                self.is_stale &= !counts;
            }
            "message_stop" => self.end = StreamEnd::Done,
            // Pieces of the answer, pings, and events of a later version.
            _ => {}
        }
        Ok(())
    }

    fn finish_if(&mut self, finishes: bool) {
        if finishes {
            self.end = self.end.max(StreamEnd::Finished);
        }
    }

    /// Counts are totals: what is said later replaces what was said before.
    fn add_usage(&mut self, usage: Option<Map<String, Value>>) {
        let Some(usage) = usage else { return };
        let known = self.usage.get_or_insert_with(|| Map::new().into());
        for (name, value) in usage.into_iter().filter(|(_, value)| !value.is_null()) {
            known[name] = value;
        }
    }
}

/// The name of a model, cut where it is longer than any is.
fn name(model: Option<&Value>) -> String {
    let name = model.and_then(Value::as_str).unwrap_or_default();
    name.chars().take(MAX_NAME).collect()
}

/// Reads a whole answer.
pub fn read_body(dialect: ProviderDialect, body: &[u8]) -> Result<AnswerSummary, AnswerError> {
    match dialect {
        ProviderDialect::Chat => read_completion(body),
        ProviderDialect::Messages => read_message(body),
    }
}

fn read_message(body: &[u8]) -> Result<AnswerSummary, AnswerError> {
    let message: MessagesPayload = serde_json::from_slice(body).map_err(|_| AnswerError::Garbage)?;
    match (message.kind.as_str(), message.content) {
        ("error", _) => Err(AnswerError::ServerError),
        ("message", Some(blocks)) => Ok(AnswerSummary {
            model: name(message.model.as_ref()),
            usage: message.usage.map(Value::Object),
            content: !blocks.is_empty(),
        }),
        _ => Err(AnswerError::Garbage),
    }
}

fn read_completion(body: &[u8]) -> Result<AnswerSummary, AnswerError> {
    let chunk: ChatPayload = serde_json::from_slice(body).map_err(|_| AnswerError::Garbage)?;
    match chunk {
        ChatPayload { error: Some(_), .. } => Err(AnswerError::ServerError),
        ChatPayload {
            choices: Some(choices),
            usage,
            model,
            ..
        } if !choices.is_empty() => Ok(AnswerSummary {
            model: name(model.as_ref()),
            usage,
            content: choices.iter().any(ChatChoice::has_content),
        }),
        ChatPayload { .. } => Err(AnswerError::Garbage),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Of an answer that says nothing.
    const SILENT: AnswerSummary = AnswerSummary {
        usage: None,
        model: String::new(),
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
            let mut reader = StreamReader::new(ProviderDialect::Chat);
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
        let mut reader = StreamReader::new(ProviderDialect::Chat);
        assert_eq!(reader.feed(b"data: {\"cho").unwrap(), b"");
        assert_eq!(
            reader.feed(b"ices\":[]}\ndata: {").unwrap(),
            b"data: {\"choices\":[]}\n"
        );
        assert!(!reader.is_whole());
    }

    #[test]
    fn nothing_after_the_end_is_passed_on() {
        let mut reader = StreamReader::new(ProviderDialect::Chat);
        assert_eq!(reader.feed(b"data: [DONE]\nmore\n").unwrap(), b"data: [DONE]\n\n");
        assert_eq!(reader.feed(b"\n\nmore\n").unwrap(), b"");
    }

    #[test]
    fn a_finish_reason_makes_an_answer_whole_without_the_end_mark() {
        let mut reader = StreamReader::new(ProviderDialect::Chat);
        reader
            .feed(b"data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n")
            .unwrap();
        assert!(reader.is_whole() && !reader.is_done());
    }

    #[test]
    fn garbage_and_reported_errors_are_told_apart() {
        let feed = |line: &[u8]| StreamReader::new(ProviderDialect::Chat).feed(line).unwrap_err();
        assert_eq!(feed(b"data: <html>\n"), AnswerError::Garbage);
        assert_eq!(
            feed(b"data: {\"error\":{\"message\":\"x\"}}\n"),
            AnswerError::ServerError
        );
        assert_eq!(read_body(ProviderDialect::Chat, b"<html>"), Err(AnswerError::Garbage));
        assert_eq!(read_body(ProviderDialect::Chat, b"{}"), Err(AnswerError::Garbage));
        assert_eq!(
            read_body(ProviderDialect::Chat, b"{\"choices\":[]}"),
            Err(AnswerError::Garbage)
        );
        assert_eq!(
            read_body(ProviderDialect::Chat, b"{\"error\":{}}"),
            Err(AnswerError::ServerError)
        );
        assert_eq!(read_body(ProviderDialect::Chat, b"{\"choices\":[{}]}"), Ok(SILENT));
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
            let mut reader = StreamReader::new(ProviderDialect::Messages);
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
        let mut reader = StreamReader::new(ProviderDialect::Messages);
        for event in MESSAGE.split_inclusive("\n\n").take(4) {
            reader.feed(event.as_bytes()).unwrap();
            assert_eq!((reader.usage(), reader.is_whole()), (None, false), "{event}");
        }
        let mut reader = StreamReader::new(ProviderDialect::Chat);
        let on_the_way = b"data: {\"choices\":[{\"delta\":{}}],\"usage\":{\"completion_tokens\":1}}\n";
        reader.feed(on_the_way).unwrap();
        assert_eq!(reader.usage(), None);
        reader.feed(b"data: [DONE]\n").unwrap();
        assert_eq!(reader.usage(), Some(&json!({"completion_tokens": 1})));
    }

    /// What a stream of these chunks says of its use: cut, and with its end mark.
    fn usage_of(chunks: &[Value]) -> [Option<i64>; 2] {
        let mut reader = StreamReader::new(ProviderDialect::Chat);
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
        let mut reader = StreamReader::new(ProviderDialect::Messages);
        let stripped = MESSAGE.replace(",\"usage\":{\"output_tokens\":7}", "");
        let stripped = stripped.replace(",\"usage\":{\"output_tokens\":9,\"input_tokens\":null}", "");
        reader.feed(stripped.as_bytes()).unwrap();
        assert!(reader.is_done() && reader.has_content());
        assert_eq!(reader.usage(), None);
    }

    #[test]
    fn an_answer_names_its_model() {
        let chunk = json!({"model": "m-1", "choices": [{"message": {}}]}).to_string();
        assert_eq!(read_body(ProviderDialect::Chat, chunk.as_bytes()).unwrap().model, "m-1");
        let message = json!({"type": "message", "content": [], "model": "c".repeat(300)}).to_string();
        assert_eq!(
            read_body(ProviderDialect::Messages, message.as_bytes()).unwrap().model,
            "c".repeat(256)
        );
        let mut reader = StreamReader::new(ProviderDialect::Chat);
        reader
            .feed(b"data: {\"model\":\"m-1\"}\ndata: {\"model\":\"m-2\"}\n")
            .unwrap();
        assert_eq!(reader.model(), "m-1");
        let mut reader = StreamReader::new(ProviderDialect::Messages);
        reader
            .feed(b"data: {\"type\":\"message_start\",\"message\":{\"model\":\"c\"}}\n")
            .unwrap();
        assert_eq!(reader.model(), "c");
    }

    #[test]
    fn whatever_takes_output_is_content() {
        let content = |message: Value| {
            let body = json!({"choices": [{"message": message}]}).to_string();
            read_body(ProviderDialect::Chat, body.as_bytes()).unwrap().content
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
            read_body(ProviderDialect::Messages, message.as_bytes())
                .unwrap()
                .content
        );
    }

    #[test]
    fn garbage_and_reported_errors_of_messages_are_told_apart() {
        let feed = |line: &[u8]| StreamReader::new(ProviderDialect::Messages).feed(line).unwrap_err();
        assert_eq!(feed(b"data: <html>\n"), AnswerError::Garbage);
        assert_eq!(feed(b"data: [DONE]\n"), AnswerError::Garbage);
        assert_eq!(
            feed(b"data: {\"type\":\"error\",\"error\":{}}\n"),
            AnswerError::ServerError
        );
        let body = |body: &str| read_body(ProviderDialect::Messages, body.as_bytes());
        assert_eq!(body("<html>"), Err(AnswerError::Garbage));
        assert_eq!(body("{\"choices\":[{}]}"), Err(AnswerError::Garbage));
        assert_eq!(body("{\"type\":\"message\"}"), Err(AnswerError::Garbage));
        assert_eq!(body("{\"type\":\"error\"}"), Err(AnswerError::ServerError));
        assert_eq!(body("{\"type\":\"message\",\"content\":[]}"), Ok(SILENT));
    }
}
