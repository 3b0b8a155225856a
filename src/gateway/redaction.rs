//! Redacts secret values from the answers of tool servers before they leave the gateway: a server that shows its
//! configuration or echoes a request would otherwise put a credential into the model's context and the journal.
//!
//! Finds a value verbatim, JSON-escaped and in base64. Values of fewer than [`MIN_VALUE_BYTES`] bytes are ignored, since they
//! occur in ordinary text. Bytes pass as they arrive; only a possible beginning of a value is held back.

use std::io;
use std::sync::Arc;

use axum::body::Bytes;
use futures::{Stream, StreamExt, stream};

/// Length of the shortest value that is redacted, in bytes.
pub const MIN_VALUE_BYTES: usize = 8;
/// The replacement of a redacted value.
pub const REPLACEMENT: &str = "[redacted]";

/// Redacts a set of values.
#[derive(Clone, Default)]
pub struct SecretRedactor {
    /// All spellings of the values, longest first.
    spellings: Arc<[Vec<u8>]>,
}

impl SecretRedactor {
    /// Redacts each of these values as a whole, and each of its words, such as the token after `Bearer`.
    pub fn from_values<'a>(values: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut spellings = Vec::new();
        for value in values {
            let words = value.split(u8::is_ascii_whitespace);
            for word in words.chain([value]).filter(|word| word.len() >= MIN_VALUE_BYTES) {
                spellings.push(word.to_vec());
                spellings.push(base64(word, *b"+/"));
                spellings.push(base64(word, *b"-_"));
                if let Ok(json) = std::str::from_utf8(word).map(|text| serde_json::Value::from(text).to_string()) {
                    spellings.push(json.as_bytes()[1..json.len() - 1].to_vec());
                }
            }
        }
        spellings.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        spellings.dedup();
        Self {
            spellings: spellings.into(),
        }
    }

    /// The stream with the values redacted.
    pub fn apply<S, E>(self, bytes: S) -> impl Stream<Item = Result<Bytes, io::Error>> + Send + 'static
    where
        S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
        E: std::error::Error + Send + Sync + 'static,
    {
        let state = Some((StreamRedactor::new(self), bytes));
        stream::unfold(state, |state| async move {
            let (mut stream_redactor, mut bytes) = state?;
            loop {
                match bytes.next().await {
                    Some(Ok(chunk)) => {
                        let passed = stream_redactor.pass(chunk);
                        if !passed.is_empty() {
                            return Some((Ok(passed), Some((stream_redactor, bytes))));
                        }
                    }
                    Some(Err(error)) => return Some((Err(io::Error::other(error)), None)),
                    None => return Some((Ok(stream_redactor.rest()), None)),
                }
            }
        })
    }
}

/// The redaction of one stream.
struct StreamRedactor {
    redactor: SecretRedactor,
    /// The first bytes of all spellings.
    first: [bool; 256],
    /// Bytes that may be the beginning of a value.
    held: Vec<u8>,
}

impl StreamRedactor {
    fn new(redactor: SecretRedactor) -> Self {
        let mut first = [false; 256];
        for spelling in redactor.spellings.iter() {
            first[usize::from(spelling[0])] = true;
        }
        Self {
            redactor,
            first,
            held: Vec::new(),
        }
    }

    /// The bytes held back and this chunk, as far as they may pass.
    fn pass(&mut self, chunk: Bytes) -> Bytes {
        let nothing_begins = || !chunk.iter().any(|byte| self.first[usize::from(*byte)]);
        if self.held.is_empty() && nothing_begins() {
            return chunk;
        }
        self.held.extend_from_slice(&chunk);
        self.redacted(false)
    }

    /// The bytes held back, at the end of the stream.
    fn rest(&mut self) -> Bytes {
        self.redacted(true)
    }

    fn redacted(&mut self, is_end: bool) -> Bytes {
        let text = std::mem::take(&mut self.held);
        let mut passed = Vec::with_capacity(text.len());
        let mut at = 0;
        while let Some(byte) = text.get(at) {
            if !self.first[usize::from(*byte)] {
                passed.push(*byte);
                at += 1;
                continue;
            }
            let rest = &text[at..];
            // The longest spelling first: it may still be completed, even if a shorter one already matches.
            let mut spellings = self.redactor.spellings.iter();
            let found = spellings.find(|spelling| {
                rest.starts_with(spelling) || (!is_end && spelling.len() > rest.len() && spelling.starts_with(rest))
            });
            match found {
                Some(spelling) if rest.len() < spelling.len() => {
                    self.held = rest.to_vec();
                    break;
                }
                Some(spelling) => {
                    passed.extend_from_slice(REPLACEMENT.as_bytes());
                    at += spelling.len();
                }
                None => {
                    passed.push(*byte);
                    at += 1;
                }
            }
        }
        passed.into()
    }
}

