//! Signatures of tool calls, results and texts: short hashes that show whether two are the same, or differ only in
//! values that change by nature. Pure; keeps no text.

use crate::message;
use crate::tools::admission;
use agentloop_support::hash::sha256;

/// A hash of 32 bits: among the few that are compared, two different texts collide once in a hundred million.
pub type ShortHash = u32;

/// Length of a UUID.
const UUID: usize = 36;
/// Hexadecimal digits from which a word counts as an id.
const MIN_HEX: usize = 8;

/// Identifies a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSignature {
    /// The tool and its arguments, in any order.
    pub raw: ShortHash,
    /// The same, with numbers, ids and times masked.
    pub masked: ShortHash,
}

/// Identifies a result, together with its tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultSignature {
    /// The text without ids and times.
    pub steady: ShortHash,
    /// The same, with numbers masked too.
    pub masked: ShortHash,
}

/// Must stay the same in every version, since it is persisted.
fn short_hash(of: &[&str]) -> ShortHash {
    ShortHash::from_be_bytes(sha256(of.join("\n")).first_chunk().copied().unwrap_or_default())
}

/// The signature of a call. The reasoning is not part of it, since the model words it differently each time.
pub fn call(tool: &str, arguments: &str) -> CallSignature {
    let canonical = match message::arguments(arguments) {
        Some(mut arguments) => {
            arguments.shift_remove("reasoning");
            admission::sorted(&arguments).to_string()
        }
        None => arguments.trim().to_owned(),
    };
    CallSignature {
        raw: short_hash(&["call", tool, &canonical]),
        masked: short_hash(&["calls", tool, &masked(&canonical)]),
    }
}

pub fn result(tool: &str, text: &str) -> ResultSignature {
    ResultSignature {
        steady: short_hash(&["result", tool, &steady(text)]),
        masked: short_hash(&["results", tool, &masked(text)]),
    }
}

/// The signature of a model's text.
pub fn text(answer: &str) -> ShortHash {
    let words: Vec<&str> = answer.split_whitespace().collect();
    short_hash(&["text", &masked(&words.join(" ").to_lowercase())])
}

/// The signature of a text, of which every byte counts.
pub fn exact(text: &str) -> ShortHash {
    short_hash(&["exact", text])
}

/// A text with ids and times masked.
fn steady(text: &str) -> String {
    mask(text, false)
}

/// A text with ids, times and numbers masked.
fn masked(text: &str) -> String {
    mask(text, true)
}

fn mask(text: &str, numbers: bool) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut rest = text;
    let mut inside = false;
    while let Some(first) = rest.chars().next() {
        // UUIDs, times and hexadecimal ids are matched only at the beginning of a word; plain digits anywhere.
        let found = if inside { None } else { found(rest, numbers) };
        let taken = match found {
            Some((taken, mark)) => {
                masked.push(mark);
                taken
            }
            None if numbers && first.is_ascii_digit() => {
                masked.push('#');
                digits(rest)
            }
            None => {
                masked.push(first);
                first.len_utf8()
            }
        };
        inside = rest[..taken].chars().next_back().is_some_and(char::is_alphanumeric);
        rest = &rest[taken..];
    }
    masked
}

/// The value to mask at the beginning of a word: its length and its placeholder.
fn found(text: &str, numbers: bool) -> Option<(usize, char)> {
    let bytes = text.as_bytes();
    let ends_word = |end: usize| !bytes.get(end).is_some_and(u8::is_ascii_alphanumeric);
    if is_uuid(bytes) && ends_word(UUID) {
        return Some((UUID, 'U'));
    }
    if let Some(taken) = moment(bytes) {
        return Some((taken, 'T'));
    }
    let hex = bytes.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let is_id = hex >= MIN_HEX && ends_word(hex) && bytes[..hex].iter().any(u8::is_ascii_digit);
    (numbers && is_id).then_some((hex, '#'))
}

