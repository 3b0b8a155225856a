//! The Agent reconciler, in five steps: observe → validate → desired → apply → status.
//!
//! `observe` and `apply` speak with the API server and decide nothing; `validate`, `desired` and `status` decide and
//! do no I/O. A user's mistake is a condition, never an error; an error means «try again».

mod apply;
pub(in crate::controller) mod backoff;
mod claims;
mod conditions;
mod context;
mod desired;
#[cfg(test)]
mod detection_tests;
pub(in crate::controller) mod error;
pub(in crate::controller) mod events;
mod intent;
#[cfg(test)]
mod kstatus;
mod leftovers;
mod manifest;
mod memory;
mod names;
pub(in crate::controller) mod namespaces;
mod objects;
mod observe;
mod outside;
pub(in crate::controller) mod pace;
pub(in crate::controller) mod pod_state;
mod precheck;
pub(in crate::controller) mod publish;
mod reconcile;
mod requests;
mod run;
mod scripts;
#[cfg(test)]
mod sensor_tests;
mod silence;
mod status;
#[cfg(test)]
mod status_tests;
mod totals;
mod triggers;
mod validate;

pub use context::{AgentsView, Clock, ErrorKind, Finished, Observer, Settings};
pub use events::{Notice, Sink};
pub use precheck::{Referred, problem};
pub use run::{Parts, recorder, run};
