//! The volume claims of an Agent: which there must be, and whether one of that name may be used. Pure.
//!
//! A claim outlives the Agent it was made for by seconds, or for good. An Agent made again under the same name must neither
//! start on a claim that is about to be deleted nor read the journal of another.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;

use super::objects;
use crate::api::agent::RetentionPolicy;
use crate::api::{AGENT_LABEL, Agent, SENSOR_LABEL};

/// Whether a claim may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClaimState {
    /// There is none of that name.
    Absent,
    /// It belongs to this Agent.
    Ours,
    /// It is being deleted, or is about to be: it belongs to an earlier Agent of this name.
    Ending,
    /// It belongs to something else.
    Foreign,
}

/// A claim that an Agent needs, and what was found under its name.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct VolumeClaim {
    /// As it is to be made.
    pub(super) wanted: PersistentVolumeClaim,
    /// What there is.
    pub(super) standing: ClaimState,
}

impl VolumeClaim {
    /// Its name.
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
    if owners.is_empty() {
        // A claim that is kept has no owner: this Agent's, or that of an earlier one which it goes on from.
        return match agent.spec.storage.retention_policy {
            RetentionPolicy::Retain => ClaimState::Ours,
            RetentionPolicy::Delete => ClaimState::Foreign,
        };
    }
    let uid = agent.metadata.uid.as_deref().unwrap_or_default();
    if owners.iter().any(|owner| owner.uid == uid) {
        return ClaimState::Ours;
    }
    let name = agent.name_any();
    if owners.iter().all(|owner| owner.kind == "Agent" && owner.name == name) {
        ClaimState::Ending
    } else {
        ClaimState::Foreign
    }
}

/// What keeps a claim that `spec.workspace.claimName` names from being a workspace, in words; `None`: it may be one.
///
/// The claims of other Agents hold journals, those of a `StatefulSet` a database: neither is handed to an Agent because
/// somebody may write Agents.
pub(super) fn workspace_problem(claim: &impl ResourceExt, agent: &Agent) -> Option<String> {
    if claim.meta().deletion_timestamp.is_some() {
        return Some("is being deleted".into());
    }
    let name = agent.name_any();
    let own_workspace = claim.name_any() == super::names::workspace_claim(&name);
    let labels = claim.labels();
    if let Some(made_for) = labels.get(AGENT_LABEL)
        && !(own_workspace && *made_for == name)
    {
        return Some(format!("was made for Agent {made_for}"));
    }
    if let Some(made_for) = labels.get(SENSOR_LABEL) {
        return Some(format!("was made for Sensor {made_for}"));
    }
    let uid = agent.metadata.uid.as_deref().unwrap_or_default();
    let owners = claim.owner_references().iter();
    let mut others = owners.filter(|owner| owner.uid != uid);
    others
        .find(|owner| ["Agent", "Sensor", "StatefulSet"].contains(&owner.kind.as_str()))
        .map(|owner| format!("belongs to {} {}", owner.kind, owner.name))
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
    #[case::retained(json!({}), ClaimState::Foreign, ClaimState::Ours)]
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

    #[rstest]
    #[case::plain(json!({"name": "files"}), None)]
    #[case::of_some_release(json!({"name": "files", "ownerReferences": owner("Application", "x", "u")}), None)]
    #[case::journal(json!({"labels": {"agentloop.dev/agent": "b"}}), Some("was made for Agent b"))]
    #[case::own_journal(json!({"labels": {"agentloop.dev/agent": "a"}}), Some("was made for Agent a"))]
    #[case::own_workspace(json!({"name": "a-workspace", "labels": {"agentloop.dev/agent": "a"}}), None)]
    #[case::outbox(json!({"labels": {"agentloop.dev/sensor": "s"}}), Some("was made for Sensor s"))]
    #[case::database(json!({"ownerReferences": owner("StatefulSet", "db", "u")}), Some("belongs to StatefulSet db"))]
    #[case::going(json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), Some("is being deleted"))]
    fn a_workspace_is_no_claim_of_an_agent_a_sensor_or_a_set(#[case] metadata: Value, #[case] words: Option<&str>) {
        assert_eq!(workspace_problem(&claim(&metadata), &agent("Delete")).as_deref(), words);
    }
}
