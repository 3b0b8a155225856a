//! Days with a schedule that ticks in the worker, with a kill at each boundary of the journal in turn.
//!
//! Each tick takes effect once, whatever is killed when. A worker that was down receives it late; one that was killed
//! before it knew the schedule starts it after the restart.

use std::collections::BTreeSet;

use serde_json::json;

use super::script::{Call, Script, ScriptedOutcome, ScriptedToolCall, Turn};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::status::LoopOutcome;

/// Awake at 07:00 and then every six hours; ticks at 00:00, 06:00, 12:00 and 18:00.
fn days() -> Script {
    let awake = |tool| Turn {
        calls: vec![
            Call {
                takes: 2,
                wants: vec![ScriptedToolCall {
                    tool,
                    takes: 1,
                    ends: ScriptedOutcome::Ok,
                }],
                ..Call::default()
            },
            Call {
                sleep: Some(6 * 3600),
                ..Call::default()
            },
        ],
    };
    let tools = [
        "files__write",
        "files__read",
        "mail__send",
        "files__read",
        "db__put",
        "mail__send",
    ];
    Script {
        settings: script::settings(&json!({})),
        turns: tools.map(awake).to_vec(),
        heartbeat: Turn::default(),
        happenings: Vec::new(),
        sensors: vec![script::clock("clock", "0 */6 * * *")],
    }
}

fn compare_ticks(plain: &RunResult, found: &RunResult, deaths: &[KillScope]) {
    for (tick, turns) in &found.shown {
        let committed = turns.intersection(&found.committed).count();
        assert!(committed <= 1, "{tick} was shown in {turns:?}");
        assert!(committed == 1 || found.view.is_none(), "{tick} was lost: {turns:?}");
    }
    let updates = lines(found, "SensorUpdated", None).len();
    if found.view.is_none() {
        return;
    }
    let of = |run: &RunResult| run.shown.keys().cloned().collect::<BTreeSet<_>>();
    let (ticks, expected) = (of(found), of(plain));
    let slept = deaths.iter().any(|death| matches!(death, KillScope::Downtime(_)));
    if slept {
        let lost: Vec<_> = expected.difference(&ticks).collect();
        let at_the_start = lost.iter().all(|tick| tick.contains("2026-01-05T12:00:00Z"));
        assert!(at_the_start, "{lost:?} were never shown");
    } else {
        assert_eq!(ticks, expected);
        assert_eq!(updates, expected.len(), "each tick took effect once");
    }
}

#[test]
fn a_worker_killed_at_any_boundary_receives_each_tick_of_a_schedule_once() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&days(), &mut looks);
    assert_eq!(
        plain.view.as_ref().expect("an end").outcome,
        Some(LoopOutcome::Completed)
    );
    let ticks = lines(&plain, "SensorUpdated", None).len();
    assert!(ticks > 4 && ticks == plain.shown.len(), "{ticks}: {:?}", plain.shown);
    let mut killer = BoundaryKiller::new(&plain, &looks, compare_ticks);
    undisturbed(&days(), &mut killer);
    let (boundaries, ways) = killer.count();
    assert!(boundaries > 20 && ways.len() == 5, "{boundaries}: {ways:?}");
}
