//! File changes in a workspace: which files a Sensor watches, what has changed, and the payload of the event.
//!
//! Pure: the caller passes in the files found and the time. Does no file I/O; paths are relative to the workspace, with
//! `/` between names.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::FieldError;
use agentloop_api::sensor::WatchSource;

/// Maximum number of files and directories below the watched path: with more, the source fails until there are fewer.
pub const MAX_ENTRIES: usize = 10_000;
/// Maximum number of nested directories.
pub const MAX_LEVELS: usize = 32;
/// Larger files are not hashed: they count as changed when their size or modification time changes.
pub const MAX_HASHED_BYTES: u64 = 64 * 1024 * 1024;
/// How long a file must be unchanged until it counts as completely written.
pub const SETTLED: Duration = Duration::from_secs(1);
/// How long to wait for a file that is open for writing but not written to.
pub const ABANDONED: Duration = Duration::from_mins(1);

/// The part of a workspace that is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchScope {
    /// A file or directory; empty: the whole workspace.
    path: String,
    recursive: bool,
}

impl WatchScope {
    /// Validates and normalizes the path of the spec.
    pub fn of(watch: &WatchSource) -> Result<Self, FieldError> {
        let invalid = |detail: &str| FieldError {
            field: "spec.source.watch.path".into(),
            detail: detail.into(),
        };
        if watch.path.starts_with('/') {
            return Err(invalid("must be relative to the workspace, without a leading /"));
        }
        let names: Vec<&str> = watch
            .path
            .split('/')
            .filter(|name| !name.is_empty() && *name != ".")
            .collect();
        if names.contains(&"..") {
            return Err(invalid("must stay within the workspace: write it without .."));
        }
        if watch.path.contains('\0') {
            return Err(invalid("must not contain a NUL character"));
        }
        Ok(Self {
            path: names.join("/"),
            recursive: watch.recursive,
        })
    }

    /// The components of its path.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.path.split('/').filter(|name| !name.is_empty())
    }

    /// Whether subdirectories are watched too.
    #[must_use]
    pub fn is_recursive(&self) -> bool {
        self.recursive
    }

    /// Whether a file is in scope.
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

/// Metadata of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStat {
    pub size: u64,
    /// Modification time, in nanoseconds since 1970.
    pub modified: i64,
    /// A hash of further metadata: the file's identity and its change time. A copy that keeps the modification time of
    /// the original differs only here. 0: unknown, as for a file restored from a journal.
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
    pub look: FileStat,
    /// SHA-256 of its content in hex; `None`: it was too large.
    pub hash: Option<String>,
}

impl FileFingerprint {
    /// Whether the content is the same.
    #[must_use]
    pub fn says_the_same_as(&self, other: &Self) -> bool {
        match (&self.hash, &other.hash) {
            (Some(hash), Some(other)) => hash == other,
            // Not hashed: compare size and modification time, so that a change of permissions alone does not count.
            (None, None) => (self.look.size, self.look.modified) == (other.look.size, other.look.modified),
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChange {
    pub path: String,
    /// The current file; `None`: it was removed.
    pub print: Option<FileFingerprint>,
    /// Whether it existed before.
    pub was_there: bool,
    /// Its content, if it is text that may fit.
    pub text: Option<String>,
}

impl FileChange {
    /// The payload of the event, with the content if it fits.
    #[must_use]
    pub fn payload(&self, max_bytes: usize) -> String {
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
            if whole.len() <= max_bytes {
                return whole;
            }
            if let Some(fields) = payload.as_object_mut() {
                fields.remove("content");
            }
        }
        payload.to_string()
    }

    /// The event's id. Includes the number: a file that returns to earlier content is a new event.
    #[must_use]
    pub fn delivery_id(&self, sensor: &str, seq: i64) -> String {
        format!("{sensor}/{seq}/{}", self.path)
    }
}

/// What to do about a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileTask {
    /// It was removed.
    Forget(String),
    /// Read it: it may have changed.
    Read(String, FileStat),
}

/// Compares the files found with the known ones, and waits until writers are done.
#[derive(Debug, Default)]
pub struct ChangeDetector {
    known: BTreeMap<String, FileFingerprint>,
    /// Files that differ, with their metadata and the time since when they do, on the watcher's monotonic clock.
    unsettled: BTreeMap<String, (Option<FileStat>, Duration)>,
}

impl ChangeDetector {
    /// Starts with the files remembered.
    #[must_use]
    pub fn new(known: BTreeMap<String, FileFingerprint>) -> Self {
        Self {
            known,
            unsettled: BTreeMap::new(),
        }
    }

    /// The known state of a file.
    #[must_use]
    pub fn known(&self, path: &str) -> Option<&FileFingerprint> {
        self.known.get(path)
    }

    /// The known files below a directory, or at its path.
    #[must_use]
    pub fn below(&self, folder: &str) -> Vec<(String, FileStat)> {
        let files = self.known.iter().filter(|(path, _)| {
            let rest = path.strip_prefix(folder);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        });
        files.map(|(path, print)| (path.clone(), print.look)).collect()
    }

    /// Records the state of a file.
    pub fn learn(&mut self, path: &str, print: Option<FileFingerprint>) {
        self.unsettled.remove(path);
        match print {
            Some(print) => self.known.insert(path.to_owned(), print),
            None => self.known.remove(path),
        };
    }

    /// The tasks due at `now` on the watcher's monotonic clock: removals first, then changes, oldest first. `open`:
    /// files that are open for writing.
    pub fn compare(
        &mut self,
        now: Duration,
        found: &BTreeMap<String, FileStat>,
        open: &BTreeSet<String>,
    ) -> Vec<FileTask> {
        for (path, print) in &mut self.known {
            // Complete the stamp of a file restored from a journal.
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
        // A file is due once it has looked the same for the whole settling time. Any change restarts that time, so that
        // a file is not read while it is being written.
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

    /// When the next file settles after `now`, on the watcher's clock. Excludes files that settled before but could not
    /// be read.
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
