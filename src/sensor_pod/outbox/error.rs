//! The errors of an outbox, each with its fix.

use std::path::{Path, PathBuf};

use crate::support::disk::DatabaseError;

#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    /// The volume is full.
    #[error(
        "the volume under {} is full, so no more events are accepted: expand its PersistentVolumeClaim \
         (outbox-<sensor>-sensor-0; the storage class must allow expansion), or recreate the Sensor with a larger \
         spec.storage.size; it resumes automatically once there is room",
        .dir.display()
    )]
    Full { dir: PathBuf },
    /// The file is not a valid outbox.
    #[error(
        "the outbox {} is corrupted ({detail}) and was left unchanged: move it away to start with an empty one",
        .file.display()
    )]
    Corrupted {
        file: PathBuf,
        /// What was found; never text of a payload.
        detail: String,
    },
    /// A newer version wrote the file.
    #[error("the outbox {} has version {found}, and this agentloop supports versions up to {known}: run the newer version", .file.display())]
    Newer { file: PathBuf, found: i64, known: i64 },
    /// The file belongs to another Sensor.
    #[error("the outbox {} belongs to the Sensor with uid {owner}: move it away to start with an empty one", .file.display())]
    Foreign { file: PathBuf, owner: String },
    /// The file system cannot be trusted with locks and flushes.
    #[error(
        "the volume under {} is a network file system ({kind}), which cannot exclude a second writer and may lose a \
         flush: make a storage class with block volumes the default one and recreate the Sensor, or recreate it with \
         spec.storage.ephemeral",
        .dir.display()
    )]
    OnNetwork {
        dir: PathBuf,
        /// Type of the file system.
        kind: String,
    },
    /// Another process has locked it.
    #[error("another sensor pod has locked the outbox under {}: this one exits", .dir.display())]
    Locked { dir: PathBuf },
    /// The volume does not work.
    #[error("the outbox under {} cannot be used ({detail}): check the volume and its permissions", .dir.display())]
    Failed {
        dir: PathBuf,
        /// The error of the system.
        detail: String,
    },
}

impl DatabaseError for OutboxError {
    fn full(dir: PathBuf) -> Self {
        Self::Full { dir }
    }

    fn corrupted(file: PathBuf, detail: String) -> Self {
        Self::Corrupted { file, detail }
    }

    fn failed(dir: PathBuf, detail: String) -> Self {
        Self::Failed { dir, detail }
    }
}

impl OutboxError {
    pub(super) fn from_database(file: &Path, error: &rusqlite::Error) -> Self {
        if let rusqlite::Error::FromSqlConversionFailure(..) = error {
            return Self::corrupted(file.into(), "an event cannot be parsed".into());
        }
        Self::from_sqlite(file, error)
    }
}
