//! How a right text becomes a nearly right one.

use serde_json::{Map, Value, json};

use crate::support::random::Random;

/// Pieces that parsers trip over.
const PIECES: [&str; 20] = [
    "\"",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\\",
    "\\u0000",
    "\\n",
    "\\r",
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

/// Texts that are something else where they are written: lines, frames, headers, times out of range, many bytes of few
/// characters.
const TEXTS: [&str; 14] = [
    "",
    "x\ny",
    "x\ry",
    "\0",
    "end",
    "start",
    "text",
    ":",
    "tool:\u{e9}",
    "\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}\u{1f600}",
    "-009999-01-02T01:59:59Z",
    "9999-12-30T22:00:00.9Z",
    "1970-01-01T00:00:00Z",
    "<script>\u{202e}\u{1b}[2J",
];
/// The ends of ranges.
const NUMBERS: [i64; 10] = [
    0,
    -1,
    1,
    i64::MAX,
    i64::MAX - 1,
    i64::MIN,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 53,
];

/// `sample`, which stays JSON of the same form, with one to four values that no pod sends.
pub fn bent(random: &mut Random, sample: &Value) -> Value {
    let mut bent = sample.clone();
    for _ in 0..random.range(1, 5) {
        let mut leaves = Vec::new();
        collect(&mut bent, &mut leaves);
        let chosen = random.index(leaves.len());
        let leaf = leaves.swap_remove(chosen);
        *leaf = match leaf {
            Value::String(_) => TEXTS[random.index(TEXTS.len())].into(),
            Value::Number(_) if random.index(NUMBERS.len() + 1) == 0 => json!(u64::MAX),
            Value::Number(_) => NUMBERS[random.index(NUMBERS.len())].into(),
            Value::Bool(is_so) => (!*is_so).into(),
            Value::Null | Value::Array(_) | Value::Object(_) => Value::Null,
        };
    }
    bent
}

fn collect<'a>(value: &'a mut Value, leaves: &mut Vec<&'a mut Value>) {
    let is_leaf = value.as_array().is_none_or(Vec::is_empty) && value.as_object().is_none_or(Map::is_empty);
    match value {
        leaf if is_leaf => leaves.push(leaf),
        Value::Array(items) => items.iter_mut().for_each(|item| collect(item, leaves)),
        Value::Object(fields) => fields.values_mut().for_each(|field| collect(field, leaves)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Values that take few bytes as JSON and many in memory.
const SMALL_ELEMENTS: [&str; 5] = ["{}", "[]", "\"\"", "0", "null"];

/// `sample`, of about this many bytes, with one list or object grown: a list gets many elements, which are empty or what it had, and
/// an object becomes a list, or has one field many times.
pub fn amplified(sample: &Value, bytes: usize) -> Vec<Vec<u8>> {
    const HOLE: &str = "grown here";
    let mut found = Vec::new();
    let mut grown = sample.clone();
    for path in containers(sample, "") {
        let place = grown.pointer_mut(&path).unwrap();
        let before = std::mem::replace(place, HOLE.into());
        let mut elements: Vec<String> = SMALL_ELEMENTS.map(String::from).into();
        let mut texts = Vec::new();
        match &before {
            Value::Array(items) => elements.extend(items.first().map(Value::to_string)),
            Value::Object(fields) => {
                // A type may be read from a list of its fields.
                texts.push(fields.values().cloned().collect::<Value>().to_string());
                let (name, value) = fields
                    .iter()
                    .next()
                    .map_or(("a", &Value::Null), |(name, value)| (name, value));
                let field = format!("{}:{value}", json!(name));
                texts.push(format!(
                    "{{{}}}",
                    vec![field.clone(); bytes / (field.len() + 1)].join(",")
                ));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
        let many = |element: &String| format!("[{}]", vec![element.as_str(); bytes / (element.len() + 1)].join(","));
        texts.extend(elements.iter().map(many));
        let hole = json!(HOLE).to_string();
        found.extend(
            texts
                .iter()
                .map(|text| grown.to_string().replace(&hole, text).into_bytes()),
        );
        *grown.pointer_mut(&path).unwrap() = before;
    }
    found
}

/// Where the lists and objects of a value are, all but itself.
fn containers(value: &Value, path: &str) -> Vec<String> {
    let inner: Vec<(String, &Value)> = match value {
        Value::Array(items) => items.iter().take(1).map(|item| (format!("{path}/0"), item)).collect(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, field)| (format!("{path}/{name}"), field))
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    };
    let inner = inner
        .into_iter()
        .filter(|(_, value)| value.is_array() || value.is_object());
    inner
        .flat_map(|(path, value)| {
            let within = containers(value, &path);
            std::iter::once(path).chain(within)
        })
        .collect()
}
