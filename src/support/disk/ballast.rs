//! A file that reserves room on a volume. It is removed when the volume is full, so that work that frees room can be
//! written.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Size of the file in bytes.
pub const BALLAST_BYTES: usize = 1024 * 1024;

pub struct BallastFile {
    path: PathBuf,
}

impl BallastFile {
    /// Creates the file, unless it already has its full size. If the volume has no room for it, fails and leaves no
    /// file.
    pub fn take(dir: &Path) -> io::Result<Self> {
        let path = dir.join("ballast");
        if path.metadata().is_ok_and(|found| found.len() == BALLAST_BYTES as u64) {
            return Ok(Self { path });
        }
        // Real bytes: a sparse file would reserve no room.
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(&vec![0x5a; BALLAST_BYTES])?;
            file.sync_all()
        });
        if let Err(error) = written {
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        Ok(Self { path })
    }

    /// Removes the file. Returns whether this freed room.
    #[must_use]
    pub fn release(&self) -> bool {
        std::fs::remove_file(&self.path).is_ok()
    }
}
