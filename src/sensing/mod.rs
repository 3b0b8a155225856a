//! What Sensors do with what they hear: pure rules, and the sources that listen.
//!
//! Owns how an event becomes a [`delivery`]: expressions, sameness, pace, signals. Knows neither journals nor links: who
//! runs it, a worker or a sensor pod, keeps its state and passes on what comes of it. Time comes in from outside.

pub mod address;
pub mod delivery;
mod expanded;
pub mod expression;
pub mod rules;
mod rules_state;
pub mod schedule;
pub mod scored_effects;
mod signals;
pub mod source;
pub mod watch;

use crate::api::SensorSpec;

/// What of a spec cannot be used, beyond what its schema refuses: `spec.updates[0].value: …`.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error("{field}: {detail}")]
pub struct FieldError {
    /// The field.
    pub field: String,
    /// What is wrong with it.
    pub detail: String,
}

/// All that cannot be used of a spec; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError(Vec<FieldError>);

impl std::error::Error for SpecError {}

impl std::fmt::Display for SpecError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&all.join("; "))
    }
}

/// Compiles one thing after the other, and remembers what is wrong with each.
#[derive(Debug, Default)]
struct SpecErrorCollector(Vec<FieldError>);

impl SpecErrorCollector {
    /// `None`: it is wrong.
    fn take<T>(&mut self, compiled: Result<T, FieldError>) -> Option<T> {
        compiled.map_err(|invalid| self.0.push(invalid)).ok()
    }

    fn take_all<T>(&mut self, compiled: Result<T, SpecError>) -> Option<T> {
        compiled.map_err(|mistakes| self.0.extend(mistakes.0)).ok()
    }

    /// What was compiled, unless something was wrong.
    fn end<T>(self, compiled: impl FnOnce() -> Option<T>) -> Result<T, SpecError> {
        match compiled() {
            Some(whole) if self.0.is_empty() => Ok(whole),
            Some(_) | None => Err(SpecError(self.0)),
        }
    }
}

/// All of a spec, compiled.
#[derive(Clone, Debug)]
pub struct CompiledSpec {
    /// What becomes of what is heard.
    pub rules: rules::SensorRules,
    /// Of a `schedule`.
    pub calendar: Option<schedule::TickCalendar>,
    /// Of a `watch`.
    pub scope: Option<watch::WatchScope>,
}

/// Compiles all of a spec, for a Sensor of this name.
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

/// Whether a Sensor can run by this spec. Keeps nothing of what it compiles.
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
