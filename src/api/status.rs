//! The status of an Agent.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoStaticStr};

use super::budget::LedgerRecord;
use super::first_elements::first_elements;
use super::goal::GoalStatus;
pub use super::pause::PauseReason;
use super::task::Activation;
use super::usage_counts::LoopCounts;

/// Observed state of an Agent. Written by the controller only.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("default" = {"conditions": [{
    "type": "Ready",
    "status": "Unknown",
    "reason": "Pending",
    "message": "The controller has not reconciled this Agent yet.",
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}]}))]
pub struct AgentStatus {
    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions of the Agent. `Ready` is True when no user action is required. The condition of a limit is absent until
    /// the limit first applies; from then on it is True while the limit applies and False otherwise.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// State of the loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#loop: Option<LoopStatus>,
    /// Progress of a loop in mode `Goal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub goal: Option<GoalStatus>,
    /// Usage since the Agent was created, counted by the gateway. Never reset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<LoopUsage>,
    /// Open gates: what waits for the answer of a person, in the order of the calls, then by server. The arguments are not in the status; read the
    /// event `gate:opened` with its messages.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub gates: Vec<Gate>,
    /// The tasks and requests that ended last, the newest first, at most 10.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "atomic"))]
    pub recent_activations: Vec<Activation>,
    /// AgentBudgets that the Agent draws on, as of this status.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub budgets: Vec<BudgetShare>,
    /// Texts for the columns of `kubectl get`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<AgentSummary>,
    /// The pod that runs the loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodStatus>,
    /// Last failure, without any text of a prompt or an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<LastError>,
    /// Last handled values of the request annotations, so that each is handled once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_handled_requests: Option<HandledRequests>,
    /// State from which a new leader continues the Agent's own limits. Internal; do not edit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ledger: Option<AgentLedger>,
}

/// Maximum number of models in [`LoopUsage::by_model`].
pub const MAX_MODELS: usize = 10;
/// Maximum number of gates of one Agent that are open at a time.
pub const MAX_GATES: usize = 20;

/// A request for an approval. Approve it with the annotations `agentloop.dev/approve: <id>:<argumentsHash>` and
/// `agentloop.dev/approved-by: <your user name>`, or deny it with `agentloop.dev/deny: <id>`. Or answer it over the
/// controller's API: `POST /v1/namespaces/{ns}/agents/{name}/gates/{gate}`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Gate {
    /// Id of the gate, never reused.
    #[schemars(length(max = 63))]
    pub id: String,
    /// What the gate is for.
    pub kind: GateKind,
    /// Tool of the call, as the model calls it. For `ToolDefinitionsChanged`: the server. For `LowConfidence` and
    /// `Escalated`: `goal`.
    #[schemars(length(max = 64))]
    pub tool: String,
    /// Hash of the arguments of the call. For `ToolDefinitionsChanged`: hash of the definitions that would be accepted.
    /// For `LowConfidence` and `Escalated`: hash of what is to be approved.
    #[schemars(length(max = 64))]
    pub arguments_hash: String,
    /// Time at which the gate was opened.
    pub opened_at: Time,
    /// Time at which the gate expires, which denies it. Absent: it does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Time>,
    /// Source of the untrusted content because of which the call needs the approval. Absent if it needs it in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 320))]
    pub untrusted_content_source: Option<String>,
}

/// What a gate is for.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum GateKind {
    /// A tool call runs only if it is approved.
    ToolCallNeedsApproval,
    /// A tool call with an unknown outcome is repeated only if that is approved.
    UnknownOutcome,
    /// Changed and new tools of a server are offered to the model only if they are approved. The loop continues without them.
    ToolDefinitionsChanged,
    /// A loop in mode `Goal` whose confidence is too low continues only if that is approved.
    LowConfidence,
    /// A loop in mode `Goal` that repeats itself continues only if that is approved.
    Escalated,
}

