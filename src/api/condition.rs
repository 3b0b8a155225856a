//! Names of condition types and reasons, and how a list of conditions is merged.
//!
//! The table is the contract of the API: each guardrail is a condition of its own, True while it holds.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, EnumString, IntoStaticStr};

/// Type of a condition on an Agent, AgentBudget or Sensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, AsRefStr, IntoStaticStr, EnumIter, EnumString)]
pub enum ConditionType {
    /// Does this object need nobody? False only where a person must act or an Agent's pod is not there yet.
    Ready,
    /// Present only while True: the controller is working towards the spec (kstatus).
    Reconciling,
    /// Present only while True: nothing will change until a person acts (kstatus).
    Stalled,
    /// The spec and all it refers to are usable.
    Accepted,
    /// The pod and its containers run.
    PodReady,
    /// `spec.suspend` is true.
    Suspended,
    /// An Agent's limit has no room for the next call, or never will have for one like it.
    BudgetExhausted,
    /// A provider's rate limit, or one of `guardrails.rateLimits`, holds the loop until a computed moment.
    RateLimited,
    /// `guardrails.maxConsecutiveTurns` was reached; cleared when the forced sleep ends.
    TurnLimitReached,
    /// It is no time of `guardrails.activeHours`; cleared when their next window begins.
    OutsideActiveHours,
    /// The loop was awake for `guardrails.idleTimeoutSeconds` without an effective action and has ended; cleared when a
    /// changed spec or a wake request starts it again.
    IdleTimeoutReached,
    /// `loop.maxConsecutiveErrors` was reached, or the same turn ended the worker three times; cool-down or resume.
    ErrorLimitReached,
    /// The loop repeats itself, or burns far above the pace of its limits.
    LoopDetected,
    /// A person has been asked, and has not answered yet.
    ApprovalPending,
    /// No contact between pod and controller for 60 s; the loop does nothing until it is back.
    LinkLost,
    /// False while the model cannot be used.
    ModelAvailable,
    /// Of an Agent: each of its Sensors hears and understands what comes.
    SensorsHealthy,
    /// Of a Sensor: it listens.
    Connected,
    /// Of a Sensor: what it has given is known after a restart of each receiver. Of an Agent: False, and there, when its
    /// state is lost with its pod.
    Durable,
    /// Of an AgentBudget: a limit is used to `spec.warnAtPercent` or more.
    NearLimit,
    /// Of an AgentBudget: there is no room for the next call.
    Exhausted,
}

/// What showed a loop; reason of the condition `LoopDetected`.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, AsRefStr, EnumIter, EnumString)]
pub enum LoopSign {
    /// The same tool call again and again, with nothing new; from outside: the same request, byte for byte.
    RepeatedCall,
    /// The same error again and again.
    RepeatedError,
    /// The same few tool calls in the same order, with nothing new.
    Cycle,
    /// Calls that bring nothing new, or the same words without a tool; from outside: a burn far above the pace of the
    /// limits.
    NoProgress,
}

/// Sets `new` into `conditions` (a list-map by type). `lastTransitionTime` moves only when `status` flips.
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

/// Removes the condition of that type.
pub fn remove(conditions: &mut Vec<Condition>, type_: ConditionType) {
    conditions.retain(|condition| condition.type_ != type_.as_ref());
}

/// The condition of that type, when it is there.
#[must_use]
pub fn find(conditions: &[Condition], type_: ConditionType) -> Option<&Condition> {
    conditions.iter().find(|condition| condition.type_ == type_.as_ref())
}

/// A condition with everything set; `message` is cut at 1,024 bytes on a character boundary.
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
    let mut end = message.len().min(1024);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message.truncate(end);
    Condition {
        type_: type_.as_ref().into(),
        status: if status { "True" } else { "False" }.into(),
        reason: reason.into(),
        message,
        observed_generation: generation,
        last_transition_time: Time(now),
    }
}
