//! The parent of one command: starts it, and ends with everything that it started.
//!
//! A process of its own for each command, so that processes which leave the command's process group, or whose parents
//! end, become its children (it is their subreaper) and are found. It kills them all once the command ends, and also
//! when the toolbox closes its standard input: to cancel, or because the toolbox itself was killed.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process_group, set_child_subreaper,
    set_dumpable_behavior, setsid, wait,
};
use serde::{Deserialize, Serialize};

use super::LAUNCH;
use super::descendants::kill_descendants;
use super::launcher::ProcessLimits;
use crate::workspace::Workspace;

/// What the supervisor reads from its standard input, as a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CommandOrder {
    pub(super) shell: PathBuf,
    pub(super) command: String,
    pub(super) root: PathBuf,
    pub(super) directory: String,
    pub(super) limits: ProcessLimits,
}

/// What it writes to its standard output, once no process of the command is left.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CommandReport {
    pub(super) exit_code: Option<i32>,
    pub(super) signal: Option<i32>,
    /// Why the command did not start.
    pub(super) failure: Option<String>,
    pub(super) disk_write_bytes: u64,
}

/// Runs one command.
pub(super) fn supervise() -> io::Result<()> {
    // Opened before this process protects itself, after which it could not open it.
    let counters = File::open("/proc/self/io").ok();
    // The command has the same user: without this, it could read and change the memory of this process.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    set_child_subreaper(Some(getpid()))?;
    setsid()?;
    let mut line = String::new();
    let mut input = io::stdin().lock();
    input.read_line(&mut line)?;
    let order: CommandOrder = serde_json::from_str(&line)?;
    drop(input);
    let is_cancelled = Arc::new(AtomicBool::new(false));
    watch_input(Arc::clone(&is_cancelled))?;
    let mut report = match start(&order) {
        Ok(pid) => {
            if is_cancelled.load(Ordering::SeqCst) {
                kill(pid);
            }
            await_all(pid)?
        }
        Err(failure) => CommandReport {
            failure: Some(failure),
            ..CommandReport::default()
        },
    };
    report.disk_write_bytes = counters.map_or(0, |counters| written(&counters));
    let mut output = io::stdout().lock();
    serde_json::to_writer(&mut output, &report)?;
    output.flush()
}

/// Kills the command when the standard input ends.
fn watch_input(is_cancelled: Arc<AtomicBool>) -> io::Result<()> {
    let watch = move || {
        // Nothing is sent after the order; an error is an end, too.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        // In this order: a command that starts after the kill sees the flag.
        is_cancelled.store(true, Ordering::SeqCst);
        kill_descendants(getpid());
    };
    thread::Builder::new().spawn(watch).map(|_| ())
}

/// Starts the shell in a process group of its own.
fn start(order: &CommandOrder) -> Result<Pid, String> {
    let described = |error: io::Error| format!("cannot start the shell: {}", error.kind());
    let workspace = Workspace::open(&order.root).map_err(described)?;
    workspace.enter(&order.directory).map_err(|error| error.to_string())?;
    let limits = serde_json::to_string(&order.limits).map_err(|error| described(error.into()))?;
    // One pipe for both, so that lines keep their order.
    let output = || io::stderr().as_fd().try_clone_to_owned().map(Stdio::from);
    let mut command = Command::new("/proc/self/exe");
    command
        .args([LAUNCH, &limits])
        .arg(&order.shell)
        .args(["-c", &order.command])
        .stdin(Stdio::null())
        .stdout(output().map_err(described)?)
        .stderr(output().map_err(described)?);
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let child = command.spawn().map_err(described)?;
    Ok(Pid::from_child(&child))
}

fn kill(command: Pid) {
    // The whole group at once, which a program that forks all the time cannot outrun; then those that left it.
    let _ = kill_process_group(command, Signal::KILL);
    kill_descendants(getpid());
}

/// Waits for the command, then kills and reaps everything that it left behind.
fn await_all(command: Pid) -> io::Result<CommandReport> {
    let mut report = None;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == command => report = Some(reported(status)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Ok(report.unwrap_or_default()),
            Err(errno) => return Err(errno.into()),
        }
        if report.is_some() {
            kill(command);
        }
    }
}

fn reported(status: WaitStatus) -> CommandReport {
    CommandReport {
        exit_code: status.exit_status(),
        signal: status.terminating_signal(),
        ..CommandReport::default()
    }
}

/// The bytes written by this process and by those that it reaped.
fn written(counters: &File) -> u64 {
    let mut text = [0; 1024];
    let read = counters.read_at(&mut text, 0).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[..read]);
    let value = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    value.and_then(|value| value.parse().ok()).unwrap_or_default()
}
