//! The `AgentBudget` resource: limits in a window that a set of Agents cannot overspend together.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::amount::{Amount, LimitAmounts};
use super::bounds;

/// At least one kind of a [`BudgetLimits`] is set.
const SOME: &str =
    "has(self.tokens) || has(self.inputTokens) || has(self.outputTokens) || has(self.calls) || has(self.costUSD)";
/// Every kind of `ask.topUp` is limited.
const ASKED: &str = "!has(self.ask) || (!has(self.ask.topUp.tokens) || has(self.limits.tokens)) \
    && (!has(self.ask.topUp.inputTokens) || has(self.limits.inputTokens)) \
    && (!has(self.ask.topUp.outputTokens) || has(self.limits.outputTokens)) \
    && (!has(self.ask.topUp.calls) || has(self.limits.calls)) \
    && (!has(self.ask.topUp.costUSD) || has(self.limits.costUSD))";
/// Every kind of a new entry of `topUps` is limited. Existing entries may have a kind that is no longer limited.
const ADDED: &str = "!has(self.topUps) || self.topUps.all(new, \
    has(oldSelf.topUps) && oldSelf.topUps.exists(old, old.id == new.id) \
    || (!has(new.tokens) || has(self.limits.tokens)) \
    && (!has(new.inputTokens) || has(self.limits.inputTokens)) \
    && (!has(new.outputTokens) || has(self.limits.outputTokens)) \
    && (!has(new.calls) || has(self.limits.calls)) \
    && (!has(new.costUSD) || has(self.limits.costUSD)))";
/// Money is a decimal number.
const COST: &str = "!has(self.costUSD) || self.costUSD.matches('^[0-9]{1,9}([.][0-9]{1,6})?$')";

