//! The Agent reconciler, in five steps: observe → validate → desired → apply → status.
//!
//! `observe` and `apply` speak with the API server and decide nothing; `validate`, `desired` and `status` decide and
//! do no I/O. A user's mistake is a condition, never an error; an error means «try again».

mod apply;
pub(in crate::controller) mod backoff;
mod claims;
mod conditions;
mod context;
mod controller;
mod desired;
#[cfg(test)]
mod detection_tests;
pub(in crate::controller) mod error;
pub(in crate::controller) mod events;
mod gateway_loop_detection;
mod intent;
#[cfg(test)]
mod kstatus;
mod liveness;
mod manifest;
mod names;
mod namespace_cleanup;
pub(in crate::controller) mod namespace_objects;
mod objects;
mod observe;
pub(in crate::controller) mod pod_state;
mod preflight;
pub(in crate::controller) mod publish;
mod reconcile;
mod reconcile_state;
mod requests;
mod scripts;
#[cfg(test)]
mod sensor_tests;
mod status;
#[cfg(test)]
mod status_tests;
pub(in crate::controller) mod status_throttle;
mod totals;
mod triggers;
mod validate;

pub use context::{AgentsView, ReconcileErrorKind, ReconcileObserver, ReconcileResult, ReconcilerSettings, WallClock};
pub use controller::{ReconcilerParts, recorder, run};
pub use events::{EventSink, KubeEvent};
pub use preflight::{ReferenceKind, find_problem};
