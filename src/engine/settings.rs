//! The engine's settings, taken from a spec.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::Value;

use super::CallPurpose;
use super::answer_schema::AnswerSchema;
use super::guardrails::active_hours::{ActiveHours, ActiveHoursError};
use super::hot_state::FieldSchema;
use super::modes::continuous::heartbeat::HeartbeatSettings;
use super::modes::goal::GoalSettings;
use super::precheck;
use super::resources::ResourceLimit;
use agentloop_api::AgentSpec;
use agentloop_api::agent::{AgentMode, ExhaustionPolicy, ImageInput, LoopDetection, ModelSpec, StructuredOutput};
use agentloop_api::memory::MemorySpec;
use agentloop_api::tools::WhilePending;
use agentloop_support::hash::sha256_u64;
use agentloop_support::json_schema;

/// The mode of a loop, and the settings that only it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModeSettings {
    Continuous,
    Task(TaskSettings),
    Goal(Box<GoalSettings>),
    #[cfg(test)]
    Countdown {
        turns: u32,
    },
}

/// How one task is worked on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskSettings {
    /// The task of the spec itself.
    pub prompt: Option<String>,
    /// The time after which it is a task again; `None`: never.
    pub min_interval: Option<SignedDuration>,
    /// How long a loop without a task keeps its pod; `None`: forever.
    pub idle_pod: Option<SignedDuration>,
    /// Maximum number of model calls.
    pub max_iterations: u32,
    /// Tokens from which on no further call is made.
    pub max_tokens: u64,
    /// The longest time, without pauses.
    pub max_duration: SignedDuration,
    /// The JSON schema of the response; `None`: any text.
    pub response_schema: Option<Value>,
    /// The same, as sent to the server; `None`: none is sent.
    pub answer_schema: Option<Arc<AnswerSchema>>,
}

impl TryFrom<&AgentSpec> for ModeSettings {
    type Error = SettingsError;

