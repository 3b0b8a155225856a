//! One OTLP request over HTTP: how it is sent, and what its response means.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use agentloop_support::text::{first_chars, root_cause};
use prost::bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Certificate, Client, ClientBuilder, Response, StatusCode, Url};

use crate::variables::{ExportSettings, RootsFile};

const PROTOBUF: &str = "application/x-protobuf";
const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));
/// Largest response that is read: it is about records that the collector rejected.
const MAX_RESPONSE: u64 = 64 * 1024;

/// The connection to a collector.
pub(crate) struct CollectorClient {
    http: HttpClient,
    endpoint: Url,
}

enum HttpClient {
    /// It does not change.
    Fixed(Client),
    /// It trusts the certificates of a file.
    Trusting(Box<FileRootsClient>),
}

/// A client that trusts the certificates of a file only. The file is read for each request, so that new certificates are used at
/// once, and the file may be written after the start.
struct FileRootsClient {
    settings: ExportSettings,
    roots: RootsFile,
    /// The newest client, and the PEM text that it was made from.
    made: Mutex<Option<(Vec<u8>, Client)>>,
}

/// Why a request was not accepted.
pub(crate) struct ExportFailure {
    pub(crate) cause: String,
    /// Whether the same request may be accepted later.
    pub(crate) is_temporary: bool,
    /// How long the collector asks to wait.
    pub(crate) retry_after: Option<Duration>,
}

impl ExportFailure {
    pub(crate) fn temporary(cause: String) -> Self {
        Self {
            cause,
            is_temporary: true,
            retry_after: None,
        }
    }

    pub(crate) fn rejected(records: u64) -> Self {
        Self {
            is_temporary: false,
            ..Self::temporary(format!("the collector rejected {records} records"))
        }
    }
}

impl CollectorClient {
    pub(crate) fn new(settings: &ExportSettings) -> Result<Self, ExportFailure> {
        let fixed = |builder: ClientBuilder| {
            let client = builder.build();
            client
                .map(HttpClient::Fixed)
                .map_err(|error| ExportFailure::temporary(cause(&error)))
        };
        let http = match (settings.endpoint.scheme(), &settings.roots) {
            ("https", Some(roots)) => HttpClient::Trusting(Box::new(FileRootsClient {
                settings: settings.clone(),
                roots: roots.clone(),
                made: Mutex::default(),
            })),
            ("https", None) => fixed(builder(settings))?,
            // Plain HTTP needs no roots, and none may be installed.
            _ => fixed(builder(settings).tls_certs_only([]))?,
        };
        Ok(Self {
            http,
            endpoint: settings.endpoint.clone(),
        })
    }

    /// Host of the collector, for messages.
    pub(crate) fn host(&self) -> &str {
        self.endpoint.host_str().unwrap_or_default()
    }

    /// Sends a request. Returns the response if it is short enough to be read, otherwise an empty one.
    pub(crate) async fn send(&self, body: Bytes) -> Result<Bytes, ExportFailure> {
        let request = self.http.get()?.post(self.endpoint.clone());
        let request = request.header(CONTENT_TYPE, PROTOBUF).body(body);
        let response = request.send().await;
        let response = response.map_err(|error| ExportFailure::temporary(cause(&error)))?;
        let status = response.status();
        if status.is_success() {
            return Ok(short_body(response).await.unwrap_or_default());
        }
        let seconds = response.headers().get(RETRY_AFTER);
        let seconds = seconds.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Err(ExportFailure {
            cause: format!("status {}", status.as_u16()),
            // As the protocol lists them.
            is_temporary: matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            ),
            retry_after: seconds.map(|seconds: u64| Duration::from_secs(seconds.min(300))),
        })
    }
}

impl HttpClient {
    /// The client for the next request.
    fn get(&self) -> Result<Client, ExportFailure> {
        match self {
            Self::Fixed(client) => Ok(client.clone()),
            Self::Trusting(client) => client.get(),
        }
    }
}

impl FileRootsClient {
    fn get(&self) -> Result<Client, ExportFailure> {
        let pem = std::fs::read(&self.roots.file).map_err(|_| self.wrong("that cannot be read"))?;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made_of, client)) = made.as_ref()
            && *made_of == pem
        {
            return Ok(client.clone());
        }
        let certificates = Certificate::from_pem_bundle(&pem).unwrap_or_default();
        if certificates.is_empty() {
            return Err(self.wrong("without a PEM certificate"));
        }
        let client = builder(&self.settings).tls_certs_only(certificates).build();
        // A block of PEM whose content is not a certificate.
        let client = client.map_err(|_| self.wrong("with a certificate that cannot be read"))?;
        *made = Some((pem, client.clone()));
        Ok(client)
    }

    fn wrong(&self, what: &str) -> ExportFailure {
        ExportFailure::temporary(format!("{} names a file {what}", self.roots.variable))
    }
}

/// A client that follows no redirects: they could disclose a header.
fn builder(settings: &ExportSettings) -> ClientBuilder {
    Client::builder()
        .user_agent(USER_AGENT)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(settings.timeout)
        .default_headers(settings.headers.clone())
}

async fn short_body(response: Response) -> Option<Bytes> {
    response.content_length().filter(|length| *length <= MAX_RESPONSE)?;
    response.bytes().await.ok()
}

/// The innermost cause, which contains neither a URL nor a header.
fn cause(error: &reqwest::Error) -> String {
    first_chars(&root_cause(error), 200).to_owned()
}
