//! Tasks that users request of this loop: polls the gateway for them and sends the receipts.
//!
//! Keeps nothing: a lost task is requested again, and one with a known id has no further effect. Does not decide what tasks
//! do.

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::task::JoinSet;

use super::gateway_client::GatewayClient;
use crate::link::task_requests::{RequestedTask, TaskAck};

/// Receives requested tasks for the loop and sends their receipts.
pub struct TaskPoller {
    gateway: GatewayClient,
    /// The poll in flight. Kept across calls of [`Self::next`], so that a cancelled wait does not lose a task.
    next: BoxFuture<'static, RequestedTask>,
    receipts: JoinSet<()>,
}

impl TaskPoller {
    /// A poller whose first poll begins at the first call of [`Self::next`].
    #[must_use]
    pub fn new(gateway: &GatewayClient) -> Self {
        Self {
            gateway: gateway.clone(),
            next: request_next(gateway),
            receipts: JoinSet::new(),
        }
    }

    /// Waits for the next task. May be cancelled without losing one.
    pub async fn next(&mut self) -> RequestedTask {
        let task = (&mut self.next).await;
        self.next = request_next(&self.gateway);
        task
    }

    /// Sends a receipt, once and in the background. If it is lost, the client repeats its request.
    pub fn acknowledge(&mut self, ack: TaskAck) {
        while self.receipts.try_join_next().is_some() {}
        let gateway = self.gateway.clone();
        self.receipts.spawn(async move {
            if let Err(detail) = gateway.acknowledge_task(&ack).await {
                tracing::debug!(detail, "failed to send the receipt of a task");
            }
        });
    }
}

fn request_next(gateway: &GatewayClient) -> BoxFuture<'static, RequestedTask> {
    let gateway = gateway.clone();
    async move { gateway.next_task().await }.boxed()
}
