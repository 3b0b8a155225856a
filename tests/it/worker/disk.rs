//! A full volume under the journal, on a small tmpfs; needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

use agentloop::api::status::LoopState;
use serde_json::json;

use super::gateway::{Gateway, answer};
use super::process::{CANARY, WorkerHarness};
use crate::support::clusters::skip;

/// A small volume, unmounted when dropped.
struct Volume(PathBuf);

impl Volume {
    fn mount(at: &Path) -> Option<Self> {
        std::fs::create_dir(at).unwrap();
        let mounted = mount("size=4m", at);
        if !mounted {
            skip("no tmpfs can be mounted here (needs root), so no full volume is tried");
        }
        mounted.then(|| Self(at.into()))
    }

    fn grow(&self) {
        assert!(mount("remount,size=64m", &self.0));
    }

    /// Takes the room that is left.
    fn fill(&self) {
        let full = std::fs::write(self.0.join("filler"), vec![1; 4 * 1024 * 1024]);
        assert!(full.is_err());
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn mount(options: &str, at: &Path) -> bool {
    Command::new("mount")
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(at)
        .status()
        .is_ok_and(|status| status.success())
}

#[tokio::test]
async fn a_full_volume_stops_the_loop_with_a_message_and_free_space_resumes_it() {
    let mut harness = WorkerHarness::new();
    let Some(volume) = Volume::mount(&harness.journal) else {
        return;
    };
    harness.spec["guardrails"] = json!({"maxConsecutiveTurns": 100_000, "loopDetection": {"mode": "Disabled"}});
    harness.spec["model"]["contextTokens"] = json!(20_000);
    let text = format!("{CANARY} {}", "x".repeat(16 * 1024));
    let gateway = Gateway::start(harness.dir.path(), vec![answer(&text, &[]); 2_000]);
    let mut worker = harness.worker(&gateway);
    assert!(!worker.ended().await.success());
    let words = "expand its PersistentVolumeClaim (";
    assert!(worker.output().contains(words), "{}", worker.output());
    let before = gateway.log();
    let error = before.last().last_error.unwrap();
    assert_eq!(error.kind, "JournalFull");
    assert!(error.message.contains(words));
    assert_eq!(before.last().state, LoopState::Stopped);
    assert!(before.last().counts.turns > 10, "{:?}", before.last());

    volume.fill();
    let calls = before.calls.len();
    let mut full = harness.worker(&gateway);
    assert!(!full.ended().await.success());
    assert!(full.output().contains(words), "{}", full.output());
    assert_eq!(gateway.log().calls.len(), calls, "no call without a journal");
    assert_eq!(gateway.log().last().last_error.unwrap().kind, "JournalFull");

    volume.grow();
    let mut worker = harness.worker(&gateway);
    let goal = before.last().counts.turns + 10;
    let log = gateway.until("more turns", |log| log.last().counts.turns >= goal).await;
    assert_eq!(log.last().turn, log.last().counts.turns.max(log.last().turn));
    worker.terminate().await;
    assert!(worker.ended().await.success());
    harness.assert_discreet();
}
