//! What a tool said, as text for a model. Pure.

use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};
use serde_json::Value;

use crate::engine::tool::ToolOutcome;

/// In place of kinds of later versions of the protocol.
const UNKNOWN: &str = "[content of a kind that is not known here was left out]";

/// The outcome that a result tells of.
pub(super) fn outcome(result: &CallToolResult) -> ToolOutcome {
    let text = text(result);
    if result.is_error == Some(true) {
        ToolOutcome::Failed { text }
    } else {
        ToolOutcome::Done { text }
    }
}

/// The same for a run whose result is no text for a model, but a value: what is structured alone, where there is any.
pub(super) fn value(result: &CallToolResult) -> ToolOutcome {
    match &result.structured_content {
        Some(structured) if result.is_error != Some(true) => ToolOutcome::Done {
            text: structured.to_string(),
        },
        Some(_) | None => outcome(result),
    }
}

fn text(result: &CallToolResult) -> String {
    let mut parts: Vec<String> = result.content.iter().map(block).collect();
    if let Some(structured) = &result.structured_content
        && !is_said(&parts, structured)
    {
        parts.push(structured.to_string());
    }
    parts.join("\n")
}

/// Whether the texts say the same already: servers repeat structured content as text, for clients that know only text.
/// A single value is wrapped as `{"result": …}`, and a list as a text for each of its items.
fn is_said(parts: &[String], structured: &Value) -> bool {
    let read = |text: &String| serde_json::from_str::<Value>(text).unwrap_or_else(|_| Value::String(text.clone()));
    let said: Vec<Value> = parts.iter().map(read).collect();
    let inner = structured.as_object().filter(|object| object.len() == 1);
    let inner = inner.and_then(|object| object.get("result"));
    let is_same = |value: &Value| said == [value.clone()] || value.as_array() == Some(&said);
    is_same(structured) || inner.is_some_and(is_same)
}

fn block(block: &ContentBlock) -> String {
    match block {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::Image(image) => left_out("image", Some(&image.mime_type), &image.data),
        ContentBlock::Audio(audio) => left_out("audio", Some(&audio.mime_type), &audio.data),
        ContentBlock::Resource(resource) => match &resource.resource {
            ResourceContents::TextResourceContents { uri, text, .. } => format!("[{uri}]\n{text}"),
            ResourceContents::BlobResourceContents {
                uri, mime_type, blob, ..
            } => format!("[{uri}]\n{}", left_out("blob", mime_type.as_deref(), blob)),
            _ => UNKNOWN.into(),
        },
        ContentBlock::ResourceLink(link) => format!("[link to {}: {}]", link.name, link.uri),
        _ => UNKNOWN.into(),
    }
}

/// A note in place of what a model cannot read. `data` is base64: four characters for three bytes.
fn left_out(kind: &str, mime_type: Option<&str>, data: &str) -> String {
    let bytes = data.trim_end_matches('=').len() * 3 / 4;
    let mime_type = mime_type.unwrap_or("unknown type");
    format!("[{kind} of {bytes} bytes, {mime_type}, left out]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pretty_assertions::assert_eq;
    use serde_json::json;

    fn of(result: Value) -> ToolOutcome {
        outcome(&serde_json::from_value(result).unwrap())
    }

    fn done(text: &str) -> ToolOutcome {
        ToolOutcome::Done { text: text.into() }
    }

    fn text(text: &str) -> Value {
        json!({"type": "text", "text": text})
    }

    #[test]
    fn texts_are_joined_and_an_error_is_a_failure() {
        assert_eq!(of(json!({"content": [text("a"), text("b")]})), done("a\nb"));
        assert_eq!(of(json!({"content": []})), done(""));
        let failed = of(json!({"content": [text("no such file")], "isError": true}));
        assert_eq!(
            failed,
            ToolOutcome::Failed {
                text: "no such file".into()
            }
        );
    }

    #[test]
    fn structured_content_is_json_unless_the_text_says_it_already() {
        let structured = json!({"b": 1, "a": [2]});
        let said = json!({"content": [text("{\"a\":[2],\"b\": 1}")], "structuredContent": structured});
        assert_eq!(of(said), done("{\"a\":[2],\"b\": 1}"));
        let alone = json!({"content": [], "structuredContent": structured});
        assert_eq!(of(alone), done("{\"b\":1,\"a\":[2]}"));
        let more = json!({"content": [text("two things")], "structuredContent": structured});
        assert_eq!(of(more), done("two things\n{\"b\":1,\"a\":[2]}"));
    }

    #[test]
    fn a_value_is_what_is_structured_and_else_the_text() {
        let of = |result: Value| value(&serde_json::from_value(result).unwrap());
        let both = json!({"content": [text("two things")], "structuredContent": {"b": 1}});
        assert_eq!(of(both), done("{\"b\":1}"));
        let list = json!({"content": [text("a"), text("b")], "structuredContent": {"result": ["a", "b"]}});
        assert_eq!(of(list), done("{\"result\":[\"a\",\"b\"]}"));
        assert_eq!(of(json!({"content": [text("7")]})), done("7"));
        let failed = json!({"content": [text("no")], "structuredContent": {"b": 1}, "isError": true});
        assert!(matches!(of(failed), ToolOutcome::Failed { .. }));
    }

    #[test]
    fn a_wrapped_value_or_list_is_not_said_twice() {
        let wrapped = json!({"content": [text("7")], "structuredContent": {"result": 7}});
        assert_eq!(of(wrapped), done("7"));
        let word = json!({"content": [text("rain")], "structuredContent": {"result": "rain"}});
        assert_eq!(of(word), done("rain"));
        let list = json!({"content": [text("a"), text("b")], "structuredContent": {"result": ["a", "b"]}});
        assert_eq!(of(list), done("a\nb"));
        let other = json!({"content": [text("a")], "structuredContent": {"result": ["a", "b"]}});
        assert_eq!(of(other), done("a\n{\"result\":[\"a\",\"b\"]}"));
    }

    #[test]
    fn what_a_model_cannot_read_is_replaced_by_its_kind_and_size() {
        let content = json!({"content": [
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "audio", "data": "AAAAAA==", "mimeType": "audio/wav"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
            {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAA="}},
            {"type": "resource_link", "uri": "file:///c", "name": "c"},
        ]});
        assert_eq!(
            of(content),
            done(
                "[image of 3 bytes, image/png, left out]\n[audio of 4 bytes, audio/wav, left out]\n[file:///a]\ninside\n\
                 [file:///b]\n[blob of 2 bytes, unknown type, left out]\n[link to c: file:///c]"
            )
        );
    }
}
