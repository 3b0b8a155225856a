//! What Sensors do with what they hear: pure rules, and the sources that listen.
//!
//! Owns how an event becomes a [`delivery`]: expressions, sameness, pace, signals. Knows neither journals nor links: who
//! runs it, a worker or a sensor pod, keeps its state and passes on what comes of it. Time comes in from outside.

pub mod address;
pub mod delivery;
pub mod expression;
pub mod rules;
pub mod schedule;
pub mod source;
mod state;
pub mod watch;

use crate::api::SensorSpec;

/// What of a spec cannot be used, beyond what its schema refuses: `spec.updates[0].value: …`.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("{field}: {detail}")]
pub struct Invalid {
    /// The field.
    pub field: String,
    /// What is wrong with it.
    pub detail: String,
}

/// Whether a Sensor of this name can run by this spec.
pub fn check(name: &str, spec: &SensorSpec) -> Result<(), Invalid> {
    rules::Rules::compile(name, spec)?;
    if let Some(schedule) = &spec.source.schedule {
        schedule::Calendar::compile(schedule)?;
    }
    if let Some(watch) = &spec.source.watch {
        watch::Scope::of(watch)?;
    }
    Ok(())
}
