//! The hot state: typed, bounded and dated values of the moment. In memory only: values are current only in the process
//! that received them.
//!
//! Owns what may be written, and what is stale. Rendered for the model by `block`; filled before a turn by `refresh`.

mod block;
mod diff;
mod refresh;

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

pub use refresh::HotStateRefresh;

use agentloop_api::hot_state::{FieldType, HotField};

/// Maximum number of bytes of one value, as JSON.
pub const MAX_FIELD_BYTES: usize = 8 * 1024;
/// Maximum number of bytes of all values together.
pub const MAX_BYTES: usize = 32 * 1024;

/// What a field may hold, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldSchema {
    pub name: String,
    /// Type of its values.
    pub kind: FieldType,
    /// The age from which a value is stale; `None`: never.
    pub ttl: Option<SignedDuration>,
    /// Maximum number of items of an array; the last ones stay.
    pub max_items: Option<usize>,
    /// The tool that returns its value.
    pub refresh_tool: Option<String>,
}

impl From<&HotField> for FieldSchema {
    fn from(field: &HotField) -> Self {
        Self {
            name: field.name.clone(),
            kind: field.r#type,
            ttl: field.ttl_seconds.map(|ttl| SignedDuration::from_secs(ttl.into())),
            max_items: field.max_items.and_then(|max| usize::try_from(max).ok()),
            refresh_tool: field.refresh_tool.clone(),
        }
    }
}

/// Why a value is refused. Safe to log: it does not contain the value.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldWriteError {
    /// The schema has no such field.
    #[error("spec.hotState.fields has no such field")]
    NoSuchField,
    #[error("it requires type {wanted}, but the value is {given}")]
    Type { wanted: FieldType, given: &'static str },
    #[error("the value has {0} bytes as JSON; the limit is {MAX_FIELD_BYTES}")]
    TooLarge(usize),
    #[error("all values together would have {0} bytes as JSON; the limit is {MAX_BYTES}")]
    Full(usize),
}

/// A value, and when it was written.
#[derive(Clone, Debug, PartialEq)]
struct DatedValue {
    /// As JSON, on one line.
    text: String,
    at: Timestamp,
    /// Its source, if that is not trusted.
    untrusted: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct HotState {
    fields: Vec<FieldSchema>,
    entries: BTreeMap<String, DatedValue>,
    /// Why the last write of a field failed, as text for the model.
    problems: BTreeMap<String, String>,
    version: u64,
    seen: diff::ShownValues,
    /// Whether the refresh before the next turn has been planned.
    refreshed: bool,
}

impl HotState {
    /// A hot state without values.
    pub fn new(fields: Vec<FieldSchema>) -> Self {
        Self {
            fields,
            ..Self::default()
        }
    }

    /// Counts the writes.
    #[cfg(test)]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Stores a value of its field's type within all bounds; items beyond `maxItems` are dropped from the front.
    pub(super) fn write(&mut self, name: &str, value: Value, now: Timestamp) -> Result<(), FieldWriteError> {
        let field = self.field(name).ok_or(FieldWriteError::NoSuchField)?;
        let value = field.coerce(value)?;
        let text = value.to_string();
        if text.len() > MAX_FIELD_BYTES {
            return Err(FieldWriteError::TooLarge(text.len()));
        }
        let others = self.entries.iter().filter(|(other, _)| *other != name);
        let all = others.map(|(_, entry)| entry.text.len()).sum::<usize>() + text.len();
        if all > MAX_BYTES {
            return Err(FieldWriteError::Full(all));
        }
        let entry = DatedValue {
            text,
            at: now,
            untrusted: None,
        };
        self.entries.insert(name.to_owned(), entry);
        self.problems.remove(name);
        self.version = self.version.saturating_add(1);
        Ok(())
    }

    /// The value of this field is of a source that is not trusted. Numbers and Booleans cannot contain instructions; any text
    /// can, also the name in an object.
    pub(super) fn set_untrusted(&mut self, name: &str, source: String) {
        if let Some(entry) = self.entries.get_mut(name)
            && entry.text.contains('"')
        {
            entry.untrusted = Some(source);
        }
    }

    /// The source of the first value that is untrusted content, in the order of the schema.
    pub(super) fn first_untrusted(&self) -> Option<&str> {
        let mut entries = self.fields.iter().filter_map(|field| self.entries.get(&field.name));
        entries.find_map(|entry| entry.untrusted.as_deref())
    }

    fn field(&self, name: &str) -> Option<&FieldSchema> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// The age of a field's value; `None`: it has none.
    fn age(&self, name: &str, now: Timestamp) -> Option<SignedDuration> {
        let entry = self.entries.get(name)?;
        Some(now.duration_since(entry.at).max(SignedDuration::ZERO))
    }

    /// Whether the value of a field is older than its TTL; false without a value.
    fn is_stale(&self, field: &FieldSchema, now: Timestamp) -> bool {
        let age = self.age(&field.name, now);
        age.zip(field.ttl).is_some_and(|(age, ttl)| age >= ttl)
    }

    /// The clock was set back: ages stay the same.
    pub(super) fn moved(&mut self, back: SignedDuration) {
        for entry in self.entries.values_mut() {
            entry.at = entry.at.checked_sub(back).unwrap_or(entry.at);
        }
    }

    /// One line for the transcript: only names, since values grow old there. `None`: there are no fields.
    pub(super) fn summary(&self, now: Timestamp) -> Option<String> {
        if self.fields.is_empty() {
            return None;
        }
        let named = |wanted: &dyn Fn(&FieldSchema) -> bool| {
            let names: Vec<&str> = self
                .fields
                .iter()
                .filter(|field| wanted(field))
                .map(|field| &*field.name)
                .collect();
            if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            }
        };
        let has = |field: &FieldSchema| self.entries.contains_key(&field.name);
        Some(format!(
            "Hot state, version {}: fresh: {}; stale: {}; without a value: {}",
            self.version,
            named(&|field| has(field) && !self.is_stale(field, now)),
            named(&|field| self.is_stale(field, now)),
            named(&|field| !has(field)),
        ))
    }
}

impl FieldSchema {
    /// Converts a value to what this field holds.
    fn coerce(&self, value: Value) -> Result<Value, FieldWriteError> {
        match (self.kind, value) {
            (FieldType::Array, Value::Array(mut items)) => {
                let max = self.max_items.unwrap_or(usize::MAX);
                items.drain(..items.len().saturating_sub(max));
                Ok(Value::Array(items))
            }
            (FieldType::Object, value @ Value::Object(_))
            | (FieldType::Number, value @ Value::Number(_))
            | (FieldType::String, value @ Value::String(_))
            | (FieldType::Boolean, value @ Value::Bool(_)) => Ok(value),
            (wanted, value) => Err(FieldWriteError::Type {
                wanted,
                given: kind(&value),
            }),
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a Boolean",
        Value::Number(_) => "a Number",
        Value::String(_) => "a String",
        Value::Array(_) => "an Array",
        Value::Object(_) => "an Object",
    }
}

/// An age as people write it: `40s`, `2m`, `3h`, `5d`.
pub(super) fn format_age(age: SignedDuration) -> String {
    let seconds = age.as_secs();
    match seconds {
        ..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests;
