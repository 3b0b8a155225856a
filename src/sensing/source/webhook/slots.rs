//! Connections at once: so many in all, and so many of one peer.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// There is no slot for another connection.
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
#[error("there are too many connections")]
pub(super) struct SlotError;

/// The slots.
#[derive(Clone, Debug)]
pub(super) struct PeerSlots {
    inner: Arc<Mutex<SlotUsage>>,
    most: usize,
    most_of_one: usize,
}

#[derive(Debug, Default)]
struct SlotUsage {
    all: usize,
    by: HashMap<IpAddr, usize>,
}

/// A slot, until it is dropped.
#[derive(Debug)]
pub(super) struct PeerSlot {
    slots: PeerSlots,
    peer: IpAddr,
}

impl PeerSlots {
    pub(super) fn new(most: usize, most_of_one: usize) -> Self {
        Self {
            inner: Arc::default(),
            most,
            most_of_one,
        }
    }

    /// A slot for this peer; `None`: there is none.
    pub(super) fn take(&self, peer: IpAddr) -> Option<PeerSlot> {
        let mut taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let of_one = taken.by.get(&peer).copied().unwrap_or_default();
        if taken.all >= self.most || of_one >= self.most_of_one {
            return None;
        }
        taken.all += 1;
        taken.by.insert(peer, of_one + 1);
        Some(PeerSlot {
            slots: self.clone(),
            peer,
        })
    }
}

impl Drop for PeerSlot {
    fn drop(&mut self) {
        let mut taken = self.slots.inner.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all = taken.all.saturating_sub(1);
        let left = taken.by.get(&self.peer).map_or(0, |of_one| of_one.saturating_sub(1));
        if left == 0 {
            taken.by.remove(&self.peer);
        } else {
            taken.by.insert(self.peer, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_in_all_and_of_one_peer_and_a_dropped_one_is_free_again() {
        let peer = |last: u8| IpAddr::from([10, 0, 0, last]);
        let slots = PeerSlots::new(5, 2);
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
