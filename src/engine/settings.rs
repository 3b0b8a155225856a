//! The engine's numbers, taken from a spec.

use jiff::SignedDuration;

use super::guardrails::active_hours::{ActiveHours, HoursError};
use super::heartbeat::Heartbeat;
use super::hot_state::Field;
use super::precheck;
use super::resources::Limit;
use crate::api::AgentSpec;
use crate::api::agent::{ExhaustionPolicy, LoopDetection};

/// The engine's numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Pause between turns; each failed turn in a row doubles it.
    pub min_delay: SignedDuration,
    /// Longest delay after errors.
    pub max_delay: SignedDuration,
    /// Failed turns in a row until the loop pauses.
    pub max_consecutive_errors: u32,
    /// Longest sleep.
    pub max_sleep: SignedDuration,
    /// The heartbeat; `None`: there is none.
    pub heartbeat: Option<Heartbeat>,
    /// Turns without a sleep until one is forced.
    pub max_consecutive_turns: u32,
    /// Model calls in one turn.
    pub max_calls_per_turn: u32,
    /// Time awake without an effective action until the loop ends.
    pub idle_timeout: SignedDuration,
    /// Limits of resources in rolling windows, without that of actions per minute.
    pub rate_limits: Vec<Limit>,
    /// What becomes of a turn whose next call finds no room in them.
    pub exhaustion_policy: ExhaustionPolicy,
    /// When the loop may turn; `None`: always.
    pub active_hours: Option<ActiveHours>,
    /// Context window, in tokens.
    pub context_tokens: u32,
    /// Output limit of one answer, in tokens.
    pub max_output_tokens: u32,
    /// Tool runs with side effects in 60 s.
    pub actions_per_minute: u32,
    /// Whether a turn after a sleep is worth it is asked first; `None`: it is not.
    pub pre_check: Option<precheck::Settings>,
    /// Output limit of an answer of the small model, in tokens; `None`: there is no small model.
    pub light_output_tokens: Option<u32>,
    /// Fields of the hot state.
    pub hot_state: Vec<Field>,
    /// Bytes of one result of a tool.
    pub max_result_bytes: usize,
    /// What a detected loop leads to.
    pub loop_detection: LoopDetection,
}

impl Settings {
    /// The limit of actions per minute.
    pub(super) fn actions(&self) -> Limit {
        Limit::of_actions_per_minute(self.actions_per_minute)
    }

    /// All that is counted in rolling windows.
    pub(super) fn windows(&self) -> Vec<Limit> {
        self.rate_limits.iter().copied().chain([self.actions()]).collect()
    }
}

/// A spec that the engine cannot use. The controller makes no pod of it; one that is made all the same does not run.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum SettingsError {
    /// Its active hours.
    #[error(transparent)]
    Hours(#[from] HoursError),
}

impl TryFrom<&AgentSpec> for Settings {
    type Error = SettingsError;

    fn try_from(spec: &AgentSpec) -> Result<Self, SettingsError> {
        Ok(Self {
            min_delay: SignedDuration::from_millis(spec.r#loop.min_delay_milliseconds.into()),
            max_delay: SignedDuration::from_millis(spec.r#loop.max_delay_milliseconds.into()),
            max_consecutive_errors: spec.r#loop.max_consecutive_errors,
            max_sleep: SignedDuration::from_secs(spec.continuous.max_sleep_seconds.into()),
            heartbeat: spec.continuous.heartbeat.as_ref().map(Heartbeat::from),
            max_consecutive_turns: spec.guardrails.max_consecutive_turns,
            max_calls_per_turn: spec.guardrails.max_calls_per_turn,
            idle_timeout: SignedDuration::from_secs(spec.guardrails.idle_timeout_seconds.into()),
            rate_limits: spec.guardrails.rate_limits.iter().map(Limit::from).collect(),
            exhaustion_policy: spec.r#loop.exhaustion_policy,
            active_hours: spec
                .guardrails
                .active_hours
                .as_ref()
                .map(ActiveHours::read)
                .transpose()?,
            context_tokens: spec.model.context_tokens,
            max_output_tokens: spec.model.max_output_tokens,
            actions_per_minute: spec.guardrails.actions_per_minute,
            pre_check: pre_check(spec),
            light_output_tokens: spec.light_model.as_ref().map(|light| light.max_output_tokens),
            hot_state: spec.hot_state.fields.iter().map(Field::from).collect(),
            max_result_bytes: usize::try_from(spec.tools.max_result_bytes).unwrap_or(usize::MAX),
            loop_detection: spec.guardrails.loop_detection.clone(),
        })
    }
}

/// Only with a small model, and with something to look at.
fn pre_check(spec: &AgentSpec) -> Option<precheck::Settings> {
    let asked = spec.continuous.pre_check.as_ref().filter(|check| check.enabled)?;
    let light = spec.light_model.as_ref()?;
    (!spec.hot_state.fields.is_empty()).then(|| precheck::Settings {
        prompt: asked.prompt.clone(),
        max_output_tokens: light.max_output_tokens,
    })
}
