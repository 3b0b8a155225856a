//! The client of the Model Context Protocol, as far as those who run tools share it: the worker, and polls of Sensors.
//!
//! Owns how requests travel and how failures and results are told. Decides nothing: neither what may run nor when.

mod error;
pub mod http;
pub mod text;

use std::sync::Arc;
use std::time::Duration;

use rmcp::ClientHandler;
use rmcp::model::{ClientCapabilities, ClientConfig, Implementation, PaginatedRequestParams, ProtocolVersion, Tool};
use rmcp::service::{ClientLifecycleMode, ClientServiceExt, Peer, RoleClient, RunningService};
use rmcp::transport::common::client_side_sse::ExponentialBackoff;
use rmcp::transport::streamable_http_client::{StreamableHttpClientTransport, StreamableHttpClientTransportConfig};
use tokio::time::timeout;

pub use self::error::McpRequestError;
use self::http::{McpHttpClient, McpTransport};

/// Longest time that connecting, or a page of the list, may take. Discovery alone waits 10 s for servers of the older
/// revision that do not answer it.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Most pages of a list that are read.
const MAX_PAGES: usize = 64;
/// Most tools of a list that are kept, and most bytes of them as JSON. The rest of a longer list is not read: a server must
/// not fill its client's memory.
const MAX_LISTED: (usize, usize) = (1024, 4 * 1024 * 1024);
/// Tries to open a broken stream of notifications again before the server counts as gone.
const STREAM_TRIES: usize = 3;

/// Who asks.
#[must_use]
pub fn own_config() -> ClientConfig {
    let own = Implementation::new("agentloop", env!("CARGO_PKG_VERSION"));
    ClientConfig::new(ClientCapabilities::default(), own)
}

/// A connection to the server at `uri`, of either generation of the protocol.
pub async fn connect<H: ClientHandler, W: McpTransport>(
    handler: H,
    http: McpHttpClient<W>,
    uri: String,
) -> Result<RunningService<RoleClient, H>, McpRequestError> {
    let mut config = StreamableHttpClientTransportConfig::with_uri(uri).reinit_on_expired_session(false);
    let mut retry = ExponentialBackoff::default();
    retry.max_times = Some(STREAM_TRIES);
    config.retry_config = Arc::new(retry);
    let transport = StreamableHttpClientTransport::with_client(http, config);
    let lifecycle = ClientLifecycleMode::Auto {
        preferred_versions: vec![ProtocolVersion::V_2026_07_28],
        legacy_version: Some(ProtocolVersion::V_2025_11_25),
    };
    let connected = handler.serve_with_lifecycle(transport, lifecycle).await;
    connected.map_err(|error| error::unconnected(&error))
}

/// The tools of a server, as far as they are within the bounds.
pub async fn tools(server: &Peer<RoleClient>) -> Result<Vec<Tool>, McpRequestError> {
    let mut tools = Vec::new();
    let mut bytes = 0_usize;
    let mut cursor = None;
    for _ in 0..MAX_PAGES {
        let params = PaginatedRequestParams::default().with_cursor(cursor);
        let page = timeout(PATIENCE, server.list_tools(Some(params)))
            .await
            .map_err(|_| McpRequestError::NoAnswer("it does not answer a question for its tools".into()))?
            .map_err(|error| McpRequestError::from_service_error(&error))?;
        for tool in page.tools {
            bytes = bytes.saturating_add(serde_json::to_vec(&tool).map_or(0, |json| json.len()));
            if tools.len() >= MAX_LISTED.0 || bytes > MAX_LISTED.1 {
                tracing::warn!(
                    tools = tools.len(),
                    "a tool server lists too much; the rest is not read"
                );
                return Ok(tools);
            }
            tools.push(tool);
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            return Ok(tools);
        }
    }
    Err(McpRequestError::NoAnswer(format!(
        "its list of tools has more than {MAX_PAGES} pages"
    )))
}
