//! Tools that run in containers of the Agent's pod: the built-in ones, and MCP servers that come as an image.

use k8s_openapi::api::core::v1::ResourceRequirements;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{self, DNS_SUBDOMAIN};
use super::tools::ToolRules;

/// Name under which the built-in tools are offered: the model calls `toolbox__shell`.
pub const TOOLBOX: &str = "toolbox";
/// Name of the built-in tool that runs commands.
pub const SHELL_TOOL: &str = "shell";
/// Path of the MCP endpoint of a container, unless its spec says otherwise.
pub const DEFAULT_MCP_PATH: &str = "/mcp";
/// A host, `*.` and a domain, or `*`; with an optional port.
const ALLOWED_HOST: &str = r"^(\*|(\*\.)?[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$";
/// Name of an environment variable.
const VARIABLE: &str = "^[A-Za-z_][A-Za-z0-9_]*$";
/// Longest text of a command, an argument or a variable.
const MAX_TEXT: u32 = 4096;

/// Built-in tools that are offered together.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltinTools {
    /// `shell`: commands in the image of the toolbox.
    Shell,
    /// `read_file`, `write_file`, `edit_file`, `list_directory` and `search_files`, in the workspace.
    Files,
    /// `http_request`: requests to the hosts of `toolbox.http.allowedHosts`.
    HTTP,
}

/// The container of the built-in tools.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.tools) || self.tools.all(t, t.name in ['shell', 'read_file', 'write_file', 'edit_file', 'list_directory', 'search_files', 'http_request'])").message(
    "spec.tools.toolbox.tools[].name must be shell, read_file, write_file, edit_file, list_directory, search_files or http_request"
))]
pub struct ToolboxSpec {
    /// Image with `/bin/sh` and the programs that commands need; `Shell` requires it. It runs as user 65534 with a
    /// read-only root filesystem. Absent: the image of the Agent's pod, which has no program besides the tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), regex(pattern = "^[!-~]+$"))]
    pub image: Option<String>,
    /// Settings of `HTTP`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpToolSettings>,
    /// Resources of the container. Defaults to requests of 10m CPU and 32Mi memory, and a limit of 1Gi memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::resources)]
    pub resources: Option<ResourceRequirements>,
    /// Rules for single tools. Without a rule, `shell`, `write_file`, `edit_file` and `http_request` count as
    /// `Destructive`, and the others as `Read`. A command of `shell` ends up to 10 seconds before its `timeoutSeconds`,
    /// so that its output is returned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub tools: Vec<ToolRules>,
}

/// Settings of the built-in tool `http_request`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HttpToolSettings {
    /// Hosts that requests may go to, 1 to 64: `example.com`, `*.example.com` for all below it, `example.com:8443`, or `*`
    /// for all hosts. Names are resolved, and the addresses must be allowed for Agents. Commands of `Shell` are not
    /// limited by it: only a NetworkPolicy limits those.
    #[schemars(length(min = 1, max = 64), extend("x-kubernetes-list-type" = "set", "items" = {
        "type": "string",
        "description": "A host.",
        "minLength": 1,
        "maxLength": 260,
        "pattern": ALLOWED_HOST,
    }))]
    pub allowed_hosts: Vec<String>,
}

/// An MCP server that runs as a container of the Agent's pod.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.port) || has(self.command) && size(self.command) > 0").message(
        "spec.tools.servers[].container.command is required for a server that uses standard input and output, because the image's \
         entry point is not known: set it, such as [npx, server], or set port for a server with streamable HTTP"
    ),
    validation = Rule::new("!has(self.path) || has(self.port)").message(
        "spec.tools.servers[].container.path has no effect without port: set port, or remove path"
    )
)]
pub struct ToolContainer {
    /// Image of the server. It runs as user 65534 with a read-only root filesystem, an empty `/tmp`, and `HOME=/tmp`.
    #[schemars(length(min = 1, max = 512), regex(pattern = "^[!-~]+$"))]
    pub image: String,
    /// Command, at most 64 words. Required for servers that use standard input and output. Defaults to the entry point of
    /// the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("items" = {"type": "string", "description": "A word.", "maxLength": MAX_TEXT}))]
    pub command: Vec<String>,
    /// Arguments of the command, at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("items" = {"type": "string", "description": "An argument.", "maxLength": MAX_TEXT}))]
    pub args: Vec<String>,
    /// Environment variables, at most 64. Put credentials into a Secret, and name it in `envFrom`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub env: Vec<EnvironmentVariable>,
    /// Secrets and ConfigMaps of the namespace, at most 8, whose keys become environment variables. Only this container
    /// receives them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub env_from: Vec<EnvironmentSource>,
    /// Port on which the server serves streamable HTTP; it must accept connections on 127.0.0.1. Every container of the pod
    /// can connect to it. Absent: the server uses standard input and output, and only the gateway can connect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<u16>,
    /// Path of the MCP endpoint on `port`. Defaults to `/mcp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256), regex(pattern = "^/[!\"$-~]*$"))]
    pub path: Option<String>,
    /// Resources of the container. Defaults to requests of 10m CPU and 32Mi memory, and a limit of 1Gi memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::resources)]
    pub resources: Option<ResourceRequirements>,
}

/// An environment variable with its value.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentVariable {
    /// Name of the variable.
    #[schemars(length(min = 1, max = 256), regex(pattern = VARIABLE))]
    pub name: String,
    /// Value.
    #[schemars(length(max = MAX_TEXT))]
    pub value: String,
}

/// A Secret or a ConfigMap whose keys become environment variables.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.secretRef) != has(self.configMapRef)").message(
    "spec.tools.servers[].container.envFrom[] must have either secretRef or configMapRef"
))]
pub struct EnvironmentSource {
    /// A Secret of the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<ObjectRef>,
    /// A ConfigMap of the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_ref: Option<ObjectRef>,
}

/// An object of the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
}
