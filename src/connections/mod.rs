//! How many connections a server takes: in all, from one address, and from those that have not shown who they are.
//!
//! Owns the counting only. A connection without a slot is closed by the server. Imports nothing of ours.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bounds of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionBounds {
    /// Most slots taken at once.
    pub all: usize,
    /// Most of them by strangers: the rest is kept for those that showed who they are.
    pub strangers: usize,
    /// Most slots of one address.
    pub per_address: usize,
    /// Most slots of one address by strangers.
    pub strangers_per_address: usize,
}

impl ConnectionBounds {
    /// Bounds of a server where nobody shows who they are.
    #[must_use]
    pub const fn of_strangers(all: usize, per_address: usize) -> Self {
        Self {
            all,
            strangers: all,
            per_address,
            strangers_per_address: per_address,
        }
    }
}

#[derive(Clone, Copy, Default)]
struct SlotCounts {
    all: usize,
    strangers: usize,
}

#[derive(Default)]
struct SlotTable {
    all: SlotCounts,
    /// Addresses with at least one slot.
    addresses: HashMap<IpAddr, SlotCounts>,
}

/// The slots of a server.
pub struct ConnectionLimiter {
    bounds: ConnectionBounds,
    table: Mutex<SlotTable>,
}

impl ConnectionLimiter {
    /// Slots within `bounds`, all free.
    #[must_use]
    pub fn new(bounds: ConnectionBounds) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            table: Mutex::default(),
        })
    }

    /// A slot for a stranger; `None` while a bound is reached.
    pub fn take(self: &Arc<Self>, address: IpAddr) -> Option<ConnectionSlot> {
        // An IPv4 address is the same peer, however the socket spells it.
        let address = address.to_canonical();
        let mut table = self.table();
        let of_address = table.addresses.get(&address).copied().unwrap_or_default();
        let full = table.all.all >= self.bounds.all
            || table.all.strangers >= self.bounds.strangers
            || of_address.all >= self.bounds.per_address
            || of_address.strangers >= self.bounds.strangers_per_address;
        if full {
            return None;
        }
        let of_address = table.addresses.entry(address).or_default();
        of_address.all += 1;
        of_address.strangers += 1;
        table.all.all += 1;
        table.all.strangers += 1;
        Some(ConnectionSlot {
            slots: self.clone(),
            address,
            stranger: AtomicBool::new(true),
        })
    }

    fn table(&self) -> MutexGuard<'_, SlotTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One taken slot; free again when it is dropped.
pub struct ConnectionSlot {
    slots: Arc<ConnectionLimiter>,
    address: IpAddr,
    stranger: AtomicBool,
}

impl ConnectionSlot {
    /// Whose it is.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Who holds it has shown who they are, and is no stranger from now on.
    pub fn mark_authenticated(&self) {
        if self.stranger.swap(false, Ordering::Relaxed) {
            let mut table = self.slots.table();
            table.all.strangers -= 1;
            if let Some(of_address) = table.addresses.get_mut(&self.address) {
                of_address.strangers -= 1;
            }
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.mark_authenticated();
        let mut table = self.slots.table();
        table.all.all -= 1;
        if let Some(of_address) = table.addresses.get_mut(&self.address) {
            of_address.all -= 1;
            if of_address.all == 0 {
                table.addresses.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Takes slots until there is none.
    fn fill(slots: &Arc<ConnectionLimiter>, address: IpAddr) -> Vec<ConnectionSlot> {
        std::iter::from_fn(|| slots.take(address)).collect()
    }

    #[test]
    fn each_bound_trips_at_its_number_and_a_freed_slot_is_taken_again() {
        let slots = ConnectionLimiter::new(ConnectionBounds::of_strangers(5, 3));
        let mut first = fill(&slots, address(1));
        assert_eq!(first.len(), 3, "of one address");
        let second = fill(&slots, address(2));
        assert_eq!(second.len(), 2, "in all");
        assert!(slots.take(address(3)).is_none());
        first.pop();
        assert_eq!(fill(&slots, address(3)).len(), 1);
        drop((first, second));
        assert!(slots.table().addresses.is_empty(), "nothing is kept of who has gone");
    }

    #[test]
    fn strangers_do_not_take_the_slots_of_those_who_showed_who_they_are() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 6,
            strangers: 2,
            per_address: 4,
            strangers_per_address: 1,
        });
        let known: Vec<_> = (0..4)
            .map(|_| {
                let slot = slots.take(address(1)).unwrap();
                slot.mark_authenticated();
                slot
            })
            .collect();
        assert!(slots.take(address(1)).is_none(), "of one address");
        let stranger = slots.take(address(2)).unwrap();
        assert!(slots.take(address(2)).is_none(), "strangers of one address");
        drop(known);
        let other = slots.take(address(3)).unwrap();
        assert!(slots.take(address(4)).is_none(), "strangers in all");
        stranger.mark_authenticated();
        stranger.mark_authenticated();
        assert!(slots.take(address(4)).is_some());
        assert_eq!(other.address(), address(3));
    }

    #[test]
    fn an_address_counts_the_same_in_both_spellings() {
        let slots = ConnectionLimiter::new(ConnectionBounds::of_strangers(9, 1));
        let _slot = slots.take(address(1)).unwrap();
        assert!(slots.take("::ffff:10.0.0.1".parse().unwrap()).is_none());
    }
}
