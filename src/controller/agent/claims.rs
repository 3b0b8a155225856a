//! The volume claims of an Agent: which ones it needs, and whether an existing one may be used. Pure.
//!
//! A claim outlives its Agent by seconds, or for good. An Agent that is recreated under the same name must neither start on a
//! claim that is about to be deleted nor read the journal of another. The permission to write Agents gives no access to
//! the data of the namespace: a claim that the controller did not create is mounted only if its labels say so.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;

use super::objects;
use crate::api::agent::RetentionPolicy;
use crate::api::{AGENT_LABEL, Agent, SENSOR_LABEL, WORKSPACE_LABEL};
use crate::controller::runtime::names;

/// Whether a claim may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClaimState {
    /// It does not exist.
    Absent,
    /// It belongs to this Agent.
    Ours,
    /// It is or will be deleted: it belongs to an earlier Agent with this name.
    Ending,
    /// It belongs to another object.
    Foreign,
}

/// Why the claim in `spec.workspace.claimName` cannot be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WorkspaceProblem {
    /// It is being deleted, or holds a journal or an outbox; in words that follow its name.
    InUse(String),
    /// It does not have [`WORKSPACE_LABEL`].
    NotLabelled,
}

/// A claim that an Agent needs, and the state of the existing object with its name.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct VolumeClaim {
    /// The claim to create.
    pub(super) wanted: PersistentVolumeClaim,
    pub(super) standing: ClaimState,
}

impl VolumeClaim {
    pub(super) fn name(&self) -> String {
        self.wanted.name_any()
    }
}

/// The claims that must exist before the pod can start.
pub(super) fn wanted(agent: &Agent) -> Vec<PersistentVolumeClaim> {
    let state = (!agent.spec.storage.ephemeral).then(|| objects::claim(agent));
    state.into_iter().chain(objects::workspace_claim(agent)).collect()
}

/// Whether an existing claim may be used by this Agent.
pub(super) fn judge(claim: &impl ResourceExt, agent: &Agent) -> ClaimState {
    if claim.meta().deletion_timestamp.is_some() {
        return ClaimState::Ending;
    }
    let owners = claim.owner_references();
    let name = agent.name_any();
    if owners.is_empty() {
        // A retained claim has no owner. Its label distinguishes it from a claim of another workload with the same name.
        let retains = agent.spec.storage.retention_policy == RetentionPolicy::Retain;
        let labelled = claim.labels().get(AGENT_LABEL) == Some(&name);
        return if retains && labelled {
            ClaimState::Ours
        } else {
            ClaimState::Foreign
        };
    }
    let uid = agent.metadata.uid.as_deref().unwrap_or_default();
    if owners.iter().any(|owner| owner.uid == uid) {
        return ClaimState::Ours;
    }
    if owners.iter().all(|owner| owner.kind == "Agent" && owner.name == name) {
        ClaimState::Ending
    } else {
        ClaimState::Foreign
    }
}

