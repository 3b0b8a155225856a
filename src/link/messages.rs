//! Messages between an agent pod's gateway and the controller.
//!
//! Routes, all under the controller's link Service, all with `Authorization: Bearer <projected token>`:
//! `POST /v1/attach` [`AttachRequest`] → [`AttachResponse`]; `POST /v1/report` [`PodReport`] → 204;
//! `POST /v1/lease` [`LeaseRequest`] → [`LeaseResponse`];
//! `GET /v1/directives?epoch=N` → server-sent events: `directives` with [`Directives`] (at once, then on each change)
//! and an empty `heartbeat` every 10 s; events of the loop: [`events`](super::events); its history:
//! [`history`](super::history).
//! Events of sensor pods: [`deliveries`](super::deliveries). Errors carry a [`PodRefusal`].

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::durations::{CallDurations, LoopDurations, MAX_MODELS};
use super::lease_bounds::{READ_ACCOUNTS, READ_STATEMENTS};
use super::sensor_messages::{SensorReport, SensorTerms};
use agentloop_api::{
    amount::{Amount, LimitAmounts, is_zero},
    condition::LoopSign,
    failure::{CallFailure, FailureKind},
    first_elements::first_elements,
    goal::GoalStatus,
    price::ModelPrice,
    status::{
        Gate, HandledRequests, LastError, LoopOutcome, LoopState, LoopUsage, MAX_GATES, PauseReason, UntrustedContent,
        WakeCondition,
    },
    task::{Activation, MAX_RECENT},
    usage_counts::LoopCounts,
};
use agentloop_ledger::account::{GrantRefusal, GrantRequest, LeaseStatement};

use super::events::EventSubscription;

/// Version of this protocol. `docs/development/link-protocol.md` defines when it is raised and what each version
/// changed.
pub const PROTOCOL: u32 = 2;
/// The oldest version that a controller serves: the previous one, so that running pods survive an upgrade.
pub const OLDEST_PROTOCOL: u32 = PROTOCOL - 1;
/// The oldest version of a controller that a gateway attaches to. Controllers of version 1 do not negotiate and reject
/// every other version. Becomes [`OLDEST_PROTOCOL`] with version 3.
pub const OLDEST_CONTROLLER_PROTOCOL: u32 = 2;

/// The newest version that both ends support, each from its oldest to its newest; `None`: there is none.
#[must_use]
pub fn common_protocol(ours: RangeInclusive<u32>, theirs: RangeInclusive<u32>) -> Option<u32> {
    let newest = *ours.end().min(theirs.end());
    (ours.contains(&newest) && theirs.contains(&newest)).then_some(newest)
}
/// Seconds between heartbeats of the [`Directives`] stream.
pub const HEARTBEAT_SECONDS: u64 = 10;
/// Seconds without contact after which a pod must stop acting: the run lease.
pub const RUN_LEASE_SECONDS: u64 = 60;
/// Seconds between two [`PodReport`]s of an unchanged loop.
pub const REPORT_SECONDS: u64 = 15;

/// Most models of an [`AttachRequest`] that are read. An Agent has two; a later version may know more.
pub const MAX_PRICED_MODELS: usize = 16;
/// Most reasons of a [`LoopReport`] that are read, more than there are [`PauseReason`]s.
pub const MAX_REASONS: usize = 64;
/// Most Sensors of a [`LoopReport`] that are read: a journal keeps no more.
pub const MAX_SENSORS: usize = 512;

/// Attaches a gateway. Its identity comes from its token, never from this body.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AttachRequest {
    /// [`PROTOCOL`] of the gateway.
    pub protocol: u32,
    /// The oldest version of a controller that the gateway supports; absent: only `protocol`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_protocol: Option<u32>,
    /// The epoch with which the pod was created.
    pub epoch: i64,
    /// The models that the pod calls: the current spec may name others.
    #[serde(default, deserialize_with = "first_elements::<MAX_PRICED_MODELS, _, _>")]
    pub models: Vec<PricedModel>,
}

/// A model that a pod calls.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PricedModel {
    /// Its name in requests.
    pub name: String,
    /// Its price in the pod's spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<ModelPrice>,
}

/// The controller's answer to an [`AttachRequest`].
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AttachResponse {
    /// The version that is spoken from now on.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
    /// The confirmed epoch.
    pub epoch: i64,
    /// The totals in `status`, for a pod whose storage is new: totals continue from here and never decrease.
    pub known: LoopTotals,
    /// What the pod has to do.
    pub directives: Directives,
}

/// The version of a controller that does not state its version.
fn first_protocol() -> u32 {
    1
}

