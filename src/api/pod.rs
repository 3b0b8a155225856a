//! Where a loop runs: its storage and the safe subset of pod settings.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, LocalObjectReference, ResourceRequirements, Toleration, TopologySpreadConstraint,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{self, DNS_SUBDOMAIN};

/// Storage of the loop's journal and the gateway's call store.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.size == oldSelf.size",
    "message": "spec.storage.size is immutable: create a new Agent",
}, {
    "rule": "has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
    "message": "spec.storage.storageClassName is immutable: create a new Agent",
}, {
    "rule": "self.accessMode == oldSelf.accessMode",
    "message": "spec.storage.accessMode is immutable: create a new Agent",
}, {
    "rule": "self.ephemeral == oldSelf.ephemeral",
    "message": "spec.storage.ephemeral is immutable: create a new Agent",
}, {
    "rule": "self.retentionPolicy == oldSelf.retentionPolicy",
    "message": "spec.storage.retentionPolicy is immutable: create a new Agent",
}]))]
pub struct AgentStorage {
    /// Size of the volume, a Kubernetes quantity from 16Mi to 16Ti. Defaults to 1Gi. Immutable.
    #[schemars(length(min = 1, max = 32), extend("x-kubernetes-validations" = [{
        "rule": "isQuantity(self) && quantity(self).compareTo(quantity('16Mi')) >= 0 && quantity(self).compareTo(quantity('16Ti')) <= 0",
        "message": "spec.storage.size must be a quantity from 16Mi to 16Ti, such as 1Gi",
    }]))]
    pub size: String,
    /// Storage class of the volume claim. Absent: the cluster's default; empty: only volumes without a class.
    /// Immutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253), regex(pattern = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"))]
    pub storage_class_name: Option<String>,
    /// Access mode of the volume claim. `ReadWriteOnce`, the default: one node at a time. `ReadWriteOncePod`: one pod
    /// at a time; requires a CSI driver. Immutable.
    pub access_mode: AccessMode,
    /// What happens to the volume claim when the Agent is deleted. `Delete`, the default: it is deleted too. `Retain`:
    /// it is kept with its label `agentloop.dev/agent`, and an Agent recreated under the same name resumes from it.
    /// Immutable.
    pub retention_policy: RetentionPolicy,
    /// If true, no volume claim is created and the state is lost with the pod. Defaults to false. Immutable.
    pub ephemeral: bool,
}

impl Default for AgentStorage {
    fn default() -> Self {
        Self {
            size: "1Gi".into(),
            storage_class_name: None,
            access_mode: AccessMode::ReadWriteOnce,
            retention_policy: RetentionPolicy::Delete,
            ephemeral: false,
        }
    }
}

/// Access mode of the volume claim.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
pub enum AccessMode {
    /// One node at a time.
    ReadWriteOnce,
    /// One pod at a time; requires a CSI driver.
    ReadWriteOncePod,
}

/// What happens to the volume claim when the Agent is deleted.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetentionPolicy {
    /// The claim is deleted with the Agent.
    Delete,
    /// The claim is kept; an Agent recreated under the same name resumes from it.
    Retain,
}

/// A safe subset of pod settings.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSettings {
    /// Resources of the worker container. Requests and limits of the gateway are set by the chart.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::resources)]
    pub resources: Option<ResourceRequirements>,
    /// Labels that a node must have, at most 32.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = bounds::labels)]
    pub node_selector: BTreeMap<String, String>,
    /// Tolerations, at most 32.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub tolerations: Vec<Toleration>,
    /// Scheduling affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Topology spread constraints, at most 8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Name of the runtime class, such as one for Kata Containers. Built-in tools do not run under gVisor.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub runtime_class_name: Option<String>,
    /// Name of the priority class.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub priority_class_name: Option<String>,
    /// Secrets for pulling the image, at most 8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Labels added to the pod, at most 32. Keys under `agentloop.dev/` and `app.kubernetes.io/` are rejected.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = bounds::labels, extend("x-kubernetes-validations" = [{
        "rule": "self.all(key, !key.startsWith('agentloop.dev/') && !key.startsWith('app.kubernetes.io/'))",
        "message": "spec.pod.labels must not set keys under agentloop.dev/ or app.kubernetes.io/: they are reserved for the controller; use another prefix",
    }, {
        "rule": "self.all(key, key.matches('^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))",
        "message": "spec.pod.labels has an invalid key: use [prefix/]name with letters, digits, '-', '_' and '.', the name at most 63 characters",
    }]))]
    pub labels: BTreeMap<String, String>,
    /// Annotations added to the pod, at most 32. Keys under `agentloop.dev/` are rejected.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = bounds::annotations, extend("x-kubernetes-validations" = [{
        "rule": "self.all(key, !key.startsWith('agentloop.dev/'))",
        "message": "spec.pod.annotations must not set keys under agentloop.dev/: they are reserved for the controller; use another prefix",
    }, {
        "rule": "self.all(key, !key.startsWith('container.apparmor.security.beta.kubernetes.io/') && !key.startsWith('seccomp.security.alpha.kubernetes.io/') && !key.startsWith('container.seccomp.security.alpha.kubernetes.io/'))",
        "message": "spec.pod.annotations must not change AppArmor or seccomp: agent pods always use the restricted profile; remove the key",
    }, {
        "rule": "self.all(key, key.matches('^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))",
        "message": "spec.pod.annotations has an invalid key: use [prefix/]name with letters, digits, '-', '_' and '.', the name at most 63 characters",
    }]))]
    pub annotations: BTreeMap<String, String>,
    /// When a running pod is replaced after a change of the spec. `WhenIdle`, the default: when the loop is sleeping,
    /// paused or stopped, never during a turn. `Immediate`: at once; the call in flight is finished or cancelled within
    /// the drain time. `OnDelete`: when the pod is deleted. A new controller version alone replaces a pod only with `Immediate`.
    pub update_strategy: UpdateStrategy,
}

/// When a running pod is replaced after a change of the spec.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// When the loop is sleeping, paused or stopped, never during a turn. A new controller version alone replaces no
    /// pod.
    #[default]
    WhenIdle,
    /// At once; the call in flight is finished or cancelled within the drain time.
    Immediate,
    /// When the pod is deleted.
    OnDelete,
}
