//! Lists and reads the files of a workspace. Blocking.
//!
//! Opens each path component on its own and follows no link, so that no file outside the workspace is ever read, even
//! if directories and links are swapped at the same time. Does not decide what a change means.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use ring::digest::{Context, SHA256};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::Errno;

use crate::link::pod::WORKER_UID;
use crate::sensor_pipeline::watch::{FileFingerprint, FileStat, MAX_ENTRIES, MAX_HASHED_BYTES, MAX_LEVELS, WatchScope};
use crate::support::hash::hex;
use crate::toolbox_protocol::UNFINISHED_FILE_PREFIX;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FileSurvey {
    /// Files by their path relative to the workspace.
    pub(super) files: BTreeMap<String, FileStat>,
    /// Directories, likewise; the workspace itself is the empty path.
    pub(super) directories: Vec<String>,
    /// Directories that were skipped: what was known about their files stays valid.
    pub(super) passed: Vec<String>,
    /// Why something was skipped.
    pub(super) problem: Option<WatchError>,
}

/// Why files cannot be read. Shown to users, so it never contains a file name.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchError {
    #[error("spec.source.watch.path is not in the workspace: create it, or correct the path")]
    Absent,
    #[error(
        "spec.source.watch.path contains a symbolic link, or is neither a file nor a directory: use a path without links"
    )]
    Link,
    #[error(
        "more than {MAX_ENTRIES} files and directories: move processed files out of the directory, or watch \
         a smaller directory"
    )]
    TooMany,
    #[error(
        "directories are nested more than {MAX_LEVELS} levels deep, and deeper ones are skipped: \
         set spec.source.watch.recursive to false, or move them"
    )]
    TooDeep,
    #[error("skipped a file or directory whose name is not UTF-8: rename it")]
    Nameless,
    #[error("skipped a file or directory without read permission: make it readable for group {WORKER_UID}, or for all")]
    Denied,
    #[error("cannot read the workspace: {0}")]
    Other(String),
}

impl From<Errno> for WatchError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::NOENT => Self::Absent,
            Errno::LOOP | Errno::NOTDIR | Errno::NXIO => Self::Link,
            Errno::ACCESS | Errno::PERM => Self::Denied,
            other => Self::Other(io::Error::from(other).to_string()),
        }
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// `NONBLOCK`, so that opening a named pipe does not block.
const FILE: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// Lists everything that a scope covers.
pub(super) fn survey(workspace: &Path, scope: &WatchScope) -> Result<FileSurvey, WatchError> {
    let mut survey = FileSurvey::default();
    let mut at = open_root(workspace)?;
    let mut path = String::new();
    let mut names = scope.names().peekable();
    while let Some(name) = names.next() {
        let stat = statat(&at, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        survey.directories.push(path.clone());
        join(&mut path, name);
        if is_file && names.peek().is_none() {
            survey.files.insert(path, file_stat(&stat));
            return Ok(survey);
        }
        at = openat(&at, name, DIRECTORY, Mode::empty())?;
    }
    // Directories above the scope are watched only because the scope may appear or disappear in them.
    let mut walk = DirectoryWalk {
        survey: &mut survey,
        recursive: scope.is_recursive(),
        entries: 0,
    };
    walk.directory(&at, &path, 0)?;
    Ok(survey)
}

fn open_root(workspace: &Path) -> Result<OwnedFd, WatchError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(workspace, flags, Mode::empty())?)
}

fn join(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('/');
    }
    path.push_str(name);
}

fn file_stat(stat: &Stat) -> FileStat {
    let nanoseconds = i64::try_from(stat.st_mtime_nsec).unwrap_or_default();
    FileStat {
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        modified: stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(nanoseconds),
        stamp: stamp(stat),
    }
}

/// A hash that changes with every replacement or change of a file. Never 0, which means unknown.
fn stamp(stat: &Stat) -> u64 {
    let mut hash = DefaultHasher::new();
    (stat.st_ino, stat.st_ctime, stat.st_ctime_nsec).hash(&mut hash);
    hash.finish().max(1)
}

