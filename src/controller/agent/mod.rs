//! The Agent reconciler, in four steps: observe → decide → apply → publish.
//!
//! `snapshot` and `observe` read everything: what this process has, then the objects of the API server that the intent
//! needs. `decide` names every change, `apply` makes them, and `publish` writes the status. `intent`, `reads`, `decide`,
//! `validate` and `status` are pure. `reconcile` records in the memory what each step leaves behind.
//! A user's mistake becomes a condition, never an error; an error means "retry".

mod apply;
#[cfg(test)]
mod approval_tests;
mod claims;
mod conditions;
mod context;
mod controller;
mod decide;
#[cfg(test)]
mod decide_tests;
#[cfg(test)]
mod detection_tests;
mod events;
mod gateway_environment;
mod gateway_loop_detection;
mod goal_conditions;
mod goal_spec;
#[cfg(test)]
mod goal_tests;
mod intent;
mod liveness;
mod manifest;
mod namespace_cleanup;
mod objects;
mod observe;
mod preflight;
mod publish;
mod reads;
mod reconcile;
mod reconcile_state;
mod requests;
mod scopes;
#[cfg(test)]
mod sensor_tests;
mod server_authorities;
mod snapshot;
mod status;
#[cfg(test)]
mod status_tests;
mod text_checks;
mod tool_containers;
mod totals;
mod triggers;
mod unreadable;
mod validate;
mod write_timing;

pub use context::{AgentsView, ReconcileObserver, ReconcilerSettings};
pub use controller::{ReconcilerParts, run};
pub(in crate::controller) use events::volume_restored;
pub use gateway_environment::{ExportSecrets, log_variables, trace_variables};
pub use preflight::{ReferenceKind, find_problem};
