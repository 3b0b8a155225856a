//! What one peer may take of the server: a number of connections, and bytes of bodies being read.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;

/// There is no slot for another connection.
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
#[error("too many connections")]
pub(super) struct SlotError;

#[derive(Clone, Debug)]
pub(super) struct PeerSlots {
    inner: Arc<Mutex<SlotUsage>>,
    max_slots: usize,
    max_of_one: usize,
    bytes_of_one: usize,
}

#[derive(Debug, Default)]
struct SlotUsage {
    all: usize,
    by: HashMap<IpAddr, PeerUsage>,
}

#[derive(Debug)]
struct PeerUsage {
    connections: usize,
    /// Bytes that its bodies may still take.
    bytes: Arc<Semaphore>,
}

/// The slot of a connection, freed when it is dropped.
#[derive(Debug)]
pub(super) struct PeerSlot {
    slots: PeerSlots,
    peer: IpAddr,
    bytes: Arc<Semaphore>,
}

impl PeerSlots {
    /// `max_slots` connections in total and `max_of_one` per peer; `bytes_of_one`: bytes of bodies that one peer sends at
    /// once.
    pub(super) fn new(max_slots: usize, max_of_one: usize, bytes_of_one: usize) -> Self {
        Self {
            inner: Arc::default(),
            max_slots,
            max_of_one,
            bytes_of_one,
        }
    }

    /// A slot for this peer; `None` if it or the server has no free one.
    pub(super) fn take(&self, peer: IpAddr) -> Option<PeerSlot> {
        let mut taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let of_one = taken.by.get(&peer).map_or(0, |usage| usage.connections);
        if taken.all >= self.max_slots || of_one >= self.max_of_one {
            return None;
        }
        taken.all += 1;
        let usage = taken.by.entry(peer).or_insert_with(|| PeerUsage {
            connections: 0,
            bytes: Arc::new(Semaphore::new(self.bytes_of_one)),
        });
        usage.connections += 1;
        let bytes = Arc::clone(&usage.bytes);
        Some(PeerSlot {
            slots: self.clone(),
            peer,
            bytes,
        })
    }
}

impl PeerSlot {
    /// The bytes of bodies that this peer may send at once, over all its connections.
    pub(super) fn bytes(&self) -> &Semaphore {
        &self.bytes
    }
}

impl Drop for PeerSlot {
    fn drop(&mut self) {
        let mut taken = self.slots.inner.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all = taken.all.saturating_sub(1);
        if let Some(usage) = taken.by.get_mut(&self.peer) {
            usage.connections -= 1;
            if usage.connections == 0 {
                taken.by.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_limited_in_total_and_per_peer_and_a_dropped_one_is_free_again() {
        let peer = |last: u8| IpAddr::from([10, 0, 0, last]);
        let slots = PeerSlots::new(5, 2, 1);
        let mut held: Vec<_> = (0..2).map(|_| slots.take(peer(1)).unwrap()).collect();
        assert!(slots.take(peer(1)).is_none(), "one peer may have two");
        held.extend((2..5).map(|last| slots.take(peer(last)).unwrap()));
        assert!(slots.take(peer(9)).is_none(), "all may have five");
        drop(held.pop());
        assert!(slots.take(peer(1)).is_none());
        drop(slots.take(peer(9)).unwrap());
        held.clear();
        assert_eq!(slots.inner.lock().unwrap().by.len(), 0);
        assert_eq!(
            (0..9).filter_map(|_| slots.take(peer(1)).map(std::mem::forget)).count(),
            2
        );
    }
}