struct DirectoryWalk<'a> {
    survey: &'a mut FileSurvey,
    recursive: bool,
    entries: usize,
}

impl DirectoryWalk<'_> {
    fn directory(&mut self, directory: &OwnedFd, path: &str, level: usize) -> Result<(), WatchError> {
        self.survey.directories.push(path.to_owned());
        let mut inner = Vec::new();
        let mut entries = Dir::read_from(directory)?;
        while let Some(entry) = entries.read() {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.entries += 1;
            if self.entries > MAX_ENTRIES {
                return Err(WatchError::TooMany);
            }
            if let Some(directory) = self.entry(directory, name, path)? {
                inner.push(directory);
            }
        }
        for name in inner {
            let mut below = path.to_owned();
            join(&mut below, &name);
            if level >= MAX_LEVELS {
                self.pass(below, WatchError::TooDeep);
                continue;
            }
            let inner = match openat(directory, &*name, DIRECTORY, Mode::empty()) {
                Ok(inner) => self.directory(&inner, &below, level + 1),
                // Removed, or replaced by something else, in the meantime.
                Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => continue,
                Err(error) => Err(error.into()),
            };
            match inner {
                Ok(()) => {}
                Err(WatchError::Denied) => self.pass(below, WatchError::Denied),
                Err(problem) => return Err(problem),
            }
        }
        Ok(())
    }

    /// Skips a directory that cannot be read, so that changes elsewhere are still reported.
    fn pass(&mut self, directory: String, why: WatchError) {
        self.survey.passed.push(directory);
        self.survey.problem = Some(why);
    }

    /// Adds an entry to the survey. Returns the name if it is a directory to descend into.
    fn entry(&mut self, directory: &OwnedFd, name: &CStr, path: &str) -> Result<Option<String>, WatchError> {
        let stat = match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::Directory) {
            return Ok(None);
        }
        let Ok(name) = name.to_str() else {
            self.survey.problem = Some(WatchError::Nameless);
            return Ok(None);
        };
        // An unfinished file of the toolbox is renamed when it is complete.
        if name.starts_with(UNFINISHED_FILE_PREFIX) {
            return Ok(None);
        }
        if kind == FileType::Directory {
            return Ok(self.recursive.then(|| name.to_owned()));
        }
        let mut whole = path.to_owned();
        join(&mut whole, name);
        self.survey.files.insert(whole, file_stat(&stat));
        Ok(None)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct FileContent {
    /// The fingerprint to persist.
    pub(super) print: FileFingerprint,
    /// The content, if it is UTF-8 and at most `max_text` bytes long.
    pub(super) text: Option<String>,
}

/// Reads a file if it still looks as `expected`; `None` otherwise.
pub(super) fn read(
    workspace: &Path,
    path: &str,
    expected: FileStat,
    max_text: usize,
) -> Result<Option<FileContent>, WatchError> {
    match read_steady(workspace, path, expected, max_text) {
        Ok(content) => Ok(content),
        // Removed, or replaced by something else: the next survey finds out.
        Err(WatchError::Absent | WatchError::Link) => Ok(None),
        Err(problem) => Err(problem),
    }
}

