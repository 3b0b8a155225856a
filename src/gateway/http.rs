//! Clients of servers outside the pod: how they trust, which addresses they reach, and that they never follow a redirect,
//! which could carry a secret away.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, ClientBuilder, Url};

use crate::sensing::address::{AddressPolicy, FilteringResolver};

const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence on a connection after which the other side is asked whether it is there: an open stream may say nothing for
/// hours.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// A client of the server at `url`, or why there can be none.
pub fn client(url: &Url, policy: &Arc<AddressPolicy>) -> Result<Client, String> {
    policy.check_url(url).map_err(|denied| denied.to_string())?;
    let builder = Client::builder()
        .user_agent(USER_AGENT)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_keepalive(KEEPALIVE)
        // Names are checked once they are resolved.
        .dns_resolver(Arc::new(FilteringResolver(Arc::clone(policy))));
    trusting(builder, url).build().map_err(|error| format!("{error:?}"))
}

fn trusting(builder: ClientBuilder, url: &Url) -> ClientBuilder {
    match url.scheme() {
        // The system's CA roots (SSL_CERT_FILE or the usual places), without which there is no client.
        "https" => builder,
        // None are needed, and none need be there.
        _ => builder.tls_certs_only([]),
    }
}

/// The innermost cause says most, and none of them carries a header or a body.
pub fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string().chars().take(200).collect()
}
