//! The engine's numbers, taken from a spec.

use jiff::SignedDuration;
use ring::digest::{SHA256, digest};

use super::guardrails::active_hours::{ActiveHours, ActiveHoursError};
use super::heartbeat::HeartbeatSettings;
use super::hot_state::FieldSchema;
use super::precheck;
use super::resources::ResourceLimit;
use crate::api::AgentSpec;
use crate::api::agent::{ExhaustionPolicy, LoopDetection, ModelSpec};

/// The engine's numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Pause between turns; each failed turn in a row doubles it.
    pub min_delay: SignedDuration,
    /// Turns in a row without a tool call after which the next ones slow down.
    pub quick_text_turns: u32,
    /// Longest delay after more of them; zero: they are as any other.
    pub longest_text_delay: SignedDuration,
    /// Longest delay after errors.
    pub max_delay: SignedDuration,
    /// Failed turns in a row until the loop pauses.
    pub max_consecutive_errors: u32,
    /// Longest sleep.
    pub max_sleep: SignedDuration,
    /// The heartbeat; `None`: there is none.
    pub heartbeat: Option<HeartbeatSettings>,
    /// Turns without a sleep until one is forced.
    pub max_consecutive_turns: u32,
    /// Model calls in one turn.
    pub max_calls_per_turn: u32,
    /// Time awake without an effective action until the loop ends.
    pub idle_timeout: SignedDuration,
    /// Limits of resources in rolling windows, without that of actions per minute.
    pub rate_limits: Vec<ResourceLimit>,
    /// What becomes of a turn whose next call finds no room in them.
    pub exhaustion_policy: ExhaustionPolicy,
    /// When the loop may turn; `None`: always.
    pub active_hours: Option<ActiveHours>,
    /// Context window, in tokens.
    pub context_tokens: u32,
    /// Output limit of one answer, in tokens.
    pub max_output_tokens: u32,
    /// Tokens of earlier turns that a turn begins with at most.
    pub history_tokens: u32,
    /// Tool runs with side effects in 60 s.
    pub actions_per_minute: u32,
    /// Whether a turn after a sleep is worth it is asked first; `None`: it is not.
    pub pre_check: Option<precheck::PreCheckSettings>,
    /// Output limit of an answer of the small model, in tokens; `None`: there is no small model.
    pub light_output_tokens: Option<u32>,
    /// Context window of the small model, in tokens.
    pub light_context_tokens: u32,
    /// Fields of the hot state.
    pub hot_state: Vec<FieldSchema>,
    /// Bytes of one result of a tool.
    pub max_result_bytes: usize,
    /// What a detected loop leads to.
    pub loop_detection: LoopDetection,
    /// Stands for the whole spec but for `suspend`: another one where anything else was edited.
    pub spec: u64,
}

impl EngineSettings {
    /// The limit of actions per minute.
    pub(super) fn actions(&self) -> ResourceLimit {
        ResourceLimit::of_actions_per_minute(self.actions_per_minute)
    }

    /// Data for the small model, cut so that it fits into its window beside these words. Nothing says how it counts: two
    /// bytes are a token here, so that it fits in any case.
    pub(super) fn for_light_model(&self, data: &str, words: usize) -> String {
        let tokens = self
            .light_context_tokens
            .saturating_sub(self.light_output_tokens.unwrap_or_default());
        let room = usize::try_from(u64::from(tokens) * 2).unwrap_or(usize::MAX);
        let most = room.saturating_sub(words);
        if data.len() <= most {
            return data.to_owned();
        }
        format!("{} [cut]", &data[..data.floor_char_boundary(most)])
    }

    /// All that is counted in rolling windows.
    pub(super) fn windows(&self) -> Vec<ResourceLimit> {
        self.rate_limits.iter().copied().chain([self.actions()]).collect()
    }
}

/// A spec that the engine cannot use. The controller makes no pod of it; one that is made all the same does not run.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum SettingsError {
    /// Its active hours.
    #[error(transparent)]
    Hours(#[from] ActiveHoursError),
}

impl TryFrom<&AgentSpec> for EngineSettings {
    type Error = SettingsError;

    fn try_from(spec: &AgentSpec) -> Result<Self, SettingsError> {
        Ok(Self {
            min_delay: SignedDuration::from_millis(spec.r#loop.min_delay_milliseconds.into()),
            quick_text_turns: spec.guardrails.max_consecutive_turns / 2,
            longest_text_delay: SignedDuration::from_secs(60),
            max_delay: SignedDuration::from_millis(spec.r#loop.max_delay_milliseconds.into()),
            max_consecutive_errors: spec.r#loop.max_consecutive_errors,
            max_sleep: SignedDuration::from_secs(spec.continuous.max_sleep_seconds.into()),
            heartbeat: spec.continuous.heartbeat.as_ref().map(HeartbeatSettings::from),
            max_consecutive_turns: spec.guardrails.max_consecutive_turns,
            max_calls_per_turn: spec.guardrails.max_calls_per_turn,
            idle_timeout: SignedDuration::from_secs(spec.guardrails.idle_timeout_seconds.into()),
            rate_limits: spec.guardrails.rate_limits.iter().map(ResourceLimit::from).collect(),
            exhaustion_policy: spec.r#loop.exhaustion_policy,
            active_hours: spec
                .guardrails
                .active_hours
                .as_ref()
                .map(ActiveHours::read)
                .transpose()?,
            context_tokens: spec.model.context_tokens,
            max_output_tokens: spec.model.output_limit(),
            history_tokens: spec.r#loop.history_tokens,
            actions_per_minute: spec.guardrails.actions_per_minute,
            pre_check: pre_check(spec),
            light_output_tokens: spec.light_model.as_ref().map(ModelSpec::output_limit),
            light_context_tokens: spec.light_model.as_ref().map_or(0, |light| light.context_tokens),
            hot_state: spec.hot_state.fields.iter().map(FieldSchema::from).collect(),
            max_result_bytes: usize::try_from(spec.tools.max_result_bytes).unwrap_or(usize::MAX),
            loop_detection: spec.guardrails.loop_detection.clone(),
            spec: hash(spec),
        })
    }
}

/// The same in every version, since it is persisted.
fn hash(spec: &AgentSpec) -> u64 {
    let spec = AgentSpec {
        suspend: false,
        ..spec.clone()
    };
    let text = serde_json::to_string(&spec).unwrap_or_default();
    let hash = digest(&SHA256, text.as_bytes());
    u64::from_be_bytes(hash.as_ref().first_chunk().copied().unwrap_or_default())
}

/// Only with a small model, and with something to look at.
fn pre_check(spec: &AgentSpec) -> Option<precheck::PreCheckSettings> {
    let asked = spec.continuous.pre_check.as_ref().filter(|check| check.enabled)?;
    let light = spec.light_model.as_ref()?;
    (!spec.hot_state.fields.is_empty()).then(|| precheck::PreCheckSettings {
        prompt: asked.prompt.clone(),
        max_output_tokens: light.output_limit(),
    })
}
