//! The Sensor reconciler: who receives what, told to pods; and what they say of it, shown in status.
//!
//! [`index`], [`children`], [`pod`], [`secrets`] and [`status`] are pure: receivers and terms, what there is, what there should be, and what a
//! status says. [`Sensors`] holds index and children under one lock and is what link and Agent reconciler speak to; [`run`]
//! watches and reconciles in steps: observe (the index) → validate → desired (terms, at once) → apply → publish.

mod apply;
mod children;
mod conditions;
mod drift;
mod index;
mod notices;
pub mod pod;
mod publish;
mod run;
pub mod secrets;
mod sensors;
mod status;
#[cfg(test)]
mod status_tests;
mod turns;
mod validate;

pub use sensors::{Sensors, Setup};
