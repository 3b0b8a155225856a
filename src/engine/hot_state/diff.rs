//! What has changed in the hot state since the last committed turn.

use std::collections::BTreeMap;

use super::HotState;

/// Maximum number of bytes of one value in a diff.
const MAX_VALUE_BYTES: usize = 1024;
/// Stands for no value.
const NONE: &str = "(no value)";

/// The values that turns have shown to the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ShownValues {
    /// In the call last sent.
    sent: Option<BTreeMap<String, String>>,
    /// In the last call of the last committed turn. `None`: this process has committed none.
    committed: Option<BTreeMap<String, String>>,
}

impl HotState {
    /// A call of a turn shows the current values.
    pub(crate) fn mark_sent(&mut self) {
        let texts = self.entries.iter();
        let texts = texts.map(|(name, entry)| (name.clone(), entry.text.clone()));
        self.seen.sent = Some(texts.collect());
    }

    /// The turn that showed them is committed.
    pub(crate) fn mark_committed(&mut self) {
        if let Some(sent) = self.seen.sent.take() {
            self.seen.committed = Some(sent);
        }
    }

    /// Old and new value of each field that has changed, and the names of the others. `None`: what the last turn saw is
    /// unknown.
    pub(crate) fn diff(&self) -> Option<String> {
        let before = self.seen.committed.as_ref()?;
        let mut lines = Vec::new();
        let mut same = Vec::new();
        for field in &self.fields {
            let name = &field.name;
            let old = before.get(name);
            let new = self.entries.get(name).map(|entry| &entry.text);
            if old == new {
                same.push(name.as_str());
            } else {
                lines.push(format!("{name}: {} -> {}", render_value(old), render_value(new)));
            }
        }
        if lines.is_empty() {
            lines.push("nothing".to_owned());
        }
        if !same.is_empty() {
            lines.push(format!("Unchanged: {}", same.join(", ")));
        }
        Some(lines.join("\n"))
    }
}

/// A value as JSON, which has no line breaks, truncated if it is long.
fn render_value(text: Option<&String>) -> String {
    let Some(text) = text else {
        return NONE.to_owned();
    };
    if text.len() <= MAX_VALUE_BYTES {
        return text.clone();
    }
    let end = text.floor_char_boundary(MAX_VALUE_BYTES);
    format!("{} [cut]", &text[..end])
}
