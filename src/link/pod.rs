//! What the controller passes to a pod in its manifest: paths, environment variables, and the loop's configuration.
//!
//! Written by the controller, read by worker and gateway. Names shared through the manifest are defined only here.

use serde::{Deserialize, Serialize};

use super::sensor_messages::SensorTerms;
use agentloop_api::AgentSpec;

/// Environment variable with [`PodConfig`] as JSON.
pub const CONFIG_ENV: &str = "AGENTLOOP_POD";
/// This program in its image.
pub const BINARY: &str = "/agentloop";
/// Name of the container that runs the loop.
pub const WORKER_CONTAINER: &str = "worker";
/// Directory of the socket, a memory volume of worker and gateway.
pub const SOCKET_DIR: &str = "/run/agentloop";
/// The gateway's socket.
pub const SOCKET_PATH: &str = "/run/agentloop/gateway.sock";
/// The worker's journal directory (sub-path `worker` of the state volume).
pub const JOURNAL_DIR: &str = "/var/lib/agentloop/worker";
/// The directory of the gateway's call store (sub-path `gateway` of the state volume).
pub const RECORD_DIR: &str = "/var/lib/agentloop/gateway";
/// Files of the Agent (worker, read-only).
pub const WORKSPACE_DIR: &str = "/workspace";
/// Name of the workspace volume in the manifest.
pub const WORKSPACE_VOLUME: &str = "workspace";
/// Mounted ConfigMap key of `instructionsFrom` (worker).
pub const INSTRUCTIONS_FILE: &str = "/etc/agentloop/instructions/text";
/// Mounted ConfigMap keys of `skills` (worker): a file per skill, under its name.
pub const SKILLS_DIR: &str = "/etc/agentloop/skills";
/// Mounted ConfigMap key of `model.scripted` (gateway).
pub const SCRIPT_FILE: &str = "/etc/agentloop/script/text";
/// Mounted Secret key of `model.apiKeySecretRef` (gateway).
pub const API_KEY_FILE: &str = "/etc/agentloop/key/value";
/// Mounted ConfigMap key of `lightModel.scripted` (gateway).
pub const LIGHT_SCRIPT_FILE: &str = "/etc/agentloop/light-script/text";
/// Mounted Secret key of `lightModel.apiKeySecretRef` (gateway).
pub const LIGHT_API_KEY_FILE: &str = "/etc/agentloop/light-key/value";
/// Mounted Secrets of `tools.servers[].headersSecretRef` (gateway): a directory per server, a file per header.
pub const TOOL_HEADERS_DIR: &str = "/etc/agentloop/tools";
/// Mounted keys of `tls.caSecretRef` of models, tool servers and the receiver of responses (gateway): a directory per
/// server.
pub const SERVER_CA_DIR: &str = "/etc/agentloop/server-ca";
/// Mounted Secret key with the authorities of the OTLP collector (gateway, sensor). It is not below [`SERVER_CA_DIR`], which
/// is the mount of another volume.
pub const OTLP_CA_FILE: &str = "/etc/agentloop/otlp-ca/ca.crt";
/// Directory of the tool servers' sockets. In the gateway it has a directory per server, each of them a memory volume; in the
/// container of a server, it is that volume.
pub const TOOL_SOCKETS_DIR: &str = "/run/agentloop-mcp";
/// Name of a tool server's socket.
pub const TOOL_SOCKET_FILE: &str = "mcp.sock";
/// Projected token of the link's audience (gateway).
pub const LINK_TOKEN_FILE: &str = "/var/run/secrets/agentloop/token";
/// CA bundle of the link (gateway).
pub const LINK_CA_FILE: &str = "/etc/agentloop/link/ca.crt";
/// Name of the per-namespace ConfigMap with the CA bundle, key `ca.crt`.
pub const LINK_CA_CONFIGMAP: &str = "agentloop-link-ca";
/// Name of the per-namespace service account of agent pods. It has no permissions.
pub const SERVICE_ACCOUNT: &str = "agentloop-agent";
/// Name of the per-namespace service account of sensor pods. It has no permissions.
pub const SENSOR_SERVICE_ACCOUNT: &str = "agentloop-sensor";
/// The outbox of a sensor pod.
pub const OUTBOX_DIR: &str = "/var/lib/agentloop/sensor";
/// Mounted Secret of a source's `headersSecretRef` (sensor): a file per header.
pub const SENSOR_HEADERS_DIR: &str = "/etc/agentloop/headers";
/// Mounted key of a source's `tls.caSecretRef` (sensor).
pub const SENSOR_CA_DIR: &str = "/etc/agentloop/tls/ca";
/// Mounted keys of a source's `tls.clientCertificateSecretRef` (sensor).
pub const SENSOR_CERTIFICATE_DIR: &str = "/etc/agentloop/tls/certificate";
/// Mounted Secret key of `source.webhook.secretKeyRef` (sensor).
pub const SENSOR_KEY_FILE: &str = "/etc/agentloop/key/value";
/// Port of a sensor pod's webhook.
pub const WEBHOOK_PORT: u16 = 8080;
/// The abstract socket on which a sensor pod answers probes, with the `@` that marks it as such.
pub const SENSOR_HEALTH_SOCKET: &str = "@agentloop-sensor";
/// Uid of the worker; also the group that owns the volumes.
pub const WORKER_UID: i64 = 65532;
/// Uid of the gateway.
pub const GATEWAY_UID: i64 = 65533;
/// Uid of the containers of tools.
pub const TOOLS_UID: i64 = 65534;
/// Maximum number of bytes of all texts of `skills` together.
pub const MAX_SKILL_BYTES: usize = 128 * 1024;
/// Seconds a worker has to finish or cancel its call after SIGTERM.
pub const DRAIN_SECONDS: u64 = 25;
/// `terminationGracePeriodSeconds` of the pod: the drain and 5 s more.
pub const GRACE_SECONDS: i64 = 30;

