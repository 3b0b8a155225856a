//! How many connections a server accepts: in total, per address, of unauthenticated peers (strangers), and of tenants.
//!
//! Strangers never keep each other out: beyond their bounds the oldest stranger loses its slot, of the address that has the
//! most. A peer with one connection is therefore evicted only when every other address has no more than one. Authenticated peers
//! leave the strangers their room: beyond the rest, the tenant that has the most slots loses its newest. A newcomer of that tenant
//! loses its own, so that connections that last are not ended by those that come again and again.
//!
//! Owns the counting only. The server closes connections that have no slot or lost it. Imports nothing of ours.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionBounds {
    /// Maximum number of slots in use.
    pub all: usize,
    /// Maximum number of slots in use by strangers: the rest is kept for authenticated peers. Beyond it a stranger is evicted, and beyond the rest an
    /// authenticated peer.
    pub strangers: usize,
    /// Maximum number of slots in use by one address.
    pub per_address: usize,
    /// Maximum number of slots of one address by strangers. Beyond it its oldest stranger is evicted, and beyond the rest an authenticated peer of
    /// the address.
    pub strangers_per_address: usize,
}

impl ConnectionBounds {
    /// Bounds of a server without authentication: it refuses connections beyond them, and evicts none.
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

#[derive(Default)]
struct AddressSlots {
    all: usize,
    /// Slots of strangers by number, the oldest first.
    strangers: BTreeMap<u64, CancellationToken>,
}

/// A slot of an authenticated peer.
struct AuthenticatedSlot {
    address: IpAddr,
    tenant: String,
    evicted: CancellationToken,
}

#[derive(Default)]
struct SlotTable {
    all: usize,
    strangers: usize,
    /// Number of the next slot.
    next: u64,
    /// Addresses with at least one slot.
    addresses: HashMap<IpAddr, AddressSlots>,
    /// Slots of authenticated peers by number, the oldest first.
    authenticated: BTreeMap<u64, AuthenticatedSlot>,
}

impl SlotTable {
    /// Removes a slot from those of unauthenticated peers. `None` if it is not one of them.
    fn remove_stranger(&mut self, address: IpAddr, number: u64) -> Option<CancellationToken> {
        let removed = self.addresses.get_mut(&address)?.strangers.remove(&number)?;
        self.strangers -= 1;
        Some(removed)
    }

    /// The oldest stranger of an address loses its slot.
    fn evict_oldest(&mut self, address: IpAddr) {
        let slots = self.addresses.get(&address);
        let oldest = slots.and_then(|slots| slots.strangers.keys().next().copied());
        if let Some(evicted) = oldest.and_then(|oldest| self.remove_stranger(address, oldest)) {
            evicted.cancel();
        }
    }

    /// Of the authenticated slots, of one address or of all, one is lost: the newcomer's if no other tenant has more than its own,
    /// else the newest of the tenant that has the most; of several, of the one whose newest is the newest. Connections that last
    /// are therefore kept: a tenant that connects again takes nothing of its own, nor of those that have no more.
    fn evict_authenticated(&mut self, newcomer: u64, address: Option<IpAddr>) {
        let slots = self.authenticated.iter();
        let slots = slots.filter(|(_, slot)| address.is_none_or(|address| slot.address == address));
        let mut tenants: HashMap<&str, (usize, u64)> = HashMap::new();
        for (number, slot) in slots {
            let (count, newest) = tenants.entry(&slot.tenant).or_default();
            (*count, *newest) = (*count + 1, *number);
        }
        let own = self.authenticated.get(&newcomer);
        let own = own.and_then(|slot| tenants.get(slot.tenant.as_str()));
        let Some(evicted) = tenants.values().max() else { return };
        let evicted = match own {
            Some((count, _)) if *count >= evicted.0 => newcomer,
            _ => evicted.1,
        };
        if let Some(slot) = self.authenticated.remove(&evicted) {
            slot.evicted.cancel();
        }
    }

