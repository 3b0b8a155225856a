//! The way to the tool servers of the spec: a proxy that adds their headers, takes them out of what the servers say, and does
//! nothing else.
//!
//! Knows of the protocol only which request runs a tool: such a one is not sent once this pod must not act any more. What
//! the servers say passes through as it comes, but for the values of secrets. Headers are read for each request, go into it, and nowhere else.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use reqwest::{Client, Url};
use serde::Deserialize;

use super::http;
use super::link_state::{LinkRefusal, LinkState};
use super::redaction::SecretRedactor;
use crate::api::tools::{ToolServer, is_tool_header};
use crate::clock::ClockReading;
use crate::link::socket::{MCP_FAILURE_HEADER, NO_ANSWER, NOT_SENT};
use crate::sensing::address::AddressPolicy;

/// Longest value of a header.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Headers of the protocol, all of which pass in both directions.
const PROTOCOL_PREFIX: &str = "mcp-";
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The tool servers of one Agent.
pub struct McpProxy {
    servers: BTreeMap<String, ProxiedServer>,
    /// Files with keys of providers, which may be there.
    keys: Vec<PathBuf>,
    contact: Arc<LinkState>,
}

struct ProxiedServer {
    /// The spec's field, for messages.
    field: String,
    /// What requests are sent with, or why none can be.
    target: Result<(Client, Url), String>,
    headers_dir: Option<PathBuf>,
}

/// The one field of a request that matters here. A text with two of them is refused: this reader and the server's might
/// not agree on which counts.
#[derive(Deserialize)]
struct RequestMethod {
    method: Option<String>,
}

impl McpProxy {
    /// The servers of a spec. Never fails: what is wrong with one is said with each request to it.
    pub fn new(
        servers: &[ToolServer],
        headers_dir: &Path,
        keys: Vec<PathBuf>,
        contact: Arc<LinkState>,
        policy: &Arc<AddressPolicy>,
    ) -> Self {
        let servers = servers.iter().map(|server| {
            let headers_dir = server
                .headers_secret_ref
                .as_ref()
                .map(|_| headers_dir.join(&server.name));
            (server.name.clone(), ProxiedServer::new(server, headers_dir, policy))
        });
        Self {
            servers: servers.collect(),
            keys,
            contact,
        }
    }

    /// Passes one request on. Ends the request when it is dropped.
    pub async fn forward(&self, server: &str, method: Method, headers: &HeaderMap, body: Bytes) -> Response {
        let Some(server) = self.servers.get(server) else {
            return not_sent(
                StatusCode::NOT_FOUND,
                "spec.tools.servers names no such server".to_owned(),
            );
        };
        if method == Method::POST
            && let Err(refusal) = self.check(&body)
        {
            return refusal;
        }
        server.forward(method, headers, body, || self.secret_redactor()).await
    }

    /// Every value of a secret that this gateway holds; one server may know what is for another.
    fn secret_redactor(&self) -> SecretRedactor {
        let dirs = self.servers.values().filter_map(|server| server.headers_dir.as_ref());
        let files = dirs
            .filter_map(|dir| std::fs::read_dir(dir).ok())
            .flat_map(|entries| entries.flatten().map(|entry| entry.path()));
        // What cannot be read, such as the kubelet's own directories, is sent nowhere either.
        let values = files
            .chain(self.keys.iter().cloned())
            .filter_map(|file| std::fs::read(file).ok());
        let values: Vec<Vec<u8>> = values.collect();
        SecretRedactor::from_values(values.iter().map(|value| value.trim_ascii()))
    }

    /// Whether this may be sent. The loop asks the same before; this holds whatever the loop does.
    #[expect(clippy::result_large_err, reason = "it is the answer")]
    fn check(&self, body: &[u8]) -> Result<(), Response> {
        let Ok(request) = serde_json::from_slice::<RequestMethod>(body) else {
            let message = "the request is not one JSON-RPC message".to_owned();
            return Err(not_sent(StatusCode::BAD_REQUEST, message));
        };
        if request.method.as_deref() != Some("tools/call") {
            return Ok(());
        }
        let message = match self.contact.refusal(ClockReading::now()) {
            None => return Ok(()),
            Some(LinkRefusal::NotAttached) => "the controller has not accepted this pod yet".to_owned(),
            Some(LinkRefusal::Stopped(failure) | LinkRefusal::LinkLost(failure)) => failure.message,
        };
        Err(not_sent(StatusCode::SERVICE_UNAVAILABLE, message))
    }
}

