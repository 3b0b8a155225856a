//! How a right text becomes a nearly right one.

use crate::support::random::Random;

/// Pieces that parsers trip over.
const PIECES: [&str; 18] = [
    "\"",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\\",
    "\\u0000",
    "null",
    "-1",
    "1e999",
    "9223372036854775807",
    "18446744073709551616",
    "0.1",
    "\u{feff}",
    "\n\n",
    "true",
];

/// `text` with one to eight changes; at times with a piece of `other`.
pub fn mutated(random: &mut Random, text: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = text.to_vec();
    for _ in 0..random.range(1, 9) {
        change(random, &mut bytes, other);
    }
    bytes
}

fn change(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let at = random.index(bytes.len() + 1);
    let end = (at + random.index(24)).min(bytes.len());
    match random.index(7) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.index(8),
        1 if at < bytes.len() => bytes[at] = u8::try_from(random.range(0, 256)).unwrap(),
        2 => drop(bytes.drain(at..end)),
        3 => {
            let again = bytes[at..end].to_vec();
            bytes.splice(at..at, again);
        }
        4 => bytes.truncate(at),
        5 => {
            let from = random.index(other.len() + 1);
            let to = (from + random.index(64)).min(other.len());
            bytes.splice(at..end, other[from..to].iter().copied());
        }
        _ => {
            let piece = PIECES[random.index(PIECES.len())].as_bytes();
            bytes.splice(at..end, piece.iter().copied());
        }
    }
}
