//! Reads an answer on its way through: where it ends, what it used, whether it is one at all.

use serde::Deserialize;
use serde_json::Value;

/// Why bytes are no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Not what a chat-completions server sends.
    Garbage,
    /// The server reports an error in the middle of its stream.
    ServerError,
}

/// Reads a streamed answer line by line, as it comes.
#[derive(Default)]
pub struct StreamReader {
    tail: Vec<u8>,
    usage: Option<Value>,
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

impl StreamReader {
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

    /// Whether `[DONE]` came: nothing after it matters.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Whether the answer is whole: `[DONE]`, or a reason why it finished.
    pub fn is_whole(&self) -> bool {
        self.done || self.finished
    }

    /// The last usage seen.
    pub fn usage(&self) -> Option<&Value> {
        self.usage.as_ref()
    }

    fn read_line(&mut self, line: &[u8]) -> Result<(), Trouble> {
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(());
        };
        let data = data.trim_ascii();
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
        }
        Ok(())
    }
}

/// Reads a whole answer; gives its usage.
pub fn read_body(body: &[u8]) -> Result<Option<Value>, Trouble> {
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
            let mut reader = StreamReader::default();
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
        let mut reader = StreamReader::default();
        assert_eq!(reader.feed(b"data: {\"cho").unwrap(), b"");
        assert_eq!(
            reader.feed(b"ices\":[]}\ndata: {").unwrap(),
            b"data: {\"choices\":[]}\n"
        );
        assert!(!reader.is_whole());
    }

    #[test]
    fn nothing_after_the_end_is_passed_on() {
        let mut reader = StreamReader::default();
        assert_eq!(reader.feed(b"data: [DONE]\nmore\n").unwrap(), b"data: [DONE]\n\n");
        assert_eq!(reader.feed(b"\n\nmore\n").unwrap(), b"");
    }

    #[test]
    fn a_finish_reason_makes_an_answer_whole_without_the_end_mark() {
        let mut reader = StreamReader::default();
        reader
            .feed(b"data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n")
            .unwrap();
        assert!(reader.is_whole() && !reader.is_done());
    }

    #[test]
    fn garbage_and_reported_errors_are_told_apart() {
        let feed = |line: &[u8]| StreamReader::default().feed(line).unwrap_err();
        assert_eq!(feed(b"data: <html>\n"), Trouble::Garbage);
        assert_eq!(feed(b"data: {\"error\":{\"message\":\"x\"}}\n"), Trouble::ServerError);
        assert_eq!(read_body(b"<html>"), Err(Trouble::Garbage));
        assert_eq!(read_body(b"{}"), Err(Trouble::Garbage));
        assert_eq!(read_body(b"{\"choices\":[]}"), Err(Trouble::Garbage));
        assert_eq!(read_body(b"{\"error\":{}}"), Err(Trouble::ServerError));
        assert_eq!(read_body(b"{\"choices\":[{}]}"), Ok(None));
    }
}
