//! The metrics of work queues, under the names of client-go.
//!
//! Owns the instruments; a queue counts with its [`QueueMetrics`] and is read at each scrape.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use prometheus::{GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry};

use super::metrics::{counters, gauges, histograms};
use super::registry::{self, Metric};

/// Upper bounds of the buckets of waits and work, in seconds: those of client-go without the smallest.
const BUCKETS: [f64; 9] = [1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0];

/// What a queue is at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueReading {
    /// Number of keys that were ever added.
    pub added: u64,
    /// Number of keys that wait.
    pub depth: usize,
    /// The time that the keys in progress have taken so far, in all.
    pub unfinished: Duration,
    /// The longest of these times.
    pub longest: Duration,
}

/// A queue that can be read.
pub trait ReadQueue: Send + Sync {
    fn read(&self) -> QueueReading;
}

/// What one queue counts.
#[derive(Clone, Debug)]
pub struct QueueMetrics {
    /// Time that keys waited.
    pub waits: Histogram,
    /// Time that keys were processed.
    pub work: Histogram,
    /// Keys that are added again after a failure.
    pub retries: IntCounter,
}

/// The instruments of all queues.
pub struct QueueInstruments {
    added: IntCounterVec,
    depth: IntGaugeVec,
    longest: GaugeVec,
    waits: HistogramVec,
    retries: IntCounterVec,
    unfinished: GaugeVec,
    work: HistogramVec,
    queues: Mutex<Vec<(&'static str, Weak<dyn ReadQueue>)>>,
}

impl QueueInstruments {
    pub(super) fn new() -> prometheus::Result<Self> {
        let seconds = |metric: &Metric| GaugeVec::new(Opts::new(metric.name, metric.help), metric.labels);
        Ok(Self {
            added: counters(&registry::QUEUE_ADDS)?,
            depth: gauges(&registry::QUEUE_DEPTH)?,
            longest: seconds(&registry::QUEUE_LONGEST)?,
            waits: histograms(&registry::QUEUE_WAIT, &BUCKETS)?,
            retries: counters(&registry::QUEUE_RETRIES)?,
            unfinished: seconds(&registry::QUEUE_UNFINISHED)?,
            work: histograms(&registry::QUEUE_WORK, &BUCKETS)?,
            queues: Mutex::default(),
        })
    }

    pub(super) fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        registry.register(Box::new(self.added.clone()))?;
        registry.register(Box::new(self.depth.clone()))?;
        registry.register(Box::new(self.longest.clone()))?;
        registry.register(Box::new(self.waits.clone()))?;
        registry.register(Box::new(self.retries.clone()))?;
        registry.register(Box::new(self.unfinished.clone()))?;
        registry.register(Box::new(self.work.clone()))
    }

    /// What the queue of this controller counts. Its series start at 0.
    #[must_use]
    pub fn of(&self, controller: &'static str) -> QueueMetrics {
        let labels = [controller, controller];
        self.set(controller, QueueReading::default());
        QueueMetrics {
            waits: self.waits.with_label_values(&labels),
            work: self.work.with_label_values(&labels),
            retries: self.retries.with_label_values(&labels),
        }
    }

    /// Reads the queue of this controller at each scrape, as long as it exists.
    pub fn watch(&self, controller: &'static str, queue: &Arc<impl ReadQueue + 'static>) {
        let queue: Weak<dyn ReadQueue> = Arc::downgrade(queue) as Weak<dyn ReadQueue>;
        self.queues
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((controller, queue));
    }

    /// Reads all queues.
    pub(super) fn refresh(&self) {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (controller, queue) in queues {
            if let Some(queue) = queue.upgrade() {
                self.set(controller, queue.read());
            }
        }
    }

    fn set(&self, controller: &str, reading: QueueReading) {
        let labels = [controller, controller];
        let added = self.added.with_label_values(&labels);
        added.inc_by(reading.added.saturating_sub(added.get()));
        let depth = i64::try_from(reading.depth).unwrap_or(i64::MAX);
        self.depth.with_label_values(&labels).set(depth);
        self.unfinished
            .with_label_values(&labels)
            .set(reading.unfinished.as_secs_f64());
        self.longest
            .with_label_values(&labels)
            .set(reading.longest.as_secs_f64());
    }
}