/// Totals known to the controller.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopTotals {
    /// `status.usage`.
    pub usage: LoopUsage,
    /// `status.loop.turn`.
    pub turn: i64,
}

/// What a pod has to do. The complete desired state, so applying it twice has no further effect.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Directives {
    /// Cut the call in flight, write the journal, and stop. Nothing more is sent to the model.
    pub suspend: bool,
    /// Value of the annotation `agentloop.dev/wake`: ends the sleep, once per value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<String>,
    /// Value of the annotation `agentloop.dev/resume`: ends a cool-down, once per value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<String>,
    /// Value of the annotation `agentloop.dev/stop`: ends the loop, once per value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<String>,
    /// Answers to open gates, until the loop reports that they are closed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gate_answers: Vec<GateAnswer>,
    /// The limits of the calls. `None`: not decided yet, so no call is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetTerms>,
    /// Sensors that run in this pod, by uid. `None`: not decided yet, so the running ones continue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sensors: Option<Vec<SensorTerms>>,
    /// Names of the events that can wake the loop, of all Sensors that deliver to this Agent. `None`: not known yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_events: Option<Vec<String>>,
    /// Subscriptions to the loop's events: the worker sends events for as long as they are listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub readings: Vec<EventSubscription>,
    /// The controller stores histories: the worker uploads its own.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub history: bool,
}

/// The answer of a person to a gate.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GateAnswer {
    /// Id of the gate.
    pub id: String,
    /// Hash of the arguments that were approved or denied.
    pub arguments_hash: String,
    /// Whether the gate was approved, as opposed to denied.
    pub approved: bool,
    /// User who answered, if known: an annotation that denies has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

/// The limits of an Agent's calls. A call needs room in every account and counts in all of them.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetTerms {
    /// The accounts that apply; empty: the calls are not limited.
    pub accounts: Vec<AccountTerms>,
    /// Prices by model name, for the models in the spec and those that the running pod calls, which may differ until
    /// the pod is replaced. For a model without a price no cost is counted and no cost limit can be enforced.
    pub prices: BTreeMap<String, ModelPrice>,
    /// Price of `spec.model`, for gateways of version 1 only, which ignore `prices`. Remove with version 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price: Option<ModelPrice>,
    /// Price of `spec.lightModel`, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub light_price: Option<ModelPrice>,
    /// An answer is shortened to the room that is left, but not below this many tokens.
    pub min_output_tokens: u32,
    /// Why no call may be made at all: `BudgetUnavailable`, `LoopDetected`.
    pub blocked: Option<CallFailure>,
    /// The call in flight is cut as well: a budget with `onExhausted: Stop` is exhausted.
    pub cut: bool,
}

/// One account that applies to an Agent.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AccountTerms {
    /// Id of the account: the uid of a budget, or `<uid of the Agent>/tokensPerHour`, `<uid of the Agent>/total`.
    pub account: String,
    /// The limit it belongs to, for messages.
    pub limit: LimitName,
    /// Limits of the current window, including top-ups.
    pub limits: LimitAmounts,
    /// Limits of each single Agent.
    #[serde(default)]
    pub per_agent: LimitAmounts,
    /// Gateways must return at once what no call in flight needs, and request leases for single calls only.
    #[serde(default)]
    pub recall: bool,
    /// Exhausted, and a person has to act: `BudgetAsk` (a gate is open) or `BudgetExhausted` (`onExhausted: Stop`). No
    /// call is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<CallFailure>,
    /// Changes whenever a refused call may have become possible: a raised limit, a top-up, a returned lease. Waiting
    /// calls then retry.
    pub revision: i64,
    /// What is left of it for this Agent.
    #[serde(default)]
    pub left: AccountRemaining,
}

/// What is left of an account's limits, in tenths of each, rounded down, so that it changes rarely and causes little
/// traffic. As of the gateway's last lease request.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AccountRemaining {
    /// Of the account's limits.
    pub of_limits: LimitAmounts,
    /// Of the limits per Agent.
    pub of_per_agent: LimitAmounts,
    /// Length of a rolling window in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolling_seconds: Option<i64>,
    /// Beginning of the next window, if windows have an end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resets_at: Option<jiff::Timestamp>,
}

/// The limit that an account belongs to.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum LimitName {
    /// An AgentBudget, as `name` or, from another namespace, `namespace/name`.
    Budget(String),
    /// `guardrails.tokensPerHour`.
    TokensPerHour,
    /// `guardrails.total`.
    Total,
}

