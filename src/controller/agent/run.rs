//! Streams in, reconciles out: wires watches, queue and shutdown.

use std::sync::Arc;

use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::context::{Clock, Observer, Settings};
use crate::controller::loops::{AgentKey, Loops};

/// All that the reconciler is made of.
pub struct Parts {
    /// Speaks to the API server.
    pub client: Client,
    /// What the chart decides.
    pub settings: Settings,
    /// The live loops, shared with the link server.
    pub loops: Arc<Loops>,
    /// Agents whose pods said something new; the other end of [`Loops::new`].
    pub changed: mpsc::UnboundedReceiver<AgentKey>,
    /// The CA bundle (PEM) that pods must trust; published in every namespace with Agents.
    pub ca_bundle: watch::Receiver<String>,
    /// Is told of each reconcile.
    pub observer: Arc<dyn Observer>,
    /// The time.
    pub clock: Clock,
    /// Name of this process in Events: the pod's name.
    pub instance: String,
    /// Ends the run; reconciles under way may finish within 10 s.
    pub shutdown: CancellationToken,
}

/// Reconciles Agents until `shutdown`. Only the leader may run this, once per process.
pub async fn run(parts: Parts) {
    parts.shutdown.cancelled().await;
}
