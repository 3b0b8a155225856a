//! What the gateway has for this loop at any time: deliveries of sensor pods, and tasks that users request. Polls for it, and
//! acknowledges what is on disk.
//!
//! Keeps nothing: what is lost is sent again, and what the loop already has, it skips. Does not decide what events or tasks
//! do.

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::task::JoinSet;

use super::gateway_client::GatewayClient;
use crate::link::deliveries::{Delivery, DeliveryAck};
use crate::link::task_requests::{RequestedTask, TaskAck};

/// Polls for items of one kind, one after another.
pub struct LongPoller<T> {
    poll: Box<dyn Fn() -> BoxFuture<'static, T> + Send>,
    /// The poll in flight. Kept across calls of [`Self::next`], so that a cancelled wait does not lose an item.
    next: BoxFuture<'static, T>,
    acknowledgements: JoinSet<()>,
}

impl<T> LongPoller<T> {
    fn new(poll: impl Fn() -> BoxFuture<'static, T> + Send + 'static) -> Self {
        Self {
            next: poll(),
            poll: Box::new(poll),
            acknowledgements: JoinSet::new(),
        }
    }

    /// Waits for the next item.
    pub async fn next(&mut self) -> T {
        let item = (&mut self.next).await;
        self.next = (self.poll)();
        item
    }

    /// Sends an acknowledgement, once and in the background. `lost`: what is logged if it fails.
    fn send(&mut self, ack: impl Future<Output = Result<(), String>> + Send + 'static, lost: &'static str) {
        while self.acknowledgements.try_join_next().is_some() {}
        self.acknowledgements.spawn(async move {
            if let Err(detail) = ack.await {
                tracing::debug!(detail, "{lost}");
            }
        });
    }
}

impl LongPoller<Delivery> {
    /// Polls for deliveries of sensor pods.
    #[must_use]
    pub fn of_deliveries(gateway: &GatewayClient) -> Self {
        let gateway = gateway.clone();
        Self::new(move || {
            let gateway = gateway.clone();
            async move { gateway.next_delivery().await }.boxed()
        })
    }

    /// Acknowledges events that are on disk. If the acknowledgement is lost, the events are redelivered and acknowledged
    /// again.
    pub fn report_delivered(&mut self, gateway: &GatewayClient, ack: DeliveryAck) {
        let gateway = gateway.clone();
        self.send(
            async move { gateway.delivered(&ack).await },
            "failed to acknowledge events of a Sensor; they will be redelivered",
        );
    }
}

impl LongPoller<RequestedTask> {
    /// Polls for tasks that users request.
    #[must_use]
    pub fn of_tasks(gateway: &GatewayClient) -> Self {
        let gateway = gateway.clone();
        Self::new(move || {
            let gateway = gateway.clone();
            async move { gateway.next_task().await }.boxed()
        })
    }

    /// Sends a receipt. If it is lost, the client repeats its request.
    pub fn acknowledge(&mut self, gateway: &GatewayClient, ack: TaskAck) {
        let gateway = gateway.clone();
        self.send(
            async move { gateway.acknowledge_task(&ack).await },
            "failed to send the receipt of a task",
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{Mutex, mpsc};

    use super::*;

    #[tokio::test]
    async fn a_cancelled_wait_loses_no_item() {
        let (items, received) = mpsc::channel(2);
        let received = Arc::new(Mutex::new(received));
        let mut poller = LongPoller::new(move || {
            let received = Arc::clone(&received);
            // The item is taken at once, and handed over later.
            async move {
                let item = received.lock().await.recv().await.unwrap();
                tokio::task::yield_now().await;
                item
            }
            .boxed()
        });
        items.send(1).await.unwrap();
        items.send(2).await.unwrap();
        assert_eq!(poller.next().now_or_never(), None);
        assert_eq!(poller.next().await, 1);
        assert_eq!(poller.next().await, 2);
    }

    #[tokio::test]
    async fn acknowledgements_are_sent_in_the_background() {
        let mut poller = LongPoller::new(|| std::future::pending::<()>().boxed());
        let (sender, mut sent) = mpsc::channel(2);
        for number in 1..=2 {
            let sender = sender.clone();
            let ack = async move {
                sender.send(number).await.unwrap();
                Err("lost".to_owned())
            };
            poller.send(ack, "failed");
        }
        assert_eq!((sent.recv().await, sent.recv().await), (Some(1), Some(2)));
    }
}
