//! Builds the containers of an Agent's tools: the toolbox, and MCP servers that come as an image. Pure.
//!
//! Each is a native sidecar with the user of tools, and shares one Unix socket with the gateway, unless it serves HTTP itself. None of them has the socket, the Secrets or the token of the gateway, nor the journal of the worker.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    ConfigMapEnvSource, Container, EnvFromSource, EnvVar, ResourceRequirements, SecretEnvSource, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::context::ReconcilerSettings;
use super::manifest::{BINARY, empty_volume, memory_volume, some};
use crate::api::AgentSpec;
use crate::api::toolbox::{BuiltinTools, EnvironmentSource, TOOLBOX, ToolContainer, ToolboxSpec};
use crate::api::tools::{ServerEndpoint, ToolServer, ToolsSpec};
use crate::controller::pod_mounts::mount;
use crate::controller::pod_security;
use crate::link::pod::{
    AgentEgress, PrivateAddresses, TOOL_SOCKET_FILE, TOOL_SOCKETS_DIR, TOOLS_UID, WORKSPACE_DIR, WORKSPACE_VOLUME,
};

/// Volume with the binary and the trusted roots, for containers with another image.
const INSTALL_VOLUME: &str = "agentloop-bin";
const INSTALL_DIR: &str = "/agentloop-bin";
/// The binary takes about 20 MiB.
const INSTALL_SIZE: &str = "128Mi";
const HOME: &str = "HOME";
const TMP_DIR: &str = "/tmp";
const TMP_SIZE: &str = "1Gi";
/// Maximum number of seconds by which a command of the shell ends before its call does, so that its output is returned.
const SHELL_MARGIN: u32 = 10;

/// The init containers after the gateway, in their order: the kubelet starts a sidecar when those before it have started.
pub(super) fn containers(spec: &AgentSpec, settings: &ReconcilerSettings) -> Vec<Container> {
    let tools = &spec.tools;
    let install = needs_binary(tools).then(|| install(settings));
    let toolbox = (!tools.builtin.is_empty()).then(|| toolbox(tools, settings));
    let servers = tools.servers.iter().filter_map(server);
    install.into_iter().chain(toolbox).chain(servers).collect()
}

pub(super) fn volumes(spec: &AgentSpec) -> Vec<Volume> {
    let tools = &spec.tools;
    let mut volumes = Vec::new();
    if needs_binary(tools) {
        volumes.push(disk_volume(INSTALL_VOLUME, INSTALL_SIZE));
    }
    volumes.extend(socket_servers(tools).map(|server| memory_volume(&socket_volume(&server))));
    if !tools.builtin.is_empty() && spec.workspace.is_none() {
        volumes.push(disk_volume(WORKSPACE_VOLUME, TMP_SIZE));
    }
    volumes.extend(in_pod(tools).map(|server| disk_volume(&tmp_volume(&server.name), TMP_SIZE)));
    volumes
}

/// The gateway's mounts: the socket of each container that has one.
pub(super) fn gateway_mounts(tools: &ToolsSpec) -> impl Iterator<Item = VolumeMount> {
    socket_servers(tools).map(|server| mount(&socket_volume(&server), &format!("{TOOL_SOCKETS_DIR}/{server}"), false))
}

fn in_pod(tools: &ToolsSpec) -> impl Iterator<Item = ToolServer> {
    let servers = tools.all_servers().into_iter();
    servers.filter(|server| !matches!(server.endpoint(), ServerEndpoint::Url(_)))
}

fn socket_servers(tools: &ToolsSpec) -> impl Iterator<Item = String> {
    let on_socket = |server: &ToolServer| matches!(server.endpoint(), ServerEndpoint::Toolbox | ServerEndpoint::Bridge);
    in_pod(tools).filter(on_socket).map(|server| server.name)
}

fn needs_binary(tools: &ToolsSpec) -> bool {
    socket_servers(tools).next().is_some()
}

fn socket_volume(server: &str) -> String {
    format!("mcp-{server}")
}

fn tmp_volume(server: &str) -> String {
    format!("tmp-{server}")
}

