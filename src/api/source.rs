//! Sources of sensor pods: pages and queries that they poll, streams, and webhooks.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::DNS_SUBDOMAIN;
use super::endpoint::TlsSpec;
use super::polled_tool::PolledTool;
use super::tools::SecretRef;

/// The name of an HTTP header.
const HEADER: &str = "^[A-Za-z0-9][-A-Za-z0-9_]*$";

/// A page, query or tool that is polled. Each failure doubles the time to the next attempt, up to 300 s.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new(
    "[has(self.http), has(self.prometheus), has(self.tool)].filter(one, one).size() == 1"
).message(
    "spec.source.poll must have exactly one of http, prometheus and tool, such as http: {url: \"https://example.com/prices\"}"
))]
#[serde(rename_all = "camelCase")]
pub struct PollSource {
    /// Interval between the starts of two attempts, in seconds, 1 to 86,400. Defaults to 5.
    #[serde(default = "interval")]
    #[schemars(range(min = 1, max = 86_400))]
    pub interval_seconds: u32,
    /// Maximum duration of an attempt, in seconds, 1 to 300. Defaults to 10.
    #[serde(default = "timeout")]
    #[schemars(range(min = 1, max = 300))]
    pub timeout_seconds: u32,
    /// An HTTP request. The payload is the response if it is JSON, or else its text. A 304 is not an event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpPoll>,
    /// An instant query of a Prometheus server. The payload is `{"resultType": …, "result": …}` with numeric values and
    /// without timestamps, so that unchanged values are not an event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prometheus: Option<PrometheusPoll>,
    /// A read-only tool of an MCP server. The payload is its structured content, or else its text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<PolledTool>,
}

fn interval() -> u32 {
    5
}

fn timeout() -> u32 {
    10
}

/// A page and the request for it.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.body) || self.method == 'POST'").message(
        "spec.source.poll.http.body requires method: POST"
    ),
    validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
        "spec.source.poll.http.tls requires a url that starts with https://"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct HttpPoll {
    /// URL of the page: http or https, a host, no user.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.poll.http.url must start with http:// or https://, such as https://example.com/prices"
    ))]
    pub url: String,
    /// HTTP method. Defaults to `GET`.
    #[serde(default)]
    pub method: HttpMethod,
    /// A Secret whose keys are header names, such as `Authorization`, and whose values are sent with each request. If
    /// set, redirects to another host are not followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings, for servers whose certificate is not signed by a system root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
    /// JSON body of the request. Requires method `POST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16_384))]
    pub body: Option<String>,
}

/// An HTTP method.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum HttpMethod {
    /// Requests the page.
    #[default]
    #[serde(rename = "GET")]
    Get,
    /// Sends `body` to it.
    #[serde(rename = "POST")]
    Post,
}

/// A query of a Prometheus server.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
    "spec.source.poll.prometheus.tls requires a url that starts with https://"
))]
#[serde(rename_all = "camelCase")]
pub struct PrometheusPoll {
    /// URL of the server, without `/api/v1/query`.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.poll.prometheus.url must start with http:// or https://, such as http://prometheus.monitoring:9090"
    ))]
    pub url: String,
    /// Query in `PromQL`.
    #[schemars(length(min = 1, max = 4096))]
    pub query: String,
    /// A Secret whose keys are header names and whose values are sent with each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings, for servers whose certificate is not signed by a system root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
}

/// A persistent connection. It is reopened when it ends; after failures, with exponential backoff of up to 300 s.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("[has(self.sse), has(self.webSocket), has(self.ndjson)].filter(set, set).size() == 1").message(
    "spec.source.stream must have exactly one of sse, webSocket and ndjson, such as sse: {url: \"https://example.com/events\"}"
))]
#[serde(rename_all = "camelCase")]
pub struct StreamSource {
    /// Server-sent events. After a reconnect, the stream resumes after the last stored event (`Last-Event-ID`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sse: Option<SseSource>,
    /// Messages of a WebSocket; each message is an event. Messages sent while disconnected are lost: a WebSocket cannot
    /// resume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub web_socket: Option<WebSocket>,
    /// Newline-delimited JSON over HTTP, such as a watch of the Kubernetes API; each line is an event. Lines sent while
    /// disconnected are lost: such a stream cannot resume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ndjson: Option<NdjsonSource>,
    /// Time without data in seconds, 1 to 3,600, after which the connection is reopened. Server comments, empty lines and
    /// pongs reset it; a WebSocket is pinged after each third of that time. Defaults to 60.
    #[serde(default = "idle")]
    #[schemars(range(min = 1, max = 3_600))]
    pub idle_timeout_seconds: u32,
}

