//! Messages between an agent pod's gateway and the controller.
//!
//! Routes, all under the controller's link Service, all with `Authorization: Bearer <projected token>`:
//! `POST /v1/attach` [`AttachRequest`] → [`AttachResponse`]; `POST /v1/report` [`PodReport`] → 204;
//! `POST /v1/lease` [`LeaseRequest`] → [`LeaseResponse`];
//! `GET /v1/directives?epoch=N` → server-sent events: `directives` with [`Directives`] (at once, then on each change)
//! and an empty `heartbeat` every 10 s; events of the loop: [`events`](super::events).
//! Events of sensor pods: [`deliveries`](super::deliveries). Errors carry a [`PodRefusal`].

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::sensor_messages::{SensorReport, SensorTerms};
use crate::api::{
    amount::{Amount, LimitAmounts},
    condition::LoopSign,
    failure::{CallFailure, FailureKind},
    price::ModelPrice,
    status::{HandledRequests, LastError, LoopOutcome, LoopState, LoopUsage, PauseReason, WakeCondition},
    usage_counts::{GuardrailTrips, ToolUsage},
};
use crate::ledger::account::{GrantRefusal, GrantRequest, LeaseStatement};

use super::events::EventSubscription;

/// Version of this protocol.
pub const PROTOCOL: u32 = 1;
/// The oldest version that is still spoken: the one before, so that running pods outlive an upgrade of the controller, and
/// new ones its way back.
pub const OLDEST_PROTOCOL: u32 = if PROTOCOL > 1 { PROTOCOL - 1 } else { 1 };

/// The newest version that both ends speak, each from its oldest to its newest; `None`: there is none.
#[must_use]
pub fn common_protocol(ours: RangeInclusive<u32>, theirs: RangeInclusive<u32>) -> Option<u32> {
    let newest = *ours.end().min(theirs.end());
    (ours.contains(&newest) && theirs.contains(&newest)).then_some(newest)
}
/// Seconds between heartbeats of the directives stream.
pub const HEARTBEAT_SECONDS: u64 = 10;
/// Seconds without contact after which a pod may do nothing any more (the run lease, DESIGN 5).
pub const RUN_LEASE_SECONDS: u64 = 60;
/// Seconds between two reports of an unchanged loop.
pub const REPORT_SECONDS: u64 = 15;

/// A gateway introduces itself. Who it is comes from its token, never from this body.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AttachRequest {
    /// [`PROTOCOL`] of the gateway.
    pub protocol: u32,
    /// [`OLDEST_PROTOCOL`] of the gateway; absent: it speaks no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_protocol: Option<u32>,
    /// The epoch the pod was created with.
    pub epoch: i64,
    /// The models that it calls: the spec may name others by now.
    #[serde(default)]
    pub models: Vec<PricedModel>,
}

/// A model that a pod calls.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PricedModel {
    /// Its name, as requests carry it.
    pub name: String,
    /// The price that the spec of the pod gives for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<ModelPrice>,
}

/// The controller's answer to [`AttachRequest`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AttachResponse {
    /// The version that is spoken from now on.
    #[serde(default = "first_protocol")]
    pub protocol: u32,
    /// The epoch, confirmed.
    pub epoch: i64,
    /// What is known from `status`, for a pod whose storage is new: totals go on from here and never step back.
    pub known: LoopTotals,
    /// What the pod is to do.
    pub directives: Directives,
}

/// The version of a controller that does not say so.
fn first_protocol() -> u32 {
    1
}

/// Totals known to the controller.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopTotals {
    /// `status.usage`.
    pub usage: LoopUsage,
    /// `status.loop.turn`.
    pub turn: i64,
}

/// What a pod is to do. A level, sent whole: applying it twice does nothing more.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Directives {
    /// Cut the call in flight, journal, stop. Nothing more is sent to the model.
    pub suspend: bool,
    /// Value of the annotation `agentloop.dev/wake`: end the sleep, once per value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<String>,
    /// Value of the annotation `agentloop.dev/resume`: end a cool-down, once per value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<String>,
    /// What limits the calls. `None`: not decided yet, so no call is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetTerms>,
    /// Sensors that run in this pod, by uid. `None`: not decided yet, so those that ran go on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sensors: Option<Vec<SensorTerms>>,
    /// Names of the events that can wake the loop, of all Sensors that tell this Agent. `None`: not known yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_events: Option<Vec<String>>,
    /// Who reads the loop's events: the worker sends them for as long as they stand here.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub readings: Vec<EventSubscription>,
}

