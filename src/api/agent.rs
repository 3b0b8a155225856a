//! The `Agent` resource: one Agent is one loop, in at most one live pod.
//!
//! Doc comments here are the user's manual: `kubectl explain` shows them. Each field has bounds; each rule across
//! fields has a message that names the field and the fix, and a row in the table of the schema tests.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use super::active_hours::{ActiveHoursSpec, DayOfWeek};
use super::bounds::{DNS_SUBDOMAIN, KEY};
pub use super::goal::{AcceptanceCriterion, CommandCriterion, ConfidenceSpec, GoalSpec};
pub use super::hot_state::{FieldType, HotField, HotStateSpec};
use super::light_model;
pub use super::memory::MemorySpec;
pub use super::model::{
    ImageInput, ModelApi, ModelSpec, OutputLimitParameter, PromptCache, ReasoningEffort, ReasoningSpec,
    StructuredOutput, ToolCalling,
};
pub use super::pod::{AccessMode, AgentStorage, PodSettings, RetentionPolicy, UpdateStrategy};
pub use super::rate_limit::{LimitedResource, RateLimit};
pub use super::skill::SkillSpec;
use super::status::AgentStatus;
pub use super::task::{ResponseEndpoint, TaskSpec};
use super::tools::{TOOL, ToolsSpec};
pub use super::workspace::WorkspaceSpec;

