//! What the controllers of all kinds share: the queue and the workers that serve it, the policy for failed reconciles,
//! watches, the writing of status, and the objects around pods.
//!
//! Decides nothing about a kind of object, and imports neither `agent` nor `sensor` nor `budget`.

pub(in crate::controller) mod backoff;
pub(in crate::controller) mod condition_list;
mod controller;
pub(in crate::controller) mod error;
mod event_limiter;
mod event_queue;
pub(in crate::controller) mod events;
pub(in crate::controller) mod fair_line;
pub mod guarded;
mod metrics;
pub(in crate::controller) mod names;
pub(in crate::controller) mod namespace_objects;
pub(in crate::controller) mod owner;
pub(in crate::controller) mod pod_state;
pub(in crate::controller) mod queue;
#[cfg(test)]
mod queue_tests;
pub(in crate::controller) mod shared_objects;
pub(in crate::controller) mod status_throttle;
pub(in crate::controller) mod status_writer;
pub(in crate::controller) mod watch;
pub(in crate::controller) mod watch_backoff;
pub(in crate::controller) mod watched_pod;

use std::sync::Arc;

use jiff::Timestamp;

pub use controller::ReconcileResult;
pub(in crate::controller) use controller::{GRACE, Reconciler, Requeue, run};
pub use error::ReconcileErrorKind;
pub use event_queue::{EventQueue, EventSink};
pub use events::{EventRecorder, KubeEvent, publish};
pub use metrics::ReconcileMetrics;
pub(in crate::controller) use metrics::queue;

/// A source of the current time; tests pass their own.
pub type WallClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;
