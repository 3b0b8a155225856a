//! Where tools come from, as the driver sees it: what is offered, and runs.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::watch;

use crate::engine::tool::{ToolOutcome, ToolRun, ToolSpec};

/// A source of tools. It holds no rule about when a tool may run: the engine's gate has, before a run comes here.
pub trait ToolSource: Send + Sync {
    /// What is offered now, in the order of the prompt.
    fn offered(&self) -> watch::Receiver<Arc<[ToolSpec]>>;

    /// Ends once every part of the source has said what it offers; never, while one is silent.
    fn complete(&self) -> BoxFuture<'static, ()>;

    /// One run, within `limit`. Dropping it cuts the run.
    fn run(&self, run: ToolRun, limit: Duration) -> BoxFuture<'static, ToolOutcome>;
}
