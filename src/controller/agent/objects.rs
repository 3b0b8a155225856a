//! The small objects around a pod: its volume claims, and per namespace the service account and the network policy.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, ServiceAccount, VolumeResourceRequirements,
};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement, ObjectMeta};
use kube::{Resource, ResourceExt};

use crate::api::agent::RetentionPolicy;
use crate::api::{AGENT_LABEL, Agent};
use crate::controller::runtime::names;
use crate::controller::runtime::shared_objects::{shared_labels, shared_meta};
use crate::link::pod::SERVICE_ACCOUNT;

/// Labels of every object of one Agent.
pub(super) fn labels(agent: &Agent) -> BTreeMap<String, String> {
    let name = agent.name_any();
    let mut labels = shared_labels();
    labels.insert("app.kubernetes.io/name".into(), "agent".into());
    labels.insert("app.kubernetes.io/instance".into(), name.clone());
    labels.insert(AGENT_LABEL.into(), name);
    labels
}

/// The claim of the state volume.
pub(super) fn claim(agent: &Agent) -> PersistentVolumeClaim {
    let storage = &agent.spec.storage;
    let name = names::claim(&agent.name_any());
    let mut claim = claim_of(agent, name, &storage.size, storage.storage_class_name.as_deref());
    if let Some(spec) = &mut claim.spec {
        let access_mode: &'static str = storage.access_mode.into();
        spec.access_modes = Some(vec![access_mode.into()]);
    }
    claim
}

/// The claim of the workspace; `None` without a workspace, or if the user provides the claim.
pub(super) fn workspace_claim(agent: &Agent) -> Option<PersistentVolumeClaim> {
    let workspace = agent.spec.workspace.as_ref()?;
    if workspace.claim_name.is_some() {
        return None;
    }
    let name = names::workspace_claim(&agent.name_any());
    let class = workspace.storage_class_name.as_deref();
    Some(claim_of(agent, name, workspace.size(), class))
}

/// A volume claim. The Agent owns it, so that it is deleted with the Agent, only with `retentionPolicy: Delete`.
fn claim_of(agent: &Agent, name: String, size: &str, class: Option<&str>) -> PersistentVolumeClaim {
    let owned = agent.spec.storage.retention_policy == RetentionPolicy::Delete;
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: agent.namespace(),
            labels: Some(labels(agent)),
            owner_references: owned.then(|| agent.controller_owner_ref(&()).into_iter().collect()),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".into()]),
            storage_class_name: class.map(Into::into),
            resources: Some(VolumeResourceRequirements {
                requests: Some(BTreeMap::from([("storage".into(), Quantity(size.into()))])),
                ..VolumeResourceRequirements::default()
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        ..PersistentVolumeClaim::default()
    }
}

/// The service account of agent pods: without permissions and without a token.
pub(super) fn service_account(namespace: &str) -> ServiceAccount {
    ServiceAccount {
        metadata: shared_meta(namespace, SERVICE_ACCOUNT),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}

/// Admits no connection to agent pods: they listen on no port, so only a sidecar that a user adds can need one, and policies
/// add up.
pub(super) fn network_policy(namespace: &str) -> NetworkPolicy {
    let of_an_agent = LabelSelectorRequirement {
        key: AGENT_LABEL.into(),
        operator: "Exists".into(),
        values: None,
    };
    NetworkPolicy {
        metadata: shared_meta(namespace, SERVICE_ACCOUNT),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(LabelSelector {
                match_expressions: Some(vec![of_an_agent]),
                ..LabelSelector::default()
            }),
            policy_types: Some(vec!["Ingress".into()]),
            // Applied as an empty list, so that rules that others add are removed.
            ingress: Some(Vec::new()),
            egress: None,
        }),
    }
}
