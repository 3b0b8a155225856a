//! `shell`: commands, one at a time, each with a supervisor that ends everything it started.

mod descendants;
mod launcher;
mod supervisor;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use agentloop_toolbox_protocol::test_report::TestReport;
use rustix::process::{Pid, WaitOptions, getpid, waitpid};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

pub use self::launcher::ProcessLimits;
use self::supervisor::{CommandOrder, CommandReport};
use crate::answer::ToolAnswer;
use crate::excerpt::Excerpt;
use crate::workspace::Workspace;

/// First argument of this binary as the supervisor of a command.
pub const SUPERVISE: &str = "toolbox-command";
/// First argument of this binary as the launcher of a program.
pub const LAUNCH: &str = "toolbox-launch";

/// Longest command in bytes.
pub(crate) const MAX_COMMAND: usize = 64 * 1024;
/// How long a supervisor has to kill a command.
const KILL_TIME: Duration = Duration::from_secs(10);
/// Interval at which processes that are being killed are counted.
const KILL_POLL: Duration = Duration::from_millis(10);
/// Longest report of a supervisor.
const MAX_REPORT: u64 = 16 * 1024;
const OUTPUT_BUFFER: usize = 16 * 1024;
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Variables that commands inherit.
const INHERITED: [&str; 8] = ["PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR"];

/// Arguments of `shell`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunCommand {
    command: String,
    #[serde(default = "here")]
    directory: String,
    #[serde(default)]
    timeout_seconds: Option<u64>,
    /// Path of a JUnit report that the command writes.
    #[serde(default)]
    junit: Option<String>,
}

fn here() -> String {
    ".".into()
}

/// How commands are run.
#[derive(Debug)]
pub(crate) struct ShellSettings {
    pub(crate) shell: PathBuf,
    pub(crate) root: PathBuf,
    pub(crate) timeout: Duration,
    /// Names of variables that commands inherit, beside the usual ones.
    pub(crate) variables: Vec<String>,
    pub(crate) limits: ProcessLimits,
}

/// Runs commands.
#[derive(Debug)]
pub(crate) struct Shell {
    settings: ShellSettings,
    environment: Vec<(String, OsString)>,
    /// Held by the command that runs. One at a time: commands share the workspace and the container's memory, and the
    /// process that has no parent left belongs to the one command that can have started it.
    turn: Mutex<()>,
    /// Cancelled if processes cannot be killed: then only the end of the container ends them.
    broken: CancellationToken,
}

/// Why a command is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KillReason {
    TimedOut,
    Cancelled,
}

/// How a command ended.
struct CommandEnd {
    report: Option<CommandReport>,
    output: Excerpt,
    killed: Option<KillReason>,
}

impl Shell {
    pub(crate) fn new(settings: ShellSettings, broken: CancellationToken) -> Self {
        let environment = environment(&settings);
        Self {
            settings,
            environment,
            turn: Mutex::new(()),
            broken,
        }
    }

    /// Runs a command. Its output is cut in the middle to `limit` bytes.
    pub(crate) async fn run(
        &self,
        wanted: &RunCommand,
        workspace: &Arc<Workspace>,
        limit: usize,
        cancelled: &CancellationToken,
    ) -> ToolAnswer {
        if wanted.command.trim().is_empty() || wanted.command.len() > MAX_COMMAND || wanted.command.contains('\0') {
            return ToolAnswer::error(format!(
                "command must have 1 to {MAX_COMMAND} bytes, and no zero byte; put a longer script into a file"
            ));
        }
        let longest = self.settings.timeout;
        let limit_time = wanted
            .timeout_seconds
            .map_or(longest, Duration::from_secs)
            .clamp(Duration::from_secs(1), longest);
        let _turn = tokio::select! {
            turn = self.turn.lock() => turn,
            () = cancelled.cancelled() => return ToolAnswer::error("the call was cancelled before it ran"),
        };
        // While no other command runs, which could write it too.
        let before = match wanted.junit.clone() {
            Some(path) => blocking(workspace, move |files| files.before_report(&path)).await,
            None => None,
        };
        let end = self.supervised(wanted, limit, limit_time, cancelled).await;
        // Those that ended meanwhile: the supervisor could have been taken for one of them.
        reap(&descendants::descendants(getpid()));
        let end = match end {
            Ok(end) => end,
            Err(error) => return ToolAnswer::error(format!("cannot start a process: {}", error.kind())),
        };
        let report = match before {
            Some(before) => blocking(workspace, move |files| files.read_report(&before)).await,
            None => None,
        };
        // A report that was asked for always has its line: otherwise one of the command's own output would be taken for it.
        let unread = || TestReport {
            problem: Some("the report could not be read".to_owned()),
            ..TestReport::default()
        };
        let report = report.or_else(|| wanted.junit.is_some().then(unread));
        end.into_answer(limit_time, report.as_ref())
    }