    fn try_from(spec: &AgentSpec) -> Result<Self, SettingsError> {
        match spec.mode {
            AgentMode::Continuous => Ok(Self::Continuous),
            AgentMode::Goal => {
                let goal = spec.goal.as_ref().ok_or(SettingsError::NoGoal)?;
                Ok(Self::Goal(Box::new(goal.try_into()?)))
            }
            AgentMode::Task => {
                let task = spec.task.clone().unwrap_or_default();
                let response_schema = task.schema();
                if let Some(schema) = &response_schema {
                    json_schema::check(schema).map_err(SettingsError::ResponseSchema)?;
                }
                let is_sent = spec.model.structured_output == StructuredOutput::Always;
                let sent_schema = response_schema.as_ref().filter(|_| is_sent);
                Ok(Self::Task(TaskSettings {
                    answer_schema: sent_schema
                        .and_then(|schema| AnswerSchema::new("response", schema))
                        .map(Arc::new),
                    prompt: task.prompt,
                    min_interval: task
                        .min_interval_seconds
                        .map(|interval| SignedDuration::from_secs(interval.into())),
                    idle_pod: task.idle_pod_seconds.map(|idle| SignedDuration::from_secs(idle.into())),
                    max_iterations: task.max_iterations,
                    max_tokens: task.max_tokens,
                    max_duration: SignedDuration::from_secs(task.max_duration_seconds.into()),
                    response_schema,
                }))
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    pub mode: ModeSettings,
    /// Pause between turns; each failed turn in a row doubles it.
    pub min_delay: SignedDuration,
    /// Turns in a row without a tool call after which further ones slow down.
    pub quick_text_turns: u32,
    /// The longest delay that they slow down to; zero: no slowdown.
    pub longest_text_delay: SignedDuration,
    /// The longest delay after errors.
    pub max_delay: SignedDuration,
    /// Failed turns in a row after which the loop pauses.
    pub max_consecutive_errors: u32,
    pub max_sleep: SignedDuration,
    /// `None`: no heartbeats.
    pub heartbeat: Option<HeartbeatSettings>,
    /// Turns without a sleep after which a sleep is forced.
    pub max_consecutive_turns: u32,
    /// Maximum number of model calls in one turn.
    pub max_calls_per_turn: u32,
    /// Failed tool runs in a row after which the loop pauses; `None`: no limit.
    pub max_consecutive_tool_failures: Option<u32>,
    /// Time awake without an effective action after which the loop ends.
    pub idle_timeout: SignedDuration,
    /// Limits on resources in rolling windows, except for the actions per minute.
    pub rate_limits: Vec<ResourceLimit>,
    /// What happens to a turn whose next call finds no room in them.
    pub exhaustion_policy: ExhaustionPolicy,
    /// When the loop may run turns; `None`: always.
    pub active_hours: Option<ActiveHours>,
    /// Context window, in tokens.
    pub context_tokens: u32,
    /// Output limit of one answer, in tokens.
    pub max_output_tokens: u32,
    /// Maximum number of tokens of earlier turns that a turn begins with.
    pub history_tokens: u32,
    /// Maximum number of tool runs with side effects in 60 s.
    pub actions_per_minute: u32,
    /// `None`: turns after a sleep run without a pre-check.
    pub pre_check: Option<precheck::PreCheckSettings>,
    /// Output limit of an answer of the light model, in tokens; `None`: there is no light model.
    pub light_output_tokens: Option<u32>,
    /// Context window of the light model, in tokens.
    pub light_context_tokens: u32,
    /// `spec.tools.toolbox.image`, for messages; `None`: that of the pod.
    pub toolbox_image: Option<String>,
    /// Fields of the hot state.
    pub hot_state: Vec<FieldSchema>,
    /// Maximum number of bytes of all notes of the tool `memory`; `None`: it is not offered.
    pub memory_bytes: Option<usize>,
    /// Maximum number of bytes of one tool result.
    pub max_result_bytes: usize,
    /// Which images the model is shown; `None`: none.
    pub image_input: Option<ImageInput>,
    /// Which calls to the model send the schema of their answer to the server.
    pub structured_output: StructuredOutput,
    /// The same of the light model.
    pub light_structured_output: StructuredOutput,
    /// Time in which a person must approve a tool call.
    pub approval_timeout: SignedDuration,
    /// Whether the loop continues while a call waits for an approval.
    pub defers_approvals: bool,
    /// What a detected loop leads to.
    pub loop_detection: LoopDetection,
    /// A hash of the whole spec except for `suspend`: it changes with any other edit.
    pub spec: u64,
}

impl EngineSettings {
    /// The settings of mode Task, if that is the mode.
    pub(super) fn task(&self) -> Option<&TaskSettings> {
        if let ModeSettings::Task(settings) = &self.mode {
            Some(settings)
        } else {
            None
        }
    }

    /// The schema of the answer to a question without tools, as sent to the server; `None`: none is sent.
    pub(super) fn question_schema(&self, purpose: CallPurpose) -> Option<Arc<AnswerSchema>> {
        let structured_output = if purpose.uses_light_model() {
            self.light_structured_output
        } else {
            self.structured_output
        };
        AnswerSchema::of_question(purpose).filter(|_| !structured_output.is_disabled())
    }

    /// The limit of actions per minute.
    pub(super) fn actions(&self) -> ResourceLimit {
        ResourceLimit::of_actions_per_minute(self.actions_per_minute)
    }

    /// Truncates data for a question to the light model, so that it fits into the context window beside this many bytes of
    /// instructions and the schema of the answer. How that model counts is unknown: two bytes count as a token, which is
    /// safe.
    pub(super) fn for_light_model(&self, purpose: CallPurpose, data: &str, words: usize) -> String {
        let tokens = self
            .light_context_tokens
            .saturating_sub(self.light_output_tokens.unwrap_or_default());
        let available = usize::try_from(u64::from(tokens) * 2).unwrap_or(usize::MAX);
        let schema = self.question_schema(purpose).map_or(0, |schema| schema.bytes());
        let max = available.saturating_sub(words).saturating_sub(schema);
        if data.len() <= max {
            return data.to_owned();
        }
        format!("{} [cut]", &data[..data.floor_char_boundary(max)])
    }

    /// The toolbox with the image that it is from, for messages. Its binary is always that of agentloop; an image of its own is
    /// only the place where it runs.
    pub(super) fn toolbox_name(&self) -> String {
        match &self.toolbox_image {
            Some(image) => {
                format!("the toolbox (of the pod's agentloop image, copied into a container of image {image})")
            }
            None => "the toolbox (of the pod's agentloop image)".to_owned(),
        }
    }

    /// Everything that is counted in rolling windows.
    pub(super) fn windows(&self) -> Vec<ResourceLimit> {
        self.rate_limits.iter().copied().chain([self.actions()]).collect()
    }
}

/// A spec that the engine cannot use. The controller creates no pod for it; if a pod exists anyway, its loop does not
/// run.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum SettingsError {
    #[error(transparent)]
    Hours(#[from] ActiveHoursError),
    #[error("spec.task.responseSchema is not a usable JSON schema: {0}")]
    ResponseSchema(String),
    #[error("spec.mode is Goal, which needs spec.goal: add a description and criteria")]
    NoGoal,
    #[error("spec.goal.maxCostUSD must be a decimal number with at most six decimals, such as \"2.50\"")]
    GoalCost,
    #[error("spec.goal.acceptanceCriteria: {field} of {name} cannot be used: {problem}")]
    GoalCriterion {
        /// Name of the criterion.
        name: String,
        /// The field, within the criterion.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl TryFrom<&AgentSpec> for EngineSettings {
    type Error = SettingsError;

    fn try_from(spec: &AgentSpec) -> Result<Self, SettingsError> {
        Ok(Self {
            mode: spec.try_into()?,
            min_delay: SignedDuration::from_millis(spec.r#loop.min_delay_milliseconds.into()),
            quick_text_turns: spec.guardrails.max_consecutive_turns / 2,
            longest_text_delay: SignedDuration::from_secs(60),
            max_delay: SignedDuration::from_millis(spec.r#loop.max_delay_milliseconds.into()),
            max_consecutive_errors: spec.r#loop.max_consecutive_errors,
            max_sleep: SignedDuration::from_secs(spec.continuous.max_sleep_seconds.into()),
            heartbeat: spec.continuous.heartbeat.as_ref().map(HeartbeatSettings::from),
            max_consecutive_turns: spec.guardrails.max_consecutive_turns,
            max_calls_per_turn: spec.guardrails.max_calls_per_turn,
            max_consecutive_tool_failures: spec.guardrails.max_consecutive_tool_failures,
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
            toolbox_image: spec.tools.toolbox.as_ref().and_then(|toolbox| toolbox.image.clone()),
            hot_state: spec.hot_state.fields.iter().map(FieldSchema::from).collect(),
            memory_bytes: spec.memory.as_ref().map(MemorySpec::max_bytes),
            max_result_bytes: usize::try_from(spec.tools.max_result_bytes).unwrap_or(usize::MAX),
            image_input: spec.model.image_input,
            structured_output: spec.model.structured_output,
            light_structured_output: spec
                .light_model
                .as_ref()
                .map_or(StructuredOutput::Disabled, |light| light.structured_output),
            approval_timeout: SignedDuration::from_secs(spec.tools.approval.timeout_seconds.into()),
            defers_approvals: spec.tools.approval.while_pending == WhilePending::Continue
                && spec.mode != AgentMode::Task,
            loop_detection: spec.guardrails.loop_detection.clone(),
            spec: hash(spec),
        })
    }
}

/// Must stay the same in every version, since it is persisted.
fn hash(spec: &AgentSpec) -> u64 {
    let spec = AgentSpec {
        suspend: false,
        ..spec.clone()
    };
    sha256_u64(serde_json::to_string(&spec).unwrap_or_default())
}

/// Only with a light model and at least one hot state field.
fn pre_check(spec: &AgentSpec) -> Option<precheck::PreCheckSettings> {
    let asked = spec.continuous.pre_check.as_ref().filter(|check| check.enabled)?;
    let light = spec.light_model.as_ref()?;
    (!spec.hot_state.fields.is_empty()).then(|| precheck::PreCheckSettings {
        prompt: asked.prompt.clone(),
        max_output_tokens: light.output_limit(),
    })
}
