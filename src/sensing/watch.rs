//! Files of a workspace: which of them a Sensor watches, what has changed, and what an event says of it.
//!
//! Pure: who looks at the files brings what it found, and the time. Knows no file system; paths are those below the
//! workspace, with `/` between names.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::FieldError;
use crate::api::sensor::WatchSource;

/// Most files and folders below what is watched: with more, nothing is heard until there are fewer.
pub const MOST_ENTRIES: usize = 10_000;
/// Most folders inside each other.
pub const MOST_LEVELS: usize = 32;
/// Of larger files the content is not looked at: they have changed when size or time of change have.
pub const MOST_HASHED_BYTES: u64 = 64 * 1024 * 1024;
/// How long a file must look the same until it counts as written.
pub const SETTLED: Duration = Duration::from_secs(1);
/// How long a file that somebody has open for writing, and does not write, is waited for.
pub const ABANDONED: Duration = Duration::from_mins(1);

/// What of a workspace is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchScope {
    /// A file or folder; empty: all.
    path: String,
    recursive: bool,
}

impl WatchScope {
    /// Reads it from the spec.
    pub fn of(watch: &WatchSource) -> Result<Self, FieldError> {
        let invalid = |detail: &str| FieldError {
            field: "spec.source.watch.path".into(),
            detail: detail.into(),
        };
        if watch.path.starts_with('/') {
            return Err(invalid("is a path below the workspace and begins without /"));
        }
        let names: Vec<&str> = watch
            .path
            .split('/')
            .filter(|name| !name.is_empty() && *name != ".")
            .collect();
        if names.contains(&"..") {
            return Err(invalid("may not lead out of the workspace: write it without .."));
        }
        if watch.path.contains('\0') {
            return Err(invalid("has a character that no path has"));
        }
        Ok(Self {
            path: names.join("/"),
            recursive: watch.recursive,
        })
    }

    /// The names on the way to it.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.path.split('/').filter(|name| !name.is_empty())
    }

    /// Whether it goes into folders of the folder that it names.
    #[must_use]
    pub fn is_recursive(&self) -> bool {
        self.recursive
    }

    /// Whether a file belongs to it.
    #[must_use]
    pub fn covers(&self, path: &str) -> bool {
        let below = match path.strip_prefix(&*self.path) {
            Some("") => return true,
            Some(rest) if self.path.is_empty() => rest,
            Some(rest) => match rest.strip_prefix('/') {
                Some(rest) => rest,
                None => return false,
            },
            None => return false,
        };
        self.recursive || !below.contains('/')
    }
}

/// What a file looks like from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStat {
    /// Its bytes.
    pub size: u64,
    /// When it was last changed, in nanoseconds since 1970.
    pub modified: i64,
    /// A hash of what else the file system says of it: which file it is, and when that last changed in any way. A copy that
    /// keeps the time of the original shows in this alone. 0: not known, as in what a journal remembers.
    pub stamp: u64,
}

impl FileStat {
    /// Whether it may be the same file with the same content.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let stamps = [self.stamp, other.stamp];
        (self.size, self.modified) == (other.size, other.modified) && (stamps.contains(&0) || self.stamp == other.stamp)
    }
}

/// What is remembered of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFingerprint {
    /// What it looked like.
    pub look: FileStat,
    /// SHA-256 of its content, in hexadecimal digits; `None`: it was too large.
    pub hash: Option<String>,
}

impl FileFingerprint {
    /// Whether a file still says what it said.
    #[must_use]
    pub fn says_the_same_as(&self, other: &Self) -> bool {
        match (&self.hash, &other.hash) {
            (Some(hash), Some(other)) => hash == other,
            // Nobody reads it: more than a change of its rights must have happened to it.
            (None, None) => (self.look.size, self.look.modified) == (other.look.size, other.look.modified),
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
}

/// What happened to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChange {
    /// The file.
    pub path: String,
    /// What it is now; `None`: it is gone.
    pub print: Option<FileFingerprint>,
    /// Whether it was there before.
    pub was_there: bool,
    /// What it says, where that is a text that may fit.
    pub text: Option<String>,
}

impl FileChange {
    /// What the event says, with the text where there is room for it.
    #[must_use]
    pub fn payload(&self, most_bytes: usize) -> String {
        let kind = match (&self.print, self.was_there) {
            (Some(_), false) => "Created",
            (Some(_), true) => "Modified",
            (None, _) => "Removed",
        };
        let mut payload = json!({ "path": self.path, "kind": kind });
        if let Some(print) = &self.print {
            payload["size"] = print.look.size.into();
            let modified = Timestamp::from_nanosecond(print.look.modified.into());
            payload["modified"] = modified.map_or(Value::Null, |modified| modified.to_string().into());
            if let Some(hash) = &print.hash {
                payload["sha256"] = hash.as_str().into();
            }
        }
        if let Some(text) = &self.text {
            payload["content"] = text.as_str().into();
            let whole = payload.to_string();
            if whole.len() <= most_bytes {
                return whole;
            }
            if let Some(fields) = payload.as_object_mut() {
                fields.remove("content");
            }
        }
        payload.to_string()
    }

