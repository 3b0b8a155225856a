//! HTTP requests of sources: allowed targets, bounds on responses, and error messages.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::redirect::{Attempt, Policy};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use tokio::time::timeout;

use super::tls::{TlsFiles, TlsMaterial};
use agentloop_api::tools::is_tool_header;
use agentloop_egress::{AddressPolicy, FilteringResolver};
use agentloop_support::text::{first_chars, root_cause};

const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time of a connection after which TCP keepalive probes are sent.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Maximum number of consecutive redirects.
const MAX_REDIRECTS: usize = 5;
/// Maximum number of characters of a cause that are shown.
const MAX_CAUSE: usize = 200;

/// Why a source receives nothing, with the fix; never text of a payload.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("{0}")]
pub struct SourceError(pub String);

/// Where requests go, and what is sent with them.
#[derive(Clone, Debug)]
pub struct SourceTarget {
    pub url: Url,
    /// Directory with one file per header of the Secret; read for each request.
    pub headers_dir: Option<PathBuf>,
    pub tls: TlsFiles,
    /// The addresses that requests may go to.
    pub policy: Arc<AddressPolicy>,
    pub max_bytes: usize,
}

/// The client of a target; created again when the Secrets of its TLS settings change.
pub struct CachedClient<'a> {
    place: &'a SourceTarget,
    is_upgraded: bool,
    made: Option<(TlsMaterial, Client)>,
}

impl CachedClient<'_> {
    /// The client for the next connection.
    pub fn get(&mut self) -> Result<Client, SourceError> {
        let material = self.place.tls.read()?;
        if let Some((made_of, client)) = &self.made
            && *made_of == material
        {
            return Ok(client.clone());
        }
        let client = self.place.client(self.is_upgraded, &material)?;
        self.made = Some((material, client.clone()));
        Ok(client)
    }
}

impl SourceTarget {
    /// Clients that connect only to allowed addresses, also after a redirect.
    #[must_use]
    pub fn clients(&self) -> CachedClient<'_> {
        CachedClient {
            place: self,
            is_upgraded: false,
            made: None,
        }
    }

    /// The same for connections that are upgraded, as to a WebSocket, which needs HTTP/1.1.
    #[must_use]
    pub fn clients_to_upgrade(&self) -> CachedClient<'_> {
        CachedClient {
            is_upgraded: true,
            ..self.clients()
        }
    }

    fn client(&self, is_upgraded: bool, material: &TlsMaterial) -> Result<Client, SourceError> {
        let builder = Client::builder()
            .user_agent(USER_AGENT)
            .no_proxy()
            .dns_resolver(Arc::new(FilteringResolver(Arc::clone(&self.policy))))
            .redirect(self.redirects())
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_keepalive(KEEPALIVE);
        let builder = if is_upgraded { builder.http1_only() } else { builder };
        let builder = material.apply(builder, self.url.scheme() == "https")?;
        builder.build().map_err(|error| {
            let advice = if material.has_identity() {
                "; check tls.clientCertificateSecretRef"
            } else {
                ""
            };
            SourceError(format!("failed to create the HTTP client: {}{advice}", cause(&error)))
        })
    }

    /// Whether the policy allows the address, as far as the URL contains one.
    pub fn check(&self) -> Result<(), SourceError> {
        self.policy
            .check_url(&self.url)
            .map_err(|denied| SourceError(denied.to_string()))
    }

    /// The headers from the Secret.
    pub fn headers(&self) -> Result<HeaderMap, SourceError> {
        match &self.headers_dir {
            Some(dir) => read_headers(dir),
            None => Ok(HeaderMap::new()),
        }
    }

    fn redirects(&self) -> Policy {
        let policy = Arc::clone(&self.policy);
        let starts_plain = self.url.scheme() != "https";
        let has_secret = self.headers_dir.is_some() || self.tls.certificate_dir.is_some();
        let home = has_secret.then(|| self.url.origin());
        Policy::custom(move |attempt: Attempt<'_>| {
            if attempt.previous().len() > MAX_REDIRECTS {
                return attempt.error(SourceError(format!("more than {MAX_REDIRECTS} redirects in a row")));
            }
            if let Err(denied) = policy.check_url(attempt.url()) {
                return attempt.error(denied);
            }
            // Neither the Secret's headers nor the client certificate may be offered to another server.
            if home.as_ref().is_some_and(|home| *home != attempt.url().origin()) {
                let what = "the server redirects to another host, which must not get what headersSecretRef or \
                            tls.clientCertificateSecretRef names: write that host's address into the url";
                return attempt.error(SourceError(what.into()));
            }
            // A client for plain HTTP has no root certificates.
            if starts_plain && attempt.url().scheme() == "https" {
                return attempt.error(SourceError(
                    "the server redirects to https: set url to that address".into(),
                ));
            }
            attempt.follow()
        })
    }
}