/// Accounts of the Agent's own limits.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentLedger {
    /// Account of `guardrails.tokensPerHour`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_hour: Option<LedgerRecord>,
    /// Account of `guardrails.total`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<LedgerRecord>,
}

/// State of a loop.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum LoopState {
    /// The pod or the loop is starting.
    Starting,
    /// A turn is in progress or about to start.
    Running,
    /// The agent chose to sleep until a wake condition holds.
    Sleeping,
    /// One or more reasons hold the loop; it continues when all of them are cleared.
    Paused,
    /// The loop is shutting down.
    Stopping,
    /// No loop is running.
    #[default]
    Stopped,
}

/// How a loop ended.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum LoopOutcome {
    /// The agent ended its loop (`yield` with mode `shutdown`), or met its goal.
    Completed,
    /// The loop was awake for `guardrails.idleTimeoutSeconds` without an effective action.
    Idle,
    /// The loop repeated itself through all forced sleeps of `guardrails.loopDetection`, or reached a limit of `goal`.
    Failed,
    /// A loop in mode `Goal` needed an approval to continue, which was denied or not given in time.
    Escalated,
    /// A user stopped the loop (annotation `agentloop.dev/stop`).
    Cancelled,
    /// A loop in mode `Task` had no task for `task.idlePodSeconds`. The next one starts it again.
    ScaledToZero,
}

/// State of a loop.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopStatus {
    /// State of the loop: `Starting`, `Running`, `Sleeping`, `Paused`, `Stopping` or `Stopped`.
    pub state: LoopState,
    /// Reasons why the loop is Paused or Stopped. Several may apply at once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "set"))]
    pub reasons: Vec<PauseReason>,
    /// Time at which the loop entered the state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Time at which the loop continues automatically. Absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumes_at: Option<Time>,
    /// Wake condition of a sleeping loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<WakeCondition>,
    /// How the loop ended. Absent unless it has ended. `Completed`: the agent ended it or met its goal. `Idle`: no effective action for
    /// `guardrails.idleTimeoutSeconds`. `Failed`: it repeated itself through all forced sleeps, or reached a limit of `goal`.
    /// `Escalated`: in mode `Goal`, its continuation was not approved. `Cancelled`: a user stopped it. `ScaledToZero`:
    /// in mode `Task`, there was no task for `task.idlePodSeconds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<LoopOutcome>,
    /// Epoch of the pod. A newer pod has a higher epoch and fences the older ones.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// Number of turns started since the Agent was created.
    #[schemars(range(min = 0))]
    pub turn: i64,
    /// Time at which the controller learned of the start of the most recent turn. Absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_turn_time: Option<Time>,
    /// Number of consecutive failed turns.
    #[schemars(range(min = 0))]
    pub consecutive_errors: i32,
    /// Number of turns since the last sleep.
    #[schemars(range(min = 0))]
    pub consecutive_turns: i32,
    /// Number of tasks and requests that wait. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub waiting_tasks: Option<i64>,
    /// Untrusted content that the model has been shown and that may still be in its context. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untrusted_content: Option<UntrustedContent>,
}

/// Untrusted content in the context of a model.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct UntrustedContent {
    /// Time at which the first of it was shown.
    pub since: Time,
    /// Source of the first of it: `server/<name>` for a tool server, or the event of a Sensor, such as `sensor/<name>`.
    #[schemars(length(max = 320))]
    pub source: String,
}

/// Wake condition of a sleeping loop.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct WakeCondition {
    /// Kind of the condition. `Time`: the time in `value`. `Event`: any event named in `value`, or the time in
    /// `resumesAt`. `Resource`: room under a rate limit named in `value`, or the time in `resumesAt`.
    pub r#type: WakeType,
    /// An RFC 3339 time, or comma-separated names of events or of rate limits (`resource/<resource>/<amount left>`).
    #[schemars(length(max = 8192))]
    pub value: String,
}

