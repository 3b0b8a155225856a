//! `list_directory`: the entries of a directory, or the sizes of named files.

use std::fmt::Write;
use std::path::Path;

use agentloop_toolbox_protocol::file_report::{FileFinding, FileReport, MAX_FILES};
use rustix::fs::{AtFlags, Dir, FileType, OFlags, fstat, statat};
use rustix::io::Errno;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::{FileError, Workspace, check_cancelled, require_regular, size};
use crate::answer::ToolAnswer;

/// Maximum number of entries that are listed.
pub(crate) const MAX_ENTRIES: usize = 1000;
/// Maximum number of entries that are read. Beyond it, the listed ones are not the first by name.
const MAX_READ: usize = 100_000;

/// Arguments of `list_directory`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListDirectory {
    #[serde(default)]
    path: Option<String>,
    /// Files instead of a directory.
    #[serde(default)]
    files: Option<Vec<String>>,
}

impl Workspace {
    /// Lists a directory, or says what is under each of the paths in `files`.
    pub(crate) fn list(&self, wanted: &ListDirectory, cancelled: &CancellationToken) -> Result<ToolAnswer, FileError> {
        match (&wanted.path, &wanted.files) {
            (Some(_), Some(_)) => Err(FileError::Refused("set either path or files".to_owned())),
            (None, Some(files)) => self.find(files, cancelled),
            (path, None) => self.list_entries(path.as_deref().unwrap_or("."), cancelled),
        }
    }

    /// What is under each of the paths, in their order. Opens none of the files, so that their permissions do not matter.
    fn find(&self, files: &[String], cancelled: &CancellationToken) -> Result<ToolAnswer, FileError> {
        if files.is_empty() || files.len() > MAX_FILES {
            return Err(FileError::Refused(format!("files must have 1 to {MAX_FILES} paths")));
        }
        let mut report = FileReport::default();
        for path in files {
            check_cancelled(cancelled)?;
            report.0.push(match self.size_of(path) {
                Ok(bytes) => FileFinding::Bytes(bytes),
                // No file can have an invalid path.
                Err(FileError::Absent(_) | FileError::NotADirectory(_) | FileError::Invalid(_)) => FileFinding::Absent,
                Err(FileError::Special(..) | FileError::Link(_)) => FileFinding::NotRegular,
                // An absolute link too, wherever it leads.
                Err(FileError::Outside(_)) => FileFinding::Outside,
                Err(FileError::Denied(_) | FileError::Refused(_) | FileError::Cancelled | FileError::Other { .. }) => {
                    FileFinding::Unreadable
                }
            });
        }
        Ok(ToolAnswer::text(report.line()))
    }

    fn size_of(&self, path: &str) -> Result<u64, FileError> {
        let path = self.relative(path)?;
        let found = self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC);
        let stat = found
            .and_then(|found| fstat(&found))
            .map_err(|errno| FileError::of(path, errno))?;
        require_regular(path, &stat)?;
        Ok(size(&stat))
    }

    /// Lists a directory, sorted by name: directories end in `/`, links in `@`, files have their size.
    fn list_entries(&self, path: &str, cancelled: &CancellationToken) -> Result<ToolAnswer, FileError> {
        let path = self.relative(path)?;
        let directory = self.open_directory(path)?;
        let failed = |errno: Errno| FileError::of(path, errno);
        let mut names = Vec::new();
        let mut is_cut = false;
        for entry in Dir::read_from(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if names.len() == MAX_READ {
                is_cut = true;
                break;
            }
            names.push(name.to_owned());
        }
        names.sort_unstable();
        let mut text = String::new();
        for name in names.iter().take(MAX_ENTRIES) {
            check_cancelled(cancelled)?;
            let stat = match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                // Removed in the meantime.
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(FileError::of(Path::new(&*name.to_string_lossy()), errno)),
            };
            let name = name.to_string_lossy();
            // Writing to a string cannot fail.
            let _ = match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => writeln!(text, "{name}/"),
                FileType::Symlink => writeln!(text, "{name}@"),
                FileType::RegularFile => writeln!(text, "{name} {}", size(&stat)),
                FileType::Fifo
                | FileType::Socket
                | FileType::CharacterDevice
                | FileType::BlockDevice
                | FileType::Unknown => writeln!(text, "{name} (special)"),
            };
        }
        if names.is_empty() {
            text.push_str("[the directory is empty]");
        } else if names.len() > MAX_ENTRIES {
            let more = if is_cut { "at least " } else { "" };
            let left_out = names.len() - MAX_ENTRIES;
            let _ = write!(text, "[{more}{left_out} more entries are left out]");
        }
        Ok(ToolAnswer::text(text))
    }
}
