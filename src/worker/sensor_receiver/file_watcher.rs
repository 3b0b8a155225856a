//! Watches files of the workspace for the Sensors of a loop, with one task per Sensor.
//!
//! Scans when inotify reports a change, and every few seconds in any case: shared volumes do not report changes that
//! other nodes make. Reports one change at a time, and the next one only when it is on disk. Keeps no state on disk.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until};

use super::LoopSensors;
use super::files::{self, WatchError};
use super::inotify::InotifyWatcher;
use crate::sensor_pipeline::watch::{ChangeDetector, FileChange, FileFingerprint, FileTask, WatchScope};

/// Longest time between two scans, if a scan is quick.
const SWEEP: Duration = Duration::from_secs(5);
/// A watcher scans at most one part in this many of the time: 1/50 while nothing happens, and never more than 1/10.
const SHARE: u32 = 50;
const SHARE_AT_MOST: u32 = 10;
/// Shortest time between two scans: debounces writers, which write more than once.
const GATHER: Duration = Duration::from_millis(100);
/// Age from which the results of a scan are too old to act on.
const FRESH: Duration = Duration::from_secs(1);

/// The watch of a Sensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchTerms {
    pub(super) scope: WatchScope,
    /// Maximum bytes of a file whose text is reported.
    pub(super) max_text: usize,
}

