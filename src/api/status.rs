//! What the controller reports of an Agent.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoStaticStr};

use super::budget::LedgerRecord;
use super::tally::{GuardrailTrips, ToolUsage};

/// Observed state of an Agent. Written by the controller only.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("default" = {"conditions": [{
    "type": "Ready",
    "status": "Unknown",
    "reason": "Pending",
    "message": "The controller has not looked at this Agent yet.",
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}]}))]
pub struct AgentStatus {
    /// The generation of the spec that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions; `Ready` answers whether this Agent needs anyone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Where the loop stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#loop: Option<LoopStatus>,
    /// What the loop has used since the Agent was created. Counted by the gateway; never reset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// The AgentBudgets that it draws on, as they stood when this status was written.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub budgets: Vec<BudgetShare>,
    /// Texts for the columns of `kubectl get`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// The pod that runs the loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodStatus>,
    /// The last failure, without any text of a prompt or an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<LastError>,
    /// The values of request annotations that were handled, so that each is handled once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_handled_requests: Option<HandledRequests>,
    /// What a new leader needs to keep the Agent's own limits. Not for people; compare-and-set only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ledger: Option<AgentLedger>,
}

/// The accounts of an Agent's own limits.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentLedger {
    /// Of `guardrails.tokensPerHour`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_hour: Option<LedgerRecord>,
    /// Of `guardrails.total`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<LedgerRecord>,
}

/// The public states of a loop.
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
    /// The pod or the loop is coming up.
    Starting,
    /// A turn is being taken, or the next one is about to.
    Running,
    /// The agent chose to sleep until a wake condition holds.
    Sleeping,
    /// One or more reasons hold the loop; it goes on when all are gone.
    Paused,
    /// The loop is finishing.
    Stopping,
    /// No loop runs.
    #[default]
    Stopped,
}

/// Why a loop is Paused or Stopped. Each reason is cleared by its own rule and by no other.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    AsRefStr,
    IntoStaticStr,
    EnumIter,
    strum::Display,
)]
pub enum PauseReason {
    /// `spec.suspend`; cleared by setting it to false.
    SuspendedBySpec,
    /// The provider asked to wait (Retry-After); cleared at that moment.
    ProviderRateLimit,
    /// The model's server does not answer; the open turn waits, and the call is tried again with a growing delay of at
    /// most 5 minutes. Cleared at that moment or by a resume request.
    ModelUnreachable,
    /// The server refuses the API key (401, 403); the open turn waits, and the call is tried again once a minute. Cleared
    /// at that moment or by a resume request.
    AuthenticationFailed,
    /// The account at the server has no credit or quota (402, or 429 that says so); the open turn waits, and the call is
    /// tried again once a minute. Cleared at that moment or by a resume request.
    QuotaExceeded,
    /// The model refused two turns or more in a row; cleared by the cool-down or a resume request.
    ModelRefused,
    /// `guardrails.maxConsecutiveTurns`; cleared when the forced sleep ends.
    MaxConsecutiveTurns,
    /// `guardrails.actionsPerMinute`; cleared when the oldest of these actions is 60 s old.
    ActionsPerMinute,
    /// `guardrails.rateLimits`; cleared when there is room for the call or the tool run that waits.
    RateWindow,
    /// `guardrails.activeHours`; cleared when their next window begins.
    OutsideActiveHours,
    /// `loop.maxConsecutiveErrors`; cleared by the cool-down or a resume request.
    ConsecutiveErrors,
    /// The same turn ended the worker three times; cleared by the cool-down or a resume request.
    CrashLoop,
    /// No contact with the controller for 60 s; cleared when the link is back.
    LinkLost,
    /// An AgentBudget has no room for the next call; cleared when it has: its window, a top-up, a raised limit.
    BudgetExhausted,
    /// `guardrails.tokensPerHour` has no room for the next call; cleared when it has.
    TokensPerHour,
    /// `guardrails.total.tokens` has no room for the next call; cleared when the limit is raised.
    TotalTokens,
    /// `guardrails.total.costUSD` has no room for the next call; cleared when the limit is raised.
    TotalCost,
    /// The next call can cost more than a whole limit; cleared when the limit is raised.
    CallExceedsLimit,
    /// A spent budget has asked a person for more; cleared by the answer, or when the window has room.
    BudgetAsk,
    /// What limits the Agent is not known or cannot be used; cleared when it can.
    BudgetUnavailable,
    /// The server billed more than the stated bound of a call; cleared by the request `agentloop.dev/resume`.
    BoundViolated,
    /// The loop repeats itself: cleared at the end of a forced sleep, or by `agentloop.dev/resume`. Seen from outside:
    /// cleared by `agentloop.dev/resume` alone.
    LoopDetected,
}

