//! Limits requests for a TokenReview, so that one address cannot use up the capacity for all.
//!
//! Anyone who reaches the link can present any token, and each review is a request to the API server. Each address may
//! therefore have only a few reviews pending, and none for a while after several invalid tokens. A server whose clients share
//! addresses with strangers may let an address exceed its share as long as there is room for all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::support::connections::{ConnectionBounds, ConnectionLimiter, ConnectionSlot};
use crate::support::hash;

/// Maximum number of pending reviews, in total and per address. The pods of a node may share an address.
const WAITING: ConnectionBounds = ConnectionBounds::of_strangers(4096, 64);
/// Maximum number of invalid tokens per address within [`WINDOW`].
pub(in crate::controller) const MAX_WRONG: u32 = 20;
/// How long the invalid tokens of an address count.
pub(in crate::controller) const WINDOW: Duration = Duration::from_secs(10);
/// Invalid tokens of all addresses within [`WINDOW`], below which those of one address keep no other token out: what servers allow
/// whose clients share addresses with strangers.
pub(in crate::controller) const SHARED_ROOM: u32 = 200;
/// Maximum number of rejected tokens that are remembered. When it is reached, all are forgotten.
const MAX_REJECTED: usize = 1024;
/// Maximum number of addresses whose invalid tokens are counted. When it is reached, all counts are dropped.
const MAX_ADDRESSES: usize = 16_384;

/// The hash of a token, so that no token is kept.
pub(in crate::controller) type TokenHash = [u8; hash::BYTES];

/// Tokens that the API server rejected within [`WINDOW`]: they are refused without asking again.
#[derive(Default)]
pub(in crate::controller) struct RejectedTokens(Mutex<HashMap<TokenHash, Instant>>);

impl RejectedTokens {
    /// Whether this token was rejected a moment ago.
    pub(in crate::controller) fn contain(&self, token: &TokenHash) -> bool {
        self.lock().get(token).is_some_and(|at| at.elapsed() < WINDOW)
    }

    /// Remembers a token whose rejected review began at this time.
    pub(in crate::controller) fn add(&self, token: TokenHash, at: Instant) {
        let mut rejected = self.lock();
        if rejected.len() >= MAX_REJECTED {
            rejected.clear();
        }
        rejected.insert(token, at);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TokenHash, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(in crate::controller) struct ReviewLimiter {
    waiting: Arc<ConnectionLimiter>,
    asking: Semaphore,
    /// Invalid tokens of all addresses within [`WINDOW`], below which an address may exceed [`MAX_WRONG`].
    shared_room: u32,
    wrong: Mutex<WrongTokens>,
}

/// Invalid tokens since a time.
#[derive(Clone, Copy)]
struct WrongCount {
    since: Instant,
    count: u32,
}

impl WrongCount {
    /// What still counts.
    fn present(self, now: Instant) -> u32 {
        if now.duration_since(self.since) < WINDOW {
            self.count
        } else {
            0
        }
    }

    fn add(counted: Option<Self>, now: Instant) -> Self {
        match counted {
            Some(Self { since, count }) if now.duration_since(since) < WINDOW => Self {
                since,
                count: count.saturating_add(1),
            },
            _ => Self { since: now, count: 1 },
        }
    }
}

#[derive(Default)]
struct WrongTokens {
    all: Option<WrongCount>,
    addresses: HashMap<IpAddr, WrongCount>,
}

/// Permission for one review, held while it is pending.
pub(in crate::controller) struct ReviewPermit<'a> {
    _waited: ConnectionSlot,
    _asks: SemaphorePermit<'a>,
}

impl ReviewLimiter {
    /// Allows `asking` concurrent reviews; further ones wait.
    pub(in crate::controller) fn new(asking: usize) -> Self {
        Self {
            waiting: ConnectionLimiter::new(WAITING),
            asking: Semaphore::new(asking),
            shared_room: 0,
            wrong: Mutex::default(),
        }
    }

    /// Lets an address exceed its share of invalid tokens while those of all addresses are fewer than `capacity`.
    pub(in crate::controller) fn with_shared_room(self, capacity: u32) -> Self {
        Self {
            shared_room: capacity,
            ..self
        }
    }

    /// Waits for a permit; `None` if this address has exceeded its limits.
    pub(in crate::controller) async fn acquire(&self, address: IpAddr) -> Option<ReviewPermit<'_>> {
        let address = address.to_canonical();
        if self.has_exceeded(address) {
            return None;
        }
        let waited = self.waiting.take(address)?;
        let asks = self.asking.acquire().await.ok()?;
        // Others of this address may have been rejected meanwhile.
        if self.has_exceeded(address) {
            return None;
        }
        Some(ReviewPermit {
            _waited: waited,
            _asks: asks,
        })
    }

