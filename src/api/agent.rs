//! The `Agent` resource: one Agent is one loop, in at most one live pod.
//!
//! Doc comments here are the user's manual: they show in `kubectl explain`. Each field has bounds; each rule across
//! fields has a message that names the field and the fix, and a row in the table of the schema tests.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use super::active_hours::{ActiveHours, Day};
use super::bounds::{DNS_SUBDOMAIN, KEY};
pub use super::hot_state::{FieldType, HotField, HotState};
use super::light_model;
pub use super::model::{Model, ModelApi, OutputLimitParameter, PromptCache, Reasoning, ReasoningEffort, ToolCalling};
pub use super::pod::{AccessMode, PodSettings, RetentionPolicy, Storage, UpdateStrategy};
pub use super::rate_limit::{RateLimit, Resource};
pub use super::skill::Skill;
use super::status::AgentStatus;
use super::tools::{TOOL, Tools};
pub use super::workspace::Workspace;

/// The agent's instructions, its model, and the limits that hold whatever the model does.
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
        description = "False or Unknown: this Agent is not up yet or needs a person"
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
        description = "The model's name"
    ),
    printcolumn(
        name = "TURNS",
        type_ = "integer",
        json_path = ".status.usage.turns",
        description = "Turns completed"
    ),
    printcolumn(
        name = "TOKENS",
        type_ = "string",
        json_path = ".status.summary.tokens",
        description = "Tokens used, all kinds together"
    ),
    printcolumn(
        name = "COST",
        type_ = "string",
        json_path = ".status.summary.cost",
        description = "What its calls cost, where the price is known"
    ),
    printcolumn(
        name = "BUDGET",
        type_ = "string",
        json_path = ".status.summary.budget",
        description = "How much of its tightest limit is used"
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
        description = "Why the loop does not run, when it does not"
    ),
    printcolumn(
        name = "RESUMES",
        type_ = "string",
        json_path = ".status.summary.resumes",
        priority = 1,
        description = "When the loop goes on by itself"
    ),
    printcolumn(
        name = "POD",
        type_ = "string",
        json_path = ".status.pod.name",
        priority = 1,
        description = "The pod that runs the loop"
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
        "the agent has no instructions: set spec.instructions to a text, or spec.instructionsFrom.configMapKeyRef to where it is kept"
    )
)]
#[x_kube(
    validation = Rule::new("!has(self.continuous) || !has(self.continuous.preCheck) || (has(self.continuous.preCheck.enabled) && !self.continuous.preCheck.enabled) || (has(self.hotState) && has(self.hotState.fields) && size(self.hotState.fields) > 0)").message(
        "spec.continuous.preCheck asks what has changed in spec.hotState.fields, and there are none: declare some, or remove it"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct AgentSpec {
    /// How the loop is driven. Immutable. `Continuous`: the agent turns until it yields, and sets its own pace.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf").message(
        "spec.mode is immutable: delete the Agent and make a new one"
    ))]
    pub mode: Mode,
    /// True stops the loop: the call in flight is cut, the journal is closed, the pod is deleted, the state is kept.
    #[serde(default)]
    pub suspend: bool,
    /// The system prompt, at most 32,768 characters. Exactly one of `instructions` and `instructionsFrom`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32768))]
    pub instructions: Option<String>,
    /// Where the system prompt is kept instead; an edit there takes effect at the next turn, without a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions_from: Option<TextSource>,
    /// Texts that join the system prompt after the instructions, each under its name, in this order; at most 32, together
    /// at most 131,072 bytes. An edit of a text takes effect at the next turn, without a restart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub skills: Vec<Skill>,
    /// The model that thinks.
    pub model: Model,
    /// A smaller model for small questions, of the same shape as `model`, with a key and a price of its own: the one of
    /// `continuous.preCheck` and of the signals of Sensors. Its calls count in the same budgets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = light_model::rename)]
    pub light_model: Option<Model>,
    /// Pace and error handling of the loop.
    #[serde(default)]
    pub r#loop: Loop,
    /// Settings of mode `Continuous`.
    #[serde(default)]
    pub continuous: Continuous,
    /// Tools that the model may call, beside `yield`.
    #[serde(default)]
    pub tools: Tools,
    /// What the loop knows of the present moment: fields that the model sees with each call.
    #[serde(default)]
    pub hot_state: HotState,
    /// Limits that the model cannot change.
    #[serde(default)]
    pub guardrails: Guardrails,
    /// AgentBudgets of this namespace that it draws on, beside those whose selector matches it; at most 16. A call needs
    /// room in all of them and counts in all of them. One that does not exist means no call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub budget_refs: Vec<BudgetRef>,
    /// Where the loop keeps its journal. Fixed at creation.
    #[serde(default)]
    pub storage: Storage,
    /// Files of the Agent, beside its journal, for Sensors with `source.watch`; `{}` is enough. Absent: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<Workspace>,
    /// A safe subset of pod settings; nothing here lifts the `restricted` profile.
    #[serde(default)]
    pub pod: PodSettings,
}

