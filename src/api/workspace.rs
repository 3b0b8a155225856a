//! `spec.workspace`: the files of an Agent.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::bounds::DNS_SUBDOMAIN;

/// Size of the claim where nothing is said.
const SIZE: &str = "1Gi";

/// Files of the Agent, on a volume of their own: whoever fills it cannot fill the journal. Another pod puts files in by
/// mounting the claim; the worker only reads them, at `/workspace`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.claimName) || !has(self.size) && !has(self.storageClassName)").message(
        "spec.workspace.claimName names a claim that is there already: remove spec.workspace.size and spec.workspace.storageClassName"
    ),
    validation = Rule::new("has(self.claimName) || has(oldSelf.claimName) || has(self.size) == has(oldSelf.size) && (!has(self.size) || self.size == oldSelf.size)").message(
        "spec.workspace.size is immutable, as the volume claim's is: make a new Agent, or keep the files in a claim of your own and name it in spec.workspace.claimName"
    ),
    validation = Rule::new("has(self.claimName) || has(oldSelf.claimName) || has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)").message(
        "spec.workspace.storageClassName is immutable, as the volume claim's is: make a new Agent, or keep the files in a claim of your own and name it in spec.workspace.claimName"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct Workspace {
    /// Size of claim `<agent>-workspace`, which is made for it, as a Kubernetes quantity from 1Mi to 16Ti; 1Gi when absent.
    /// It goes with the Agent, or stays, as `spec.storage.retentionPolicy` says. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32), extend("x-kubernetes-validations" = [{
        "rule": "isQuantity(self) && quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('16Ti')) <= 0",
        "message": "spec.workspace.size must be a quantity from 1Mi to 16Ti, such as 1Gi",
    }]))]
    pub size: Option<String>,
    /// Storage class of that claim. Absent: the cluster's default; empty: only volumes without a class. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253), regex(pattern = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"))]
    pub storage_class_name: Option<String>,
    /// A claim of this namespace that is there already, such as one that several pods share (`ReadWriteMany`). It is never
    /// changed or deleted. While it is missing there is no pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub claim_name: Option<String>,
}

impl Workspace {
    /// Size of the claim that is made for it.
    #[must_use]
    pub fn size(&self) -> &str {
        self.size.as_deref().unwrap_or(SIZE)
    }
}
