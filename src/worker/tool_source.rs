//! Where tools come from, as the driver sees it: what is offered, and runs.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::engine::tool::{ToolOutcome, ToolRun, ToolSpec};

/// Longest wait for the sources of tools before a loop's first turn: a node that starts brings tool servers and agents up
/// together, and a model that has no tools yet concludes that there is nothing to do.
pub(super) const FIRST_PATIENCE: Duration = Duration::from_mins(1);
/// The same before a loop goes on. It knows what it had, and is told which servers have not answered.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// What a source of tools offers.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolOffer {
    /// The tools, in the order of the prompt.
    pub specs: Arc<[ToolSpec]>,
    /// Servers that have not answered yet, by name: what they offer is not known.
    pub silent: Vec<String>,
}

/// A source of tools. It holds no rule about when a tool may run: the engine's gate has, before a run comes here.
pub trait ToolSource: Send + Sync {
    /// What is offered now.
    fn offered(&self) -> watch::Receiver<ToolOffer>;

    /// Ends once every part of the source has said what it offers; never, while one is silent.
    fn complete(&self) -> BoxFuture<'static, ()>;

    /// One run, within `limit`. Dropping it cuts the run.
    fn run(&self, run: ToolRun, limit: Duration) -> BoxFuture<'static, ToolOutcome>;
}

/// Waits a while for the sources of tools. False: the process is to end.
pub(super) async fn wait_for_tools(
    tools: Option<Arc<dyn ToolSource>>,
    patience: Duration,
    terminate: &CancellationToken,
) -> bool {
    let Some(tools) = tools else {
        return true;
    };
    tokio::select! {
        met = timeout(patience, tools.complete()) => {
            if met.is_err() {
                tracing::warn!("the loop starts without all of its tools: a source has not answered yet");
            }
            true
        }
        () = terminate.cancelled() => false,
    }
}
