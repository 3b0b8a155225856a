//! The errors of the worker, as users read them.

use std::io;

use super::artifacts::NotStored;
use super::journal::{CopyError, ExportError, JournalError};

#[test]
fn the_errors_of_the_worker() {
    let mut rows = variants!(
        "The journal",
        [
            JournalError::Full { dir: "/state".into() },
            JournalError::Corrupted {
                file: "/state/journal.db".into(),
                detail: "row snapshot: invalid type".into(),
            },
            JournalError::Newer {
                file: "/state/journal.db".into(),
                found: 9,
                known: 5,
            },
            JournalError::NewerState {
                file: "/state/journal.db".into(),
                writer: "9.0.0".into(),
            },
            JournalError::OnNetwork {
                dir: "/state".into(),
                kind: "nfs".into(),
            },
            JournalError::Locked { dir: "/state".into() },
            JournalError::Fenced {
                owner: "7c5d".into(),
                found: 4,
                epoch: 3,
            },
            JournalError::Failed {
                dir: "/state".into(),
                detail: "permission denied".into(),
            },
        ]
    );
    rows.extend(variants!(
        "agentloop journal",
        [
            CopyError::Io(io::ErrorKind::PermissionDenied.into()),
            CopyError::NoJournal,
            CopyError::Changed,
        ]
    ));
    rows.extend(variants!(
        "agentloop history",
        [
            ExportError::Unreadable {
                file: "watcher.sqlite".into(),
                detail: "file is not a database".into(),
            },
            ExportError::OtherVersion {
                file: "watcher.sqlite".into(),
                found: 6,
                known: 7,
            },
            ExportError::Io(io::ErrorKind::BrokenPipe.into()),
        ]
    ));
    rows.extend(variants!(
        "Artifacts: [image image/png, 34,112 bytes: not stored, …]",
        [
            NotStored::TooLarge,
            NotStored::Full,
            NotStored::Failed,
            NotStored::NotBase64,
            NotStored::TooMany,
        ]
    ));
    assert_texts!("worker", "Errors of the worker", rows);
}
