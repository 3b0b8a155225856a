//! The report that a command writes: whether it is of this run of the command, and what it says.

use std::fs::{File, Metadata};
use std::io::{BufReader, Read};
use std::os::unix::fs::MetadataExt;

use agentloop_toolbox_protocol::test_report::TestReport;
use rustix::time::{ClockId, clock_gettime};

use super::{FileError, Workspace, size};
use crate::junit::{self, MAX_REPORT_BYTES, ReportProblem};

const BUFFER: usize = 64 * 1024;

/// A file as it was at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileState {
    file: (u64, u64),
    bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<Metadata> for FileState {
    fn from(found: Metadata) -> Self {
        Self {
            file: (found.dev(), found.ino()),
            bytes: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }
}

/// What was there before a command began.
#[derive(Debug)]
pub(crate) struct ReportBefore {
    path: String,
    found: Option<FileState>,
    /// The moment, by the clock that file systems use.
    at: (i64, i64),
}

impl Workspace {
    /// Notes which report a command finds.
    pub(crate) fn before_report(&self, path: &str) -> ReportBefore {
        let found = self.report(path).ok().and_then(|(_, state)| state);
        let now = clock_gettime(ClockId::RealtimeCoarse);
        ReportBefore {
            path: path.to_owned(),
            found,
            at: (now.tv_sec, now.tv_nsec),
        }
    }

    /// Reads the report that a command has written.
    pub(crate) fn read_report(&self, before: &ReportBefore) -> TestReport {
        let read = || -> Result<TestReport, String> {
            let (file, state) = self.report(&before.path).map_err(|error| error.to_string())?;
            if state.is_none_or(|state| Some(state) == before.found || state.modified < before.at) {
                return Err("it was there before the command, which has not written it".to_owned());
            }
            let document = BufReader::with_capacity(BUFFER, file.take(MAX_REPORT_BYTES));
            junit::read(document).map_err(|problem| problem.to_string())
        };
        read().unwrap_or_else(|problem| TestReport {
            problem: Some(problem),
            ..TestReport::default()
        })
    }

    fn report(&self, path: &str) -> Result<(File, Option<FileState>), FileError> {
        let path = self.relative(path)?;
        let (file, stat) = self.open_regular(path)?;
        if size(&stat) > MAX_REPORT_BYTES {
            return Err(FileError::Refused(ReportProblem::TooLarge.to_string()));
        }
        let state = file.metadata().ok().map(FileState::from);
        Ok((file, state))
    }
}
