//! A request to stop the loop, with a kill at each boundary of the journal in turn: the loop ends once, and does not begin
//! again.

use serde_json::json;

use super::script::{Call, ExternalEvent, ExternalEventKind, Script, ScriptedOutcome, ScriptedToolCall, Turn};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::status::{LoopOutcome, LoopState};

/// The second of three turns is stopped while its action runs.
fn stopped(at_once: bool) -> Script {
    let act = || Call {
        takes: 2,
        wants: vec![ScriptedToolCall {
            tool: "db__put",
            takes: 30,
            ends: ScriptedOutcome::Ok,
        }],
        ..Call::default()
    };
    let turn = || Turn {
        calls: vec![act(), act()],
    };
    Script {
        settings: script::settings_of(&json!({
            "model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"},
        })),
        turns: vec![turn(), turn(), turn()],
        heartbeat: Turn::default(),
        happenings: vec![ExternalEvent {
            turn: 2,
            state: LoopState::Running,
            after: 10,
            what: ExternalEventKind::Stop { at_once },
        }],
        sensors: Vec::new(),
    }
}

fn compare_ends(plain: &RunResult, found: &RunResult, _: &[KillScope]) {
    let (Some(view), Some(expected)) = (&found.view, &plain.view) else {
        return;
    };
    assert_eq!(view.outcome, Some(LoopOutcome::Cancelled));
    assert_eq!(
        (view.turn, view.handled.stop.clone()),
        (expected.turn, expected.handled.stop.clone())
    );
    assert!(
        lines(found, "TurnStarted", None).len() <= 2,
        "no turn begins after the request"
    );
    let handled = lines(found, "RequestHandled", None).len();
    assert_eq!(handled, 1, "once per value");
}

#[test]
fn a_loop_that_is_stopped_ends_as_cancelled_wherever_its_worker_is_killed() {
    for at_once in [false, true] {
        let mut looks = Fingerprints::default();
        let plain = undisturbed(&stopped(at_once), &mut looks);
        let view = plain.view.as_ref().expect("an end");
        assert_eq!((view.outcome, view.turn), (Some(LoopOutcome::Cancelled), 2));
        assert_eq!(view.counts.turns, if at_once { 1 } else { 2 });
        let mut killer = BoundaryKiller::new(&plain, &looks, compare_ends);
        undisturbed(&stopped(at_once), &mut killer);
        let (boundaries, ways) = killer.count();
        assert!(boundaries >= 8 && ways.len() >= 4, "{boundaries}: {ways:?}");
    }
}
