//! A sleeping loop in mode Continuous that users send requests to, with a kill at each boundary of the journal in turn: each
//! request is answered once, beside the loop's own work.

use serde_json::json;

use super::script::{Call, ExternalEvent, ExternalEventKind, Script, ScriptedOutcome, ScriptedToolCall, Turn};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::status::{LoopOutcome, LoopState};

/// Awake every six hours. One request comes in a sleep, two at once in the next one, and one while a turn is under way.
fn days() -> Script {
    let awake = |tool| Turn {
        calls: vec![
            Call {
                takes: 30,
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
    let asked = |turn, state, after| ExternalEvent {
        turn,
        state,
        after,
        what: ExternalEventKind::Request("ann"),
    };
    Script {
        settings: script::settings(&json!({})),
        turns: ["files__write", "db__put", "files__read", "mail__send"]
            .map(awake)
            .to_vec(),
        heartbeat: Turn::default(),
        happenings: vec![
            asked(1, LoopState::Sleeping, 600),
            asked(3, LoopState::Sleeping, 600),
            asked(3, LoopState::Sleeping, 600),
            asked(6, LoopState::Running, 10),
        ],
        sensors: Vec::new(),
    }
}

fn compare_requests(plain: &RunResult, found: &RunResult, deaths: &[KillScope]) {
    let ids = |run: &RunResult| run.tasks.iter().map(|(id, ..)| id.clone()).collect::<Vec<_>>();
    if found.view.is_some() {
        let open = found.tasks.iter().filter(|(_, state, _)| state != "Ended").count();
        assert_eq!(
            (ids(found), open),
            (ids(plain), 0),
            "each request is answered once and in order"
        );
    }
    // After a downtime own turns come before a request that they came after.
    if deaths.iter().any(|death| matches!(death, KillScope::Downtime(_))) {
        return;
    }
    compare(plain, found, deaths);
    compare_ended_tasks(plain, found);
}

#[test]
fn a_worker_killed_at_any_boundary_answers_each_request_once_beside_its_own_work() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&days(), &mut looks);
    let view = plain.view.as_ref().expect("an end");
    assert_eq!(view.outcome, Some(LoopOutcome::Completed));
    assert_eq!(view.counts.tasks.completed, 4, "{:?}", plain.tasks);
    let mut killer = BoundaryKiller::new(&plain, &looks, compare_requests);
    undisturbed(&days(), &mut killer);
    let (boundaries, ways) = killer.count();
    assert!(boundaries > 30 && ways.len() == 5, "{boundaries}: {ways:?}");
}
