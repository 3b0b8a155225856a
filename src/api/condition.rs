//! Names of condition types and reasons, and how a list of conditions is merged.
//!
//! The table is the contract of the API: each guardrail has its own condition, True while it applies.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, EnumString, IntoStaticStr};

/// Type of a condition on an Agent, AgentBudget or Sensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, AsRefStr, IntoStaticStr, EnumIter, EnumString)]
pub enum ConditionType {
    /// The object needs no user action. False only if user action is required or an Agent's pod is not ready yet.
    Ready,
    /// Present only while True: the controller is working towards the spec (kstatus).
    Reconciling,
    /// Present only while True: no progress without user action (kstatus).
    Stalled,
    /// The spec and all objects that it references are usable.
    Accepted,
    /// The pod and its containers are running.
    PodReady,
    /// `spec.suspend` is true.
    Suspended,
    /// A limit has no room for the Agent's next call, or can never have room for a call of that size.
    BudgetExhausted,
    /// A provider's rate limit, or one of `guardrails.rateLimits`, pauses the loop until a known time.
    RateLimited,
    /// `guardrails.maxConsecutiveTurns` was reached; cleared when the forced sleep ends.
    TurnLimitReached,
    /// Outside `guardrails.activeHours`; cleared when the next window starts.
    OutsideActiveHours,
    /// The loop was awake for `guardrails.idleTimeoutSeconds` without an effective action and has ended; cleared when a
    /// changed spec or a wake request starts it again.
    IdleTimeoutReached,
    /// `loop.maxConsecutiveErrors` was reached, or the same turn ended the worker three times; cleared by the cool-down
    /// or a resume request.
    ErrorLimitReached,
    /// `guardrails.maxConsecutiveToolFailures` was reached; cleared by the cool-down or a resume request.
    ToolFailureLimitReached,
    /// The loop repeats itself, or spends far above the pace of its limits.
    LoopDetected,
    /// A request for an approval is open.
    ApprovalPending,
    /// The confidence that the goal will be reached is below `goal.confidence.thresholdPercent`, or its estimate cannot be
    /// read; cleared when the continuation is approved.
    LowConfidence,
    /// Only in mode `Goal`, once the loop has ended: True if all criteria were met, otherwise False.
    Succeeded,
    /// No contact between pod and controller for 60 s; the loop does nothing until it is restored.
    LinkLost,
    /// False while the model cannot be used.
    ModelAvailable,
    /// Present only while False: the server rejects the key of `spec.lightModel`, or its account has no credit. The loop
    /// continues: turns run without a pre-check and signals have no score. A call is tried at most once a minute.
    LightModelAvailable,
    /// On an Agent: each of its Sensors receives events and can evaluate them.
    SensorsHealthy,
    /// On a Sensor: its source is connected.
    Connected,
    /// On a Sensor: delivered events survive a restart of each receiver. On an Agent: present only while False,
    /// when its state is lost with its pod.
    Durable,
    /// On an AgentBudget: the usage of a limit has reached `spec.warnAtPercent`.
    NearLimit,
    /// On an AgentBudget: no room for the next call.
    Exhausted,
}

/// Sign by which the engine detected a loop; reason of the condition `LoopDetected`.
#[derive(
    schemars::JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, AsRefStr, EnumIter, EnumString,
)]
pub enum LoopSign {
    /// The same tool call repeated without new results.
    RepeatedCall,
    /// The same error repeated.
    RepeatedError,
    /// The same few tool calls repeated in the same order without new results.
    Cycle,
    /// Calls without new results, or the same text without a tool call.
    NoProgress,
}

/// Sign by which the controller detected a loop from the counters of its gateway; reason of the condition `LoopDetected`.
/// Differs from each [`LoopSign`], so that the reason states who detected the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, AsRefStr, EnumIter, EnumString)]
pub enum GatewaySign {
    /// The same request, byte for byte, several times.
    RepeatedRequest,
    /// Spending far above the pace of the limits.
    HighBurnRate,
}

/// Sets `new` in `conditions` (a list-map by type). `lastTransitionTime` changes only when `status` does.
pub fn set(conditions: &mut Vec<Condition>, mut new: Condition) {
    match conditions.iter_mut().find(|old| old.type_ == new.type_) {
        Some(old) => {
            if old.status == new.status {
                new.last_transition_time = old.last_transition_time.clone();
            }
            *old = new;
        }
        None => conditions.push(new),
    }
}

/// Reason of a condition that was True and no longer applies.
const INACTIVE: &str = "Inactive";

/// Marks a condition as not applicable: an existing one becomes False. A condition that never was True is not
/// added, so that an object shows only the limits that once applied to it.
pub fn clear(conditions: &mut [Condition], type_: ConditionType, generation: Option<i64>, now: jiff::Timestamp) {
    if let Some(old) = conditions.iter_mut().find(|old| old.type_ == type_.as_ref()) {
        let since = (old.status == "False").then(|| old.last_transition_time.clone());
        *old = condition(type_, false, INACTIVE, "", generation, now);
        old.last_transition_time = since.unwrap_or(Time(now));
    }
}

/// Removes the condition of that type.
pub fn remove(conditions: &mut Vec<Condition>, type_: ConditionType) {
    conditions.retain(|condition| condition.type_ != type_.as_ref());
}

/// The condition of that type, if present.
#[must_use]
pub fn find(conditions: &[Condition], type_: ConditionType) -> Option<&Condition> {
    conditions.iter().find(|condition| condition.type_ == type_.as_ref())
}

/// A condition with all fields set; `message` is truncated to 1,024 bytes on a character boundary.
#[must_use]
pub fn condition(
    type_: ConditionType,
    status: bool,
    reason: &str,
    message: impl Into<String>,
    generation: Option<i64>,
    now: jiff::Timestamp,
) -> Condition {
    let mut message = message.into();
    message.truncate(message.floor_char_boundary(1024));
    Condition {
        type_: type_.as_ref().into(),
        status: if status { "True" } else { "False" }.into(),
        reason: reason.into(),
        message,
        observed_generation: generation,
        last_transition_time: Time(now),
    }
}