/// The watches by uid of their Sensor, each with the known fingerprints of its files.
pub(super) type WantedWatches<'a> = BTreeMap<&'a str, (&'a WatchTerms, BTreeMap<String, FileFingerprint>)>;

#[derive(Debug)]
pub struct WatchReport {
    /// Number of the watcher that sent it.
    lookout: u64,
    pub(super) sensor: String,
    pub(super) what: WatchUpdate,
}

#[derive(Debug)]
pub(super) enum WatchUpdate {
    /// A file has changed. The permit is dropped when the [`FileChange`] is on disk, or no longer of interest.
    Change(FileChange, WatchPermit),
    /// Why files cannot be read; `None` once they can.
    Problem(Option<String>),
}

/// Blocks further changes of the same Sensor until it is dropped.
#[derive(Debug, Default)]
#[allow(dead_code, reason = "it is held to be dropped")]
pub(super) struct WatchPermit(Option<OwnedSemaphorePermit>);

pub struct FileWatchers {
    workspace: Option<PathBuf>,
    known: BTreeMap<String, RunningWatcher>,
    /// Watchers started so far.
    count: u64,
    tasks: JoinSet<()>,
    seen: (mpsc::Sender<WatchReport>, mpsc::Receiver<WatchReport>),
}

struct RunningWatcher {
    watching: WatchTerms,
    number: u64,
    task: AbortHandle,
}

impl FileWatchers {
    /// Starts without watches. `workspace` is `None` if the Agent has none.
    #[must_use]
    pub fn new(workspace: Option<PathBuf>) -> Self {
        Self {
            workspace,
            known: BTreeMap::new(),
            count: 0,
            tasks: JoinSet::new(),
            seen: mpsc::channel(1),
        }
    }

    /// Starts and stops watchers so that exactly the watches of these Sensors run.
    pub fn set(&mut self, sensors: &LoopSensors) {
        while self.tasks.try_join_next().is_some() {}
        let wanted = sensors.watched();
        self.known.retain(|uid, known| {
            let stays = wanted
                .get(&**uid)
                .is_some_and(|(watching, _)| **watching == known.watching);
            if !stays {
                known.task.abort();
            }
            stays
        });
        for (uid, (watching, files)) in wanted {
            if !self.known.contains_key(uid) {
                self.start(uid, watching, files);
            }
        }
    }

    fn start(&mut self, sensor: &str, watching: &WatchTerms, files: BTreeMap<String, FileFingerprint>) {
        let Some(workspace) = &self.workspace else { return };
        self.count += 1;
        let lookout = FileWatcher {
            number: self.count,
            sensor: sensor.to_owned(),
            workspace: workspace.clone(),
            watching: watching.clone(),
            watcher: ChangeDetector::new(files),
            bell: InotifyWatcher::new(workspace),
            problem: None,
            has_reported: false,
            seen: self.seen.0.clone(),
            gate: Arc::new(Semaphore::new(1)),
            began: Instant::now(),
        };
        let known = RunningWatcher {
            watching: watching.clone(),
            number: self.count,
            task: self.tasks.spawn(lookout.run()),
        };
        self.known.insert(sensor.to_owned(), known);
    }

    pub async fn next(&mut self) -> WatchReport {
        while let Some(sighting) = self.seen.1.recv().await {
            let known = self.known.get(&sighting.sensor);
            // Ignore a late report of a watcher that was stopped: it is about another scope.
            if known.is_some_and(|known| known.number == sighting.lookout) {
                return sighting;
            }
        }
        // Unreachable: `self` holds a sender.
        std::future::pending().await
    }
}

/// The receiver of reports is gone.
struct ReportsClosed;

struct FileWatcher {
    number: u64,
    sensor: String,
    workspace: PathBuf,
    watching: WatchTerms,
    watcher: ChangeDetector,
    bell: InotifyWatcher,
    /// The last reported problem.
    problem: Option<WatchError>,
    has_reported: bool,
    seen: mpsc::Sender<WatchReport>,
    gate: Arc<Semaphore>,
    /// Origin of the watcher's clock.
    began: Instant,
}

struct ScanResult {
    /// Time needed to list all files.
    took: Duration,
    /// Whether changes were left for the next scan.
    more: bool,
}

impl FileWatcher {
    async fn run(mut self) {
        while let Ok(looked) = self.scan().await {
            self.wait(&looked).await;
        }
    }

    /// Waits until the next scan is due. The longer a scan takes, the rarer it is.
    async fn wait(&mut self, looked: &ScanResult) {
        sleep(GATHER.max(looked.took * SHARE_AT_MOST)).await;
        if looked.more {
            return;
        }
        let now = Instant::now();
        let sweep = now + SWEEP.max(looked.took * SHARE);
        let settles = self.watcher.settles_at(now - self.began, self.bell.open_files());
        let until = settles.map_or(sweep, |settles| sweep.min(self.began + settles));
        tokio::select! {
            () = sleep_until(until) => {}
            () = self.bell.wait_for_change() => {}
        }
    }

    async fn scan(&mut self) -> Result<ScanResult, ReportsClosed> {
        let began = Instant::now();
        let (workspace, scope) = (self.workspace.clone(), self.watching.scope.clone());
        let surveyed = blocking(move || files::survey(&workspace, &scope)).await;
        let mut looked = ScanResult {
            took: began.elapsed(),
            more: false,
        };
        let mut survey = match surveyed {
            Ok(survey) => survey,
            Err(problem) => {
                self.report_problem(Some(problem)).await?;
                return Ok(looked);
            }
        };
        self.bell.watch_directories(survey.directories);
        let mut problem = survey.problem;
        // Files in directories that were skipped count as unchanged, not as removed.
        for directory in &survey.passed {
            survey.files.extend(self.watcher.below(directory));
        }
        let now = began - self.began;
        for task in self.watcher.compare(now, &survey.files, self.bell.open_files()) {
            // The scan is too old after waiting for earlier changes: files may have changed since.
            if began.elapsed() > looked.took + FRESH {
                looked.more = true;
                break;
            }
            if let Err(why) = self.run_task(task).await? {
                problem = Some(why);
            }
        }
        // A partial scan cannot clear a problem: its cause may be among the files that were not visited.
        if problem.is_some() || !looked.more {
            self.report_problem(problem).await?;
        }
        Ok(looked)
    }

    async fn run_task(&mut self, task: FileTask) -> Result<Result<(), WatchError>, ReportsClosed> {
        let (path, print, text) = match task {
            FileTask::Forget(path) => (path, None, None),
            FileTask::Read(path, look) => {
                let (workspace, max) = (self.workspace.clone(), self.watching.max_text);
                let file = path.clone();
                match blocking(move || files::read(&workspace, &file, look, max)).await {
                    Ok(Some(content)) => (path, Some(content.print), content.text),
                    Ok(None) => return Ok(Ok(())),
                    Err(problem) => return Ok(Err(problem)),
                }
            }
        };
        let known = self.watcher.known(&path);
        let touched = (print.as_ref().zip(known)).is_some_and(|(print, known)| print.says_the_same_as(known));
        if !touched {
            let change = FileChange {
                path: path.clone(),
                print: print.clone(),
                was_there: known.is_some(),
                text,
            };
            let hold = self.gate.clone().acquire_owned().await.map_err(|_| ReportsClosed)?;
            self.send(WatchUpdate::Change(change, WatchPermit(Some(hold)))).await?;
            // The permit is returned when the change is on disk (or dropped): only then may the next one be sent.
            drop(self.gate.acquire().await.map_err(|_| ReportsClosed)?);
        }
        self.watcher.learn(&path, print);
        Ok(Ok(()))
    }

    /// Reports a change of the problem, each once.
    async fn report_problem(&mut self, problem: Option<WatchError>) -> Result<(), ReportsClosed> {
        if self.has_reported && self.problem == problem {
            return Ok(());
        }
        let words = problem.as_ref().map(ToString::to_string);
        (self.problem, self.has_reported) = (problem, true);
        self.send(WatchUpdate::Problem(words)).await
    }

    async fn send(&self, what: WatchUpdate) -> Result<(), ReportsClosed> {
        let sensor = self.sensor.clone();
        let sighting = WatchReport {
            lookout: self.number,
            sensor,
            what,
        };
        self.seen.send(sighting).await.map_err(|_| ReportsClosed)
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, WatchError> + Send + 'static,
) -> Result<T, WatchError> {
    spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(WatchError::Other(
            "the scan ended unexpectedly; this is a bug in agentloop, see the log of the worker".into(),
        ))
    })
}

#[cfg(test)]
impl WatchReport {
    pub(super) fn of(sensor: &str, what: WatchUpdate) -> Self {
        Self {
            lookout: 0,
            sensor: sensor.into(),
            what,
        }
    }
}
