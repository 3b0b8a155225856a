//! What Flux, Helm and `kubectl wait` make of a status: kstatus's rules for a custom resource, for tests.

use crate::api::AgentStatus;
use crate::api::condition::{ConditionType, find};

/// kstatus's verdicts that a live object can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KstatusVerdict {
    Current,
    InProgress,
    Failed,
}

/// `Compute` of kstatus: generation first, then Reconciling and Stalled, then Ready; without Ready an object counts as
/// done.
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
