//! Deliveries of sensor pods to this loop: polls the gateway for them and acknowledges those that are on disk.
//!
//! Keeps nothing: a lost delivery is redelivered, and the loop skips events that it already has. Does not decide what
//! events do.

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::task::JoinSet;

use super::gateway_client::GatewayClient;
use crate::link::deliveries::{Delivery, DeliveryAck};

/// Receives deliveries for the loop and acknowledges them.
pub struct DeliveryPoller {
    gateway: GatewayClient,
    /// The poll in flight. Kept across calls of [`Self::next`], so that a cancelled wait does not lose a delivery.
    next: BoxFuture<'static, Delivery>,
    words: JoinSet<()>,
}

impl DeliveryPoller {
    /// A poller whose first poll begins at the first call of [`Self::next`].
    #[must_use]
    pub fn new(gateway: &GatewayClient) -> Self {
        Self {
            gateway: gateway.clone(),
            next: request_next(gateway),
            words: JoinSet::new(),
        }
    }

    /// Waits for the next delivery. May be cancelled without losing one.
    pub async fn next(&mut self) -> Delivery {
        let delivery = (&mut self.next).await;
        self.next = request_next(&self.gateway);
        delivery
    }

    /// Acknowledges events that are on disk, once and in the background. If the acknowledgement is lost, the events are
    /// redelivered and acknowledged again.
    pub fn report_delivered(&mut self, word: DeliveryAck) {
        while self.words.try_join_next().is_some() {}
        let gateway = self.gateway.clone();
        self.words.spawn(async move {
            if let Err(detail) = gateway.delivered(&word).await {
                tracing::debug!(
                    detail,
                    "failed to acknowledge events of a Sensor; they will be redelivered"
                );
            }
        });
    }
}

fn request_next(gateway: &GatewayClient) -> BoxFuture<'static, Delivery> {
    let gateway = gateway.clone();
    async move { gateway.next_delivery().await }.boxed()
}
