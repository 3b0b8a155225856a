//! Reads the settings of a pod's containers from its manifest, with their paths mapped to directories of this machine.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::de::DeserializeOwned;

use super::pods::PodError;
use super::volumes::{PodVolumes, make_directory};
use crate::api::NamespacedName;
use crate::link::messages::RUN_LEASE_SECONDS;
use crate::link::pod::{
    API_KEY_FILE, CONFIG_ENV, INSTRUCTIONS_FILE, JOURNAL_DIR, LIGHT_API_KEY_FILE, LIGHT_SCRIPT_FILE, LINK_CA_FILE,
    LINK_TOKEN_FILE, OUTBOX_DIR, PodConfig, RECORD_DIR, SCRIPT_FILE, SENSOR_CA_DIR, SENSOR_CERTIFICATE_DIR,
    SENSOR_HEADERS_DIR, SENSOR_KEY_FILE, SENSOR_SERVICE_ACCOUNT, SERVER_CA_DIR, SKILLS_DIR, SOCKET_PATH,
    SensorPodConfig, TOOL_HEADERS_DIR, TOOL_SOCKETS_DIR, WORKSPACE_DIR,
};
use crate::link::server::PodKind;
use crate::telemetry::agent_spans;
use crate::telemetry::log_export::ProcessLog;
use crate::{gateway, sensor_pod};

/// Where the webhook of each Sensor listens.
pub type WebhookAddresses = BTreeMap<NamespacedName, SocketAddr>;

/// The settings that the roles of a pod are started with.
pub(super) enum PodRoles {
    /// Of an Agent's pod.
    Agent(Box<AgentRoles>),
    /// Of a Sensor's pod.
    Sensor(Box<sensor_pod::SensorPodOptions>),
}

/// The settings of both roles of an Agent's pod.
pub(super) struct AgentRoles {
    pub(super) gateway: gateway::GatewayOptions,
    pub(super) worker: WorkerOptionsTemplate,
}

/// [`WorkerOptions`](crate::worker::startup::WorkerOptions), which a worker consumes.
#[derive(Clone)]
pub(super) struct WorkerOptionsTemplate {
    pub(super) config: PodConfig,
    pub(super) pod_uid: String,
    pub(super) socket: PathBuf,
    pub(super) journal_dir: PathBuf,
    pub(super) instructions_file: PathBuf,
    pub(super) skills_dir: PathBuf,
    pub(super) workspace_dir: PathBuf,
}

/// The kind of a pod, by its service account, as in a cluster.
pub(super) fn kind(pod: &Pod) -> PodKind {
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
    if account == Some(SENSOR_SERVICE_ACCOUNT) {
        PodKind::Sensor
    } else {
        PodKind::Agent
    }
}

/// The settings of the pod's containers.
pub(super) fn roles(
    pod: &Pod,
    uid: &str,
    volumes: &PodVolumes,
    webhooks: &WebhookAddresses,
) -> Result<PodRoles, PodError> {
    match kind(pod) {
        PodKind::Agent => agent(pod, uid, volumes).map(|roles| PodRoles::Agent(Box::new(roles))),
        PodKind::Sensor => sensor(pod, volumes, webhooks).map(|options| PodRoles::Sensor(Box::new(options))),
    }
}

fn unreadable(what: &str) -> PodError {
    PodError::Unreadable(what.into())
}

