//! The small objects around a pod: its volume claims, and per namespace the service account and the CA bundle.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolumeClaim, PersistentVolumeClaimSpec, ServiceAccount, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};

use super::names;
use crate::api::agent::RetentionPolicy;
use crate::api::{AGENT_LABEL, Agent};
use crate::link::pod::{LINK_CA_CONFIGMAP, SERVICE_ACCOUNT};

/// Labels of everything made for one Agent.
pub(super) fn labels(agent: &Agent) -> BTreeMap<String, String> {
    let name = agent.name_any();
    let mut labels = shared_labels();
    labels.insert("app.kubernetes.io/name".into(), "agent".into());
    labels.insert("app.kubernetes.io/instance".into(), name.clone());
    labels.insert(AGENT_LABEL.into(), name);
    labels
}

/// Labels of what all Agents of a namespace share.
fn shared_labels() -> BTreeMap<String, String> {
    BTreeMap::from([
        ("app.kubernetes.io/part-of".into(), "agentloop".into()),
        ("app.kubernetes.io/managed-by".into(), names::MANAGER.into()),
    ])
}

/// Whether an object is one that the controller made for all pods of a namespace.
pub(super) fn is_shared(meta: &ObjectMeta) -> bool {
    let has = |(key, value): (&String, &String)| {
        meta.labels
            .as_ref()
            .is_some_and(|labels| labels.get(key) == Some(value))
    };
    shared_labels().iter().all(has) && meta.owner_references.as_deref().unwrap_or_default().is_empty()
}

/// The claim of the state.
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

/// The claim of the workspace; `None`: there is no workspace, or its claim is the user's.
pub(super) fn workspace_claim(agent: &Agent) -> Option<PersistentVolumeClaim> {
    let workspace = agent.spec.workspace.as_ref()?;
    if workspace.claim_name.is_some() {
        return None;
    }
    let name = names::workspace_claim(&agent.name_any());
    let class = workspace.storage_class_name.as_deref();
    Some(claim_of(agent, name, workspace.size(), class))
}

/// A volume claim. It goes with the Agent only when the Agent says so.
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

/// The service account of agent pods: no rights, no token.
pub(super) fn service_account(namespace: &str) -> ServiceAccount {
    ServiceAccount {
        metadata: shared_meta(namespace, SERVICE_ACCOUNT),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}

/// The CA bundle that gateways trust.
pub(super) fn ca_bundle(namespace: &str, bundle: &str) -> ConfigMap {
    ConfigMap {
        metadata: shared_meta(namespace, LINK_CA_CONFIGMAP),
        data: Some(BTreeMap::from([("ca.crt".into(), bundle.into())])),
        ..ConfigMap::default()
    }
}

fn shared_meta(namespace: &str, name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.into()),
        namespace: Some(namespace.into()),
        labels: Some(shared_labels()),
        ..ObjectMeta::default()
    }
}