fn read_steady(
    workspace: &Path,
    path: &str,
    expected: FileStat,
    max_text: usize,
) -> Result<Option<FileContent>, WatchError> {
    let mut at = open_root(workspace)?;
    let (directories, name) = path.rsplit_once('/').unwrap_or(("", path));
    for directory in directories.split('/').filter(|name| !name.is_empty()) {
        at = openat(&at, directory, DIRECTORY, Mode::empty())?;
    }
    let file = openat(&at, name, FILE, Mode::empty())?;
    let same = |file: &OwnedFd| -> Result<bool, WatchError> {
        let stat = fstat(file)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        Ok(is_file && file_stat(&stat) == expected)
    };
    if !same(&file)? {
        return Ok(None);
    }
    if expected.size > MAX_HASHED_BYTES {
        let print = FileFingerprint {
            look: expected,
            hash: None,
        };
        return Ok(Some(FileContent { print, text: None }));
    }
    let copy = file.try_clone().map_err(other)?;
    let (hash, bytes) = take_in(File::from(copy).take(expected.size), expected.size, max_text).map_err(other)?;
    // The file was written to while it was read, so the content may be torn.
    if !same(&file)? {
        return Ok(None);
    }
    Ok(Some(FileContent {
        print: FileFingerprint {
            look: expected,
            hash: Some(hash),
        },
        text: bytes.and_then(|bytes| String::from_utf8(bytes).ok()),
    }))
}

/// Hashes a file. Returns its bytes as well if there are at most `max`.
fn take_in(mut file: impl Read, size: u64, max: usize) -> io::Result<(String, Option<Vec<u8>>)> {
    let small = usize::try_from(size).is_ok_and(|size| size <= max);
    let mut bytes = small.then(Vec::new);
    let mut hash = Context::new(&SHA256);
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let count = file.read(&mut buffer)?;
        let part = buffer.get(..count).unwrap_or_default();
        if part.is_empty() {
            break;
        }
        hash.update(part);
        if let Some(bytes) = &mut bytes {
            bytes.extend_from_slice(part);
        }
    }
    Ok((hex(hash.finish().as_ref()), bytes))
}