impl std::fmt::Display for LimitName {
    /// The name in messages: `AgentBudget team`, `guardrails.total`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Budget(name) => write!(f, "AgentBudget {name}"),
            Self::TokensPerHour => f.write_str("guardrails.tokensPerHour"),
            Self::Total => f.write_str("guardrails.total"),
        }
    }
}

/// Reports the state of a gateway's leases and requests more. Totals, so repeats have no effect.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseRequest {
    /// Epoch of the pod.
    pub epoch: i64,
    /// Name of the gateway's record, generated with it: 32 hexadecimal digits.
    pub record: String,
    /// Every account in which the gateway holds or requests leases.
    #[serde(deserialize_with = "first_elements::<READ_ACCOUNTS, _, _>")]
    pub accounts: Vec<AccountRequest>,
}

/// A gateway's statements and request for one account.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AccountRequest {
    /// Id of the account.
    pub account: String,
    /// The state of every lease that the gateway knows.
    #[serde(deserialize_with = "first_elements::<READ_STATEMENTS, _, _>")]
    pub statements: Vec<LeaseStatement>,
    /// What the gateway needs for its next call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ask: Option<GrantRequest>,
}

/// The leader's answer, sent once everything that it grants is written.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseResponse {
    /// One for each account of the request.
    pub accounts: Vec<AccountResponse>,
}

/// The leader's answer for one account.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AccountResponse {
    /// Id of the account.
    pub account: String,
    /// Epoch of the ledger record behind the answer; a gateway that knows a later one ignores the rest.
    pub epoch: i64,
    /// Every lease of this gateway's record, whether requested or not.
    pub leases: Vec<LeaseGrant>,
    /// Leases of the request that the leader does not know (any more): they are completely accounted for.
    pub forgotten: Vec<i64>,
    /// Why no more was granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<GrantRefusal>,
}

/// The grant of one lease.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LeaseGrant {
    /// Number of the lease.
    pub lease: i64,
    /// All that was granted under this lease.
    pub granted: Amount,
    /// Total spent, as last reported to the leader. A gateway that knows less has lost data.
    #[serde(default, skip_serializing_if = "Amount::is_zero")]
    pub spent: Amount,
    /// Total returned, as last reported to the leader.
    #[serde(default, skip_serializing_if = "Amount::is_zero")]
    pub returned: Amount,
    /// Milliseconds from the sending of the request during which the lease may be used for new calls. `None`:
    /// unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_milliseconds: Option<u64>,
}

/// A report of a pod's gateway: sent on every change, and every [`REPORT_SECONDS`].
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodReport {
    /// The pod's epoch.
    pub epoch: i64,
    /// The state of the loop, once the worker has reported it.
    #[serde(rename = "loop")]
    pub loop_: Option<LoopReport>,
    /// The gateway's counts since the Agent was created.
    pub usage: LoopUsage,
    /// How the last model call ended; absent before the first.
    pub model: Option<ModelReport>,
    /// Counters of what the limits did.
    pub budget: BudgetReport,
    /// Statistics of the last requests, taken outside the loop; absent before the first answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pulse: Option<RequestStats>,
    /// What the pod has not exported over OTLP.
    #[serde(skip_serializing_if = "TelemetryLoss::is_none")]
    pub telemetry_loss: TelemetryLoss,
    /// How long the answered calls of each of the pod's models took, since the start of the gateway.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_MODELS, _, _>"
    )]
    pub call_durations: Vec<CallDurations>,
}

/// Telemetry that a pod has not exported, since the start of its gateway.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct TelemetryLoss {
    /// Number of spans.
    pub spans: i64,
    /// Number of log lines.
    pub logs: i64,
}

impl TelemetryLoss {
    /// Whether everything was exported.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Effects of limits on the calls of one gateway: totals of its record.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetReport {
    /// Number of refusals of calls because of a limit.
    pub refused_calls: i64,
    /// Number of leases about which the leader knew more than this gateway, because its storage was restored to an
    /// earlier state. Each was closed and the rest of it counted as used.
    #[serde(skip_serializing_if = "is_zero")]
    pub lost_leases: i64,
}

/// Request statistics that do not depend on the worker. They start over with each new value of [`Directives::resume`],
/// because a person reviewed what was before.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct RequestStats {
    /// How many of the last 20 answered requests had byte for byte the messages of the most frequent one.
    pub identical: u32,
    /// The beginning of the hash of that request: 16 hexadecimal digits.
    pub hash: String,
    /// Tokens charged in the last 300 s: uncached input, cache writes and output.
    pub tokens: i64,
}

/// How the last model call ended.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ModelReport {
    /// The failure; absent if the call was answered.
    pub failure: Option<FailureKind>,
    /// The cause and the fix; empty if the call was answered.
    #[serde(default)]
    pub message: String,
}

