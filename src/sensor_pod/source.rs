//! Starts the source of a spec.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::api::SensorSpec;
use crate::api::sensor::SensorSource;
use crate::api::source::{PollSource, StreamSource, WebhookSource};
use crate::egress::AddressPolicy;
use crate::sensor_pipeline::source::endpoint::url;
use crate::sensor_pipeline::source::http::{SourceError, SourceTarget};
use crate::sensor_pipeline::source::ndjson;
use crate::sensor_pipeline::source::poll::{PollQuery, SourcePoller};
use crate::sensor_pipeline::source::sse;
use crate::sensor_pipeline::source::tls::TlsFiles;
use crate::sensor_pipeline::source::web_socket;
use crate::sensor_pipeline::source::webhook::WebhookReceiver;
use crate::sensor_pipeline::source::webhook::signature::SignatureRule;
use crate::sensor_pipeline::source::{SourceCursor, SourceFeed};
use crate::support::hash::sha256_hex;
use crate::support::listener;

/// Maximum number of concurrent connections of a webhook.
const CONNECTIONS: usize = 256;
/// Time between two attempts to bind the webhook's port.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Bytes of a quantity such as `100Mi`; an invalid one counts as the smallest that admission accepts.
#[must_use]
pub fn bytes(quantity: &str) -> i64 {
    const MIN_BYTES: i64 = 32 << 20;
    let digits = quantity.trim_end_matches(|last: char| last.is_ascii_alphabetic());
    let factor: i64 = match &quantity[digits.len()..] {
        "" => 1,
        "k" => 1_000,
        "Ki" => 1 << 10,
        "M" => 1_000_000,
        "Mi" => 1 << 20,
        "G" => 1_000_000_000,
        "Gi" => 1 << 30,
        "T" => 1_000_000_000_000,
        "Ti" => 1 << 40,
        _ => return MIN_BYTES,
    };
    let (whole, _) = digits.split_once('.').unwrap_or((digits, ""));
    whole
        .parse::<i64>()
        .map_or(MIN_BYTES, |whole| whole.saturating_mul(factor).max(MIN_BYTES))
}

/// Fields that define how a source is accessed, and not which source it is.
const MEANS: [&str; 6] = [
    "intervalSeconds",
    "timeoutSeconds",
    "idleTimeoutSeconds",
    "headersSecretRef",
    "secretKeyRef",
    "tls",
];

/// Identifies a [`SensorSource`]: a hash of its address and its request. A cursor or a sender's event id of one source
/// is meaningless for another.
#[must_use]
pub fn identity(source: &SensorSource) -> String {
    let mut source = serde_json::json!(source);
    let kinds = source.as_object_mut().into_iter().flat_map(|kinds| kinds.values_mut());
    for kind in kinds {
        // Such as `poll`, and below it such as `http`.
        let inner = |value: &mut Value| {
            if let Some(fields) = value.as_object_mut() {
                fields.retain(|field, _| !MEANS.contains(&field.as_str()));
            }
        };
        inner(kind);
        kind.as_object_mut()
            .into_iter()
            .flat_map(|fields| fields.values_mut())
            .for_each(inner);
    }
    sha256_hex(source.to_string(), 16)
}

/// What [`SensorSource`]s need from the pod.
pub struct SourceContext {
    /// Directory with one file per header of the Secret.
    pub headers_dir: PathBuf,
    /// Directory with the certificate authority that the source trusts.
    pub ca_dir: PathBuf,
    /// Directory with the client certificate of the source.
    pub certificate_dir: PathBuf,
    /// File with the webhook's key.
    pub key_file: PathBuf,
    /// Address that the webhook listens on.
    pub webhook_address: SocketAddr,
    /// Addresses that requests may go to.
    pub policy: Arc<AddressPolicy>,
}

/// A [`SensorSource`] that runs until it is dropped.
pub struct RunningSource(JoinHandle<()>);

impl Drop for RunningSource {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl SourceContext {
    pub fn start(
        &self,
        spec: &SensorSpec,
        cursor: SourceCursor,
        feed: SourceFeed,
    ) -> Result<RunningSource, SourceError> {
        let max_bytes = usize::try_from(spec.limits.max_payload_bytes).unwrap_or(usize::MAX);
        let source = &spec.source;
        let task = match (&source.poll, &source.stream, &source.webhook) {
            (Some(poll), _, _) => tokio::spawn(poller(poll, self.place(source, max_bytes)?)?.run(cursor, feed)),
            (_, Some(stream), _) => listen(stream, self.place(source, max_bytes)?, cursor, feed)?,
            (_, _, Some(webhook)) => {
                tokio::spawn(receive(self.receiver(webhook, max_bytes), self.webhook_address, feed))
            }
            (None, None, None) => return Err(SourceError("spec.source needs no sensor pod".into())),
        };
        Ok(RunningSource(task))
    }

