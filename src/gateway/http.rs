//! HTTP clients for servers outside the pod: trusted roots, allowed addresses, and no redirects, which could disclose a
//! secret.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reqwest::{Certificate, Client, ClientBuilder, Url};

use crate::api::endpoint::ROOTS_KEY;
use crate::egress::{AddressPolicy, FilteringResolver};
use crate::sensor_pipeline::source::tls;
use crate::support::text::{first_chars, root_cause};

const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time of a connection after which TCP keepalive probes it: an open stream may carry no data for hours.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// The mounted Secret of a server's `tls.caSecretRef`.
pub struct MountedRoots {
    file: PathBuf,
    /// For messages.
    field: String,
}

/// The client of one server.
pub enum ServerClient {
    /// It does not change.
    Fixed(Client),
    /// It trusts the certificates of a mounted Secret.
    Trusting(Box<TrustingClient>),
}

/// A client that trusts the certificates of a mounted Secret only. They are read for each request, so that changed ones
/// are used at once.
pub struct TrustingClient {
    policy: Arc<AddressPolicy>,
    roots: MountedRoots,
    /// The newest client, and the PEM text that it was made from.
    made: Mutex<Option<(Vec<u8>, Client)>>,
}

impl MountedRoots {
    /// `dir`: where the Secret is mounted. `path`: the path in the spec that has `tls`, for messages.
    pub fn new(dir: &Path, path: impl Display) -> Self {
        Self {
            file: dir.join(ROOTS_KEY),
            field: format!("{path}.tls.caSecretRef"),
        }
    }

    fn read(&self) -> Result<Vec<u8>, String> {
        std::fs::read(&self.file).map_err(|_| self.wrong("has no key ca.crt"))
    }

    fn certificates(&self, pem: &[u8]) -> Result<Vec<Certificate>, String> {
        let found = tls::certificates(pem);
        if found.is_empty() {
            return Err(self.wrong("has no PEM certificate in ca.crt"));
        }
        Ok(found)
    }

    fn wrong(&self, what: &str) -> String {
        format!("the Secret of {} {what}; correct the Secret", self.field)
    }
}

impl ServerClient {
    /// The client of the server at `url`, or why there can be none. `roots`: what it trusts instead of the system's roots.
    pub fn new(url: &Url, policy: &Arc<AddressPolicy>, roots: Option<MountedRoots>) -> Result<Self, String> {
        let Some(roots) = roots else {
            return client(url, policy).map(Self::Fixed);
        };
        policy.check_url(url).map_err(|denied| denied.to_string())?;
        Ok(Self::Trusting(Box::new(TrustingClient {
            policy: Arc::clone(policy),
            roots,
            made: Mutex::default(),
        })))
    }

    /// The client for the next request, or why it cannot be sent.
    pub fn get(&self) -> Result<Client, String> {
        match self {
            Self::Fixed(client) => Ok(client.clone()),
            Self::Trusting(client) => client.get(),
        }
    }
}

impl From<Client> for ServerClient {
    fn from(client: Client) -> Self {
        Self::Fixed(client)
    }
}

impl TrustingClient {
    fn get(&self) -> Result<Client, String> {
        let pem = self.roots.read()?;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made_of, client)) = made.as_ref()
            && *made_of == pem
        {
            return Ok(client.clone());
        }
        let certificates = self.roots.certificates(&pem)?;
        let client = builder(&self.policy).tls_certs_only(certificates).build();
        // A block of PEM whose content is not a certificate.
        let client = client.map_err(|_| self.roots.wrong("has a certificate in ca.crt that cannot be read"))?;
        *made = Some((pem, client.clone()));
        Ok(client)
    }
}

/// A client for the server at `url` that trusts the system's roots, or why there is none.
pub fn client(url: &Url, policy: &Arc<AddressPolicy>) -> Result<Client, String> {
    policy.check_url(url).map_err(|denied| denied.to_string())?;
    trusting(builder(policy), url)
        .build()
        .map_err(|error| format!("{error:?}"))
}

fn builder(policy: &Arc<AddressPolicy>) -> ClientBuilder {
    Client::builder()
        .user_agent(USER_AGENT)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_keepalive(KEEPALIVE)
        // Names are checked after they are resolved.
        .dns_resolver(Arc::new(FilteringResolver(Arc::clone(policy))))
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

/// What to check after the server's certificate was rejected, by the text of rustls; empty after other failures. `path`:
/// the path in the spec that may have `tls`.
pub fn tls_advice(cause: &str, path: impl Display) -> String {
    if cause.starts_with("invalid peer certificate") {
        format!("; check {path}.tls.caSecretRef")
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests;