fn is_uuid(bytes: &[u8]) -> bool {
    bytes.len() >= UUID
        && bytes[..UUID].iter().enumerate().all(|(place, byte)| match place {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// The length of a time that begins here: a time of day, a date with a time, or seconds or milliseconds since 1970. A
/// date alone does not count: it may be what the call is about.
fn moment(bytes: &[u8]) -> Option<usize> {
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    // From 2001 to 2033.
    let ends = !bytes.get(digits).is_some_and(u8::is_ascii_alphanumeric);
    if matches!(digits, 10 | 13) && bytes[0] == b'1' && ends {
        return Some(digits);
    }
    let date = fits(bytes, b"dddd-dd-dd").then_some(11);
    let start = date.filter(|_| matches!(bytes.get(10), Some(b'T' | b' '))).unwrap_or(0);
    let time = &bytes[start..];
    let mut end = if fits(time, b"dd:dd:dd") {
        8
    } else if start > 0 && fits(time, b"dd:dd") {
        5
    } else {
        return None;
    };
    if matches!(time.get(end), Some(b'.' | b',')) {
        let fraction = time[end + 1..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        end += if fraction > 0 { fraction + 1 } else { 0 };
    }
    let zone = &time[end..];
    end += match zone.first() {
        Some(b'Z') => 1,
        Some(b'+' | b'-') if fits(&zone[1..], b"dd:dd") => 6,
        _ => 0,
    };
    Some(start + end)
}

/// Whether a text begins with this pattern; `d` stands for a digit.
fn fits(bytes: &[u8], pattern: &[u8]) -> bool {
    bytes.len() >= pattern.len()
        && bytes.iter().zip(pattern).all(|(byte, wanted)| match wanted {
            b'd' => byte.is_ascii_digit(),
            other => byte == other,
        })
}

fn digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("pod-17 is up", "pod-17 is up", "pod-# is up")]
    #[case("at 2026-01-31T08:00:00.25Z: 3 jobs", "at T: 3 jobs", "at T: # jobs")]
    #[case("2026-01-31 08:00:00+01:00", "T", "T")]
    #[case("2026-01-31", "2026-01-31", "#-#-#")]
    #[case("12:30:05 and 12:30", "T and 12:30", "T and #:#")]
    #[case("id 6f9619ff-8b86-d011-b42d-00c04fc964ff!", "id U!", "id U!")]
    #[case("1767225600 s, 1767225600123 ms", "T s, T ms", "T s, T ms")]
    #[case("17672256001", "17672256001", "#")]
    #[case("commit 9fceb02d0ae598e9 done", "commit 9fceb02d0ae598e9 done", "commit # done")]
    #[case("deadbeef decade", "deadbeef decade", "deadbeef decade")]
    #[case("äö 5 ü7", "äö 5 ü7", "äö # ü#")]
    #[case("", "", "")]
    fn values_that_change_on_their_own_are_masked(
        #[case] text: &str,
        #[case] as_steady: &str,
        #[case] as_masked: &str,
    ) {
        assert_eq!((steady(text).as_str(), masked(text).as_str()), (as_steady, as_masked));
    }

    #[test]
    fn a_call_is_the_same_whatever_the_order_of_its_arguments_and_the_reasons_for_it() {
        let one = call(
            "read",
            r#"{"path": "a1", "lines": {"from": 1, "to": 9}, "reasoning": "to see"}"#,
        );
        let same = call(
            "read",
            r#"{"reasoning": "again", "lines": {"to": 9, "from": 1}, "path": "a1"}"#,
        );
        let next = call("read", r#"{"path": "a2", "lines": {"from": 1, "to": 9}}"#);
        let other = call("read", r#"{"path": "b1", "lines": {"from": 1, "to": 9}}"#);
        let tool = call("list", r#"{"path": "a1", "lines": {"from": 1, "to": 9}}"#);
        assert_eq!(one, same);
        assert_eq!((one.raw == next.raw, one.masked == next.masked), (false, true));
        assert_eq!((one.raw == other.raw, one.masked == other.masked), (false, false));
        assert_eq!((one.raw == tool.raw, one.masked == tool.masked), (false, false));
        assert_eq!(call("read", ""), call("read", "{}"));
        assert_eq!(call("read", "{bad"), call("read", " {bad "));
    }

    #[test]
    fn a_text_is_the_same_whatever_its_spaces_its_case_and_its_numbers() {
        assert_eq!(text("Nothing to do, turn 7."), text(" nothing to do,\n turn 8. "));
        assert_ne!(text("Nothing to do."), text("Something to do."));
    }

    proptest::proptest! {
        #[test]
        fn any_text_can_be_masked_and_no_number_is_left(answer in "[0-9a-f:TZ. \\-ä]{0,60}|\\PC{0,60}") {
            proptest::prop_assert!(masked(&answer).bytes().all(|byte| !byte.is_ascii_digit()));
            let _ = (steady(&answer), call("t", &answer), text(&answer));
        }
    }
}