    /// Ensures that authenticated peers, of which this is the newest, leave room for strangers, who may be peers that are not
    /// authenticated yet.
    fn keep_room(&mut self, newcomer: u64, address: IpAddr, bounds: &ConnectionBounds) {
        let of_address = self.authenticated.values().filter(|slot| slot.address == address);
        if of_address.count() > bounds.per_address.saturating_sub(bounds.strangers_per_address) {
            self.evict_authenticated(newcomer, Some(address));
        }
        if self.authenticated.len() > bounds.all.saturating_sub(bounds.strangers) {
            self.evict_authenticated(newcomer, None);
        }
    }

    /// The address with the most strangers; of several, the one whose oldest is the oldest.
    fn busiest(&self) -> Option<IpAddr> {
        let oldest = |slots: &AddressSlots| slots.strangers.keys().next().copied();
        let busiest = self
            .addresses
            .iter()
            .max_by_key(|(_, slots)| (slots.strangers.len(), Reverse(oldest(slots))));
        busiest.map(|(address, _)| *address)
    }
}

pub struct ConnectionLimiter {
    bounds: ConnectionBounds,
    table: Mutex<SlotTable>,
}

impl ConnectionLimiter {
    #[must_use]
    pub fn new(bounds: ConnectionBounds) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            table: Mutex::default(),
        })
    }

    /// A slot for a stranger, perhaps instead of another one; `None` while the bounds of all slots are reached.
    pub fn take(self: &Arc<Self>, address: IpAddr) -> Option<ConnectionSlot> {
        // An IPv4 address and its IPv6-mapped form are the same peer.
        let address = address.to_canonical();
        let mut table = self.table();
        let (all, strangers) = table
            .addresses
            .get(&address)
            .map_or((0, 0), |slots| (slots.all, slots.strangers.len()));
        if table.all >= self.bounds.all || all >= self.bounds.per_address {
            return None;
        }
        if strangers >= self.bounds.strangers_per_address {
            table.evict_oldest(address);
        } else if table.strangers >= self.bounds.strangers
            && let Some(busiest) = table.busiest()
        {
            table.evict_oldest(busiest);
        }
        let number = table.next;
        let evicted = CancellationToken::new();
        table.next += 1;
        table.all += 1;
        table.strangers += 1;
        let slots = table.addresses.entry(address).or_default();
        slots.all += 1;
        slots.strangers.insert(number, evicted.clone());
        Some(ConnectionSlot {
            slots: self.clone(),
            address,
            number,
            evicted,
        })
    }

    fn table(&self) -> MutexGuard<'_, SlotTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot in use; freed when it is dropped.
pub struct ConnectionSlot {
    slots: Arc<ConnectionLimiter>,
    address: IpAddr,
    number: u64,
    evicted: CancellationToken,
}

impl ConnectionSlot {
    /// Address of the peer.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The peer is authenticated for this tenant, and evicted at once if there is no room for another peer of it. From now on it is
    /// evicted only for peers of other tenants that have fewer slots.
    pub fn mark_authenticated(&self, tenant: &str) {
        let mut table = self.slots.table();
        let Some(evicted) = table.remove_stranger(self.address, self.number) else {
            return;
        };
        let slot = AuthenticatedSlot {
            address: self.address,
            tenant: tenant.to_owned(),
            evicted,
        };
        table.authenticated.insert(self.number, slot);
        table.keep_room(self.number, self.address, &self.slots.bounds);
    }

    /// Whether the slot is lost.
    #[must_use]
    pub fn is_evicted(&self) -> bool {
        self.evicted.is_cancelled()
    }

