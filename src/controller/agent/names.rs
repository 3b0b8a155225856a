//! Names of what the reconciler makes and reads: labels, annotations, child objects.

/// Value of `app.kubernetes.io/managed-by`, and the field manager of what is applied.
pub(super) const MANAGER: &str = "agentloop-controller";
/// Annotation on a pod: hash of the spec it was made from.
pub(super) const SPEC_HASH: &str = "agentloop.dev/spec-hash";
/// Annotation on a pod: its fencing epoch.
pub(super) const EPOCH: &str = "agentloop.dev/epoch";
/// Annotation on a pod: generation of the Agent it was made for.
pub(super) const GENERATION: &str = "agentloop.dev/generation";
/// Annotation on an Agent: end a sleep, once per value.
pub(super) const WAKE: &str = "agentloop.dev/wake";
/// Annotation on an Agent: end a cool-down, once per value.
pub(super) const RESUME: &str = "agentloop.dev/resume";
/// Container of the loop.
pub(super) const WORKER: &str = "worker";
/// Container (a native sidecar) of the key, the meter and the link.
pub(super) const GATEWAY: &str = "gateway";

/// Name of the volume claim of an Agent.
pub(super) fn claim(agent: &str) -> String {
    format!("{agent}-state")
}

/// Name of the claim of an Agent's workspace, where it names none of its own.
pub(super) fn workspace_claim(agent: &str) -> String {
    format!("{agent}-workspace")
}
