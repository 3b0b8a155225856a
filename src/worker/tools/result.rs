//! Converts the result of a tool into the outcome of its run. Pure.

use rmcp::model::CallToolResult;

use crate::api::agent::LimitedResource;
use crate::api::toolbox::{BANDWIDTH_BYTES_META, DISK_WRITE_BYTES_META};
use crate::engine::tool::ToolOutcome;
use crate::mcp::text;

pub(super) fn outcome(result: &CallToolResult) -> ToolOutcome {
    let text = text::of(result);
    if result.is_error == Some(true) {
        ToolOutcome::Failed { text }
    } else {
        ToolOutcome::Done { text }
    }
}

/// The same for a run whose result is a value for hot state, not text for a model.
pub(super) fn value(result: &CallToolResult) -> ToolOutcome {
    if result.is_error == Some(true) {
        return outcome(result);
    }
    ToolOutcome::Done {
        text: text::value(result),
    }
}

/// The amounts that the toolbox measured.
pub(super) fn used(result: &CallToolResult) -> Vec<(LimitedResource, u64)> {
    let measured = [
        (LimitedResource::DiskWriteBytes, DISK_WRITE_BYTES_META),
        (LimitedResource::BandwidthBytes, BANDWIDTH_BYTES_META),
    ];
    let amount = |key: &str| result.meta.as_ref()?.get(key)?.as_u64().filter(|amount| *amount > 0);
    measured
        .into_iter()
        .filter_map(|(resource, key)| Some((resource, amount(key)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

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
        let value = json!({"content": [text("{\"a\":[2],\"b\": 1}")], "structuredContent": structured});
        assert_eq!(of(value), done("{\"a\":[2],\"b\": 1}"));
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
    fn measured_bytes_are_numbers_above_0() {
        let of = |meta: Value| used(&serde_json::from_value(json!({"content": [], "_meta": meta})).unwrap());
        let both = json!({"agentloop.dev/disk-write-bytes": 4096, "agentloop.dev/bandwidth-bytes": 7});
        assert_eq!(
            of(both),
            [
                (LimitedResource::DiskWriteBytes, 4096),
                (LimitedResource::BandwidthBytes, 7)
            ]
        );
        let wrong = json!({"agentloop.dev/disk-write-bytes": -1, "agentloop.dev/bandwidth-bytes": "9"});
        assert_eq!(of(wrong), []);
        assert_eq!(of(json!({"agentloop.dev/disk-write-bytes": 0})), []);
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
