//! The content coding gzip for scrapes: whether a request accepts it, and the compression of a text that arrives in pieces.
//!
//! Owns no text and no connection. What it holds has the same size however long the text is. ADR 116 explains the level.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::exposition::thousandths;

/// The name of the coding in headers.
pub(super) const GZIP: &str = "gzip";
/// Size at which compressed bytes are handed on.
const PIECE: usize = 16 * 1024;
/// The fastest level: a text of metrics repeats itself so much that others gain little for their time.
const LEVEL: u32 = 1;

/// Whether a header `Accept-Encoding` asks for gzip: by its name, or by `*`, with at least the weight of the plain text.
pub(super) fn is_accepted(accept: &str) -> bool {
    let (mut gzip, mut other, mut identity) = (None, None, None);
    for coding in accept.split(',') {
        let coding = coding.to_ascii_lowercase();
        let mut parts = coding.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let weight = parts
            .filter_map(|part| part.split_once('='))
            .find(|(name, _)| name.trim() == "q")
            .map_or(1000, |(_, value)| thousandths(value.trim()));
        match name {
            GZIP | "x-gzip" => gzip = gzip.max(Some(weight)),
            "*" => other = Some(weight),
            "identity" => identity = Some(weight),
            _ => {}
        }
    }
    let gzip = gzip.or(other).unwrap_or_default();
    gzip > 0 && gzip >= identity.unwrap_or_default()
}

/// Compresses pieces of a text into pieces of gzip.
pub(super) struct GzipPieces(GzEncoder<Vec<u8>>);

impl Default for GzipPieces {
    fn default() -> Self {
        Self(GzEncoder::new(Vec::new(), Compression::new(LEVEL)))
    }
}

impl GzipPieces {
    /// Takes a piece of the text, and hands on what is compressed once that is enough. `false`: the reader is gone.
    pub(super) fn push(&mut self, piece: &[u8], sink: &mut dyn FnMut(Vec<u8>) -> bool) -> bool {
        // A vector takes every write.
        self.0.write_all(piece).is_ok() && (self.0.get_ref().len() < PIECE || sink(std::mem::take(self.0.get_mut())))
    }

    /// Hands on the rest, without which a reader rejects what it has.
    pub(super) fn finish(self, sink: &mut dyn FnMut(Vec<u8>) -> bool) {
        if let Ok(rest) = self.0.finish() {
            sink(rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;
    use rstest::rstest;

    use super::*;

    #[rstest]
    // As Prometheus, Go, and curl --compressed ask.
    #[case("gzip", true)]
    #[case("gzip, deflate, br, zstd", true)]
    #[case("deflate, GZIP;q=1.0", true)]
    #[case("x-gzip", true)]
    #[case("gzip;q=0.001", true)]
    #[case("*", true)]
    #[case("gzip;q=0.5, identity;q=0.5", true)]
    #[case("gzip;q=0.4, identity;q=0.5", false)]
    #[case("", false)]
    #[case("identity", false)]
    #[case("deflate, br", false)]
    #[case("gzip;q=0", false)]
    #[case("gzip ; Q=0.000", false)]
    #[case("gzip;q=much", false)]
    #[case("*, gzip;q=0", false)]
    #[case("*;q=0", false)]
    #[case("gzipped", false)]
    fn the_header_accept_encoding_decides(#[case] accept: &str, #[case] expected: bool) {
        assert_eq!(is_accepted(accept), expected, "{accept}");
    }

    /// Text that hardly repeats itself.
    fn noise(bytes: usize) -> Vec<u8> {
        let numbers = (1_u64..).map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29));
        let numbers = numbers.map(|number| number.wrapping_mul(0xBF58_476D_1CE4_E5B9));
        numbers.flat_map(u64::to_le_bytes).take(bytes).collect()
    }

    #[test]
    fn pieces_are_handed_on_while_the_text_arrives_and_are_the_text_together() {
        for text in [
            noise(1 << 20),
            b"agentloop_agent_turns_total 1\n".repeat(1 << 17),
            Vec::new(),
        ] {
            let (mut gzip, mut taken, mut largest) = (GzipPieces::default(), Vec::new(), 0);
            for piece in text.chunks(32 * 1024) {
                assert!(gzip.push(piece, &mut |piece| {
                    largest = largest.max(piece.len());
                    taken.extend(piece);
                    true
                }));
            }
            let early = taken.len();
            gzip.finish(&mut |piece| {
                taken.extend(piece);
                true
            });
            let mut decoded = Vec::new();
            GzDecoder::new(&*taken).read_to_end(&mut decoded).unwrap();
            assert!(decoded == text, "{} bytes of {}", decoded.len(), text.len());
            assert!(largest < 128 * 1024, "{largest} bytes in a piece");
            assert!(
                taken.len() - early < 128 * 1024,
                "{early} bytes before the end of {}",
                taken.len()
            );
        }
    }

    #[test]
    fn without_a_reader_nothing_more_is_compressed() {
        let text = noise(1 << 20);
        let (mut gzip, mut handed_on) = (GzipPieces::default(), 0);
        let mut sink = |_: Vec<u8>| {
            handed_on += 1;
            false
        };
        let pieces = text.chunks(32 * 1024);
        let taken = pieces.take_while(|piece| gzip.push(piece, &mut sink)).count();
        assert!(taken < 4, "{taken}");
        assert_eq!(handed_on, 1);
    }
}
