//! The hot state as the model reads it: a line for each field, with values as JSON so that none can imitate a line.

use jiff::Timestamp;

use super::super::runtime_mark::without_marks;
use super::{FieldSchema, HotState, format_age};

impl HotState {
    /// All fields, in the order of the schema. `None`: there are no fields.
    pub fn block(&self, now: Timestamp) -> Option<String> {
        if self.fields.is_empty() {
            return None;
        }
        let lines: Vec<String> = self.fields.iter().map(|field| self.line(field, now)).collect();
        Some(format!("Hot state:\n{}", lines.join("\n")))
    }

    fn line(&self, field: &FieldSchema, now: Timestamp) -> String {
        let name = &field.name;
        let value = self.entries.get(name);
        let value = value.map_or("(no value yet)".into(), |entry| without_marks(&entry.text));
        let stale = if self.is_stale(field, now) { "stale: " } else { "" };
        let age = self.age(name, now).map(|age| format!("{stale}{} ago", format_age(age)));
        let problem = self.problems.get(name).cloned();
        let marks: Vec<String> = age.into_iter().chain(problem).collect();
        if marks.is_empty() {
            format!("{name}: {value}")
        } else {
            format!("{name}: {value} ({})", marks.join("; "))
        }
    }
}