impl ProxiedServer {
    fn new(server: &ToolServer, headers_dir: Option<PathBuf>, policy: &Arc<AddressPolicy>) -> Self {
        let field = format!("spec.tools.servers[{}]", server.name);
        let url = Url::parse(&server.url).map_err(|error| format!("{field}.url is no address: {error}"));
        let target = url.and_then(|url| {
            let client = http::client(&url, policy)
                .map_err(|error| format!("no connection to {field}.url is possible: {error}"))?;
            Ok((client, url))
        });
        Self {
            field,
            target,
            headers_dir,
        }
    }

    async fn forward(
        &self,
        method: Method,
        headers: &HeaderMap,
        body: Bytes,
        masks: impl FnOnce() -> SecretRedactor,
    ) -> Response {
        let (client, url) = match &self.target {
            Ok(target) => target,
            Err(message) => return not_sent(StatusCode::BAD_GATEWAY, message.clone()),
        };
        let secret = match self.secret_headers() {
            Ok(secret) => secret,
            Err(message) => return not_sent(StatusCode::BAD_GATEWAY, message),
        };
        let sending = client
            .request(method, url.clone())
            .headers(passed(headers, &[ACCEPT, CONTENT_TYPE, LAST_EVENT_ID]))
            .headers(secret)
            .body(body)
            .send();
        match sending.await {
            Ok(answer) => {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = answer.status();
                *response.headers_mut() = passed(answer.headers(), &[CONTENT_TYPE, RETRY_AFTER]);
                let bytes = Box::pin(answer.bytes_stream());
                // Read after the answer, so that a value that was just changed is known.
                *response.body_mut() = Body::from_stream(masks().apply(bytes));
                response
            }
            Err(error) => {
                let cause = http::cause(&error);
                if error.is_connect() {
                    let message = format!("the server at {}.url cannot be reached: {cause}", self.field);
                    return not_sent(StatusCode::BAD_GATEWAY, message);
                }
                let message = format!("the server at {}.url broke the connection: {cause}", self.field);
                failed(StatusCode::BAD_GATEWAY, NO_ANSWER, message)
            }
        }
    }

    /// What the mounted Secret adds. Messages name its keys, never its values.
    fn secret_headers(&self) -> Result<HeaderMap, String> {
        let mut headers = HeaderMap::new();
        let Some(dir) = &self.headers_dir else {
            return Ok(headers);
        };
        let secret = format!("the Secret that {}.headersSecretRef names", self.field);
        let unreadable = |_| format!("{secret} cannot be read; it is mounted when it exists");
        for entry in std::fs::read_dir(dir).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let key = entry.file_name().to_string_lossy().into_owned();
            // The kubelet's own links and directories.
            if key.starts_with("..") {
                continue;
            }
            if !is_tool_header(&key) {
                return Err(format!(
                    "{secret} has the key {key}, which is no header that can be sent: remove it"
                ));
            }
            let value = std::fs::read(entry.path()).map_err(unreadable)?;
            let value = value.trim_ascii_end();
            let value = HeaderValue::from_bytes(value)
                .ok()
                .filter(|_| value.len() <= MAX_HEADER_BYTES);
            let (Ok(name), Some(mut value)) = (HeaderName::try_from(&key), value) else {
                return Err(format!(
                    "{secret} has under {key} more than one short line of text: correct the value"
                ));
            };
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        Ok(headers)
    }
}

/// The headers that pass: those named, and the protocol's own.
fn passed(headers: &HeaderMap, named: &[HeaderName]) -> HeaderMap {
    let passes = |name: &HeaderName| named.contains(name) || name.as_str().starts_with(PROTOCOL_PREFIX);
    let pairs = headers.iter().filter(|(name, _)| passes(name));
    pairs.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn not_sent(status: StatusCode, message: String) -> Response {
    failed(status, NOT_SENT, message)
}

fn failed(status: StatusCode, kind: &'static str, message: String) -> Response {
    (status, [(MCP_FAILURE_HEADER, kind)], message).into_response()
}
