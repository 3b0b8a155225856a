//! Step three: what there should be. Pure.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use super::context::Settings;
use super::intent::{Intent, Replace};
use super::memory::Remembered;
use super::observe::{NodeState, Observed};
use super::requests;
use super::validate::Invalid;
use super::{manifest, objects};
use crate::api::{Agent, AgentStatus};
use crate::controller::loops::LivePod;
use crate::link::messages::{Directives, Known};

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
pub(super) struct Voice {
    /// The pod.
    pub(super) pod: LivePod,
    /// What is known of its loop.
    pub(super) known: Known,
    /// What it is to do.
    pub(super) directives: Directives,
}

/// All that is to be done.
#[derive(Debug, PartialEq)]
pub(super) struct Plan {
    /// With the pod.
    pub(super) pod: PodStep,
    /// The claims that must exist, of which that is not known yet.
    pub(super) claims: Vec<PersistentVolumeClaim>,
    /// Who may speak; `None`: nobody.
    pub(super) voice: Option<Voice>,
}

/// What should be, given what is.
pub(super) fn desired(
    agent: &Agent,
    status: &AgentStatus,
    observed: &Observed,
    verdict: &Result<(), Invalid>,
    memory: &Remembered,
    settings: &Settings,
) -> Plan {
    let recorded = status.r#loop.as_ref().map_or(0, |status| status.epoch);
    let epoch = recorded.max(memory.epoch) + 1;
    let pod = pod_step(agent, epoch, observed, verdict.is_ok(), settings);
    let creating = matches!(pod, PodStep::Create(_));
    let waiting = observed
        .pod
        .as_ref()
        .is_some_and(|pod| pod.node.is_none() && !pod.ending());
    Plan {
        pod,
        claims: if creating || waiting {
            claims(agent, memory)
        } else {
            Vec::new()
        },
        voice: voice(agent, status, observed),
    }
}

fn claims(agent: &Agent, memory: &Remembered) -> Vec<PersistentVolumeClaim> {
    let state = (!agent.spec.storage.ephemeral).then(|| objects::claim(agent));
    let unknown = |claim: &PersistentVolumeClaim| {
        let name = claim.metadata.name.as_ref();
        name.is_some_and(|name| !memory.known_claims.contains(name))
    };
    let claims = state.into_iter().chain(objects::workspace_claim(agent));
    claims.filter(unknown).collect()
}

fn pod_step(agent: &Agent, epoch: i64, observed: &Observed, valid: bool, settings: &Settings) -> PodStep {
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
        Intent::Replace(Replace::Outdated) if valid => delete(false),
        Intent::Replace(Replace::Stopped | Replace::Ended | Replace::Foreign) | Intent::Remove(_) => delete(false),
        Intent::Ending { overdue: true, .. } if matches!(observed.node, Some(NodeState::Gone | NodeState::Spent)) => {
            delete(true)
        }
        Intent::Create
        | Intent::CreateLater(_)
        | Intent::Keep
        | Intent::KeepOutdated(_)
        | Intent::Replace(Replace::Outdated)
        | Intent::AwaitStop(_)
        | Intent::RecordOutcome
        | Intent::Rest(_)
        | Intent::Ending { .. } => PodStep::Nothing,
    }
}

/// The Agent's own pod may speak as long as its object exists: an ending one still has its last totals to say.
fn voice(agent: &Agent, status: &AgentStatus, observed: &Observed) -> Option<Voice> {
    let pod = observed.pod.as_ref()?;
    if pod.owner.as_deref() != agent.metadata.uid.as_deref() || pod.ended {
        return None;
    }
    Some(Voice {
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
        // Decided by the ledger, which `Loops` asks.
        budget: None,
        // Decided by the reconciler of Sensors, likewise.
        sensors: None,
        // Who reads is the link's matter.
        readings: Vec::new(),
    }
}
