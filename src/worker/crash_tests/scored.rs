//! Days with a schedule whose ticks are scored by a light model, with a kill at each boundary of the journal in turn.
//!
//! Each tick is scored and paid for once, and takes effect by its score, in the order of the ticks.

use serde_json::json;

use super::script::{Call, Script, Turn};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::status::LoopOutcome;

/// Awake at 07:00 and then every six hours; ticks at 00:00, 06:00, 12:00 and 18:00.
fn days() -> Script {
    let asleep = Turn {
        calls: vec![Call {
            takes: 2,
            sleep: Some(6 * 3600),
            ..Call::default()
        }],
    };
    let mut clock = script::clock("clock", "0 */6 * * *");
    let signal = json!({"name": "due", "model": {"prompt": "How urgent is it?"}, "gate": "Both"});
    clock.spec.signals = vec![serde_json::from_value(signal).expect("a signal")];
    let mut settings = script::settings(&json!({}));
    settings.light_output_tokens = Some(64);
    Script {
        settings,
        turns: vec![asleep; 7],
        heartbeat: Turn::default(),
        happenings: Vec::new(),
        sensors: vec![clock],
    }
}

fn compare_scores(plain: &RunResult, found: &RunResult, deaths: &[KillScope]) {
    for (about, paid) in &found.scores {
        assert_eq!(*paid, 1, "{about} was paid for {paid} times");
    }
    for (tick, turns) in &found.shown {
        assert!(!tick.contains("T18:"), "{tick} was scored one below");
        let committed = turns.intersection(&found.committed).count();
        assert!(committed <= 1, "{tick} was shown in {turns:?}");
        assert!(committed == 1 || found.view.is_none(), "{tick} was lost: {turns:?}");
    }
    let slept = deaths.iter().any(|death| matches!(death, KillScope::Downtime(_)));
    if found.view.is_none() || slept {
        return;
    }
    let shown = |run: &RunResult| run.shown.keys().cloned().collect::<Vec<_>>();
    assert_eq!(shown(found), shown(plain));
    assert_eq!(found.scores, plain.scores);
    let updates = |run: &RunResult| lines(run, "SensorUpdated", None).len();
    assert_eq!(updates(found), updates(plain), "each tick took effect once");
}

#[test]
fn under_a_kill_at_any_boundary_each_event_is_scored_once_and_the_score_takes_effect() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&days(), &mut looks);
    assert_eq!(
        plain.view.as_ref().expect("an end").outcome,
        Some(LoopOutcome::Completed)
    );
    let ticks = lines(&plain, "SensorUpdated", None).len();
    assert_eq!(ticks, plain.scores.len());
    let scored = lines(&plain, "SignalScored", None).len();
    let unscored = lines(&plain, "SignalUnscored", None).len();
    assert!(scored > 4 && unscored > 0 && scored + unscored == ticks);
    let below = plain.scores.keys().filter(|about| about.contains("T18:")).count();
    assert!(below > 0 && plain.shown.len() == ticks - below, "{:?}", plain.shown);
    let mut killer = BoundaryKiller::new(&plain, &looks, compare_scores);
    undisturbed(&days(), &mut killer);
    let (boundaries, ways) = killer.count();
    assert!(boundaries > 30 && ways.len() == 4, "{boundaries}: {ways:?}");
}