/// Without padding; `last` are the digits for 62 and 63.
fn base64(bytes: &[u8], last: [u8; 2]) -> Vec<u8> {
    const DIGITS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let digit = |sextet: u32| {
        let index = (sextet & 63) as usize;
        DIGITS.get(index).copied().unwrap_or_else(|| last[index - DIGITS.len()])
    };
    let mut text = Vec::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |place: usize| u32::from(group.get(place).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..=group.len() {
            text.push(digit(bits >> (18 - 6 * place)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOKEN: &str = "s3cr3t-t0ken/a+b";

    fn masks(values: &[&str]) -> SecretRedactor {
        SecretRedactor::from_values(values.iter().map(|value| value.as_bytes()))
    }

    /// The result for a text that arrives in these pieces.
    fn through(masks: &SecretRedactor, pieces: &[&[u8]]) -> String {
        let mut masker = StreamRedactor::new(masks.clone());
        let mut passed = Vec::new();
        for piece in pieces {
            passed.extend_from_slice(&masker.pass(Bytes::copy_from_slice(piece)));
        }
        passed.extend_from_slice(&masker.rest());
        String::from_utf8(passed).unwrap()
    }

    #[test]
    fn a_value_is_masked_as_spelt_after_bearer_in_json_and_in_base64() {
        let bearer = format!("Bearer {TOKEN}");
        let quoted = r#"pass"word\1"#;
        let masks = masks(&[&bearer, quoted]);
        for (text, passed) in [
            (format!("it was {TOKEN}, so"), "it was [redacted], so".to_owned()),
            (
                format!(r#"{{"authorization":"{bearer}"}}"#),
                r#"{"authorization":"[redacted]"}"#.to_owned(),
            ),
            (
                r#"{"a":"pass\"word\\1"}"#.to_owned(),
                r#"{"a":"[redacted]"}"#.to_owned(),
            ),
            (r#"raw pass"word\1"#.to_owned(), "raw [redacted]".to_owned()),
            ("czNjcjN0LXQwa2VuL2ErYg==".to_owned(), "[redacted]==".to_owned()),
            (format!("{TOKEN}{TOKEN}"), "[redacted][redacted]".to_owned()),
        ] {
            assert_eq!(through(&masks, &[text.as_bytes()]), passed);
        }
    }

    #[test]
    fn a_text_that_only_resembles_a_secret_passes() {
        let masks = masks(&[TOKEN, "Bearer"]);
        for text in ["s3cr3t-t0ken/a+c", "s3cr3t-t0ken", "Bearer of news", "s3cr3t-", ""] {
            assert_eq!(through(&masks, &[text.as_bytes()]), text);
        }
    }

    #[test]
    fn a_value_of_8_bytes_is_masked_and_one_of_7_is_not() {
        let masks = masks(&["12345678", "abcdefg"]);
        assert_eq!(through(&masks, &[b"12345678 abcdefg"]), "[redacted] abcdefg");
    }

    #[test]
    fn nothing_waits_but_what_may_be_the_beginning_of_a_value() {
        let mut masker = StreamRedactor::new(masks(&[TOKEN]));
        assert_eq!(masker.pass("an event\n\n".into()), "an event\n\n");
        assert_eq!(masker.pass("so far s3cr3t-t0".into()), "so far ");
        assert_eq!(masker.pass("ken, no".into()), "s3cr3t-t0ken, no");
        assert_eq!(masker.pass("s3cr".into()), "");
        assert_eq!(masker.rest(), "s3cr");
    }

    #[test]
    fn the_longer_of_two_values_with_the_same_beginning_is_masked_whole() {
        let masks = masks(&["12345678", "1234567890"]);
        assert_eq!(through(&masks, &[b"1234567", b"8", b"90."]), "[redacted].");
        assert_eq!(through(&masks, &[b"12345678", b"9."]), "[redacted]9.");
    }

    proptest! {
        #[test]
        fn however_it_is_cut_the_result_is_the_same(
            parts in prop::collection::vec(prop_oneof![Just(TOKEN.to_owned()), "[s3cr t-]{0,12}"], 0..6),
            cuts in prop::collection::vec(0..100_usize, 0..8),
        ) {
            let masks = masks(&[TOKEN]);
            let text = parts.concat();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut from = 0;
            for cut in cuts.into_iter().chain([text.len()]) {
                pieces.push(&text.as_bytes()[from..cut]);
                from = cut;
            }
            let passed = through(&masks, &pieces);
            prop_assert_eq!(&passed, &text.replace(TOKEN, REPLACEMENT));
            prop_assert!(!passed.contains(TOKEN));
        }
    }
}
