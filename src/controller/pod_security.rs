//! The security contexts that satisfy the `restricted` Pod Security Standard, the same for every kind of pod.

use k8s_openapi::api::core::v1::{Capabilities, PodSecurityContext, SeccompProfile, SecurityContext};

use crate::link::pod::WORKER_UID;

/// For the pod. Its volumes belong to the worker's group.
pub(super) fn pod() -> PodSecurityContext {
    PodSecurityContext {
        run_as_non_root: Some(true),
        fs_group: Some(WORKER_UID),
        fs_group_change_policy: Some("OnRootMismatch".into()),
        seccomp_profile: Some(SeccompProfile {
            type_: "RuntimeDefault".into(),
            ..SeccompProfile::default()
        }),
        ..PodSecurityContext::default()
    }
}

/// For a container that runs as `uid`, in the worker's group.
pub(super) fn container(uid: i64) -> SecurityContext {
    SecurityContext {
        run_as_non_root: Some(true),
        run_as_user: Some(uid),
        run_as_group: Some(WORKER_UID),
        allow_privilege_escalation: Some(false),
        read_only_root_filesystem: Some(true),
        capabilities: Some(Capabilities {
            drop: Some(vec!["ALL".into()]),
            ..Capabilities::default()
        }),
        ..SecurityContext::default()
    }
}