fn agent(pod: &Pod, uid: &str, volumes: &PodVolumes) -> Result<AgentRoles, PodError> {
    let spec = pod.spec.as_ref().ok_or_else(|| unreadable("it has no spec"))?;
    let gateway = spec.init_containers.iter().flatten().next();
    let gateway = gateway.ok_or_else(|| unreadable("it has no gateway container"))?;
    let worker = spec
        .containers
        .first()
        .ok_or_else(|| unreadable("it has no worker container"))?;
    let in_gateway = |path: &str| volumes.resolve(gateway, path);
    let in_worker = |path: &str| volumes.resolve(worker, path);
    Ok(AgentRoles {
        gateway: gateway::GatewayOptions {
            config: config(gateway)?,
            socket: in_gateway(SOCKET_PATH),
            record_dir: in_gateway(RECORD_DIR),
            script_file: in_gateway(SCRIPT_FILE),
            api_key_file: in_gateway(API_KEY_FILE),
            light_script_file: in_gateway(LIGHT_SCRIPT_FILE),
            light_api_key_file: in_gateway(LIGHT_API_KEY_FILE),
            // No container of a tool runs here: an Agent that has some is refused before.
            server_dirs: gateway::ServerDirs {
                headers: tool_headers(gateway, volumes),
                sockets: TOOL_SOCKETS_DIR.into(),
                ca: in_gateway(SERVER_CA_DIR),
            },
            link_token_file: in_gateway(LINK_TOKEN_FILE),
            link_ca_file: in_gateway(LINK_CA_FILE),
            run_lease: Duration::from_secs(RUN_LEASE_SECONDS),
            traces: agent_spans::settings(),
            // The log of the process is that of all its Agents.
            log: ProcessLog::default(),
        },
        worker: WorkerOptionsTemplate {
            config: config(worker)?,
            pod_uid: uid.into(),
            socket: in_worker(SOCKET_PATH),
            journal_dir: in_worker(JOURNAL_DIR),
            instructions_file: in_worker(INSTRUCTIONS_FILE),
            skills_dir: in_worker(SKILLS_DIR),
            workspace_dir: in_worker(WORKSPACE_DIR),
        },
    })
}

fn sensor(
    pod: &Pod,
    volumes: &PodVolumes,
    webhooks: &WebhookAddresses,
) -> Result<sensor_pod::SensorPodOptions, PodError> {
    let spec = pod.spec.as_ref().ok_or_else(|| unreadable("it has no spec"))?;
    let container = spec
        .containers
        .first()
        .ok_or_else(|| unreadable("it has no container"))?;
    let config: SensorPodConfig = config(container)?;
    let whose = NamespacedName::new(&config.namespace, &config.terms.name);
    let file = |path: &str| volumes.resolve(container, path);
    Ok(sensor_pod::SensorPodOptions {
        // Nothing probes it here; the uid makes the name unique.
        health_socket: format!("agentloop-sensor-{}", config.terms.uid),
        // Only a webhook listens there, and each has its own port.
        webhook_address: webhooks
            .get(&whose)
            .copied()
            .unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
        config,
        outbox_dir: file(OUTBOX_DIR),
        headers_dir: file(SENSOR_HEADERS_DIR),
        ca_dir: file(SENSOR_CA_DIR),
        certificate_dir: file(SENSOR_CERTIFICATE_DIR),
        key_file: file(SENSOR_KEY_FILE),
        link_token_file: file(LINK_TOKEN_FILE),
        link_ca_file: file(LINK_CA_FILE),
        log: ProcessLog::default(),
    })
}

/// One directory with the headers of each server: in a pod, each is a separate volume.
fn tool_headers(gateway: &Container, volumes: &PodVolumes) -> PathBuf {
    let mounts = gateway.volume_mounts.iter().flatten();
    let mut servers = mounts.filter_map(|mount| {
        let server = mount.mount_path.strip_prefix(TOOL_HEADERS_DIR)?.strip_prefix('/')?;
        Some((server, volumes.directory(&mount.name)?))
    });
    let Some((server, directory)) = servers.next() else {
        return PathBuf::from("/nonexistent");
    };
    let parent = directory.parent().unwrap_or(directory).join("tools");
    for (server, directory) in std::iter::once((server, directory)).chain(servers) {
        let linked = make_directory(&parent).map(|()| std::os::unix::fs::symlink(directory, parent.join(server)));
        if !matches!(linked, Ok(Ok(()))) {
            tracing::error!(server, "failed to mount the headers of a tool server");
        }
    }
    parent
}

fn config<C: DeserializeOwned>(container: &Container) -> Result<C, PodError> {
    let variables = container.env.iter().flatten();
    let mut values = variables.filter(|variable| variable.name == CONFIG_ENV);
    let text = values
        .next()
        .and_then(|variable| variable.value.as_deref())
        .unwrap_or_default();
    // The parser's message may repeat a text of the spec.
    serde_json::from_str(text).map_err(|_| PodError::Unreadable(format!("{CONFIG_ENV} is not a valid configuration")))
}
