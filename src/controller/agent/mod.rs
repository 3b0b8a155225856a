//! The Agent reconciler, in five steps: observe → validate → desired → apply → status.
//!
//! `observe` reads everything: the API server, the link, the ledger and the Sensors. `desired` names every change, `apply`
//! makes them, and `publish` writes the status. `validate`, `desired` and `status` decide and do no I/O.
//! A user's mistake becomes a condition, never an error; an error means "retry".

mod apply;
mod claims;
mod conditions;
mod context;
mod controller;
mod desired;
#[cfg(test)]
mod desired_tests;
#[cfg(test)]
mod detection_tests;
mod events;
mod gateway_loop_detection;
mod intent;
#[cfg(test)]
mod kstatus;
mod liveness;
mod manifest;
mod namespace_cleanup;
mod objects;
mod observe;
mod preflight;
mod publish;
mod reconcile;
mod reconcile_state;
mod requests;
mod scopes;
mod scripts;
#[cfg(test)]
mod sensor_tests;
mod status;
#[cfg(test)]
mod status_tests;
mod totals;
mod triggers;
pub(in crate::controller) mod validate;
mod write_timing;

pub use context::{AgentsView, ReconcileObserver, ReconcilerSettings};
pub use controller::{ReconcilerParts, run};
pub(in crate::controller) use events::volume_restored;
pub use preflight::{ReferenceKind, find_problem};
