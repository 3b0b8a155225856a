//! Why an outbox cannot be used, in words that say what a person can do.

use std::path::{Path, PathBuf};

use crate::disk::{self, DatabaseFault};

/// Why an outbox cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    /// No room on the volume.
    #[error(
        "the volume under {} is full, so nothing more is taken: make it larger by editing its PersistentVolumeClaim \
         (outbox-<sensor>-sensor-0; the storage class must allow expansion), or make the Sensor anew with a larger \
         spec.storage.size; it goes on by itself once there is room",
        .dir.display()
    )]
    Full {
        /// Directory of the outbox.
        dir: PathBuf,
    },
    /// The file is not what we wrote.
    #[error(
        "the outbox {} is damaged ({detail}) and was left as it is: move it away to start with an empty one",
        .file.display()
    )]
    Corrupted {
        /// The file.
        file: PathBuf,
        /// What was found; never text of a payload.
        detail: String,
    },
    /// A newer version wrote it.
    #[error("the outbox {} has version {found} and this agentloop knows versions up to {known}: run the newer one", .file.display())]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// Another Sensor's.
    #[error("the outbox {} is that of the Sensor with uid {owner}: move it away to start with an empty one", .file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
        /// Uid of its Sensor.
        owner: String,
    },
    /// Another process writes it.
    #[error("another sensor pod has the outbox under {} open: this one does nothing", .dir.display())]
    Locked {
        /// Directory of the outbox.
        dir: PathBuf,
    },
    /// The volume does not work.
    #[error("the outbox under {} cannot be used ({detail}): check the volume and its permissions", .dir.display())]
    Failed {
        /// Directory of the outbox.
        dir: PathBuf,
        /// What the system said.
        detail: String,
    },
}

impl OutboxError {
    pub(super) fn from_io(dir: &Path, error: &std::io::Error) -> Self {
        if disk::is_full(error) {
            return Self::Full { dir: dir.into() };
        }
        Self::Failed {
            dir: dir.into(),
            detail: error.to_string(),
        }
    }

    pub(super) fn from_sqlite(file: &Path, error: &rusqlite::Error) -> Self {
        let dir = file.parent().unwrap_or(file).to_path_buf();
        if let rusqlite::Error::FromSqlConversionFailure(..) = error {
            return Self::Corrupted {
                file: file.into(),
                detail: "an event cannot be read".into(),
            };
        }
        match disk::classify_error(error) {
            DatabaseFault::Full => Self::Full { dir },
            DatabaseFault::Damaged => Self::Corrupted {
                file: file.into(),
                detail: error.to_string(),
            },
            DatabaseFault::Other => Self::Failed {
                dir,
                detail: error.to_string(),
            },
        }
    }
}
