//! Step three: what there should be. Pure.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use super::apply::PodObstacle;
use super::claims::{ClaimState, VolumeClaim};
use super::context::ReconcilerSettings;
use super::intent::{Intent, ReplaceReason};
use super::manifest;
use super::observe::{NodeState, ObservedAgent};
use super::reconcile_state::AgentReconcileState;
use super::requests;
use super::validate::InvalidAgent;
use crate::api::{Agent, AgentStatus};
use crate::controller::pod_sessions::LivePod;
use crate::link::messages::{Directives, LoopTotals};

/// What is to be done with the pod.
#[derive(Debug, PartialEq)]
pub(super) enum PodStep {
    /// Leave it as it is.
    Nothing,
    /// Make it.
    Create(Box<Pod>),
    /// Delete the one with this uid.
    Delete {
        /// Its uid.
        uid: String,
        /// Without waiting for its node, which is gone.
        force: bool,
    },
}

/// The pod that may speak, and what it is told.
#[derive(Debug, PartialEq)]
pub(super) struct LinkGrant {
    /// The pod.
    pub(super) pod: LivePod,
    /// What is known of its loop.
    pub(super) known: LoopTotals,
    /// What it is to do.
    pub(super) directives: Directives,
}

/// All that is to be done.
#[derive(Debug, PartialEq)]
pub(super) struct ReconcilePlan {
    /// With the pod.
    pub(super) pod: PodStep,
    /// The claims that must be made.
    pub(super) claims: Vec<PersistentVolumeClaim>,
    /// What keeps the pod from being made or from starting.
    pub(super) obstacle: Option<PodObstacle>,
    /// Who may speak; `None`: nobody.
    pub(super) voice: Option<LinkGrant>,
}

/// What should be, given what is.
pub(super) fn desired(
    agent: &Agent,
    status: &AgentStatus,
    observed: &ObservedAgent,
    verdict: &Result<(), InvalidAgent>,
    memory: &AgentReconcileState,
    settings: &ReconcilerSettings,
) -> ReconcilePlan {
    let recorded = status.r#loop.as_ref().map_or(0, |status| status.epoch);
    let epoch = recorded.max(memory.epoch) + 1;
    let obstacle = observed.claims.iter().find_map(claim_obstacle);
    let pod = match (&obstacle, observed.intent, &observed.pod) {
        (Some(_), Intent::Create, _) => PodStep::Nothing,
        // It has no node yet: better none than one that starts on the claim of another.
        (Some(_), Intent::Keep | Intent::KeepOutdated(_), Some(pod)) => PodStep::Delete {
            uid: pod.uid.clone(),
            force: false,
        },
        _ => pod_step(agent, epoch, observed, verdict.is_ok(), settings),
    };
    let wanted = matches!(pod, PodStep::Create(_)) || matches!(pod, PodStep::Nothing) && observed.pod.is_some();
    let absent = observed
        .claims
        .iter()
        .filter(|claim| claim.standing == ClaimState::Absent);
    ReconcilePlan {
        claims: if wanted && obstacle.is_none() {
            absent.map(|claim| claim.wanted.clone()).collect()
        } else {
            Vec::new()
        },
        pod,
        obstacle,
        voice: link_grant(agent, status, observed),
    }
}

/// What a claim that may not be used is to the pod.
pub(super) fn claim_obstacle(claim: &VolumeClaim) -> Option<PodObstacle> {
    match claim.standing {
        ClaimState::Absent | ClaimState::Ours => None,
        ClaimState::Ending => Some(PodObstacle::ClaimEnding(claim.name())),
        ClaimState::Foreign => Some(PodObstacle::ClaimForeign(claim.name())),
    }
}

fn pod_step(
    agent: &Agent,
    epoch: i64,
    observed: &ObservedAgent,
    valid: bool,
    settings: &ReconcilerSettings,
) -> PodStep {
    let delete = |force| match &observed.pod {
        Some(pod) => PodStep::Delete {
            uid: pod.uid.clone(),
            force,
        },
        None => PodStep::Nothing,
    };
    match observed.intent {
        Intent::Create if valid => PodStep::Create(Box::new(manifest::pod(agent, epoch, settings))),
        // A running loop is not ended for a spec that cannot run.
        Intent::Replace(ReplaceReason::Outdated) if valid => delete(false),
        Intent::Replace(ReplaceReason::Stopped | ReplaceReason::Ended | ReplaceReason::Foreign) | Intent::Remove(_) => {
            delete(false)
        }
        Intent::Ending { overdue: true, .. } if matches!(observed.node, Some(NodeState::Gone | NodeState::Spent)) => {
            delete(true)
        }
        Intent::Create
        | Intent::CreateLater(_)
        | Intent::Keep
        | Intent::KeepOutdated(_)
        | Intent::Replace(ReplaceReason::Outdated)
        | Intent::AwaitStop(_)
        | Intent::RecordOutcome
        | Intent::Rest(_)
        | Intent::Ending { .. } => PodStep::Nothing,
    }
}

/// The Agent's own pod may speak as long as its object exists: an ending one still has its last totals to say.
fn link_grant(agent: &Agent, status: &AgentStatus, observed: &ObservedAgent) -> Option<LinkGrant> {
    let pod = observed.pod.as_ref()?;
    if pod.owner.as_deref() != agent.metadata.uid.as_deref() || pod.ended {
        return None;
    }
    Some(LinkGrant {
        pod: LivePod {
            uid: pod.uid.clone(),
            epoch: pod.epoch,
        },
        known: observed.known.clone(),
        directives: directives(agent, status),
    })
}

/// What a pod of this Agent is to do.
pub(super) fn directives(agent: &Agent, status: &AgentStatus) -> Directives {
    let open = requests::open(agent, status);
    Directives {
        suspend: agent.spec.suspend,
        wake: open.wake,
        resume: open.resume,
        // What limits it is the ledger's to say: without one, nothing does.
        // Decided by the ledger, which `PodSessions` asks.
        budget: None,
        // Decided by the reconciler of Sensors, likewise.
        sensors: None,
        wake_events: None,
        // Who reads is the link's matter.
        readings: Vec::new(),
    }
}