/// Desired state of an Agent: its instructions, its model, and limits that the model cannot change.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "agentloop.dev",
    version = "v1alpha1",
    kind = "Agent",
    plural = "agents",
    shortname = "aloop",
    category = "agentloop",
    doc = "An autonomous LLM agent: one loop, in at most one live pod.",
    namespaced,
    status = "AgentStatus",
    derive = "PartialEq",
    selectable = ".spec.mode",
    selectable = ".spec.model.name",
    printcolumn(
        name = "READY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the Agent is ready; False or Unknown while it starts or requires user action"
    ),
    printcolumn(
        name = "STATE",
        type_ = "string",
        json_path = ".status.loop.state",
        description = "State of the loop"
    ),
    printcolumn(
        name = "MODEL",
        type_ = "string",
        json_path = ".spec.model.name",
        description = "Name of the model"
    ),
    printcolumn(
        name = "TURNS",
        type_ = "integer",
        json_path = ".status.usage.turns",
        description = "Number of completed turns"
    ),
    printcolumn(
        name = "TOKENS",
        type_ = "string",
        json_path = ".status.summary.tokens",
        description = "Total tokens used"
    ),
    printcolumn(
        name = "COST",
        type_ = "string",
        json_path = ".status.summary.cost",
        description = "Total cost, if prices are known"
    ),
    printcolumn(
        name = "BUDGET",
        type_ = "string",
        json_path = ".status.summary.budget",
        description = "Used share of the tightest limit"
    ),
    printcolumn(
        name = "AGE",
        type_ = "date",
        json_path = ".metadata.creationTimestamp",
        description = "Time since creation"
    ),
    printcolumn(
        name = "REASON",
        type_ = "string",
        json_path = ".status.summary.reason",
        priority = 1,
        description = "Reasons why the loop is not running"
    ),
    printcolumn(
        name = "RESUMES",
        type_ = "string",
        json_path = ".status.summary.resumes",
        priority = 1,
        description = "Time at which the loop continues automatically"
    ),
    printcolumn(
        name = "POD",
        type_ = "string",
        json_path = ".status.pod.name",
        priority = 1,
        description = "Name of the pod"
    ),
    validation = Rule::new("self.metadata.name.size() <= 53").message(
        "metadata.name must be at most 53 characters: the pod, its labels and other objects are named after it"
    ),
    validation = Rule::new("!self.metadata.name.contains('.')").message(
        "metadata.name must not contain a dot: it becomes the pod's host name; use '-' instead"
    )
)]
#[x_kube(
    validation = Rule::new("!(has(self.instructions) && has(self.instructionsFrom))").message(
        "spec.instructions and spec.instructionsFrom are both set: keep exactly one"
    ),
    validation = Rule::new("has(self.instructions) || has(self.instructionsFrom)").message(
        "the agent has no instructions: set spec.instructions to the text, or spec.instructionsFrom.configMapKeyRef to a key of a ConfigMap"
    )
)]
#[x_kube(
    validation = Rule::new("!has(self.task) || !has(self.task.minIntervalSeconds) || has(self.task.prompt)").message(
        "spec.task.minIntervalSeconds repeats spec.task.prompt: set the prompt, or remove the interval"
    ),
    validation = Rule::new("!has(self.task) || !has(self.task.idlePodSeconds) || !has(self.task.minIntervalSeconds)").message(
        "spec.task.idlePodSeconds and spec.task.minIntervalSeconds exclude each other: nothing would start the pod for the interval"
    ),
    validation = Rule::new("!has(self.task) || !has(self.task.idlePodSeconds) || !self.storage.ephemeral").message(
        "spec.task.idlePodSeconds needs a volume that outlives the pod: set spec.storage.ephemeral to false"
    ),
    validation = Rule::new("!has(self.task) || self.mode == 'Task'").message(
        "spec.task is supported in mode Task only: set spec.mode to Task, or remove spec.task"
    ),
    validation = Rule::new("self.mode != 'Task' || !has(self.continuous) || !(has(self.continuous.heartbeat) || has(self.continuous.preCheck))").message(
        "spec.continuous.heartbeat and spec.continuous.preCheck are supported in mode Continuous only: remove them"
    ),
    validation = Rule::new("self.mode != 'Task' || !has(self.tools) || !has(self.tools.approval) || !has(self.tools.approval.whilePending) || self.tools.approval.whilePending == 'Pause'").message(
        "spec.tools.approval.whilePending must be Pause in mode Task: a call that runs later would be part of another task"
    )
)]
#[x_kube(
    validation = Rule::new("!has(self.continuous) || !has(self.continuous.preCheck) || (has(self.continuous.preCheck.enabled) && !self.continuous.preCheck.enabled) || (has(self.hotState) && has(self.hotState.fields) && size(self.hotState.fields) > 0)").message(
        "spec.continuous.preCheck evaluates changes of spec.hotState.fields, which is empty: declare fields, or remove preCheck"
    )
)]
#[x_kube(
    validation = Rule::new("!has(self.mode) || self.mode != 'Goal' || has(self.goal)").message(
        "spec.mode is Goal, which needs spec.goal: add spec.goal.description and spec.goal.acceptanceCriteria"
    ),
    validation = Rule::new("!has(self.goal) || has(self.mode) && self.mode == 'Goal'").message(
        "spec.goal has no effect without mode Goal: set spec.mode to Goal, or remove spec.goal"
    ),
    validation = Rule::new("!has(self.goal) || has(self.lightModel) || (!has(self.goal.confidence) || !has(self.goal.confidence.model) || self.goal.confidence.model == 'Main') && !self.goal.acceptanceCriteria.exists(c, has(c.judgeModel) && c.judgeModel == 'Light')").message(
        "spec.goal uses the light model, and spec.lightModel is not set: set it, or remove judgeModel and confidence.model"
    ),
    validation = Rule::new("!has(self.goal) || !self.goal.acceptanceCriteria.exists(c, has(c.command)) || has(self.tools) && has(self.tools.builtin) && 'Shell' in self.tools.builtin").message(
        "spec.goal.acceptanceCriteria has a command, which needs Shell in spec.tools.builtin: add it there, or use another check"
    ),
    validation = Rule::new("!has(self.goal) || !has(self.goal.artifacts) || self.goal.artifacts.size() == 0 || has(self.tools) && has(self.tools.builtin) && 'Files' in self.tools.builtin").message(
        "spec.goal.artifacts needs Files in spec.tools.builtin: add it there, or remove spec.goal.artifacts"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct AgentSpec {
    /// How the loop is driven. `Continuous`, the default: the agent takes turns until it yields, and sets its own pace.
    /// `Task`: the agent works on one task after the other, and waits for the next one.
    /// `Goal`: it works in steps until the criteria of `goal` are met, or a limit ends it. Immutable.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf").message(
        "spec.mode is immutable: delete and recreate the Agent"
    ))]
    pub mode: AgentMode,
    /// If true, stops the loop: the call in flight is cancelled, the journal is closed and the pod is deleted. The
    /// state is kept. Defaults to false.
    #[serde(default)]
    pub suspend: bool,
    /// The system prompt, at most 32,768 characters. Set exactly one of `instructions` and `instructionsFrom`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32768))]
    pub instructions: Option<String>,
    /// Source of the system prompt. An edit of the ConfigMap takes effect at the next turn, without a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions_from: Option<TextSource>,
    /// Named texts that are appended to the instructions in the system prompt, in this order. At most 32, together at
    /// most 131,072 bytes. An edit of a ConfigMap takes effect at the next turn, without a restart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub skills: Vec<SkillSpec>,
    /// The main model of the agent.
    pub model: ModelSpec,
    /// A smaller model for `continuous.preCheck` and for scoring signals of Sensors. It has the same fields as `model`,
    /// with its own key and price. Its calls count against the same budgets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = light_model::rename)]
    pub light_model: Option<ModelSpec>,
    /// Pace and error handling of the loop.
    #[serde(default)]
    pub r#loop: LoopSpec,
    /// Settings of mode `Continuous`.
    #[serde(default)]
    pub continuous: ContinuousSpec,
    /// Settings of mode `Task`. Absent: the defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskSpec>,
    /// Settings of mode `Goal`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<GoalSpec>,
    /// Tools that the model may call, in addition to those of its mode, such as `yield` or `finish`.
    #[serde(default)]
    pub tools: ToolsSpec,
    /// Typed fields with the present state of the outside world, shown to the model with each call.
    #[serde(default)]
    pub hot_state: HotStateSpec,
    /// Notes that the agent keeps with the tool `memory`. Absent: the tool is not offered; notes that exist are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemorySpec>,
    /// Limits that are enforced outside the model.
    #[serde(default)]
    pub guardrails: GuardrailsSpec,
    /// AgentBudgets in the Agent's namespace that it draws on, in addition to those whose selector matches it. At most
    /// 16. A call needs room in all of them and counts against all of them. If one does not exist, no call is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub budget_refs: Vec<BudgetRef>,
    /// Storage of the loop's journal. Immutable.
    #[serde(default)]
    pub storage: AgentStorage,
    /// Volume for the Agent's files, separate from its journal: `/workspace` of the built-in tools, and the files that
    /// Sensors with `source.watch` watch. `{}` selects the defaults. Absent: no volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<WorkspaceSpec>,
    /// A safe subset of pod settings. None of them relaxes the `restricted` Pod Security profile.
    #[serde(default)]
    pub pod: PodSettings,
}

