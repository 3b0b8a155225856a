//! The rules by which kstatus (used by Flux, Helm and others) computes the status of a custom resource. For tests.

use crate::api::AgentStatus;
use crate::api::condition::{ConditionType, find};

/// The verdicts of kstatus for an object that is not being deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KstatusVerdict {
    Current,
    InProgress,
    Failed,
}

/// `Compute` of kstatus: generation first, then `Reconciling` and `Stalled`, then `Ready`. An object without `Ready` is
/// `Current`.
pub(super) fn verdict(generation: Option<i64>, status: &AgentStatus) -> KstatusVerdict {
    if status.observed_generation.is_some() && status.observed_generation != generation {
        return KstatusVerdict::InProgress;
    }
    let says = |type_, value: &str| find(&status.conditions, type_).is_some_and(|c| c.status == value);
    if says(ConditionType::Reconciling, "True") {
        return KstatusVerdict::InProgress;
    }
    if says(ConditionType::Stalled, "True") {
        return KstatusVerdict::Failed;
    }
    match find(&status.conditions, ConditionType::Ready) {
        Some(ready) if ready.status != "True" => KstatusVerdict::InProgress,
        Some(_) | None => KstatusVerdict::Current,
    }
}