/// What limits an Agent's calls. A call needs room in every account, and counts in all of them.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetTerms {
    /// The accounts that apply; none: nothing limits the calls.
    pub accounts: Vec<AccountTerms>,
    /// Prices by name of the model: of those that the spec names, and of those that the running pod calls, which may be
    /// others until the pod is replaced. Of a model that is not here no cost is counted, and no limit of cost can be
    /// kept.
    pub prices: BTreeMap<String, ModelPrice>,
    /// An answer is clipped to what is left, but not below so many tokens.
    pub min_output_tokens: u32,
    /// Why no call may be made at all: `BudgetUnavailable`, `LoopDetected`.
    pub blocked: Option<CallFailure>,
    /// The call in flight is cut too: a budget with `onExhausted: Stop` is spent.
    pub cut: bool,
}

/// One account that applies to an Agent.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AccountTerms {
    /// Its id: the uid of a budget, or `<uid of the Agent>/tokensPerHour`, `<uid of the Agent>/total`.
    pub account: String,
    /// Whose limit it is, for messages.
    pub limit: LimitName,
    /// Limits of the window at hand, top-ups included.
    pub limits: LimitAmounts,
    /// Limits of this Agent alone.
    #[serde(default)]
    pub per_agent: LimitAmounts,
    /// Gateways give back at once what no call in flight needs, and ask for single calls.
    #[serde(default)]
    pub recall: bool,
    /// Spent, and a person is needed: `BudgetAsk` (a gate is open) or `BudgetExhausted` (`onExhausted: Stop`). No call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<CallFailure>,
    /// Changes whenever a refused call may have become possible: a raised limit, a top-up, a returned lease. Who waits
    /// for room tries again then.
    pub revision: i64,
    /// What of it is left for this Agent.
    #[serde(default)]
    pub left: AccountRemaining,
}

/// What is left of an account's limits, in tenths of each, rounded down: it changes little, and so makes little traffic.
/// As old as the gateway's last request for leases.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AccountRemaining {
    /// Of the account's limits.
    pub of_limits: LimitAmounts,
    /// Of the Agent's part.
    pub of_per_agent: LimitAmounts,
    /// Seconds after which what was used counts no more, in a rolling window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolling_seconds: Option<i64>,
    /// When the next window begins, where windows have an end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resets_at: Option<jiff::Timestamp>,
}

/// Whose limit an account is.
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
    /// As people know it: `AgentBudget team`, `guardrails.total`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Budget(name) => write!(f, "AgentBudget {name}"),
            Self::TokensPerHour => f.write_str("guardrails.tokensPerHour"),
            Self::Total => f.write_str("guardrails.total"),
        }
    }
}

/// A gateway says what became of its leases, and asks for more. Totals: repeats do no harm.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseRequest {
    /// Epoch of the pod.
    pub epoch: i64,
    /// Name of the gateway's record: made once with it, 32 hexadecimal digits.
    pub record: String,
    /// Every account that it holds leases of or asks for.
    pub accounts: Vec<AccountRequest>,
}

/// What a gateway says and asks of one account.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AccountRequest {
    /// Which.
    pub account: String,
    /// Of every lease that it knows.
    pub statements: Vec<LeaseStatement>,
    /// What it needs for its next call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ask: Option<GrantRequest>,
}

/// The leader's answer, given once all that it grants is written.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseResponse {
    /// One for each account of the request.
    pub accounts: Vec<AccountResponse>,
}

/// The leader's word about one account.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct AccountResponse {
    /// Which.
    pub account: String,
    /// Number of the record that it speaks from; a gateway that has heard of a newer one ignores the rest.
    pub epoch: i64,
    /// Every lease of this gateway's record, whether it asked for it or not.
    pub leases: Vec<LeaseGrant>,
    /// Leases of the request that the leader knows nothing of (any more): all about them is accounted for.
    pub forgotten: Vec<i64>,
    /// Why it gets no more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<GrantRefusal>,
}

/// What is granted of one lease.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LeaseGrant {
    /// Its number.
    pub lease: i64,
    /// Total granted.
    pub granted: Amount,
    /// What the leader heard that was spent of it. A gateway that knows less has lost what it wrote.
    #[serde(default, skip_serializing_if = "Amount::is_zero")]
    pub spent: Amount,
    /// What the leader heard that was given back.
    #[serde(default, skip_serializing_if = "Amount::is_zero")]
    pub returned: Amount,
    /// Milliseconds, from when the request was sent, for which it may be used for new calls. `None`: not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_milliseconds: Option<u64>,
}

