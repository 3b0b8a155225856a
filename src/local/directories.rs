//! The directories of a run: the state, which persists and belongs to one run at a time, and a private one that is
//! removed with the process.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use super::pods::random;
use super::volumes::make_directory;

/// The longest path of the private directory: sockets are a little deeper, and a socket's path has at most 107 bytes.
const MAX_PRIVATE: usize = 60;

/// The state of a run, locked.
pub struct StateDirectory {
    pub directory: PathBuf,
    /// Held as long as this value lives.
    _lock: File,
}

impl StateDirectory {
    /// Creates the directory if it does not exist, and locks it.
    pub fn open(directory: &Path) -> Result<Self, String> {
        let problem =
            |error: &dyn std::fmt::Display| format!("cannot use the state in {}: {error}", directory.display());
        make_directory(directory).map_err(|error| problem(&error))?;
        let directory = directory.canonicalize().map_err(|error| problem(&error))?;
        let lock = File::create(directory.join("lock")).map_err(|error| problem(&error))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { directory, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(problem(
                &"it is in use by another run; end that run, or set another directory with --state",
            )),
            Err(TryLockError::Error(error)) => Err(problem(&error)),
        }
    }
}

/// Prefix of the private directory's name.
const PRIVATE: &str = "agentloop-";
/// File of the state with the path of the private directory: a run that was killed leaves it behind, with secrets in
/// it.
const PRIVATE_PATH: &str = "private";

/// A directory that only this user can access; removed with this value.
pub struct PrivateDirectory(PathBuf);

impl PrivateDirectory {
    /// Creates one in the system's place for such files, and removes that of an earlier run with this state.
    pub fn make(state: &Path) -> Result<Self, String> {
        let note = state.join(PRIVATE_PATH);
        if let Ok(earlier) = std::fs::read_to_string(&note) {
            let earlier = PathBuf::from(earlier);
            let name = earlier.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with(PRIVATE) {
                let _ = std::fs::remove_dir_all(&earlier);
            }
        }
        let candidates = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let candidates = candidates.into_iter().chain([std::env::temp_dir(), "/tmp".into()]);
        let name: String = random().map_err(|error| error.to_string())?.chars().take(12).collect();
        let mut last = "no directory for private files".to_owned();
        for parent in candidates {
            let path = parent.join(format!("{PRIVATE}{name}"));
            if path.as_os_str().len() > MAX_PRIVATE || !parent.is_dir() {
                continue;
            }
            let noted = std::fs::write(&note, path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string());
            match noted.and_then(|()| make_directory(&path).map_err(|error| error.to_string())) {
                Ok(()) => return Ok(Self(path)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