fn read_headers(dir: &Path) -> Result<HeaderMap, SourceError> {
    let wrong = |what: &str| SourceError(format!("the Secret of headersSecretRef {what}"));
    let files = std::fs::read_dir(dir).map_err(|_| wrong("cannot be read"))?;
    let mut headers = HeaderMap::new();
    for file in files.flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        // The kubelet's own files begin like this.
        if name.starts_with("..") {
            continue;
        }
        let named = HeaderName::try_from(name.as_str())
            .ok()
            .filter(|_| is_tool_header(&name));
        let text = std::fs::read_to_string(file.path()).ok();
        let value = text.and_then(|text| HeaderValue::try_from(text.trim()).ok());
        let (Some(named), Some(mut value)) = (named, value) else {
            return Err(wrong(&format!("has a key '{name}' that cannot be sent as a header")));
        };
        value.set_sensitive(true);
        headers.insert(named, value);
    }
    Ok(headers)
}

/// Reads a body, up to one byte more than `max_bytes`: that byte marks it as too long.
pub async fn body(mut response: Response, max_bytes: usize) -> Result<Vec<u8>, SourceError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(&error))? {
        let left = (max_bytes + 1).saturating_sub(body.len());
        body.extend_from_slice(chunk.get(..left).unwrap_or(&chunk));
        if body.len() > max_bytes {
            break;
        }
    }
    Ok(body)
}

/// The error of a request without a response.
#[must_use]
pub fn unreachable(error: &reqwest::Error) -> SourceError {
    let cause = cause(error);
    let advice = advice(&cause);
    SourceError(format!("no answer: {cause}{advice}"))
}

/// Which field to check after a TLS failure, by the text of rustls.
fn advice(cause: &str) -> &'static str {
    /// Alerts with which servers reject a client certificate, or a missing one.
    const REFUSALS: [&str; 8] = [
        "BadCertificate",
        "UnsupportedCertificate",
        "CertificateRevoked",
        "CertificateExpired",
        "CertificateUnknown",
        "UnknownCA",
        "AccessDenied",
        "CertificateRequired",
    ];
    if cause.starts_with("invalid peer certificate") {
        return "; check tls.caSecretRef";
    }
    match cause.strip_prefix("received fatal alert: ") {
        Some(alert) if REFUSALS.contains(&alert) => "; check tls.clientCertificateSecretRef",
        _ => "",
    }
}

/// Sends a request whose response is a stream, and returns the response once it has begun with status 200.
pub async fn open_stream(request: RequestBuilder, idle: Duration) -> Result<Response, SourceError> {
    let response = timeout(idle, request.send()).await.map_err(|_| silent(idle))?;
    let response = response.map_err(|error| unreachable(&error))?;
    if response.status() != StatusCode::OK {
        return Err(refused(response.status()));
    }
    Ok(response)
}

/// The media type of a response in lower case, with its parameters; empty if it has none.
pub fn content_type(response: &Response) -> String {
    let value = response.headers().get(CONTENT_TYPE);
    let text = value.and_then(|value| value.to_str().ok()).unwrap_or_default();
    text.trim().to_ascii_lowercase()
}

/// The error of a response with this status.
#[must_use]
pub fn refused(status: StatusCode) -> SourceError {
    let advice = match status.as_u16() {
        401 | 403 => "; check headersSecretRef",
        404 | 410 => "; check url",
        429 => "; increase intervalSeconds",
        _ => "",
    };
    SourceError(format!("the server answers with status {}{advice}", status.as_u16()))
}

/// The error after no data for this time.
#[must_use]
pub fn silent(idle: Duration) -> SourceError {
    SourceError(format!("silent for {} s (idleTimeoutSeconds)", idle.as_secs()))
}

/// The innermost cause says most, and none of them contains a header or a body.
fn cause(error: &reqwest::Error) -> String {
    first_chars(&root_cause(error), MAX_CAUSE).to_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use rustls::{AlertDescription, CertificateError, Error};

    use super::*;

    #[rstest]
    #[case::an_authority(
        Error::InvalidCertificate(CertificateError::UnknownIssuer),
        "; check tls.caSecretRef"
    )]
    #[case::no_certificate(
        Error::AlertReceived(AlertDescription::CertificateRequired),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::not_known(
        Error::AlertReceived(AlertDescription::UnknownCA),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::bad(
        Error::AlertReceived(AlertDescription::BadCertificate),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::unsupported(
        Error::AlertReceived(AlertDescription::UnsupportedCertificate),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::revoked(
        Error::AlertReceived(AlertDescription::CertificateRevoked),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::expired(
        Error::AlertReceived(AlertDescription::CertificateExpired),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::unclear(
        Error::AlertReceived(AlertDescription::CertificateUnknown),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::denied(
        Error::AlertReceived(AlertDescription::AccessDenied),
        "; check tls.clientCertificateSecretRef"
    )]
    #[case::no_host(Error::AlertReceived(AlertDescription::UnrecognisedName), "")]
    #[case::no_protocol(Error::AlertReceived(AlertDescription::ProtocolVersion), "")]
    fn tls_that_fails_names_the_field_of_the_certificate_at_fault(#[case] error: Error, #[case] expected: &str) {
        assert_eq!(advice(&error.to_string()), expected);
    }
}
