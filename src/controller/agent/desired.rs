//! Computes the plan of a reconcile: everything that it changes outside the status. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use super::apply::PodObstacle;
use super::claims::{ClaimState, VolumeClaim};
use super::context::ReconcilerSettings;
use super::intent::{Intent, ReplaceReason};
use super::manifest;
use super::observe::{NodeState, ObservedAgent};
use super::reconcile_state::AgentReconcileState;
use super::requests;
use super::validate::{AgentReferences, InvalidAgent, reported_budget_problem, validate};
use super::{gateway_loop_detection, liveness};
use crate::api::failure::CallFailure;
use crate::api::{Agent, AgentStatus};
use crate::controller::pod_sessions::LivePod;
use crate::controller::runtime::pod_state::PodReason;
use crate::link::messages::{Directives, LoopTotals};
use crate::link::sensor_messages::SensorReport;

/// The action on the pod.
#[derive(Debug, PartialEq)]
pub(super) enum PodStep {
    Nothing,
    /// Create this pod.
    Create(Box<Pod>),
    /// Delete the pod with this UID.
    Delete {
        /// Precondition of the deletion.
        uid: String,
        /// Grace period 0: its node is gone, so nothing there could confirm the termination.
        force: bool,
    },
}

/// The pod that may attach to the link, with its directives.
#[derive(Debug, PartialEq)]
pub(super) struct LinkGrant {
    pub(super) pod: LivePod,
    /// Totals of the loop, so that a new pod continues from them.
    pub(super) known: LoopTotals,
    pub(super) directives: Directives,
}

/// The plan of a reconcile.
#[derive(Debug)]
pub(super) struct ReconcilePlan<'a> {
    /// Whether the spec, what it refers to and its limits permit a loop.
    pub(super) verdict: Result<(), InvalidAgent>,
    /// What the pod reported about Sensors, to pass on.
    pub(super) reported: Option<&'a [SensorReport]>,
    /// Why the gateway must make no calls; `None`: it may.
    pub(super) block: Option<CallFailure>,
    /// No contact with the running pod for the whole run lease.
    pub(super) silent: bool,
    pub(super) pod: PodStep,
    /// The claims to create.
    pub(super) claims: Vec<PersistentVolumeClaim>,
    /// What prevents the pod from being created or from starting.
    pub(super) obstacle: Option<PodObstacle>,
    /// The pod that may attach; `None`: no pod.
    pub(super) voice: Option<LinkGrant>,
}

/// Computes the plan from what was observed. `status` is the one last written, `memory` that of the Agent.
pub(super) fn desired<'a>(
    agent: &Agent,
    status: &AgentStatus,
    observed: &'a ObservedAgent,
    memory: &AgentReconcileState,
    settings: &ReconcilerSettings,
    now: Timestamp,
) -> ReconcilePlan<'a> {
    let verdict = verdict(agent, status, observed, settings);
    let voice = link_grant(agent, status, observed);
    let report = observed.heard.as_ref().and_then(|heard| heard.report.loop_.as_ref());
    let recorded = status.r#loop.as_ref().map_or(0, |status| status.epoch);
    let epoch = recorded.max(memory.epoch) + 1;
    let obstacle = observed.claims.iter().find_map(claim_obstacle);
    let pod = match (&obstacle, observed.intent, &observed.pod) {
        (Some(_), Intent::Create, _) => PodStep::Nothing,
        // The pod has no node yet. Delete it before it starts on the claim of another Agent.
        (Some(_), Intent::Keep | Intent::KeepOutdated(_), Some(pod)) => PodStep::Delete {
            uid: pod.uid.clone(),
            force: false,
        },
        _ => pod_step(agent, epoch, observed, verdict.is_ok(), settings),
    };
    // Claims are created together with their pod, or for a pod that already waits for them, and never for no pod.
    let wanted = matches!(pod, PodStep::Create(_)) || matches!(pod, PodStep::Nothing) && observed.pod.is_some();
    let absent = observed
        .claims
        .iter()
        .filter(|claim| claim.standing == ClaimState::Absent);
    ReconcilePlan {
        reported: report.map(|report| report.sensors.as_slice()),
        block: gateway_loop_detection::call_block(agent, observed.finding.as_ref()),
        silent: voice.is_some() && is_silent(observed, memory, now),
        verdict,
        claims: if wanted && obstacle.is_none() {
            absent.map(|claim| claim.wanted.clone()).collect()
        } else {
            Vec::new()
        },
        pod,
        obstacle,
        voice,
    }
}

fn verdict(
    agent: &Agent,
    status: &AgentStatus,
    observed: &ObservedAgent,
    settings: &ReconcilerSettings,
) -> Result<(), InvalidAgent> {
    let none = AgentReferences::default();
    validate(agent, observed.references.as_ref().unwrap_or(&none), settings)?;
    match &observed.limits {
        Some(limits) => limits.obstacle.clone().map_or(Ok(()), |obstacle| Err(obstacle.into())),
        None => reported_budget_problem(status).map_or(Ok(()), Err),
    }
}

/// Whether the running pod has been silent for the whole run lease. The silence of a new pod is measured from its grant.
fn is_silent(observed: &ObservedAgent, memory: &AgentReconcileState, now: Timestamp) -> bool {
    let running = observed.pod.as_ref().filter(|pod| pod.reason == PodReason::Running);
    let listening = memory.listening.as_ref();
    listening.is_some_and(|(uid, since)| {
        running.is_some_and(|pod| pod.uid == *uid) && liveness::is_silent(observed.last_contact, *since, now)
    })
}

/// The obstacle that a claim is to the pod, if it must not be used.
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
        // A running loop is not stopped for a spec that cannot run.
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

/// The Agent's own pod may attach as long as its object exists: a terminating pod still sends its final totals.
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

/// The directives for a pod of this Agent that follow from its spec and annotations.
pub(super) fn directives(agent: &Agent, status: &AgentStatus) -> Directives {
    let open = requests::open(agent, status);
    Directives {
        suspend: agent.spec.suspend,
        wake: open.wake,
        resume: open.resume,
        // Added by `PodSessions`, from the ledger.
        budget: None,
        // Added by `PodSessions`, from the registry of Sensors.
        sensors: None,
        wake_events: None,
        // Added by the link, which knows the subscribers.
        readings: Vec::new(),
    }
}
