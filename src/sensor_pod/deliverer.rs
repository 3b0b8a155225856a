//! Delivers the events in the outbox to each receiver, in order, until it acknowledges them.
//!
//! One task per receiver, so that an unreachable receiver delays no other. Delivery is at least once: unacknowledged
//! events are sent again, and a receiver skips those that it has. Unreachable receivers are retried with exponential
//! backoff, and at once when the controller reports that they may be back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::outbox::{AckOutcome, EventReceiver, Outbox, OutboxError};
use crate::link::client::LinkClient;
use crate::link::deliveries::{DeliveryAck, DeliveryRequest, MAX_DELIVERY_BYTES, ReceiverTerms};
use crate::sensor_pipeline::delivery::{Delivery, SensorEvent};
use crate::support::backoff::{Backoff, jitter};

/// Pause after a write failed because the volume is full.
const FULL: Duration = Duration::from_secs(1);
/// Pauses between two attempts, spread so that the sensor pods do not all call a controller at the moment it is
/// available again.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(30));

/// How events reach their [`EventReceiver`]s.
pub trait DeliveryTransport: Send + Sync + 'static {
    /// Sends events. Returns the outbox and the number through which the receiver has them on disk, or why that is
    /// unknown.
    fn send(&self, deliver: &DeliveryRequest) -> impl Future<Output = Result<DeliveryAck, String>> + Send;
}

impl DeliveryTransport for LinkClient {
    async fn send(&self, deliver: &DeliveryRequest) -> Result<DeliveryAck, String> {
        self.deliver(deliver).await.map_err(|error| error.to_string())
    }
}

/// The [`Outbox`], and the number of its last event, which wakes the tasks that wait for more.
pub struct WatchedOutbox {
    inner: Mutex<Outbox>,
    last: watch::Sender<i64>,
}

/// The [`Outbox`], shared by all parts of the pod.
pub type SharedOutbox = Arc<WatchedOutbox>;

impl WatchedOutbox {
    /// Shares an [`Outbox`] whose last event has this number.
    #[must_use]
    pub fn share(outbox: Outbox, last: i64) -> SharedOutbox {
        Arc::new(Self {
            inner: Mutex::new(outbox),
            last: watch::Sender::new(last),
        })
    }

    /// The [`Outbox`]. The guard must not be held across an await.
    pub fn lock(&self) -> MutexGuard<'_, Outbox> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the deliverers: there is a new event.
    pub fn notify_new(&self, last: i64) {
        self.last.send_replace(last);
    }
}

pub struct EventDeliverer<R> {
    pub outbox: SharedOutbox,
    pub road: Arc<R>,
    pub sensor: String,
    pub name: String,
}

impl<R> Clone for EventDeliverer<R> {
    fn clone(&self) -> Self {
        Self {
            outbox: Arc::clone(&self.outbox),
            road: Arc::clone(&self.road),
            sensor: self.sensor.clone(),
            name: self.name.clone(),
        }
    }
}

impl<R: DeliveryTransport> EventDeliverer<R> {
    /// Delivers to the receivers of the latest terms until the [`Outbox`] fails.
    pub async fn run(self, mut terms: watch::Receiver<Option<Vec<ReceiverTerms>>>) -> OutboxError {
        let mut tasks = JoinSet::new();
        let mut running = HashMap::new();
        loop {
            let level = terms.borrow_and_update().clone();
            let followed = level.map_or(Ok(()), |level| {
                self.follow(receivers(&level), &mut tasks, &mut running, &terms)
            });
            match followed {
                Ok(()) => {}
                Err(OutboxError::Full { .. }) => {
                    sleep(FULL).await;
                    continue;
                }
                Err(error) => return error,
            }
            tokio::select! {
                changed = terms.changed() => if changed.is_err() {
                    // The sender is gone: the pod is shutting down.
                    std::future::pending::<()>().await;
                },
                Some(Ok(error)) = tasks.join_next() => return error,
            }
        }
    }

