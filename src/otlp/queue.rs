//! A bounded queue whose writers never wait: beyond its bound the oldest entries are dropped and counted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

/// Counts what was not exported. All clones count together.
#[derive(Clone, Debug, Default)]
pub struct DropCount(Arc<AtomicU64>);

impl DropCount {
    /// Adds to the count.
    pub fn add(&self, number: usize) {
        self.0
            .fetch_add(u64::try_from(number).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How many were dropped since the start of the process.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the count and starts again at 0.
    #[must_use]
    pub fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// What a queue holds.
pub(crate) trait QueuedRecord {
    /// About how much memory it takes.
    fn bytes(&self) -> usize;
}

/// Memory of what waits in one queue. With records of the usual size, their number is the bound.
const MAX_BYTES: usize = 16 * 1024 * 1024;
/// Memory of a batch of more than one entry. It is counted as four times the size on the wire, so a request has about 3 MiB:
/// collectors accept 20 MiB over HTTP by default, and what they pass it on to over gRPC accepts 4 MiB.
const MAX_BATCH_BYTES: usize = 12 * 1024 * 1024;

#[derive(Debug)]
pub(crate) struct DropQueue<T> {
    entries: Mutex<QueueEntries<T>>,
    arrived: Notify,
    capacity: usize,
    pub(crate) dropped: DropCount,
}

#[derive(Debug)]
struct QueueEntries<T> {
    /// Each with its size.
    waiting: VecDeque<(usize, T)>,
    bytes: usize,
    is_closed: bool,
}

impl<T> QueueEntries<T> {
    fn pop(&mut self) -> Option<T> {
        let (bytes, entry) = self.waiting.pop_front()?;
        self.bytes -= bytes;
        Some(entry)
    }
}

impl<T: QueuedRecord> DropQueue<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            entries: Mutex::new(QueueEntries {
                waiting: VecDeque::new(),
                bytes: 0,
                is_closed: false,
            }),
            arrived: Notify::new(),
            capacity,
            dropped: DropCount::default(),
        }
    }

    fn entries(&self) -> MutexGuard<'_, QueueEntries<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry. If the queue is full, its oldest entries are dropped.
    pub(crate) fn push(&self, entry: T) {
        let bytes = entry.bytes();
        let mut oldest = Vec::new();
        {
            let mut entries = self.entries();
            if entries.is_closed {
                return;
            }
            while entries.waiting.len() >= self.capacity || entries.bytes.saturating_add(bytes) > MAX_BYTES {
                let Some(entry) = entries.pop() else { break };
                oldest.push(entry);
            }
            entries.bytes += bytes;
            entries.waiting.push_back((bytes, entry));
        }
        self.dropped.add(oldest.len());
        self.arrived.notify_one();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.entries().is_closed
    }

    /// Discards what waits, and what is added from now on, without counting it.
    pub(crate) fn close(&self) {
        let mut entries = self.entries();
        entries.is_closed = true;
        entries.waiting = VecDeque::new();
        entries.bytes = 0;
    }

    /// Moves entries into a batch of `bytes` bytes. Returns whether it is full.
    fn fill(&self, max: usize, batch: &mut Vec<T>, bytes: &mut usize) -> bool {
        let mut entries = self.entries();
        while batch.len() < max {
            let Some((next, _)) = entries.waiting.front() else {
                return false;
            };
            if !batch.is_empty() && bytes.saturating_add(*next) > MAX_BATCH_BYTES {
                return true;
            }
            *bytes += next;
            batch.extend(entries.pop());
        }
        true
    }

