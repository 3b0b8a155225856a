//! The `AgentBudget` resource: limits in a window that no set of Agents can overspend together.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::amount::{Amount, LimitAmounts};
use super::bounds;

/// At least one kind of a [`Limits`] is set.
const SOME: &str =
    "has(self.tokens) || has(self.inputTokens) || has(self.outputTokens) || has(self.calls) || has(self.costUSD)";
/// Every kind of `ask.topUp` is limited.
const ASKED: &str = "!has(self.ask) || (!has(self.ask.topUp.tokens) || has(self.limits.tokens)) \
    && (!has(self.ask.topUp.inputTokens) || has(self.limits.inputTokens)) \
    && (!has(self.ask.topUp.outputTokens) || has(self.limits.outputTokens)) \
    && (!has(self.ask.topUp.calls) || has(self.limits.calls)) \
    && (!has(self.ask.topUp.costUSD) || has(self.limits.costUSD))";
/// Every kind of a new entry of `topUps` is limited. Old ones may be of a kind that is limited no more.
const ADDED: &str = "!has(self.topUps) || self.topUps.all(new, \
    has(oldSelf.topUps) && oldSelf.topUps.exists(old, old.id == new.id) \
    || (!has(new.tokens) || has(self.limits.tokens)) \
    && (!has(new.inputTokens) || has(self.limits.inputTokens)) \
    && (!has(new.outputTokens) || has(self.limits.outputTokens)) \
    && (!has(new.calls) || has(self.limits.calls)) \
    && (!has(new.costUSD) || has(self.limits.costUSD)))";
/// Money is a decimal number.
const COST: &str = "!has(self.costUSD) || self.costUSD.matches('^[0-9]{1,9}([.][0-9]{1,6})?$')";

/// Which Agents draw on it, how much they may draw together in one window, and what happens when it is spent.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "agentloop.dev",
    version = "v1alpha1",
    kind = "AgentBudget",
    plural = "agentbudgets",
    shortname = "abudget",
    category = "agentloop",
    doc = "Limits that the Agents which draw on it cannot overspend, together or alone.",
    namespaced,
    status = "AgentBudgetStatus",
    derive = "PartialEq",
    printcolumn(
        name = "READY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "False or Unknown: this budget needs a person, and its Agents make no calls"
    ),
    printcolumn(
        name = "WINDOW",
        type_ = "string",
        json_path = ".status.summary.window",
        description = "When it begins anew"
    ),
    printcolumn(
        name = "LIMIT",
        type_ = "string",
        json_path = ".status.summary.limit",
        description = "The limit nearest to being spent, top-ups included"
    ),
    printcolumn(
        name = "USED",
        type_ = "string",
        json_path = ".status.summary.used",
        description = "Used of it in this window"
    ),
    printcolumn(
        name = "USED%",
        type_ = "string",
        json_path = ".status.summary.usedPercent",
        description = "The same in percent"
    ),
    printcolumn(
        name = "RESERVED",
        type_ = "string",
        json_path = ".status.summary.reserved",
        description = "Held by gateways for calls"
    ),
    printcolumn(
        name = "RESETS",
        type_ = "string",
        json_path = ".status.summary.resets",
        description = "When there is room again by itself"
    ),
    printcolumn(
        name = "AGENTS",
        type_ = "integer",
        json_path = ".status.agents",
        description = "Agents that draw on it"
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
        "spec.namespaceSelector needs spec.selector: set it to {} for every Agent of these namespaces"
    ),
    validation = Rule::new("!has(self.ask) || self.onExhausted == 'Ask'").message(
        "spec.ask is for onExhausted Ask only: remove it, or set spec.onExhausted to Ask"
    ),
    validation = Rule::new(ASKED).message(
        "spec.ask.topUp names a kind that spec.limits does not limit, so that it would add nothing: leave it out, or limit it"
    ),
    validation = Rule::new(ADDED).message(
        "spec.topUps has a new entry of a kind that spec.limits does not limit, so that it would add nothing: leave it out, or limit it"
    ),
    validation = Rule::new(
        "!has(oldSelf.topUps) || has(self.topUps) && oldSelf.topUps.all(old, self.topUps.exists(new, new == old))"
    ).message(
        "spec.topUps is append-only: leave every entry as it was and add another one with an id of its own"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct AgentBudgetSpec {
    /// The Agents that draw on it. `{}` is every Agent; absent: only Agents that name it in `spec.budgetRefs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::selector)]
    pub selector: Option<LabelSelector>,
    /// Namespaces whose Agents `selector` looks at, by their labels. Only in the controller's own namespace; anywhere
    /// else the budget is refused and blocks no one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::namespace_selector)]
    pub namespace_selector: Option<LabelSelector>,
    /// What all Agents together may use in one window; at least one kind. 0 blocks everything.
    #[x_kube(
        validation = Rule::new(SOME).message(
            "spec.limits names no kind: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.limits.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        )
    )]
    pub limits: Limits,
    /// What any single Agent may use of it in one window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new(SOME).message(
            "spec.perAgent names no kind: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.perAgent.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        )
    )]
    pub per_agent: Option<Limits>,
    /// The window; exactly one kind.
    #[x_kube(validation = Rule::new(
        "(has(self.rolling) ? 1 : 0) + (has(self.calendar) ? 1 : 0) + (has(self.lifetime) ? 1 : 0) == 1"
    ).message(
        "spec.window must have exactly one of rolling, calendar and lifetime, such as {calendar: {period: Daily, timeZone: UTC}}"
    ))]
    pub window: Window,
    /// Percent of any limit at which `NearLimit` becomes True, 1 to 100.
    #[serde(default = "default_warn_at_percent")]
    #[schemars(range(min = 1, max = 100))]
    pub warn_at_percent: u32,
    /// What happens when there is no room for the next call. `Pause`: the loop waits for the window. `Ask`: it waits
    /// for a person too, whose approval adds `ask.topUp`. `Stop`: the call in flight is cut and the loop stays stopped
    /// until a person adds room.
    #[serde(default)]
    pub on_exhausted: OnExhausted,
    /// Additions to the limits, each counted once, in the window it lands in. Append only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub top_ups: Vec<TopUp>,
    /// What an approval adds with `onExhausted: Ask`; default a quarter of each limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask: Option<Ask>,
}

