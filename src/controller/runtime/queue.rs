//! The queue of objects to reconcile, after client-go's work queue.
//!
//! A key waits at most once, however often it is added, and is never handed to two workers at a time: a key that is
//! added while it is processed waits until that worker is done. Keys wait in two classes, first in, first out in each namespace,
//! and the namespaces take turns: a tenant that changes many objects does not delay another one.
//! Low priority is served when no key of high priority waits, and, so that it does not starve, when the next key of any
//! namespace has waited for [`AGE`]. [`QueueState`] holds these rules and reads no clock; [`WorkQueue`] lets workers wait for it.
//!
//! ADR 0055 explains why this is not the scheduler of kube.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::controller::Requeue;
use super::fair_line::FairLine;
use crate::api::NamespacedName;
use crate::telemetry::queues::{QueueMetrics, QueueReading, ReadQueue};

/// After this time, the next key of low priority of a namespace is served next.
pub(super) const AGE: Duration = Duration::from_secs(2);

/// The name of an object in a queue.
pub(in crate::controller) trait QueueKey: Clone + Eq + Hash + Ord {
    /// The namespace whose turn it is when this key is served.
    fn namespace(&self) -> &str;
}

impl QueueKey for NamespacedName {
    fn namespace(&self) -> &str {
        &self.namespace
    }
}

/// The class of a request. The more urgent one compares as less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::controller) enum Priority {
    /// Objects may have to be created or deleted.
    High,
    /// At most the status changes.
    Low,
}

/// A later request for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DelayedRequest {
    until: Instant,
    priority: Priority,
}

/// A request for a key that no worker has taken yet.
#[derive(Clone, Copy, Debug)]
struct QueuedRequest {
    priority: Priority,
    /// Its place in a line; `None` while the key is processed.
    ticket: Option<u64>,
    /// When the key was first requested, for the time that it waits.
    since: Instant,
}

/// A key that a worker has.
#[derive(Clone, Copy, Debug)]
struct KeyInProgress {
    since: Instant,
    /// How long it waited before.
    waited: Duration,
}

/// A place in a line. It is void once the key's request has another ticket, because it was moved to the other line.
#[derive(Debug)]
struct QueuePlace<K> {
    key: K,
    ticket: u64,
    since: Instant,
}

/// The answer to a worker that asks for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextWork<K> {
    /// This key; the worker must call [`QueueState::finish`].
    Take(K),
    /// Nothing before this moment, unless something is added.
    At(Instant),
    /// Nothing until something is added.
    Idle,
    /// Nothing any more.
    ShutDown,
}

#[derive(Debug)]
pub(super) struct QueueState<K> {
    /// The keys to process: what client-go calls the dirty set.
    requests: HashMap<K, QueuedRequest>,
    processing: HashMap<K, KeyInProgress>,
    high: FairLine<QueuePlace<K>>,
    low: FairLine<QueuePlace<K>>,
    delays: HashMap<K, DelayedRequest>,
    /// The delays by time.
    alarms: BTreeSet<(Instant, K)>,
    last_ticket: u64,
    /// Number of keys that were ever added.
    added: u64,
    /// Whether the last key was served for its age, before one of high priority.
    served_aged: bool,
    shut_down: bool,
}

impl<K: QueueKey> QueueState<K> {
    pub(super) fn new() -> Self {
        Self {
            requests: HashMap::new(),
            processing: HashMap::new(),
            high: FairLine::new(),
            low: FairLine::new(),
            delays: HashMap::new(),
            alarms: BTreeSet::new(),
            last_ticket: 0,
            added: 0,
            served_aged: false,
            shut_down: false,
        }
    }

    /// Adds a key. It replaces a delay of the key, and a request of lower priority, but not its own equal.
    pub(super) fn add(&mut self, key: K, priority: Priority, now: Instant) {
        if self.shut_down {
            return;
        }
        self.remove_delay(&key);
        let known = self.requests.get(&key).copied();
        if known.is_some_and(|known| known.priority <= priority) {
            return;
        }
        self.added += u64::from(known.is_none());
        let since = known.map_or(now, |known| known.since);
        let ticket = (!self.processing.contains_key(&key)).then(|| self.line_up(key.clone(), priority, now));
        let request = QueuedRequest {
            priority,
            ticket,
            since,
        };
        self.requests.insert(key, request);
    }