/// What a gateway says of its pod: on every change, and every [`REPORT_SECONDS`].
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodReport {
    /// The pod's epoch.
    pub epoch: i64,
    /// The loop, once the worker has spoken.
    #[serde(rename = "loop")]
    pub loop_: Option<LoopReport>,
    /// The gateway's counts since the Agent was created.
    pub usage: LoopUsage,
    /// How the last model call ended; absent before the first.
    pub model: Option<ModelReport>,
    /// What the limits did so far.
    pub budget: BudgetReport,
    /// What the last requests looked like from outside the loop; absent before the first answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pulse: Option<RequestStats>,
}

/// What limits did to the calls of one gateway: totals of its record.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetReport {
    /// Calls that were not made because of a limit, each refusal for itself.
    pub refused_calls: i64,
    /// Leases of which the leader knew more than this gateway: its storage went back to an earlier state. Each was closed,
    /// and all that was left of it counts as spent.
    #[serde(skip_serializing_if = "is_zero")]
    pub lost_leases: i64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
fn is_zero(value: &i64) -> bool {
    *value == 0
}

/// What requests look like to one who does not trust the worker. Counting begins anew with each new value of
/// [`Directives::resume`]: a person looked at what was before.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct RequestStats {
    /// How many of the last 20 answered requests had, byte for byte, the messages of the most frequent one.
    pub identical: u32,
    /// The beginning of that one's hash: 16 hexadecimal digits.
    pub hash: String,
    /// Tokens charged in the last 300 s: uncached input, cache writes and output.
    pub tokens: i64,
}

/// How the last model call ended.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ModelReport {
    /// Absent: it answered.
    pub failure: Option<FailureKind>,
    /// What to do about it; empty when it answered.
    #[serde(default)]
    pub message: String,
}

/// What a worker says of its loop.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopReport {
    /// One of the six states.
    pub state: LoopState,
    /// All reasons that hold, each with the moment it clears by itself, when that is known.
    pub reasons: Vec<HeldReason>,
    /// Since when the state holds.
    pub since: Option<jiff::Timestamp>,
    /// When the loop goes on by itself.
    pub resumes_at: Option<jiff::Timestamp>,
    /// What a sleep waits for.
    pub wake: Option<WakeCondition>,
    /// How the loop ended.
    pub outcome: Option<LoopOutcome>,
    /// Turns begun.
    pub turn: i64,
    /// Turns completed.
    pub turns_completed: i64,
    /// Runs of tools that were sent.
    pub tool_calls: i64,
    /// Those of them with side effects.
    pub actions: i64,
    /// How runs of tools ended.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by_tool: Vec<ToolUsage>,
    /// How often limits were reached and loops were detected.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub guardrail_trips: Vec<GuardrailTrips>,
    /// Failed turns in a row.
    pub consecutive_errors: i32,
    /// Turns since the last sleep.
    pub consecutive_turns: i32,
    /// Requests handled.
    pub handled: HandledRequests,
    /// The last failure.
    pub last_error: Option<LastError>,
    /// The repetition that the loop is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detected: Option<DetectedLoop>,
    /// Sensors that run in this pod, by uid.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sensors: Vec<SensorReport>,
}

/// A repetition that a loop is in.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DetectedLoop {
    /// What showed it.
    pub sign: LoopSign,
    /// What was seen and what followed, for the condition's message; hashes, and no text of a model or a tool.
    pub message: String,
}

/// A reason that holds a loop.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HeldReason {
    /// Which.
    pub reason: PauseReason,
    /// When it clears by itself.
    pub until: Option<jiff::Timestamp>,
    /// What happened and what to do, for the condition's message.
    pub message: String,
}

/// Why the controller refuses a pod.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
#[serde(rename_all = "camelCase")]
pub struct PodRefusal {
    /// What kind.
    pub code: RefusalCode,
    /// In words.
    pub message: String,
}

/// Kinds of refusal.
#[derive(
    Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::AsRefStr, strum::EnumIter,
)]
pub enum RefusalCode {
    /// 401: the token is missing, expired, or of another audience.
    Unauthenticated,
    /// 403: this pod is not the pod of any Agent.
    Unknown,
    /// 409: another pod or a newer epoch holds this Agent.
    Fenced,
    /// 503: this replica does not lead, or its caches are not filled yet.
    NotLeading,
    /// 503: the receiver cannot be reached now.
    Away,
    /// 400: the message cannot be read.
    Malformed,
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

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
