//! The stream of a page: server-sent events with the parts that a reader does not have yet.
//!
//! A reader holds the parts that it was sent last, so a slow one skips states and needs no queue.

use std::time::Duration;

use serde_json::{Value, json};

use super::html::PagePart;

/// How long a stream is silent at most: a browser that is gone is noticed when it is written to.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// A comment, for a stream without changes.
pub const COMMENT: &str = ":\n\n";
/// What replaces a part that is not shown any more.
const GONE: &str = "<p>This is no longer shown.</p>";

/// The events that bring a reader from one state of the page to another; empty without a difference.
#[must_use]
pub fn changes(shown: &[PagePart], parts: &[PagePart]) -> String {
    let mut text = String::new();
    for part in parts.iter().filter(|part| !shown.contains(part)) {
        text += &event("part", &json!({ "id": part.id, "html": part.html }));
    }
    for old in shown {
        if parts.iter().all(|part| part.id != old.id) {
            text += &event("part", &json!({ "id": old.id, "html": GONE }));
        }
    }
    text
}

/// The last event of a stream: why there are no more.
#[must_use]
pub fn end(why: &str) -> String {
    event("end", &json!(why))
}

/// A server-sent event. JSON has no line break.
fn event(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::page::agent_rows::AgentRow;
    use crate::page::html::parts;
    use crate::page::recent::AgentHistory;
    use crate::page::view::{AgentView, PageView};

    fn state(agents: &[(&str, i64)]) -> Vec<PagePart> {
        let agents = agents.iter().map(|(name, turns)| AgentView {
            row: AgentRow {
                namespace: "n".into(),
                agent: (*name).into(),
                turns: (*turns, *turns),
                ..AgentRow::default()
            },
            history: Some(AgentHistory::default()),
            ..AgentView::default()
        });
        let view = PageView {
            agents: agents.collect(),
            ..PageView::default()
        };
        parts(&view, &TimeZone::UTC)
    }

    /// The ids of the parts in a text.
    fn ids(text: &str) -> Vec<String> {
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| {
            serde_json::from_str::<Value>(data).unwrap()["id"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect()
    }

    #[test]
    fn a_new_reader_receives_everything_and_then_the_differences() {
        let one = state(&[("a", 1)]);
        assert_eq!(
            ids(&changes(&[], &one)),
            ["agents", "approvals", "turns/n/a", "events/n/a"]
        );
        assert_eq!(changes(&one, &one), "");
        let two = state(&[("a", 2)]);
        assert_eq!(ids(&changes(&one, &two)), ["agents"]);
    }

    #[test]
    fn parts_that_are_no_longer_shown_are_removed() {
        let (both, one) = (state(&[("a", 1), ("b", 1)]), state(&[("a", 1)]));
        let text = changes(&both, &one);
        assert_eq!(ids(&text), ["agents", "turns/n/b", "events/n/b"]);
        assert_eq!(text.matches("no longer shown").count(), 2, "{text}");
    }
}