/// Copies the binary: the image has no `cp`.
fn install(settings: &ReconcilerSettings) -> Container {
    Container {
        name: "install".into(),
        image: Some(settings.image.clone()),
        image_pull_policy: settings.image_pull_policy.clone(),
        command: Some(vec![BINARY.into()]),
        args: Some(vec!["toolbox-install".into(), INSTALL_DIR.into()]),
        resources: Some(settings.gateway_resources.clone()),
        security_context: Some(pod_security::container(TOOLS_UID)),
        volume_mounts: Some(vec![mount(INSTALL_VOLUME, INSTALL_DIR, false)]),
        ..Container::default()
    }
}

fn toolbox(tools: &ToolsSpec, settings: &ReconcilerSettings) -> Container {
    let spec = tools.toolbox.clone().unwrap_or_default();
    let mut container = sidecar(TOOLBOX, TOOLBOX.into(), spec.resources.as_ref());
    // The first process of the container, never through a shell: the kernel ends what commands leave behind with it.
    container.command = Some(vec![installed_binary(), "toolbox".into()]);
    container.args = Some(toolbox_flags(tools, &spec, &settings.egress));
    container.image_pull_policy = spec
        .image
        .is_none()
        .then(|| settings.image_pull_policy.clone())
        .flatten();
    container.image = Some(spec.image.unwrap_or_else(|| settings.image.clone()));
    let roots = variable("SSL_CERT_FILE", &format!("{INSTALL_DIR}/ca-certificates.crt"));
    container.env = Some(vec![variable(HOME, TMP_DIR), roots]);
    let mounts = container.volume_mounts.get_or_insert_default();
    mounts.push(mount(INSTALL_VOLUME, INSTALL_DIR, true));
    mounts.push(mount(&socket_volume(TOOLBOX), TOOL_SOCKETS_DIR, false));
    mounts.push(mount(WORKSPACE_VOLUME, WORKSPACE_DIR, false));
    container
}

fn toolbox_flags(tools: &ToolsSpec, spec: &ToolboxSpec, egress: &AgentEgress) -> Vec<String> {
    let groups = tools.builtin.iter().map(|tools| match tools {
        BuiltinTools::Shell => "shell",
        BuiltinTools::Files => "files",
        BuiltinTools::HTTP => "http",
    });
    let timeout = tools.shell_timeout_seconds();
    let mut flags = vec![
        listen_flag(),
        format!("--root={WORKSPACE_DIR}"),
        format!("--tools={}", groups.collect::<Vec<_>>().join(",")),
        format!("--max-result-bytes={}", tools.max_result_bytes.max(1024)),
        format!("--shell-timeout-seconds={}", timeout - SHELL_MARGIN.min(timeout / 6)),
    ];
    let hosts = spec.http.iter().flat_map(|http| &http.allowed_hosts);
    flags.extend(hosts.map(|host| format!("--http-allowed-host={host}")));
    let ranges = |flag: &str, ranges: &[String]| {
        ranges
            .iter()
            .map(|range| format!("--{flag}={range}"))
            .collect::<Vec<_>>()
    };
    flags.extend(ranges("egress-allowed-cidr", &egress.allowed_ranges));
    flags.extend(ranges("egress-denied-cidr", &egress.denied_ranges));
    if egress.private_addresses == PrivateAddresses::Deny {
        flags.push("--egress-deny-private".into());
    }
    flags
}

/// The container of an MCP server; behind the bridge, if it uses standard input and output.
fn server(server: &ToolServer) -> Option<Container> {
    let spec = server.container.as_ref()?;
    let mut container = sidecar(&server.name, format!("mcp-{}", server.name), spec.resources.as_ref());
    container.image = Some(spec.image.clone());
    container.env = Some(environment(spec));
    container.env_from = some(spec.env_from.iter().map(env_from).collect());
    let command = spec.command.clone();
    if spec.port.is_some() {
        container.command = some(command);
        container.args = some(spec.args.clone());
        return Some(container);
    }
    container.command = Some(vec![installed_binary(), "mcp-bridge".into()]);
    let bridge = [listen_flag(), "--".into()].into_iter();
    container.args = Some(bridge.chain(command).chain(spec.args.clone()).collect());
    let mounts = container.volume_mounts.get_or_insert_default();
    mounts.push(mount(INSTALL_VOLUME, INSTALL_DIR, true));
    mounts.push(mount(&socket_volume(&server.name), TOOL_SOCKETS_DIR, false));
    Some(container)
}