fn default_warn_at_percent() -> u32 {
    80
}

/// Amounts of any kind, as people write them.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Uncached input, cache writes and output together. Cache reads count only in `inputTokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub tokens: Option<i64>,
    /// All input tokens, cache reads and writes included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub input_tokens: Option<i64>,
    /// All output tokens, reasoning included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub output_tokens: Option<i64>,
    /// Model calls, each attempt for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_000_i64))]
    pub calls: Option<i64>,
    /// Money in US dollars, a decimal string such as "25.00", at most six decimals.
    #[serde(default, rename = "costUSD", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20))]
    pub cost_usd: Option<String>,
}

/// When a budget begins anew.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Window {
    /// The last so many seconds, at every moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling: Option<Rolling>,
    /// Days, weeks (from Monday) or months of a time zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calendar: Option<Calendar>,
    /// The life of the budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Lifetime>,
}

/// A rolling window.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Rolling {
    /// Its length in seconds, 1 to 31,622,400 (366 days).
    #[schemars(range(min = 1, max = 31_622_400))]
    pub seconds: i64,
}

/// A calendar window.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Calendar {
    /// Its length.
    pub period: Period,
    /// The IANA time zone whose midnights count.
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
pub enum Period {
    /// From midnight to midnight.
    Daily,
    /// From Monday to Monday.
    Weekly,
    /// From the first of a month to the first of the next.
    Monthly,
}

/// One window for ever.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Lifetime {}

/// What happens when a budget is spent.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum OnExhausted {
    /// The loop waits until there is room.
    #[default]
    Pause,
    /// The loop waits, and a gate asks a person for more.
    Ask,
    /// The call in flight is cut; the loop stays stopped until a person adds room.
    Stop,
}

/// An addition to the limits.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
        validation = Rule::new(SOME).message(
            "spec.topUps[] names no kind: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.topUps[].costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        ),
    validation = Rule::new("self.id.matches('^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')").message(
        "spec.topUps[].id must be letters, digits, '-', '_' and '.', beginning and ending with a letter or digit, such as 2026-11-fire"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct TopUp {
    /// Its name, so that it counts once.
    #[schemars(length(min = 1, max = 63))]
    pub id: String,
    /// How much.
    #[serde(flatten)]
    pub amount: Limits,
    /// Why it was added, for whoever reads it later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub reason: Option<String>,
}

/// Settings of `onExhausted: Ask`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Ask {
    /// What one approval adds, for the window it falls in.
    #[x_kube(
        validation = Rule::new(SOME).message(
            "spec.ask.topUp names no kind: set at least one of tokens, inputTokens, outputTokens, calls and costUSD"
        ),
        validation = Rule::new(COST).message(
            "spec.ask.topUp.costUSD must be a decimal number in quotes with at most six decimals, such as \"25.00\""
        )
    )]
    pub top_up: Limits,
}

/// Observed state of a budget. Written by the controller only.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("default" = {"conditions": [{
    "type": "Ready",
    "status": "Unknown",
    "reason": "Pending",
    "message": "The controller has not looked at this AgentBudget yet.",
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}]}))]
pub struct AgentBudgetStatus {
    /// The generation of the spec that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Accepted`, `NearLimit`, `Exhausted`; `Stalled` while a person must act.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The window at hand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<WindowStatus>,
    /// The limits of this window, top-ups included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitAmounts>,
    /// Settled in this window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Amount>,
    /// Held by gateways for calls that they make or may make.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Amount>,
    /// Limit less used and reserved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<LimitAmounts>,
    /// Agents that draw on it.
    #[schemars(range(min = 0))]
    pub agents: i32,
    /// The Agents that used most in this window, at most 10.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub top_agents: Vec<TopAgent>,
    /// Texts for the columns of `kubectl get`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<BudgetSummary>,
    /// An open question to a person; at most one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1))]
    pub gates: Vec<BudgetGate>,
    /// The last answers to gates that were handled, so that each is handled once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_handled_requests: Option<HandledAnswers>,
    /// What a new leader needs to go on without overspending. Not for people; compare-and-set only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ledger: Option<LedgerRecord>,
}