#[allow(clippy::needless_pass_by_value, reason = "it is passed to map_err")]
fn other(error: io::Error) -> WatchError {
    WatchError::Other(error.kind().to_string())
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, create_dir_all, remove_file, write};
    use std::os::unix::fs::symlink;

    use pretty_assertions::assert_eq;

    use super::*;
    use crate::api::sensor::WatchSource;

    fn scope(path: &str, recursive: bool) -> WatchScope {
        WatchScope::of(&WatchSource {
            path: path.into(),
            recursive,
        })
        .expect("a scope")
    }

    fn files(workspace: &Path, scope: &WatchScope) -> Result<Vec<String>, WatchError> {
        survey(workspace, scope).map(|survey| survey.files.into_keys().collect())
    }

    #[test]
    fn files_of_a_directory_are_found_in_its_subdirectories_if_requested() {
        let dir = tempfile::tempdir().expect("a folder");
        create_dir_all(dir.path().join("inbox/deep/er")).expect("folders");
        for file in ["inbox/a", "inbox/deep/er/b", "outside"] {
            write(dir.path().join(file), "x").expect("a file");
        }
        assert_eq!(
            files(dir.path(), &scope("inbox/", true)).expect("files"),
            ["inbox/a", "inbox/deep/er/b"]
        );
        assert_eq!(files(dir.path(), &scope("inbox", false)).expect("files"), ["inbox/a"]);
        assert_eq!(files(dir.path(), &scope(".", false)).expect("files"), ["outside"]);
        let one = survey(dir.path(), &scope("inbox/a", true)).expect("a file");
        assert_eq!(
            (one.files.len(), one.directories),
            (1, vec![String::new(), "inbox".into()])
        );
        assert_eq!(files(dir.path(), &scope("absent", true)), Err(WatchError::Absent));
    }

    #[test]
    fn unfinished_files_of_the_toolbox_are_ignored() {
        let dir = tempfile::tempdir().expect("a folder");
        for file in [".agentloop-1f", ".agentloop", "agentloop-1f"] {
            write(dir.path().join(file), "x").expect("a file");
        }
        assert_eq!(
            files(dir.path(), &scope(".", false)).expect("files"),
            [".agentloop", "agentloop-1f"]
        );
    }

    #[test]
    fn no_link_and_no_pipe_is_followed_whatever_it_leads_to() {
        let (outside, dir) = (
            tempfile::tempdir().expect("a folder"),
            tempfile::tempdir().expect("a folder"),
        );
        write(outside.path().join("secret"), "x").expect("a file");
        create_dir(dir.path().join("inbox")).expect("a folder");
        symlink(outside.path(), dir.path().join("inbox/folder")).expect("a link");
        symlink(outside.path().join("secret"), dir.path().join("inbox/file")).expect("a link");
        symlink(outside.path(), dir.path().join("link")).expect("a link");
        assert_eq!(
            files(dir.path(), &scope("inbox", true)).expect("files"),
            Vec::<String>::new()
        );
        assert_eq!(files(dir.path(), &scope("link", true)), Err(WatchError::Link));
        assert_eq!(files(dir.path(), &scope("link/secret", true)), Err(WatchError::Link));
        let look = FileStat {
            size: 1,
            ..FileStat::default()
        };
        assert_eq!(read(dir.path(), "inbox/folder/secret", look, 9), Ok(None));
        assert_eq!(read(dir.path(), "inbox/file", look, 9), Ok(None));
    }

    #[test]
    fn an_unchanged_file_is_read_and_its_text_is_returned_when_small_and_valid() {
        let dir = tempfile::tempdir().expect("a folder");
        write(dir.path().join("a"), "hi").expect("a file");
        let found = survey(dir.path(), &scope("", true)).expect("files");
        let look = found.files["a"];
        let content = read(dir.path(), "a", look, 2).expect("a file").expect("a content");
        let hash = "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4";
        assert_eq!(
            (content.print.hash.as_deref(), content.text.as_deref()),
            (Some(hash), Some("hi"))
        );
        assert_eq!(
            read(dir.path(), "a", look, 1).expect("a file").expect("a content").text,
            None
        );
        let other = FileStat { size: 3, ..look };
        assert_eq!(read(dir.path(), "a", other, 2), Ok(None));
        remove_file(dir.path().join("a")).expect("removed");
        assert_eq!(read(dir.path(), "a", look, 2), Ok(None));
        write(dir.path().join("b"), [0xff, 0xfe]).expect("a file");
        let look = survey(dir.path(), &scope("", true)).expect("files").files["b"];
        assert_eq!(
            read(dir.path(), "b", look, 9).expect("a file").expect("a content").text,
            None
        );
    }

    #[test]
    fn as_many_files_as_are_allowed_are_found_and_one_more_is_reported() {
        let dir = tempfile::tempdir().expect("a folder");
        create_dir(dir.path().join("inbox")).expect("a folder");
        let file = |number: usize| dir.path().join(format!("inbox/{number}"));
        for number in 0..MAX_ENTRIES {
            write(file(number), "").expect("a file");
        }
        assert_eq!(
            files(dir.path(), &scope("inbox", true)).expect("files").len(),
            MAX_ENTRIES
        );
        write(file(MAX_ENTRIES), "").expect("a file");
        assert_eq!(files(dir.path(), &scope("inbox", true)), Err(WatchError::TooMany));
        remove_file(file(0)).expect("removed");
        assert!(files(dir.path(), &scope("inbox", true)).is_ok());
    }

    #[test]
    fn directories_are_read_to_the_maximum_depth_and_a_deeper_one_is_reported() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut path = dir.path().to_owned();
        path.extend(vec!["f"; MAX_LEVELS]);
        create_dir_all(&path).expect("folders");
        write(path.join("a"), "").expect("a file");
        assert_eq!(files(dir.path(), &scope("", true)).expect("files").len(), 1);
        create_dir(path.join("f")).expect("a folder");
        write(path.join("f/b"), "").expect("a file");
        let found = survey(dir.path(), &scope("", true)).expect("files");
        assert_eq!((found.files.len(), found.problem), (1, Some(WatchError::TooDeep)));
        let passed = ["f"; MAX_LEVELS + 1].join("/");
        assert_eq!(found.passed, [passed], "and what is beside it is found");
        assert_eq!(files(dir.path(), &scope("", false)), Ok(Vec::new()));
    }
}
