//! `agentloop worker`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;

use super::pod;
use crate::link::pod::{
    CONFIG_ENV, DRAIN_SECONDS, INSTRUCTIONS_FILE, JOURNAL_DIR, PodConfig, SKILLS_DIR, SOCKET_PATH, WORKSPACE_DIR,
};
use crate::telemetry::log_export::ProcessLog;
use crate::worker::startup::{self, WorkerOptions};

/// Lines of the log that wait at most, also until the gateway says whether it exports them.
const EARLY_LINES: usize = 1_024;

/// Flags of `agentloop worker`.
#[derive(ClapArgs, Debug)]
pub(super) struct WorkerArgs {
    /// Configuration of the pod, as JSON.
    #[arg(long, env = CONFIG_ENV, hide_env_values = true)]
    config: String,
    /// UID of the pod.
    #[arg(long, env = "AGENTLOOP_POD_UID")]
    pod_uid: String,
    /// Socket of the gateway.
    #[arg(long, env = "AGENTLOOP_SOCKET", default_value = SOCKET_PATH)]
    socket: PathBuf,
    /// Directory of the journal.
    #[arg(long, env = "AGENTLOOP_JOURNAL_DIR", default_value = JOURNAL_DIR)]
    journal_dir: PathBuf,
    /// Mounted instructions, used if the configuration contains none.
    #[arg(long, env = "AGENTLOOP_INSTRUCTIONS_FILE", default_value = INSTRUCTIONS_FILE)]
    instructions_file: PathBuf,
    /// Directory of the mounted skills.
    #[arg(long, env = "AGENTLOOP_SKILLS_DIR", default_value = SKILLS_DIR)]
    skills_dir: PathBuf,
    /// Directory of the Agent's workspace, if its spec has one.
    #[arg(long, env = "AGENTLOOP_WORKSPACE_DIR", default_value = WORKSPACE_DIR)]
    workspace_dir: PathBuf,
    /// Maximum time in seconds for which a model call in flight may continue after SIGTERM.
    #[arg(long, env = "AGENTLOOP_DRAIN_SECONDS", default_value_t = DRAIN_SECONDS)]
    drain_seconds: u64,
}

impl WorkerArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let log = ProcessLog::init_relayed("worker", EARLY_LINES);
        let config: PodConfig = pod::configuration(&self.config, "a pod configuration")?;
        let options = WorkerOptions {
            config,
            pod_uid: self.pod_uid,
            socket: self.socket,
            journal_dir: self.journal_dir,
            instructions_file: self.instructions_file,
            skills_dir: self.skills_dir,
            workspace_dir: self.workspace_dir,
            drain: Duration::from_secs(self.drain_seconds),
            log,
        };
        pod::run(async move |end| Ok(startup::run(options, end).await?))
    }
}