    fn receiver(&self, webhook: &WebhookSource, max_bytes: usize) -> WebhookReceiver {
        WebhookReceiver {
            rule: SignatureRule {
                scheme: webhook.scheme,
                id_header: webhook.delivery_id_header.clone(),
            },
            key_file: self.key_file.clone(),
            max_bytes,
            connections: CONNECTIONS,
        }
    }

    fn place(&self, source: &SensorSource, max_bytes: usize) -> Result<SourceTarget, SourceError> {
        let endpoint = source.endpoint();
        let endpoint = endpoint.ok_or_else(|| SourceError("spec.source has no URL".into()))?;
        Ok(SourceTarget {
            url: url(&endpoint).map_err(|invalid| SourceError(invalid.to_string()))?,
            headers_dir: endpoint.headers.map(|_| self.headers_dir.clone()),
            tls: TlsFiles::new(endpoint.tls, &self.ca_dir, &self.certificate_dir),
            policy: Arc::clone(&self.policy),
            max_bytes,
        })
    }
}

fn poller(poll: &PollSource, mut place: SourceTarget) -> Result<SourcePoller, SourceError> {
    let question = if let Some(http) = &poll.http {
        PollQuery::Page {
            method: http.method,
            body: http.body.clone(),
        }
    } else if let Some(prometheus) = &poll.prometheus {
        let path = format!("{}/api/v1/query", place.url.path().trim_end_matches('/'));
        place.url.set_path(&path);
        PollQuery::Prometheus {
            query: prometheus.query.clone(),
        }
    } else if let Some(tool) = &poll.tool {
        PollQuery::Tool(tool.clone())
    } else {
        return Err(SourceError("spec.source.poll has no source".into()));
    };
    Ok(SourcePoller {
        place,
        question,
        interval: Duration::from_secs(poll.interval_seconds.into()),
        timeout: Duration::from_secs(poll.timeout_seconds.into()),
    })
}

fn listen(
    stream: &StreamSource,
    place: SourceTarget,
    cursor: SourceCursor,
    feed: SourceFeed,
) -> Result<JoinHandle<()>, SourceError> {
    let idle = Duration::from_secs(stream.idle_timeout_seconds.into());
    match (&stream.sse, &stream.web_socket, &stream.ndjson) {
        (Some(_), _, _) => Ok(tokio::spawn(sse::SseListener { place, idle }.run(cursor, feed))),
        (_, _, Some(_)) => Ok(tokio::spawn(ndjson::NdjsonListener { place, idle }.run(feed))),
        (_, Some(socket), _) => {
            let listener = web_socket::WebSocketListener {
                place,
                subscribe: socket.subscribe.clone(),
                idle,
            };
            Ok(tokio::spawn(listener.run(feed)))
        }
        (None, None, None) => Err(SourceError("spec.source.stream has no source".into())),
    }
}

async fn receive(receiver: WebhookReceiver, address: SocketAddr, feed: SourceFeed) {
    loop {
        let error = match listener::bind(address).and_then(TcpListener::from_std) {
            // Dropping this task aborts the server and its connections, which hold clones of the feed.
            Ok(listener) => receiver
                .clone()
                .run(listener, feed.clone(), CancellationToken::new())
                .await
                .err(),
            Err(error) => Some(error),
        };
        let why = error.map_or_else(|| "the server stopped".to_owned(), |error| error.to_string());
        feed.failed(&format!("cannot serve the webhook's port: {why}"), LISTEN_AGAIN);
        sleep(LISTEN_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_quantity_is_parsed_to_bytes() {
        for (quantity, expected) in [
            ("100Mi", 100 << 20),
            ("1Gi", 1 << 30),
            ("1.5Gi", 1 << 30),
            ("64M", 64_000_000),
            ("67108864", 67_108_864),
            ("1e9", 32 << 20),
            ("10Ei", 32 << 20),
        ] {
            assert_eq!(bytes(quantity), expected, "{quantity}");
        }
    }

    #[test]
    fn a_source_is_another_one_by_where_it_is_and_not_by_how_it_is_reached() {
        let of = |source: Value| identity(&serde_json::from_value(source).unwrap());
        let page = |more: Value, url: &str| {
            let mut poll = json!({"http": {"url": url, "headersSecretRef": {"name": "a"}}});
            poll.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            of(json!({ "poll": poll }))
        };
        let first = page(json!({}), "https://a/");
        assert_eq!(page(json!({"intervalSeconds": 60}), "https://a/"), first);
        assert_ne!(page(json!({}), "https://b/"), first);
        assert_eq!(of(json!({"poll": {"http": {"url": "https://a/"}}})), first);
        assert_ne!(of(json!({"stream": {"sse": {"url": "https://a/"}}})), first);
    }
}