fn idle() -> u32 {
    60
}

/// Server-sent events.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
    "spec.source.stream.sse.tls requires a url that starts with https://"
))]
#[serde(rename_all = "camelCase")]
pub struct SseSource {
    /// URL of the stream.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.stream.sse.url must start with http:// or https://, such as https://example.com/events"
    ))]
    pub url: String,
    /// A Secret whose keys are header names and whose values are sent with each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings, for servers whose certificate is not signed by a system root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
}

/// Newline-delimited JSON.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
    "spec.source.stream.ndjson.tls requires a url that starts with https://"
))]
#[serde(rename_all = "camelCase")]
pub struct NdjsonSource {
    /// URL of the stream.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.stream.ndjson.url must start with http:// or https://, such as https://example.com/changes?watch=true"
    ))]
    pub url: String,
    /// A Secret whose keys are header names and whose values are sent with each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings, for servers whose certificate is not signed by a system root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
}

/// Messages of a WebSocket.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('wss://')").message(
    "spec.source.stream.webSocket.tls requires a url that starts with wss://"
))]
#[serde(rename_all = "camelCase")]
pub struct WebSocket {
    /// URL of the WebSocket.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('ws://') || self.startsWith('wss://')").message(
        "spec.source.stream.webSocket.url must start with ws:// or wss://, such as wss://example.com/ticker"
    ))]
    pub url: String,
    /// A Secret whose keys are header names and whose values are sent with the upgrade request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings, for servers whose certificate is not signed by a system root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsSpec>,
    /// Message that is sent after each connect, such as `{"op": "subscribe", "channel": "ticker"}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16_384))]
    pub subscribe: Option<String>,
}

/// An HTTP endpoint, `POST /` on Service `<sensor>-webhook`. Unsigned requests are rejected.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.deliveryIDHeader) || self.scheme == 'GitHub'").message(
    "spec.source.webhook.deliveryIDHeader is supported with scheme GitHub only, as StandardWebhooks has its own id: remove it"
))]
#[serde(rename_all = "camelCase")]
pub struct WebhookSource {
    /// Signature scheme of the requests. `GitHub`: `X-Hub-Signature-256: sha256=<hex>` over the body.
    /// `StandardWebhooks`: `webhook-id`, `webhook-timestamp` (within 300 s) and `webhook-signature: v1,<base64>` over
    /// `id.timestamp.body`.
    pub scheme: SignatureScheme,
    /// Signing key of the requests.
    pub secret_key_ref: SecretKeyRef,
    /// Header with the sender's id of an event, by which redelivered events are deduplicated. Defaults to
    /// `X-GitHub-Delivery`. Requests without the header are deduplicated by their body.
    #[serde(rename = "deliveryIDHeader", default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = HEADER))]
    pub delivery_id_header: Option<String>,
}

/// Signature scheme of a webhook's requests.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum SignatureScheme {
    /// `X-Hub-Signature-256: sha256=<hex>` over the body.
    GitHub,
    /// `webhook-id`, `webhook-timestamp` (within 300 s) and `webhook-signature: v1,<base64>` over `id.timestamp.body`.
    StandardWebhooks,
}

/// One key of a Secret.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    /// Name of the Secret in the Sensor's namespace.
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
    /// Key in the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// Storage of a sensor pod's outbox.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("self == oldSelf").message(
    "spec.storage is immutable: wait until status.pendingDeliveries is 0, then delete and recreate the Sensor"
))]
#[serde(rename_all = "camelCase")]
pub struct SensorStorage {
    /// Size of the volume claim, at least 32Mi. Defaults to 100Mi.
    #[serde(default = "size")]
    #[schemars(length(min = 1, max = 32))]
    #[x_kube(validation = Rule::new("isQuantity(self) && quantity(self).compareTo(quantity('32Mi')) >= 0").message(
        "spec.storage.size must be a quantity of at least 32Mi, such as 100Mi"
    ))]
    pub size: String,
    /// If true, no volume claim is created: pending deliveries are lost with the pod, and `Durable` is False. Defaults
    /// to false.
    #[serde(default)]
    pub ephemeral: bool,
}

fn size() -> String {
    "100Mi".into()
}

impl Default for SensorStorage {
    fn default() -> Self {
        Self {
            size: size(),
            ephemeral: false,
        }
    }
}
