//! Lines of a server's output, in bounded memory.

use tokio::io::{AsyncBufRead, AsyncBufReadExt};

use super::message::MAX_MESSAGE_BYTES;

/// How much of the beginning and of the end of a line is kept if it is too long.
const KEPT_BYTES: usize = 256;

/// One line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Whole(Vec<u8>),
    /// Too long. The number is the id of the answer that it is, if it can be read from its beginning or its end.
    TooLong(Option<u64>),
}

/// Reads lines of at most [`MAX_MESSAGE_BYTES`].
pub(super) struct LineReader<R> {
    input: R,
    max: usize,
}

impl<R: AsyncBufRead + Unpin> LineReader<R> {
    pub(super) fn new(input: R) -> Self {
        let max = MAX_MESSAGE_BYTES;
        Self { input, max }
    }

    /// The next line; `None` at the end. A last line without an end is dropped: the server died while it wrote it.
    pub(super) async fn next(&mut self) -> Option<Line> {
        let (mut line, mut tail) = (Vec::new(), None::<Vec<u8>>);
        loop {
            let chunk = self.input.fill_buf().await.ok().filter(|chunk| !chunk.is_empty())?;
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let piece = &chunk[..end.unwrap_or(chunk.len())];
            if tail.is_none() && line.len() + piece.len() > self.max {
                // From now on, `line` is its beginning and `tail` its end.
                tail = Some(line[line.len().saturating_sub(KEPT_BYTES)..].to_vec());
                line.extend(piece.iter().take(KEPT_BYTES));
                line.truncate(KEPT_BYTES);
                line.shrink_to_fit();
            }
            match &mut tail {
                Some(tail) => {
                    tail.extend_from_slice(&piece[piece.len().saturating_sub(KEPT_BYTES)..]);
                    tail.drain(..tail.len().saturating_sub(KEPT_BYTES));
                }
                None => line.extend_from_slice(piece),
            }
            let used = end.map_or(chunk.len(), |at| at + 1);
            self.input.consume(used);
            if end.is_some() {
                return Some(match tail {
                    Some(tail) => Line::TooLong(id(&line, &tail)),
                    None => Line::Whole(line),
                });
            }
        }
    }
}

/// The id of an answer, from the beginning or the end of its line: libraries write it before or behind the result.
fn id(head: &[u8], tail: &[u8]) -> Option<u64> {
    let compact = |bytes: &[u8]| -> String {
        String::from_utf8_lossy(bytes)
            .chars()
            .filter(|character| !character.is_whitespace())
            .collect()
    };
    let (head, tail) = (compact(head), compact(tail));
    let before = ["{\"jsonrpc\":\"2.0\",\"id\":", "{\"id\":"];
    let first = before
        .iter()
        .find_map(|start| head.strip_prefix(start))
        .and_then(|rest| rest.split([',', '}']).next());
    let behind = ["}", ",\"jsonrpc\":\"2.0\"}"];
    let last = behind
        .iter()
        .filter_map(|end| Some(tail.strip_suffix(end)?.rsplit_once("\"id\":")?.1));
    first.into_iter().chain(last).find_map(|id| id.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(input: &[u8], max: usize) -> Vec<Line> {
        // In small pieces, as a pipe delivers them.
        let input = tokio::io::BufReader::with_capacity(7, input);
        let mut reader = LineReader { input, max };
        let mut lines = Vec::new();
        while let Some(line) = reader.next().await {
            lines.push(line);
        }
        lines
    }

    #[tokio::test]
    async fn a_line_is_too_long_one_byte_above_the_limit_and_the_next_one_is_read() {
        let whole = |text: &str| Line::Whole(text.into());
        assert_eq!(lines(b"0123456789\nab\n", 10).await, [whole("0123456789"), whole("ab")]);
        assert_eq!(
            lines(b"0123456789x\nab\n", 10).await,
            [Line::TooLong(None), whole("ab")]
        );
        assert_eq!(lines(b"a\nb", 10).await, [whole("a")], "the last one is not complete");
    }

    #[tokio::test]
    async fn the_id_of_a_long_answer_is_found_before_or_behind_the_result() {
        let result = format!("{{\"text\":\"{}\"}}", "x".repeat(5000));
        for line in [
            format!("{{\"jsonrpc\":\"2.0\",\"id\":17,\"result\":{result}}}\n"),
            format!("{{\"jsonrpc\": \"2.0\", \"id\": 17, \"result\": {result}}}\r\n"),
            format!("{{\"id\":17,\"result\":{result}}}\n"),
            format!("{{\"result\":{result},\"jsonrpc\":\"2.0\",\"id\":17}}\n"),
            format!("{{\"result\":{result},\"id\":17,\"jsonrpc\":\"2.0\"}}\n"),
        ] {
            assert_eq!(
                lines(line.as_bytes(), 1000).await,
                [Line::TooLong(Some(17))],
                "{}",
                &line[..60]
            );
        }
    }
}
