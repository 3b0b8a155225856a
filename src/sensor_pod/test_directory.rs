//! A directory for an outbox in tests.

use tempfile::TempDir;

pub(super) fn dir() -> TempDir {
    // In memory where the system has such a directory: there, syncing costs nothing.
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}
