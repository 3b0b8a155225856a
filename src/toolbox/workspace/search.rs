//! `search_files`: lines that match a regular expression.
//!
//! The walk opens each directory from its parent and follows no link.

use std::ffi::CStr;
use std::fmt::Write;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use regex::bytes::{Regex, RegexBuilder};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, openat, statat};
use rustix::io::Errno;
use serde::Deserialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{DIRECTORY, FILE, FileError, Workspace, check_cancelled};
use crate::answer::ToolAnswer;
use agentloop_toolbox_protocol::UNFINISHED_FILE_PREFIX;

pub(crate) const MAX_PATTERN: usize = 1000;
pub(crate) const DEFAULT_RESULTS: usize = 100;
pub(crate) const MAX_RESULTS: usize = 1000;
/// Maximum number of bytes of a line that are shown.
const MAX_LINE: usize = 300;
/// Longest line that is searched; the rest of a longer one is not.
const MAX_SEARCHED_LINE: usize = 64 * 1024;
/// Bounds of one search: entries, levels of directories, bytes, and time.
const MAX_ENTRIES: usize = 100_000;
const MAX_LEVELS: usize = 32;
const MAX_BYTES: u64 = 512 * 1024 * 1024;
const MAX_TIME: Duration = Duration::from_secs(20);
/// Bound of the memory of a compiled pattern.
const MAX_PROGRAM: usize = 1024 * 1024;
/// The first bytes of a file that are checked: with a zero byte among them it is not text.
const PROBED: usize = 1024;

/// Arguments of `search_files`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchFiles {
    pattern: String,
    #[serde(default = "here")]
    path: String,
    #[serde(default)]
    file_name: Option<String>,
    #[serde(default = "default_results")]
    max_results: usize,
}

fn here() -> String {
    ".".into()
}

const fn default_results() -> usize {
    DEFAULT_RESULTS
}

impl Workspace {
    /// Searches the files below a path, or one file.
    pub(crate) fn search(
        &self,
        wanted: &SearchFiles,
        limit: usize,
        cancelled: &CancellationToken,
    ) -> Result<ToolAnswer, FileError> {
        let path = self.relative(&wanted.path)?;
        let mut search = Search {
            pattern: compile(&wanted.pattern)?,
            file_name: wanted.file_name.as_deref().map(name_pattern).transpose()?,
            max_results: wanted.max_results.clamp(1, MAX_RESULTS),
            limit,
            cancelled,
            deadline: Instant::now() + MAX_TIME,
            text: String::new(),
            results: 0,
            entries: 0,
            bytes: 0,
            stopped: None,
        };
        let shown = if path == Path::new(".") {
            ""
        } else {
            &*path.to_string_lossy()
        };
        match self.open_directory(path) {
            Ok(directory) => search.directory(&directory, shown, 0)?,
            Err(FileError::NotADirectory(_)) => {
                let (file, _) = self.open_regular(path)?;
                search.file(file, shown)?;
            }
            Err(error) => return Err(error),
        }
        Ok(ToolAnswer::text(search.into_text()))
    }
}

fn compile(pattern: &str) -> Result<Regex, FileError> {
    if pattern.is_empty() || pattern.len() > MAX_PATTERN {
        return Err(FileError::Refused(format!(
            "pattern must have 1 to {MAX_PATTERN} bytes"
        )));
    }
    RegexBuilder::new(pattern)
        .size_limit(MAX_PROGRAM)
        .dfa_size_limit(MAX_PROGRAM)
        .build()
        .map_err(|error| FileError::Refused(format!("pattern is not a valid regular expression: {error}")))
}

/// A pattern of file names, in which `*` and `?` have their usual meaning.
fn name_pattern(glob: &str) -> Result<Regex, FileError> {
    let mut pattern = String::from("(?s)^");
    for character in glob.chars() {
        match character {
            '*' => pattern.push_str(".*"),
            '?' => pattern.push('.'),
            other => pattern.push_str(&regex::escape(other.encode_utf8(&mut [0; 4]))),
        }
    }
    pattern.push('$');
    compile(&pattern)
}

struct Search<'a> {
    pattern: Regex,
    file_name: Option<Regex>,
    max_results: usize,
    limit: usize,
    cancelled: &'a CancellationToken,
    deadline: Instant,
    text: String,
    results: usize,
    entries: usize,
    bytes: u64,
    /// The bound at which the search ended early.
    stopped: Option<&'static str>,
}

