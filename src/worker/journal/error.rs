//! Errors of the journal. Each message names what the user can do.

use std::path::PathBuf;

use rusqlite::ErrorCode;

use crate::support::disk::DatabaseError;

#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error(
        "the volume under {} is full, so the loop stopped: expand its PersistentVolumeClaim (<agent>-state; the \
         storage class must allow expansion) or free space on it; the loop then resumes automatically",
        .dir.display()
    )]
    Full { dir: PathBuf },
    /// The file is damaged, or was not written by agentloop.
    #[error(
        "the journal {} is corrupted ({detail}) and was left unchanged: restore the file from a backup, or move it away \
         to start this Agent with an empty transcript",
        .file.display()
    )]
    Corrupted {
        file: PathBuf,
        /// What is wrong; never includes text of a message.
        detail: String,
    },
    /// The tables were written by a newer version.
    #[error(
        "the journal {} has schema version {found} and this agentloop supports versions up to {known}: run the newer \
         agentloop again. A downgrade needs a backup from before the upgrade",
        .file.display()
    )]
    Newer {
        file: PathBuf,
        /// Schema version of the file.
        found: i64,
        /// Newest schema version that this agentloop knows.
        known: i64,
    },
    /// The state was written by a newer version and contains something that this version does not know.
    #[error(
        "the journal {} was last written by agentloop {writer}, and agentloop {} cannot read its state: run {writer} \
         again; nothing is lost and nothing was changed. A downgrade needs a backup from before the upgrade",
        .file.display(), env!("CARGO_PKG_VERSION")
    )]
    NewerState {
        file: PathBuf,
        /// Version of the agentloop that wrote it.
        writer: String,
    },
    /// The file system cannot be trusted with locks and flushes.
    #[error(
        "the volume under {} is a network file system ({kind}), which cannot exclude a second writer and may lose a \
         flush: recreate the Agent with a spec.storage.storageClassName that provides block volumes",
        .dir.display()
    )]
    OnNetwork {
        dir: PathBuf,
        /// Type of the file system.
        kind: String,
    },
    /// Another process has the journal open.
    #[error("another worker has locked the journal under {}; this worker exits", .dir.display())]
    Locked { dir: PathBuf },
    #[error("pod {owner} with epoch {found} has taken over this loop; this pod, with epoch {epoch}, stops")]
    Fenced {
        /// Uid of the newer pod.
        owner: String,
        found: i64,
        /// Epoch of this pod.
        epoch: i64,
    },
    /// The volume cannot be used.
    #[error("cannot use the journal under {} ({detail}): check the volume and its permissions", .dir.display())]
    Failed {
        dir: PathBuf,
        /// The error of the system.
        detail: String,
    },
}

impl JournalError {
    /// The kind, as shown in `status.lastError.kind`.
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
}

impl DatabaseError for JournalError {
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

/// Whether a failed write may succeed with more space. An exceeded quota is reported as an I/O error, not as a full
/// disk.
pub(super) fn may_lack_room(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DiskFull | ErrorCode::SystemIoFailure)
    )
}
