//! `write_file` and `edit_file`: a file is replaced as a whole, by a rename within its directory. Readers see the old
//! or the new content, and other names (hard links) of the old file keep the old content.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path};
use std::sync::atomic::{AtomicU64, Ordering};

use agentloop_toolbox_protocol::UNFINISHED_FILE_PREFIX;
use rustix::fs::{AtFlags, Mode, OFlags, Stat, fchmod, fstat, mkdirat, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::{FileError, Workspace, check_cancelled, require_regular, shown, size};
use crate::answer::ToolAnswer;

/// Longest content of `write_file`, and largest file of `edit_file`, in bytes.
pub(crate) const MAX_CONTENT: usize = 1024 * 1024;
/// How many places of an ambiguous text are named.
const NAMED_PLACES: usize = 5;
const NEW_FILE: OFlags = OFlags::WRONLY
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Tries to find a free temporary name. Names in use are left over from a crash.
const MAX_NAMES: usize = 16;

/// Arguments of `write_file`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteFile {
    path: String,
    content: String,
}

/// Arguments of `edit_file`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EditFile {
    path: String,
    old_text: String,
    new_text: String,
    #[serde(default)]
    replace_all: bool,
}

/// An opened directory, and the name of a file in it.
struct FileSlot<'a> {
    directory: OwnedFd,
    name: &'a OsStr,
    path: &'a Path,
}

impl Workspace {
    pub(crate) fn write(&self, wanted: &WriteFile, cancelled: &CancellationToken) -> Result<ToolAnswer, FileError> {
        let path = self.relative(&wanted.path)?;
        require_size(path, wanted.content.len())?;
        let (parent, name) = split(path)?;
        self.create_directories(parent)?;
        let slot = self.slot(path, parent, name)?;
        let before = slot.stat()?;
        check_cancelled(cancelled)?;
        slot.replace(wanted.content.as_bytes(), before.as_ref())?;
        let bytes = wanted.content.len();
        let verb = if before.is_some() { "replaced" } else { "created" };
        Ok(ToolAnswer::text(format!("{verb} {}, {bytes} bytes", shown(path))).wrote(bytes as u64))
    }

    pub(crate) fn edit(&self, wanted: &EditFile, cancelled: &CancellationToken) -> Result<ToolAnswer, FileError> {
        let path = self.relative(&wanted.path)?;
        let (parent, name) = split(path)?;
        let slot = self.slot(path, parent, name)?;
        let Some(before) = slot.stat()? else {
            return Err(FileError::Absent(shown(path)));
        };
        let text = slot.read(&before)?;
        let count = count(path, &text, wanted)?;
        let edited = text.replace(&wanted.old_text, &wanted.new_text);
        require_size(path, edited.len())?;
        check_cancelled(cancelled)?;
        slot.replace(edited.as_bytes(), Some(&before))?;
        let places = if count == 1 {
            "1 place"
        } else {
            &format!("{count} places")
        };
        Ok(ToolAnswer::text(format!("changed {places} of {}", shown(path))).wrote(edited.len() as u64))
    }

    /// Creates the missing directories of a path. Each one is created in a directory that was opened beneath the root.
    fn create_directories(&self, path: &Path) -> Result<(), FileError> {
        let is_missing = |directory: &Path| match self.open_directory(directory) {
            Ok(_) => Ok(false),
            Err(FileError::Absent(_)) => Ok(true),
            Err(error) => Err(error),
        };
        if !is_missing(path)? {
            return Ok(());
        }
        if path.components().any(|component| component == Component::ParentDir) {
            return Err(FileError::Absent(shown(path)));
        }
        let ancestors: Vec<_> = path
            .ancestors()
            .filter(|directory| !directory.as_os_str().is_empty())
            .collect();
        for directory in ancestors.into_iter().rev() {
            if !is_missing(directory)? {
                continue;
            }
            let (parent, name) = split(directory)?;
            let parent = self.open_directory(parent)?;
            match mkdirat(&parent, name, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(FileError::of(directory, errno)),
            }
        }
        Ok(())
    }

    fn slot<'a>(&self, path: &'a Path, parent: &Path, name: &'a OsStr) -> Result<FileSlot<'a>, FileError> {
        let directory = self.open_directory(parent)?;
        Ok(FileSlot { directory, name, path })
    }
}

