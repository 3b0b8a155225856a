//! Proxy to the tool servers of the spec: adds their configured headers, redacts secrets from their answers, and does
//! nothing else.
//!
//! Of the protocol it knows only which request runs a tool: that request is not sent once this pod may no longer act.
//! Answers are passed on as they arrive, except for secret values. Header values are read for each request and used
//! only in it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use reqwest::Url;
use serde::Deserialize;

use super::headers_secret::HeadersSecret;
use super::http::{self, MountedRoots, ServerClient};
use super::link_state::{LinkRefusal, LinkState};
use super::redaction::SecretRedactor;
use crate::api::server_tls::tool_server_ca;
use crate::api::toolbox::DEFAULT_MCP_PATH;
use crate::api::tools::{ServerEndpoint, ToolServer};
use crate::egress::AddressPolicy;
use crate::link::pod::TOOL_SOCKET_FILE;
use crate::link::socket::{MCP_FAILURE_HEADER, NO_ANSWER, NOT_SENT};
use crate::support::clock::ClockReading;

/// Prefix of the protocol's headers, which pass in both directions.
const PROTOCOL_PREFIX: &str = "mcp-";
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Directories with files of servers, one directory per server.
#[derive(Clone, Debug)]
pub struct ServerDirs {
    /// Headers from Secrets.
    pub headers: PathBuf,
    /// Sockets of containers of the pod.
    pub sockets: PathBuf,
    /// Certificates of `tls.caSecretRef`, of models and of the receiver of responses too.
    pub ca: PathBuf,
}

/// The [`ToolServer`]s of one Agent.
pub struct McpProxy {
    servers: BTreeMap<String, ProxiedServer>,
    /// Files with provider keys, which may exist.
    keys: Vec<PathBuf>,
    contact: Arc<LinkState>,
}

struct ProxiedServer {
    /// The field of the spec, for messages.
    field: String,
    /// The client and URL to use, or why there is none.
    target: Result<(ServerClient, Url), String>,
    /// For messages: the path of the server's other fields.
    path: String,
    headers: Option<HeadersSecret>,
}

/// The only field of a request that matters here. JSON with the field twice is rejected: this parser and the server's
/// might disagree on which one counts.
#[derive(Deserialize)]
struct RequestMethod {
    method: Option<String>,
}

impl McpProxy {
    /// The servers of a spec. Never fails: an invalid server is reported for each request to it.
    pub fn new(
        servers: &[ToolServer],
        dirs: &ServerDirs,
        keys: Vec<PathBuf>,
        contact: Arc<LinkState>,
        policy: &Arc<AddressPolicy>,
    ) -> Self {
        let servers = servers.iter().map(|server| {
            let proxied = ProxiedServer::new(server, dirs, policy);
            (server.name.clone(), proxied)
        });
        Self {
            servers: servers.collect(),
            keys,
            contact,
        }
    }

    /// Forwards one request. Dropping the future cancels the request.
    pub async fn forward(&self, server: &str, method: Method, headers: &HeaderMap, body: Bytes) -> Response {
        let Some(server) = self.servers.get(server) else {
            return not_sent(
                StatusCode::NOT_FOUND,
                "spec.tools.servers has no server of this name".to_owned(),
            );
        };
        if method == Method::POST
            && let Err(refusal) = self.check(&body)
        {
            return refusal;
        }
        server.forward(method, headers, body, || self.secret_redactor()).await
    }

    /// All secret values that this gateway holds: one server may know a value that is meant for another.
    fn secret_redactor(&self) -> SecretRedactor {
        let dirs = self
            .servers
            .values()
            .filter_map(|server| Some(&server.headers.as_ref()?.dir));
        let files = dirs
            .filter_map(|dir| std::fs::read_dir(dir).ok())
            .flat_map(|entries| entries.flatten().map(|entry| entry.path()));
        // Entries that cannot be read, such as the kubelet's own directories, are never sent either.
        let values = files
            .chain(self.keys.iter().cloned())
            .filter_map(|file| std::fs::read(file).ok());
        let values: Vec<Vec<u8>> = values.collect();
        SecretRedactor::from_values(values.iter().map(|value| value.trim_ascii()))
    }