    /// Adds a key at a later moment. Of several delays of a key the earliest remains, with the highest priority of all.
    /// A key that waits already needs none: it is processed sooner.
    pub(super) fn add_at(&mut self, key: K, priority: Priority, until: Instant, now: Instant) {
        if self.shut_down || self.requests.contains_key(&key) {
            return;
        }
        if until <= now {
            self.add(key, priority, now);
            return;
        }
        let wanted = DelayedRequest { until, priority };
        let delay = self.remove_delay(&key).map_or(wanted, |known| DelayedRequest {
            until: known.until.min(until),
            priority: known.priority.min(priority),
        });
        self.alarms.insert((delay.until, key.clone()));
        self.delays.insert(key, delay);
    }

    /// Takes the next key.
    pub(super) fn next(&mut self, now: Instant) -> NextWork<K> {
        if self.shut_down {
            return NextWork::ShutDown;
        }
        self.add_due(now);
        discard_void(&mut self.high, &self.requests);
        discard_void(&mut self.low, &self.requests);
        // Only every other one, so that a backlog of low priority does not turn the order around.
        let overtakes = !self.high.is_empty() && !self.served_aged && self.turn_to_aged(now);
        self.served_aged = overtakes;
        let line = if overtakes || self.high.is_empty() {
            &mut self.low
        } else {
            &mut self.high
        };
        let Some(first) = line.pop() else {
            let alarm = self.alarms.first();
            return alarm.map_or(NextWork::Idle, |(moment, _)| NextWork::At(*moment));
        };
        let requested = self.requests.remove(&first.key);
        let progress = KeyInProgress {
            since: now,
            waited: requested.map_or(Duration::ZERO, |request| now - request.since),
        };
        self.processing.insert(first.key.clone(), progress);
        NextWork::Take(first.key)
    }

    /// Gives the next turn of low priority to a namespace whose next key has waited for [`AGE`], if there is one.
    fn turn_to_aged(&mut self, now: Instant) -> bool {
        let is_aged = |place: &QueuePlace<K>| now - place.since >= AGE;
        while self.low.advance_to(is_aged) {
            // What has aged may be a void place before a newer one.
            discard_void(&mut self.low, &self.requests);
            if self.low.front().is_some_and(is_aged) {
                return true;
            }
        }
        false
    }

    /// A worker is done with a key. Returns how long it took.
    pub(super) fn finish(&mut self, key: &K, now: Instant) -> Duration {
        let progress = self.processing.remove(key);
        if let Some(request) = self.requests.get(key).copied() {
            let ticket = Some(self.line_up(key.clone(), request.priority, now));
            self.requests.insert(key.clone(), QueuedRequest { ticket, ..request });
        }
        progress.map_or(Duration::ZERO, |progress| now - progress.since)
    }

    /// How long a key that is processed waited.
    fn waited(&self, key: &K) -> Duration {
        self.processing
            .get(key)
            .map_or(Duration::ZERO, |progress| progress.waited)
    }

    /// What the metrics show. As in client-go, a key that was added while it is processed counts as waiting.
    pub(super) fn read(&self, now: Instant) -> QueueReading {
        let taken = self.processing.values().map(|progress| now - progress.since);
        QueueReading {
            added: self.added,
            depth: self.requests.len(),
            unfinished: taken.clone().sum(),
            longest: taken.max().unwrap_or_default(),
        }
    }

    /// Hands out no more keys and accepts none.
    pub(super) fn shut_down(&mut self) {
        self.shut_down = true;
    }

    /// Whether a key of high priority waits for a worker.
    pub(super) fn has_urgent(&self) -> bool {
        // Places of high priority are never void: there is no higher one to move to.
        !self.high.is_empty()
    }

    /// Number of keys that wait for a worker.
    #[cfg(test)]
    pub(super) fn depth(&self) -> usize {
        let again = self.processing.keys().filter(|key| self.requests.contains_key(*key));
        self.requests.len() - again.count()
    }

