//! `agentloop gateway`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;

use super::pod;
use crate::gateway::{self, GatewayOptions, ServerDirs};
use crate::link::messages::RUN_LEASE_SECONDS;
use crate::link::pod::{
    API_KEY_FILE, CONFIG_ENV, LIGHT_API_KEY_FILE, LIGHT_SCRIPT_FILE, LINK_CA_FILE, LINK_TOKEN_FILE, PodConfig,
    RECORD_DIR, SCRIPT_FILE, SERVER_CA_DIR, SOCKET_PATH, TOOL_HEADERS_DIR, TOOL_SOCKETS_DIR,
};
use crate::telemetry::agent_spans;
use crate::telemetry::log_export::ProcessLog;

/// Flags of `agentloop gateway`.
#[derive(ClapArgs, Debug)]
pub(super) struct GatewayArgs {
    /// Configuration of the pod, as JSON.
    #[arg(long, env = CONFIG_ENV, hide_env_values = true)]
    config: String,
    /// Socket to listen on.
    #[arg(long, env = "AGENTLOOP_SOCKET", default_value = SOCKET_PATH)]
    socket: PathBuf,
    /// Directory of the call store.
    #[arg(long, env = "AGENTLOOP_RECORD_DIR", default_value = RECORD_DIR)]
    record_dir: PathBuf,
    /// Mounted script of the model (api Scripted).
    #[arg(long, env = "AGENTLOOP_SCRIPT_FILE", default_value = SCRIPT_FILE)]
    script_file: PathBuf,
    /// Mounted API key of the provider; read for each call.
    #[arg(long, env = "AGENTLOOP_API_KEY_FILE", default_value = API_KEY_FILE)]
    api_key_file: PathBuf,
    /// Mounted script of the light model (api Scripted).
    #[arg(long, env = "AGENTLOOP_LIGHT_SCRIPT_FILE", default_value = LIGHT_SCRIPT_FILE)]
    light_script_file: PathBuf,
    /// Mounted API key of the light model's provider; read for each call.
    #[arg(long, env = "AGENTLOOP_LIGHT_API_KEY_FILE", default_value = LIGHT_API_KEY_FILE)]
    light_api_key_file: PathBuf,
    /// Directory of the mounted headers, one subdirectory per tool server; read for each request.
    #[arg(long, env = "AGENTLOOP_TOOL_HEADERS_DIR", default_value = TOOL_HEADERS_DIR)]
    tool_headers_dir: PathBuf,
    /// Directory of the sockets of tool servers in this pod, one subdirectory per server.
    #[arg(long, env = "AGENTLOOP_TOOL_SOCKETS_DIR", default_value = TOOL_SOCKETS_DIR)]
    tool_sockets_dir: PathBuf,
    /// Directory of the mounted certificates that are trusted for single servers, one subdirectory per server; read for
    /// each request.
    #[arg(long, env = "AGENTLOOP_SERVER_CA_DIR", default_value = SERVER_CA_DIR)]
    server_ca_dir: PathBuf,
    /// Projected token for the controller; read for each request.
    #[arg(long, env = "AGENTLOOP_LINK_TOKEN_FILE", default_value = LINK_TOKEN_FILE)]
    link_token_file: PathBuf,
    /// CA bundle of the controller; reloaded when it changes.
    #[arg(long, env = "AGENTLOOP_LINK_CA_FILE", default_value = LINK_CA_FILE)]
    link_ca_file: PathBuf,
}

impl GatewayArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let log = ProcessLog::init("gateway");
        let config: PodConfig = pod::configuration(&self.config, "a pod configuration")?;
        let options = GatewayOptions {
            config,
            socket: self.socket,
            record_dir: self.record_dir,
            script_file: self.script_file,
            api_key_file: self.api_key_file,
            light_script_file: self.light_script_file,
            light_api_key_file: self.light_api_key_file,
            server_dirs: ServerDirs {
                headers: self.tool_headers_dir,
                sockets: self.tool_sockets_dir,
                ca: self.server_ca_dir,
            },
            link_token_file: self.link_token_file,
            link_ca_file: self.link_ca_file,
            run_lease: Duration::from_secs(RUN_LEASE_SECONDS),
            traces: agent_spans::settings(),
            log,
        };
        pod::run(async move |end| Ok(Box::pin(gateway::run(options, end.cancelled_owned())).await?))
    }
}