/// A Secret whose values are sent as headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadersSecretRef<'a> {
    /// Name of its directory in the gateway: that of the tool server, or [`RESPONSES_SECRET`].
    pub dir: &'a str,
    /// The field of the spec with the URL that it is sent to.
    pub url_field: String,
    /// The URL; `None`: a container of the pod.
    pub url: Option<&'a str>,
    /// The field of the spec that refers to it.
    pub field: String,
    /// Name of the Secret.
    pub secret: &'a str,
}

/// Directory of the headers for `spec.task.responses`. No tool server can have this name.
pub const RESPONSES_SECRET: &str = "task.responses";

impl AgentSpec {
    /// The Secrets whose values are sent as headers.
    #[must_use]
    pub fn header_secrets(&self) -> Vec<HeadersSecretRef<'_>> {
        let servers = self.tools.servers.iter().filter_map(|server| {
            let path = format!("spec.tools.servers[{}]", server.name);
            Some(HeadersSecretRef {
                dir: &server.name,
                url_field: format!("{path}.url"),
                url: server.url.as_deref(),
                field: format!("{path}.headersSecretRef"),
                secret: &server.headers_secret_ref.as_ref()?.name,
            })
        });
        let responses = self.response_endpoint().and_then(|http| {
            Some(HeadersSecretRef {
                dir: RESPONSES_SECRET,
                url_field: "spec.task.responses.http.url".to_owned(),
                url: Some(&http.url),
                field: "spec.task.responses.http.headersSecretRef".to_owned(),
                secret: &http.headers_secret_ref.as_ref()?.name,
            })
        });
        servers.chain(responses).collect()
    }

    /// The server that receives the responses to tasks.
    #[must_use]
    pub fn response_endpoint(&self) -> Option<&ResponseEndpoint> {
        Some(&self.task.as_ref()?.responses.as_ref()?.http)
    }
}

