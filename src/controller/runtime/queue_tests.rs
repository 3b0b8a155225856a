//! Tests of the queue: its rules against random sequences of calls, and its waiting workers in simulated time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;

use super::Requeue;
use super::queue::{AGE, NextWork, Priority, QueueKey, QueueState, WorkQueue};
use crate::api::NamespacedName;
use crate::telemetry::metrics::Metrics;

type Key = u8;

/// Keys of the tests that are all in one namespace.
macro_rules! keys_of_one_namespace {
    ($($key:ty),*) => {$(
        impl QueueKey for $key {
            fn namespace(&self) -> &str {
                ""
            }
        }
    )*};
}

keys_of_one_namespace!(u8, i32, u32, char, &'static str);

fn new_queue<K: QueueKey>() -> Arc<WorkQueue<K>> {
    Arc::new(WorkQueue::new(Metrics::new().unwrap().queues.of("agent")))
}

#[derive(Clone, Debug)]
enum Step {
    Add(Key, Priority),
    AddLater(Key, Priority, u64),
    Take,
    /// Finishes the key that was taken first of those that are processed.
    Finish,
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let priority = || prop_oneof![Just(Priority::High), Just(Priority::Low)];
    let step = prop_oneof![
        4 => (0..8_u8, priority()).prop_map(|(key, priority)| Step::Add(key, priority)),
        2 => (0..8_u8, priority(), 0..5000_u64).prop_map(|(key, priority, delay)| Step::AddLater(key, priority, delay)),
        4 => Just(Step::Take),
        3 => Just(Step::Finish),
        2 => (0..3000_u64).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 1..200)
}

/// What the queue should hold, kept in the simplest way.
struct Model {
    queue: QueueState<Key>,
    now: Instant,
    /// Keys without a worker, in the order in which they began to wait at their priority.
    waiting: Vec<(Key, Priority, Instant)>,
    /// Keys to process again.
    again: BTreeMap<Key, Priority>,
    processing: Vec<Key>,
    delays: BTreeMap<Key, (Instant, Priority)>,
    overtaken: bool,
}

impl Model {
    fn new() -> Self {
        Self {
            queue: QueueState::new(),
            now: Instant::now(),
            waiting: Vec::new(),
            again: BTreeMap::new(),
            processing: Vec::new(),
            delays: BTreeMap::new(),
            overtaken: false,
        }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Add(key, priority) => {
                self.queue.add(key, priority, self.now);
                self.added(key, priority);
            }
            Step::AddLater(key, priority, delay) => {
                let until = self.now + Duration::from_millis(delay);
                self.queue.add_at(key, priority, until, self.now);
                self.added_later(key, priority, until);
            }
            Step::Take => self.take(),
            Step::Finish if !self.processing.is_empty() => {
                let key = self.processing.remove(0);
                self.queue.finish(&key, self.now);
                if let Some(priority) = self.again.remove(&key) {
                    self.waiting.push((key, priority, self.now));
                }
            }
            Step::Finish => {}
            Step::Wait(time) => self.now += Duration::from_millis(time),
        }
        assert_eq!(self.queue.depth(), self.waiting.len());
        assert_eq!(self.queue.has_urgent(), self.first(Priority::High).is_some());
    }

    fn added(&mut self, key: Key, priority: Priority) {
        self.delays.remove(&key);
        if self.processing.contains(&key) {
            let known = self.again.entry(key).or_insert(priority);
            *known = priority.min(*known);
            return;
        }
        let known = self.waiting.iter().position(|(waiting, ..)| *waiting == key);
        match known {
            Some(at) if self.waiting[at].1 <= priority => return,
            Some(at) => {
                self.waiting.remove(at);
            }
            None => {}
        }
        self.waiting.push((key, priority, self.now));
    }

    fn added_later(&mut self, key: Key, priority: Priority, until: Instant) {
        let waits = self.waiting.iter().any(|(waiting, ..)| *waiting == key) || self.again.contains_key(&key);
        if waits {
            return;
        }
        if until <= self.now {
            self.added(key, priority);
            return;
        }
        let known = self.delays.entry(key).or_insert((until, priority));
        *known = (known.0.min(until), known.1.min(priority));
    }

    /// What is due joins the others in the order of the moments.
    fn add_due(&mut self) {
        let now = self.now;
        let mut due: Vec<_> = self
            .delays
            .iter()
            .map(|(key, delay)| (delay.0, *key, delay.1))
            .collect();
        due.retain(|(moment, ..)| *moment <= now);
        due.sort();
        for (_, key, priority) in due {
            self.added(key, priority);
        }
    }

    fn first(&self, priority: Priority) -> Option<(Key, Instant)> {
        let first = self.waiting.iter().find(|(_, class, _)| *class == priority);
        first.map(|(key, _, since)| (*key, *since))
    }

    fn take(&mut self) {
        self.add_due();
        let (high, low) = (self.first(Priority::High), self.first(Priority::Low));
        let key = match self.queue.next(self.now) {
            NextWork::Take(key) => key,
            NextWork::At(moment) => {
                assert!(self.waiting.is_empty(), "a key waits");
                let earliest = self.delays.values().map(|(moment, _)| *moment).min();
                assert_eq!(Some(moment), earliest);
                return;
            }
            NextWork::Idle => {
                assert!(self.waiting.is_empty() && self.delays.is_empty(), "a key is lost");
                return;
            }
            NextWork::ShutDown => panic!("nobody asked for that"),
        };
        assert!(!self.processing.contains(&key), "a second worker got {key}");
        let aged = low.is_some_and(|(_, since)| self.now - since >= AGE);
        let overtakes = high.is_some() && low.is_some_and(|(low, _)| low == key);
        if overtakes {
            assert!(aged && !self.overtaken, "{key} overtook high priority");
        } else {
            let first = high.or(low).map(|(key, _)| key);
            assert_eq!(Some(key), first, "not the first of its class");
            let late = aged && high.is_some() && !self.overtaken;
            assert!(!late, "a key of low priority waits for more than {AGE:?}");
        }
        self.overtaken = overtakes;
        self.waiting.retain(|(waiting, ..)| *waiting != key);
        self.processing.push(key);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn keys_are_exclusive_in_order_and_never_lost(steps in steps()) {
        let mut model = Model::new();
        for step in &steps {
            model.run(step);
        }
        // Everything that was asked for is handed out in the end.
        model.now += Duration::from_hours(1);
        for _ in 0..2 {
            while !model.processing.is_empty() {
                model.run(&Step::Finish);
            }
            model.add_due();
            for _ in 0..model.waiting.len() {
                model.run(&Step::Take);
            }
        }
        model.run(&Step::Take);
        prop_assert!(model.waiting.is_empty() && model.delays.is_empty() && model.again.is_empty());
    }
}

#[test]
fn low_priority_that_has_waited_is_served_every_other_time() {
    let mut queue = QueueState::new();
    let start = Instant::now();
    for key in 0..6 {
        queue.add(key, Priority::Low, start);
    }
    let late = start + AGE;
    for key in 10..16 {
        queue.add(key, Priority::High, late);
    }
    let taken: Vec<_> = (0..6).map(|_| queue.next(late)).collect();
    assert_eq!(taken, [0, 10, 1, 11, 2, 12].map(NextWork::Take));
    let mut queue = QueueState::new();
    queue.add(0, Priority::Low, start);
    let early = late.checked_sub(Duration::from_millis(1)).unwrap();
    queue.add(10, Priority::High, early);
    assert_eq!(queue.next(early), NextWork::Take(10));
}

#[test]
fn namespaces_take_turns_at_each_priority() {
    let (mut queue, now) = (QueueState::new(), Instant::now());
    let key = |namespace: &str, number: u32| NamespacedName::new(namespace, number.to_string());
    for priority in [Priority::High, Priority::Low] {
        for number in 0..1000 {
            queue.add(key("noisy", number), priority, now);
        }
        queue.add(key("quiet", 1), priority, now);
        let taken: Vec<_> = (0..3).map(|_| queue.next(now)).collect();
        let expected = [key("noisy", 0), key("quiet", 1), key("noisy", 1)].map(NextWork::Take);
        assert_eq!(taken, expected);
        for number in 2..1000 {
            assert_eq!(queue.next(now), NextWork::Take(key("noisy", number)));
        }
        for number in 0..1000 {
            queue.finish(&key("noisy", number), now);
        }
        queue.finish(&key("quiet", 1), now);
    }
}

#[test]
fn a_new_key_whose_namespace_is_next_does_not_hold_up_older_ones_of_low_priority() {
    let (mut queue, start) = (QueueState::new(), Instant::now());
    let key = |namespace: &str, number: u32| NamespacedName::new(namespace, number.to_string());
    for number in 0..100 {
        queue.add(key("a", number), Priority::Low, start);
    }
    let late = start + Duration::from_secs(3);
    queue.add(key("b", 0), Priority::Low, late);
    for number in 0..200 {
        queue.add(key("high", number), Priority::High, late);
    }
    let taken: Vec<_> = (0..4).map(|_| queue.next(late)).collect();
    let expected = [key("a", 0), key("high", 0), key("a", 1), key("high", 1)].map(NextWork::Take);
    assert_eq!(taken, expected);
    // Places that are void, because the keys moved to high priority, count for nothing.
    for number in 2..100 {
        queue.add(key("a", number), Priority::High, late);
    }
    for _ in 0..4 {
        assert!(matches!(queue.next(late), NextWork::Take(key) if key.namespace != "b"));
    }
    let aged = late + AGE;
    assert_eq!(queue.next(aged), NextWork::Take(key("b", 0)));
}

#[test]
fn a_key_added_while_it_is_processed_runs_once_more() {
    let (mut queue, now) = (QueueState::new(), Instant::now());
    queue.add('a', Priority::High, now);
    assert_eq!(queue.next(now), NextWork::Take('a'));
    queue.add('a', Priority::Low, now);
    queue.add('a', Priority::Low, now);
    assert_eq!((queue.next(now), queue.depth()), (NextWork::Idle, 0));
    queue.finish(&'a', now);
    assert_eq!((queue.depth(), queue.next(now)), (1, NextWork::Take('a')));
    queue.finish(&'a', now);
    assert_eq!(queue.next(now), NextWork::Idle);
}

#[test]
fn the_earliest_delay_counts_and_an_immediate_request_replaces_it() {
    let (mut queue, now) = (QueueState::new(), Instant::now());
    let at = |seconds| now + Duration::from_secs(seconds);
    queue.add_at('a', Priority::Low, at(9), now);
    queue.add_at('a', Priority::Low, at(5), now);
    queue.add_at('a', Priority::Low, at(7), now);
    assert_eq!(queue.next(now), NextWork::At(at(5)));
    queue.add('a', Priority::Low, now);
    assert_eq!(queue.next(now), NextWork::Take('a'));
    queue.finish(&'a', now);
    assert_eq!(queue.next(at(10)), NextWork::Idle);
}

#[test]
fn after_a_shutdown_nothing_is_handed_out_or_accepted() {
    let (mut queue, now) = (QueueState::new(), Instant::now());
    queue.add('a', Priority::High, now);
    queue.shut_down();
    queue.add('b', Priority::High, now);
    assert_eq!((queue.next(now), queue.depth()), (NextWork::ShutDown, 1));
}

#[tokio::test(start_paused = true)]
async fn a_delayed_key_is_processed_by_any_idle_worker() {
    let queue = new_queue();
    let (taken, mut seen) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..2 {
        let (queue, taken) = (queue.clone(), taken.clone());
        tokio::spawn(async move {
            while let Some(key) = queue.next().await {
                taken.send((key, Instant::now())).unwrap();
                if key == "busy" {
                    std::future::pending::<()>().await;
                }
                queue.finish(key, Requeue::AwaitChange);
            }
        });
    }
    tokio::task::yield_now().await;
    let start = Instant::now();
    queue.add("later", Priority::Low);
    assert_eq!(seen.recv().await.unwrap().0, "later");
    queue.finish("later", Requeue::After(Duration::from_secs(10), Priority::Low));
    queue.add("busy", Priority::High);
    assert_eq!(seen.recv().await.unwrap().0, "busy");
    assert_eq!(seen.recv().await.unwrap(), ("later", start + Duration::from_secs(10)));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_all_workers() {
    let queue = new_queue::<u8>();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let queue = queue.clone();
        workers.spawn(async move { queue.next().await });
    }
    tokio::task::yield_now().await;
    queue.shut_down();
    assert_eq!(workers.join_all().await, [None; 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_workers_process_every_key_and_no_key_twice_at_once() {
    let queue = new_queue();
    let busy = Arc::new(std::sync::Mutex::new(BTreeSet::new()));
    let (taken, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (queue, busy, taken) = (queue.clone(), busy.clone(), taken.clone());
        workers.spawn(async move {
            while let Some(key) = queue.next().await {
                assert!(busy.lock().unwrap().insert(key), "two workers have {key}");
                tokio::task::yield_now().await;
                busy.lock().unwrap().remove(&key);
                queue.finish(key, Requeue::AwaitChange);
                taken.send(key).unwrap();
            }
        });
    }
    for round in 0..50_u32 {
        for key in 0..20_u32 {
            queue.add(round * 20 + key, Priority::Low);
            queue.add(key, Priority::High);
        }
    }
    let mut missing: BTreeSet<u32> = (0..1000).collect();
    while !missing.is_empty() {
        missing.remove(&seen.recv().await.unwrap());
    }
    queue.shut_down();
    workers.join_all().await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_has_the_metrics_of_client_go() {
    let metrics = Metrics::new().unwrap();
    let queue = super::queue::<&str>(&metrics, "agent");
    let read = |name: &str| {
        let series = format!("workqueue_{name}{{controller=\"agent\",name=\"agent\"}} ");
        let text = metrics.text();
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        line.unwrap_or_else(|| panic!("no {series}")).to_owned()
    };
    let advance = |seconds| tokio::time::advance(Duration::from_secs(seconds));
    assert_eq!(
        (read("depth"), read("adds_total"), read("retries_total")),
        ("0".into(), "0".into(), "0".into())
    );
    queue.add("a", Priority::Low);
    advance(1).await;
    queue.add("a", Priority::High);
    queue.add("b", Priority::Low);
    assert_eq!(
        (read("depth"), read("adds_total")),
        ("2".into(), "2".into()),
        "a waits once"
    );
    advance(1).await;
    assert_eq!(queue.next().await, Some("a"));
    assert_eq!(read("queue_duration_seconds_sum"), "2", "since its first request");
    assert_eq!(queue.next().await, Some("b"));
    assert_eq!(
        (read("depth"), read("queue_duration_seconds_count")),
        ("0".into(), "2".into())
    );
    queue.add("a", Priority::High);
    assert_eq!(
        (read("depth"), read("adds_total")),
        ("1".into(), "3".into()),
        "again, while it is processed"
    );
    advance(4).await;
    queue.finish("b", Requeue::AwaitChange);
    advance(1).await;
    assert_eq!(read("unfinished_work_seconds"), "5");
    assert_eq!(read("longest_running_processor_seconds"), "5");
    queue.count_retry();
    queue.finish("a", Requeue::After(Duration::from_mins(1), Priority::Low));
    assert_eq!(
        (read("work_duration_seconds_sum"), read("retries_total")),
        ("9".into(), "1".into())
    );
    assert_eq!(
        (read("unfinished_work_seconds"), read("depth")),
        ("0".into(), "1".into())
    );
    assert_eq!(queue.next().await, Some("a"));
    assert_eq!(
        read("queue_duration_seconds_sum"),
        "8",
        "5 of them while it was processed"
    );
    drop(queue);
    assert_eq!(read("adds_total"), "3", "a counter outlives its queue");
}