/// Kind of a wake condition.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, AsRefStr)]
pub enum WakeType {
    /// A time.
    Time,
    /// A named event, or the time in `resumesAt`.
    Event,
    /// Room under `guardrails.rateLimits`, or the time in `resumesAt`, whichever is first.
    Resource,
}

/// Usage of a loop. The token fields are disjoint, except that `reasoningTokens` is part of `outputTokens`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopUsage {
    /// Number of model calls sent; each attempt counts.
    #[schemars(range(min = 0))]
    pub calls: i64,
    /// Number of calls whose usage the server never reported. Their tokens and cost are not in any other field.
    #[schemars(range(min = 0))]
    pub unknown_calls: i64,
    /// Number of calls, among `unknownCalls`, that are charged to the budgets with their bound, the most that they can
    /// have used.
    #[schemars(range(min = 0))]
    pub estimated_calls: i64,
    /// Input tokens that were neither read from nor written to a cache.
    #[schemars(range(min = 0))]
    pub input_tokens: i64,
    /// Output tokens, including reasoning.
    #[schemars(range(min = 0))]
    pub output_tokens: i64,
    /// Input tokens read from the server's cache.
    #[schemars(range(min = 0))]
    pub cache_read_tokens: i64,
    /// Input tokens written to the server's cache.
    #[schemars(range(min = 0))]
    pub cache_write_tokens: i64,
    /// Reasoning tokens, part of `outputTokens`.
    #[schemars(range(min = 0))]
    pub reasoning_tokens: i64,
    /// Cost in millionths of a US dollar, at the prices known when each call was made. 0 without prices.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost: i64,
    /// What the loop counts.
    #[serde(flatten)]
    pub counts: LoopCounts,
    /// Usage per model, at most 10. A model that is listed stays listed; usage of further models is in the totals only.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_MODELS, _, _>"
    )]
    #[schemars(
        length(max = MAX_MODELS),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["model"])
    )]
    pub by_model: Vec<ModelUsage>,
}

/// Usage of one model.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("required" = ["model"]))]
pub struct ModelUsage {
    /// Name of the model in the spec.
    #[schemars(length(min = 1, max = 256))]
    pub model: String,
    /// Number of model calls sent; each attempt counts.
    #[schemars(range(min = 0))]
    pub calls: i64,
    /// Number of calls whose usage is unknown.
    #[schemars(range(min = 0))]
    pub unknown_calls: i64,
    /// Number of calls, among `unknownCalls`, that are charged to the budgets with their bound.
    #[schemars(range(min = 0))]
    pub estimated_calls: i64,
    /// Uncached input tokens.
    #[schemars(range(min = 0))]
    pub input_tokens: i64,
    /// Output tokens, including reasoning.
    #[schemars(range(min = 0))]
    pub output_tokens: i64,
    /// Input tokens read from a cache.
    #[schemars(range(min = 0))]
    pub cache_read_tokens: i64,
    /// Input tokens written to a cache.
    #[schemars(range(min = 0))]
    pub cache_write_tokens: i64,
    /// Reasoning tokens, part of `outputTokens`.
    #[schemars(range(min = 0))]
    pub reasoning_tokens: i64,
    /// Cost in millionths of a US dollar.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost: i64,
}

/// Name of the sum of all models that [`LoopUsage::by_model`] does not list.
pub const OTHER_MODELS: &str = "other";

impl LoopUsage {
    /// The totals, as usage of a model without a name.
    #[must_use]
    pub fn of_all_models(&self) -> ModelUsage {
        ModelUsage {
            model: String::new(),
            calls: self.calls,
            unknown_calls: self.unknown_calls,
            estimated_calls: self.estimated_calls,
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            cache_read_tokens: self.cache_read_tokens,
            cache_write_tokens: self.cache_write_tokens,
            reasoning_tokens: self.reasoning_tokens,
            cost: self.cost,
        }
    }