/// How a loop is driven.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The agent turns until it yields, sleeps as long as it chose, and wakes.
    #[default]
    Continuous,
}

/// A text kept in a ConfigMap of the same namespace.
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
    /// Name of the object, in the same namespace.
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
    /// Key in its data.
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
pub struct Loop {
    /// Pause between two turns, in milliseconds, 1 to 3,600,000; each failed turn in a row doubles it. After a turn that calls
    /// no tool it is at least 1 s, doubled with each further one in a row up to 60 s.
    #[schemars(range(min = 1, max = 3_600_000))]
    pub min_delay_milliseconds: u32,
    /// Longest delay after failed turns, in milliseconds, 1 to 3,600,000.
    #[schemars(range(min = 1, max = 3_600_000))]
    pub max_delay_milliseconds: u32,
    /// Failed turns in a row, 1 to 1,000, until the loop pauses with `ErrorLimitReached`.
    #[schemars(range(min = 1, max = 1000))]
    pub max_consecutive_errors: u32,
    /// What becomes of a turn whose next call finds no room in `guardrails.rateLimits`. `Skip`: it ends there, and the
    /// next one begins with fresh news once there is room. `Block`: it waits and goes on. A turn without an answer yet
    /// waits in either case.
    pub exhaustion_policy: ExhaustionPolicy,
    /// Tokens of earlier turns with which a turn begins at most, 1,000 to 10,000,000. Beyond that the results of old tool
    /// calls are left out of the prompt, and then the oldest turns are summed up. Each call pays for all of them: fewer
    /// make a long life cheaper, more let the model remember word for word. It never has more than 80 % of
    /// `model.contextTokens`. The turn under way may fill the whole context window.
    #[schemars(range(min = 1000, max = 10_000_000))]
    pub history_tokens: u32,
}

/// What becomes of a turn that finds no room in a rate limit.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExhaustionPolicy {
    /// It ends, and the next one begins once there is room.
    #[default]
    Skip,
    /// It waits until there is room.
    Block,
}

impl Default for Loop {
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
pub struct Continuous {
    /// Longest sleep the agent may choose, in seconds, at most 30 days; a longer one is shortened to it.
    #[schemars(range(min = 1, max = 2_592_000))]
    pub max_sleep_seconds: u32,
    /// A turn with a fixed prompt, now and then; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<Heartbeat>,
    /// Asks `lightModel`, when a sleep is over, whether what has changed in `hotState` since the last turn is worth a turn.
    /// When it is not, the sleep goes on, twice as long, at most `maxSleepSeconds`. The turn runs in any case when
    /// notifications wait, when anything but its end ended the sleep, and when `lightModel` gives no clear answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pre_check: Option<PreCheck>,
}

/// A turn with a fixed prompt, in a conversation of its own: apart from what the agent does otherwise, also while it sleeps,
/// and without effect on when its sleep ends.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Heartbeat {
    /// Seconds between the beginnings of two, 10 to 2,592,000. By the wall clock, over restarts; of those that were missed
    /// one comes. A turn under way is finished first, and whatever holds the loop holds it too.
    #[schemars(range(min = 10, max = 2_592_000))]
    pub every_seconds: u32,
    /// What the agent is asked each time, at most 8,192 characters.
    #[schemars(length(min = 1, max = 8192))]
    pub prompt: String,
}

/// The question whether a turn is worth it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct PreCheck {
    /// False: it is not asked.
    pub enabled: bool,
    /// What matters to this agent and what does not, for `lightModel`; at most 4,096 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub prompt: Option<String>,
}

impl Default for PreCheck {
    fn default() -> Self {
        Self {
            enabled: true,
            prompt: None,
        }
    }
}

impl Default for Continuous {
    fn default() -> Self {
        Self {
            max_sleep_seconds: 3600,
            heartbeat: None,
            pre_check: None,
        }
    }
}

