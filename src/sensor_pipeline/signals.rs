//! Signals of a Sensor: which of them hold for an event by their expressions, and what the light model must score.

use jiff::SignedDuration;

use super::delivery::SensorNotification;
use super::expression::{Expression, ExpressionVariables, PatternAllowance};
use super::rules_state::RulesState;
use super::scored_effects::SignalScoreRequest;
use super::{FieldError, rules};
use agentloop_api::sensor::{self, SignalGate, SignalModel, SignalPriority};

#[derive(Clone, Debug)]
pub(super) struct CompiledSignal {
    pub(super) name: String,
    pub(super) gate: SignalGate,
    pub(super) notify: bool,
    pub(super) priority: SignalPriority,
    pub(super) cooldown: SignedDuration,
    place: usize,
    when: Option<Expression>,
    model: Option<SignalModel>,
}

/// The result of a signal for an event.
pub(super) struct EvaluatedSignal<'a> {
    pub(super) signal: &'a CompiledSignal,
    pub(super) holds: SignalMatch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignalMatch {
    Yes,
    No,
    /// It depends on a model's score.
    Asked,
}

impl CompiledSignal {
    pub(super) fn compile(
        place: usize,
        signal: &sensor::SignalSpec,
        allowance: &mut PatternAllowance,
    ) -> Result<Self, FieldError> {
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

    pub(super) fn evaluate_signal(
        &self,
        state: &RulesState,
        variables: &ExpressionVariables,
    ) -> Result<EvaluatedSignal<'_>, FieldError> {
        let holds = match (self.wanted(variables)?, &self.model) {
            (false, _) => SignalMatch::No,
            // The receivers apply its cooldown: each scores it with its own model.
            (true, Some(_)) => SignalMatch::Asked,
            (true, None) if state.cooldowns.contains_key(&self.name) => SignalMatch::No,
            (true, None) => SignalMatch::Yes,
        };
        Ok(EvaluatedSignal { signal: self, holds })
    }

    fn wanted(&self, variables: &ExpressionVariables) -> Result<bool, FieldError> {
        let Some(when) = &self.when else {
            return Ok(true);
        };
        let invalid = |detail: String| FieldError {
            field: field(self.place),
            detail,
        };
        let value = when
            .evaluate(variables)
            .map_err(|failure| invalid(failure.to_string()))?;
        value.as_bool().ok_or_else(|| invalid("must be true or false".into()))
    }

    /// The name of its event.
    pub(super) fn event(&self, sensor: &str) -> String {
        format!("signal/{sensor}/{}", self.name)
    }

    /// What the model must score. `notice`: the notification if it holds.
    pub(super) fn question(&self, sensor: &str, notice: Option<SensorNotification>) -> Option<SignalScoreRequest> {
        let model = self.model.clone()?;
        Some(SignalScoreRequest {
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