    /// The event's id: a file that says again what it said once is another event.
    #[must_use]
    pub fn delivery_id(&self, sensor: &str, seq: i64) -> String {
        format!("{sensor}/{seq}/{}", self.path)
    }
}

/// What is to be done about a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileTask {
    /// It is gone.
    Forget(String),
    /// It is to be read: it may have changed.
    Read(String, FileStat),
}

/// Compares what is found with what is known, and waits for those who write to be done.
#[derive(Debug, Default)]
pub struct ChangeDetector {
    known: BTreeMap<String, FileFingerprint>,
    /// What differs, what it looks like, and since when it does: a moment of the watcher's own clock.
    unsettled: BTreeMap<String, (Option<FileStat>, Duration)>,
}

impl ChangeDetector {
    /// Knows what was remembered.
    #[must_use]
    pub fn new(known: BTreeMap<String, FileFingerprint>) -> Self {
        Self {
            known,
            unsettled: BTreeMap::new(),
        }
    }

    /// What is known of a file.
    #[must_use]
    pub fn known(&self, path: &str) -> Option<&FileFingerprint> {
        self.known.get(path)
    }

    /// What is known below a folder, or at its path.
    #[must_use]
    pub fn below(&self, folder: &str) -> Vec<(String, FileStat)> {
        let files = self.known.iter().filter(|(path, _)| {
            let rest = path.strip_prefix(folder);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        });
        files.map(|(path, print)| (path.clone(), print.look)).collect()
    }

    /// It is known now.
    pub fn learn(&mut self, path: &str, print: Option<FileFingerprint>) {
        self.unsettled.remove(path);
        match print {
            Some(print) => self.known.insert(path.to_owned(), print),
            None => self.known.remove(path),
        };
    }

    /// What is to be done at `now`, by the watcher's own clock: first what is gone, then what has changed, the oldest first.
    /// `open`: files that somebody writes to.
    pub fn compare(
        &mut self,
        now: Duration,
        found: &BTreeMap<String, FileStat>,
        open: &BTreeSet<String>,
    ) -> Vec<FileTask> {
        for (path, print) in &mut self.known {
            // From now on it is known whole.
            if let Some(look) = found.get(path).filter(|look| print.look.is_like(look)) {
                print.look = *look;
            }
        }
        let gone = self.known.keys().filter(|path| !found.contains_key(*path));
        let changed = found
            .iter()
            .filter(|(path, look)| self.known.get(*path).is_none_or(|print| !print.look.is_like(look)));
        let differing = gone
            .map(|path| (path.clone(), None))
            .chain(changed.map(|(path, look)| (path.clone(), Some(*look))));
        let before = std::mem::take(&mut self.unsettled);
        let mut tasks = Vec::new();
        for (path, look) in differing {
            let since = before
                .get(&path)
                .filter(|(known, _)| *known == look)
                .map_or(now, |(_, since)| *since);
            self.unsettled.insert(path.clone(), (look, since));
            let patience = if open.contains(&path) { ABANDONED } else { SETTLED };
            if now.saturating_sub(since) >= patience {
                tasks.push(match look {
                    None => FileTask::Forget(path),
                    Some(look) => FileTask::Read(path, look),
                });
            }
        }
        tasks.sort_by_key(|task| match task {
            FileTask::Forget(_) => i64::MIN,
            FileTask::Read(_, look) => look.modified,
        });
        tasks
    }

    /// When something may have settled after `now`, by the watcher's own clock. What had settled before could not be read.
    #[must_use]
    pub fn settles_at(&self, now: Duration, open: &BTreeSet<String>) -> Option<Duration> {
        let moments = self.unsettled.iter().map(|(path, (_, since))| {
            let patience = if open.contains(path) { ABANDONED } else { SETTLED };
            *since + patience
        });
        moments.filter(|moment| *moment > now).min()
    }
}

#[cfg(test)]
mod tests;