/// How a loop is driven.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum AgentMode {
    /// The agent takes turns until it yields, sleeps for the time that it chose, and wakes.
    #[default]
    Continuous,
    /// The agent works on one task after the other, each in its own conversation, and waits for the next one.
    Task,
    /// The agent works in steps until the criteria of `spec.goal` are met, or a limit ends its loop.
    Goal,
}

/// A text in a ConfigMap in the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TextSource {
    /// The ConfigMap and its key.
    pub config_map_key_ref: KeyRef,
}

/// One key of a ConfigMap or Secret in the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the object in the same namespace.
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
    /// Key in the object's data.
    #[schemars(length(min = 1, max = 253), regex(pattern = KEY))]
    pub key: String,
}

/// Pace and error handling of a loop.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.minDelayMilliseconds <= self.maxDelayMilliseconds",
    "message": "spec.loop.minDelayMilliseconds (default 100) must not exceed spec.loop.maxDelayMilliseconds (default 10000): lower the first or raise the second",
}]))]
pub struct LoopSpec {
    /// Delay between two turns, in milliseconds, 1 to 3,600,000. Each consecutive failed turn doubles it. After a turn
    /// without a tool call it is at least 1 s, doubled with each further such turn in a row, up to 60 s. Defaults to
    /// 100.
    #[schemars(range(min = 1, max = 3_600_000))]
    pub min_delay_milliseconds: u32,
    /// Maximum delay after failed turns, in milliseconds, 1 to 3,600,000. Defaults to 10,000.
    #[schemars(range(min = 1, max = 3_600_000))]
    pub max_delay_milliseconds: u32,
    /// Number of consecutive failed turns, 1 to 1,000, after which the loop pauses with the reason
    /// `ConsecutiveErrors` (condition `ErrorLimitReached`). Defaults to 5.
    #[schemars(range(min = 1, max = 1000))]
    pub max_consecutive_errors: u32,
    /// What happens to a turn whose next call exceeds a limit in `guardrails.rateLimits`. `Skip`, the default: the turn
    /// ends, and the next one starts with current data once there is room. `Block`: the turn waits and continues. A
    /// turn without any answer yet waits in both cases.
    pub exhaustion_policy: ExhaustionPolicy,
    /// Maximum number of tokens of earlier turns at the start of a turn, 1,000 to 10,000,000. Above it, old tool
    /// results are left out of the prompt first, and then the oldest turns are replaced with a summary. Each call pays
    /// for this history: a lower value makes a long-lived agent cheaper, a higher one preserves more of the
    /// conversation verbatim. Capped at 80 % of `model.contextTokens`. The turn in progress may fill the rest of the
    /// context window. Defaults to 24,000.
    #[schemars(range(min = 1000, max = 10_000_000))]
    pub history_tokens: u32,
}

/// What happens to a turn whose next call exceeds a rate limit.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExhaustionPolicy {
    /// The turn ends, and the next one starts once there is room.
    #[default]
    Skip,
    /// The turn waits until there is room.
    Block,
}

impl Default for LoopSpec {
    fn default() -> Self {
        Self {
            min_delay_milliseconds: 100,
            max_delay_milliseconds: 10_000,
            max_consecutive_errors: 5,
            exhaustion_policy: ExhaustionPolicy::Skip,
            history_tokens: 24_000,
        }
    }
}