/// The Agents that draw on the budget, the limits they share in one window, and what happens when they are exhausted.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "agentloop.dev",
    version = "v1alpha1",
    kind = "AgentBudget",
    plural = "agentbudgets",
    shortname = "abudget",
    category = "agentloop",
    doc = "Limits on the usage of a set of Agents, which they cannot exceed together or individually.",
    namespaced,
    status = "AgentBudgetStatus",
    derive = "PartialEq",
    printcolumn(
        name = "READY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the budget is ready; if False or Unknown, user action is required and its Agents make no calls"
    ),
    printcolumn(
        name = "WINDOW",
        type_ = "string",
        json_path = ".status.summary.window",
        description = "Window over which usage counts"
    ),
    printcolumn(
        name = "LIMIT",
        type_ = "string",
        json_path = ".status.summary.limit",
        description = "Limit closest to exhaustion, including top-ups"
    ),
    printcolumn(
        name = "USED",
        type_ = "string",
        json_path = ".status.summary.used",
        description = "Used amount in this window"
    ),
    printcolumn(
        name = "USED%",
        type_ = "string",
        json_path = ".status.summary.usedPercent",
        description = "Used amount in percent of the limit"
    ),
    printcolumn(
        name = "RESERVED",
        type_ = "string",
        json_path = ".status.summary.reserved",
        description = "Amount leased to gateways"
    ),
    printcolumn(
        name = "RESETS",
        type_ = "string",
        json_path = ".status.summary.resets",
        description = "Time at which there is room again"
    ),
    printcolumn(
        name = "AGENTS",
        type_ = "integer",
        json_path = ".status.agents",
        description = "Number of Agents that draw on the budget"
    ),
    printcolumn(
        name = "AGE",
        type_ = "date",
        json_path = ".metadata.creationTimestamp",
        description = "Time since creation"
    ),
    validation = Rule::new("self.metadata.name.size() <= 63").message(
        "metadata.name of an AgentBudget must be at most 63 characters: it names the budget in messages and metrics"
    )
)]
#[x_kube(
    validation = Rule::new("!has(self.namespaceSelector) || has(self.selector)").message(
        "spec.namespaceSelector requires spec.selector: set spec.selector to {} for every Agent of these namespaces"
    ),
    validation = Rule::new("!has(self.ask) || self.onExhausted == 'Ask'").message(
        "spec.ask is supported with onExhausted Ask only: remove it, or set spec.onExhausted to Ask"
    ),
    validation = Rule::new(ASKED).message(
        "spec.ask.topUp contains a kind that spec.limits does not limit: remove it, or add a limit for it"
    ),
    validation = Rule::new(ADDED).message(
        "spec.topUps has a new entry with a kind that spec.limits does not limit: remove it, or add a limit for it"
    ),
    validation = Rule::new(
        "!has(oldSelf.topUps) || has(self.topUps) && oldSelf.topUps.all(old, self.topUps.exists(new, new == old))"
    ).message(
        "spec.topUps is append-only: keep all entries unchanged and add a new one with a new id, or raise spec.limits if there are 64"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct AgentBudgetSpec {
    /// Label selector of the Agents that draw on the budget. `{}` selects every Agent. Absent: only Agents that name
    /// the budget in `spec.budgetRefs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::selector)]
    pub selector: Option<LabelSelector>,
    /// Label selector of the namespaces in which `selector` applies. Allowed only in the controller's own namespace;
    /// elsewhere the budget is not accepted and limits no Agent. Absent: only the budget's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::namespace_selector)]
    pub namespace_selector: Option<LabelSelector>,
    /// Limits that all Agents of the budget share in one window. Set at least one kind. 0 blocks every call.
    #[x_kube(
        validation = Rule::new(SOME).message(
            "spec.limits is empty: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.limits.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        )
    )]
    pub limits: BudgetLimits,
    /// Limits of each single Agent within the budget in one window. Absent: only the shared limits apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new(SOME).message(
            "spec.perAgent is empty: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.perAgent.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        )
    )]
    pub per_agent: Option<BudgetLimits>,
    /// Time over which usage counts. Set exactly one kind.
    #[x_kube(validation = Rule::new(
        "(has(self.rolling) ? 1 : 0) + (has(self.calendar) ? 1 : 0) + (has(self.lifetime) ? 1 : 0) == 1"
    ).message(
        "spec.window must have exactly one of rolling, calendar and lifetime, such as {calendar: {period: Daily, timeZone: UTC}}"
    ))]
    pub window: BudgetWindow,
    /// Usage of any limit, in percent, from which on `NearLimit` is True, 1 to 100. Defaults to 80.
    #[serde(default = "default_warn_at_percent")]
    #[schemars(range(min = 1, max = 100))]
    pub warn_at_percent: u32,
    /// What happens when there is no room for the next call. `Pause`, the default: the loop waits until the window has
    /// room. `Ask`: it also asks for an approval, which adds `ask.topUp`. `Stop`: the call in flight is cancelled and
    /// the loop stays stopped until a user adds room.
    #[serde(default)]
    pub on_exhausted: OnExhausted,
    /// Amounts added to the limits. Each entry counts once, in the window in which it is first seen. Append-only, at most
    /// 64 entries over the life of the budget; afterwards raise `limits`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub top_ups: Vec<TopUp>,
    /// Amount that an approval adds with `onExhausted: Ask`. Defaults to a quarter of each limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask: Option<AskSpec>,
}

fn default_warn_at_percent() -> u32 {
    80
}

/// Amounts by kind, in the notation of the spec.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BudgetLimits {
    /// Uncached input, cache writes and output tokens. Cache reads count only against `inputTokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub tokens: Option<i64>,
    /// All input tokens, including cache reads and writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub input_tokens: Option<i64>,
    /// All output tokens, including reasoning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub output_tokens: Option<i64>,
    /// Model calls; each attempt counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub calls: Option<i64>,
    /// Cost in US dollars, a decimal string with at most six decimals, such as "25.00".
    #[serde(default, rename = "costUSD", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20))]
    pub cost_usd: Option<String>,
}

/// Time over which usage counts.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BudgetWindow {
    /// The last `seconds` seconds at any moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling: Option<RollingWindow>,
    /// Days, weeks (from Monday) or months in a time zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calendar: Option<CalendarWindow>,
    /// The whole life of the budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<LifetimeWindow>,
}

/// A rolling window.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RollingWindow {
    /// Length of the window in seconds, 1 to 31,622,400 (366 days).
    #[schemars(range(min = 1, max = 31_622_400))]
    pub seconds: i64,
}

