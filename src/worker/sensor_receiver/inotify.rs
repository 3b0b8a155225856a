//! Notices file changes early through inotify. Scans find every change without it; it only makes them run sooner.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The events to watch. Opening and reading files are not among them: scans do that themselves.
const TOLD: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW);

pub(super) struct InotifyWatcher {
    workspace: PathBuf,
    /// `None` if the kernel's limit of inotify instances is reached.
    queue: Option<AsyncFd<OwnedFd>>,
    directories: BTreeMap<i32, String>,
    /// Files that are being written to.
    open: BTreeSet<String>,
}

impl InotifyWatcher {
    pub(super) fn new(workspace: &Path) -> Self {
        let queue = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).ok();
        Self {
            workspace: workspace.into(),
            queue: queue.and_then(registered),
            directories: BTreeMap::new(),
            open: BTreeSet::new(),
        }
    }

    /// Watches exactly these directories. A directory that cannot be watched is still scanned periodically.
    pub(super) fn watch_directories(&mut self, directories: Vec<String>) {
        let Some(queue) = &self.queue else { return };
        let before = std::mem::take(&mut self.directories);
        for directory in directories {
            // Adding a directory again returns the same watch descriptor.
            if let Ok(number) = inotify::add_watch(queue.get_ref(), self.workspace.join(&directory), TOLD) {
                self.directories.insert(number, directory);
            }
        }
        for number in before.keys().filter(|number| !self.directories.contains_key(*number)) {
            let _ = inotify::remove_watch(queue.get_ref(), *number);
        }
    }

    /// Returns the files that are being written to.
    pub(super) fn open_files(&self) -> &BTreeSet<String> {
        &self.open
    }

    pub(super) async fn wait_for_change(&mut self) {
        let Some(queue) = &self.queue else {
            return std::future::pending().await;
        };
        let Ok(mut ready) = queue.readable().await else {
            return std::future::pending().await;
        };
        ready.clear_ready();
        self.drain();
    }

    fn drain(&mut self) {
        let Some(queue) = &self.queue else { return };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(queue.get_ref(), &mut buffer);
        while let Ok(event) = reader.next() {
            let what = event.events();
            let name = event.file_name().and_then(|name| name.to_str().ok());
            let (Some(directory), Some(name)) = (self.directories.get(&event.wd()), name) else {
                continue;
            };
            let path = if directory.is_empty() {
                name.to_owned()
            } else {
                format!("{directory}/{name}")
            };
            if what.contains(ReadFlags::MODIFY) {
                self.open.insert(path);
            } else {
                self.open.remove(&path);
            }
        }
    }
}

#[allow(
    deprecated,
    reason = "its successor is unsafe to call, for types that exchange their descriptor: this one does not"
)]
fn registered(queue: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(queue, Interest::READABLE).ok()
}