/// How a loop ended for good.
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
pub enum Outcome {
    /// The agent ended its loop itself (`yield` with mode `shutdown`).
    Completed,
    /// It was awake for `guardrails.idleTimeoutSeconds` without an effective action.
    Idle,
    /// It repeated itself through all forced sleeps of `guardrails.loopDetection`.
    Failed,
}

/// Where a loop stands.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopStatus {
    /// One of the six states.
    pub state: LoopState,
    /// Why the loop is Paused or Stopped; several may hold at once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "set"))]
    pub reasons: Vec<PauseReason>,
    /// Since when the state holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// When the loop goes on by itself; absent when that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumes_at: Option<Time>,
    /// What a sleeping loop waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<Wake>,
    /// How the loop ended, when it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// Fencing number: one live loop per Agent, and a newer pod has a higher one.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// Turns begun since the Agent was created.
    #[schemars(range(min = 0))]
    pub turn: i64,
    /// Failed turns in a row.
    #[schemars(range(min = 0))]
    pub consecutive_errors: i32,
    /// Turns since the last sleep.
    #[schemars(range(min = 0))]
    pub consecutive_turns: i32,
}

/// What a sleeping loop waits for.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Wake {
    /// `Time`: the moment in `value`. `Event`: any of what `value` names, or the moment in `resumesAt`. `Resource`: the
    /// same, but no event is among it.
    pub r#type: WakeType,
    /// An RFC 3339 moment, or names separated by commas: of events, or `resource/<resource>/<amount left>`.
    #[schemars(length(max = 8192))]
    pub value: String,
}

/// Kind of a wake condition.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, AsRefStr)]
pub enum WakeType {
    /// A moment.
    Time,
    /// A named event, or the moment in `resumesAt`.
    Event,
    /// Room under `guardrails.rateLimits`, or the moment in `resumesAt`; what comes first.
    Resource,
}

/// What a loop has used. Token kinds are disjoint; `reasoningTokens` is a part of `outputTokens`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    /// Model calls sent, each attempt for itself.
    #[schemars(range(min = 0))]
    pub calls: i64,
    /// Calls of which the server never said what they used; their tokens and their cost are in no other field.
    #[schemars(range(min = 0))]
    pub unknown_calls: i64,
    /// Of these, calls that count in the budgets with all that was reserved for them: more than they can have used.
    #[schemars(range(min = 0))]
    pub estimated_calls: i64,
    /// Input tokens that were neither read from nor written to a cache.
    #[schemars(range(min = 0))]
    pub input_tokens: i64,
    /// Output tokens, reasoning included.
    #[schemars(range(min = 0))]
    pub output_tokens: i64,
    /// Input tokens read from the server's cache.
    #[schemars(range(min = 0))]
    pub cache_read_tokens: i64,
    /// Input tokens written to the server's cache.
    #[schemars(range(min = 0))]
    pub cache_write_tokens: i64,
    /// Output tokens spent on reasoning; a part of `outputTokens`.
    #[schemars(range(min = 0))]
    pub reasoning_tokens: i64,
    /// Cost in millionths of a US dollar, of each call by the prices known when it was made; 0 without prices.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost: i64,
    /// Turns completed.
    #[schemars(range(min = 0))]
    pub turns: i64,
    /// Runs of tools that were sent, as the worker says; a repeat after a restart is no new one.
    #[schemars(range(min = 0))]
    pub tool_calls: i64,
    /// Those of them with side effects: all but those of tools with effect `Read`.
    #[schemars(range(min = 0))]
    pub actions: i64,
    /// The same per model; at most 10.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["model"]))]
    pub by_model: Vec<ModelUsage>,
    /// How runs of tools ended, per tool, as the worker says; at most 20, the last for the rest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["tool"]))]
    pub by_tool: Vec<ToolUsage>,
    /// How often limits were reached and loops were detected, as the worker says.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["guardrail", "action"])
    )]
    pub guardrail_trips: Vec<GuardrailTrips>,
}