    async fn supervised(
        &self,
        wanted: &RunCommand,
        limit: usize,
        limit_time: Duration,
        cancelled: &CancellationToken,
    ) -> io::Result<CommandEnd> {
        let mut supervisor = self.start()?;
        let pipes = (supervisor.stdout.take(), supervisor.stderr.take());
        let (Some(report), Some(output)) = pipes else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        // Closing it kills the command.
        let mut control = Some(self.send_order(&mut supervisor, wanted).await?);
        let mut killed = None;
        let mut deadline = Instant::now() + limit_time;
        let mut collecting = std::pin::pin!(collect(output, limit));
        let mut reporting = std::pin::pin!(read_report(report));
        let mut collected = None;
        let report = loop {
            tokio::select! {
                output = &mut collecting, if collected.is_none() => {
                    collected = Some(output);
                    continue;
                }
                report = &mut reporting => break report,
                () = tokio::time::sleep_until(deadline) => {
                    if control.take().is_none() {
                        break None;
                    }
                    killed = Some(KillReason::TimedOut);
                }
                () = cancelled.cancelled(), if killed.is_none() => {
                    control = None;
                    killed = Some(KillReason::Cancelled);
                }
            }
            deadline = Instant::now() + KILL_TIME;
        };
        // Ended already, unless it is stuck.
        supervisor.kill().await?;
        if report.is_none() {
            self.sweep().await;
        }
        // The output ends with the last process that can write to it.
        let output = match collected {
            Some(output) => output,
            None => timeout(KILL_TIME, collecting).await.unwrap_or_else(|_| Excerpt::new(0)),
        };
        Ok(CommandEnd { report, output, killed })
    }

    fn start(&self) -> io::Result<Child> {
        Command::new("/proc/self/exe")
            .arg(SUPERVISE)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
    }

    async fn send_order(&self, supervisor: &mut Child, wanted: &RunCommand) -> io::Result<ChildStdin> {
        let mut control = supervisor.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut line = serde_json::to_vec(&self.order(wanted))?;
        line.push(b'\n');
        // A supervisor that is already gone is noticed by its missing report.
        let _ = timeout(KILL_TIME, control.write_all(&line)).await;
        Ok(control)
    }

    fn order(&self, wanted: &RunCommand) -> CommandOrder {
        CommandOrder {
            shell: self.settings.shell.clone(),
            command: wanted.command.clone(),
            root: self.settings.root.clone(),
            directory: wanted.directory.clone(),
            limits: self.settings.limits,
        }
    }

    /// Kills what a command left behind whose supervisor did not end properly, for example because the command killed it.
    async fn sweep(&self) {
        if !sweep_descendants(getpid()).await {
            tracing::error!("processes of a command cannot be killed; ending, so that the kernel ends them");
            self.broken.cancel();
        }
    }

    /// Reaps processes without a parent that end while no command runs.
    pub(crate) fn reap_orphans(&self) {
        if let Ok(_turn) = self.turn.try_lock() {
            reap(&descendants::descendants(getpid()));
        }
    }
}

/// Kills and reaps all processes below one, which must be this one to reap them. False: some are left.
pub(crate) async fn sweep_descendants(of: Pid) -> bool {
    let swept = timeout(KILL_TIME, async {
        loop {
            let left = descendants::kill_descendants(of);
            reap(&left);
            if left.is_empty() {
                break;
            }
            sleep(KILL_POLL).await;
        }
    });
    swept.await.is_ok()
}

