//! Converts the result of a tool into the outcome of its run, and stores what the outcome only names.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use rmcp::model::CallToolResult;

use crate::api::agent::LimitedResource;
use crate::engine::tool::{ResultArtifacts, StoredImage, ToolOutcome, ToolRun};
use crate::mcp::text::{self, EncodedContent};
use crate::provider::images::ImageHeader;
use crate::toolbox_protocol::{BANDWIDTH_BYTES_META, DISK_WRITE_BYTES_META};
use crate::worker::artifacts::{ArtifactName, ArtifactStore, NotStored, TEXT};
use crate::worker::tool_source::FinishedToolRun;

/// Maximum number of artifacts of one result: of more, the first ones would be removed for the last ones.
const MAX_ARTIFACTS: usize = 16;
/// Servers write base64 with and without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The end of a run with this result. Blocking.
pub(super) fn finished(result: &CallToolResult, run: &ToolRun, store: &ArtifactStore) -> FinishedToolRun {
    let used = used(result);
    if run.id.is_refresh() {
        let outcome = value(result);
        return FinishedToolRun { used, ..outcome.into() };
    }
    let mut artifacts = ResultArtifacts::default();
    let mut count = 0;
    let mut text = text::of_with(result, |content| {
        count += 1;
        let stored = if count > MAX_ARTIFACTS {
            Err(NotStored::TooMany)
        } else {
            store_content(content, store, &mut artifacts.images)
        };
        content.described(&match stored {
            Ok(name) => format!("artifact {name}"),
            Err(error) => format!("not stored, {error}"),
        })
    });
    if text.len() > run.max_result_bytes {
        match store.store(TEXT, text.as_bytes()) {
            Ok(name) => artifacts.text = Some(name.to_string()),
            // Its end is always shown.
            Err(error) => {
                let _ = write!(text, "\n[this text is not stored, {error}]");
            }
        }
    }
    FinishedToolRun {
        outcome: outcome(result, text),
        used,
        artifacts,
    }
}

/// Stores a content. An image that models can be shown is one by its own header, whatever the server declares.
fn store_content(
    content: &EncodedContent<'_>,
    store: &ArtifactStore,
    images: &mut Vec<StoredImage>,
) -> Result<ArtifactName, NotStored> {
    let bytes = BASE64.decode(content.data).map_err(|_| NotStored::NotBase64)?;
    let Some(header) = ImageHeader::read(&bytes) else {
        return store.store(content.media_type().unwrap_or_default(), &bytes);
    };
    let name = store.store(header.media_type, &bytes)?;
    images.push(StoredImage {
        name: name.to_string(),
        width: header.width,
        height: header.height,
        bytes: bytes.len(),
    });
    Ok(name)
}

fn outcome(result: &CallToolResult, text: String) -> ToolOutcome {
    if result.is_error == Some(true) {
        ToolOutcome::Failed { text }
    } else {
        ToolOutcome::Done { text }
    }
}

/// The outcome of a run whose result is a value for hot state, not text for a model. Nothing of it is stored.
fn value(result: &CallToolResult) -> ToolOutcome {
    let is_failed = result.is_error == Some(true);
    outcome(
        result,
        if is_failed {
            text::of(result)
        } else {
            text::value(result)
        },
    )
}

