//! Connections to the API server that notice when nobody is at the other end any more.
//!
//! A connection can die without a word: a load balancer forgets it, a node loses power. Whoever waits for events on it waits
//! until something gives up. Here three things do, so that nobody is blind for more than 45 s: the kernel, which probes a
//! connection that is silent and gives up on one that acknowledges nothing; the client, which gives up on a connection that
//! brings nothing for longer than any watch lasts; and the watch, which ends and is renewed every [`WATCH_SECONDS`].

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

/// How long one request to watch lasts. Its client waits 5 s longer for the end of it, and goes on with the next one.
const WATCH_SECONDS: u32 = 35;
/// Longest silence on a connection to the API server: longer than a watch lasts.
pub const READ_TIMEOUT: Duration = Duration::from_secs(42);
/// Longest time to connect to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A silent connection is probed after this time, and as often again.
const PROBE: Duration = Duration::from_secs(10);
/// Probes without an answer after which a connection is dead.
const PROBES: u32 = 3;
/// How long what was sent may go unacknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);
/// How long an unused connection is kept: one that died meanwhile must not be taken for the next watch.
const UNUSED: Duration = Duration::from_secs(15);

/// How everything is watched.
#[must_use]
pub fn watching() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

/// A client that counts its requests. It has no rate limit: the API server has its own. Failed requests are repeated by
/// whoever made them, who knows how long that is worth it.
pub fn client(mut config: Config, read_timeout: Duration, metrics: &Metrics) -> kube::Result<Client> {
    let host = config.cluster_url.authority().map(ToString::to_string);
    let count = CountRequests::new(metrics.requests.clone(), host.unwrap_or_default());
    config.read_timeout = Some(read_timeout);
    config.connect_timeout = Some(read_timeout.min(CONNECT_TIMEOUT));
    config.reset_reader_on_write = true;
    config.default_retry = false;
    // A developer's machine: what kube makes of it, without probes of the kernel.
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