/// A calendar window.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CalendarWindow {
    /// Length of the window: `Daily`, `Weekly` (from Monday) or `Monthly`.
    pub period: CalendarPeriod,
    /// IANA time zone in which windows start at midnight. Defaults to UTC.
    #[serde(default = "utc")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$')").message(
        "spec.window.calendar.timeZone must be a name of the IANA time zone database, such as Europe/Berlin or UTC"
    ))]
    pub time_zone: String,
}

fn utc() -> String {
    "UTC".into()
}

/// Length of a calendar window.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum CalendarPeriod {
    /// From midnight to midnight.
    Daily,
    /// From Monday to Monday.
    Weekly,
    /// From the first day of a month to the first day of the next.
    Monthly,
}

/// A window that never ends.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LifetimeWindow {}

/// What happens when a budget is exhausted.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum OnExhausted {
    /// The loop waits until the window has room.
    #[default]
    Pause,
    /// The loop waits, and a gate asks for an approval.
    Ask,
    /// The call in flight is cancelled; the loop stays stopped until a user adds room.
    Stop,
}

/// An amount added to the limits.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
        validation = Rule::new(SOME).message(
            "spec.topUps[] has no amount: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.topUps[].costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        ),
    validation = Rule::new("self.id.matches('^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')").message(
        "spec.topUps[].id must consist of letters, digits, '-', '_' and '.', and start and end with a letter or digit, such as 2026-11-fire"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct TopUp {
    /// Unique id of the top-up. Each id counts once.
    #[schemars(length(min = 1, max = 63))]
    pub id: String,
    /// The amount.
    #[serde(flatten)]
    pub amount: BudgetLimits,
    /// Reason of the top-up, for readers. Not interpreted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub reason: Option<String>,
}

/// Settings of `onExhausted: Ask`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AskSpec {
    /// Amount that one approval adds to the window in which it is given.
    #[x_kube(
        validation = Rule::new(SOME).message(
            "spec.ask.topUp is empty: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.ask.topUp.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        )
    )]
    pub top_up: BudgetLimits,
}

