//! Reads an answer on its way through: where it ends, what it used, whether it is one at all.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::dialect::Dialect;

/// Why bytes are no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Not what a server of this format sends.
    Garbage,
    /// The server reports an error in the middle of its stream.
    ServerError,
}

/// Reads a streamed answer line by line, as it comes.
pub struct StreamReader {
    dialect: Dialect,
    tail: Vec<u8>,
    usage: Option<Value>,
    /// Whether more of the answer may raise the usage.
    is_final: bool,
    finished: bool,
    done: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Option<Value>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    finish_reason: Option<Value>,
}

/// An event of an Anthropic message, or the whole of one.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    message: Option<Head>,
    #[serde(default)]
    delta: Option<Delta>,
    #[serde(default)]
    usage: Option<Map<String, Value>>,
    #[serde(default)]
    content: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    usage: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    stop_reason: Option<Value>,
}

impl StreamReader {
    /// Nothing read yet.
    pub fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            tail: Vec::new(),
            usage: None,
            is_final: false,
            finished: false,
            done: false,
        }
    }

    /// Takes the next bytes and gives the whole lines that may be passed on. A part of a line waits for its rest, so
    /// that a stream which is cut never ends in half an event.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<u8>, Trouble> {
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.tail.extend_from_slice(piece);
            if self.done || !piece.ends_with(b"\n") {
                continue;
            }
            let line = std::mem::take(&mut self.tail);
            self.read_line(&line)?;
            lines.extend_from_slice(&line);
            if self.done {
                // The blank line that ends the event may come late or never.
                lines.push(b'\n');
            }
        }
        Ok(lines)
    }

    /// Whether the end mark came, `[DONE]` or `message_stop`: nothing after it matters.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Whether the answer is whole: its end mark, or a reason why it finished.
    pub fn is_whole(&self) -> bool {
        self.done || self.finished
    }

    /// The usage of the whole answer. Counts that a server gives on the way are less than what it will bill: of a
    /// stream that is cut after them nothing is known.
    pub fn usage(&self) -> Option<&Value> {
        self.usage.as_ref().filter(|_| self.is_final || self.is_whole())
    }

    fn read_line(&mut self, line: &[u8]) -> Result<(), Trouble> {
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(());
        };
        let data = data.trim_ascii();
        match self.dialect {
            Dialect::Chat => self.read_chunk(data),
            Dialect::Messages => self.read_event(data),
        }
    }

    fn read_chunk(&mut self, data: &[u8]) -> Result<(), Trouble> {
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(data).map_err(|_| Trouble::Garbage)?;
        if chunk.error.is_some() {
            return Err(Trouble::ServerError);
        }
        self.finished |= chunk
            .choices
            .iter()
            .flatten()
            .any(|choice| choice.finish_reason.is_some());
        if chunk.usage.is_some() {
            self.usage = chunk.usage;
            self.is_final = chunk.choices.is_none_or(|choices| choices.is_empty());
        }
        Ok(())
    }

    fn read_event(&mut self, data: &[u8]) -> Result<(), Trouble> {
        let event: Event = serde_json::from_slice(data).map_err(|_| Trouble::Garbage)?;
        match event.kind.as_str() {
            "error" => return Err(Trouble::ServerError),
            "message_start" => self.add_usage(event.message.and_then(|head| head.usage)),
            "message_delta" => {
                self.add_usage(event.usage);
                self.finished |= event.delta.is_some_and(|delta| delta.stop_reason.is_some());
            }
            "message_stop" => self.done = true,
            // Pieces of the answer, pings, and events of a later version.
            _ => {}
        }
        Ok(())
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

/// Reads a whole answer; gives its usage.
pub fn read_body(dialect: Dialect, body: &[u8]) -> Result<Option<Value>, Trouble> {
    match dialect {
        Dialect::Chat => read_completion(body),
        Dialect::Messages => read_message(body),
    }
}

fn read_message(body: &[u8]) -> Result<Option<Value>, Trouble> {
    let message: Event = serde_json::from_slice(body).map_err(|_| Trouble::Garbage)?;
    match (message.kind.as_str(), message.content) {
        ("error", _) => Err(Trouble::ServerError),
        ("message", Some(_)) => Ok(message.usage.map(Value::Object)),
        _ => Err(Trouble::Garbage),
    }
}

fn read_completion(body: &[u8]) -> Result<Option<Value>, Trouble> {
    let chunk: Chunk = serde_json::from_slice(body).map_err(|_| Trouble::Garbage)?;
    match chunk {
        Chunk { error: Some(_), .. } => Err(Trouble::ServerError),
        Chunk {
            choices: Some(choices),
            usage,
            ..
        } if !choices.is_empty() => Ok(usage),
        Chunk { .. } => Err(Trouble::Garbage),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
            let mut reader = StreamReader::new(Dialect::Chat);
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
        let mut reader = StreamReader::new(Dialect::Chat);
        assert_eq!(reader.feed(b"data: {\"cho").unwrap(), b"");
        assert_eq!(
            reader.feed(b"ices\":[]}\ndata: {").unwrap(),
            b"data: {\"choices\":[]}\n"
        );
        assert!(!reader.is_whole());
    }

    #[test]
    fn nothing_after_the_end_is_passed_on() {
        let mut reader = StreamReader::new(Dialect::Chat);
        assert_eq!(reader.feed(b"data: [DONE]\nmore\n").unwrap(), b"data: [DONE]\n\n");
        assert_eq!(reader.feed(b"\n\nmore\n").unwrap(), b"");
    }

    #[test]
    fn a_finish_reason_makes_an_answer_whole_without_the_end_mark() {
        let mut reader = StreamReader::new(Dialect::Chat);
        reader
            .feed(b"data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n")
            .unwrap();
        assert!(reader.is_whole() && !reader.is_done());
    }

    #[test]
    fn garbage_and_reported_errors_are_told_apart() {
        let feed = |line: &[u8]| StreamReader::new(Dialect::Chat).feed(line).unwrap_err();
        assert_eq!(feed(b"data: <html>\n"), Trouble::Garbage);
        assert_eq!(feed(b"data: {\"error\":{\"message\":\"x\"}}\n"), Trouble::ServerError);
        assert_eq!(read_body(Dialect::Chat, b"<html>"), Err(Trouble::Garbage));
        assert_eq!(read_body(Dialect::Chat, b"{}"), Err(Trouble::Garbage));
        assert_eq!(read_body(Dialect::Chat, b"{\"choices\":[]}"), Err(Trouble::Garbage));
        assert_eq!(read_body(Dialect::Chat, b"{\"error\":{}}"), Err(Trouble::ServerError));
        assert_eq!(read_body(Dialect::Chat, b"{\"choices\":[{}]}"), Ok(None));
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
            let mut reader = StreamReader::new(Dialect::Messages);
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
        let mut reader = StreamReader::new(Dialect::Messages);
        for event in MESSAGE.split_inclusive("\n\n").take(4) {
            reader.feed(event.as_bytes()).unwrap();
            assert_eq!((reader.usage(), reader.is_whole()), (None, false), "{event}");
        }
        let mut reader = StreamReader::new(Dialect::Chat);
        let on_the_way = b"data: {\"choices\":[{\"delta\":{}}],\"usage\":{\"completion_tokens\":1}}\n";
        reader.feed(on_the_way).unwrap();
        assert_eq!(reader.usage(), None);
        reader.feed(b"data: [DONE]\n").unwrap();
        assert_eq!(reader.usage(), Some(&json!({"completion_tokens": 1})));
    }

    #[test]
    fn garbage_and_reported_errors_of_messages_are_told_apart() {
        let feed = |line: &[u8]| StreamReader::new(Dialect::Messages).feed(line).unwrap_err();
        assert_eq!(feed(b"data: <html>\n"), Trouble::Garbage);
        assert_eq!(feed(b"data: [DONE]\n"), Trouble::Garbage);
        assert_eq!(feed(b"data: {\"type\":\"error\",\"error\":{}}\n"), Trouble::ServerError);
        let body = |body: &str| read_body(Dialect::Messages, body.as_bytes());
        assert_eq!(body("<html>"), Err(Trouble::Garbage));
        assert_eq!(body("{\"choices\":[{}]}"), Err(Trouble::Garbage));
        assert_eq!(body("{\"type\":\"message\"}"), Err(Trouble::Garbage));
        assert_eq!(body("{\"type\":\"error\"}"), Err(Trouble::ServerError));
        assert_eq!(body("{\"type\":\"message\",\"content\":[]}"), Ok(None));
    }
}