/// Settings of mode `Continuous`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct ContinuousSpec {
    /// Maximum sleep that the agent may choose, in seconds, at most 30 days. Longer sleeps are shortened to it.
    /// Defaults to 3,600.
    #[schemars(range(min = 1, max = 2_592_000))]
    pub max_sleep_seconds: u32,
    /// A turn with a fixed prompt at a fixed interval. Absent: no heartbeat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<HeartbeatSpec>,
    /// At the end of a sleep, asks `lightModel` whether the changes in `hotState` since the last turn require a turn.
    /// If not, the loop sleeps again, twice as long, up to `maxSleepSeconds`. The turn runs without a pre-check when
    /// notifications are pending or when the sleep ended early, and also when `lightModel` gives no clear answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pre_check: Option<PreCheckSpec>,
}

/// A turn with a fixed prompt in a separate conversation. It also runs while the agent sleeps, and does not change when
/// that sleep ends.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatSpec {
    /// Interval between the starts of two heartbeats, in seconds, 10 to 2,592,000. It follows the wall clock across
    /// restarts; missed heartbeats are made up for by a single one. A turn in progress is finished first, and a pause
    /// of the loop also holds the heartbeat.
    #[schemars(range(min = 10, max = 2_592_000))]
    pub every_seconds: u32,
    /// Prompt of each heartbeat, at most 8,192 characters.
    #[schemars(length(min = 1, max = 8192))]
    pub prompt: String,
}

/// Question to the light model whether a turn is needed.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct PreCheckSpec {
    /// If false, no pre-check is made. Defaults to true.
    pub enabled: bool,
    /// Instructions for `lightModel` on what matters to this agent and what does not, at most 4,096 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub prompt: Option<String>,
}

impl Default for PreCheckSpec {
    fn default() -> Self {
        Self {
            enabled: true,
            prompt: None,
        }
    }
}

impl Default for ContinuousSpec {
    fn default() -> Self {
        Self {
            max_sleep_seconds: 3600,
            heartbeat: None,
            pre_check: None,
        }
    }
}

/// Limits that are enforced outside the model.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct GuardrailsSpec {
    /// Maximum number of turns without a sleep, 1 to 10,000. At the limit the loop is forced to sleep for 60 s, doubled
    /// each time, up to `maxSleepSeconds`. Sleeps shorter than a minute are added up: each full minute takes one turn
    /// off the count. Defaults to 50.
    #[schemars(range(min = 1, max = 10_000))]
    pub max_consecutive_turns: u32,
    /// Maximum number of model calls in one turn, 1 to 1,000. At the limit the turn ends, and the model is informed in
    /// the next one. Defaults to 25.
    #[schemars(range(min = 1, max = 1000))]
    pub max_calls_per_turn: u32,
    /// Maximum number of actions (tool runs with an effect other than `Read`) in any 60 seconds, 1 to 600. The next
    /// action waits until the oldest of them is 60 s old, and the loop is paused until then. Defaults to 60.
    #[schemars(range(min = 1, max = 600))]
    pub actions_per_minute: u32,
    /// Maximum number of consecutive failed tool runs, 1 to 1,000: runs that returned an error, that were not answered in
    /// time, or whose server was unavailable. At the limit the loop pauses for 60 s, doubled each time, up to 1 h, until a
    /// run succeeds. The annotation `agentloop.dev/resume` ends the pause. Denied calls do not count. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_consecutive_tool_failures: Option<u32>,
    /// Time awake without an effective action, in seconds, 1 to 2,592,000, after which the loop ends with outcome
    /// `Idle`. A `yield` that sleeps for a minute or more, and a tool result not seen before, including an error, reset
    /// it. Pauses, failed calls and tool runs do not count, and an answered call counts for at most 30 s. A changed
    /// spec or the annotation `agentloop.dev/wake` starts the loop again. Defaults to 600.
    #[schemars(range(min = 1, max = 2_592_000))]
    pub idle_timeout_seconds: u32,
    /// Hours in which calls are made. When they end, the call in flight is finished and the loop pauses until the next
    /// window. Absent: always.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_hours: Option<ActiveHoursSpec>,
    /// Limits in rolling windows, at most 8, one per resource and window. A call or tool run that exceeds one waits
    /// until there is room; `loop.exhaustionPolicy` decides what happens to the turn of a waiting call.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["resource", "windowSeconds"]))]
    pub rate_limits: Vec<RateLimit>,
    /// Maximum number of tokens (uncached input, cache writes, output) in any 3,600 seconds. A call whose bound does
    /// not fit waits until it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub tokens_per_hour: Option<i64>,
    /// Limits for the whole life of the Agent. Once reached, the loop continues only after the limit is raised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<TotalLimits>,
    /// Reaction to a loop that repeats itself or spends far above the pace of its limits.
    pub loop_detection: LoopDetection,
}

