//! `list_directory`: the entries of a folder.

use std::fmt::Write;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, statat};
use rustix::io::Errno;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::{FileError, Workspace, check_cancelled, size};
use crate::answer::ToolAnswer;

/// Most entries that are listed.
pub(crate) const MAX_ENTRIES: usize = 1000;
/// Most entries that are read. Beyond it, the listed ones are not the first by name.
const MAX_READ: usize = 100_000;

/// Arguments of `list_directory`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListDirectory {
    #[serde(default = "here")]
    path: String,
}

fn here() -> String {
    ".".into()
}

impl Workspace {
    /// Lists a folder, sorted by name: directories end in `/`, links in `@`, files have their size.
    pub(crate) fn list(&self, wanted: &ListDirectory, cancelled: &CancellationToken) -> Result<ToolAnswer, FileError> {
        let path = self.relative(&wanted.path)?;
        let folder = self.open_folder(path)?;
        let failed = |errno: Errno| FileError::of(path, errno);
        let mut names = Vec::new();
        let mut is_cut = false;
        for entry in Dir::read_from(&folder).map_err(failed)? {
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
            let stat = match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
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
