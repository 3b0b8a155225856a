//! `agentloop sensor`.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::pod;
use crate::link::pod::{
    CONFIG_ENV, LINK_CA_FILE, LINK_TOKEN_FILE, OUTBOX_DIR, SENSOR_CA_DIR, SENSOR_CERTIFICATE_DIR, SENSOR_HEADERS_DIR,
    SENSOR_HEALTH_SOCKET, SENSOR_KEY_FILE, SensorPodConfig, WEBHOOK_PORT,
};
use crate::sensor_pod::{self, SensorPodOptions};
use crate::telemetry::log_export::ProcessLog;

/// Flags of `agentloop sensor`.
#[derive(ClapArgs, Debug)]
pub(super) struct SensorArgs {
    /// Configuration of the pod, as JSON.
    #[arg(long, env = CONFIG_ENV, hide_env_values = true)]
    config: String,
    /// Directory of the outbox.
    #[arg(long, env = "AGENTLOOP_OUTBOX_DIR", default_value = OUTBOX_DIR)]
    outbox_dir: PathBuf,
    /// Directory of the source's mounted headers; read for each request.
    #[arg(long, env = "AGENTLOOP_SENSOR_HEADERS_DIR", default_value = SENSOR_HEADERS_DIR)]
    headers_dir: PathBuf,
    /// Directory of the mounted CA certificates that the source trusts; read for each connection.
    #[arg(long, env = "AGENTLOOP_SENSOR_CA_DIR", default_value = SENSOR_CA_DIR)]
    ca_dir: PathBuf,
    /// Directory of the source's mounted client certificate; read for each connection.
    #[arg(long, env = "AGENTLOOP_SENSOR_CERTIFICATE_DIR", default_value = SENSOR_CERTIFICATE_DIR)]
    certificate_dir: PathBuf,
    /// Mounted signing key of the webhook; read for each request.
    #[arg(long, env = "AGENTLOOP_SENSOR_KEY_FILE", default_value = SENSOR_KEY_FILE)]
    key_file: PathBuf,
    /// Listen address of the webhook.
    #[arg(long, env = "AGENTLOOP_WEBHOOK_ADDRESS", default_value_t = SocketAddr::from((Ipv6Addr::UNSPECIFIED, WEBHOOK_PORT)))]
    webhook_address: SocketAddr,
    /// Abstract socket of the probes, with a leading @.
    #[arg(long, env = "AGENTLOOP_SENSOR_HEALTH_SOCKET", default_value = SENSOR_HEALTH_SOCKET)]
    health_socket: String,
    /// Projected token for the controller; read for each request.
    #[arg(long, env = "AGENTLOOP_LINK_TOKEN_FILE", default_value = LINK_TOKEN_FILE)]
    link_token_file: PathBuf,
    /// CA bundle of the controller; reloaded when it changes.
    #[arg(long, env = "AGENTLOOP_LINK_CA_FILE", default_value = LINK_CA_FILE)]
    link_ca_file: PathBuf,
}

impl SensorArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let log = ProcessLog::init("sensor");
        let config: SensorPodConfig = pod::configuration(&self.config, "the configuration of a sensor pod")?;
        let options = SensorPodOptions {
            config,
            outbox_dir: self.outbox_dir,
            headers_dir: self.headers_dir,
            ca_dir: self.ca_dir,
            certificate_dir: self.certificate_dir,
            key_file: self.key_file,
            webhook_address: self.webhook_address,
            health_socket: self.health_socket.trim_start_matches('@').to_owned(),
            link_token_file: self.link_token_file,
            link_ca_file: self.link_ca_file,
            log,
        };
        pod::run(async move |end| Ok(Box::pin(sensor_pod::run(options, end.cancelled_owned())).await?))
    }
}
