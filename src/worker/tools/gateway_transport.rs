//! The transport to tool servers through the gateway's socket. A header distinguishes failures of the gateway from
//! answers of servers.

use std::path::Path;

use reqwest::{Client, RequestBuilder, Response};

use crate::link::socket::{MCP_FAILURE_HEADER, NOT_SENT};
use crate::mcp::http::{McpTransport, McpTransportError, words};

/// Creates a client of the gateway's socket at `path`, for all servers.
pub(super) fn client(path: &Path) -> reqwest::Result<Client> {
    Client::builder()
        .unix_socket(path)
        .no_proxy()
        // The socket does not use TLS, so no roots are loaded.
        .tls_certs_only([])
        // The gateway pools the connections to servers; connections to the socket are cheap.
        .pool_max_idle_per_host(0)
        .build()
}

#[derive(Clone)]
pub(super) struct GatewayTransport;

impl McpTransport for GatewayTransport {
    fn prepare(&self, request: RequestBuilder) -> Result<RequestBuilder, McpTransportError> {
        Ok(request)
    }

    fn unanswered(&self, error: &reqwest::Error) -> McpTransportError {
        let away = "the pod's gateway is unreachable".to_owned();
        if error.is_connect() {
            McpTransportError::NotSent(away)
        } else {
            McpTransportError::NoAnswer(away)
        }
    }

    async fn judge(&self, response: Response) -> Result<Response, McpTransportError> {
        let Some(kind) = response.headers().get(MCP_FAILURE_HEADER) else {
            return Ok(response);
        };
        let is_unsent = kind == NOT_SENT;
        let words = words(response).await;
        Err(if is_unsent {
            McpTransportError::NotSent(words)
        } else {
            McpTransportError::NoAnswer(words)
        })
    }
}
