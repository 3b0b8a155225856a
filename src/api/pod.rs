//! Where a loop runs: its storage and the safe subset of pod settings.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, LocalObjectReference, ResourceRequirements, Toleration, TopologySpreadConstraint,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{self, DNS_SUBDOMAIN};

/// Where the loop keeps its journal and the gateway its records.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.size == oldSelf.size",
    "message": "spec.storage.size is immutable, as the volume claim's is: make a new Agent",
}, {
    "rule": "has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
    "message": "spec.storage.storageClassName is immutable, as the volume claim's is: make a new Agent",
}, {
    "rule": "self.accessMode == oldSelf.accessMode",
    "message": "spec.storage.accessMode is immutable, as the volume claim's is: make a new Agent",
}, {
    "rule": "self.ephemeral == oldSelf.ephemeral",
    "message": "spec.storage.ephemeral is immutable: the state would be lost; make a new Agent",
}, {
    "rule": "self.retentionPolicy == oldSelf.retentionPolicy",
    "message": "spec.storage.retentionPolicy is immutable, as it is written into the volume claim when that is made: make a new Agent",
}]))]
pub struct Storage {
    /// Size of the volume, as a Kubernetes quantity from 16Mi to 16Ti. Immutable.
    #[schemars(length(min = 1, max = 32), extend("x-kubernetes-validations" = [{
        "rule": "isQuantity(self) && quantity(self).compareTo(quantity('16Mi')) >= 0 && quantity(self).compareTo(quantity('16Ti')) <= 0",
        "message": "spec.storage.size must be a quantity from 16Mi to 16Ti, such as 1Gi",
    }]))]
    pub size: String,
    /// Storage class of the claim. Absent: the cluster's default; empty: only volumes without a class. Immutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253), regex(pattern = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"))]
    pub storage_class_name: Option<String>,
    /// Access mode of the claim. `ReadWriteOnce`: one node at a time. `ReadWriteOncePod`: one pod at a time; needs a CSI
    /// driver. Immutable.
    pub access_mode: AccessMode,
    /// What happens to the claim when the Agent is deleted. `Delete`: it goes with the Agent. `Retain`: it stays, and an
    /// Agent made again under the same name goes on where it stood. Immutable.
    pub retention_policy: RetentionPolicy,
    /// True: no claim; the state dies with the pod. Immutable.
    pub ephemeral: bool,
}

impl Default for Storage {
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
    /// One pod at a time; needs a CSI driver.
    ReadWriteOncePod,
}

/// What happens to the claim when the Agent is deleted.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetentionPolicy {
    /// The claim goes with the Agent.
    Delete,
    /// The claim stays; an Agent made again under the same name goes on where it stood.
    Retain,
}

/// A safe subset of pod settings.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSettings {
    /// Resources of the worker container. Requests and limits of the gateway are fixed by the chart.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::resources)]
    pub resources: Option<ResourceRequirements>,
    /// Labels a node must have; at most 32.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = bounds::labels)]
    pub node_selector: BTreeMap<String, String>,
    /// Taints tolerated; at most 32.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub tolerations: Vec<Toleration>,
    /// Scheduling affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Spreading over topology domains; at most 8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Runtime class, such as gVisor's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub runtime_class_name: Option<String>,
    /// Priority class.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub priority_class_name: Option<String>,
    /// Secrets for pulling the image; at most 8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Labels added to the pod; keys under `agentloop.dev/` and `app.kubernetes.io/` are refused.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = bounds::labels, extend("x-kubernetes-validations" = [{
        "rule": "self.all(key, !key.startsWith('agentloop.dev/') && !key.startsWith('app.kubernetes.io/'))",
        "message": "spec.pod.labels must not set keys under agentloop.dev/ or app.kubernetes.io/: the controller sets those; use a prefix of your own",
    }, {
        "rule": "self.all(key, key.matches('^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))",
        "message": "spec.pod.labels has a key that is no label key: use [prefix/]name with letters, digits, '-', '_' and '.', the name at most 63 characters",
    }]))]
    pub labels: BTreeMap<String, String>,
    /// Annotations added to the pod; keys under `agentloop.dev/` are refused.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = bounds::annotations, extend("x-kubernetes-validations" = [{
        "rule": "self.all(key, !key.startsWith('agentloop.dev/'))",
        "message": "spec.pod.annotations must not set keys under agentloop.dev/: the controller sets those; use a prefix of your own",
    }, {
        "rule": "self.all(key, !key.startsWith('container.apparmor.security.beta.kubernetes.io/') && !key.startsWith('seccomp.security.alpha.kubernetes.io/') && !key.startsWith('container.seccomp.security.alpha.kubernetes.io/'))",
        "message": "spec.pod.annotations must not change AppArmor or seccomp: agent pods always keep the restricted profile; remove the key",
    }, {
        "rule": "self.all(key, key.matches('^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))",
        "message": "spec.pod.annotations has a key that is no annotation key: use [prefix/]name with letters, digits, '-', '_' and '.', the name at most 63 characters",
    }]))]
    pub annotations: BTreeMap<String, String>,
    /// When a changed spec replaces a running pod. `WhenIdle`: when the loop sleeps, is paused or stopped, never in the
    /// middle of a turn. `Immediate`: at once; the call in flight is finished or cancelled within the drain time.
    /// `OnDelete`: only when somebody deletes the pod. A new controller version alone replaces nothing.
    pub update_strategy: UpdateStrategy,
}

/// When a running pod is replaced by one of the new spec.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// When the loop sleeps, is paused or stopped: never in the middle of a turn. A controller upgrade alone replaces nothing.
    #[default]
    WhenIdle,
    /// At once; the call in flight is finished or cancelled within the drain time.
    Immediate,
    /// Only when somebody deletes the pod.
    OnDelete,
}