    /// Ends when the slot is lost, and its connection must be closed.
    pub fn evicted(&self) -> WaitForCancellationFutureOwned {
        self.evicted.clone().cancelled_owned()
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut table = self.slots.table();
        table.remove_stranger(self.address, self.number);
        table.authenticated.remove(&self.number);
        table.all -= 1;
        if let Some(slots) = table.addresses.get_mut(&self.address) {
            slots.all -= 1;
            if slots.all == 0 {
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

    /// Takes slots until there are none.
    fn fill(slots: &Arc<ConnectionLimiter>, address: IpAddr) -> Vec<ConnectionSlot> {
        std::iter::from_fn(|| slots.take(address)).collect()
    }

    #[test]
    fn each_bound_trips_at_its_number_and_a_freed_slot_is_reused() {
        let slots = ConnectionLimiter::new(ConnectionBounds::of_strangers(5, 3));
        let mut first = fill(&slots, address(1));
        assert_eq!(first.len(), 3, "per address");
        let second = fill(&slots, address(2));
        assert_eq!(second.len(), 2, "in total");
        assert!(slots.take(address(3)).is_none());
        first.pop();
        assert_eq!(fill(&slots, address(3)).len(), 1);
        drop((first, second));
        assert!(
            slots.table().addresses.is_empty(),
            "no state remains for closed connections"
        );
    }

    #[test]
    fn strangers_do_not_occupy_the_slots_of_authenticated_peers() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 6,
            strangers: 2,
            per_address: 5,
            strangers_per_address: 1,
        });
        let known: Vec<_> = (0..4).map(|_| known(&slots, address(1), "a")).collect();
        assert!(!known.iter().any(ConnectionSlot::is_evicted));
        let strangers = [2, 3].map(|last| slots.take(address(last)).unwrap());
        assert!(slots.take(address(4)).is_none(), "in all");
        drop(known);
        let newest = slots.take(address(4)).unwrap();
        let evicted = [&strangers[0], &strangers[1], &newest].map(ConnectionSlot::is_evicted);
        assert_eq!(evicted, [true, false, false], "of equals the oldest");
        strangers[1].mark_authenticated("a");
        strangers[1].mark_authenticated("a");
        let after = slots.take(address(5)).unwrap();
        let evicted = [&strangers[1], &newest, &after].map(ConnectionSlot::is_evicted);
        assert_eq!(evicted, [false; 3], "there is room again");
    }

    fn known(slots: &Arc<ConnectionLimiter>, address: IpAddr, tenant: &str) -> ConnectionSlot {
        let slot = slots.take(address).unwrap();
        slot.mark_authenticated(tenant);
        slot
    }

