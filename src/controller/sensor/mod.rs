//! The Sensor reconciler: assigns receivers, sends their terms to pods, and shows the pods' reports in status.
//!
//! [`index`], [`children`], [`pod`], [`secrets`] and [`status`] are pure: receivers and terms, what there is, what there should be, and what a
//! status says. [`SensorRegistry`] holds index and children under one lock and is what link and Agent reconciler speak to; [`controller`]
//! watches and reconciles in steps: observe (the index) → desired (terms, at once) → apply → publish. [`spec_checks`] validates specs beside
//! that; a Sensor is reconciled once its spec has been checked.

mod apply;
mod children;
mod conditions;
mod controller;
mod drift;
mod events;
mod index;
pub mod pod;
mod publish;
mod registry;
mod rollout;
pub mod secrets;
#[cfg(test)]
mod spec_check_tests;
mod spec_checks;
mod status;
#[cfg(test)]
mod status_tests;
mod validate;

pub use registry::{SensorRegistry, SensorSetup};