/// What keeps the claim in `spec.workspace.claimName` from being mounted; `None`: nothing.
pub(super) fn workspace_problem(claim: &impl ResourceExt, agent: &Agent) -> Option<WorkspaceProblem> {
    if claim.meta().deletion_timestamp.is_some() {
        return Some(WorkspaceProblem::InUse("is being deleted".into()));
    }
    let name = agent.name_any();
    let labels = claim.labels();
    let made_for = labels.get(AGENT_LABEL);
    if claim.name_any() == names::workspace_claim(&name) && made_for == Some(&name) {
        return None;
    }
    if let Some(agent) = made_for {
        return Some(WorkspaceProblem::InUse(format!("was created for Agent {agent}")));
    }
    if let Some(sensor) = labels.get(SENSOR_LABEL) {
        return Some(WorkspaceProblem::InUse(format!("was created for Sensor {sensor}")));
    }
    let labelled = labels.get(WORKSPACE_LABEL).is_some_and(|value| value == "true");
    (!labelled).then_some(WorkspaceProblem::NotLabelled)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn agent(retention: &str) -> Agent {
        serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "a", "namespace": "n", "uid": "mine"},
            "spec": {
                "instructions": "i", "model": {"api": "Scripted", "name": "m"},
                "storage": {"retentionPolicy": retention},
            },
        }))
        .unwrap()
    }

    fn claim(metadata: &Value) -> PersistentVolumeClaim {
        let mut whole = json!({"name": "a-state"});
        for (key, value) in metadata.as_object().unwrap() {
            whole[key] = value.clone();
        }
        serde_json::from_value(json!({"metadata": whole})).unwrap()
    }

    fn owner(kind: &str, name: &str, uid: &str) -> Value {
        json!([{"apiVersion": "v1", "kind": kind, "name": name, "uid": uid}])
    }

    #[rstest]
    #[case::made_for_this_one(json!({"ownerReferences": owner("Agent", "a", "mine")}), ClaimState::Ours, ClaimState::Ours)]
    #[case::of_an_earlier_one(json!({"ownerReferences": owner("Agent", "a", "old")}), ClaimState::Ending, ClaimState::Ending)]
    #[case::of_another_one(json!({"ownerReferences": owner("Agent", "b", "b")}), ClaimState::Foreign, ClaimState::Foreign)]
    #[case::of_a_set(json!({"ownerReferences": owner("StatefulSet", "a", "s")}), ClaimState::Foreign, ClaimState::Foreign)]
    #[case::retained(json!({"labels": {"agentloop.dev/agent": "a"}}), ClaimState::Foreign, ClaimState::Ours)]
    #[case::retained_by_another(json!({"labels": {"agentloop.dev/agent": "b"}}), ClaimState::Foreign, ClaimState::Foreign)]
    #[case::of_an_unknown_workload(json!({}), ClaimState::Foreign, ClaimState::Foreign)]
    #[case::terminating(
        json!({"ownerReferences": owner("Agent", "a", "mine"), "deletionTimestamp": "2026-01-01T00:00:00Z"}),
        ClaimState::Ending,
        ClaimState::Ending
    )]
    fn only_a_claim_of_this_very_agent_or_a_retained_one_is_used(
        #[case] metadata: Value,
        #[case] deleted: ClaimState,
        #[case] retained: ClaimState,
    ) {
        assert_eq!(judge(&claim(&metadata), &agent("Delete")), deleted);
        assert_eq!(judge(&claim(&metadata), &agent("Retain")), retained);
    }

    fn in_use(words: &str) -> WorkspaceProblem {
        WorkspaceProblem::InUse(words.into())
    }

    #[rstest]
    #[case::labelled(json!({"labels": {"agentloop.dev/workspace": "true"}}), None)]
    #[case::labelled_and_owned(
        json!({"labels": {"agentloop.dev/workspace": "true"}, "ownerReferences": owner("StatefulSet", "files", "u")}),
        None
    )]
    #[case::own_workspace(json!({"name": "a-workspace", "labels": {"agentloop.dev/agent": "a"}}), None)]
    #[case::plain(json!({"name": "files"}), Some(WorkspaceProblem::NotLabelled))]
    #[case::labelled_otherwise(json!({"labels": {"agentloop.dev/workspace": "false"}}), Some(WorkspaceProblem::NotLabelled))]
    #[case::own_name_without_label(json!({"name": "a-workspace"}), Some(WorkspaceProblem::NotLabelled))]
    #[case::of_a_set(json!({"name": "data-db-0", "labels": {"app": "db"}}), Some(WorkspaceProblem::NotLabelled))]
    #[case::journal(
        json!({"labels": {"agentloop.dev/agent": "b", "agentloop.dev/workspace": "true"}}),
        Some(in_use("was created for Agent b"))
    )]
    #[case::own_journal(json!({"labels": {"agentloop.dev/agent": "a"}}), Some(in_use("was created for Agent a")))]
    #[case::outbox(
        json!({"labels": {"agentloop.dev/sensor": "s", "agentloop.dev/workspace": "true"}}),
        Some(in_use("was created for Sensor s"))
    )]
    #[case::ending(
        json!({"labels": {"agentloop.dev/workspace": "true"}, "deletionTimestamp": "2026-01-01T00:00:00Z"}),
        Some(in_use("is being deleted"))
    )]
    fn a_workspace_is_a_claim_with_the_label_or_the_agents_own(
        #[case] metadata: Value,
        #[case] problem: Option<WorkspaceProblem>,
    ) {
        assert_eq!(workspace_problem(&claim(&metadata), &agent("Delete")), problem);
    }
}
