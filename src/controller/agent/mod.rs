//! The Agent reconciler, in five steps: observe → validate → desired → apply → status.
//!
//! `observe` and `apply` speak with the API server and decide nothing; `validate`, `desired` and `status` decide and
//! do no I/O. A user's mistake is a condition, never an error; an error means «try again».

mod context;
mod run;

pub use context::{AgentsView, Clock, ErrorKind, Finished, Observer, Settings};
pub use run::{Parts, run};
