//! How an event of a Sensor becomes a delivery: a [`source`] receives it, and pure [`rules`] decide what it does.
//!
//! Owns expressions, deduplication, rate limits, signals, schedules and the format of a [`delivery`]. Knows neither journals
//! nor links: the process that runs a Sensor, a worker (`worker::sensor_receiver`) or a sensor pod (`sensor_pod`), stores its
//! state and delivers its events. Time is passed in.

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

pub mod delivery;
pub mod expression;
mod parsed_size;
pub mod rules;
mod rules_state;
pub mod schedule;
pub mod scored_effects;
mod signals;
pub mod source;
#[cfg(test)]
mod text_tests;
pub mod watch;

use agentloop_api::SensorSpec;

/// An error in a spec that its schema does not catch: `spec.updates[0].value: …`.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("{field}: {detail}")]
pub struct FieldError {
    pub field: String,
    pub detail: String,
}

/// All errors in a spec; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError(Vec<FieldError>);

impl std::error::Error for SpecError {}

impl std::fmt::Display for SpecError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&all.join("; "))
    }
}

/// Collects the errors of several compilations.
#[derive(Debug, Default)]
struct SpecErrorCollector(Vec<FieldError>);

impl SpecErrorCollector {
    /// The compiled value; `None` if it is invalid.
    fn take<T>(&mut self, compiled: Result<T, FieldError>) -> Option<T> {
        compiled.map_err(|invalid| self.0.push(invalid)).ok()
    }

    fn take_all<T>(&mut self, compiled: Result<T, SpecError>) -> Option<T> {
        compiled.map_err(|mistakes| self.0.extend(mistakes.0)).ok()
    }

    /// The compiled whole, unless there was an error.
    fn end<T>(self, compiled: impl FnOnce() -> Option<T>) -> Result<T, SpecError> {
        match compiled() {
            Some(whole) if self.0.is_empty() => Ok(whole),
            Some(_) | None => Err(SpecError(self.0)),
        }
    }
}

#[derive(Clone, Debug)]
pub struct CompiledSpec {
    /// The rules for incoming events.
    pub rules: rules::SensorRules,
    /// The calendar of a `schedule`.
    pub calendar: Option<schedule::TickCalendar>,
    /// The scope of a `watch`.
    pub scope: Option<watch::WatchScope>,
}

/// Compiles a spec, for a Sensor of this name.
pub fn compile(name: &str, spec: &SensorSpec) -> Result<CompiledSpec, SpecError> {
    let mut compiling = SpecErrorCollector::default();
    let (schedule, watch) = (spec.source.schedule.as_ref(), spec.source.watch.as_ref());
    let calendar = schedule.and_then(|schedule| compiling.take_all(schedule::TickCalendar::compile(schedule)));
    let scope = watch.and_then(|watch| compiling.take(watch::WatchScope::of(watch)));
    compiling.take(source::endpoint::check(spec));
    let rules = compiling.take_all(rules::SensorRules::compile(name, spec));
    compiling.end(|| {
        Some(CompiledSpec {
            rules: rules?,
            calendar,
            scope,
        })
    })
}

/// Validates a spec without keeping what it compiles.
pub fn check(spec: &SensorSpec) -> Result<(), SpecError> {
    let mut compiling = SpecErrorCollector::default();
    let (schedule, watch) = (spec.source.schedule.as_ref(), spec.source.watch.as_ref());
    if let Some(schedule) = schedule {
        compiling.take_all(schedule::TickCalendar::compile(schedule));
    }
    if let Some(watch) = watch {
        compiling.take(watch::WatchScope::of(watch));
    }
    compiling.take(source::endpoint::check(spec));
    compiling.take_all(rules::SensorRules::check(spec));
    compiling.end(|| Some(()))
}