    /// What is in the totals and in no entry of `by_model`, as usage of [`OTHER_MODELS`].
    #[must_use]
    pub fn of_other_models(&self) -> ModelUsage {
        let sum = |field: fn(&ModelUsage) -> i64| self.by_model.iter().map(field).sum::<i64>();
        ModelUsage {
            model: OTHER_MODELS.into(),
            calls: self.calls - sum(|used| used.calls),
            unknown_calls: self.unknown_calls - sum(|used| used.unknown_calls),
            estimated_calls: self.estimated_calls - sum(|used| used.estimated_calls),
            input_tokens: self.input_tokens - sum(|used| used.input_tokens),
            output_tokens: self.output_tokens - sum(|used| used.output_tokens),
            cache_read_tokens: self.cache_read_tokens - sum(|used| used.cache_read_tokens),
            cache_write_tokens: self.cache_write_tokens - sum(|used| used.cache_write_tokens),
            reasoning_tokens: self.reasoning_tokens - sum(|used| used.reasoning_tokens),
            cost: self.cost - sum(|used| used.cost),
        }
    }
}

/// Sums by kind; the model's name stays.
impl std::ops::AddAssign<&Self> for ModelUsage {
    fn add_assign(&mut self, more: &Self) {
        self.calls += more.calls;
        self.unknown_calls += more.unknown_calls;
        self.estimated_calls += more.estimated_calls;
        self.input_tokens += more.input_tokens;
        self.output_tokens += more.output_tokens;
        self.cache_read_tokens += more.cache_read_tokens;
        self.cache_write_tokens += more.cache_write_tokens;
        self.reasoning_tokens += more.reasoning_tokens;
        self.cost += more.cost;
    }
}

/// Remaining amount of an AgentBudget for this Agent.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetShare {
    /// Name of the AgentBudget, or `namespace/name` if it is in another namespace.
    #[schemars(length(max = 317))]
    pub name: String,
    /// Remaining tokens, considering `perAgent`. Absent if tokens are not limited.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_tokens: Option<i64>,
    /// Remaining cost in millionths of a US dollar. Absent if the cost is not limited.
    #[schemars(range(min = 0))]
    #[serde(rename = "remainingCostMicroUSD", skip_serializing_if = "Option::is_none")]
    pub remaining_cost_micro_usd: Option<i64>,
    /// Whether the budget has no room for the next call.
    pub exhausted: bool,
}

/// Texts for the columns of `kubectl get`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentSummary {
    /// Total tokens, abbreviated, such as `1.8M`.
    #[schemars(length(max = 64))]
    pub tokens: String,
    /// Total cost, such as `$7.42`. Absent if no price is known.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// Used share of the tightest limit, such as `62%`. Absent if there is no limit.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<String>,
    /// Time at which the loop continues, such as `14:05 UTC`.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumes: Option<String>,
    /// Reasons why the loop is not running, separated by commas. Absent while it is running or about to.
    #[schemars(length(max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The pod of a loop.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// Name of the pod; always the Agent's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Node on which the pod runs.
    #[schemars(length(max = 253))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Time at which its containers started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// Number of restarts of its containers.
    #[schemars(range(min = 0))]
    pub restarts: i32,
}

/// The last failure.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct LastError {
    /// Time of the failure.
    pub at: Time,
    /// Kind of the failure.
    #[schemars(length(max = 64))]
    pub kind: String,
    /// What happened and how to fix it, at most 1 KiB. Never contains text of a prompt or an answer.
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// Last handled value of each request annotation.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct HandledRequests {
    /// Last handled value of `agentloop.dev/wake`.
    #[schemars(length(max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<String>,
    /// Last handled value of `agentloop.dev/resume`.
    #[schemars(length(max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<String>,
    /// Last handled value of `agentloop.dev/stop`.
    #[schemars(length(max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<String>,
}
