//! Sends what is in the outbox to each receiver, in order, until it has it.
//!
//! One task a receiver, so that one that is away holds nobody up. Sends again whatever was not answered: a receiver passes
//! over what it has. Who is away is tried less and less often, and at once when the controller says that it may be back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::outbox::{AckOutcome, EventReceiver, Outbox, OutboxError};
use crate::link::client::LinkClient;
use crate::link::deliveries::{DeliveryAck, DeliveryRequest, MOST_DELIVERY_BYTES, ReceiverTerms};
use crate::sensing::delivery::{Delivery, SensorEvent};
use crate::sensing::source::backoff::jitter;

/// Pause after the volume was full.
const FULL: Duration = Duration::from_secs(1);
/// First and longest pause between two tries.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// The way to receivers.
pub trait DeliveryTransport: Send + Sync + 'static {
    /// Sends events; says through which number of which outbox the receiver has them on disk, or why it is not known.
    fn send(&self, deliver: &DeliveryRequest) -> impl Future<Output = Result<DeliveryAck, String>> + Send;
}

impl DeliveryTransport for LinkClient {
    async fn send(&self, deliver: &DeliveryRequest) -> Result<DeliveryAck, String> {
        self.deliver(deliver).await.map_err(|error| error.to_string())
    }
}

/// The outbox, and the number of its last event, which wakes who waits for more.
pub struct WatchedOutbox {
    inner: Mutex<Outbox>,
    last: watch::Sender<i64>,
}

/// The outbox as all parts of the pod share it.
pub type SharedOutbox = Arc<WatchedOutbox>;

impl WatchedOutbox {
    /// Shares an outbox whose last event has this number.
    #[must_use]
    pub fn share(outbox: Outbox, last: i64) -> SharedOutbox {
        Arc::new(Self {
            inner: Mutex::new(outbox),
            last: watch::Sender::new(last),
        })
    }

    /// The outbox, for a moment.
    pub fn lock(&self) -> MutexGuard<'_, Outbox> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is a new event.
    pub fn notify_new(&self, last: i64) {
        self.last.send_replace(last);
    }
}

/// Sends to all receivers.
pub struct EventDeliverer<R> {
    /// The outbox.
    pub outbox: SharedOutbox,
    /// The way.
    pub road: Arc<R>,
    /// Uid of the Sensor.
    pub sensor: String,
    /// Name of the Sensor.
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
    /// Sends to these receivers until the outbox cannot be used.
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
                    // Nobody decides any more: the pod ends.
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
        let mut backoff = DeliveryBackoff::default();
        loop {
            last.mark_unchanged();
            let (outbox, events) = match self.offer(&uid) {
                Ok(offer) => offer,
                Err(error) => return error,
            };
            if events.is_empty() {
                // The sender is in `outbox`: it cannot be gone.
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
                        // Without progress it pauses, whatever the receiver says.
                        Ok(AckOutcome::More) => {
                            backoff = DeliveryBackoff::default();
                            continue;
                        }
                        Ok(AckOutcome::Nothing) => {}
                        Ok(AckOutcome::Ahead) => tracing::warn!(
                            receiver = uid,
                            "a receiver knows of events that this outbox never gave; it gets what waits for it under a new id"
                        ),
                        Err(error @ OutboxError::Full { .. }) => {
                            tracing::warn!(%error, "what a receiver has cannot be noted yet; it gets it again");
                        }
                        Err(error) => return error,
                    }
                }
                Err(error) => tracing::debug!(receiver = uid, error, "events were not taken; they go again"),
            }
            let revision = revision(&terms, &uid);
            tokio::select! {
                () = sleep(backoff.next(jitter())) => {}
                Ok(_) = terms.wait_for(|now| revision_of(now.as_deref(), &uid) != revision) => backoff = DeliveryBackoff::default(),
            }
        }
    }
}

impl<R> EventDeliverer<R> {
    /// The next events for a receiver, and the id of the outbox that goes with them.
    fn offer(&self, uid: &str) -> Result<(String, Vec<SensorEvent>), OutboxError> {
        let outbox = self.outbox.lock();
        Ok((outbox.id_for(uid)?, outbox.next(uid, MOST_DELIVERY_BYTES)?))
    }
}

/// Those that get events, in the order of their uids.
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

/// Pauses that double, with jitter: a controller that comes back meets the sensor pods one after the other.
#[derive(Default)]
struct DeliveryBackoff {
    tries: u32,
}

impl DeliveryBackoff {
    fn next(&mut self, jitter: f64) -> Duration {
        let full = BACKOFF.0.saturating_mul(1 << self.tries.min(16)).min(BACKOFF.1);
        self.tries += 1;
        full.mul_f64(0.5 + jitter / 2.0)
    }
}

#[cfg(test)]
mod tests;
