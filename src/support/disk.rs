//! SQLite files with a single writing process: locking, opening, and the classification of errors.
//!
//! Knows no tables. The owner of a file adds the fix to an error's message.

mod ballast;

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};

pub use ballast::{BALLAST_BYTES, BallastFile};
/// Network file systems whose locks and flushes SQLite warns about.
const NETWORK: [&str; 5] = ["nfs", "nfs4", "cifs", "smb3", "smbfs"];

/// What an error of SQLite means for its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatabaseFault {
    /// The volume is full.
    Full,
    /// The file is corrupted.
    Damaged,
    /// Another error: the volume does not work, or a statement is wrong.
    Other,
}

/// Ensures one writer per volume, across the containers of a node. Returns the lock, which is released when it is
/// dropped, or `None` while another process holds it.
pub fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = File::create(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Opens a file, waiting up to `wait` for another process that still holds it.
///
/// With exclusive locking SQLite keeps the index of the write-ahead log in memory: there is no second writer, and no
/// `-shm` file that a full volume could prevent. Temporary data, such as the undo log of a large statement, is kept in
/// memory too: SQLite would write it to a file under /tmp, and our containers have neither that directory nor a
/// writable root.
pub fn connect(file: &Path, wait: Duration) -> rusqlite::Result<Connection> {
    let connection = Connection::open(file)?;
    connection.busy_timeout(wait)?;
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    Ok(connection)
}

#[must_use]
pub fn classify_error(error: &rusqlite::Error) -> DatabaseFault {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => DatabaseFault::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => DatabaseFault::Damaged,
        _ => DatabaseFault::Other,
    }
}

/// Whether an error means that a volume or a quota is full.
#[must_use]
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// An error of the owner of a file, whose message says how to fix it.
pub trait DatabaseError: Sized {
    /// The volume is full.
    fn full(dir: PathBuf) -> Self;
    /// The file is corrupted; `detail` says how.
    fn corrupted(file: PathBuf, detail: String) -> Self;
    /// The volume cannot be used; `detail` is the error of the system.
    fn failed(dir: PathBuf, detail: String) -> Self;

    /// The error of an access to a directory.
    #[must_use]
    fn from_io(dir: &Path, error: &io::Error) -> Self {
        if is_full(error) {
            return Self::full(dir.into());
        }
        Self::failed(dir.into(), error.to_string())
    }

    /// The error of an access to a file with SQLite.
    #[must_use]
    fn from_sqlite(file: &Path, error: &rusqlite::Error) -> Self {
        let dir = file.parent().unwrap_or(file).to_path_buf();
        match classify_error(error) {
            DatabaseFault::Full => Self::full(dir),
            DatabaseFault::Damaged => Self::corrupted(file.into(), error.to_string()),
            DatabaseFault::Other => Self::failed(dir, error.to_string()),
        }
    }
}

/// The type of the network file system that contains a directory; `None` for a file system with reliable locks and
/// flushes.
#[must_use]
pub fn network_file_system(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    type_of(&mounts, &dir).filter(|kind| NETWORK.contains(&kind.as_str()))
}

/// The type of the file system that contains a directory, from the kernel's list of mounts: that of the longest
/// matching mount point, and of several at one point the last one.
fn type_of(mounts: &str, dir: &Path) -> Option<String> {
    let mounts = mounts.lines().filter_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let point = place.split(' ').nth(4)?.replace("\\040", " ");
        let kind = kind.split(' ').next()?;
        dir.starts_with(&point).then(|| (point.len(), kind.to_owned()))
    });
    mounts.max_by_key(|(length, _)| *length).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_one_processs_at_a_time_and_free_again_when_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = lock(&path).unwrap();
        assert!(held.is_some() && lock(&path).unwrap().is_none());
        drop(held);
        assert!(lock(&path).unwrap().is_some());
    }

    #[test]
    fn a_large_change_opens_no_file_beside_its_own_since_a_container_has_no_folder_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let connection = connect(&dir.path().join("file"), Duration::ZERO).unwrap();
        connection
            .execute_batch(
                "CREATE TABLE t (id INTEGER PRIMARY KEY, live INTEGER NOT NULL, text TEXT NOT NULL);
                 WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300)
                 INSERT INTO t SELECT i, 1, printf('%2000d', i) FROM n;
                 BEGIN IMMEDIATE;
                 UPDATE t SET live = 0 WHERE id IN (SELECT id FROM t WHERE live = 1 ORDER BY id LIMIT 200);",
            )
            .unwrap();
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        // The prefix of SQLite's temporary files.
        let temporary: Vec<_> = open.filter(|path| path.to_string_lossy().contains("etilqs_")).collect();
        assert!(temporary.is_empty(), "{temporary:?}");
        connection.execute_batch("COMMIT").unwrap();
    }

    #[test]
    fn the_file_system_of_a_directory_is_that_of_its_nearest_mount() {
        let mounts = "22 1 0:20 / / rw,relatime - overlay overlay rw\n\
                      36 22 98:0 /pv /var/lib/agentloop rw,noatime shared:1 master:2 - nfs4 server:/pv rw,vers=4.2\n\
                      37 36 98:1 / /var/lib/agentloop/my\\040disk rw - ext4 /dev/sdb rw\n";
        let type_of = |dir: &str| super::type_of(mounts, Path::new(dir)).unwrap();
        assert_eq!(type_of("/var/lib/agentloop/worker"), "nfs4");
        assert_eq!(type_of("/var/lib/agentloop/my disk/worker"), "ext4");
        assert_eq!(type_of("/var/lib/agentloops"), "overlay");
        assert!(NETWORK.contains(&"nfs4"));
        assert_eq!(network_file_system(&std::env::temp_dir()), None);
    }

    #[test]
    fn a_file_of_something_else_is_damaged_and_a_wrong_statement_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "x".repeat(5000)).unwrap();
        assert_eq!(
            classify_error(&connect(&path, Duration::ZERO).unwrap_err()),
            DatabaseFault::Damaged
        );
        let connection = connect(&dir.path().join("good"), Duration::ZERO).unwrap();
        assert_eq!(
            classify_error(&connection.execute("nonsense", []).unwrap_err()),
            DatabaseFault::Other
        );
        connection
            .execute_batch("PRAGMA max_page_count = 2; CREATE TABLE t (x)")
            .unwrap();
        let full = connection
            .execute("INSERT INTO t VALUES (zeroblob(100000))", [])
            .unwrap_err();
        assert_eq!(classify_error(&full), DatabaseFault::Full);
    }
}
