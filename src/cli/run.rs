//! `agentloop run`.

use std::fs::File;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args as ClapArgs;
use jiff::tz::TimeZone;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

use crate::api::status::LoopOutcome;
use crate::controller::policy::PlatformPolicy;
use crate::local::events::{self, EventSinks};
use crate::local::manifest::SecretSource;
use crate::local::output::RunOutput;
use crate::local::run::{LocalRun, RunError, RunOptions};
use crate::page::agent_rows::{AgentRow, LoopActivity};
use crate::telemetry::log;

/// Minimum number of threads: journals wait for the disk on them.
const FEWEST_THREADS: usize = 4;
/// The differences from a cluster, for `--help`.
const DIFFERENCES: &str = "\
Runs the same objects, checks, engine, budgets and metering as in a cluster, without Kubernetes and without root. Differences:
there are no pods and no isolation between loops, so spec.pod and volume sizes have no effect. Secrets and ConfigMaps come
from the files (or --secret-from-env) and are read at the start; changes of files take effect with the next run. Sensors
can connect to loopback and private addresses, but not to link-local ones. Webhooks listen on 127.0.0.1 from --webhook-port
on, in the order of their names; the output shows the addresses.

The run ends when every loop has ended, is suspended, or is paused until a user changes something.
Ctrl-C (SIGINT) or SIGTERM drains within 10 seconds; a second one terminates at once. The same command resumes the run.

Exit codes: 0, the run ended; 2, invalid files or flags, nothing was started; 1, a loop ended with outcome Failed, or any
other error.";

/// Flags of `agentloop run`.
#[derive(ClapArgs, Debug)]
#[command(after_long_help = DIFFERENCES)]
pub(super) struct LocalRunArgs {
    /// File with Agents, AgentBudgets, Sensors, and the ConfigMaps and Secrets that they name; a directory of such
    /// files; or `-`.
    #[arg(short = 'f', long = "file", required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Directory of the state, from which the next run continues.
    #[arg(long, env = "AGENTLOOP_STATE_DIR", default_value = ".agentloop", value_name = "DIR")]
    state: PathBuf,
    /// Directory used as the workspace of every Agent with spec.workspace; defaults to volumes/<namespace>/<claim> in
    /// the state.
    #[arg(long, env = "AGENTLOOP_WORKSPACE", value_name = "DIR", value_parser = directory)]
    workspace: Option<PathBuf>,
    /// Maximum duration of the run, in seconds.
    #[arg(
        long, env = "AGENTLOOP_DURATION_SECONDS", value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=31_536_000)
    )]
    duration: Option<u64>,
    /// Print every record of every journal as a line of JSON: kinds and ids, never text of the model.
    #[arg(long)]
    events: bool,
    /// Read a key of a Secret from an environment variable, such as openai/api-key=OPENAI_API_KEY; may be repeated.
    #[arg(long, value_name = "SECRET/KEY=VARIABLE")]
    secret_from_env: Vec<SecretSource>,
    /// Port of the first Sensor with a webhook; further ones use the following ports.
    #[arg(long, env = "AGENTLOOP_WEBHOOK_PORT", default_value_t = crate::link::pod::WEBHOOK_PORT, value_name = "PORT")]
    webhook_port: u16,
    /// Serve a page with the loops, their state, usage and last turns at this address, and print its URL, which contains a
    /// random token; without a value on a free port of 127.0.0.1. Anyone who has the URL and can connect can read it.
    #[arg(
        long, env = "AGENTLOOP_PAGE_ADDRESS", value_name = "ADDRESS", num_args = 0..=1,
        default_missing_value = "127.0.0.1:0"
    )]
    page: Option<SocketAddr>,
    /// JSON file with the prices of models, as for the controller.
    #[arg(long, env = "AGENTLOOP_PRICES_FILE", value_name = "FILE")]
    prices_file: Option<PathBuf>,
}

