//! The client of the Model Context Protocol, as shared by the worker and the polls of Sensors.
//!
//! Owns how requests are sent, and how failures and results are reported. Does not decide what runs, or when.

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

/// The longest time for connecting, or for a page of the list. Discovery alone waits 10 s for servers of the older
/// revision that do not answer it.
pub const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of pages of a list that are read.
const MAX_PAGES: usize = 64;
/// Maximum number of tools of a list that are kept, and maximum size of them as JSON in bytes. The rest of a longer
/// list is not read: a server must not fill its client's memory.
const MAX_LISTED: (usize, usize) = (1024, 4 * 1024 * 1024);
/// Attempts to reopen a broken stream of notifications before the server counts as gone.
const STREAM_TRIES: usize = 3;

/// The client, as introduced to servers.
#[must_use]
pub fn own_config() -> ClientConfig {
    let own = Implementation::new("agentloop", env!("CARGO_PKG_VERSION"));
    ClientConfig::new(ClientCapabilities::default(), own)
}

/// Connects to the server at `uri`, of either generation of the protocol.
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

/// The tools of a server, up to the bounds.
pub async fn tools(server: &Peer<RoleClient>) -> Result<Vec<Tool>, McpRequestError> {
    let mut tools = Vec::new();
    let mut bytes = 0_usize;
    let mut cursor = None;
    for _ in 0..MAX_PAGES {
        let params = PaginatedRequestParams::default().with_cursor(cursor);
        let page = timeout(DISCOVERY_TIMEOUT, server.list_tools(Some(params)))
            .await
            .map_err(|_| McpRequestError::NoAnswer("it does not answer tools/list".into()))?
            .map_err(|error| McpRequestError::from_service_error(&error))?;
        if !keep(page.tools, &mut tools, &mut bytes) {
            tracing::warn!(
                tools = tools.len(),
                "a tool server lists too much; the rest is not read"
            );
            return Ok(tools);
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

/// Adds a page to the tools of a list, which have `bytes` bytes so far. False: the rest of the list is beyond the bounds.
fn keep(page: Vec<Tool>, tools: &mut Vec<Tool>, bytes: &mut usize) -> bool {
    for tool in page {
        *bytes = bytes.saturating_add(serde_json::to_vec(&tool).map_or(0, |json| json.len()));
        if tools.len() >= MAX_LISTED.0 || *bytes > MAX_LISTED.1 {
            return false;
        }
        tools.push(tool);
    }
    true
}

#[cfg(test)]
mod tests {
    use rmcp::model::JsonObject;

    use super::*;

    fn tool(name: usize, description: usize) -> Tool {
        Tool::new(format!("{name:04}"), "x".repeat(description), JsonObject::new())
    }

    /// How many tools of these pages are kept, and whether all were.
    fn kept(pages: Vec<Vec<Tool>>) -> (usize, bool) {
        let (mut tools, mut bytes) = (Vec::new(), 0);
        let all = pages.into_iter().all(|page| keep(page, &mut tools, &mut bytes));
        (tools.len(), all)
    }

    #[test]
    fn a_list_is_kept_up_to_its_most_tools_over_all_its_pages() {
        let pages = |count: usize| {
            vec![
                (0..600).map(|name| tool(name, 1)).collect(),
                (600..count).map(|name| tool(name, 1)).collect(),
            ]
        };
        assert_eq!(kept(pages(MAX_LISTED.0 - 1)), (MAX_LISTED.0 - 1, true));
        assert_eq!(kept(pages(MAX_LISTED.0)), (MAX_LISTED.0, true));
        assert_eq!(kept(pages(MAX_LISTED.0 + 1)), (MAX_LISTED.0, false));
    }

    #[test]
    fn a_list_is_kept_up_to_its_most_bytes() {
        let frame = serde_json::to_vec(&tool(0, 0)).unwrap().len();
        let quarter = MAX_LISTED.1 / 4 - frame;
        let four = |last: usize| {
            (0..4)
                .map(|name| tool(name, if name == 3 { last } else { quarter }))
                .collect()
        };
        assert_eq!(kept(vec![four(quarter)]), (4, true));
        assert_eq!(kept(vec![four(quarter + 1)]), (3, false));
    }
}
