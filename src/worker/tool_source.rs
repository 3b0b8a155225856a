//! Where tools come from, as the driver sees it: what is offered, and runs.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::engine::tool::{ToolOutcome, ToolRun, ToolSpec};

/// Longest wait for the sources of tools before the loop starts: an answer that was kept over a restart may ask for them
/// at once, and a first turn without them is none.
const PATIENCE: Duration = Duration::from_secs(5);

/// A source of tools. It holds no rule about when a tool may run: the engine's gate has, before a run comes here.
pub trait ToolSource: Send + Sync {
    /// What is offered now, in the order of the prompt.
    fn offered(&self) -> watch::Receiver<Arc<[ToolSpec]>>;

    /// Ends once every part of the source has said what it offers; never, while one is silent.
    fn complete(&self) -> BoxFuture<'static, ()>;

    /// One run, within `limit`. Dropping it cuts the run.
    fn run(&self, run: ToolRun, limit: Duration) -> BoxFuture<'static, ToolOutcome>;
}

/// Waits a while for the sources of tools. False: the process is to end.
pub(super) async fn meet(tools: Option<Arc<dyn ToolSource>>, terminate: &CancellationToken) -> bool {
    let Some(tools) = tools else {
        return true;
    };
    tokio::select! {
        met = timeout(PATIENCE, tools.complete()) => {
            if met.is_err() {
                tracing::warn!("the loop starts without all of its tools: a source has not answered yet");
            }
            true
        }
        () = terminate.cancelled() => false,
    }
}
