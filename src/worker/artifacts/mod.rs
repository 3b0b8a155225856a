//! Artifacts: contents of tool results, stored as files beside the journal.
//!
//! Owns the directory, its bounds and what is removed when it is full. An artifact is plain data under a name that its
//! content decides; it is never executed or interpreted. Storing never fails a tool run: the result says that the content is
//! not stored. Decides nothing about what a prompt shows.
//!
//! Blocking: callers use a thread for blocking work. The lock of the journal ensures that no other process uses the directory.

mod name;
mod prompt;
mod read_tool;
mod space;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use self::space::{StoreLimits, StoredFile, VolumeSpace};
use crate::support::disk;

pub use self::name::{ArtifactName, TEXT};
pub use self::prompt::prompt_images;
pub use self::read_tool::{READ_TOOL, read_tool, run_read_tool};
pub use self::space::MAX_ARTIFACT_BYTES;

/// Its directory, beside the journal.
const DIRECTORY: &str = "artifacts";
/// An artifact that is being written. No artifact can have this name.
const UNFINISHED: &str = "unfinished";

/// Why a content is not stored, in words for the model.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    #[error("it is larger than 4 MiB")]
    TooLarge,
    /// The volume, or the Agent's share of it.
    #[error("the volume is full")]
    Full,
    #[error("the volume could not be written")]
    Failed,
    #[error("its data is not valid base64")]
    NotBase64,
    /// More would remove what other results have stored.
    #[error("only the first 16 of a result are")]
    TooMany,
}

/// The artifacts of an Agent.
pub struct ArtifactStore {
    dir: PathBuf,
    limits: StoreLimits,
    /// One content is written at a time.
    writing: Mutex<()>,
}

impl ArtifactStore {
    /// The artifacts beside the journal in this directory, whose lock must be held. Removes what a crash left unfinished, and
    /// artifacts beyond the bounds: the volume may have become full. Creates nothing.
    #[must_use]
    pub fn open(journal_dir: &Path) -> Self {
        Self::with_limits(journal_dir, StoreLimits::default())
    }

    fn with_limits(journal_dir: &Path, limits: StoreLimits) -> Self {
        let store = Self {
            dir: journal_dir.join(DIRECTORY),
            limits,
            writing: Mutex::new(()),
        };
        if store.dir.exists() {
            let _ = fs::remove_file(store.dir.join(UNFINISHED));
            if let Err(error) = store.trim() {
                tracing::warn!(error = %error, "cannot remove old artifacts");
            }
        }
        store
    }

    /// Stores a content, unless it is stored already. It survives a crash of the machine when this returns.
    pub fn store(&self, media_type: &str, content: &[u8]) -> Result<ArtifactName, NotStored> {
        if content.len() > self.limits.artifact_bytes {
            return Err(NotStored::TooLarge);
        }
        let name = ArtifactName::of(media_type, content);
        let _guard = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        match self.write(&name, content) {
            Ok(()) => Ok(name),
            Err(error) if disk::is_full(&error) => Err(NotStored::Full),
            Err(error) => {
                tracing::warn!(error = %error, "cannot store an artifact");
                Err(NotStored::Failed)
            }
        }
    }

    /// Reads an artifact. An error of the kind `NotFound`: it is not stored, or no longer.
    pub fn read(&self, name: &ArtifactName) -> io::Result<Vec<u8>> {
        fs::read(self.dir.join(name.as_str()))
    }

    fn write(&self, name: &ArtifactName, content: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let path = self.dir.join(name.as_str());
        let mut files = self.files()?;
        // The newest file is the one that was stored last, also if the clock was set back.
        let next = files.last().map(|file| file.modified + Duration::from_millis(1));
        let now = next.map_or_else(SystemTime::now, |next| next.max(SystemTime::now()));
        if fs::read(&path).is_ok_and(|known| known == content) {
            return File::options().append(true).open(&path)?.set_modified(now);
        }
        files.retain(|file| file.name != *name);
        let new = u64::try_from(content.len()).unwrap_or(u64::MAX);
        let surplus = space::surplus(&files, new, self.space()?, self.limits);
        let surplus = surplus.ok_or(io::ErrorKind::StorageFull)?;
        self.remove(&files[..surplus])?;
        let unfinished = self.dir.join(UNFINISHED);
        let written = write_file(&unfinished, content, now).and_then(|()| fs::rename(&unfinished, &path));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written?;
        // The new name is on disk as well.
        File::open(&self.dir)?.sync_all()
    }

    /// Removes artifacts beyond the bounds.
    fn trim(&self) -> io::Result<()> {
        let files = self.files()?;
        // Without room, all of them are removed: the journal needs it more.
        let surplus = space::surplus(&files, 0, self.space()?, self.limits);
        self.remove(&files[..surplus.unwrap_or(files.len())])
    }

    fn remove(&self, files: &[StoredFile]) -> io::Result<()> {
        files
            .iter()
            .try_for_each(|file| fs::remove_file(self.dir.join(file.name.as_str())))
    }

    /// The artifacts, oldest first.
    fn files(&self) -> io::Result<Vec<StoredFile>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().and_then(ArtifactName::parse) else {
                continue;
            };
            let known = entry.metadata()?;
            files.push(StoredFile {
                modified: known.modified()?,
                name,
                bytes: known.len(),
            });
        }
        files.sort();
        Ok(files)
    }

    fn space(&self) -> io::Result<VolumeSpace> {
        let volume = rustix::fs::statvfs(&self.dir)?;
        Ok(VolumeSpace {
            size: volume.f_blocks.saturating_mul(volume.f_frsize),
            free: volume.f_bavail.saturating_mul(volume.f_frsize),
        })
    }
}

fn write_file(path: &Path, content: &[u8], modified: SystemTime) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.set_modified(modified)?;
    file.sync_all()
}

#[cfg(test)]
mod tests;