/// A window's ends.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct WindowStatus {
    /// When it began; absent for a rolling one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// When there is room for the next call: for a budget with room, when the window ends (calendar); for a spent one,
    /// the moment at which the call refused last fits. Absent: never by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resets_at: Option<Time>,
}

/// What one Agent used.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct TopAgent {
    /// Namespace of the Agent.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name of the Agent.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Tokens in this window.
    #[schemars(range(min = 0))]
    pub tokens: i64,
    /// Cost in this window.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost: i64,
}

/// Texts for columns.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetSummary {
    /// The window, such as `1h`, `daily Europe/Berlin`, `lifetime`.
    #[schemars(length(max = 128))]
    pub window: String,
    /// The limit nearest to being spent, such as `1M tokens`.
    #[schemars(length(max = 64))]
    pub limit: String,
    /// Used of that kind.
    #[schemars(length(max = 64))]
    pub used: String,
    /// The same in percent.
    #[schemars(length(max = 16))]
    pub used_percent: String,
    /// Reserved of that kind.
    #[schemars(length(max = 64))]
    pub reserved: String,
    /// When it resets, such as `14:05 UTC`.
    #[schemars(length(max = 64))]
    pub resets: String,
}

/// A question to a person.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BudgetGate {
    /// Its name, for the answer.
    #[schemars(length(max = 63))]
    pub id: String,
    /// Always `BudgetAsk`.
    #[schemars(length(max = 32))]
    pub kind: String,
    /// Hash of the question: what would be added, to what.
    #[schemars(length(max = 64))]
    pub arguments_hash: String,
    /// When it was asked.
    pub opened_at: Time,
}

/// The last handled value of each annotation that answers a gate.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct HandledAnswers {
    /// Of `agentloop.dev/approve`.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approve: Option<String>,
    /// Who approved, as `agentloop.dev/approved-by` said; the admission policy holds it to the user.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approved_by: Option<String>,
    /// Of `agentloop.dev/deny`.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deny: Option<String>,
}

/// One limit's account as a new leader takes it over (DESIGN 4).
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LedgerRecord {
    /// Number of this record: each write raises it by one, over exactly the one before.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// The ledger's time at the write; a later leader's never runs behind it.
    pub watermark: jiff::Timestamp,
    /// The window that the pieces are counted by: under another one the next leader counts them anew.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
    /// Number of the lease made last.
    #[schemars(range(min = 0))]
    pub next_lease: i64,
    /// What is settled, by the moment it was; the oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub buckets: Vec<Bucket>,
    /// Who holds how much.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096))]
    pub holders: Vec<Holder>,
    /// Top-ups that were counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub top_ups: Vec<CountedTopUp>,
    /// What each Agent used of it in this window.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096))]
    pub shares: Vec<Share>,
}

/// What was settled in a piece of time.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Bucket {
    /// Its beginning; of a calendar window: the beginning of the window.
    pub start: jiff::Timestamp,
    /// How much.
    pub amount: Amount,
}

/// One lease. Granted is `amount` + `spent` + `returned`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Holder {
    /// Number of the lease, never used again.
    #[schemars(range(min = 0))]
    pub lease: i64,
    /// The gateway's record, which outlives its pod where the storage does.
    #[schemars(length(max = 64))]
    pub record: String,
    /// Uid of the pod that was last heard with it.
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
    /// The window of the lease, by its beginning; the epoch 1970 for windows without one.
    pub window: jiff::Timestamp,
    /// Outstanding: what it may still spend.
    pub amount: Amount,
    /// Spent of the lease, and in the buckets.
    #[serde(skip_serializing_if = "Amount::is_zero")]
    pub spent: Amount,
    /// Given back.
    #[serde(skip_serializing_if = "Amount::is_zero")]
    pub returned: Amount,
}

/// A top-up that was counted.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct CountedTopUp {
    /// Its id, or the gate's whose approval it is.
    #[schemars(length(max = 63))]
    pub id: String,
    /// When it landed.
    pub at: jiff::Timestamp,
    /// How much.
    pub amount: Amount,
}

/// What one Agent used of a budget.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Share {
    /// Namespace of the Agent.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Name of the Agent.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The same as of the whole, in fewer pieces.
    #[schemars(length(max = 8))]
    pub buckets: Vec<Bucket>,
}
