//! A tool of an MCP server that a Sensor polls.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::bounds::free_object;
use super::endpoint::TlsSpec;
use super::tools::{SecretRef, TOOL};

/// A tool of an MCP server and its arguments.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PolledTool {
    /// The MCP server.
    pub server: PolledServer,
    /// Name of the tool on its server.
    #[schemars(length(min = 1, max = 128), regex(pattern = TOOL))]
    pub name: String,
    /// Arguments of each call, at most 16,384 bytes as JSON.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "free_object")]
    pub arguments: Map<String, Value>,
    /// Declares that the tool changes nothing. If false, the default, the tool is called only if its server is trusted
    /// and itself declares the tool read-only (`readOnlyHint`).
    #[serde(default)]
    pub read_only: bool,
}

/// An MCP server with streamable HTTP transport.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
    "spec.source.poll.tool.server.tls requires a url that starts with https://"
))]
#[serde(rename_all = "camelCase")]
pub struct PolledServer {
    /// URL of the MCP endpoint.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.poll.tool.server.url must start with http:// or https://, such as https://mcp.example.com/mcp"
    ))]
    pub url: String,
    /// A Secret whose keys are header names and whose values are sent with each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings, for servers whose certificate is not signed by a system root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
    /// Whether the server's annotations of its tools are trusted. Defaults to false.
    #[serde(default)]
    pub trusted: bool,
}
