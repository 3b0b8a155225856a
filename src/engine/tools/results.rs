//! The result of a run as the model sees it. Pure.

use serde_json::json;

use super::batch::ToolRunPlan;
use crate::OutcomeKind;
use crate::runtime_mark::without_marks;
use crate::tool::{ResultArtifacts, ToolOutcome};

/// The kind of an outcome, and its result for the model of at most `max` bytes. Of what is stored of it, the text stays
/// only if it is shortened.
pub fn render_outcome(
    outcome: ToolOutcome,
    plan: &ToolRunPlan,
    max: usize,
    artifacts: &mut ResultArtifacts,
) -> (OutcomeKind, String) {
    let mut added = 0;
    let (kind, text) = match outcome {
        ToolOutcome::Done { text } => (OutcomeKind::Ok, text),
        ToolOutcome::Failed { text } => {
            let bytes = text.len();
            let text = as_error(text);
            added = text.len() - bytes;
            (OutcomeKind::Error, text)
        }
        ToolOutcome::Unavailable { message } if plan.only_looks() || plan.tries < 2 => {
            let error = json!({"error": "not run", "detail": message});
            (OutcomeKind::Unavailable, error.to_string())
        }
        // An earlier try may have arrived.
        ToolOutcome::Unavailable { message } | ToolOutcome::Unknown { message } => {
            let fix = if plan.only_looks() {
                "it changes nothing: call it again if you need the result"
            } else {
                "it may or may not have happened: check first, and call it again only if it has not"
            };
            let error = json!({"error": "outcome unknown", "detail": message, "fix": fix});
            (OutcomeKind::Unknown, error.to_string())
        }
    };
    if text.len() <= max {
        artifacts.text = None;
    }
    let whole = artifacts.text.as_deref().map(|name| WholeText { name, added });
    if text.trim().is_empty() {
        // Servers reject an empty result.
        return (kind, "[no text]".to_owned());
    }
    (kind, without_marks(&shortened(text, max, whole)).into_owned())
}

/// Marks the text of a tool that failed, so that it is not mistaken for a success.
fn as_error(text: String) -> String {
    let start = text.trim_start();
    if start.is_empty() {
        "error: the tool failed without a message".to_owned()
    } else if start.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("error")) {
        text
    } else {
        format!("error: {text}")
    }
}

/// Where the whole of a text is stored.
#[derive(Clone, Copy)]
pub struct WholeText<'a> {
    /// Name of the artifact.
    name: &'a str,
    /// Bytes at the beginning of the text that the artifact does not have.
    added: usize,
}

/// Truncates a text to `max` bytes, not counting the line that says what is missing, and where all of it is. Keeps its
/// beginning and its end, where errors and totals usually are.
pub fn shortened(text: String, max: usize, whole: Option<WholeText<'_>>) -> String {
    if text.len() <= max {
        return text;
    }
    let head = text.floor_char_boundary(max.div_ceil(2));
    let tail = text.ceil_char_boundary(text.len() - max / 2);
    let missing = format!("left out: {} of {} bytes, in the middle", tail - head, text.len());
    let place = whole.map_or_else(String::new, |WholeText { name, added }| {
        let (bytes, from) = (text.len() - added, head.saturating_sub(added));
        format!("; artifact {name} has all {bytes}, and the missing ones from offset {from}")
    });
    format!("{}\n[{missing}{place}]\n{}", &text[..head], &text[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_keeps_its_beginning_and_its_end_and_no_character_is_cut() {
        let cut = |text: &str| shortened(text.to_owned(), 10, None);
        assert_eq!(cut("0123456789"), "0123456789");
        assert_eq!(
            cut("0123456789a"),
            "01234\n[left out: 1 of 11 bytes, in the middle]\n6789a"
        );
        assert_eq!(
            cut("0123ä5678ä"),
            "0123\n[left out: 3 of 12 bytes, in the middle]\n678ä"
        );
        assert_eq!(
            shortened("ä".into(), 0, None),
            "\n[left out: 2 of 2 bytes, in the middle]\n"
        );
    }

    #[test]
    fn the_mark_of_a_shortened_text_names_where_the_whole_text_is() {
        let whole = |added| {
            Some(WholeText {
                name: "0123456789abcdef.txt",
                added,
            })
        };
        assert_eq!(
            shortened("0123456789a".into(), 10, whole(0)),
            "01234\n[left out: 1 of 11 bytes, in the middle; artifact 0123456789abcdef.txt has all 11, and the missing ones \
             from offset 5]\n6789a"
        );
        let failed = shortened("error: 56789abc".into(), 10, whole(7));
        assert!(
            failed.contains("artifact 0123456789abcdef.txt has all 8, and the missing ones from offset 0]"),
            "{failed}"
        );
    }
}
