//! A loop in mode Task that answers tasks of its spec and of users, with a kill at each boundary of the journal in turn: each
//! task is answered once and when it is its user's turn, with the same response.

use serde_json::json;

use super::script::{
    APPROVED, Call, ExternalEvent, ExternalEventKind, FailedAttempt, Script, ScriptedOutcome, ScriptedToolCall, Turn,
};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::failure::FailureKind;
use crate::api::status::{LoopOutcome, LoopState};

/// Seconds without a task after which the pod of the loop is deleted: longer than any downtime.
const IDLE: i64 = 12 * 3600;

fn call(tools: &[(&'static str, ScriptedOutcome)]) -> Call {
    let want = |(tool, ends): &(&'static str, ScriptedOutcome)| ScriptedToolCall {
        tool,
        takes: 1,
        ends: *ends,
    };
    Call {
        takes: 2,
        wants: tools.iter().map(want).collect(),
        ..Call::default()
    }
}

/// Tasks that end with an answer, a limit and a failure, one that waits for a person, and some that arrive at once. The last
/// ones are of two users; the later request is of the user who has waited longer. Only tools that may be
/// repeated, apart from the one that needs an approval: an unknown outcome makes a longer prompt.
fn day() -> Script {
    let settings = script::settings_of(&json!({
        "model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"},
        "mode": "Task",
        "task": {
            "prompt": "Look around.", "maxIterations": 2, "maxDurationSeconds": 600, "idlePodSeconds": IDLE,
            "responses": {"http": {"url": "http://receiver"}},
        },
    }));
    let turn = |calls: Vec<Call>| Turn { calls };
    let turns = vec![
        turn(vec![
            call(&[("files__read", ScriptedOutcome::Ok), ("db__put", ScriptedOutcome::Ok)]),
            call(&[]),
        ]),
        turn(vec![call(&[(APPROVED, ScriptedOutcome::Ok)]), call(&[])]),
        turn(vec![
            call(&[("db__put", ScriptedOutcome::Error)]),
            call(&[("job__start", ScriptedOutcome::Unknown)]),
        ]),
        turn(vec![Call {
            failures: vec![FailedAttempt::Fails(FailureKind::BadResponse)],
            ..Call::default()
        }]),
        turn(vec![Call {
            failures: vec![FailedAttempt::Fails(FailureKind::Timeout), FailedAttempt::Refused(1800)],
            ..call(&[("files__read", ScriptedOutcome::Ok)])
        }]),
        turn(vec![call(&[])]),
        turn(vec![call(&[("files__read", ScriptedOutcome::Ok)]), call(&[])]),
    ];
    let asked = |turn, after, user| ExternalEvent {
        turn,
        state: LoopState::Sleeping,
        after,
        what: ExternalEventKind::Request(user),
    };
    let replaced = ExternalEvent {
        turn: 4,
        state: LoopState::Sleeping,
        after: 30,
        what: ExternalEventKind::NewPod,
    };
    Script {
        settings,
        turns,
        heartbeat: Turn::default(),
        happenings: vec![
            asked(1, 60, "bob"),
            asked(2, 60, "ann"),
            asked(2, 60, "ann"),
            replaced,
            asked(4, 60, "ann"),
            asked(4, 61, "ann"),
            asked(4, 62, "bob"),
        ],
        sensors: Vec::new(),
    }
}

fn outcomes(run: &RunResult) -> Vec<String> {
    let outcome = |(_, state, response): &(String, String, Option<String>)| {
        let response = response.as_deref().unwrap_or("{}");
        let response: serde_json::Value = serde_json::from_str(response).expect("a response");
        format!("{state} {}", response["outcome"].as_str().unwrap_or_default())
    };
    run.tasks.iter().map(outcome).collect()
}

fn compare_tasks(plain: &RunResult, found: &RunResult, deaths: &[KillScope]) {
    let ids = |run: &RunResult| run.tasks.iter().map(|(id, ..)| id.clone()).collect::<Vec<_>>();
    let ended = |run: &RunResult| lines(run, "TaskEnded", None).len();
    assert_eq!(
        ended(found),
        found.tasks.iter().filter(|(_, state, _)| state == "Ended").count()
    );
    if found.view.is_some() {
        assert_eq!(
            ids(found),
            ids(plain),
            "each task is accepted once, and begun when it is its turn"
        );
    }
    // A call that has expired meanwhile is not run, and the task takes another course.
    if deaths.iter().any(|death| matches!(death, KillScope::Downtime(_))) {
        let open = found.tasks.iter().filter(|(_, state, _)| state != "Ended").count();
        assert!(found.view.is_none() || open == 0, "{:?}", found.tasks);
        return;
    }
    // A restart begins the time without a task again.
    let late = found.now.duration_since(plain.now) > SignedDuration::from_secs(IDLE / 2);
    let found = &RunResult {
        now: if late {
            found.now - SignedDuration::from_secs(IDLE)
        } else {
            found.now
        },
        ..found.clone()
    };
    compare(plain, found, deaths);
    compare_ended_tasks(plain, found);
}

#[test]
fn a_worker_killed_at_any_boundary_answers_each_task_once_and_in_turn() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&day(), &mut looks);
    let view = plain.view.as_ref().expect("an end");
    assert_eq!(view.outcome, Some(LoopOutcome::ScaledToZero));
    assert_eq!(
        outcomes(&plain),
        [
            "Ended Completed",
            "Ended Completed",
            "Ended LimitReached",
            "Ended Failed",
            "Ended Completed",
            "Ended Completed",
            "Ended Completed"
        ]
    );
    let last = plain.tasks[4..]
        .iter()
        .map(|(id, ..)| id.trim_start_matches("request-"));
    let last: Vec<u64> = last.map(|number| number.parse().expect("a number")).collect();
    assert!(
        last[0] < last[2] && last[2] < last[1],
        "the user who waits longer is next: {last:?}"
    );
    let mut killer = BoundaryKiller::new(&plain, &looks, compare_tasks);
    undisturbed(&day(), &mut killer);
    let (boundaries, ways) = killer.count();
    assert!(boundaries > 30 && ways.len() == 5, "{boundaries}: {ways:?}");
}
