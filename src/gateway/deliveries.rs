//! Events of sensor pods in transit to the worker.
//!
//! Keeps few of them, in memory only: what is lost or rejected here is resent by the sensor pod, which waits until the
//! worker has acknowledged that it is on disk.

use std::sync::Arc;
use std::time::Duration;

use super::worker_queue::WorkerQueue;
use crate::link::client::{LinkClient, LinkError};
use crate::link::deliveries::{Delivery, DeliveryAck, RelayedDeliveryAck};

/// Maximum number of deliveries that wait for the worker; more are dropped.
const MAX_WAITING: usize = 4;

pub struct DeliveryQueue {
    waiting: WorkerQueue<Delivery>,
    client: Arc<LinkClient>,
    agent: String,
    epoch: i64,
}

impl DeliveryQueue {
    /// An empty queue for the Agent with this uid; acknowledgements are sent through `client`.
    pub fn new(client: Arc<LinkClient>, agent: &str, epoch: i64) -> Self {
        Self {
            waiting: WorkerQueue::new(MAX_WAITING, None),
            client,
            agent: agent.into(),
            epoch,
        }
    }

    /// Queues a [`Delivery`] for the worker.
    pub fn put(&self, delivery: Delivery) {
        if !delivery.receiver.is_empty() && delivery.receiver != self.agent {
            // For a later Agent of the same name, whose own gateway will get it.
            return;
        }
        // A repeated delivery contains the earlier one: the newest of a Sensor is enough.
        let sensor = delivery.sensor.clone();
        self.waiting.put(delivery, |old| old.sensor == sensor);
    }

    /// The next [`Delivery`] for the worker; waits up to `limit`.
    pub async fn next(&self, limit: Duration) -> Option<Delivery> {
        self.waiting.next(limit).await
    }

    /// Relays the worker's acknowledgement, once. If it is lost, the events are resent and acknowledged again.
    pub async fn report_delivered(&self, delivered: DeliveryAck) -> Result<(), LinkError> {
        let epoch = self.epoch;
        self.client.delivered(&RelayedDeliveryAck { epoch, delivered }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deliveries() -> DeliveryQueue {
        let client = LinkClient::new("https://x", "ca".into(), "token".into());
        DeliveryQueue::new(Arc::new(client), "agent-uid", 1)
    }

    fn of(sensor: &str, name: &str) -> Delivery {
        Delivery {
            sensor: sensor.into(),
            name: name.into(),
            ..Delivery::default()
        }
    }

    const SOON: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_waiting_worker_receives_a_delivery_and_nothing_after_its_timeout() {
        let deliveries = deliveries();
        let (got, ()) = tokio::join!(deliveries.next(SOON), async { deliveries.put(of("s", "1")) });
        assert_eq!(got, Some(of("s", "1")));
        assert_eq!(deliveries.next(SOON).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_delivery_for_another_agent_of_the_same_name_is_not_accepted() {
        let deliveries = deliveries();
        let to = |receiver: &str| Delivery {
            receiver: receiver.into(),
            ..of("s", "1")
        };
        deliveries.put(to("uid-of-the-next-one"));
        assert_eq!(deliveries.next(SOON).await, None);
        deliveries.put(to("agent-uid"));
        assert_eq!(deliveries.next(SOON).await, Some(to("agent-uid")));
    }

    #[tokio::test(start_paused = true)]
    async fn four_sensors_wait_at_once_and_not_five_and_of_each_the_newest() {
        let deliveries = deliveries();
        for sensor in ["a", "b", "c", "d", "e"] {
            deliveries.put(of(sensor, "1"));
        }
        deliveries.put(of("b", "2"));
        let mut got = Vec::new();
        while let Some(delivery) = deliveries.next(SOON).await {
            got.push((delivery.sensor, delivery.name));
        }
        let expected = [("a", "1"), ("c", "1"), ("d", "1"), ("b", "2")];
        assert_eq!(got, expected.map(|(sensor, name)| (sensor.to_owned(), name.to_owned())));
        // There is room again.
        deliveries.put(of("e", "2"));
        assert_eq!(deliveries.next(SOON).await, Some(of("e", "2")));
    }
}