    fn line_up(&mut self, key: K, priority: Priority, since: Instant) -> u64 {
        self.last_ticket += 1;
        let line = match priority {
            Priority::High => &mut self.high,
            Priority::Low => &mut self.low,
        };
        let ticket = self.last_ticket;
        let namespace = key.namespace().to_owned();
        line.push(&namespace, QueuePlace { key, ticket, since });
        self.last_ticket
    }

    fn add_due(&mut self, now: Instant) {
        while let Some((_, key)) = self.alarms.first().filter(|(moment, _)| *moment <= now).cloned() {
            let Some(delay) = self.remove_delay(&key) else {
                return;
            };
            self.add(key, delay.priority, now);
        }
    }

    fn remove_delay(&mut self, key: &K) -> Option<DelayedRequest> {
        let delay = self.delays.remove(key)?;
        self.alarms.remove(&(delay.until, key.clone()));
        Some(delay)
    }
}

fn discard_void<K: Eq + Hash>(line: &mut FairLine<QueuePlace<K>>, requests: &HashMap<K, QueuedRequest>) {
    let is_void =
        |place: &QueuePlace<K>| requests.get(&place.key).and_then(|request| request.ticket) != Some(place.ticket);
    line.discard_while(is_void);
}

/// A queue that several workers serve.
#[derive(Debug)]
pub(in crate::controller) struct WorkQueue<K> {
    state: Mutex<QueueState<K>>,
    /// Wakes one idle worker. See [`Self::next`].
    added: Notify,
    metrics: QueueMetrics,
}

impl<K: QueueKey> WorkQueue<K> {
    pub(in crate::controller) fn new(metrics: QueueMetrics) -> Self {
        Self {
            state: Mutex::new(QueueState::new()),
            added: Notify::new(),
            metrics,
        }
    }

    /// Adds a key.
    pub(in crate::controller) fn add(&self, key: K, priority: Priority) {
        self.lock().add(key, priority, Instant::now());
        self.added.notify_one();
    }

    /// Waits for the next key; `None` after [`Self::shut_down`]. The worker must call [`Self::finish`].
    ///
    /// One addition wakes one worker, which may take work instead of waiting for the next alarm. A worker that takes a
    /// key therefore wakes another one: as long as one is idle, one idle worker knows the next alarm.
    pub(in crate::controller) async fn next(&self) -> Option<K> {
        loop {
            match self.try_next() {
                NextWork::Take(key) => {
                    self.added.notify_one();
                    return Some(key);
                }
                NextWork::ShutDown => {
                    self.added.notify_one();
                    return None;
                }
                NextWork::Idle => self.added.notified().await,
                NextWork::At(moment) => {
                    tokio::select! {
                        () = self.added.notified() => {}
                        () = tokio::time::sleep_until(moment) => {}
                    }
                }
            }
        }
    }

    /// Takes the next key, if there is one now.
    fn try_next(&self) -> NextWork<K> {
        let mut state = self.lock();
        let next = state.next(Instant::now());
        if let NextWork::Take(key) = &next {
            self.metrics.waits.observe(state.waited(key).as_secs_f64());
        }
        next
    }

    /// A worker is done with a key.
    pub(in crate::controller) fn finish(&self, key: K, requeue: Requeue) {
        let now = Instant::now();
        let mut state = self.lock();
        let took = state.finish(&key, now);
        if let Requeue::After(delay, priority) = requeue {
            state.add_at(key, priority, now + delay, now);
        }
        drop(state);
        self.metrics.work.observe(took.as_secs_f64());
        self.added.notify_one();
    }

    /// Counts a key that is added again because it failed.
    pub(in crate::controller) fn count_retry(&self) {
        self.metrics.retries.inc();
    }

    /// Whether a key of high priority waits for a worker.
    pub(in crate::controller) fn has_urgent(&self) -> bool {
        self.lock().has_urgent()
    }

    /// Ends all workers once they are done with their keys.
    pub(in crate::controller) fn shut_down(&self) {
        self.lock().shut_down();
        self.added.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, QueueState<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: QueueKey + Send + Sync> ReadQueue for WorkQueue<K> {
    fn read(&self) -> QueueReading {
        self.lock().read(Instant::now())
    }
}
