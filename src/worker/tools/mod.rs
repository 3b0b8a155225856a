//! The tools of the spec's servers: which are offered, and running them.
//!
//! Owns the connections to MCP servers, through the gateway's socket: the worker has no network identity and no secret.
//! Does not decide whether a tool may run: the engine's admission did before it requests a run.

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
use super::tool_source::{FinishedToolRun, ListedTools, ToolSource};
use crate::api;
use crate::api::tools::{ServerEndpoint, ToolServer};
use crate::engine::tool::{ToolOutcome, ToolRun, ToolSpec};
use crate::worker::artifacts::{self, ArtifactStore};

pub use self::server::IDEMPOTENCY_META;

/// All tools of a spec. Its connections close when it is dropped.
pub struct McpTools {
    servers: Vec<Arc<ToolServerClient>>,
    artifacts: Arc<ArtifactStore>,
    offered: watch::Receiver<ListedTools>,
    _tasks: JoinSet<()>,
}

impl McpTools {
    /// Starts connecting the servers of a spec through the gateway's socket. Results are stored in `artifacts`. Fails only
    /// if the HTTP client cannot be created.
    pub fn new(spec: &api::tools::ToolsSpec, socket: &Path, artifacts: Arc<ArtifactStore>) -> reqwest::Result<Self> {
        let http = gateway_transport::client(socket)?;
        let access = Arc::new(AccessRules::new(spec));
        let specs = spec.all_servers();
        // The toolbox reads what may come from anywhere.
        let is_trusted = |server: &ToolServer| server.trusted && server.endpoint() != ServerEndpoint::Toolbox;
        let read_tool = artifacts::read_tool(specs.iter().all(is_trusted));
        let client = |server| {
            let (access, artifacts) = (Arc::clone(&access), Arc::clone(&artifacts));
            Arc::new(ToolServerClient::new(server, access, artifacts, http.clone()))
        };
        let servers: Vec<_> = specs.into_iter().map(client).collect();
        let (sender, offered) = watch::channel(offer(&servers, &read_tool));
        let mut tasks = JoinSet::new();
        for server in &servers {
            let server = Arc::clone(server);
            tasks.spawn(async move { server.stay_connected().await });
        }
        tasks.spawn(merge(servers.clone(), read_tool, sender));
        Ok(Self {
            servers,
            artifacts,
            offered,
            _tasks: tasks,
        })
    }

    /// Returns the offered tools, in the order of the spec: those of each server that has ever answered, and the one that
    /// reads artifacts. The tools of a server that is down stay offered.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<ListedTools> {
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
        if run.name == artifacts::READ_TOOL {
            return artifacts::run_read_tool(&self.artifacts, run).await.into();
        }
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
    fn offered(&self) -> watch::Receiver<ListedTools> {
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
async fn merge(servers: Vec<Arc<ToolServerClient>>, read_tool: ToolSpec, offered: watch::Sender<ListedTools>) {
    let lists: Vec<_> = servers.iter().map(|server| server.catalog()).collect();
    let mut changes = futures::stream::select_all(lists.into_iter().map(WatchStream::new));
    while changes.next().await.is_some() {
        let now = offer(&servers, &read_tool);
        offered.send_if_modified(|before| {
            let is_new = *before != now;
            *before = now;
            is_new
        });
    }
}

/// Merges the lists of all servers, and adds the tool that reads artifacts. Logs a warning for tools beyond the limits.
fn offer(servers: &[Arc<ToolServerClient>], read_tool: &ToolSpec) -> ListedTools {
    let lists: Vec<_> = servers.iter().map(|server| server.catalog().borrow().clone()).collect();
    let (mut specs, left_out) = catalog::bounded(lists.iter().flatten().map(Arc::as_ref));
    if left_out > 0 {
        tracing::warn!(
            offered = specs.len(),
            left_out,
            "the tool servers offer more tools than a prompt may have; list the required ones in spec.tools.servers[].only"
        );
    }
    // Also while no server has answered: the conversation of a loop that resumes may name artifacts.
    specs.push(read_tool.clone());
    let silent = servers.iter().zip(&lists).filter(|(_, list)| list.is_none());
    ListedTools {
        specs: specs.into(),
        silent: silent.map(|(server, _)| server.name().to_owned()).collect(),
    }
}
