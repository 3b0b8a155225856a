//! The notes themselves: which operations are possible, and their limits. Pure; the caller journals.
//!
//! Titles are shown in each prompt, so they are bounded and can imitate nothing there. A note that was written after
//! untrusted content has its source for as long as any of that text may be in it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::runtime_mark::{is_invisible, without_marks};

/// Maximum number of notes.
pub const MAX_NOTES: usize = 64;
/// Maximum number of bytes of a title.
pub const MAX_TITLE_BYTES: usize = 80;
/// Maximum number of bytes of the line before a part of a note, and more than its title and its numbers need.
const HEADER_BYTES: usize = 240;
/// Characters that are not allowed in a title, besides control and invisible ones: it stands in quotes, and a bracket begins
/// a mark of the runtime.
const NOT_IN_TITLES: &str = "\"\\[]{}<>`\u{2028}\u{2029}";

/// The notes of an agent, by title.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct MemoryNotes {
    notes: BTreeMap<String, MemoryNote>,
}

#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
struct MemoryNote {
    text: String,
    /// The source of the untrusted content that the model had been shown when it wrote this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    untrusted: Option<String>,
}

/// What a call requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoteOperation {
    /// The titles and sizes of all notes, from this byte of the list on.
    List {
        offset: usize,
    },
    /// A note, from this byte on.
    View {
        title: String,
        offset: usize,
    },
    /// Creates a note or replaces all of its text.
    Write {
        title: String,
        text: String,
    },
    /// Replaces one passage of a note.
    Replace {
        title: String,
        old: String,
        new: String,
    },
    Delete {
        title: String,
    },
}

/// What holds for a call.
#[derive(Clone, Copy, Debug)]
pub struct NoteLimits<'a> {
    /// Maximum number of bytes of all notes.
    pub bytes: usize,
    /// Maximum number of bytes of a result.
    pub result_bytes: usize,
    /// The source of the untrusted content that the model had been shown when it requested the call.
    pub untrusted: Option<&'a str>,
}

/// The result of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoteResult {
    pub text: String,
    /// The source of untrusted content that it shows.
    pub untrusted: Option<String>,
}

/// A call that has no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoteRefusal {
    /// Name of the argument to change.
    pub argument: String,
    pub fix: String,
}

impl NoteRefusal {
    pub fn new(argument: &str, fix: impl Into<String>) -> Self {
        Self {
            argument: argument.to_owned(),
            fix: fix.into(),
        }
    }
}

impl MemoryNotes {
    pub fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    /// Bytes of all titles and texts.
    pub fn bytes(&self) -> usize {
        self.notes
            .iter()
            .map(|(title, note)| title.len() + note.text.len())
            .sum()
    }

    /// Does what a call requests, or nothing.
    pub fn apply(&mut self, operation: NoteOperation, limits: NoteLimits<'_>) -> Result<NoteResult, NoteRefusal> {
        let text = match operation {
            NoteOperation::List { offset } => return self.list(offset, limits),
            NoteOperation::View { title, offset } => return self.view(&title, offset, limits),
            NoteOperation::Write { title, text } => {
                self.write(&title, &text, limits)?;
                format!("Stored \"{title}\".")
            }
            NoteOperation::Replace { title, old, new } => {
                self.replace(&title, &old, &new, limits)?;
                format!("Changed \"{title}\".")
            }
            NoteOperation::Delete { title } => {
                self.notes.remove(&title).ok_or_else(no_such_note)?;
                format!("Deleted \"{title}\".")
            }
        };
        Ok(NoteResult { text, untrusted: None })
    }

    /// The notes for the state block, within `max_bytes` bytes. `untrusted`: whether titles may be shown that were written after
    /// untrusted content. `None`: there are no notes.
    pub fn block(&self, limit: usize, max_bytes: usize, untrusted: bool) -> Option<String> {
        if self.is_empty() {
            return None;
        }
        let mut lines = vec![format!("Notes in `memory`, {} of {limit} bytes:", self.bytes())];
        let (mut used, mut more, mut hidden) = (0, 0, 0);
        for (title, note) in &self.notes {
            if note.untrusted.is_some() && !untrusted {
                hidden += 1;
                continue;
            }
            let line = note.line(title);
            used += line.len() + 1;
            if used > max_bytes {
                more += 1;
            } else {
                lines.push(line);
            }
        }
        if more > 0 {
            lines.push(format!("{more} more: `view` without a title lists all."));
        }
        if hidden > 0 {
            lines.push(format!(
                "{hidden} whose titles are not shown, since they were written after untrusted content: `view` without a title \
                 lists all, and brings that content back."
            ));
        }
        Some(lines.join("\n"))
    }

    fn list(&self, offset: usize, limits: NoteLimits<'_>) -> Result<NoteResult, NoteRefusal> {
        let untrusted = self.notes.values().find_map(|note| note.untrusted.clone());
        let lines: Vec<String> = self.notes.iter().map(|(title, note)| note.line(title)).collect();
        let text = match self.notes.len() {
            0 => "There are no notes.".to_owned(),
            _ => part("the list of notes", &lines.join("\n"), offset, limits)?,
        };
        Ok(NoteResult { text, untrusted })
    }

