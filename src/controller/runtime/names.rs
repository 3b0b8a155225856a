//! Names of labels, annotations and child objects that the reconciler reads and writes.

pub(in crate::controller) use crate::api::annotations::{RESUME, STOP, WAKE};
/// Container that runs the loop.
pub(in crate::controller) use crate::link::pod::WORKER_CONTAINER as WORKER;

/// Value of `app.kubernetes.io/managed-by`, and the field manager of server-side apply.
pub(in crate::controller) const MANAGER: &str = "agentloop-controller";
/// Annotation on a pod: hash of the spec that it was created from.
pub(in crate::controller) const SPEC_HASH: &str = "agentloop.dev/spec-hash";
/// Annotation on a pod: its fencing epoch.
pub(in crate::controller) const EPOCH: &str = "agentloop.dev/epoch";
/// Annotation on a pod: generation of the Agent that it was created for.
pub(in crate::controller) const GENERATION: &str = "agentloop.dev/generation";
/// Container (a native sidecar) that holds the keys, meters usage and connects to the controller.
pub(in crate::controller) const GATEWAY: &str = "gateway";

pub(in crate::controller) fn claim(agent: &str) -> String {
    format!("{agent}-state")
}

/// Name of an Agent's workspace claim if `spec.workspace.claimName` is not set.
pub(in crate::controller) fn workspace_claim(agent: &str) -> String {
    format!("{agent}-workspace")
}
