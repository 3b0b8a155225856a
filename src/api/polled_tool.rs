//! A tool of an MCP server that a Sensor asks again and again.

use kube::KubeSchema;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::endpoint::Tls;
use super::tools::{SecretRef, TOOL};

/// A tool of an MCP server, and what it is called with.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PolledTool {
    /// The server.
    pub server: PolledServer,
    /// Name of the tool, as its server has it.
    #[schemars(length(min = 1, max = 128), regex(pattern = TOOL))]
    pub name: String,
    /// What it is called with; at most 16,384 bytes as JSON.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "object")]
    pub arguments: Map<String, Value>,
    /// True: the tool changes nothing. Default false: it is called only if its server is trusted and says so itself
    /// (`readOnlyHint`).
    #[serde(default)]
    pub read_only: bool,
}

/// An MCP server that is reached over streamable HTTP.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
    "spec.source.poll.tool.server.tls needs a url that starts with https://"
))]
#[serde(rename_all = "camelCase")]
pub struct PolledServer {
    /// Address of its MCP endpoint.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.poll.tool.server.url must start with http:// or https://, such as https://mcp.example.com/mcp"
    ))]
    pub url: String,
    /// A Secret whose keys are names of headers and whose values are sent with each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// How TLS is made, where the system's roots do not do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// True: what the server says of its tools is believed.
    #[serde(default)]
    pub trusted: bool,
}

fn object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true, "maxProperties": 64})
}