    /// Whether the request may be sent. The loop checks the same first; this check holds whatever the loop does.
    #[expect(clippy::result_large_err, reason = "the error is the response")]
    fn check(&self, body: &[u8]) -> Result<(), Response> {
        let Ok(request) = serde_json::from_slice::<RequestMethod>(body) else {
            let message = "the request is not a single JSON-RPC message".to_owned();
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
    fn new(server: &ToolServer, dirs: &ServerDirs, policy: &Arc<AddressPolicy>) -> Self {
        let name = &server.name;
        let field = match server.endpoint() {
            ServerEndpoint::Toolbox => "spec.tools.toolbox".to_owned(),
            ServerEndpoint::Bridge | ServerEndpoint::Port(..) => format!("spec.tools.servers[{name}].container"),
            ServerEndpoint::Url(_) => format!("spec.tools.servers[{name}].url"),
        };
        let path = format!("spec.tools.servers[{name}]");
        let target = target(server, &path, dirs, policy).map_err(|error| format!("cannot connect to {field}: {error}"));
        let headers = server.headers_secret_ref.as_ref().map(|_| HeadersSecret {
            dir: dirs.headers.join(name),
            field: format!("{path}.headersSecretRef"),
        });
        Self {
            field,
            target,
            path,
            headers,
        }
    }

    async fn forward(
        &self,
        method: Method,
        headers: &HeaderMap,
        body: Bytes,
        redactor: impl FnOnce() -> SecretRedactor,
    ) -> Response {
        let (client, url) = match &self.target {
            Ok(target) => target,
            Err(message) => return not_sent(StatusCode::BAD_GATEWAY, message.clone()),
        };
        let secret = match self
            .headers
            .as_ref()
            .map_or_else(|| Ok(HeaderMap::new()), HeadersSecret::read)
        {
            Ok(secret) => secret,
            Err(message) => return not_sent(StatusCode::BAD_GATEWAY, message),
        };
        let client = match client.get() {
            Ok(client) => client,
            Err(error) => return not_sent(StatusCode::BAD_GATEWAY, self.unreachable(&error)),
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
                // Secrets are read after the answer arrived, so that a value rotated meanwhile is redacted too.
                *response.body_mut() = Body::from_stream(redactor().apply(bytes));
                response
            }
            Err(error) => {
                let cause = http::cause(&error);
                if error.is_connect() {
                    return not_sent(StatusCode::BAD_GATEWAY, self.unreachable(&cause));
                }
                let message = format!("the server at {} closed the connection: {cause}", self.field);
                failed(StatusCode::BAD_GATEWAY, NO_ANSWER, message)
            }
        }
    }

    fn unreachable(&self, cause: &str) -> String {
        let advice = http::tls_advice(cause, &self.path);
        format!("the server at {} cannot be reached: {cause}{advice}", self.field)
    }
}

/// The client and the URL of a server. The address policy is for URLs: it closes loopback, where other containers listen.
fn target(
    server: &ToolServer,
    path: &str,
    dirs: &ServerDirs,
    policy: &Arc<AddressPolicy>,
) -> Result<(ServerClient, Url), String> {
    let parse = |url: &str| Url::parse(url).map_err(|error| format!("the URL is not valid: {error}"));
    Ok(match server.endpoint() {
        ServerEndpoint::Url(url) => {
            let url = parse(url)?;
            let roots = server.tls.as_ref().map(|_| {
                let dir = dirs.ca.join(tool_server_ca(&server.name));
                MountedRoots::new(&dir, path)
            });
            (ServerClient::new(&url, policy, roots)?, url)
        }
        ServerEndpoint::Port(port, path) => (
            http::pod_client(None)?.into(),
            parse(&format!("http://127.0.0.1:{port}{path}"))?,
        ),
        ServerEndpoint::Toolbox | ServerEndpoint::Bridge => {
            let socket = dirs.sockets.join(&server.name).join(TOOL_SOCKET_FILE);
            let url = format!("http://{}{DEFAULT_MCP_PATH}", server.name);
            (http::pod_client(Some(socket))?.into(), parse(&url)?)
        }
    })
}

/// The headers that pass the proxy: the named ones and those of the protocol.
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
