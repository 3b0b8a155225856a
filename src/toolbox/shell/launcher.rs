//! The last step before a program runs: limits and death signal are set, then this process becomes the program.
//!
//! A separate process, because setting them between fork and exec would need unsafe code.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit};
use serde::{Deserialize, Serialize};

/// Limits of each process of a command; absent: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessLimits {
    /// CPU time in seconds.
    pub cpu_seconds: Option<u64>,
    /// Size of a file in bytes.
    pub file_bytes: Option<u64>,
    /// Open files.
    pub open_files: Option<u64>,
    /// Address space in bytes.
    pub memory_bytes: Option<u64>,
    /// Processes of the user; counted on the whole node.
    pub processes: Option<u64>,
}

impl ProcessLimits {
    fn apply(&self) -> rustix::io::Result<()> {
        let limits = [
            (Resource::Fsize, self.file_bytes, 0),
            (Resource::Nofile, self.open_files, 0),
            (Resource::As, self.memory_bytes, 0),
            (Resource::Nproc, self.processes, 0),
            // A second after the signal that a program may handle, the kernel kills it.
            (Resource::Cpu, self.cpu_seconds, 1),
            // The memory of a crashed program is of no use in a container.
            (Resource::Core, Some(0), 0),
        ];
        for (resource, limit, extra) in limits {
            if let Some(limit) = limit {
                // Limits of the container that are lower stay.
                let hard_limit = getrlimit(resource).maximum.unwrap_or(u64::MAX);
                let (current, maximum) = (limit.min(hard_limit), limit.saturating_add(extra).min(hard_limit));
                let (current, maximum) = (Some(current), Some(maximum));
                setrlimit(resource, Rlimit { current, maximum })?;
            }
        }
        Ok(())
    }
}

/// Becomes the program, which ends with its parent. Returns only if that fails.
pub(super) fn launch(limits: &ProcessLimits, program: &OsString, arguments: &[OsString]) -> io::Error {
    let prepared = set_parent_process_death_signal(Some(Signal::KILL))
        .and_then(|()| rustix::thread::set_no_new_privs(true))
        .and_then(|()| limits.apply());
    match prepared {
        Ok(()) => Command::new(program).args(arguments).exec(),
        Err(errno) => errno.into(),
    }
}
