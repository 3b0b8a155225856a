//! How many bytes of pods' requests a server keeps at a time: in all, of one namespace and of one pod.
//!
//! A body takes memory from its first byte on, and a pod may send as slowly as the timeout allows, over as many connections as it
//! has. So each request takes room for its body before it is read. Small bodies, as of most reports, have room of their own: they
//! do not wait for large ones that arrive slowly. So have requests for leases, which keep it until a write.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::server::MAX_BODY_BYTES;

/// Bounds of the bytes of all bodies that are read or handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyBounds {
    /// Of all pods.
    pub all: usize,
    /// Of the pods of one namespace.
    pub namespace: usize,
    /// Of one pod.
    pub pod: usize,
}

impl Default for BodyBounds {
    fn default() -> Self {
        Self {
            // A controller has 512 MiB, and a message may take several times the memory of its body.
            all: 64 * MAX_BODY_BYTES,
            // A quarter: fewer than four tenants cannot hold up the others.
            namespace: 16 * MAX_BODY_BYTES,
            // A gateway sends at the same time a report, a request for leases, a part of a history and a page for each reader.
            // Only a request for leases has its room for longer than its body takes to arrive; all fit one after the other.
            pod: 2 * MAX_BODY_BYTES,
        }
    }
}

impl BodyBounds {
    /// Of small messages. A pod has as many at a time as it sends of different kinds.
    const SMALL: Self = Self {
        all: 32 * MAX_BODY_BYTES,
        namespace: 4 * MAX_BODY_BYTES,
        pod: 4 * SMALL_BYTES,
    };
    /// Of small requests for leases: thousands of gateways wait at the same time while the API server is slow.
    const LEASES: Self = Self {
        all: 64 * MAX_BODY_BYTES,
        namespace: 16 * MAX_BODY_BYTES,
        pod: 4 * SMALL_BYTES,
    };
}

/// Longest body that is small, in bytes.
const SMALL_BYTES: usize = 16 * 1024;
/// What the smallest request counts as: it takes memory besides its body.
const LEAST_BYTES: usize = 1024;

/// What a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyKind {
    /// A message, whose room is free once it is parsed.
    Message,
    /// A request for leases, which keeps its room until they are written.
    Lease,
}

/// The rooms for bodies of each size and kind.
pub(super) struct BodyRooms {
    large: BodyRoom,
    small: BodyRoom,
    leases: BodyRoom,
}

impl BodyRooms {
    /// These bounds are those of large bodies.
    pub(super) fn new(large: BodyBounds) -> Self {
        Self {
            large: BodyRoom::new(large),
            small: BodyRoom::new(BodyBounds::SMALL),
            leases: BodyRoom::new(BodyBounds::LEASES),
        }
    }

    /// Room for a body of this kind and length; a body of unknown length is large.
    pub(super) async fn take(
        &self,
        pod: (&str, &str),
        kind: BodyKind,
        length: Option<usize>,
        longest: Duration,
    ) -> Option<BodyPermit> {
        let room = match (length, kind) {
            (Some(0..=SMALL_BYTES), BodyKind::Message) => &self.small,
            (Some(0..=SMALL_BYTES), BodyKind::Lease) => &self.leases,
            _ => &self.large,
        };
        room.take(pod, length, longest).await
    }
}

/// The room for bodies of one size and kind.
struct BodyRoom {
    bounds: BodyBounds,
    all: Arc<Semaphore>,
    /// The shares of those that have requests, by pod and by namespace.
    shares: Mutex<HashMap<ShareKey, Weak<Semaphore>>>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum ShareKey {
    Pod(String),
    Namespace(String),
}

/// The room of one body, until it is dropped.
pub(super) struct BodyPermit {
    // The shares live as long as the permits of them.
    _permits: [OwnedSemaphorePermit; 3],
}

impl BodyRoom {
    fn new(bounds: BodyBounds) -> Self {
        Self {
            bounds,
            all: Arc::new(Semaphore::new(bounds.all)),
            shares: Mutex::default(),
        }
    }

    /// Room for a body of this length, as it was announced; `None`: there was none for so long. A pod at its bound waits for its own
    /// requests first, and holds nothing that others wait for.
    async fn take(
        &self,
        (namespace, pod): (&str, &str),
        length: Option<usize>,
        longest: Duration,
    ) -> Option<BodyPermit> {
        let length = length.map_or(MAX_BODY_BYTES, |length| length.clamp(LEAST_BYTES, MAX_BODY_BYTES));
        let bytes = u32::try_from(length).ok()?;
        let of_pod = self.share(ShareKey::Pod(pod.to_owned()), self.bounds.pod);
        let of_namespace = self.share(ShareKey::Namespace(namespace.to_owned()), self.bounds.namespace);
        let all = Arc::clone(&self.all);
        let permits = async {
            Some([
                of_pod.acquire_many_owned(bytes).await.ok()?,
                of_namespace.acquire_many_owned(bytes).await.ok()?,
                all.acquire_many_owned(bytes).await.ok()?,
            ])
        };
        let permits = timeout(longest, permits).await.ok()??;
        Some(BodyPermit { _permits: permits })
    }