/// What one model has used.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("required" = ["model"]))]
pub struct ModelUsage {
    /// Name of the model, from the spec.
    #[schemars(length(min = 1, max = 256))]
    pub model: String,
    /// Model calls sent.
    #[schemars(range(min = 0))]
    pub calls: i64,
    /// Calls of unknown use.
    #[schemars(range(min = 0))]
    pub unknown_calls: i64,
    /// Of these, calls that count in the budgets as reserved.
    #[schemars(range(min = 0))]
    pub estimated_calls: i64,
    /// Uncached input tokens.
    #[schemars(range(min = 0))]
    pub input_tokens: i64,
    /// Output tokens.
    #[schemars(range(min = 0))]
    pub output_tokens: i64,
    /// Cached input tokens.
    #[schemars(range(min = 0))]
    pub cache_read_tokens: i64,
    /// Input tokens written to a cache.
    #[schemars(range(min = 0))]
    pub cache_write_tokens: i64,
    /// Reasoning tokens, a part of the output.
    #[schemars(range(min = 0))]
    pub reasoning_tokens: i64,
    /// Cost in millionths of a US dollar.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost: i64,
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

/// What an AgentBudget has left for this Agent.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetShare {
    /// Name of the AgentBudget; `namespace/name` where it is in another namespace.
    #[schemars(length(max = 317))]
    pub name: String,
    /// Tokens left, `perAgent` included; absent where they are not limited.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_tokens: Option<i64>,
    /// Money left; absent where it is not limited.
    #[schemars(range(min = 0))]
    #[serde(rename = "remainingCostMicroUSD", skip_serializing_if = "Option::is_none")]
    pub remaining_cost_micro_usd: Option<i64>,
    /// It has no room for the next call.
    pub exhausted: bool,
}

/// Texts for columns.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Summary {
    /// All tokens, short: `1.8M`.
    #[schemars(length(max = 64))]
    pub tokens: String,
    /// What its calls cost: `$7.42`; absent where no price is known.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// How much of its tightest limit is used: `62%`; absent where nothing limits it.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<String>,
    /// When the loop goes on, as a clock time: `14:05 UTC`.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumes: Option<String>,
    /// Why the loop does not run, separated by commas; absent when it does or is about to.
    #[schemars(length(max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The pod of a loop.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// Name of the pod: always the Agent's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The node it runs on.
    #[schemars(length(max = 253))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// When its containers started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// Restarts of its containers.
    #[schemars(range(min = 0))]
    pub restarts: i32,
}

/// The last failure.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct LastError {
    /// When it happened.
    pub at: Time,
    /// What kind of failure.
    #[schemars(length(max = 64))]
    pub kind: String,
    /// What happened and what to do, at most 1 KiB; never text of a prompt or an answer.
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// The last handled value of each request annotation.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct HandledRequests {
    /// Of `agentloop.dev/wake`.
    #[schemars(length(max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<String>,
    /// Of `agentloop.dev/resume`.
    #[schemars(length(max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<String>,
}
