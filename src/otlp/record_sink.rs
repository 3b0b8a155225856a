//! The queue behind a sink of spans or of log records: whether it is on, what it has dropped, and the message of a worker.
//! What becomes of a record is up to the sink.

use std::sync::Arc;

use prost::Message;

use crate::queue::{DropCount, DropQueue, QueuedRecord};
use crate::received::ReceivedRecords;

/// Takes records for export, or discards them.
#[derive(Clone, Debug)]
pub(crate) struct RecordSink<T, S>(Option<SinkParts<T, S>>);

/// A queue, and what the sink has to know about each record.
#[derive(Clone, Debug)]
pub(crate) struct SinkParts<T, S> {
    pub(crate) queue: Arc<DropQueue<T>>,
    pub(crate) settings: S,
}

impl<T, S> Default for RecordSink<T, S> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: QueuedRecord, S> RecordSink<T, S> {
    pub(crate) fn new(queue: Arc<DropQueue<T>>, settings: S) -> Self {
        Self(Some(SinkParts { queue, settings }))
    }

    /// `None`: this sink discards everything.
    pub(crate) fn parts(&self) -> Option<&SinkParts<T, S>> {
        self.0.as_ref()
    }

    /// Whether records are exported, or may be.
    pub(crate) fn is_on(&self) -> bool {
        self.0.as_ref().is_some_and(|parts| !parts.queue.is_closed())
    }

    /// Calls `push` with each record of at most `max` bytes in the message of a worker, which has dropped `dropped` others, and
    /// with the name of its scope. `false`: this is no message.
    pub(crate) fn push_received<R: Message + Default>(
        &self,
        message: &[u8],
        (dropped, max): (usize, usize),
        mut push: impl FnMut(&SinkParts<T, S>, String, R),
    ) -> bool {
        let Some(parts) = self.0.as_ref().filter(|_| self.is_on()) else {
            return true;
        };
        let Some(received) = ReceivedRecords::<R>::read(message, max) else {
            return false;
        };
        parts.queue.dropped.add(dropped);
        parts.queue.dropped.add(received.dropped);
        for (scope, record) in received.records {
            push(parts, scope, record);
        }
        true
    }

    /// Counts the records that were not exported.
    pub(crate) fn dropped(&self) -> DropCount {
        let parts = self.0.as_ref();
        parts.map_or_else(DropCount::default, |parts| parts.queue.dropped.clone())
    }
}
