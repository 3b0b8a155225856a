//! Where the real clusters are that `make test` started.
//!
//! `AGENTLOOP_TEST_KUBECONFIG`: a control plane without nodes (integration tests).
//! `AGENTLOOP_E2E_KUBECONFIG`: a cluster with a node, the image loaded (end-to-end tests).
//! `AGENTLOOP_REQUIRE_CLUSTERS=1` (set by `make test`) turns a missing one, and any missing program, into a failure.
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
    skip(&format!(
        "{variable} is not set; `make test` starts a real cluster for this test"
    ));
    None
}

/// Whether there is this program, which a test needs as a peer; says loudly when there is none.
pub fn has(program: &str) -> bool {
    let status = std::process::Command::new(program)
        .arg("--version")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status();
    if status.is_err() {
        skip(&format!("there is no {program}; hack/packages.sh installs it"));
    }
    status.is_ok()
}

/// Says loudly that a test is skipped; fails where nothing may be.
pub fn skip(why: &str) {
    assert!(
        std::env::var_os("AGENTLOOP_REQUIRE_CLUSTERS").is_none(),
        "{why}; and nothing may be skipped (AGENTLOOP_REQUIRE_CLUSTERS)"
    );
    eprintln!("SKIPPED: {why}");
}

/// The address of this machine that pods of the test cluster reach, where the model servers are.
pub fn host_for_pods() -> String {
    std::env::var("AGENTLOOP_MODEL_HOST").unwrap_or_else(|_| "198.18.0.1".into())
}
