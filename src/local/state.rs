//! The folders of a run: the state, which stays and is one run's at a time, and a private one that goes with the process.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use super::pods::random;
use super::volumes::make_folder;

/// Longest path of the private folder: sockets are a little deeper, and a socket's path has at most 107 bytes.
const LONGEST_PRIVATE: usize = 60;

/// The state of a run, locked.
pub struct State {
    /// Its folder.
    pub folder: PathBuf,
    /// Held as long as this lives.
    _lock: File,
}

impl State {
    /// Makes the folder when it is not there, and locks it.
    pub fn open(folder: &Path) -> Result<Self, String> {
        let problem =
            |error: &dyn std::fmt::Display| format!("the state in {} cannot be used: {error}", folder.display());
        make_folder(folder).map_err(|error| problem(&error))?;
        let folder = folder.canonicalize().map_err(|error| problem(&error))?;
        let lock = File::create(folder.join("lock")).map_err(|error| problem(&error))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { folder, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(problem(
                &"another run has it; end that, or name another folder with --state",
            )),
            Err(TryLockError::Error(error)) => Err(problem(&error)),
        }
    }
}

/// A folder that only this user may look into; removed with this value.
pub struct Private(PathBuf);

impl Private {
    /// Makes one, where the system keeps such things.
    pub fn make() -> Result<Self, String> {
        let candidates = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let candidates = candidates.into_iter().chain([std::env::temp_dir(), "/tmp".into()]);
        let name: String = random().map_err(|error| error.to_string())?.chars().take(12).collect();
        let mut last = "no place for a private folder".to_owned();
        for parent in candidates {
            let path = parent.join(format!("agentloop-{name}"));
            if path.as_os_str().len() > LONGEST_PRIVATE || !parent.is_dir() {
                continue;
            }
            match make_folder(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) => last = error.to_string(),
            }
        }
        Err(last)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