/// Limits that the model cannot change.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Guardrails {
    /// Turns without a sleep, 1 to 10,000, until the loop is made to sleep (60 s, doubled each time, at most
    /// `maxSleepSeconds`). Sleeps of less than a minute count together: each minute of them takes one turn off the count.
    #[schemars(range(min = 1, max = 10_000))]
    pub max_consecutive_turns: u32,
    /// Model calls in one turn, 1 to 1,000; at the cap the turn ends and the model is told so in the next one.
    #[schemars(range(min = 1, max = 1000))]
    pub max_calls_per_turn: u32,
    /// Tool runs with side effects (all but those of tools with effect `Read`) in any 60 seconds, 1 to 600; the next one
    /// waits until one of them is 60 s old, and the loop is paused until then.
    #[schemars(range(min = 1, max = 600))]
    pub actions_per_minute: u32,
    /// Seconds awake without an effective action, 1 to 2,592,000, until the loop ends with outcome `Idle`. A `yield` that
    /// sleeps for a minute or more and a tool result not seen before, be it an error, begin anew. Pauses, failed calls and runs
    /// of tools do not count, and of an answered call 30 s at most. A changed spec or the annotation `agentloop.dev/wake`
    /// starts the loop again.
    #[schemars(range(min = 1, max = 2_592_000))]
    pub idle_timeout_seconds: u32,
    /// Hours outside of which no call is made: a call in flight is finished, the loop goes on with the next window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_hours: Option<ActiveHours>,
    /// Limits in rolling windows, at most 8, one for each resource and window. The call or tool run that finds no
    /// room waits until there is some; `loop.exhaustionPolicy` says what becomes of a call's turn.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["resource", "windowSeconds"]))]
    pub rate_limits: Vec<RateLimit>,
    /// Tokens (uncached input, cache writes, output) in any 3,600 seconds. A call whose worst case does not fit waits
    /// until it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub tokens_per_hour: Option<i64>,
    /// Limits for the Agent's whole life; only a higher limit lets it go on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<Total>,
    /// What happens when the loop repeats itself, or burns far above the pace of its limits.
    pub loop_detection: LoopDetection,
}

/// Limits for an Agent's whole life; at least one.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.tokens) || has(self.costUSD)",
    "message": "spec.guardrails.total limits nothing: set tokens or costUSD, or remove it",
}, {
    "rule": "!has(self.costUSD) || self.costUSD.matches('^[0-9]{1,9}([.][0-9]{1,6})?$')",
    "message": "spec.guardrails.total.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\"",
}]))]
pub struct Total {
    /// Uncached input, cache writes and output together.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub tokens: Option<i64>,
    /// Money in US dollars, a decimal string such as "25.00", at most six decimals.
    #[serde(rename = "costUSD", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20))]
    pub cost_usd: Option<String>,
}

/// Detection of loops: by the loop's own tool calls and answers, and by what its gateway sees, whatever the worker says.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopDetection {
    /// `Enforce`: the model is told what it repeats, then such calls are denied until its turn ends, then the loop sleeps
    /// for 60 s, doubled each time, at most `maxSleepSeconds`; after four such sleeps without anything new it ends with
    /// outcome `Failed`. Requests that its gateway sees repeated byte for byte pause it until `agentloop.dev/resume`.
    /// `Warn`: the model is told, and nothing else. Both: a condition, an Event, a metric. `Disabled`: nothing.
    pub mode: DetectionMode,
    /// Tools that may be called again and again with nothing new, such as one that waits for a job; at most 32. Names as
    /// the model calls them (`<server>__<tool>`), or as their server has them. They are part of a loop all the same when
    /// they fail, and from the 100th equal call in a row on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "set", "items" = {
        "description": "Name of a tool.", "type": "string", "minLength": 1, "maxLength": 128, "pattern": TOOL,
    }))]
    pub exempt_tools: Vec<String>,
}

impl LoopDetection {
    /// Whether a tool, by the name that the model calls it by, is exempt.
    #[must_use]
    pub fn exempts(&self, tool: &str) -> bool {
        let own = tool.split_once("__").map(|(_, own)| own);
        self.exempt_tools
            .iter()
            .any(|exempt| exempt == tool || Some(exempt.as_str()) == own)
    }
}

/// What a detected loop leads to.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum DetectionMode {
    /// The model is told; what goes on is denied, put to sleep, and ended.
    #[default]
    Enforce,
    /// The model is told, and nothing else.
    Warn,
    /// Nothing.
    Disabled,
}

/// An AgentBudget in the Agent's own namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BudgetRef {
    /// Name of the AgentBudget, in the Agent's own namespace.
    #[schemars(length(min = 1, max = 63), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
}

impl Default for Guardrails {
    fn default() -> Self {
        Self {
            max_consecutive_turns: 50,
            max_calls_per_turn: 25,
            actions_per_minute: 60,
            idle_timeout_seconds: 600,
            active_hours: None,
            rate_limits: Vec::new(),
            tokens_per_hour: None,
            total: None,
            loop_detection: LoopDetection::default(),
        }
    }
}
