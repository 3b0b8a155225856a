//! The hot state as the model reads it: a line for each field, values as JSON so that none can look like a line of its
//! own.

use jiff::Timestamp;

use super::{FieldSchema, HotState, format_age};

impl HotState {
    /// All fields, in the order of the schema. `None`: there are none.
    pub(super) fn block(&self, now: Timestamp) -> Option<String> {
        if self.fields.is_empty() {
            return None;
        }
        let lines: Vec<String> = self.fields.iter().map(|field| self.line(field, now)).collect();
        Some(format!("Hot state:\n{}", lines.join("\n")))
    }

    fn line(&self, field: &FieldSchema, now: Timestamp) -> String {
        let name = &field.name;
        let value = self.entries.get(name).map_or("(no value yet)", |entry| &entry.text);
        let stale = self.age(name, now).filter(|_| self.is_stale(field, now));
        let stale = stale.map(|age| format!("stale: {} ago", format_age(age)));
        let trouble = self.troubles.get(name).cloned();
        let marks: Vec<String> = stale.into_iter().chain(trouble).collect();
        if marks.is_empty() {
            format!("{name}: {value}")
        } else {
            format!("{name}: {value} ({})", marks.join("; "))
        }
    }
}
