//! The tool with which the model reads what a prompt has no room for. The worker runs it itself.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::{ArtifactName, ArtifactStore, MAX_ARTIFACT_BYTES};
use crate::engine::tool::{ToolEffect, ToolOutcome, ToolRun, ToolSpec, UnknownOutcomePolicy};
use crate::mcp::text::grouped;
use crate::support::text::first_chars;

/// Its name. Those of servers' tools contain `__`.
pub const READ_TOOL: &str = "artifact_read";
/// The longest that reading one may take: much more than a volume that works needs.
const TIMEOUT: SignedDuration = SignedDuration::from_secs(30);
/// Bytes that the line before a part may have.
const HEADER: usize = 160;
/// Maximum number of characters of a wrong name that are returned to the model.
const MAX_TOLD: usize = 100;

/// The tool as it is offered. `trusted`: every server of the Agent is. Otherwise what it reads is untrusted content, since
/// an artifact may be of any of them.
#[must_use]
pub fn read_tool(trusted: bool) -> ToolSpec {
    ToolSpec {
        name: READ_TOOL.into(),
        description: "Reads a stored tool result by the name of its artifact, such as 0123456789abcdef.txt. Returns a part of \
                      a text, and the offset of the next part; of other content only its type and size. The oldest artifacts \
                      are removed when there are too many."
            .into(),
        parameters: json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "As the result has it."},
                "offset": {"type": "integer", "minimum": 0, "description": "First byte; default 0."},
                "maxBytes": {"type": "integer", "minimum": 1, "description": "Default: as much as a result may have."},
            },
            "required": ["name"],
            "additionalProperties": false,
        }),
        effect: ToolEffect::Read,
        idempotent: true,
        timeout: TIMEOUT,
        on_unknown: UnknownOutcomePolicy::TellModel,
        definition: None,
        target: String::new(),
        // It only reads what tools have returned to this Agent.
        needs_approval: false,
        needs_approval_after_untrusted: false,
        approval_condition: None,
        trusted,
        missing_grant: None,
    }
}

/// Runs the tool.
pub async fn run_read_tool(store: &Arc<ArtifactStore>, run: ToolRun) -> ToolOutcome {
    let store = Arc::clone(store);
    let read = tokio::task::spawn_blocking(move || match read_part(&store, &run) {
        Ok(text) => ToolOutcome::Done { text },
        Err(text) => ToolOutcome::Failed { text },
    });
    read.await.unwrap_or_else(|_| ToolOutcome::Unknown {
        message: "the worker failed while reading the artifact; this is a bug in agentloop".into(),
    })
}

/// The result for these arguments, which fit the schema; or what is wrong with them, and the fix.
fn read_part(store: &ArtifactStore, run: &ToolRun) -> Result<String, String> {
    let told = run.arguments.get("name").and_then(Value::as_str).unwrap_or_default();
    let name = ArtifactName::parse(told).ok_or_else(|| {
        let told = first_chars(told, MAX_TOLD);
        format!(
            "name: {told:?} is not the name of an artifact: use one as a result has it, such as 0123456789abcdef.txt"
        )
    })?;
    let content = store.read(&name).map_err(|error| {
        if error.kind() == std::io::ErrorKind::NotFound {
            format!(
                "name: there is no artifact {name}; the oldest are removed when there are too many: call the tool that \
                 returned it again if you still need it, unless that changes something"
            )
        } else {
            format!("the artifact {name} cannot be read: the volume does not work")
        }
    })?;
    let number = |field: &str| {
        let number = run.arguments.get(field).and_then(Value::as_u64);
        number.map(|number| usize::try_from(number).unwrap_or(usize::MAX))
    };
    let (offset, max) = (
        number("offset").unwrap_or(0),
        number("maxBytes").unwrap_or(MAX_ARTIFACT_BYTES),
    );
    let max = max.min(run.max_result_bytes.saturating_sub(HEADER));
    let about = format!(
        "[artifact {name}, {}, {} bytes",
        name.media_type(),
        grouped(content.len())
    );
    let text = match String::from_utf8(content) {
        Ok(text) if name.is_text() => text,
        Ok(_) | Err(_) => return Ok(format!("{about}: not text, so no part of it is shown]")),
    };
    if offset > text.len() {
        return Err(format!(
            "offset: {offset} is beyond the end: the artifact has {} bytes, so use a smaller one",
            text.len()
        ));
    }
    let (start, end) = part(&text, offset, max);
    let next = if end < text.len() {
        format!("the next part is at offset {end}")
    } else {
        "the end".to_owned()
    };
    Ok(format!("{about}: {start} to {end}, {next}]\n{}", &text[start..end]))
}

