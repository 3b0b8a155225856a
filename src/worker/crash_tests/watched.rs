//! Two days with heartbeats and pre-checks, with a kill at each boundary of the journal in turn.
//!
//! By design, a kill may change what follows: the hot state is lost with the process, so a turn that would have been
//! skipped runs, and a pre-check whose answer is lost with the gateway lets its turn run. Numbers and times of turns
//! then differ. The prompts, answers and tool runs of the Agent's own turns stay the same, and nothing is paid for
//! twice, done twice or left half done.

use serde_json::json;

use super::script::{Call, Script, ScriptedOutcome, ScriptedToolCall, Turn};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::status::LoopOutcome;

fn want(tool: &'static str, takes: i64) -> ScriptedToolCall {
    ScriptedToolCall {
        tool,
        takes,
        ends: ScriptedOutcome::Ok,
    }
}

fn sleeps(wants: Vec<ScriptedToolCall>) -> Turn {
    let sleep = Call {
        sleep: Some(3600),
        ..Call::default()
    };
    if wants.is_empty() {
        return Turn { calls: vec![sleep] };
    }
    let work = Call {
        takes: 2,
        wants,
        ..Call::default()
    };
    Turn {
        calls: vec![work, sleep],
    }
}

fn two_days() -> Script {
    let settings = script::settings_of(&json!({
        "model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"},
        "lightModel": {"api": "OpenAIChat", "baseURL": "http://model", "name": "small"},
        "continuous": {
            "preCheck": {"prompt": "Only a change of ten matters."},
            "heartbeat": {"everySeconds": 10_000, "prompt": "Look after the mail."},
        },
        "hotState": {"fields": [{"name": "hour", "type": "Number", "ttlSeconds": 60, "refreshTool": "files__read"}]},
    }));
    Script {
        sensors: Vec::new(),
        settings,
        turns: vec![
            sleeps(vec![want("files__write", 3)]),
            sleeps(vec![]),
            sleeps(vec![want("mail__send", 2), want("files__read", 0)]),
            sleeps(vec![]),
            sleeps(vec![want("db__put", 1)]),
            sleeps(vec![]),
        ],
        heartbeat: Turn {
            calls: vec![Call {
                takes: 4,
                wants: vec![want("mail__send", 5)],
                ..Call::default()
            }],
        },
        happenings: Vec::new(),
    }
}

/// What the model and the tools returned in the Agent's own turns.
fn own(run: &RunResult) -> Vec<String> {
    let reports = run
        .messages
        .iter()
        .filter(|(turn, _, message)| !run.heartbeats.contains(turn) && !matches!(message, Message::User { .. }));
    reports.map(|(_, _, message)| without_ids(&timeless(message))).collect()
}

/// Call ids contain the number of their turn, which may differ.
fn without_ids(message: &str) -> String {
    let mut parts = message.split("\"id\":\"");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + "\"id\":" + part.split_once('"').map_or(part, |(_, rest)| rest)
    })
}

fn compare_own(plain: &RunResult, found: &RunResult) {
    let (expected, all) = (own(plain), own(found));
    let is_cut = |text: &str| text.contains("outcome unknown");
    for (found, expected) in all.iter().zip(&expected) {
        assert!(is_cut(found) || found == expected, "{found} instead of {expected}");
    }
    let view = found.view.as_ref().expect("it goes on to the end");
    assert_eq!(view.outcome, Some(LoopOutcome::Completed));
    assert_eq!(all.len(), expected.len());
    // Each turn that was started is completed, once; this includes heartbeats.
    let completed = lines(found, "TurnCompleted", None).len();
    assert_eq!(lines(found, "TurnStarted", None).len(), completed);
    assert_eq!(found.committed.len(), completed);
    assert_eq!(completed, 7 + found.heartbeats.len());
    assert!(!found.heartbeats.is_empty());
}

#[test]
fn two_days_with_heartbeats_and_pre_checks_are_what_they_are_meant_to_be() {
    let plain = undisturbed(&two_days(), &mut NoKills);
    compare_own(&plain, &plain);
    // Every other pre-check says no, and each precedes a turn of its own.
    assert_eq!(lines(&plain, "PrecheckSkipped", None).len(), 6);
    let asked = plain.billed.iter().filter(|id| id.call == 0).count();
    assert_eq!(asked, 12);
    assert!(plain.heartbeats.len() >= 5, "{:?}", plain.heartbeats);
    assert!(lines(&plain, "PrecheckFailed", None).is_empty());
}

#[test]
fn heartbeats_and_pre_checks_continue_over_a_kill_at_any_boundary() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&two_days(), &mut looks);
    let mut killer = BoundaryKiller::new(&plain, &looks, |plain, found, _| {
        // From a state equal to one of the undisturbed run, the rest is the same.
        if found.view.is_some() {
            compare_own(plain, found);
        }
    });
    undisturbed(&two_days(), &mut killer);
    let (boundaries, ways) = killer.count();
    eprintln!("killed at {boundaries} boundaries: {ways:?}");
    assert!(boundaries > 60 && ways.len() == 5, "{ways:?}");
}