    #[test]
    fn the_tenant_with_the_most_connections_gives_way_to_others() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 20,
            strangers: 10,
            per_address: 12,
            strangers_per_address: 10,
        });
        let quiet = [
            known(&slots, address(200), "quiet"),
            known(&slots, address(201), "quiet"),
        ];
        let mut flood: Vec<_> = (0..8).map(|last| known(&slots, address(last), "flood")).collect();
        let evicted = |flood: &[ConnectionSlot]| flood.iter().filter(|slot| slot.is_evicted()).count();
        assert_eq!(evicted(&flood), 0);
        flood.push(known(&slots, address(8), "flood"));
        assert!(flood[8].is_evicted() && evicted(&flood) == 1, "the newcomer");
        let late = known(&slots, address(202), "late");
        assert!(flood[7].is_evicted() && evicted(&flood) == 2, "the newest");
        assert!(!quiet.iter().chain([&late]).any(ConnectionSlot::is_evicted));
        assert_eq!(slots.table().authenticated.len(), 10);
    }

    #[test]
    fn on_a_shared_address_the_tenant_with_the_most_connections_gives_way() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 100,
            strangers: 50,
            per_address: 6,
            strangers_per_address: 2,
        });
        let quiet = known(&slots, address(1), "quiet");
        let mut flood: Vec<_> = (0..3).map(|_| known(&slots, address(1), "flood")).collect();
        assert!(!flood.iter().any(ConnectionSlot::is_evicted));
        let elsewhere = known(&slots, address(2), "flood");
        flood.push(known(&slots, address(1), "flood"));
        let evicted: Vec<_> = flood.iter().map(ConnectionSlot::is_evicted).collect();
        assert_eq!(evicted, [false, false, false, true]);
        assert!(!quiet.is_evicted() && !elsewhere.is_evicted());
    }

    #[test]
    fn a_tenant_above_the_limit_keeps_the_connections_it_has() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 16_384,
            strangers: 2048,
            per_address: 1024,
            strangers_per_address: 256,
        });
        let lasting: Vec<_> = (0..768).map(|_| known(&slots, address(1), "a")).collect();
        for _ in 0..1000 {
            assert!(known(&slots, address(1), "a").is_evicted(), "the newcomer");
        }
        assert!(!lasting.iter().any(ConnectionSlot::is_evicted));
        let other = known(&slots, address(1), "b");
        let kept: Vec<_> = lasting.iter().filter(|slot| !slot.is_evicted()).collect();
        assert_eq!(kept.len(), 767, "one connection gives way to another tenant");
        assert!(lasting[767].is_evicted(), "the newest");
        for _ in 0..1000 {
            assert!(known(&slots, address(1), "a").is_evicted(), "the newcomer");
        }
        assert!(!other.is_evicted() && !kept.into_iter().any(ConnectionSlot::is_evicted));
    }

    #[test]
    fn a_newcomer_takes_no_slot_of_a_tenant_that_has_no_more_than_its_own() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 14,
            strangers: 10,
            per_address: 14,
            strangers_per_address: 10,
        });
        let [a, b] = ["a", "b"].map(|tenant| [1, 2].map(|last| known(&slots, address(last), tenant)));
        assert!(known(&slots, address(3), "b").is_evicted(), "b would have three");
        let third = known(&slots, address(3), "c");
        assert!(!third.is_evicted() && b[1].is_evicted(), "of equals the newest");
        let fourth = known(&slots, address(3), "c");
        assert!(fourth.is_evicted(), "c would have as many as a");
        assert!(!a.iter().chain([&b[0], &third]).any(ConnectionSlot::is_evicted));
    }

    #[test]
    fn beyond_the_strangers_of_an_address_its_oldest_is_evicted() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 9,
            strangers: 9,
            per_address: 9,
            strangers_per_address: 2,
        });
        let mut taken = vec![slots.take(address(9)).unwrap()];
        taken.extend((0..2).map(|_| slots.take(address(1)).unwrap()));
        assert!(!taken.iter().any(ConnectionSlot::is_evicted));
        taken.push(slots.take(address(1)).unwrap());
        let evicted: Vec<_> = taken.iter().map(ConnectionSlot::is_evicted).collect();
        assert_eq!(evicted, [false, true, false, false]);
        // It is authenticated a moment too late.
        taken[1].mark_authenticated("a");
        drop(taken.remove(2));
        assert!(!slots.take(address(1)).unwrap().is_evicted());
        assert!(!taken[2].is_evicted(), "a freed slot is taken first");
        drop(taken);
        let table = slots.table();
        assert_eq!((table.all, table.strangers, table.addresses.len()), (0, 0, 0));
        assert!(table.authenticated.is_empty());
    }

    #[test]
    fn a_peer_with_one_connection_is_admitted_and_kept_while_eight_addresses_flood() {
        let slots = ConnectionLimiter::new(ConnectionBounds {
            all: 16_384,
            strangers: 2048,
            per_address: 1024,
            strangers_per_address: 256,
        });
        let flood = |slots: &Arc<ConnectionLimiter>| -> Vec<_> {
            let addresses = (0..256).flat_map(|_| (0..8).map(address));
            addresses.filter_map(|address| slots.take(address)).collect()
        };
        let first = flood(&slots);
        assert_eq!(first.iter().filter(|slot| slot.is_evicted()).count(), 0);
        let pod = slots.take(address(100)).unwrap();
        assert_eq!(first.iter().filter(|slot| slot.is_evicted()).count(), 1);
        let second = flood(&slots);
        assert!(!pod.is_evicted(), "the flood evicts itself");
        assert_eq!(slots.table().strangers, 2048);
        drop((first, second));
    }

    #[test]
    fn an_address_counts_the_same_in_both_spellings() {
        let slots = ConnectionLimiter::new(ConnectionBounds::of_strangers(9, 1));
        let _slot = slots.take(address(1)).unwrap();
        assert!(slots.take("::ffff:10.0.0.1".parse().unwrap()).is_none());
    }
}
