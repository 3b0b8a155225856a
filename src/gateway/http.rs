//! HTTP clients for servers outside the pod: trusted roots, allowed addresses, and no redirects, which could disclose a
//! secret.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, ClientBuilder, Url};

use crate::sensing::address::{AddressPolicy, FilteringResolver};
use crate::support::text::{first_chars, root_cause};

const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time of a connection after which TCP keepalive probes it: an open stream may carry no data for hours.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// A client for the server at `url`, or why there is none.
pub fn client(url: &Url, policy: &Arc<AddressPolicy>) -> Result<Client, String> {
    policy.check_url(url).map_err(|denied| denied.to_string())?;
    let builder = Client::builder()
        .user_agent(USER_AGENT)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_keepalive(KEEPALIVE)
        // Names are checked after they are resolved.
        .dns_resolver(Arc::new(FilteringResolver(Arc::clone(policy))));
    trusting(builder, url).build().map_err(|error| format!("{error:?}"))
}

/// A client for a container of this pod: at the URL's port on loopback, or on a Unix socket.
pub fn pod_client(socket: Option<PathBuf>) -> Result<Client, String> {
    let builder = Client::builder()
        .user_agent(USER_AGENT)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .tls_certs_only([]);
    let builder = match socket {
        Some(socket) => builder.unix_socket(socket),
        None => builder,
    };
    builder.build().map_err(|error| format!("{error:?}"))
}

fn trusting(builder: ClientBuilder, url: &Url) -> ClientBuilder {
    match url.scheme() {
        // Uses the CA roots of the system (SSL_CERT_FILE or the usual paths); without any, building the client fails.
        "https" => builder,
        // Plain HTTP needs no roots, and none may be installed.
        _ => builder.tls_certs_only([]),
    }
}

/// The innermost cause, which is the most specific; it never contains a header or a body.
pub fn cause(error: &reqwest::Error) -> String {
    first_chars(&root_cause(error), 200).to_owned()
}
