//! The way to tool servers through the gateway's socket, whose own words are told from those of servers by a header.

use std::path::Path;

use reqwest::{Client, RequestBuilder, Response};

use crate::link::socket::{MCP_FAILURE_HEADER, NOT_SENT};
use crate::mcp::http::{Trouble, Way, words};

/// A client of the gateway's socket at `path`, for all servers.
pub(super) fn client(path: &Path) -> reqwest::Result<Client> {
    Client::builder()
        .unix_socket(path)
        .no_proxy()
        // There is no TLS on this socket, so no roots are loaded.
        .tls_certs_only([])
        // The gateway keeps the connections that are worth keeping.
        .pool_max_idle_per_host(0)
        .build()
}

/// Through the gateway.
#[derive(Clone)]
pub(super) struct Gateway;

impl Way for Gateway {
    fn prepare(&self, request: RequestBuilder) -> Result<RequestBuilder, Trouble> {
        Ok(request)
    }

    fn unanswered(&self, error: &reqwest::Error) -> Trouble {
        let away = "the pod's gateway is away".to_owned();
        if error.is_connect() {
            Trouble::NotSent(away)
        } else {
            Trouble::NoAnswer(away)
        }
    }

    async fn judge(&self, response: Response) -> Result<Response, Trouble> {
        let Some(kind) = response.headers().get(MCP_FAILURE_HEADER) else {
            return Ok(response);
        };
        let is_unsent = kind == NOT_SENT;
        let words = words(response).await;
        Err(if is_unsent {
            Trouble::NotSent(words)
        } else {
            Trouble::NoAnswer(words)
        })
    }
}
