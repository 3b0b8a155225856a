//! Events of sensor pods on their way into the loop: asks the gateway for them, and gives the word that they are on disk.
//!
//! Keeps nothing: what is lost here comes again, and the loop passes over what it has. Holds no rule about events.

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::task::JoinSet;

use super::gateway_client::GatewayClient;
use crate::link::deliveries::{Delivery, DeliveryAck};

/// What comes for one loop.
pub struct DeliveryPoller {
    gateway: GatewayClient,
    /// Goes on while the driver does something else: what it has already got is not lost.
    next: BoxFuture<'static, Delivery>,
    words: JoinSet<()>,
}

impl DeliveryPoller {
    /// None so far.
    #[must_use]
    pub fn new(gateway: &GatewayClient) -> Self {
        Self {
            gateway: gateway.clone(),
            next: request_next(gateway),
            words: JoinSet::new(),
        }
    }

    /// The next events of a Sensor's pod.
    pub async fn next(&mut self) -> Delivery {
        let delivery = (&mut self.next).await;
        self.next = request_next(&self.gateway);
        delivery
    }

    /// These are on disk. Said once, beside the loop: when the word is lost, the events come again, and so does the word.
    pub fn report_delivered(&mut self, word: DeliveryAck) {
        while self.words.try_join_next().is_some() {}
        let gateway = self.gateway.clone();
        self.words.spawn(async move {
            if let Err(detail) = gateway.delivered(&word).await {
                tracing::debug!(
                    detail,
                    "nobody could be told that events of a Sensor are on disk; they come again"
                );
            }
        });
    }
}

fn request_next(gateway: &GatewayClient) -> BoxFuture<'static, Delivery> {
    let gateway = gateway.clone();
    async move { gateway.next_delivery().await }.boxed()
}
