//! The Sensor reconciler: assigns receivers, sends their terms to pods, and shows the pods' reports in status.
//!
//! [`SensorRegistry`] holds the index of Sensors and receivers, and their child objects, under one lock; the link and the Agent
//! reconciler use it. A change of the index sends new terms to the pods at once. [`controller`] watches, and reconciles in four
//! steps: observe → decide → apply → publish. `snapshot` and `observe` read everything; `objects` and `decide` name every
//! change, `apply` makes them, and `publish` writes the status. [`index`], [`children`], [`pod`], [`secrets`], `objects`,
//! `decide` and [`status`] are pure. [`spec_checks`] validates specs in the background; a Sensor is reconciled once its spec has
//! been checked.

mod apply;
mod children;
mod conditions;
mod controller;
mod decide;
#[cfg(test)]
mod decide_tests;
mod drift;
mod events;
mod index;
mod objects;
mod observe;
pub mod pod;
mod publish;
mod reconcile;
mod reconcile_state;
mod registry;
mod rollout;
pub mod secrets;
mod snapshot;
#[cfg(test)]
mod spec_check_tests;
mod spec_checks;
mod status;
#[cfg(test)]
mod status_tests;
mod validate;

pub use registry::{SensorRegistry, SensorSetup};
