//! The result of a tool as text. Pure.
//!
//! What a model cannot read as text is named in words. Stores nothing: who stores it adds where it is.

use std::fmt::Write as _;

use rmcp::model::{CallToolResult, ContentBlock, Resource, ResourceContents};
use serde_json::Value;

/// Replaces content of later versions of the protocol.
const UNKNOWN: &str = "[content of an unknown kind was left out]";
/// Maximum number of bytes of an address or a name that a server gives its content; the rest is left out.
const MAX_LABEL: usize = 300;
/// Maximum number of bytes of a media type: RFC 6838 allows 127 for each of its two parts, and no registered one is that long.
const MAX_MEDIA_TYPE: usize = 100;

/// Content that is not text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedContent<'a> {
    kind: &'static str,
    uri: Option<&'a str>,
    /// As the server declares it.
    media_type: Option<&'a str>,
    /// In base64.
    pub data: &'a str,
}

impl EncodedContent<'_> {
    /// Its media type as the server declares it, if that is one.
    #[must_use]
    pub fn media_type(&self) -> Option<&str> {
        self.media_type.filter(|text| is_media_type(text))
    }

    /// Names it in words: its kind, its media type and its size, and what is known beyond that.
    #[must_use]
    pub fn described(&self, beyond: &str) -> String {
        let mut words = self.kind.to_owned();
        if let Some(uri) = self.uri {
            let _ = write!(words, " {},", label(uri));
        }
        let media_type = self.media_type().unwrap_or("unknown type");
        let size = grouped(self.bytes());
        if beyond.is_empty() {
            format!("[{words} {media_type}, {size} bytes]")
        } else {
            format!("[{words} {media_type}, {size} bytes: {beyond}]")
        }
    }

    /// Bytes of the content: base64 has four characters for three of them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.trim_end_matches('=').len() * 3 / 4
    }
}

/// The structured content alone, if there is any, otherwise the text.
#[must_use]
pub fn value(result: &CallToolResult) -> String {
    result
        .structured_content
        .as_ref()
        .map_or_else(|| of(result), Value::to_string)
}

/// The complete result, for a model. Content that is not text is only named.
#[must_use]
pub fn of(result: &CallToolResult) -> String {
    of_with(result, |content| content.described(""))
}

/// The same, with `describe` for each content that is not text, in order.
pub fn of_with(result: &CallToolResult, mut describe: impl FnMut(&EncodedContent<'_>) -> String) -> String {
    let mut parts: Vec<String> = result.content.iter().map(|one| block(one, &mut describe)).collect();
    if let Some(structured) = &result.structured_content
        && !is_in_parts(&parts, structured)
    {
        parts.push(structured.to_string());
    }
    parts.join("\n")
}

/// Whether the texts repeat the structured content, as servers do for clients that know only text. A single value is
/// wrapped as `{"result": …}`, and a list as one text for each of its items.
fn is_in_parts(parts: &[String], structured: &Value) -> bool {
    let read = |text: &String| serde_json::from_str::<Value>(text).unwrap_or_else(|_| Value::String(text.clone()));
    let values: Vec<Value> = parts.iter().map(read).collect();
    let inner = structured.as_object().filter(|object| object.len() == 1);
    let inner = inner.and_then(|object| object.get("result"));
    let is_same = |value: &Value| values == [value.clone()] || value.as_array() == Some(&values);
    is_same(structured) || inner.is_some_and(is_same)
}

fn block(block: &ContentBlock, describe: &mut impl FnMut(&EncodedContent<'_>) -> String) -> String {
    let mut encoded = |kind, uri, media_type, data| {
        describe(&EncodedContent {
            kind,
            uri,
            media_type,
            data,
        })
    };
    match block {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::Image(image) => encoded("image", None, Some(&*image.mime_type), &*image.data),
        ContentBlock::Audio(audio) => encoded("audio", None, Some(&*audio.mime_type), &*audio.data),
        ContentBlock::Resource(resource) => match &resource.resource {
            ResourceContents::TextResourceContents {
                uri, mime_type, text, ..
            } => {
                let media_type = mime_type.as_deref().filter(|text| is_media_type(text));
                let media_type = media_type.map_or_else(String::new, |text| format!(", {text}"));
                format!("[resource {}{media_type}]\n{text}", label(uri))
            }
            ResourceContents::BlobResourceContents {
                uri, mime_type, blob, ..
            } => encoded("resource", Some(&**uri), mime_type.as_deref(), &**blob),
            _ => UNKNOWN.into(),
        },
        ContentBlock::ResourceLink(link) => linked(link),
        _ => UNKNOWN.into(),
    }
}

/// Names a resource that the server has and did not send.
fn linked(link: &Resource) -> String {
    let mut words = format!("[link to resource {}: {}", label(&link.name), label(&link.uri));
    if let Some(media_type) = link.mime_type.as_deref().filter(|text| is_media_type(text)) {
        let _ = write!(words, ", {media_type}");
    }
    if let Some(size) = link.size {
        let _ = write!(words, ", {size} bytes");
    }
    words.push(']');
    words
}

/// The characters of RFC 6838, and those between a type and its parameters.
fn is_media_type(text: &str) -> bool {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "!#$&-^_.+/;= ".contains(letter);
    text.len() <= MAX_MEDIA_TYPE && text.contains('/') && text.chars().all(fits)
}

/// A name of a server on one line, and not longer than a name needs to be.
fn label(text: &str) -> String {
    let kept = &text[..text.floor_char_boundary(MAX_LABEL)];
    let mut label: String = kept
        .chars()
        .map(|letter| if letter.is_control() { ' ' } else { letter })
        .collect();
    if kept.len() < text.len() {
        label.push('…');
    }
    label
}

/// A number with a comma before each group of three digits.
#[must_use]
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_a_comma_before_each_group_of_three_digits() {
        let all = [0, 999, 1000, 34_112, 999_999, 4_194_304].map(grouped);
        assert_eq!(all, ["0", "999", "1,000", "34,112", "999,999", "4,194,304"]);
    }

    #[test]
    fn a_name_of_a_server_is_one_line_of_a_bounded_length() {
        assert_eq!(label("file:///a\nb\u{85}c"), "file:///a b c");
        assert_eq!(label(&"x".repeat(MAX_LABEL)), "x".repeat(MAX_LABEL));
        assert_eq!(label(&"x".repeat(MAX_LABEL + 1)), format!("{}…", "x".repeat(MAX_LABEL)));
        assert_eq!(label(&"ä".repeat(MAX_LABEL)), format!("{}…", "ä".repeat(MAX_LABEL / 2)));
    }

    #[test]
    fn a_media_type_is_accepted_only_if_valid() {
        assert!(is_media_type("image/svg+xml") && is_media_type("text/plain; charset=utf-8"));
        assert!(is_media_type(&format!("a/{}", "b".repeat(MAX_MEDIA_TYPE - 2))));
        assert!(!is_media_type(&format!("a/{}", "b".repeat(MAX_MEDIA_TYPE - 1))));
        assert!(!is_media_type("png") && !is_media_type("image/png]\n[From") && !is_media_type(""));
    }
}