/// Configuration of one pod.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PodConfig {
    /// Namespace of the Agent.
    pub namespace: String,
    /// Name of the Agent.
    pub name: String,
    /// Uid of the Agent.
    pub uid: String,
    /// Fencing epoch of this pod.
    pub epoch: i64,
    /// Base URL of the link, `https://agentloop-link.<namespace>.svc:8443`.
    pub link_url: String,
    /// The spec without `pod`; for the gateway also without `instructions`.
    pub spec: AgentSpec,
    /// Where the gateway may connect to.
    #[serde(default)]
    pub egress: AgentEgress,
}

/// Where the gateways of Agents may connect to: model servers and tool servers.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentEgress {
    /// Whether private addresses are allowed.
    pub private_addresses: PrivateAddresses,
    /// Address ranges that are allowed although they are blocked by default.
    pub allowed_ranges: Vec<String>,
    /// Address ranges that are blocked in addition.
    pub denied_ranges: Vec<String>,
}

/// Whether Agents may connect to private addresses, which most pods and Services of a cluster have.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString, strum::Display)]
pub enum PrivateAddresses {
    /// Allowed, because many model and tool servers have private addresses.
    #[default]
    Allow,
    /// Blocked, except for the allowed ranges.
    Deny,
}

/// Configuration of one sensor pod.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SensorPodConfig {
    /// Namespace of the Sensor.
    pub namespace: String,
    /// Base URL of the link.
    pub link_url: String,
    /// The Sensor at the creation of the pod: with it the pod can start before it has reached the controller.
    pub terms: SensorTerms,
    /// Address ranges that are allowed although they are blocked by default.
    #[serde(default)]
    pub allowed_ranges: Vec<String>,
    /// Address ranges that are blocked in addition.
    #[serde(default)]
    pub denied_ranges: Vec<String>,
}