    fn view(&self, title: &str, offset: usize, limits: NoteLimits<'_>) -> Result<NoteResult, NoteRefusal> {
        let MemoryNote { text, untrusted } = self.notes.get(title).ok_or_else(no_such_note)?;
        Ok(NoteResult {
            text: part(&format!("note \"{title}\""), text, offset, limits)?,
            untrusted: untrusted.clone(),
        })
    }

    fn write(&mut self, title: &str, text: &str, limits: NoteLimits<'_>) -> Result<(), NoteRefusal> {
        check_title(title)?;
        if !self.notes.contains_key(title) && self.notes.len() >= MAX_NOTES {
            let fix = format!("there are {MAX_NOTES} notes, the most possible: use one of them, or delete one first");
            return Err(NoteRefusal::new("title", fix));
        }
        let untrusted = limits.untrusted.map(str::to_owned);
        self.set(title, ("text", text), untrusted, limits)
    }

    fn replace(&mut self, title: &str, old: &str, new: &str, limits: NoteLimits<'_>) -> Result<(), NoteRefusal> {
        let note = self.notes.get(title).ok_or_else(no_such_note)?;
        // As it was stored.
        let old = &*without_marks(old);
        let (start, end) = only_place(&note.text, old)?;
        let text = format!("{}{new}{}", &note.text[..start], &note.text[end..]);
        let untrusted = note.untrusted.clone().or_else(|| limits.untrusted.map(str::to_owned));
        self.set(title, ("new", &text), untrusted, limits)
    }

    /// Sets the text of a note if all notes then have at most the allowed size, or are not larger than before.
    /// `argument`: the one that the text is from.
    fn set(
        &mut self,
        title: &str,
        (argument, text): (&str, &str),
        untrusted: Option<String>,
        limits: NoteLimits<'_>,
    ) -> Result<(), NoteRefusal> {
        let before = self.bytes();
        let replaced = self.notes.get(title).map_or(0, |note| title.len() + note.text.len());
        let after = before - replaced + title.len() + text.len();
        if after > limits.bytes && after > before {
            let fix = format!(
                "all notes would have {after} bytes; the limit is {}: write less, or shorten or delete notes first",
                limits.bytes
            );
            return Err(NoteRefusal::new(argument, fix));
        }
        let text = without_marks(text).into_owned();
        self.notes.insert(title.to_owned(), MemoryNote { text, untrusted });
        Ok(())
    }
}

impl MemoryNote {
    fn line(&self, title: &str) -> String {
        let bytes = self.text.len();
        let mark = match self.untrusted {
            Some(_) => ", written after untrusted content",
            None => "",
        };
        format!("\"{title}\": {bytes} bytes{mark}")
    }
}

/// The part of a text from this offset that a result has room for, after a line that says which part it is.
fn part(name: &str, text: &str, offset: usize, limits: NoteLimits<'_>) -> Result<String, NoteRefusal> {
    let bytes = text.len();
    if offset > bytes {
        let fix = format!("{name} has {bytes} bytes: use a smaller offset");
        return Err(NoteRefusal::new("offset", fix));
    }
    let start = text.floor_char_boundary(offset);
    let max = limits.result_bytes.saturating_sub(HEADER_BYTES);
    let end = text.floor_char_boundary(start.saturating_add(max));
    // At least one character, so that each part makes progress.
    let end = end.max(text.ceil_char_boundary(start.saturating_add(1).min(bytes)));
    let next = if end < bytes {
        format!("the next part is at offset {end}")
    } else {
        "the end".to_owned()
    };
    // Stored without marks; an earlier version may have known fewer.
    let part = without_marks(&text[start..end]);
    Ok(format!("[{name}, {bytes} bytes: {start} to {end}, {next}]\n{part}"))
}

fn no_such_note() -> NoteRefusal {
    NoteRefusal::new(
        "title",
        "there is no note with this title: view without a title lists all",
    )
}

fn check_title(title: &str) -> Result<(), NoteRefusal> {
    let is_allowed =
        |character: char| !character.is_control() && !NOT_IN_TITLES.contains(character) && !is_invisible(character);
    let fits = !title.is_empty() && title.len() <= MAX_TITLE_BYTES && title.trim() == title;
    if fits && title.chars().all(is_allowed) {
        return Ok(());
    }
    let fix = format!(
        "write one line of 1 to {MAX_TITLE_BYTES} bytes, without quotes, brackets, backslashes, control or invisible \
         characters, and without a space at its ends"
    );
    Err(NoteRefusal::new("title", fix))
}

/// Where a passage is in a text, if it is there exactly once.
fn only_place(text: &str, passage: &str) -> Result<(usize, usize), NoteRefusal> {
    if passage.is_empty() {
        return Err(NoteRefusal::new(
            "old",
            "write the passage to replace; write replaces the whole text",
        ));
    }
    let Some(start) = text.find(passage) else {
        let fix = "the note does not have this passage: view the note, and copy it exactly";
        return Err(NoteRefusal::new("old", fix));
    };
    // It may overlap with itself.
    let next = text.ceil_char_boundary(start + 1);
    if text[next..].contains(passage) {
        let fix = "the note has this passage more than once: make it longer, so that it is there only once";
        return Err(NoteRefusal::new("old", fix));
    }
    Ok((start, start + passage.len()))
}
