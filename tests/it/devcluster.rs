//! The scripts of the cluster that tests and the demo run on, where a fault of theirs would look like one of agentloop.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::Command;

/// One released volume and four events of it. Its phase is still `Released` when it is offered, and then a claim takes it and
/// writes to it. The second watch ends the script.
const KUBECTL: &str = r#"#!/bin/sh
case "$*" in
  *--watch*)
    mkdir "$RUN/watched" || kill -TERM 0
    printf 'volume-001 Released\nvolume-001 Released\nvolume-001 Available\nvolume-001 Released\n' ;;
  *" get persistentvolume volume-001 "*)
    cat "$RUN/state"
    if [ -e "$RUN/offers" ]; then
      printf 'Bound uid-2' >"$RUN/state"
      echo kept >"$RUN/volumes/volume-001/journal"
    fi ;;
  *" patch persistentvolume volume-001 "*)
    ls "$RUN/volumes/volume-001" >>"$RUN/left"
    echo offered >>"$RUN/offers"
    printf 'Released ' >"$RUN/state" ;;
esac
"#;

#[test]
fn a_volume_is_emptied_once_and_never_under_its_next_claim() {
    let run = tempfile::tempdir().unwrap();
    let bin = run.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::write(bin.join("kubectl"), KUBECTL).unwrap();
    std::fs::set_permissions(bin.join("kubectl"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let volume = run.path().join("volumes/volume-001");
    std::fs::create_dir_all(volume.join("state")).unwrap();
    std::fs::write(volume.join("state/journal"), "of the claim before").unwrap();
    std::fs::write(run.path().join("state"), "Released uid-1").unwrap();

    let ended = Command::new("bash")
        .args([
            concat!(env!("CARGO_MANIFEST_DIR"), "/hack/devcluster/volumes.sh"),
            "reclaim",
        ])
        .env("RUN", run.path())
        .env("BIN", &bin)
        .process_group(0)
        .output()
        .unwrap();
    assert_eq!(ended.status.signal(), Some(15), "{ended:?}");
    let read = |name: &str| std::fs::read_to_string(run.path().join(name)).unwrap();
    assert_eq!(read("left"), "", "it is offered empty");
    assert_eq!(read("offers"), "offered\n");
    assert_eq!(read("volumes/volume-001/journal"), "kept\n");
}
