//! Where the real clusters are that `make test` started.
//!
//! `AGENTLOOP_TEST_KUBECONFIG`: a control plane without nodes (integration tests).
//! `AGENTLOOP_E2E_KUBECONFIG`: a cluster with a node, the image loaded (end-to-end tests).
//! `AGENTLOOP_REQUIRE_CLUSTERS=1` (set by `make test`) turns a missing one into a failure.
#![allow(dead_code)]

use std::path::PathBuf;

/// Kubeconfig of the control plane, or `None` after saying loudly that the test is skipped.
pub fn control_plane() -> Option<PathBuf> {
    named("AGENTLOOP_TEST_KUBECONFIG")
}

/// Kubeconfig of the cluster with a node, or `None` after saying loudly that the test is skipped.
pub fn node() -> Option<PathBuf> {
    named("AGENTLOOP_E2E_KUBECONFIG")
}

fn named(variable: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    assert!(
        std::env::var_os("AGENTLOOP_REQUIRE_CLUSTERS").is_none(),
        "{variable} is not set although clusters are required"
    );
    eprintln!("SKIPPED: {variable} is not set; `make test` starts a real cluster for this test");
    None
}