impl FileSlot<'_> {
    fn failed(&self, errno: Errno) -> FileError {
        FileError::of(self.path, errno)
    }

    /// The existing file, which must be a regular one: a link, for example, would be replaced instead of followed.
    fn stat(&self) -> Result<Option<Stat>, FileError> {
        match statat(&self.directory, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => require_regular(self.path, &stat).map(|()| Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed(errno)),
        }
    }

    /// The content, if it is still that of the file that was examined.
    fn read(&self, expected: &Stat) -> Result<String, FileError> {
        require_size(self.path, usize::try_from(size(expected)).unwrap_or(usize::MAX))?;
        let flags = super::FILE | OFlags::NOFOLLOW;
        let file = openat(&self.directory, self.name, flags, Mode::empty()).map_err(|errno| self.failed(errno))?;
        let stat = fstat(&file).map_err(|errno| self.failed(errno))?;
        if !is_same(&stat, expected) {
            return Err(self.changed());
        }
        let mut bytes = Vec::new();
        File::from(file)
            .take(MAX_CONTENT as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| FileError::io(self.path, &error))?;
        require_size(self.path, bytes.len())?;
        String::from_utf8(bytes)
            .map_err(|_| FileError::Refused(format!("{}: not UTF-8 text; edit it with a command", shown(self.path))))
    }

    /// Replaces the file, unless it is no longer the one that was examined.
    fn replace(&self, content: &[u8], before: Option<&Stat>) -> Result<(), FileError> {
        let (name, file) = self.create_temporary()?;
        let replaced = self
            .fill(file, content, before)
            .and_then(|()| self.require_unchanged(before))
            .and_then(|()| {
                renameat(&self.directory, &name, &self.directory, self.name).map_err(|errno| self.failed(errno))
            });
        if replaced.is_err() {
            // The error of the replacement is the one to report.
            let _ = unlinkat(&self.directory, &name, AtFlags::empty());
        }
        replaced
    }

    fn create_temporary(&self) -> Result<(String, File), FileError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut errno = Errno::EXIST;
        for _ in 0..MAX_NAMES {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("{UNFINISHED_FILE_PREFIX}{}-{number}", std::process::id());
            match openat(&self.directory, &name, NEW_FILE, Mode::from_raw_mode(0o666)) {
                Ok(file) => return Ok((name, File::from(file))),
                Err(Errno::EXIST) => {}
                Err(other) => {
                    errno = other;
                    break;
                }
            }
        }
        Err(self.failed(errno))
    }

    fn fill(&self, mut file: File, content: &[u8], before: Option<&Stat>) -> Result<(), FileError> {
        if let Some(before) = before {
            fchmod(&file, Mode::from_raw_mode(before.st_mode & 0o777)).map_err(|errno| self.failed(errno))?;
        }
        file.write_all(content)
            .and_then(|()| file.sync_data())
            .map_err(|error| FileError::io(self.path, &error))
    }

    fn require_unchanged(&self, before: Option<&Stat>) -> Result<(), FileError> {
        match (before, self.stat()?) {
            (None, None) => Ok(()),
            (Some(before), Some(now)) if is_same(before, &now) => Ok(()),
            _ => Err(self.changed()),
        }
    }

    fn changed(&self) -> FileError {
        FileError::Refused(format!("{}: changed at the same time; read it again", shown(self.path)))
    }
}

/// The directory and the last name of a path.
fn split(path: &Path) -> Result<(&Path, &OsStr), FileError> {
    let Some(Component::Normal(name)) = path.components().next_back() else {
        return Err(FileError::Special(shown(path), "a directory"));
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok((parent.unwrap_or(Path::new(".")), name))
}

fn is_same(one: &Stat, other: &Stat) -> bool {
    let look = |stat: &Stat| {
        (
            stat.st_dev,
            stat.st_ino,
            stat.st_size,
            stat.st_ctime,
            stat.st_ctime_nsec,
        )
    };
    look(one) == look(other)
}

fn require_size(path: &Path, bytes: usize) -> Result<(), FileError> {
    if bytes <= MAX_CONTENT {
        return Ok(());
    }
    let mib = MAX_CONTENT / 1024 / 1024;
    let path = shown(path);
    Err(FileError::Refused(format!(
        "{path}: larger than {mib} MiB, the most that this tool handles"
    )))
}

/// How often the old text occurs; an error unless the edit is unambiguous.
fn count(path: &Path, text: &str, wanted: &EditFile) -> Result<usize, FileError> {
    let path = shown(path);
    if wanted.old_text.is_empty() {
        return Err(FileError::Refused(
            "old_text is empty; use write_file for a new file".into(),
        ));
    }
    if wanted.old_text == wanted.new_text {
        return Err(FileError::Refused("old_text and new_text are the same".into()));
    }
    let count = text.matches(&wanted.old_text).count();
    if count == 0 {
        let text = format!("{path}: old_text not found; it must match exactly, including spaces and line ends");
        return Err(FileError::Refused(text));
    }
    if count == 1 || wanted.replace_all {
        return Ok(count);
    }
    let line = |at: usize| text[..at].matches('\n').count() + 1;
    let places = text.match_indices(&wanted.old_text).take(NAMED_PLACES);
    let lines: Vec<_> = places.map(|(at, _)| line(at).to_string()).collect();
    let more = if count > NAMED_PLACES { ", …" } else { "" };
    let lines = lines.join(", ");
    Err(FileError::Refused(format!(
        "{path}: old_text occurs {count} times (lines {lines}{more}); add context to it, or set replace_all"
    )))
}