/// Reaps the children among these processes that have ended.
fn reap(pids: &[Pid]) {
    for pid in pids {
        // Not a child, or still running: neither is an error.
        let _ = waitpid(Some(*pid), WaitOptions::NOHANG);
    }
}

/// A clean environment: the usual variables and the named ones.
fn environment(settings: &ShellSettings) -> Vec<(String, OsString)> {
    let names = INHERITED
        .into_iter()
        .chain(settings.variables.iter().map(String::as_str));
    let mut variables: Vec<_> = names
        .filter_map(|name| Some((name.to_owned(), std::env::var_os(name)?)))
        // A user without an entry in /etc/passwd has this home, which it cannot write to.
        .filter(|(name, value)| !(name == "HOME" && value == "/"))
        .collect();
    let mut default = |name: &str, value: OsString| {
        if !variables.iter().any(|(known, _)| known == name) {
            variables.push((name.to_owned(), value));
        }
    };
    default("PATH", DEFAULT_PATH.into());
    default("HOME", settings.root.clone().into());
    default("TERM", "dumb".into());
    variables
}

/// Work with files, which blocks. `None`: it has panicked.
async fn blocking<T: Send + 'static>(
    workspace: &Arc<Workspace>,
    work: impl FnOnce(&Workspace) -> T + Send + 'static,
) -> Option<T> {
    let workspace = Arc::clone(workspace);
    tokio::task::spawn_blocking(move || work(&workspace)).await.ok()
}

async fn collect(mut output: impl AsyncRead + Unpin, limit: usize) -> Excerpt {
    let mut excerpt = Excerpt::new(limit);
    let mut buffer = vec![0; OUTPUT_BUFFER];
    while let Ok(count @ 1..) = output.read(&mut buffer).await {
        excerpt.push(&buffer[..count]);
    }
    excerpt
}

async fn read_report(report: impl AsyncRead + Unpin) -> Option<CommandReport> {
    let mut json = Vec::new();
    report.take(MAX_REPORT).read_to_end(&mut json).await.ok()?;
    serde_json::from_slice(&json).ok()
}

impl CommandEnd {
    fn into_answer(self, limit: Duration, tests: Option<&TestReport>) -> ToolAnswer {
        let report = self.report.unwrap_or_default();
        if let Some(failure) = report.failure {
            return ToolAnswer::error(failure);
        }
        let status = match (self.killed, report.exit_code, report.signal) {
            (Some(KillReason::Cancelled), ..) => "cancelled, and killed".to_owned(),
            (Some(KillReason::TimedOut), ..) => format!("timed out after {} s, and killed", limit.as_secs()),
            (None, Some(code), _) => format!("exit code {code}"),
            (None, None, Some(signal)) => format!("killed by signal {}", signal_name(signal)),
            (None, None, None) => "killed together with the process that watched it".to_owned(),
        };
        let tests = tests.map_or_else(String::new, |tests| format!("\n{}", tests.line()));
        let output = self.output.into_text();
        let output = if output.is_empty() { "[no output]" } else { &output };
        ToolAnswer {
            is_error: self.killed.is_some() || (report.exit_code, report.signal) == (None, None),
            ..ToolAnswer::text(format!("{status}{tests}\n{output}")).wrote(report.disk_write_bytes)
        }
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        6 => "SIGABRT",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        24 => "SIGXCPU, the limit of CPU time",
        25 => "SIGXFSZ, the limit of a file's size",
        _ => return signal.to_string(),
    };
    format!("{signal} ({name})")
}

/// The role of this binary that supervises one command.
pub fn supervise() -> io::Result<()> {
    supervisor::supervise()
}

/// The role of this binary that becomes a program: limits as JSON, the program, and its arguments. Returns only if that
/// fails.
#[must_use]
pub fn launch(arguments: &[OsString]) -> io::Error {
    let (Some(limits), Some(program)) = (arguments.first(), arguments.get(1)) else {
        return io::ErrorKind::InvalidInput.into();
    };
    match serde_json::from_slice(limits.as_encoded_bytes()) {
        Ok(limits) => launcher::launch(&limits, program, &arguments[2..]),
        Err(error) => error.into(),
    }
}