/// Observed state of an AgentBudget. Written by the controller only.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("default" = {"conditions": [{
    "type": "Ready",
    "status": "Unknown",
    "reason": "Pending",
    "message": "The controller has not reconciled this AgentBudget yet.",
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}]}))]
pub struct AgentBudgetStatus {
    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Accepted`, `NearLimit` and `Exhausted`; also `Stalled` while user action is required.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The current window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<WindowStatus>,
    /// Limits in this window, including top-ups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitAmounts>,
    /// Amount settled in this window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Amount>,
    /// Amount leased to gateways and not yet settled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Amount>,
    /// Limits minus used and reserved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<LimitAmounts>,
    /// Number of Agents that draw on the budget.
    #[schemars(range(min = 0))]
    pub agents: i32,
    /// Agents with the highest usage in this window, at most 10.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub top_agents: Vec<TopAgent>,
    /// Texts for the columns of `kubectl get`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<BudgetSummary>,
    /// Open request for an approval, at most one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1))]
    pub gates: Vec<BudgetGate>,
    /// Last handled values of the annotations that answer a gate, so that each is handled once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_handled_requests: Option<HandledAnswers>,
    /// State from which a new leader continues without overspending. Internal; do not edit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ledger: Option<LedgerRecord>,
}

/// Start and end of a window.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct WindowStatus {
    /// Start of the window. Absent for a rolling window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// Time at which there is room for the next call. While the budget has room: the end of the calendar window. While
    /// it is exhausted: the time at which the last refused call fits. Absent: the budget does not reset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resets_at: Option<Time>,
}

/// Usage of one Agent.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct TopAgent {
    /// Namespace of the Agent.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name of the Agent.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Tokens used in this window.
    #[schemars(range(min = 0))]
    pub tokens: i64,
    /// Cost in this window, in millionths of a US dollar.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost: i64,
}

/// Texts for the columns of `kubectl get`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetSummary {
    /// The window, such as `1h`, `daily Europe/Berlin` or `lifetime`.
    #[schemars(length(max = 128))]
    pub window: String,
    /// The limit closest to exhaustion, such as `1M tokens`.
    #[schemars(length(max = 64))]
    pub limit: String,
    /// Used amount of that kind.
    #[schemars(length(max = 64))]
    pub used: String,
    /// Used amount in percent of the limit.
    #[schemars(length(max = 16))]
    pub used_percent: String,
    /// Reserved amount of that kind.
    #[schemars(length(max = 64))]
    pub reserved: String,
    /// Time at which there is room again, such as `14:05 UTC`.
    #[schemars(length(max = 64))]
    pub resets: String,
}

/// Request for an approval.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BudgetGate {
    /// Id of the gate, to be named in the answer.
    #[schemars(length(max = 63))]
    pub id: String,
    /// Always `BudgetAsk`.
    #[schemars(length(max = 32))]
    pub kind: String,
    /// Hash of the request: the amount and what it would be added to.
    #[schemars(length(max = 64))]
    pub arguments_hash: String,
    /// Time at which the gate was opened.
    pub opened_at: Time,
}

/// Last handled value of each annotation that answers a gate.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct HandledAnswers {
    /// Last handled value of `agentloop.dev/approve`.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approve: Option<String>,
    /// User who approved, as given in `agentloop.dev/approved-by`; the admission policy requires it to be the
    /// requesting user.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approved_by: Option<String>,
    /// Last handled value of `agentloop.dev/deny`.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deny: Option<String>,
}

/// The account of one set of limits, from which a new leader continues.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LedgerRecord {
    /// Number of this record. Each write increments it by one, over exactly its predecessor.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// Time of the ledger at the write. The time of a later leader never falls behind it.
    pub watermark: jiff::Timestamp,
    /// Window of the buckets. If the spec has another one, the next leader recounts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<BudgetWindow>,
    /// Number of the most recent lease.
    #[schemars(range(min = 0))]
    pub next_lease: i64,
    /// Settled amounts by time, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub buckets: Vec<UsageBucket>,
    /// Outstanding leases.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096))]
    pub holders: Vec<LeaseRecord>,
    /// Top-ups that have been counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub top_ups: Vec<CountedTopUp>,
    /// Usage per Agent in this window.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096))]
    pub shares: Vec<ShareRecord>,
}

/// Amount settled in one interval.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct UsageBucket {
    /// Start of the interval; for a calendar window, the start of the window.
    pub start: jiff::Timestamp,
    /// The amount.
    pub amount: Amount,
}

/// One lease. The granted amount is `amount` + `spent` + `returned`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseRecord {
    /// Number of the lease, never reused.
    #[schemars(range(min = 0))]
    pub lease: i64,
    /// Id of the gateway's record, which outlives its pod if the storage does.
    #[schemars(length(max = 64))]
    pub record: String,
    /// UID of the pod that last reported this record.
    #[serde(rename = "podUID")]
    #[schemars(length(max = 64))]
    pub pod_uid: String,
    /// Epoch of that pod.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// Namespace of the Agent.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name of the Agent.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Start of the lease's window; 1970-01-01 for windows without a start.
    pub window: jiff::Timestamp,
    /// Outstanding amount that the holder may still spend.
    pub amount: Amount,
    /// Spent amount of the lease, contained in the buckets.
    #[serde(skip_serializing_if = "Amount::is_zero")]
    pub spent: Amount,
    /// Returned amount.
    #[serde(skip_serializing_if = "Amount::is_zero")]
    pub returned: Amount,
}

/// A top-up that has been counted.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct CountedTopUp {
    /// Id of the top-up, or of the gate that was approved.
    #[schemars(length(max = 63))]
    pub id: String,
    /// Time at which it was counted.
    pub at: jiff::Timestamp,
    /// The amount.
    pub amount: Amount,
}

/// Usage of a budget by one Agent.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct ShareRecord {
    /// Namespace of the Agent.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name of the Agent.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Settled amounts by time, in coarser intervals than those of the budget.
    #[schemars(length(max = 8))]
    pub buckets: Vec<UsageBucket>,
}