/// Common fields: the `restricted` profile, and a `/tmp` that can be written.
fn sidecar(server: &str, name: String, resources: Option<&ResourceRequirements>) -> Container {
    Container {
        name,
        restart_policy: Some("Always".into()),
        security_context: Some(pod_security::container(TOOLS_UID)),
        resources: Some(resources.cloned().unwrap_or_else(default_resources)),
        volume_mounts: Some(vec![mount(&tmp_volume(server), TMP_DIR, false)]),
        ..Container::default()
    }
}

/// The variables of the spec, and those that it does not set.
fn environment(spec: &ToolContainer) -> Vec<EnvVar> {
    let home = spec
        .env
        .iter()
        .all(|one| one.name != HOME)
        .then(|| variable(HOME, TMP_DIR));
    let own = spec.env.iter().map(|one| variable(&one.name, &one.value));
    home.into_iter().chain(own).collect()
}

fn env_from(source: &EnvironmentSource) -> EnvFromSource {
    EnvFromSource {
        secret_ref: source.secret_ref.as_ref().map(|secret| SecretEnvSource {
            name: secret.name.clone(),
            ..SecretEnvSource::default()
        }),
        config_map_ref: source.config_map_ref.as_ref().map(|map| ConfigMapEnvSource {
            name: map.name.clone(),
            ..ConfigMapEnvSource::default()
        }),
        ..EnvFromSource::default()
    }
}

fn default_resources() -> ResourceRequirements {
    let amounts = |amounts: &[(&str, &str)]| {
        let amounts = amounts
            .iter()
            .map(|(name, amount)| ((*name).into(), Quantity((*amount).into())));
        Some(amounts.collect::<BTreeMap<_, _>>())
    };
    ResourceRequirements {
        requests: amounts(&[("cpu", "10m"), ("memory", "32Mi")]),
        limits: amounts(&[("memory", "1Gi")]),
        ..ResourceRequirements::default()
    }
}

fn installed_binary() -> String {
    format!("{INSTALL_DIR}{BINARY}")
}

fn listen_flag() -> String {
    format!("--listen=unix:{TOOL_SOCKETS_DIR}/{TOOL_SOCKET_FILE}")
}

fn variable(name: &str, value: &str) -> EnvVar {
    EnvVar {
        name: name.into(),
        value: Some(value.into()),
        ..EnvVar::default()
    }
}