/// The amounts that the toolbox measured.
fn used(result: &CallToolResult) -> Vec<(LimitedResource, u64)> {
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
    use serde_json::{Map, Value, json};

    use crate::engine::tool::ToolRunId;

    fn store() -> (tempfile::TempDir, ArtifactStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = ArtifactStore::open(dir.path());
        (dir, store)
    }

    fn run(max: usize) -> ToolRun {
        ToolRun {
            id: ToolRunId {
                member: 0,
                turn: 1,
                call: 1,
                index: 1,
            },
            name: "hub__tool".into(),
            target: String::new(),
            definition: String::new(),
            arguments: Map::new(),
            idempotency_key: String::new(),
            max_result_bytes: max,
        }
    }

    fn finish(result: Value, max: usize, store: &ArtifactStore) -> FinishedToolRun {
        finished(&serde_json::from_value(result).unwrap(), &run(max), store)
    }

    fn of(result: Value) -> ToolOutcome {
        let (_dir, store) = store();
        finish(result, 1_000, &store).outcome
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
    fn structured_content_is_json_unless_it_equals_the_text() {
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
    fn a_wrapped_value_or_list_is_not_repeated() {
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
    fn content_that_a_model_cannot_read_is_stored_and_named_by_kind_type_and_size() {
        let (_dir, store) = store();
        let content = json!({"content": [
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "audio", "data": "AAAAAA==", "mimeType": "audio/wav"},
            {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/x-a", "text": "inside"}},
            {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAA="}},
            {"type": "resource_link", "uri": "file:///c", "name": "c", "mimeType": "text/csv", "size": 3},
        ]});
        assert_eq!(
            finish(content, 1_000, &store).outcome,
            done(
                "[image image/png, 3 bytes: artifact 709e80c88487a241.png]\n\
                 [audio audio/wav, 4 bytes: artifact df3f619804a92fdb.wav]\n[resource file:///a, text/x-a]\ninside\n\
                 [resource file:///b, unknown type, 2 bytes: artifact 96a296d224f285c6.bin]\n\
                 [link to resource c: file:///c, text/csv, 3 bytes]"
            )
        );
        let stored = store.read(&ArtifactName::parse("df3f619804a92fdb.wav").unwrap());
        assert_eq!(stored.unwrap(), [0; 4]);
    }

    #[test]
    fn an_image_is_noted_with_its_size_and_its_own_type_whatever_the_server_declares() {
        let (_dir, store) = store();
        let png = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x03\0\0\0\x05\x08\x02\0\0\0";
        let content = json!({"content": [
            {"type": "image", "data": BASE64.encode(png), "mimeType": "image/jpeg"},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        ]});
        let finished = finish(content, 1_000, &store);
        let [image] = &finished.artifacts.images[..] else {
            panic!("{finished:?}")
        };
        assert_eq!((image.width, image.height, image.bytes), (3, 5, png.len()));
        let name = ArtifactName::parse(&image.name).unwrap();
        assert_eq!(
            (name.media_type(), &store.read(&name).unwrap()[..]),
            ("image/png", &png[..])
        );
        assert!(matches!(finished.outcome, ToolOutcome::Done { text } if text.contains(&image.name)));
    }

    #[test]
    fn names_of_a_server_do_not_leave_their_line_and_a_wrong_media_type_is_not_repeated() {
        let uri = format!("file:///a\nb{}", "c".repeat(5_000));
        let resource = json!({"uri": uri, "mimeType": "x\n[From", "blob": "AAA="});
        let ToolOutcome::Done { text } = of(json!({"content": [{"type": "resource", "resource": resource}]})) else {
            panic!()
        };
        assert!(
            !text.contains('\n') && !text.contains("[From") && text.len() < 500,
            "{text}"
        );
        assert!(
            text.starts_with("[resource file:///a bccc") && text.contains("…, unknown type, 2 bytes: artifact "),
            "{text}"
        );
    }

    #[test]
    fn content_that_cannot_be_stored_is_named_with_the_reason_and_the_run_succeeds() {
        let image = |data: &str| json!({"type": "image", "data": data, "mimeType": "image/png"});
        assert_eq!(
            of(json!({"content": [image("?")]})),
            done("[image image/png, 0 bytes: not stored, its data is not valid base64]")
        );
        let (dir, store) = store();
        std::fs::write(dir.path().join("artifacts"), "in the place of the directory").unwrap();
        let finished = finish(json!({"content": [image("AAAA"), text("0123456789")]}), 10, &store);
        assert_eq!(
            finished.outcome,
            done(
                "[image image/png, 3 bytes: not stored, the volume could not be written]\n0123456789\n\
                 [this text is not stored, the volume could not be written]"
            )
        );
        assert_eq!(finished.artifacts, ResultArtifacts::default());
    }

    #[test]
    fn at_most_sixteen_contents_of_a_result_are_stored() {
        let images = |count: usize| {
            let image =
                |place: usize| json!({"type": "image", "data": format!("AA{place:02}"), "mimeType": "image/png"});
            let ToolOutcome::Done { text } = of(json!({"content": (0..count).map(image).collect::<Vec<_>>()})) else {
                panic!()
            };
            let refused = text.matches("not stored, only the first 16 of a result are").count();
            (text.matches(": artifact ").count(), refused)
        };
        assert_eq!(images(15), (15, 0));
        assert_eq!(images(16), (16, 0));
        assert_eq!(images(17), (16, 1));
    }

    #[test]
    fn a_text_longer_than_a_prompt_has_room_for_is_stored_whole_and_a_shorter_one_is_not() {
        let (_dir, store) = store();
        let stored = |bytes: usize, is_error: bool| {
            let content = json!({"content": [text(&"x".repeat(bytes))], "isError": is_error});
            finish(content, 10, &store).artifacts.text
        };
        assert_eq!((stored(9, false), stored(10, false)), (None, None));
        for is_error in [false, true] {
            let name = ArtifactName::parse(&stored(11, is_error).unwrap()).unwrap();
            assert_eq!(store.read(&name).unwrap(), b"xxxxxxxxxxx");
        }
    }

    #[test]
    fn nothing_of_a_value_for_hot_state_is_stored() {
        let (dir, store) = store();
        let content = json!({"content": [
            text(&"x".repeat(100)), {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        ]});
        let refresh = ToolRun {
            id: ToolRunId { call: 0, ..run(0).id },
            ..run(0)
        };
        assert!(refresh.id.is_refresh());
        let result = serde_json::from_value(content).unwrap();
        let finished = finished(&result, &refresh, &store);
        assert_eq!(finished.artifacts, ResultArtifacts::default());
        assert!(matches!(finished.outcome, ToolOutcome::Done { text } if text.ends_with("[image image/png, 3 bytes]")));
        assert!(!dir.path().join("artifacts").exists());
    }
}
