//! `agentloop worker`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args as ClapArgs;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::link::pod::{
    CONFIG_ENV, DRAIN_SECONDS, INSTRUCTIONS_FILE, JOURNAL_DIR, PodConfig, SKILLS_DIR, SOCKET_PATH, WORKSPACE_DIR,
};
use crate::worker::startup::{self, Options};

/// Flags of `agentloop worker`.
#[derive(ClapArgs, Debug)]
pub(super) struct Args {
    /// Configuration of the pod, as JSON.
    #[arg(long, env = CONFIG_ENV, hide_env_values = true)]
    config: String,
    /// Uid of the pod.
    #[arg(long, env = "AGENTLOOP_POD_UID")]
    pod_uid: String,
    /// The gateway's socket.
    #[arg(long, env = "AGENTLOOP_SOCKET", default_value = SOCKET_PATH)]
    socket: PathBuf,
    /// Directory of the journal.
    #[arg(long, env = "AGENTLOOP_JOURNAL_DIR", default_value = JOURNAL_DIR)]
    journal_dir: PathBuf,
    /// The mounted instructions, read when the configuration has none inline.
    #[arg(long, env = "AGENTLOOP_INSTRUCTIONS_FILE", default_value = INSTRUCTIONS_FILE)]
    instructions_file: PathBuf,
    /// Directory of the mounted skills.
    #[arg(long, env = "AGENTLOOP_SKILLS_DIR", default_value = SKILLS_DIR)]
    skills_dir: PathBuf,
    /// The files of the Agent, where its spec says that it has some.
    #[arg(long, env = "AGENTLOOP_WORKSPACE_DIR", default_value = WORKSPACE_DIR)]
    workspace_dir: PathBuf,
    /// Seconds that a model call in flight may go on after SIGTERM.
    #[arg(long, env = "AGENTLOOP_DRAIN_SECONDS", default_value_t = DRAIN_SECONDS)]
    drain_seconds: u64,
}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        crate::telemetry::log::init();
        let config: PodConfig = serde_json::from_str(&self.config).map_err(|error| {
            anyhow::anyhow!(
                "{CONFIG_ENV} is not a pod configuration (line {}, column {})",
                error.line(),
                error.column()
            )
        })?;
        let options = Options {
            config,
            pod_uid: self.pod_uid,
            socket: self.socket,
            journal_dir: self.journal_dir,
            instructions_file: self.instructions_file,
            skills_dir: self.skills_dir,
            workspace_dir: self.workspace_dir,
            drain: Duration::from_secs(self.drain_seconds),
        };
        // One thread is enough for one loop, and small.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("the async runtime cannot start")?;
        runtime.block_on(async {
            let terminate = CancellationToken::new();
            end_on_signals(&terminate).context("signals cannot be handled")?;
            startup::run(options, terminate).await?;
            Ok(())
        })
    }
}

/// SIGTERM, and SIGINT at a terminal, ask for an end in order.
fn end_on_signals(terminate: &CancellationToken) -> std::io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let terminate = terminate.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
        terminate.cancel();
    });
    Ok(())
}
