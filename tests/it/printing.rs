//! Commands of the binary that print: how they end when nobody reads on, and when nothing can be written.

// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::File;
use std::process::{Command, Output, Stdio};

use serde_json::json;

use crate::local::process::{LocalHarness, scripted};

/// Runs the binary with this standard output.
fn printing(arguments: &[&str], output: Stdio) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
    command.args(arguments).stdin(Stdio::null()).stdout(output);
    command
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap()
}

/// The writing end of a pipe whose reader has gone.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[tokio::test]
async fn a_reader_that_has_read_enough_is_no_failure_and_a_full_disk_is_one() {
    let mut harness = LocalHarness::new();
    harness.write(
        "all.yaml",
        &scripted("a", &json!([{ "yield": { "mode": "shutdown" } }])),
    );
    assert_eq!(harness.run(&[]).cause().await, "NothingRuns");
    let journal = harness.state().join("volumes/default/a-state/worker");
    let copying = ["journal", "--journal-dir", journal.to_str().unwrap()];
    let copy = harness.path("copy.sqlite");
    assert!(printing(&copying, File::create(&copy).unwrap().into()).status.success());

    for arguments in [
        &["crds"][..],
        &["crds", "--format", "markdown"],
        &["dashboards"],
        &["history", copy.to_str().unwrap()],
    ] {
        let ended = printing(arguments, closed());
        let words = String::from_utf8(ended.stderr).unwrap();
        assert_eq!((ended.status.code(), words.as_str()), (Some(0), ""), "{arguments:?}");
        let ended = printing(arguments, File::options().write(true).open("/dev/full").unwrap().into());
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}");
    }
    // A part of a copy is not a journal.
    assert_eq!(printing(&copying, closed()).status.code(), Some(1));
}
