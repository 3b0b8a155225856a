//! The Sensor reconciler: who receives what, told to pods; and what they say of it, shown in status.
//!
//! [`index`], [`children`], [`pod`], [`secrets`] and [`status`] are pure: receivers and terms, what there is, what there should be, and what a
//! status says. [`SensorRegistry`] holds index and children under one lock and is what link and Agent reconciler speak to; [`controller`]
//! watches and reconciles in steps: observe (the index) → validate → desired (terms, at once) → apply → publish.

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
mod status;
#[cfg(test)]
mod status_tests;
mod validate;

pub use registry::{SensorRegistry, SensorSetup};
