//! The files of a journal as a killed process leaves them.

use std::path::Path;

use tempfile::TempDir;

const NAMES: [&str; 2] = ["journal.sqlite", "journal.sqlite-wal"];
/// Bytes that are compared at a time.
const PAGE: usize = 1024;
/// A file of this length is taken for the ballast.
const BALLAST_BYTES: u64 = 1024 * 1024;

/// A directory, in memory if the system has a memory file system: there, syncing costs nothing.
pub(super) fn in_memory() -> TempDir {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    dir.expect("a directory")
}

/// The database and its write-ahead log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Files([Vec<u8>; 2]);

impl Files {
    /// Reads the current files.
    pub(super) fn of(dir: &Path) -> Self {
        Self(NAMES.map(|name| std::fs::read(dir.join(name)).unwrap_or_default()))
    }

    /// Creates a volume with these files.
    pub(super) fn volume(&self) -> TempDir {
        let dir = in_memory();
        for (name, bytes) in NAMES.iter().zip(&self.0) {
            if !bytes.is_empty() {
                std::fs::write(dir.path().join(name), bytes).expect("a file");
            }
        }
        let ballast = std::fs::File::create(dir.path().join("ballast")).expect("a file");
        ballast.set_len(BALLAST_BYTES).expect("a file");
        dir
    }

    /// Returns what a process leaves that is killed while it changes these files into `later`, for each place of a cut
    /// in percent. SQLite appends to the log, and restarts it from the beginning after a checkpoint.
    pub(super) fn torn(&self, later: &Self, percent: usize) -> Self {
        let (before, after) = (&self.0[1], &later.0[1]);
        let page = |at: &usize| {
            let of = |bytes: &[u8]| bytes.get(*at..(*at + PAGE).min(bytes.len())).map(<[u8]>::to_vec);
            of(before) != of(after)
        };
        let changed: Vec<usize> = (0..after.len()).step_by(PAGE).filter(page).collect();
        let first = changed.first().map_or(after.len(), |at| {
            (*at..after.len())
                .find(|at| before.get(*at) != after.get(*at))
                .unwrap_or(*at)
        });
        // At least the last written byte is missing, and with it the commit.
        let last = changed.last().map_or(first, |at| {
            let page = *at..(*at + PAGE).min(after.len());
            page.rev().find(|at| before.get(*at) != after.get(*at)).unwrap_or(first)
        });
        let cut = first + (last - first) * percent / 100;
        let rest = before.get(cut..).unwrap_or_default();
        Self([self.0[0].clone(), [&after[..cut], rest].concat()])
    }
}