/// A worker's report of its loop.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopReport {
    /// What the loop does now.
    pub state: LoopState,
    /// All reasons that hold the loop, each with the time at which it ends by rule, if known.
    #[serde(deserialize_with = "first_elements::<MAX_REASONS, _, _>")]
    pub reasons: Vec<HeldReason>,
    /// Since when the loop is in this state.
    pub since: Option<jiff::Timestamp>,
    /// When the loop resumes by rule.
    pub resumes_at: Option<jiff::Timestamp>,
    /// What a sleep waits for.
    pub wake: Option<WakeCondition>,
    /// How the loop ended.
    pub outcome: Option<LoopOutcome>,
    /// Number of turns begun.
    pub turn: i64,
    /// Open gates, in the order of their runs.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_GATES, _, _>"
    )]
    pub gates: Vec<Gate>,
    /// Untrusted content that the model has been shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untrusted_content: Option<UntrustedContent>,
    /// The tasks that ended last, the newest first.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_RECENT, _, _>"
    )]
    pub recent_activations: Vec<Activation>,
    /// Tasks that wait.
    #[serde(skip_serializing_if = "is_zero")]
    pub waiting_tasks: i64,
    /// What the loop counts over the life of its Agent.
    #[serde(flatten)]
    pub counts: LoopCounts,
    /// Consecutive failed turns.
    pub consecutive_errors: i32,
    /// Turns since the last sleep.
    pub consecutive_turns: i32,
    /// Requests by annotation that were handled.
    pub handled: HandledRequests,
    /// The last failed call or turn.
    pub last_error: Option<LastError>,
    /// The repetition that the loop is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detected: Option<DetectedLoop>,
    /// The progress of a loop in mode `Goal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub goal: Option<GoalStatus>,
    /// How the last call to `spec.lightModel` failed, while only a user can fix that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub light_model: Option<ModelReport>,
    /// Sensors that run in this pod, by uid.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_SENSORS, _, _>"
    )]
    pub sensors: Vec<SensorReport>,
    /// How long turns and tool runs took, since the start of the worker.
    #[serde(skip_serializing_if = "LoopDurations::is_none")]
    pub durations: LoopDurations,
}

/// A repetition that a loop is in.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DetectedLoop {
    /// The sign by which it was detected.
    pub sign: LoopSign,
    /// The observation and the consequence, for the condition's message; contains hashes, but no text of a model or a
    /// tool.
    pub message: String,
}

/// A reason that holds a loop.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HeldReason {
    /// Why the loop is held.
    pub reason: PauseReason,
    /// When it ends by rule; absent if unknown.
    pub until: Option<jiff::Timestamp>,
    /// The cause and the fix, for the condition's message.
    pub message: String,
}

/// Why the controller rejects a request of a pod.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
#[serde(rename_all = "camelCase")]
pub struct PodRefusal {
    /// The kind of refusal.
    pub code: RefusalCode,
    /// The cause and the fix, for people.
    pub message: String,
}

/// Kinds of refusals.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(
    Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::AsRefStr, strum::EnumIter,
)]
pub enum RefusalCode {
    /// 401: the token is missing, expired, or for another audience.
    Unauthenticated,
    /// 403: this pod does not belong to any Agent.
    Unknown,
    /// 409: another pod, or a newer epoch, holds this Agent.
    Fenced,
    /// 503: this replica is not the leader, or its caches are not filled yet.
    NotLeading,
    /// 503: the receiver is not reachable now.
    Away,
    /// 400: the message is malformed.
    Malformed,
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use strum::IntoEnumIterator as _;

    use super::*;

    #[test]
    fn a_report_has_room_for_every_reason() {
        assert!(PauseReason::iter().count() <= MAX_REASONS);
    }

    #[rstest]
    #[case::the_same(1..=2, 1..=2, Some(2))]
    #[case::the_other_is_older(2..=3, 1..=2, Some(2))]
    #[case::the_other_is_newer(1..=2, 2..=3, Some(2))]
    #[case::two_versions_older(3..=4, 1..=2, None)]
    #[case::two_versions_newer(1..=2, 3..=4, None)]
    #[case::the_first(1..=1, 1..=1, Some(1))]
    #[case::reversed(1..=2, RangeInclusive::new(2, 1), None)]
    fn versions_that_follow_each_other_have_one_in_common(
        #[case] ours: RangeInclusive<u32>,
        #[case] theirs: RangeInclusive<u32>,
        #[case] common: Option<u32>,
    ) {
        assert_eq!(common_protocol(ours, theirs), common);
    }
}
