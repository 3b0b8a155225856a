//! The beginning and the end of an output that may be long, in bounded memory. Pure.

use std::collections::VecDeque;

/// Keeps the first and the last bytes of a stream, each half of the limit, and counts the ones between.
#[derive(Debug)]
pub(crate) struct Excerpt {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    half: usize,
    total: u64,
}

impl Excerpt {
    /// An excerpt of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            half: limit / 2,
            total: 0,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(bytes.len() as u64);
        let (first, rest) = bytes.split_at(bytes.len().min(self.half - self.head.len()));
        self.head.extend_from_slice(first);
        // Of a long piece only the end can stay.
        let rest = &rest[rest.len().saturating_sub(self.half)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(self.half);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    /// How many bytes were received.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The text, with a note where bytes are missing. Control characters other than tabs and line ends are left out: in
    /// JSON each would be six bytes.
    pub(crate) fn into_text(self) -> String {
        let kept = self.head.len() + self.tail.len();
        let missing = self.total.saturating_sub(kept as u64);
        let mut tail: Vec<u8> = self.tail.into();
        if missing == 0 {
            let mut all = self.head;
            all.append(&mut tail);
            return printable(&all);
        }
        let head = printable(without_partial_end(&self.head));
        let tail = printable(without_partial_start(&tail));
        let (head, tail) = (head.trim_end_matches('\n'), tail.trim_start_matches('\n'));
        format!("{head}\n[... {missing} bytes left out ...]\n{tail}")
    }
}

fn printable(bytes: &[u8]) -> String {
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    text.retain(|character| !character.is_control() || matches!(character, '\n' | '\t' | '\r'));
    text
}

/// Without the first bytes of a character that was cut.
fn without_partial_end(bytes: &[u8]) -> &[u8] {
    let start = bytes.len().saturating_sub(4);
    let last = bytes[start..].iter().rposition(|byte| !is_continuation(*byte));
    match last.map(|at| start + at) {
        Some(at) if width(bytes[at]) > bytes.len() - at => &bytes[..at],
        _ => bytes,
    }
}

fn without_partial_start(bytes: &[u8]) -> &[u8] {
    let partial = bytes.iter().take(3).take_while(|byte| is_continuation(**byte)).count();
    &bytes[partial..]
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// The length of the character that a byte begins.
fn width(byte: u8) -> usize {
    match byte {
        0xf0.. => 4,
        0xe0.. => 3,
        0xc0.. => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(limit: usize, pieces: &[&str]) -> String {
        let mut excerpt = Excerpt::new(limit);
        for piece in pieces {
            excerpt.push(piece.as_bytes());
        }
        excerpt.into_text()
    }

    #[test]
    fn an_output_up_to_the_limit_is_complete_and_a_longer_one_names_what_is_missing() {
        assert_eq!(of(8, &["abcd", "efgh"]), "abcdefgh");
        assert_eq!(of(8, &["abcdefghi"]), "abcd\n[... 1 bytes left out ...]\nfghi");
        assert_eq!(
            of(8, &["a", "bcd", "e", "fghij"]),
            "abcd\n[... 2 bytes left out ...]\nghij"
        );
        assert_eq!(of(8, &[]), "");
    }

    #[test]
    fn however_an_output_is_cut_into_pieces_the_excerpt_is_the_same() {
        let text = "abc\ndef ".repeat(100);
        let whole = of(64, &[&text]);
        for size in 1..40 {
            let pieces: Vec<_> = text
                .as_bytes()
                .chunks(size)
                .map(|piece| std::str::from_utf8(piece).unwrap())
                .collect();
            assert_eq!(of(64, &pieces), whole, "{size}");
        }
    }

    #[test]
    fn no_character_is_split_and_control_characters_are_left_out() {
        assert_eq!(of(6, &["aäöüb€"]), "aä\n[... 5 bytes left out ...]\n€");
        assert_eq!(of(8, &["a€€€b"]), "a€\n[... 3 bytes left out ...]\n€b");
        assert_eq!(of(64, &["\u{1b}[1mbold\u{1b}[0m\r\n\0\tend"]), "[1mbold[0m\r\n\tend");
    }

    #[test]
    fn memory_is_bounded_by_the_limit() {
        let mut excerpt = Excerpt::new(1024);
        for _ in 0..10_000 {
            excerpt.push(&[b'x'; 1000]);
        }
        assert_eq!(excerpt.total(), 10_000_000);
        assert!(excerpt.head.capacity() <= 2048 && excerpt.tail.capacity() <= 4096);
    }
}