    fn share(&self, key: ShareKey, bound: usize) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = shares.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        // Unused ones are removed when the table would grow.
        if shares.len() == shares.capacity() {
            shares.retain(|_, share| share.strong_count() > 0);
        }
        let share = Arc::new(Semaphore::new(bound));
        shares.insert(key, Arc::downgrade(&share));
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(100);

    fn room() -> BodyRoom {
        BodyRoom::new(BodyBounds {
            all: 4 * MAX_BODY_BYTES,
            namespace: 3 * MAX_BODY_BYTES,
            pod: 2 * MAX_BODY_BYTES,
        })
    }

    #[tokio::test(start_paused = true)]
    async fn the_bodies_of_one_pod_leave_room_for_others_and_their_end_gives_it_back() {
        let room = room();
        let full = || room.take(("a", "p"), None, SOON);
        let first = full().await.unwrap();
        let rest = room.take(("a", "p"), Some(MAX_BODY_BYTES - LEAST_BYTES), SOON).await;
        let last = room.take(("a", "p"), Some(LEAST_BYTES), SOON).await;
        assert!(rest.is_some() && last.is_some());
        assert!(room.take(("a", "p"), Some(1), SOON).await.is_none());
        assert!(room.take(("a", "q"), None, SOON).await.is_some(), "another pod");
        drop(first);
        assert!(full().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_bodies_of_one_namespace_leave_room_for_others_and_all_are_bounded() {
        let room = room();
        let mut held = Vec::new();
        for pod in ["p", "q", "r"] {
            held.push(room.take(("a", pod), None, SOON).await.unwrap());
        }
        assert!(room.take(("a", "s"), Some(0), SOON).await.is_none());
        held.push(room.take(("b", "t"), None, SOON).await.unwrap());
        assert!(room.take(("c", "u"), Some(0), SOON).await.is_none(), "all of the room");
        held.pop();
        assert!(room.take(("c", "u"), None, SOON).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_its_own_share_holds_nothing_of_what_others_wait_for() {
        let room = room();
        let _held = [
            room.take(("a", "p"), None, SOON).await.unwrap(),
            room.take(("a", "p"), None, SOON).await.unwrap(),
        ];
        let more = room.take(("a", "p"), None, Duration::from_secs(10));
        tokio::pin!(more);
        assert!(futures::poll!(&mut more).is_pending());
        assert!(room.take(("a", "q"), None, SOON).await.is_some());
        assert!(room.take(("b", "r"), None, SOON).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn small_bodies_wait_neither_for_large_ones_nor_for_leases() {
        use BodyKind::{Lease, Message};
        let rooms = BodyRooms::new(BodyBounds::default());
        let pods = |count: usize| (0..4).flat_map(move |namespace| (0..count).map(move |pod| (namespace, pod)));
        let mut held = Vec::new();
        for (namespace, pod) in pods(8) {
            let names = (namespace.to_string(), format!("{namespace}-{pod}"));
            for _ in 0..2 {
                held.push(rooms.take((&names.0, &names.1), Message, None, SOON).await.unwrap());
            }
        }
        let large = rooms.take(("e", "x"), Message, Some(SMALL_BYTES + 1), SOON);
        assert!(large.await.is_none(), "they have all of the room");
        for kind in [Message, Lease] {
            assert!(rooms.take(("e", "x"), kind, Some(SMALL_BYTES), SOON).await.is_some());
        }
        for pod in 0..4096 {
            let pod = pod.to_string();
            held.push(rooms.take(("e", &pod), Lease, Some(500), SOON).await.unwrap());
        }
        assert!(rooms.take(("e", "y"), Lease, Some(500), SOON).await.is_none());
        assert!(rooms.take(("e", "y"), Message, Some(500), SOON).await.is_some());
        assert!(rooms.take(("f", "z"), Lease, Some(500), SOON).await.is_some());
    }

    #[tokio::test]
    async fn unused_shares_are_forgotten() {
        let room = room();
        for number in 0..10_000 {
            room.take(("a", &number.to_string()), Some(1), SOON).await.unwrap();
        }
        assert!(room.shares.lock().unwrap().len() < 100);
    }

    /// What a gateway sends at the same time, one byte after the other, has room.
    #[test]
    fn the_longest_body_has_room_in_every_share() {
        let bounds = BodyBounds::default();
        assert!(bounds.pod >= 2 * MAX_BODY_BYTES && bounds.namespace > bounds.pod && bounds.all > bounds.namespace);
    }
}