/// The part of a text from this offset, of at most `max` bytes, but at least one character.
fn part(text: &str, offset: usize, max: usize) -> (usize, usize) {
    let start = text.floor_char_boundary(offset);
    let end = text.floor_char_boundary(start.saturating_add(max));
    if end > start {
        (start, end)
    } else {
        (start, text.ceil_char_boundary(start.saturating_add(1)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Map;

    use super::*;
    use crate::engine::tool::ToolRunId;

    fn run(arguments: Value, max: usize) -> ToolRun {
        let arguments: Map<String, Value> = serde_json::from_value(arguments).unwrap();
        ToolRun {
            id: ToolRunId {
                member: 0,
                turn: 1,
                call: 1,
                index: 1,
            },
            name: READ_TOOL.into(),
            target: String::new(),
            definition: String::new(),
            arguments,
            idempotency_key: String::new(),
            max_result_bytes: max,
        }
    }

    fn store() -> (tempfile::TempDir, ArtifactStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = ArtifactStore::open(dir.path());
        (dir, store)
    }

    #[test]
    fn a_text_is_read_in_parts_and_each_names_the_offset_of_the_next() {
        let (_dir, store) = store();
        let lines: Vec<String> = (0..2_000).map(|line| format!("line {line} ä\n")).collect();
        let text = lines.concat();
        let name = store.store("text/plain", text.as_bytes()).unwrap();
        let (mut offset, mut read, mut parts) = (0, String::new(), 0);
        while offset < text.len() {
            let result = read_part(&store, &run(json!({"name": name.as_str(), "offset": offset}), 4_096)).unwrap();
            assert!(result.len() <= 4_096, "it is not cut again: {}", result.len());
            let (header, part) = result.split_once('\n').unwrap();
            read.push_str(part);
            parts += 1;
            let next = header.split_once("the next part is at offset ");
            offset = next.map_or(text.len(), |(_, next)| next.trim_end_matches(']').parse().unwrap());
        }
        assert_eq!(read, text);
        assert_eq!(parts, text.len().div_ceil(4_096 - HEADER));
    }

    #[test]
    fn a_part_has_the_requested_bytes_and_its_header_names_them() {
        let (_dir, store) = store();
        let name = store.store("application/json", b"0123456789").unwrap();
        let read = |arguments: Value| {
            let mut all = json!({"name": name.as_str()});
            all.as_object_mut()
                .unwrap()
                .extend(arguments.as_object().unwrap().clone());
            read_part(&store, &run(all, 32_768)).map(|text| text.replace(name.as_str(), "A"))
        };
        let about = "[artifact A, application/json, 10 bytes";
        assert_eq!(read(json!({})), Ok(format!("{about}: 0 to 10, the end]\n0123456789")));
        assert_eq!(
            read(json!({"offset": 3, "maxBytes": 4})),
            Ok(format!("{about}: 3 to 7, the next part is at offset 7]\n3456"))
        );
        assert_eq!(
            read(json!({"offset": 10})),
            Ok(format!("{about}: 10 to 10, the end]\n"))
        );
        let beyond = read(json!({"offset": 11})).unwrap_err();
        assert!(
            beyond.starts_with("offset: 11 is beyond the end: the artifact has 10 bytes"),
            "{beyond}"
        );
    }

    #[test]
    fn a_wrong_name_is_answered_with_the_field_and_the_fix_and_nothing_outside_is_read() {
        let (dir, store) = store();
        std::fs::write(dir.path().join("journal.sqlite"), "secret").unwrap();
        store.store("text/plain", b"x").unwrap();
        for bad in ["../journal.sqlite", "..", "/etc/passwd", "", &"a".repeat(10_000)] {
            let told = read_part(&store, &run(json!({"name": bad}), 32_768)).unwrap_err();
            assert!(
                told.starts_with("name: ") && told.contains("such as 0123456789abcdef.txt"),
                "{told}"
            );
            assert!(told.len() < 300, "{told}");
        }
        let absent = read_part(&store, &run(json!({"name": "0123456789abcdef.txt"}), 32_768)).unwrap_err();
        assert!(
            absent.starts_with("name: there is no artifact 0123456789abcdef.txt"),
            "{absent}"
        );
    }

    #[test]
    fn content_that_is_not_text_is_described() {
        let (_dir, store) = store();
        for (media_type, content) in [("image/png", &b"text"[..]), ("text/plain", &[0xff, 0xfe])] {
            let name = store.store(media_type, content).unwrap();
            let told = read_part(&store, &run(json!({"name": name.as_str()}), 32_768)).unwrap();
            let about = format!(
                "{media_type}, {} bytes: not text, so no part of it is shown]",
                content.len()
            );
            assert!(told.contains(&about), "{told}");
        }
    }

    #[test]
    fn the_tool_is_read_only_and_needs_no_approval() {
        let tool = read_tool(false);
        assert_eq!((tool.effect, tool.needs_approval), (ToolEffect::Read, false));
        assert!(!tool.needs_approval_after_untrusted && !tool.trusted && read_tool(true).trusted);
    }

    proptest! {
        #[test]
        fn parts_of_any_text_are_whole_characters_and_make_progress(
            text in "\\PC{1,60}", offset in 0usize..300, max in 0usize..20,
        ) {
            let offset = offset.min(text.len());
            let (start, end) = part(&text, offset, max);
            prop_assert!(text.is_char_boundary(start) && text.is_char_boundary(end) && start <= offset);
            prop_assert!(end > start || start == text.len());
            prop_assert!(end - start <= max.max(4));
        }
    }
}
