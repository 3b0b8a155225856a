//! What a Sensor's own pod listens to: pages and queries that it asks again and again, streams, and a webhook.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::DNS_SUBDOMAIN;
use super::endpoint::Tls;
use super::polled_tool::PolledTool;
use super::tools::SecretRef;

/// A name of an HTTP header.
const HEADER: &str = "^[A-Za-z0-9][-A-Za-z0-9_]*$";

/// Something that is asked again and again. A failure doubles the time to the next attempt, up to 300 s.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new(
    "[has(self.http), has(self.prometheus), has(self.tool)].filter(one, one).size() == 1"
).message(
    "spec.source.poll must have exactly one of http, prometheus and tool, such as http: {url: \"https://example.com/prices\"}"
))]
#[serde(rename_all = "camelCase")]
pub struct Poll {
    /// Seconds, 1 to 86,400, from the beginning of one attempt to the next.
    #[serde(default = "interval")]
    #[schemars(range(min = 1, max = 86_400))]
    pub interval_seconds: u32,
    /// Seconds, 1 to 300, after which an attempt has failed.
    #[serde(default = "timeout")]
    #[schemars(range(min = 1, max = 300))]
    pub timeout_seconds: u32,
    /// A page. An answer that is JSON is the payload, any other its text; 304 is no event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<Http>,
    /// An instant query of a Prometheus. The payload is `{"resultType": …, "result": …}` with numbers as values and
    /// without times, so that the same values again are no news.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prometheus: Option<Prometheus>,
    /// A tool of an MCP server that changes nothing. What it gives as structured content is the payload, or else its text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<PolledTool>,
}

fn interval() -> u32 {
    5
}

fn timeout() -> u32 {
    10
}

/// A page and how it is asked for.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.body) || self.method == 'POST'").message(
        "spec.source.poll.http.body needs method: POST"
    ),
    validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
        "spec.source.poll.http.tls needs a url that starts with https://"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct Http {
    /// Its address: http or https, a host, no user.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.poll.http.url must start with http:// or https://, such as https://example.com/prices"
    ))]
    pub url: String,
    /// How it is asked for.
    #[serde(default)]
    pub method: Method,
    /// A Secret whose keys are names of headers, such as `Authorization`, and whose values are sent with each request.
    /// With it, redirects to another host are not followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// How TLS is made, where the system's roots do not do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// JSON that is sent, with method `POST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16_384))]
    pub body: Option<String>,
}

/// A method of HTTP.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum Method {
    /// Asks for the page.
    #[default]
    #[serde(rename = "GET")]
    Get,
    /// Sends `body` to it.
    #[serde(rename = "POST")]
    Post,
}

/// A query of a Prometheus.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
    "spec.source.poll.prometheus.tls needs a url that starts with https://"
))]
#[serde(rename_all = "camelCase")]
pub struct Prometheus {
    /// Address of the server, without `/api/v1/query`.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.poll.prometheus.url must start with http:// or https://, such as http://prometheus.monitoring:9090"
    ))]
    pub url: String,
    /// The query, in `PromQL`.
    #[schemars(length(min = 1, max = 4096))]
    pub query: String,
    /// A Secret whose keys are names of headers and whose values are sent with each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// How TLS is made, where the system's roots do not do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
}

/// A connection that stays open. When it ends it is made again; each failure doubles the time to that, up to 300 s.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.sse) != has(self.webSocket)").message(
    "spec.source.stream must have exactly one of sse and webSocket, such as sse: {url: \"https://example.com/events\"}"
))]
#[serde(rename_all = "camelCase")]
pub struct Stream {
    /// Server-sent events. It goes on after the last event that is on disk, by `Last-Event-ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sse: Option<Sse>,
    /// Messages of a WebSocket, each an event. What is sent while there is no connection is lost: a WebSocket cannot go on
    /// where it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub web_socket: Option<WebSocket>,
    /// Seconds, 1 to 3,600, of silence after which the connection is made again; a comment of the server is no silence, nor
    /// is its answer to a ping, which a WebSocket gets after each third of that time.
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
    "spec.source.stream.sse.tls needs a url that starts with https://"
))]
#[serde(rename_all = "camelCase")]
pub struct Sse {
    /// Address of the stream.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('http://') || self.startsWith('https://')").message(
        "spec.source.stream.sse.url must start with http:// or https://, such as https://example.com/events"
    ))]
    pub url: String,
    /// A Secret whose keys are names of headers and whose values are sent with each request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// How TLS is made, where the system's roots do not do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
}

/// Messages of a WebSocket.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.tls) || self.url.startsWith('wss://')").message(
    "spec.source.stream.webSocket.tls needs a url that starts with wss://"
))]
#[serde(rename_all = "camelCase")]
pub struct WebSocket {
    /// Its address.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new("self.startsWith('ws://') || self.startsWith('wss://')").message(
        "spec.source.stream.webSocket.url must start with ws:// or wss://, such as wss://example.com/ticker"
    ))]
    pub url: String,
    /// A Secret whose keys are names of headers and whose values are sent with the request for the connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// How TLS is made, where the system's roots do not do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// A text that is sent once each connection is made, such as `{"op": "subscribe", "channel": "ticker"}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16_384))]
    pub subscribe: Option<String>,
}

/// A place that others send to: `POST /` on Service `<sensor>-webhook`. What is not signed is refused.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("!has(self.deliveryIDHeader) || self.scheme == 'GitHub'").message(
    "spec.source.webhook.deliveryIDHeader goes with scheme GitHub only: StandardWebhooks signs its own id"
))]
#[serde(rename_all = "camelCase")]
pub struct Webhook {
    /// How requests are signed.
    pub scheme: Scheme,
    /// The key that they are signed with.
    pub secret_key_ref: KeyRef,
    /// The header with the sender's own id of an event, by which it is taken once; default `X-GitHub-Delivery`. Without the
    /// header the same text again is no news.
    #[serde(rename = "deliveryIDHeader", default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = HEADER))]
    pub delivery_id_header: Option<String>,
}

/// How a webhook's requests are signed.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum Scheme {
    /// `X-Hub-Signature-256: sha256=<hex>` over the body.
    GitHub,
    /// `webhook-id`, `webhook-timestamp` (within 300 s) and `webhook-signature: v1,<base64>` over `id.timestamp.body`.
    StandardWebhooks,
}

/// One key of a Secret.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the Secret, in the Sensor's own namespace.
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
    /// Its key.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// The outbox of a sensor pod.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("self == oldSelf").message(
    "spec.storage cannot be changed: delete the Sensor and make it anew, once its receivers have everything"
))]
#[serde(rename_all = "camelCase")]
pub struct Storage {
    /// Size of its claim, 32Mi at least.
    #[serde(default = "size")]
    #[schemars(length(min = 1, max = 32))]
    #[x_kube(validation = Rule::new("isQuantity(self) && quantity(self).compareTo(quantity('32Mi')) >= 0").message(
        "spec.storage.size must be a quantity of at least 32Mi, such as 100Mi"
    ))]
    pub size: String,
    /// True: no claim. What receivers do not have yet is lost when the pod goes; `Durable` says so.
    #[serde(default)]
    pub ephemeral: bool,
}

fn size() -> String {
    "100Mi".into()
}

impl Default for Storage {
    fn default() -> Self {
        Self {
            size: size(),
            ephemeral: false,
        }
    }
}
