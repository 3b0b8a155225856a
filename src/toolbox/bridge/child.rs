//! The process of the server: started, started again when it ends, and ended with everything that it started.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use agentloop_support::backoff::Backoff;
use rustix::process::{Pid, Signal, getpid, kill_process_group};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::lines::{Line, LineReader};
use super::message::RpcMessage;
use super::{Bridge, RunningServer};
use crate::shell::{LAUNCH, sweep_descendants};

/// First and longest wait before the server is started again, and how long it must have run to count as healthy.
const RESTART: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// How long a server may take to end after its input has ended, and again after SIGTERM.
const END_TIME: Duration = Duration::from_secs(2);
/// Messages that wait to be written to the server.
const MAX_QUEUED: usize = 64;
/// What the server may log at once in bytes, and what is added per second. The log of a node has a limit, too.
const LOG_BURST: u64 = 64 * 1024;
const LOG_RATE: u64 = 8 * 1024;

/// Keeps the server running until `end`.
pub(super) async fn keep_running(bridge: &Bridge, command: &[OsString], end: &CancellationToken) {
    let mut backoff = Backoff::new(RESTART.0, RESTART.1);
    while !end.is_cancelled() {
        let began = Instant::now();
        match start(command) {
            Ok(child) => {
                let status = run(bridge, child, end).await;
                if !end.is_cancelled() {
                    tracing::warn!(status, "the MCP server ended; starting it again");
                }
            }
            Err(error) => tracing::error!(cause = %error.kind(), "the MCP server cannot be started; trying again"),
        }
        if began.elapsed() > RESTART.1 {
            backoff.reset();
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next_wait()) => {}
            () = end.cancelled() => {}
        }
    }
}

fn start(command: &[OsString]) -> io::Result<Child> {
    // The launcher makes the server end with this process.
    Command::new("/proc/self/exe")
        .args([LAUNCH, "{}"])
        .args(command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Runs one process of the server to its end. Returns its status for the log.
async fn run(bridge: &Bridge, mut child: Child, end: &CancellationToken) -> String {
    let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
        return "no pipes".into();
    };
    let (input, lines) = mpsc::channel(MAX_QUEUED);
    bridge.started(RunningServer { input });
    let logged = match stderr.into_owned_fd() {
        Ok(log) => log_in_background(log.into()),
        Err(error) => return error.kind().to_string(),
    };
    {
        let mut writing = std::pin::pin!(write(stdin, lines));
        tokio::select! {
            () = read(bridge, stdout) => {}
            () = &mut writing => {}
            _ = child.wait() => {}
            () = end.cancelled() => {}
        }
        // Its input ends here, which asks it to end.
    }
    bridge.ended();
    let status = stop(&mut child, end.is_cancelled()).await;
    // The end of its log is still in the pipe.
    let _ = timeout(END_TIME, logged).await;
    status
}

/// Ends the process and everything that it started.
async fn stop(child: &mut Child, gently: bool) -> String {
    let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let signal = |signal| {
        if let Some(group) = group {
            // It may have ended in the meantime.
            let _ = kill_process_group(group, signal);
        }
    };
    if gently && timeout(END_TIME, child.wait()).await.is_err() {
        signal(Signal::TERM);
        let _ = timeout(END_TIME, child.wait()).await;
    }
    signal(Signal::KILL);
    let status = child.wait().await;
    if !sweep_descendants(getpid()).await {
        tracing::error!("processes of the MCP server cannot be killed");
    }
    status.map_or_else(|error| error.kind().to_string(), |status| status.to_string())
}

async fn write(mut input: ChildStdin, mut lines: mpsc::Receiver<Vec<u8>>) {
    while let Some(line) = lines.recv().await {
        if input.write_all(&line).await.is_err() || input.flush().await.is_err() {
            return;
        }
    }
}

async fn read(bridge: &Bridge, output: ChildStdout) {
    let mut lines = LineReader::new(BufReader::new(output));
    while let Some(line) = lines.next().await {
        match line {
            Line::Whole(line) => match RpcMessage::parse(&line) {
                Some(message) => bridge.received(message),
                None if line.trim_ascii().is_empty() => {}
                None => tracing::debug!(
                    bytes = line.len(),
                    "the MCP server wrote something that is not a message"
                ),
            },
            Line::TooLong(number) => {
                tracing::warn!("the MCP server wrote a message that is too long");
                bridge.received_too_long(number);
            }
        }
    }
}

/// Copies the server's log in a thread of its own, which may block. The receiver ends with the log.
fn log_in_background(log: File) -> oneshot::Receiver<()> {
    let (ended, receiver) = oneshot::channel();
    let copy = move || {
        copy_log(log);
        // The caller may have given up.
        let _ = ended.send(());
    };
    if let Err(error) = thread::Builder::new().spawn(copy) {
        tracing::warn!(cause = %error.kind(), "the log of the MCP server is not copied");
    }
    receiver
}

/// Copies the server's log to the log of the container, up to a rate.
fn copy_log(mut log: File) {
    let mut output = io::stderr();
    let mut buffer = [0; 4096];
    let mut allowance = LogAllowance::new(Instant::now());
    while let Ok(count @ 1..) = log.read(&mut buffer) {
        let (kept, dropped) = allowance.take(count, Instant::now());
        if dropped > 0 {
            // A container without a log has no place for this either.
            let _ = write!(output, "\n[{dropped} bytes of the MCP server's log were left out]\n");
        }
        let _ = output.write_all(&buffer[..kept]);
    }
}

/// How much may still be logged.
struct LogAllowance {
    bytes: u64,
    since: Instant,
    dropped: u64,
}

impl LogAllowance {
    fn new(now: Instant) -> Self {
        Self {
            bytes: LOG_BURST,
            since: now,
            dropped: 0,
        }
    }

    /// How many of `count` bytes are kept, and how many were dropped before them, which is reported once.
    fn take(&mut self, count: usize, now: Instant) -> (usize, u64) {
        let seconds = now.duration_since(self.since).as_secs();
        self.since += Duration::from_secs(seconds);
        self.bytes = LOG_BURST.min(self.bytes.saturating_add(seconds.saturating_mul(LOG_RATE)));
        let kept = usize::try_from(self.bytes).unwrap_or(usize::MAX).min(count);
        self.bytes -= kept as u64;
        let said = if kept > 0 { std::mem::take(&mut self.dropped) } else { 0 };
        self.dropped += (count - kept) as u64;
        (kept, said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_copied_up_to_its_burst_and_then_at_its_rate() {
        let begun = Instant::now();
        let mut allowance = LogAllowance::new(begun);
        let burst = usize::try_from(LOG_BURST).unwrap();
        assert_eq!(allowance.take(burst, begun), (burst, 0));
        assert_eq!(allowance.take(1, begun), (0, 0));
        assert_eq!(allowance.take(10, begun + Duration::from_millis(999)), (0, 0));
        let rate = usize::try_from(LOG_RATE).unwrap();
        assert_eq!(allowance.take(rate + 5, begun + Duration::from_secs(1)), (rate, 11));
        assert_eq!(allowance.take(1, begun + Duration::from_secs(2)), (1, 5));
        assert_eq!(allowance.take(burst, begun + Duration::from_secs(1000)), (burst, 0));
    }
}
