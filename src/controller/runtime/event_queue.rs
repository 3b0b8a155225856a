//! The queue of Events to send. Namespaces have shares of it and take turns, so that many Events of one neither displace nor delay
//! those of another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::mpsc;

use super::events::KubeEvent;
use super::fair_line::FairLine;

/// Bound of the queue. A namespace may have as many Events in it as there is room left for others; further ones are dropped.
pub(super) const QUEUE: usize = 1024;

/// An Event, and the object that it is about.
type QueuedEvent = (KubeEvent, ObjectReference);

type SharedLine = Arc<Mutex<FairLine<QueuedEvent>>>;

/// The receiving half of the queue of Events.
pub struct EventQueue {
    /// One for each Event in the line.
    places: mpsc::Receiver<()>,
    line: SharedLine,
}

/// The sending half of the queue of Events.
#[derive(Clone)]
pub struct EventSink {
    places: mpsc::Sender<()>,
    line: SharedLine,
}

impl EventSink {
    /// Creates the queue. The receiver belongs to [`publish`](super::publish).
    #[must_use]
    pub fn new() -> (Self, EventQueue) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let line = Arc::new(Mutex::new(FairLine::new()));
        let queue = EventQueue {
            places: receiver,
            line: line.clone(),
        };
        (Self { places: sender, line }, queue)
    }

    /// Never blocks: Events are dropped if the share of their namespace is used up.
    pub fn send(&self, notices: impl IntoIterator<Item = KubeEvent>, about: &ObjectReference) {
        let namespace = about.namespace.as_deref().unwrap_or_default();
        for notice in notices {
            let Ok(place) = self.places.try_reserve() else {
                tracing::debug!(namespace, "dropped an Event; the queue is full or closed");
                continue;
            };
            let mut line = lock(&self.line);
            if line.len_of(namespace) > self.places.capacity() {
                tracing::debug!(
                    namespace,
                    "dropped an Event; too many of its namespace are in the queue"
                );
                continue;
            }
            line.push(namespace, (notice, about.clone()));
            place.send(());
        }
    }
}

impl EventQueue {
    /// Waits for the next Event; `None`: there will be none.
    pub async fn recv(&mut self) -> Option<QueuedEvent> {
        self.places.recv().await?;
        lock(&self.line).pop()
    }

    /// The next Event, if there is one now.
    pub fn try_recv(&mut self) -> Option<QueuedEvent> {
        self.places.try_recv().ok()?;
        lock(&self.line).pop()
    }

    /// Accepts no more Events.
    pub(super) fn close(&mut self) {
        self.places.close();
    }
}

fn lock(line: &Mutex<FairLine<QueuedEvent>>) -> MutexGuard<'_, FairLine<QueuedEvent>> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    /// Sends this many Events about an object of a namespace; returns how many are in the queue.
    fn send(sink: &EventSink, namespace: &str, events: usize) -> usize {
        let about = ObjectReference {
            namespace: Some(namespace.into()),
            ..ObjectReference::default()
        };
        let event = |number: usize| KubeEvent::normal("Reason", "Test", number.to_string());
        sink.send((0..events).map(event), &about);
        lock(&sink.line).len_of(namespace)
    }

    #[test]
    fn a_namespace_has_as_many_events_in_the_queue_as_it_leaves_room() {
        let (sink, mut queue) = EventSink::new();
        assert_eq!(send(&sink, "a", QUEUE / 2 - 1), QUEUE / 2 - 1);
        assert_eq!(send(&sink, "a", 1), QUEUE / 2);
        assert_eq!(send(&sink, "a", QUEUE), QUEUE / 2);
        assert_eq!(send(&sink, "b", QUEUE), QUEUE / 4);
        assert_eq!(send(&sink, "quiet", 1), 1, "there is room whatever others send");
        // Each has its turn.
        let mut received = std::iter::from_fn(|| queue.try_recv());
        let first: Vec<_> = received
            .by_ref()
            .take(4)
            .map(|(_, about)| about.namespace.unwrap())
            .collect();
        assert_eq!(first, ["a", "b", "quiet", "a"]);
        assert_eq!(received.count(), QUEUE / 2 + QUEUE / 4 + 1 - 4);
        assert_eq!(send(&sink, "a", QUEUE), QUEUE / 2);
    }
}
