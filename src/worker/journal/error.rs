//! Why a journal cannot be used, in words that say what a person can do.

use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

use crate::disk::{self, DatabaseFault};

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// No room on the volume.
    #[error(
        "the volume under {} is full, so the loop stopped: make it larger (spec.storage.size; the storage class must \
         allow expansion) or free room on it; the loop then goes on by itself",
        .dir.display()
    )]
    Full {
        /// Directory of the journal.
        dir: PathBuf,
    },
    /// The file is not what we wrote.
    #[error(
        "the journal {} is damaged ({detail}) and was left as it is: restore the file from a backup, or move it away \
         to start this Agent with an empty transcript",
        .file.display()
    )]
    Corrupted {
        /// The file.
        file: PathBuf,
        /// What was found; never text of a message.
        detail: String,
    },
    /// A newer version wrote it.
    #[error(
        "the journal {} has schema version {found} and this agentloop knows versions up to {known}: run the newer \
         agentloop again; a downgrade needs a backup from before the upgrade",
        .file.display()
    )]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// A newer version wrote the state, and it holds something that this one does not know.
    #[error(
        "the journal {} was last written by agentloop {writer} and this agentloop {} cannot read its state: run {writer} \
         again; nothing is lost and nothing was changed. A downgrade needs a backup from before the upgrade",
        .file.display(), env!("CARGO_PKG_VERSION")
    )]
    NewerState {
        /// The file.
        file: PathBuf,
        /// Version of the agentloop that wrote it.
        writer: String,
    },
    /// Locks and flushes of the volume cannot be trusted.
    #[error(
        "the volume under {} is a network file system ({kind}), on which two writers could not be told apart and a flush \
         may be lost: use a storage class of block volumes in spec.storage.storageClassName",
        .dir.display()
    )]
    OnNetwork {
        /// Directory of the journal.
        dir: PathBuf,
        /// The file system.
        kind: String,
    },
    /// Another process writes it.
    #[error("another worker has the journal under {} open: this one does nothing", .dir.display())]
    Locked {
        /// Directory of the journal.
        dir: PathBuf,
    },
    /// A newer pod has written it.
    #[error("pod {owner} with epoch {found} has taken over this loop; this pod has epoch {epoch} and does nothing")]
    Fenced {
        /// Uid of the newer pod.
        owner: String,
        /// Its epoch.
        found: i64,
        /// Ours.
        epoch: i64,
    },
    /// The volume does not work.
    #[error("the journal under {} cannot be used ({detail}): check the volume and its permissions", .dir.display())]
    Failed {
        /// Directory of the journal.
        dir: PathBuf,
        /// What the system said.
        detail: String,
    },
}

impl JournalError {
    /// The kind, as it shows in `status.lastError.kind`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Full { .. } => "JournalFull",
            Self::Corrupted { .. } => "JournalCorrupted",
            Self::Newer { .. } | Self::NewerState { .. } => "JournalNewer",
            Self::OnNetwork { .. } => "JournalOnNetwork",
            Self::Locked { .. } => "JournalLocked",
            Self::Fenced { .. } => "Fenced",
            Self::Failed { .. } => "JournalFailed",
        }
    }

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

/// Whether room on the volume may cure a failed write. A quota shows as an I/O error, not as a full disk.
pub(super) fn may_lack_room(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DiskFull | ErrorCode::SystemIoFailure)
    )
}