impl LocalRunArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let policy = PlatformPolicy {
            prices: self
                .prices_file
                .as_deref()
                .map(super::controller::prices)
                .transpose()?
                .unwrap_or_default(),
            ..PlatformPolicy::default()
        };
        let prepared = LocalRun::prepare(RunOptions {
            files: self.files,
            secrets: self.secret_from_env,
            state: self.state,
            workspace: self.workspace,
            duration: self.duration.map(Duration::from_secs),
            webhook_port: self.webhook_port,
            page: self.page,
            policy,
        });
        let run = prepared.map_err(honest)?;
        let table = std::io::stdout().is_terminal() && !self.events;
        let sinks = EventSinks {
            print: self.events,
            recent: run.recent_events(),
        };
        start_log(run.state_directory(), table, sinks)?;
        let threads = std::thread::available_parallelism().map_or(FEWEST_THREADS, usize::from);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads.max(FEWEST_THREADS))
            .enable_all()
            .build()
            .context("cannot start the async runtime")?;
        let output = if table {
            RunOutput::table(TimeZone::system())
        } else {
            RunOutput::lines()
        };
        let ended = runtime.block_on(async {
            let interrupted = CancellationToken::new();
            end_on_signals(&interrupted, run.private_directory()).context("cannot install signal handlers")?;
            let mut out = std::io::stdout();
            Box::pin(run.run(output, &mut out, interrupted)).await.map_err(honest)
        });
        // What still hangs may not keep the process alive.
        runtime.shutdown_timeout(Duration::ZERO);
        let failed: Vec<String> = ended?.into_iter().filter_map(failure).collect();
        if !failed.is_empty() {
            bail!("{}", failed.join("\n"));
        }
        Ok(())
    }
}

/// An existing directory, as an absolute path.
fn directory(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text).canonicalize().map_err(|error| error.to_string())?;
    if path.is_dir() {
        Ok(path)
    } else {
        Err("it is not a directory".into())
    }
}

/// Why a run fails: an Agent that cannot run, or whose loop ended with outcome Failed or Escalated.
fn failure(row: AgentRow) -> Option<String> {
    let why = match (row.at_rest, row.outcome) {
        (LoopActivity::Refused, _) => row.message.unwrap_or_default(),
        (_, Some(outcome @ (LoopOutcome::Failed | LoopOutcome::Escalated))) => {
            format!("its loop ended with outcome {outcome}")
        }
        (
            _,
            Some(LoopOutcome::Completed | LoopOutcome::Idle | LoopOutcome::Cancelled | LoopOutcome::ScaledToZero)
            | None,
        ) => return None,
    };
    Some(format!("Agent {}: {why}", row.agent))
}

/// Invalid input keeps its type, which has its own exit code.
fn honest(error: RunError) -> anyhow::Error {
    match error {
        RunError::Mistakes(mistakes) => mistakes.into(),
        RunError::Other(message) => anyhow::Error::msg(message),
    }
}

/// Logs go to standard error, or to a file in the state if standard error is the terminal of the table.
fn start_log(state: &Path, table: bool, sinks: EventSinks) -> anyhow::Result<()> {
    let writer = if table && std::io::stderr().is_terminal() {
        let path = state.join("agentloop.log");
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        BoxMakeWriter::new(Arc::new(file))
    } else {
        BoxMakeWriter::new(std::io::stderr)
    };
    log::init_beside(events::layer(sinks), writer);
    Ok(())
}

/// The first signal requests a graceful shutdown; the second terminates at once.
fn end_on_signals(interrupted: &CancellationToken, private: PathBuf) -> std::io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let interrupted = interrupted.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
                _ = hangup.recv() => {}
            }
            if interrupted.is_cancelled() {
                let _ = std::fs::remove_dir_all(&private);
                std::process::exit(1);
            }
            interrupted.cancel();
        }
    });
    Ok(())
}
