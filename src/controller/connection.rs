//! Connections to the API server that detect a dead peer.
//!
//! A connection can die silently: a load balancer forgets it, or a node loses power. A watch on it then waits until
//! something times out. Three timeouts limit this to 45 s: the kernel's, which probes an idle connection and closes one
//! whose data is not acknowledged; the client's, which closes a connection that is silent for longer than any watch
//! lasts; and the watch's own, which ends and is renewed every [`WATCH_SECONDS`].

use std::time::Duration;

use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ClientBuilder, ConfigExt};
use kube::runtime::watcher;
use kube::{Client, Config};
use tower::{BoxError, ServiceBuilder};

use crate::telemetry::metrics::Metrics;
use crate::telemetry::requests::CountRequests;

/// Duration of one watch request. The client waits 5 s longer for it to end, then starts the next one.
const WATCH_SECONDS: u32 = 35;
/// Longest silence on a connection to the API server; longer than a watch lasts.
pub const READ_TIMEOUT: Duration = Duration::from_secs(42);
/// Time limit for connecting to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// An idle connection is probed after this time, and in this interval.
const PROBE: Duration = Duration::from_secs(10);
/// Number of unanswered probes after which a connection is closed.
const PROBES: u32 = 3;
/// Longest time that sent data may stay unacknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);
/// How long an idle connection stays in the pool. Short, because one that died in the meantime must not be used for the
/// next watch.
const UNUSED: Duration = Duration::from_secs(15);

/// The configuration of every watch.
#[must_use]
pub fn watching() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

/// A client that counts its requests. It has no rate limit, because the API server limits requests itself. Callers
/// retry failed requests, because they know how long a retry makes sense.
pub fn client(mut config: Config, read_timeout: Duration, metrics: &Metrics) -> kube::Result<Client> {
    let host = config.cluster_url.authority().map(ToString::to_string);
    let count = CountRequests::new(metrics, host.unwrap_or_default());
    config.read_timeout = Some(read_timeout);
    config.connect_timeout = Some(read_timeout.min(CONNECT_TIMEOUT));
    config.reset_reader_on_write = true;
    config.default_retry = false;
    // Typical of a developer's machine: use kube's own connector, without kernel probes.
    if config.proxy_url.is_some() || config.auth_info.exec.is_some() {
        return Ok(ClientBuilder::try_from(config)?.with_layer(&count).build());
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(PROBE));
    tcp.set_keepalive_interval(Some(PROBE));
    tcp.set_keepalive_retries(Some(PROBES));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(tcp)?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let transport = legacy::Builder::new(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(UNUSED)
        .build::<_, Body>(connector);
    let service = ServiceBuilder::new()
        .layer(count)
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(transport);
    Ok(Client::new(service, config.default_namespace))
}
