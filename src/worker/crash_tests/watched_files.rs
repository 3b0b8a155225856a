//! Days with a watched workspace, on real files, with a kill at each boundary of the journal in turn.
//!
//! A file's fingerprint and the effect of its change are one transaction: each change is reported once, and none is
//! lost.

use serde_json::json;

use super::script::{Call, ExternalEvent, ExternalEventKind, Script, Turn};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::status::{LoopOutcome, LoopState};

/// Files arrive one by one, more at once than the limit per minute, during a turn, and around the end of a pod. They
/// are changed, rewritten with the same content, removed, and recreated.
fn days() -> Script {
    let asleep = Turn {
        calls: vec![Call {
            takes: 90,
            sleep: Some(6 * 3600),
            ..Call::default()
        }],
    };
    let happening = |turn, state, after, what| ExternalEvent {
        turn,
        state,
        after,
        what,
    };
    let sleeping = |turn, after, what| happening(turn, LoopState::Sleeping, after, what);
    let happenings = vec![
        sleeping(1, 60, ExternalEventKind::Put("inbox/a", "one")),
        sleeping(1, 600, ExternalEventKind::Put("inbox/b", "two")),
        sleeping(1, 600, ExternalEventKind::Put("inbox/c", "three")),
        sleeping(1, 600, ExternalEventKind::Put("inbox/deep/d", "four")),
        sleeping(1, 600, ExternalEventKind::Put("beside", "not watched")),
        sleeping(1, 601, ExternalEventKind::Put("inbox/a", "one, again")),
        happening(2, LoopState::Running, 10, ExternalEventKind::Put("inbox/e", "five")),
        happening(
            2,
            LoopState::Running,
            20,
            ExternalEventKind::Put("inbox/e", "five, longer"),
        ),
        sleeping(2, 60, ExternalEventKind::Remove("inbox/b")),
        sleeping(2, 61, ExternalEventKind::Put("inbox/f", "six")),
        sleeping(2, 600, ExternalEventKind::Put("inbox/c", "three")),
        sleeping(3, 60, ExternalEventKind::NewPod),
        sleeping(3, 60, ExternalEventKind::Put("inbox/g", "seven")),
        sleeping(3, 600, ExternalEventKind::Put("inbox/b", "two, anew")),
        sleeping(4, 60, ExternalEventKind::Remove("inbox/deep/d")),
    ];
    Script {
        settings: script::settings(&json!({})),
        turns: vec![asleep; 5],
        heartbeat: Turn::default(),
        happenings,
        sensors: vec![script::inbox()],
    }
}

fn texts_told(run: &RunResult) -> Vec<&str> {
    run.shown.keys().map(String::as_str).collect()
}

fn compare_files(plain: &RunResult, found: &RunResult, deaths: &[KillScope]) {
    let updates = |run: &RunResult| i64::try_from(lines(run, "SensorUpdated", None).len()).expect("few");
    assert_eq!(updates(found), found.counted, "each event that is counted took effect");
    compare_shown(found);
    if found.view.is_none() {
        return;
    }
    assert_eq!(found.told_files, plain.told_files);
    let slept = deaths.iter().any(|death| matches!(death, KillScope::Downtime(_)));
    // If a file changes twice while it is not watched, the last change is reported.
    if !slept {
        assert_eq!(texts_told(found), texts_told(plain));
        assert_eq!(found.counted, plain.counted);
    }
}

fn compare_shown(found: &RunResult) {
    for (told, turns) in &found.shown {
        let committed = turns.intersection(&found.committed).count();
        assert!(committed <= 1, "{told} was shown in {turns:?}");
        assert!(committed == 1 || found.view.is_none(), "{told} was lost: {turns:?}");
    }
}

#[test]
fn a_worker_killed_at_any_boundary_reports_each_file_once_and_loses_none() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&days(), &mut looks);
    assert_eq!(
        plain.view.as_ref().expect("an end").outcome,
        Some(LoopOutcome::Completed)
    );
    assert_eq!(
        texts_told(&plain),
        [
            "Created inbox/a: one.",
            "Created inbox/b: two, anew.",
            "Created inbox/b: two.",
            "Created inbox/c: three.",
            "Created inbox/deep/d: four.",
            "Created inbox/e: five.",
            "Created inbox/f: six.",
            "Created inbox/g: seven.",
            "Modified inbox/a: one, again.",
            "Modified inbox/e: five, longer.",
            "Removed inbox/b: gone.",
            "Removed inbox/deep/d: gone.",
        ]
    );
    assert_eq!(plain.counted, 12);
    let paths: Vec<&str> = plain.told_files.iter().map(|(path, _)| &**path).collect();
    let left = ["inbox/a", "inbox/b", "inbox/c", "inbox/e", "inbox/f", "inbox/g"];
    assert_eq!(paths, left);
    compare_files(&plain, &plain, &[]);
    let mut killer = BoundaryKiller::new(&plain, &looks, compare_files);
    undisturbed(&days(), &mut killer);
    let (boundaries, ways) = killer.count();
    assert!(boundaries > 20 && ways.len() == 4, "{boundaries}: {ways:?}");
}
