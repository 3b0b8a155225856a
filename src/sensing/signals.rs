//! Signals of a Sensor: which of them an event has, as far as expressions say, and what a model is to be asked of it.

use jiff::SignedDuration;

use super::delivery::Notice;
use super::expression::{Allowance, Expression, Variables};
use super::state::State;
use super::trial::Question;
use super::{Invalid, rules};
use crate::api::sensor::{self, Gate, Priority, SignalModel};

/// A compiled signal.
#[derive(Clone, Debug)]
pub(super) struct Signal {
    pub(super) name: String,
    pub(super) gate: Gate,
    pub(super) notify: bool,
    pub(super) priority: Priority,
    pub(super) cooldown: SignedDuration,
    place: usize,
    when: Option<Expression>,
    model: Option<SignalModel>,
}

/// A signal and what is known of an event.
pub(super) struct Seen<'a> {
    pub(super) signal: &'a Signal,
    pub(super) holds: Holds,
}

/// Whether a signal holds for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    Yes,
    No,
    /// A model is to be asked.
    Asked,
}

impl Signal {
    pub(super) fn compile(place: usize, signal: &sensor::Signal, allowance: &mut Allowance) -> Result<Self, Invalid> {
        let when = signal.when.as_deref();
        Ok(Self {
            name: signal.name.clone(),
            gate: signal.gate,
            notify: signal.notify,
            priority: signal.priority,
            cooldown: SignedDuration::from_secs(signal.cooldown_seconds.into()),
            place,
            when: when
                .map(|when| rules::compiled(field(place), when, allowance))
                .transpose()?,
            model: signal.model.clone(),
        })
    }

    pub(super) fn uses_previous(&self) -> bool {
        self.when.as_ref().is_some_and(Expression::uses_previous)
    }

    pub(super) fn seen(&self, state: &State, variables: &Variables) -> Result<Seen<'_>, Invalid> {
        let holds = match (self.wanted(variables)?, &self.model) {
            (false, _) => Holds::No,
            // Its cooldown is the receivers' affair: each has a model of its own.
            (true, Some(_)) => Holds::Asked,
            (true, None) if state.cooldowns.contains_key(&self.name) => Holds::No,
            (true, None) => Holds::Yes,
        };
        Ok(Seen { signal: self, holds })
    }

    fn wanted(&self, variables: &Variables) -> Result<bool, Invalid> {
        let Some(when) = &self.when else {
            return Ok(true);
        };
        let invalid = |detail: String| Invalid {
            field: field(self.place),
            detail,
        };
        let value = when
            .evaluate(variables)
            .map_err(|failure| invalid(failure.to_string()))?;
        value
            .as_bool()
            .ok_or_else(|| invalid("is neither true nor false".into()))
    }

    /// Its name among events.
    pub(super) fn event(&self, sensor: &str) -> String {
        format!("signal/{sensor}/{}", self.name)
    }

    /// What a model is to be asked. `notice`: what it tells.
    pub(super) fn question(&self, sensor: &str, notice: Option<Notice>) -> Option<Question> {
        let model = self.model.clone()?;
        Some(Question {
            signal: self.event(sensor),
            prompt: model.prompt,
            threshold_percent: model.threshold_percent,
            gate: self.gate,
            cooldown_seconds: u32::try_from(self.cooldown.as_secs()).unwrap_or(u32::MAX),
            notice,
        })
    }
}

fn field(place: usize) -> String {
    format!("spec.signals[{place}].when")
}

#[cfg(test)]
mod tests;