    /// Waits for entries until a batch is full, its first one has waited for `delay`, or `closing`. `None`: closing, and
    /// the queue is empty.
    pub(crate) async fn next_batch(&self, max: usize, delay: Duration, closing: &CancellationToken) -> Option<Vec<T>> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut deadline = None;
        loop {
            let is_full = self.fill(max, &mut batch, &mut bytes);
            let is_due = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if is_full || is_due || closing.is_cancelled() {
                return Some(batch).filter(|batch| !batch.is_empty());
            }
            if deadline.is_none() && !batch.is_empty() {
                deadline = Some(Instant::now() + delay);
            }
            let change = async {
                tokio::select! {
                    () = self.arrived.notified() => {}
                    () = closing.cancelled() => {}
                }
            };
            match deadline {
                // Afterwards the batch is due.
                Some(deadline) => drop(timeout_at(deadline, change).await),
                None => change.await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    impl QueuedRecord for i32 {
        fn bytes(&self) -> usize {
            4
        }
    }

    impl QueuedRecord for Vec<u8> {
        fn bytes(&self) -> usize {
            self.len()
        }
    }

    #[tokio::test]
    async fn the_bytes_that_wait_are_bounded_too() {
        let queue = DropQueue::new(999);
        (0..4).for_each(|_| queue.push(vec![0; MAX_BYTES / 4]));
        assert_eq!(queue.dropped.get(), 0);
        queue.push(vec![1]);
        assert_eq!(queue.dropped.get(), 1);
        let closing = CancellationToken::new();
        for expected in [MAX_BYTES / 4, MAX_BYTES / 4, MAX_BYTES / 4, 1] {
            let batch = queue.next_batch(1, HOUR, &closing).await.unwrap();
            assert_eq!(batch[0].len(), expected);
        }
        (0..4).for_each(|_| queue.push(vec![0; MAX_BYTES / 4]));
        assert_eq!(queue.dropped.get(), 1);
    }

    #[tokio::test]
    async fn beyond_the_bound_the_oldest_entries_are_dropped_and_counted() {
        let queue = DropQueue::new(2);
        (1..=2).for_each(|entry| queue.push(entry));
        assert_eq!(queue.dropped.get(), 0);
        queue.push(3);
        assert_eq!(queue.dropped.get(), 1);
        let batch = queue.next_batch(9, Duration::ZERO, &CancellationToken::new()).await;
        assert_eq!(batch, Some(vec![2, 3]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_ends_when_it_is_full_or_its_first_entry_has_waited() {
        let queue = DropQueue::new(9);
        let closing = CancellationToken::new();
        (1..=3).for_each(|entry| queue.push(entry));
        assert_eq!(queue.next_batch(2, HOUR, &closing).await, Some(vec![1, 2]));
        let started = Instant::now();
        assert_eq!(queue.next_batch(2, HOUR, &closing).await, Some(vec![3]));
        assert_eq!(started.elapsed(), HOUR);
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_ends_at_its_size_and_holds_at_least_one_entry() {
        let queue = DropQueue::new(9);
        let closing = CancellationToken::new();
        let (half, large) = (MAX_BATCH_BYTES / 2, MAX_BATCH_BYTES + 1);
        for (arriving, expected, waits) in [
            (vec![half, half, 1], vec![half, half], Duration::ZERO),
            (vec![large], vec![1], Duration::ZERO),
            (vec![2], vec![large], Duration::ZERO),
            (vec![], vec![2], HOUR),
        ] {
            for bytes in arriving {
                queue.push(vec![0_u8; bytes]);
            }
            let started = Instant::now();
            let batch = queue.next_batch(9, HOUR, &closing).await.unwrap();
            assert_eq!(batch.iter().map(Vec::len).collect::<Vec<_>>(), expected);
            assert_eq!(started.elapsed(), waits);
        }
        assert_eq!(queue.dropped.get(), 0);
    }

    #[tokio::test]
    async fn closing_ends_a_batch_and_an_empty_queue() {
        let queue = DropQueue::new(9);
        let closing = CancellationToken::new();
        closing.cancel();
        queue.push(1);
        assert_eq!(queue.next_batch(2, HOUR, &closing).await, Some(vec![1]));
        assert_eq!(queue.next_batch(2, HOUR, &closing).await, None);
    }

    #[test]
    fn a_closed_queue_keeps_nothing() {
        let queue = DropQueue::new(1);
        queue.push(1);
        queue.close();
        queue.push(2);
        queue.push(3);
        assert!(queue.is_closed());
        assert_eq!((queue.entries().waiting.len(), queue.dropped.get()), (0, 0));
    }
}
