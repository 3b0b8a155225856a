//! The tools of the spec's servers: which are offered, and running them.
//!
//! Owns the connections to MCP servers, through the gateway's socket: the worker has no network identity and no secret.
//! Does not decide whether a tool may run: the engine's gate did before it requests a run.

mod catalog;
mod gateway_transport;
mod name;
mod result;
mod server;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::WatchStream;

use self::catalog::AccessRules;
use self::server::ToolServerClient;
use super::tool_source::{FinishedToolRun, ToolOffer, ToolSource};
use crate::api;
use crate::engine::tool::{ToolOutcome, ToolRun};

pub use self::server::IDEMPOTENCY_META;

/// All tools of a spec. Its connections close when it is dropped.
pub struct McpTools {
    servers: Vec<Arc<ToolServerClient>>,
    offered: watch::Receiver<ToolOffer>,
    _tasks: JoinSet<()>,
}

impl McpTools {
    /// Starts connecting the servers of a spec through the gateway's socket. Fails only if the HTTP client cannot be
    /// created.
    pub fn new(spec: &api::tools::ToolsSpec, socket: &Path) -> reqwest::Result<Self> {
        let http = gateway_transport::client(socket)?;
        let access = Arc::new(AccessRules::new(spec));
        let servers = spec.all_servers().into_iter();
        let servers: Vec<_> = servers
            .map(|server| Arc::new(ToolServerClient::new(server, Arc::clone(&access), http.clone())))
            .collect();
        let (sender, offered) = watch::channel(offer(&servers));
        let mut tasks = JoinSet::new();
        for server in &servers {
            let server = Arc::clone(server);
            tasks.spawn(async move { server.stay_connected().await });
        }
        tasks.spawn(merge(servers.clone(), sender));
        Ok(Self {
            servers,
            offered,
            _tasks: tasks,
        })
    }

    /// Returns the offered tools, in the order of the spec: those of each server that has ever answered. Empty at
    /// first. The tools of a server that is down stay offered.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<ToolOffer> {
        self.offered.clone()
    }

    /// Waits until each server has answered once: forever, while one is unreachable.
    pub async fn complete(&self) {
        let mut offered = self.offered.clone();
        // Cannot fail: the sender lives in a task of `self`.
        let _ = offered.wait_for(|offer| offer.silent.is_empty()).await;
    }

    /// Runs a tool, within `limit`. Never panics. Dropping the future cancels the call at the server.
    pub async fn run(&self, run: ToolRun, limit: Duration) -> FinishedToolRun {
        let deadline = Instant::now() + limit;
        let wanted = name::server(&run.name);
        match self.servers.iter().find(|server| Some(server.name()) == wanted) {
            Some(server) => server.run(run, deadline).await,
            None => ToolOutcome::Unavailable {
                message: "the spec no longer names the server of this tool".into(),
            }
            .into(),
        }
    }
}

impl ToolSource for Arc<McpTools> {
    fn offered(&self) -> watch::Receiver<ToolOffer> {
        self.watch()
    }

    fn complete(&self) -> BoxFuture<'static, ()> {
        let tools = Arc::clone(self);
        async move { McpTools::complete(&tools).await }.boxed()
    }

    fn run(&self, run: ToolRun, limit: Duration) -> BoxFuture<'static, FinishedToolRun> {
        let tools = Arc::clone(self);
        async move { McpTools::run(&tools, run, limit).await }.boxed()
    }
}

/// Merges the lists of all servers whenever one changes.
async fn merge(servers: Vec<Arc<ToolServerClient>>, offered: watch::Sender<ToolOffer>) {
    let lists: Vec<_> = servers.iter().map(|server| server.catalog()).collect();
    let mut changes = futures::stream::select_all(lists.into_iter().map(WatchStream::new));
    while changes.next().await.is_some() {
        let now = offer(&servers);
        offered.send_if_modified(|before| {
            let is_new = *before != now;
            *before = now;
            is_new
        });
    }
}

/// Merges the lists of all servers. Logs a warning for tools beyond the limits.
fn offer(servers: &[Arc<ToolServerClient>]) -> ToolOffer {
    let lists: Vec<_> = servers.iter().map(|server| server.catalog().borrow().clone()).collect();
    let (specs, left_out) = catalog::bounded(lists.iter().flatten().map(Arc::as_ref));
    if left_out > 0 {
        tracing::warn!(
            offered = specs.len(),
            left_out,
            "the tool servers offer more tools than a prompt may have; list the required ones in spec.tools.servers[].only"
        );
    }
    let silent = servers.iter().zip(&lists).filter(|(_, list)| list.is_none());
    ToolOffer {
        specs: specs.into(),
        silent: silent.map(|(server, _)| server.name().to_owned()).collect(),
    }
}
