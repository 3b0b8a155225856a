//! `spec.workspace`: the files of an Agent.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::bounds::DNS_SUBDOMAIN;

/// Default size of the claim.
const SIZE: &str = "1Gi";

/// Files of the Agent, on a separate volume that cannot fill up the journal's. Other pods add files by mounting the
/// claim; the worker mounts it read-only at `/workspace`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.claimName) || !has(self.size) && !has(self.storageClassName)").message(
        "spec.workspace.claimName names an existing claim: remove spec.workspace.size and spec.workspace.storageClassName"
    ),
    validation = Rule::new("has(self.claimName) || has(oldSelf.claimName) || has(self.size) == has(oldSelf.size) && (!has(self.size) || self.size == oldSelf.size)").message(
        "spec.workspace.size is immutable: create a new Agent, or create a claim and name it in spec.workspace.claimName"
    ),
    validation = Rule::new("has(self.claimName) || has(oldSelf.claimName) || has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)").message(
        "spec.workspace.storageClassName is immutable: create a new Agent, or create a claim and name it in spec.workspace.claimName"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct WorkspaceSpec {
    /// Size of the volume claim `<agent>-workspace` that is created for the Agent, a Kubernetes quantity from 1Mi to
    /// 16Ti. Defaults to 1Gi. The claim is deleted with the Agent or kept, according to `spec.storage.retentionPolicy`.
    /// Immutable.
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
    /// Name of an existing volume claim in the Agent's namespace to be used instead, such as one shared by several pods
    /// (`ReadWriteMany`). The claim must have the label `agentloop.dev/workspace=true`. It is never changed or deleted.
    /// While it or its label is missing, no pod is created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = DNS_SUBDOMAIN))]
    pub claim_name: Option<String>,
}

impl WorkspaceSpec {
    /// Size of the claim that is created.
    #[must_use]
    pub fn size(&self) -> &str {
        self.size.as_deref().unwrap_or(SIZE)
    }
}