/// Limits for the whole life of an Agent. Set at least one.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.tokens) || has(self.costUSD)",
    "message": "spec.guardrails.total is empty: set tokens or costUSD, or remove it",
}, {
    "rule": "!has(self.costUSD) || self.costUSD.matches('^[0-9]{1,9}([.][0-9]{1,6})?$')",
    "message": "spec.guardrails.total.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\"",
}]))]
pub struct TotalLimits {
    /// Maximum number of tokens: uncached input, cache writes and output.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub tokens: Option<i64>,
    /// Maximum cost in US dollars, a decimal string with at most six decimals, such as "25.00".
    #[serde(rename = "costUSD", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20))]
    pub cost_usd: Option<String>,
}

/// Detection of loops, by the tool calls and answers of the loop and, independently of the worker, by the requests that
/// its gateway sees.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopDetection {
    /// Reaction to a detected loop. `Enforce`, the default: the model is warned, then the repeated calls are denied
    /// until the turn ends, then the loop sleeps for 60 s, doubled each time, up to `maxSleepSeconds`; after four such
    /// sleeps without anything new it ends with outcome `Failed`. Requests that the gateway sees repeated byte for byte
    /// pause the loop until `agentloop.dev/resume`. `Warn`: the model is warned, nothing else. Both set a condition,
    /// emit an Event and count in a metric. `Disabled`: no detection.
    pub mode: DetectionMode,
    /// Tools that may be called repeatedly without new results, such as one that waits for a job. At most 32. Names as
    /// the model calls them (`<server>__<tool>`), or as their server has them. Failing calls, and identical calls from
    /// the 100th in a row on, count as repetition nevertheless.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "set", "items" = {
        "description": "Name of a tool.", "type": "string", "minLength": 1, "maxLength": 128, "pattern": TOOL,
    }))]
    pub exempt_tools: Vec<String>,
}

impl LoopDetection {
    /// Whether a tool is exempt, by the name under which the model calls it.
    #[must_use]
    pub fn exempts(&self, tool: &str) -> bool {
        let own = tool.split_once("__").map(|(_, own)| own);
        self.exempt_tools
            .iter()
            .any(|exempt| exempt == tool || Some(exempt.as_str()) == own)
    }
}

/// Reaction to a detected loop.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum DetectionMode {
    /// The model is warned; repeated calls are denied, then the loop is forced to sleep, then it ends.
    #[default]
    Enforce,
    /// The model is warned, nothing else.
    Warn,
    /// No detection.
    Disabled,
}

/// Reference to an AgentBudget in the Agent's namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BudgetRef {
    /// Name of the AgentBudget in the Agent's namespace.
    #[schemars(length(min = 1, max = 63), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
}

impl Default for GuardrailsSpec {
    fn default() -> Self {
        Self {
            max_consecutive_turns: 50,
            max_calls_per_turn: 25,
            actions_per_minute: 60,
            max_consecutive_tool_failures: None,
            idle_timeout_seconds: 600,
            active_hours: None,
            rate_limits: Vec::new(),
            tokens_per_hour: None,
            total: None,
            loop_detection: LoopDetection::default(),
        }
    }
}
