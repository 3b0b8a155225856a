//! A file that only takes room: removed when the volume is full, so that what makes room can still be written.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Size of the file.
pub const BALLAST_BYTES: usize = 1024 * 1024;

/// The file.
pub struct BallastFile {
    path: PathBuf,
}

impl BallastFile {
    /// Makes the file, if it is not there in full. Fails when the volume has no room for it, and then leaves nothing
    /// behind.
    pub fn take(dir: &Path) -> io::Result<Self> {
        let path = dir.join("ballast");
        if path.metadata().is_ok_and(|found| found.len() == BALLAST_BYTES as u64) {
            return Ok(Self { path });
        }
        // Real bytes: a sparse file would hold no room.
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

    /// Gives the room back. True when there was any to give.
    #[must_use]
    pub fn release(&self) -> bool {
        std::fs::remove_file(&self.path).is_ok()
    }
}
