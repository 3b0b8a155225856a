//! The result of a tool as text. Pure.

use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};
use serde_json::Value;

/// Replaces content of later versions of the protocol.
const UNKNOWN: &str = "[content of an unknown kind was left out]";

/// The structured content alone, if there is any, otherwise the text.
#[must_use]
pub fn value(result: &CallToolResult) -> String {
    result
        .structured_content
        .as_ref()
        .map_or_else(|| of(result), Value::to_string)
}

/// The complete result, for a model.
#[must_use]
pub fn of(result: &CallToolResult) -> String {
    let mut parts: Vec<String> = result.content.iter().map(block).collect();
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

/// A note that replaces content that a model cannot read. `data` is base64: four characters for three bytes.
fn left_out(kind: &str, mime_type: Option<&str>, data: &str) -> String {
    let bytes = data.trim_end_matches('=').len() * 3 / 4;
    let mime_type = mime_type.unwrap_or("unknown type");
    format!("[{kind} of {bytes} bytes, {mime_type}, left out]")
}