    /// Counts an invalid token from this address.
    pub(in crate::controller) fn record_failure(&self, address: IpAddr) {
        let now = Instant::now();
        let address = address.to_canonical();
        let mut wrong = self.wrong();
        if wrong.addresses.len() >= MAX_ADDRESSES {
            wrong.addresses.clear();
        }
        wrong.all = Some(WrongCount::add(wrong.all, now));
        let counted = WrongCount::add(wrong.addresses.get(&address).copied(), now);
        wrong.addresses.insert(address, counted);
    }

    fn has_exceeded(&self, address: IpAddr) -> bool {
        let now = Instant::now();
        let wrong = self.wrong();
        let present = |counted: Option<&WrongCount>| counted.map_or(0, |counted| counted.present(now));
        present(wrong.addresses.get(&address)) >= MAX_WRONG && present(wrong.all.as_ref()) >= self.shared_room
    }

    fn wrong(&self) -> MutexGuard<'_, WrongTokens> {
        self.wrong.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[tokio::test(start_paused = true)]
    async fn after_some_wrong_tokens_an_address_waits_and_others_do_not() {
        let gate = ReviewLimiter::new(1);
        for _ in 1..MAX_WRONG {
            gate.record_failure(address(1));
        }
        assert!(gate.acquire(address(1)).await.is_some());
        gate.record_failure("::ffff:10.0.0.1".parse().unwrap());
        assert!(gate.acquire(address(1)).await.is_none());
        assert!(gate.acquire(address(2)).await.is_some());
        tokio::time::advance(WINDOW).await;
        assert!(gate.acquire(address(1)).await.is_some());
        gate.record_failure(address(1));
        assert!(gate.acquire(address(1)).await.is_some(), "the count was reset");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_of_an_address_above_its_share_makes_no_review() {
        let gate = ReviewLimiter::new(1);
        for (failures, may_ask) in [(MAX_WRONG - 1, true), (1, false)] {
            let first = gate.acquire(address(1)).await.unwrap();
            let mut waiting = Box::pin(gate.acquire(address(1)));
            assert!(poll!(&mut waiting).is_pending());
            for _ in 0..failures {
                gate.record_failure(address(1));
            }
            drop(first);
            assert_eq!(waiting.await.is_some(), may_ask);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_bounded_number_of_rejected_tokens_is_cached_for_ten_seconds() {
        let rejected = RejectedTokens::default();
        rejected.add(hash::sha256("a"), Instant::now());
        tokio::time::advance(WINDOW.saturating_sub(Duration::from_millis(1))).await;
        assert!(rejected.contain(&hash::sha256("a")) && !rejected.contain(&hash::sha256("b")));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!rejected.contain(&hash::sha256("a")));
        for number in 1..MAX_REJECTED {
            rejected.add(hash::sha256(number.to_string()), Instant::now());
        }
        assert!(rejected.contain(&hash::sha256("1")));
        rejected.add(hash::sha256("b"), Instant::now());
        assert!(rejected.contain(&hash::sha256("b")) && !rejected.contain(&hash::sha256("1")));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_exceeds_its_share_while_there_is_room_for_all() {
        let capacity = MAX_WRONG + 5;
        let gate = ReviewLimiter::new(1).with_shared_room(capacity);
        for _ in 1..capacity {
            gate.record_failure(address(1));
        }
        assert!(gate.acquire(address(1)).await.is_some());
        gate.record_failure(address(2));
        assert!(gate.acquire(address(1)).await.is_none());
        assert!(gate.acquire(address(2)).await.is_some());
        tokio::time::advance(WINDOW).await;
        assert!(gate.acquire(address(1)).await.is_some());
    }

    #[tokio::test]
    async fn an_address_has_a_bounded_number_of_open_reviews_and_others_are_served() {
        let gate = ReviewLimiter::new(1);
        let first = gate.acquire(address(1)).await.unwrap();
        let mut waiting: Vec<_> = (1..WAITING.per_address)
            .map(|_| Box::pin(gate.acquire(address(1))))
            .collect();
        for one in &mut waiting {
            assert!(poll!(one).is_pending());
        }
        assert!(gate.acquire(address(1)).await.is_none());
        let mut other = Box::pin(gate.acquire(address(2)));
        assert!(poll!(&mut other).is_pending());
        drop((first, waiting));
        assert!(other.await.is_some());
        assert!(gate.acquire(address(1)).await.is_some());
    }

    #[tokio::test]
    async fn the_count_of_wrong_tokens_is_bounded() {
        let gate = ReviewLimiter::new(1);
        for number in 0..=u32::try_from(MAX_ADDRESSES).unwrap() {
            gate.record_failure(std::net::Ipv4Addr::from(number).into());
        }
        assert_eq!(gate.wrong().addresses.len(), 1);
    }
}
