//! A workspace on disk with real file watchers. Virtual time does not pass while they scan. Each life has its own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use super::files;
use crate::worker::sensor_receiver::LoopSensors;
use crate::worker::sensor_receiver::file_watcher::{FileWatchers, WatchReport};

/// How long to wait before concluding that there is no change: one takes a second to settle, and scans run every five.
const QUIET: Duration = Duration::from_secs(8);

type Contents = BTreeMap<&'static str, (&'static str, Timestamp)>;

pub(super) struct Folder {
    dir: TempDir,
    lookouts: FileWatchers,
    written: Contents,
    /// Whether there may be a change to report.
    looks: bool,
    runtime: Runtime,
}

impl Folder {
    /// Creates the files, and watches them for these Sensors.
    pub(super) fn new(sensors: &LoopSensors, contents: &Contents) -> Self {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let dir = files::in_memory();
        fs::create_dir_all(dir.path().join("inbox/deep")).expect("a folder");
        let mut lookouts = FileWatchers::new(Some(dir.path().into()));
        let mut folder = {
            let _inside = runtime.enter();
            lookouts.set(sensors);
            Self {
                dir,
                lookouts,
                written: Contents::new(),
                looks: true,
                runtime,
            }
        };
        folder.put(contents);
        folder
    }

    /// Makes the directory equal to these files.
    pub(super) fn put(&mut self, contents: &Contents) {
        for path in self.written.keys().filter(|path| !contents.contains_key(*path)) {
            fs::remove_file(self.path(path)).expect("a file");
        }
        let new = contents
            .iter()
            .filter(|(path, what)| self.written.get(*path) != Some(what));
        for (path, (text, at)) in new {
            fs::write(self.path(path), text).expect("a file");
            let file = File::options().write(true).open(self.path(path)).expect("a file");
            file.set_modified((*at).into()).expect("a time of change");
        }
        self.written.clone_from(contents);
        self.look();
    }

    fn path(&self, path: &str) -> PathBuf {
        Path::join(self.dir.path(), path)
    }

    /// Notes that there may be a change.
    pub(super) fn look(&mut self) {
        self.looks = true;
    }

    /// Returns the next report. `None` if nothing has changed, or if the last change is not on disk yet.
    pub(super) fn sees(&mut self) -> Option<WatchReport> {
        if self.looks {
            let next = self.lookouts.next();
            let seen = self.runtime.block_on(async { timeout(QUIET, next).await });
            self.looks = seen.is_ok();
            return seen.ok();
        }
        None
    }
}
