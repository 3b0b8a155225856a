//! The files of the workspace: the only directory that the file tools reach.
//!
//! Every path is resolved by the kernel (`openat2`) below the directory that was opened at the start, so that neither
//! `..`, nor a link, nor a directory that is swapped for a link at the same time leads out of it. Blocking.

mod list;
mod read;
mod report;
mod search;
mod write;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat2};
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;

/// Bounds that schemas state.
pub(crate) mod bounds {
    pub(crate) use super::MAX_PATH;
    pub(crate) use super::read::{DEFAULT_LINES, MAX_LINES};
    pub(crate) use super::search::{DEFAULT_RESULTS, MAX_PATTERN, MAX_RESULTS};
    pub(crate) use super::write::MAX_CONTENT;
}

pub(crate) use self::list::ListDirectory;
pub(crate) use self::read::ReadFile;
pub(crate) use self::search::SearchFiles;
pub(crate) use self::write::{EditFile, WriteFile};

/// Longest path of an argument in bytes; the kernel's own limit.
pub(crate) const MAX_PATH: usize = 4095;
/// Tries of a lookup that is disturbed by renames. Each costs microseconds.
const MAX_TRIES: usize = 64;
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// `NONBLOCK`, so that a named pipe does not block, and `NOCTTY`, so that a terminal is not taken over.
const FILE: OFlags = OFlags::RDONLY
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// Why a file tool failed, for the model.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileError {
    #[error("{0}: outside the workspace; use a path relative to it")]
    Outside(String),
    #[error("{0}: not found")]
    Absent(String),
    #[error("{0}: {1}, not a regular file")]
    Special(String, &'static str),
    #[error("{0}: not a directory")]
    NotADirectory(String),
    #[error("{0}: a symbolic link; name its target instead")]
    Link(String),
    #[error("{0}: permission denied")]
    Denied(String),
    #[error("{0}: the path is empty, too long or contains a zero byte")]
    Invalid(String),
    #[error("{0}")]
    Refused(String),
    #[error("the call was cancelled")]
    Cancelled,
    #[error("{path}: {cause}")]
    Other { path: String, cause: String },
}

impl FileError {
    fn of(path: &Path, errno: Errno) -> Self {
        let path = shown(path);
        match errno {
            // ELOOP: too many links, or a link of /proc.
            Errno::XDEV | Errno::LOOP => Self::Outside(path),
            Errno::NOENT => Self::Absent(path),
            Errno::NOTDIR => Self::NotADirectory(path),
            Errno::ACCESS | Errno::PERM => Self::Denied(path),
            Errno::NAMETOOLONG | Errno::INVAL => Self::Invalid(path),
            Errno::NXIO | Errno::NODEV => Self::Special(path, "a device or socket"),
            other => Self::Other {
                path,
                cause: io::Error::from(other).kind().to_string(),
            },
        }
    }

    fn io(path: &Path, error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(errno) => Self::of(path, errno),
            None => Self::Other {
                path: shown(path),
                cause: error.kind().to_string(),
            },
        }
    }
}

/// A path as part of a message: its beginning, if it is very long.
fn shown(path: &Path) -> String {
    let text = path.to_string_lossy();
    let beginning = agentloop_support::text::first_chars(&text, 200);
    agentloop_support::text::with_ellipsis(beginning, &text)
}

/// The workspace, opened once.
#[derive(Debug)]
pub(crate) struct Workspace {
    root: OwnedFd,
    path: PathBuf,
}

impl Workspace {
    /// Opens the directory. Fails if the kernel, or a sandbox such as gVisor, does not support `openat2`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        let workspace = Self {
            root,
            path: path.to_owned(),
        };
        workspace.open_beneath(Path::new("."), DIRECTORY)?;
        Ok(workspace)
    }

    /// A path of an argument, relative to the workspace. Absolute paths are accepted below the workspace only.
    fn relative<'a>(&self, path: &'a str) -> Result<&'a Path, FileError> {
        if path.is_empty() || path.len() > MAX_PATH || path.contains('\0') {
            return Err(FileError::Invalid(shown(Path::new(path))));
        }
        let path = Path::new(path);
        if !path.is_absolute() {
            return Ok(path);
        }
        match path.strip_prefix(&self.path) {
            Ok(rest) if rest.as_os_str().is_empty() => Ok(Path::new(".")),
            // "/workspace//etc": the rest must not become absolute again.
            Ok(rest) if rest.is_relative() => Ok(rest),
            _ => Err(FileError::Outside(shown(path))),
        }
    }

    fn open_beneath(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let rules = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut result = Err(Errno::AGAIN);
        for _ in 0..MAX_TRIES {
            result = openat2(&self.root, path, flags, Mode::empty(), rules);
            // The kernel could not exclude that a rename during the lookup led out.
            if !matches!(result, Err(Errno::AGAIN | Errno::INTR)) {
                break;
            }
        }
        result
    }

    fn open_directory(&self, path: &Path) -> Result<OwnedFd, FileError> {
        self.open_beneath(path, DIRECTORY)
            .map_err(|errno| FileError::of(path, errno))
    }

    /// Makes a directory the current directory of this process.
    pub(crate) fn enter(&self, path: &str) -> Result<(), FileError> {
        let path = self.relative(path)?;
        let directory = self.open_directory(path)?;
        rustix::process::fchdir(&directory).map_err(|errno| FileError::of(path, errno))
    }

    /// Opens a regular file for reading. What it is, is checked before it is opened, because opening a device may have
    /// effects, and after it, because it may have been swapped.
    fn open_regular(&self, path: &Path) -> Result<(File, Stat), FileError> {
        let failed = |errno| FileError::of(path, errno);
        let probe = self
            .open_beneath(path, OFlags::PATH | OFlags::CLOEXEC)
            .map_err(failed)?;
        require_regular(path, &fstat(&probe).map_err(failed)?)?;
        let file = self.open_beneath(path, FILE).map_err(failed)?;
        let stat = fstat(&file).map_err(failed)?;
        require_regular(path, &stat)?;
        Ok((File::from(file), stat))
    }
}

fn require_regular(path: &Path, stat: &Stat) -> Result<(), FileError> {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok(()),
        FileType::Symlink => return Err(FileError::Link(shown(path))),
        FileType::Directory => "a directory",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "of an unknown kind",
    };
    Err(FileError::Special(shown(path), kind))
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or_default()
}

fn check_cancelled(cancelled: &CancellationToken) -> Result<(), FileError> {
    if cancelled.is_cancelled() {
        Err(FileError::Cancelled)
    } else {
        Ok(())
    }
}
