//! Which objects must be read from the API server, given the intent. Pure.
//!
//! Most reconciles need none. The intent follows from the snapshot alone, so it is decided between the two halves of the
//! observation: the reads are named here as data, and [`observe`](super::observe) makes them all at once.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;

use super::claims;
use super::intent::Intent;
use super::snapshot::AgentSnapshot;
use crate::api::Agent;
use crate::controller::runtime::pod_state::{PodReason, PodState};

/// The reads of one reconcile.
#[derive(Debug, Default, PartialEq)]
pub(super) struct NeededReads {
    /// Whether the references of the spec are read.
    pub(super) references: bool,
    /// The claims to look up.
    pub(super) claims: Vec<PersistentVolumeClaim>,
    /// The name of the node of an overdue pod.
    pub(super) node: Option<String>,
}

pub(super) fn needed(agent: &Agent, intent: Intent, snapshot: &AgentSnapshot) -> NeededReads {
    let node = || snapshot.pod.as_ref()?.node.clone();
    NeededReads {
        references: needs_references(agent, intent, snapshot),
        claims: claims_to_check(agent, intent, snapshot),
        node: matches!(intent, Intent::Ending { overdue: true, .. })
            .then(node)
            .flatten(),
    }
}

/// References are read when a pod is about to be created from them, and once per generation of a spec that is not
/// applied yet.
fn needs_references(agent: &Agent, intent: Intent, snapshot: &AgentSnapshot) -> bool {
    let unseen = snapshot.memory.accepted_generation != agent.metadata.generation;
    match intent {
        Intent::Create | Intent::Replace(_) => true,
        Intent::KeepOutdated(_) | Intent::CreateLater(_) | Intent::Ending { rest: None, .. } => unseen,
        Intent::Keep
        | Intent::AwaitStop(_)
        | Intent::RecordOutcome
        | Intent::Remove(_)
        | Intent::Rest(_)
        | Intent::Ending { rest: Some(_), .. } => false,
    }
}

/// Claims are read before a pod is created, and while a pod waits for a node, because one may have been deleted since.
fn claims_to_check(agent: &Agent, intent: Intent, snapshot: &AgentSnapshot) -> Vec<PersistentVolumeClaim> {
    let wanted = claims::wanted(agent);
    if intent == Intent::Create {
        return wanted;
    }
    let ours = |pod: &&PodState| pod.owner == agent.metadata.uid && !pod.ending() && !pod.ended;
    let Some(waiting) = snapshot.pod.as_ref().filter(ours).filter(|pod| pod.node.is_none()) else {
        return Vec::new();
    };
    if waiting.reason == PodReason::Unschedulable {
        return wanted;
    }
    let known = &snapshot.memory.known_claims;
    let unknown = |claim: &PersistentVolumeClaim| !known.contains(&claim.name_any());
    wanted.into_iter().filter(unknown).collect()
}
