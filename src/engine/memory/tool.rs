//! The tool `memory` as the model sees it: its definition, its arguments, and the text of an error.

use serde_json::{Map, Value, json};

use super::notes::{MAX_NOTES, MAX_TITLE_BYTES, NoteOperation, NoteRefusal};
use crate::message::{self, ToolDefinition};
use agentloop_support::text::first_chars;

pub const NAME: &str = "memory";
/// Maximum number of characters of a wrong name that are returned to the model.
const MAX_TOLD: usize = 64;

/// The tool as it is offered. `max_bytes`: of all notes.
pub fn definition(max_bytes: usize) -> ToolDefinition {
    let parameters = json!({
        "type": "object",
        "properties": {
            "operation": {
                "type": "string", "enum": ["view", "write", "replace", "delete"],
                "description": "view: returns a note, or without a title the list of all. write: creates a note or replaces all \
                                of its text. replace: replaces one passage of a note. delete: removes a note.",
            },
            "title": {
                "type": "string",
                "description": format!("One line of at most {MAX_TITLE_BYTES} bytes, such as customers/acme."),
            },
            "text": {"type": "string", "description": "Of write: the whole text."},
            "old": {"type": "string", "description": "Of replace: the passage, exactly as the note has it, and only once."},
            "new": {"type": "string", "description": "Of replace: what takes its place."},
            "offset": {"type": "integer", "minimum": 0, "description": "Of view: the first byte, of a long note or list; default 0."},
        },
        "required": ["operation"],
        "additionalProperties": false,
    });
    ToolDefinition {
        name: NAME.into(),
        description: format!(
            "Your notes, which outlast this conversation, its summaries and restarts. Keep in them what you need again later: \
             facts, decisions, the state of long work. At most {MAX_NOTES} notes and {max_bytes} bytes in all."
        )
        .into(),
        parameters,
    }
}

/// The text of an error for the model.
pub fn refused(refusal: &NoteRefusal) -> String {
    let NoteRefusal { argument, fix } = refusal;
    json!({"error": "invalid argument", "argument": argument, "fix": fix}).to_string()
}

/// Parses the arguments of a call.
pub fn parse(arguments: &str) -> Result<NoteOperation, NoteRefusal> {
    let Some(mut arguments) = message::arguments(arguments) else {
        let fix = "write the arguments as one JSON object, such as {\"operation\": \"view\"}";
        return Err(NoteRefusal::new("(all)", fix));
    };
    // Models write absent ones as null.
    arguments.retain(|_, value| !value.is_null());
    let operation = text(&mut arguments, "operation")?;
    let operation = operation.as_deref().unwrap_or_default();
    let wanted = match operation {
        "view" => {
            let offset = offset(&mut arguments)?;
            match text(&mut arguments, "title")? {
                Some(title) => NoteOperation::View { title, offset },
                None => NoteOperation::List { offset },
            }
        }
        "write" => NoteOperation::Write {
            title: required(&mut arguments, "title")?,
            text: required(&mut arguments, "text")?,
        },
        "replace" => NoteOperation::Replace {
            title: required(&mut arguments, "title")?,
            old: required(&mut arguments, "old")?,
            new: required(&mut arguments, "new")?,
        },
        "delete" => NoteOperation::Delete {
            title: required(&mut arguments, "title")?,
        },
        _ => return Err(NoteRefusal::new("operation", "use one of view, write, replace, delete")),
    };
    match arguments.keys().next() {
        Some(name) => {
            let fix = format!("{operation} takes no such argument: leave it out");
            Err(NoteRefusal::new(first_chars(name, MAX_TOLD), fix))
        }
        None => Ok(wanted),
    }
}

fn required(arguments: &mut Map<String, Value>, name: &str) -> Result<String, NoteRefusal> {
    text(arguments, name)?.ok_or_else(|| NoteRefusal::new(name, "this operation needs it: write a string"))
}

fn text(arguments: &mut Map<String, Value>, name: &str) -> Result<Option<String>, NoteRefusal> {
    match arguments.shift_remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(NoteRefusal::new(name, "write a string")),
    }
}

fn offset(arguments: &mut Map<String, Value>) -> Result<usize, NoteRefusal> {
    let Some(value) = arguments.shift_remove("offset") else {
        return Ok(0);
    };
    let offset = value.as_u64().and_then(|offset| usize::try_from(offset).ok());
    offset.ok_or_else(|| NoteRefusal::new("offset", "write a whole number, 0 or more"))
}