impl Search<'_> {
    /// Whether to continue.
    fn proceeds(&mut self) -> Result<bool, FileError> {
        check_cancelled(self.cancelled)?;
        if self.stopped.is_none() {
            self.stopped = if self.results >= self.max_results || self.text.len() >= self.limit {
                Some("enough results")
            } else if self.entries >= MAX_ENTRIES || self.bytes >= MAX_BYTES {
                Some("too many files")
            } else if Instant::now() >= self.deadline {
                Some("out of time")
            } else {
                None
            };
        }
        Ok(self.stopped.is_none())
    }

    fn directory(&mut self, directory: &OwnedFd, path: &str, level: usize) -> Result<(), FileError> {
        // A directory that became unreadable, and one that is nested too deeply, is skipped.
        let Ok(entries) = Dir::read_from(directory) else {
            return Ok(());
        };
        let mut names: Vec<_> = entries
            .flatten()
            .map(|entry| entry.file_name().to_owned())
            .filter(|name| !is_skipped(name))
            .take(MAX_ENTRIES)
            .collect();
        names.sort_unstable();
        for name in names {
            if !self.proceeds()? {
                break;
            }
            self.entries += 1;
            let Ok(stat) = statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let text = name.to_string_lossy();
            let below = if path.is_empty() {
                text.into_owned()
            } else {
                format!("{path}/{text}")
            };
            self.entry(directory, &name, &stat, &below, level)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        directory: &OwnedFd,
        name: &CStr,
        stat: &Stat,
        path: &str,
        level: usize,
    ) -> Result<(), FileError> {
        let is_wanted = |pattern: &Option<Regex>| pattern.as_ref().is_none_or(|glob| glob.is_match(name.to_bytes()));
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if level < MAX_LEVELS => {
                match openat(directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
                    Ok(inner) => self.directory(&inner, path, level + 1),
                    Err(errno) => skipped(errno),
                }
            }
            FileType::RegularFile if is_wanted(&self.file_name) => {
                match openat(directory, name, FILE | OFlags::NOFOLLOW, Mode::empty()) {
                    Ok(file) => self.opened(File::from(file), path),
                    Err(errno) => skipped(errno),
                }
            }
            FileType::RegularFile
            | FileType::Directory
            | FileType::Symlink
            | FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => Ok(()),
        }
    }

    /// Searches a file that may have been swapped for another kind of file before it was opened.
    fn opened(&mut self, file: File, path: &str) -> Result<(), FileError> {
        let is_regular = file.metadata().is_ok_and(|metadata| metadata.is_file());
        if is_regular { self.file(file, path) } else { Ok(()) }
    }

    fn file(&mut self, file: File, path: &str) -> Result<(), FileError> {
        let mut file = BufReader::with_capacity(MAX_SEARCHED_LINE, file);
        let is_binary = file
            .fill_buf()
            .map_or(true, |bytes| bytes[..bytes.len().min(PROBED)].contains(&0));
        if is_binary {
            return Ok(());
        }
        let mut line = Vec::new();
        for number in 1_u64.. {
            if !self.proceeds()? || !self.line(&mut file, &mut line)? {
                break;
            }
            if self.pattern.is_match(&line) {
                self.results += 1;
                let shown = String::from_utf8_lossy(&line[..line.len().min(MAX_LINE)]);
                // A character may have been cut.
                let shown = shown.trim_end_matches('\u{fffd}');
                let ellipsis = if line.len() > MAX_LINE { "…" } else { "" };
                // Writing to a string cannot fail.
                let _ = writeln!(self.text, "{path}:{number}:{shown}{ellipsis}");
            }
        }
        Ok(())
    }

    /// Reads a line into `line`, without what exceeds the longest line. False at the end of the file.
    fn line(&mut self, file: &mut BufReader<File>, line: &mut Vec<u8>) -> Result<bool, FileError> {
        line.clear();
        let mut is_any = false;
        loop {
            check_cancelled(self.cancelled)?;
            // A file that cannot be read any further ends here.
            let chunk = file.fill_buf().unwrap_or_default();
            if chunk.is_empty() || self.bytes >= MAX_BYTES {
                return Ok(is_any);
            }
            is_any = true;
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(chunk.len(), |at| at + 1);
            let kept = used.min(MAX_SEARCHED_LINE - line.len());
            line.extend_from_slice(&chunk[..kept]);
            file.consume(used);
            self.bytes += used as u64;
            if end.is_some() {
                while line.pop_if(|byte| matches!(byte, b'\n' | b'\r')).is_some() {}
                return Ok(true);
            }
        }
    }

    fn into_text(mut self) -> String {
        match self.stopped {
            Some(why) => {
                let results = self.results;
                // Writing to a string cannot fail.
                let _ = write!(self.text, "[stopped after {results} matches: {why}; narrow the search]");
            }
            None if self.results == 0 => self.text.push_str("[no matches]"),
            None => {}
        }
        self.text
    }
}

fn is_skipped(name: &CStr) -> bool {
    let name = name.to_bytes();
    matches!(name, b"." | b".." | b".git") || name.starts_with(UNFINISHED_FILE_PREFIX.as_bytes())
}

/// What was removed, replaced or protected in the meantime is not an error of the search.
fn skipped(errno: Errno) -> Result<(), FileError> {
    match errno {
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => Err(FileError::of(Path::new("."), errno)),
        _ => Ok(()),
    }
}