    fn follow(
        &self,
        receivers: Vec<EventReceiver>,
        tasks: &mut JoinSet<OutboxError>,
        running: &mut HashMap<String, tokio::task::AbortHandle>,
        terms: &watch::Receiver<Option<Vec<ReceiverTerms>>>,
    ) -> Result<(), OutboxError> {
        self.outbox.lock().set_receivers(&receivers, Timestamp::now())?;
        running.retain(|uid, task| {
            let stays = receivers.iter().any(|receiver| receiver.uid == *uid);
            if !stays {
                task.abort();
            }
            stays
        });
        for receiver in receivers {
            running
                .entry(receiver.uid.clone())
                .or_insert_with(|| tasks.spawn(self.clone().serve(receiver.uid, terms.clone())));
        }
        Ok(())
    }

    async fn serve(self, uid: String, mut terms: watch::Receiver<Option<Vec<ReceiverTerms>>>) -> OutboxError {
        let mut last = self.outbox.last.subscribe();
        let mut backoff = BACKOFF;
        loop {
            // Before the outbox is read: an event that is stored between the two still wakes this task.
            last.mark_unchanged();
            let (outbox, events) = match self.offer(&uid) {
                Ok(offer) => offer,
                Err(error) => return error,
            };
            if events.is_empty() {
                // The sender is in `outbox`, so the channel is open.
                let _ = last.changed().await;
                continue;
            }
            let deliver = DeliveryRequest {
                receiver: uid.clone(),
                delivery: Delivery {
                    sensor: self.sensor.clone(),
                    name: self.name.clone(),
                    receiver: uid.clone(),
                    outbox,
                    per_minute: None,
                    events,
                },
            };
            match self.road.send(&deliver).await {
                Ok(word) => {
                    let meant = self.outbox.lock().acknowledge(&uid, &word.outbox, word.through);
                    match meant {
                        // Without progress it backs off, whatever the receiver acknowledges: a faulty one must not
                        // cause a hot loop.
                        Ok(AckOutcome::More) => {
                            backoff.reset();
                            continue;
                        }
                        Ok(AckOutcome::Nothing) => {}
                        Ok(AckOutcome::Ahead) => tracing::warn!(
                            receiver = uid,
                            "a receiver acknowledged events that were never sent; resending its events under a new outbox id"
                        ),
                        Err(error @ OutboxError::Full { .. }) => {
                            tracing::warn!(%error, "failed to record an acknowledgement; events will be redelivered");
                        }
                        Err(error) => return error,
                    }
                }
                Err(error) => tracing::debug!(receiver = uid, error, "failed to deliver events; retrying"),
            }
            let revision = revision(&terms, &uid);
            tokio::select! {
                () = sleep(backoff.next_spread(jitter())) => {}
                Ok(_) = terms.wait_for(|now| revision_of(now.as_deref(), &uid) != revision) => backoff.reset(),
            }
        }
    }
}

impl<R> EventDeliverer<R> {
    /// The next events for a receiver, and the id of the [`Outbox`] that goes with them.
    fn offer(&self, uid: &str) -> Result<(String, Vec<SensorEvent>), OutboxError> {
        let outbox = self.outbox.lock();
        Ok((outbox.id_for(uid)?, outbox.next(uid, MAX_DELIVERY_BYTES)?))
    }
}

/// The receivers of these terms, sorted by uid.
#[must_use]
pub fn receivers(terms: &[ReceiverTerms]) -> Vec<EventReceiver> {
    let mut receivers: Vec<_> = terms
        .iter()
        .map(|terms| EventReceiver {
            uid: terms.uid.clone(),
            name: terms.name.clone(),
        })
        .collect();
    receivers.sort();
    receivers
}

fn revision(terms: &watch::Receiver<Option<Vec<ReceiverTerms>>>, uid: &str) -> Option<u64> {
    revision_of(terms.borrow().as_deref(), uid)
}

fn revision_of(terms: Option<&[ReceiverTerms]>, uid: &str) -> Option<u64> {
    terms?.iter().find(|terms| terms.uid == uid).map(|terms| terms.revision)
}

#[cfg(test)]
mod tests;