fn disk_volume(name: &str, size: &str) -> Volume {
    empty_volume(name, None, size)
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;
    use crate::api::Agent;
    use crate::controller::agent::decide_tests::settings;
    use crate::controller::agent::manifest;

    /// The spec of the pod of an Agent with these tools.
    fn pod(tools: &Value) -> Value {
        pod_of(json!({ "tools": tools }))
    }

    fn pod_of(mut spec: Value) -> Value {
        spec["model"] = json!({"api": "OpenAIChat", "name": "m"});
        let agent: Agent = serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "coast", "namespace": "team-a", "uid": "u"},
            "spec": spec,
        }))
        .unwrap();
        serde_json::to_value(manifest::pod(&agent, 1, &settings()).spec.unwrap()).unwrap()
    }

    fn container<'a>(pod: &'a Value, name: &str) -> &'a Value {
        let all = pod["initContainers"].as_array().unwrap().iter();
        all.chain(pod["containers"].as_array().unwrap())
            .find(|container| container["name"] == name)
            .unwrap_or_else(|| panic!("no container {name}"))
    }

    /// The mounts of a container: volume, path, whether it is read-only.
    fn mounts(pod: &Value, name: &str) -> Vec<(String, String, bool)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let mounts = container(pod, name)["volumeMounts"].as_array().unwrap().iter();
        mounts
            .map(|mount| {
                (
                    text(&mount["name"]),
                    text(&mount["mountPath"]),
                    mount["readOnly"] == true,
                )
            })
            .collect()
    }

    fn names(list: &Value) -> Vec<&str> {
        list.as_array()
            .unwrap()
            .iter()
            .map(|one| one["name"].as_str().unwrap())
            .collect()
    }

    fn bridged() -> Value {
        json!({"name": "github", "container": {
            "image": "mcp/github:1", "command": ["npx"], "args": ["server", "--all"],
            "env": [{"name": "LOG", "value": "debug"}], "envFrom": [{"secretRef": {"name": "token"}}, {"configMapRef": {"name": "options"}}],
        }})
    }

    #[test]
    fn an_agent_without_such_tools_has_the_gateway_and_the_worker_only() {
        let pod = pod(&json!({"servers": [{"name": "a", "url": "http://a/mcp"}]}));
        assert_eq!(names(&pod["initContainers"]), ["gateway"]);
        assert_eq!(names(&pod["volumes"]), ["socket", "state", "link-token", "link-ca"]);
    }

    #[test]
    fn the_toolbox_is_the_first_process_of_its_container_and_has_the_workspace_and_its_socket_only() {
        let pod = pod(&json!({"builtin": ["Shell", "Files"], "toolbox": {"image": "debian:13"}}));
        assert_eq!(names(&pod["initContainers"]), ["gateway", "install", "toolbox"]);
        let toolbox = container(&pod, "toolbox");
        assert_eq!(toolbox["image"], "debian:13");
        assert_eq!(toolbox["restartPolicy"], "Always");
        assert_eq!(toolbox["command"], json!(["/agentloop-bin/agentloop", "toolbox"]));
        assert_eq!(
            toolbox["args"],
            json!([
                "--listen=unix:/run/agentloop-mcp/mcp.sock",
                "--root=/workspace",
                "--tools=shell,files",
                "--max-result-bytes=32768",
                "--shell-timeout-seconds=50"
            ])
        );
        assert_eq!(toolbox["securityContext"]["runAsUser"], 65534);
        assert_eq!(toolbox["securityContext"]["readOnlyRootFilesystem"], true);
        assert_eq!(toolbox["resources"]["limits"]["memory"], "1Gi");
        let own = |volume: &str, path: &str, read_only| (volume.to_owned(), path.to_owned(), read_only);
        assert_eq!(
            mounts(&pod, "toolbox"),
            [
                own("tmp-toolbox", "/tmp", false),
                own("agentloop-bin", "/agentloop-bin", true),
                own("mcp-toolbox", "/run/agentloop-mcp", false),
                own("workspace", "/workspace", false),
            ]
        );
        assert!(mounts(&pod, "gateway").contains(&own("mcp-toolbox", "/run/agentloop-mcp/toolbox", false)));
        let workers = mounts(&pod, "worker");
        assert!(
            !workers.iter().any(|(volume, ..)| volume.starts_with("mcp-")),
            "{workers:?}"
        );
        let workspace = pod["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .find(|volume| volume["name"] == "workspace");
        assert_eq!(workspace.unwrap()["emptyDir"]["sizeLimit"], "1Gi");
    }

    #[test]
    fn the_toolbox_has_the_workspace_of_the_agent_and_the_image_of_the_pod() {
        let tools = json!({"builtin": ["Files"], "toolbox": {"resources": {"limits": {"memory": "64Mi"}}}});
        let pod = pod_of(json!({"tools": tools, "workspace": {}}));
        let toolbox = container(&pod, "toolbox");
        assert_eq!(toolbox["image"], "agentloop");
        assert_eq!(toolbox["resources"], json!({"limits": {"memory": "64Mi"}}));
        let claims: Vec<&Value> = pod["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|volume| volume["name"] == "workspace")
            .collect();
        assert_eq!(claims.len(), 1);
        assert_eq!(claims[0]["persistentVolumeClaim"]["claimName"], "coast-workspace");
    }

    #[test]
    fn requests_of_the_toolbox_may_reach_what_the_platform_and_the_spec_allow() {
        let agent =
            json!({"builtin": ["HTTP"], "toolbox": {"http": {"allowedHosts": ["example.com", "*.example.com:8443"]}}});
        let tools: ToolsSpec = serde_json::from_value(agent).unwrap();
        let egress = AgentEgress {
            private_addresses: PrivateAddresses::Deny,
            allowed_ranges: vec!["10.1.0.0/16".into()],
            denied_ranges: vec!["192.0.2.0/24".into()],
        };
        let flags = toolbox_flags(&tools, tools.toolbox.as_ref().unwrap(), &egress);
        assert_eq!(
            flags[5..],
            [
                "--http-allowed-host=example.com",
                "--http-allowed-host=*.example.com:8443",
                "--egress-allowed-cidr=10.1.0.0/16",
                "--egress-denied-cidr=192.0.2.0/24",
                "--egress-deny-private"
            ]
        );
    }

    #[test]
    fn a_command_ends_before_its_call_so_that_its_output_is_returned() {
        for (timeout, command) in [(60, 50), (30, 25), (6, 5), (1, 1), (3600, 3590)] {
            let rules = json!([{"name": "shell", "timeoutSeconds": timeout}]);
            let pod = pod(&json!({"builtin": ["Shell"], "toolbox": {"image": "i", "tools": rules}}));
            let flag = format!("--shell-timeout-seconds={command}");
            let args = container(&pod, "toolbox")["args"].as_array().unwrap();
            assert!(args.contains(&json!(flag)), "{timeout}: {args:?}");
        }
    }

    #[test]
    fn a_server_with_standard_input_and_output_is_behind_the_bridge() {
        let pod = pod(&json!({"servers": [bridged()]}));
        assert_eq!(names(&pod["initContainers"]), ["gateway", "install", "mcp-github"]);
        let server = container(&pod, "mcp-github");
        assert_eq!(server["image"], "mcp/github:1");
        assert_eq!(server["command"], json!(["/agentloop-bin/agentloop", "mcp-bridge"]));
        assert_eq!(
            server["args"],
            json!([
                "--listen=unix:/run/agentloop-mcp/mcp.sock",
                "--",
                "npx",
                "server",
                "--all"
            ])
        );
        assert_eq!(
            server["env"],
            json!([{"name": "HOME", "value": "/tmp"}, {"name": "LOG", "value": "debug"}])
        );
        assert_eq!(
            server["envFrom"],
            json!([{"secretRef": {"name": "token"}}, {"configMapRef": {"name": "options"}}])
        );
        for name in ["gateway", "worker"] {
            assert_eq!(
                container(&pod, name)["envFrom"],
                Value::Null,
                "only the server has its credentials"
            );
        }
        assert!(
            !mounts(&pod, "mcp-github")
                .iter()
                .any(|(volume, ..)| volume == "workspace")
        );
    }

    #[test]
    fn a_server_with_a_port_runs_as_its_image_does() {
        let server = json!({"name": "web", "container": {
            "image": "mcp/web:1", "port": 8000, "env": [{"name": "HOME", "value": "/data"}],
        }});
        let pod = pod(&json!({"servers": [server]}));
        assert_eq!(
            names(&pod["initContainers"]),
            ["gateway", "mcp-web"],
            "nothing is installed"
        );
        let server = container(&pod, "mcp-web");
        assert_eq!([&server["command"], &server["args"]], [&Value::Null, &Value::Null]);
        assert_eq!(server["env"], json!([{"name": "HOME", "value": "/data"}]));
        assert!(!names(&pod["volumes"]).contains(&"mcp-web"));
    }

    #[test]
    fn the_names_of_volumes_of_servers_are_distinct() {
        let servers: Vec<Value> = ["a", "socket-a", "tmp-a", "mcp-a"]
            .iter()
            .map(|name| json!({"name": name, "container": {"image": "i", "command": ["x"]}}))
            .chain([json!({"name": "secret", "url": "http://a/mcp", "headersSecretRef": {"name": "s"}})])
            .collect();
        let pod = pod(&json!({"servers": servers}));
        let mut volumes = names(&pod["volumes"]);
        let count = volumes.len();
        volumes.sort_unstable();
        volumes.dedup();
        assert_eq!(volumes.len(), count);
    }
}
