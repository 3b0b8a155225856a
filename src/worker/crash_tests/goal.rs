//! A goal with a failed attempt, commands, artifacts, a confidence check and its gate, with a kill at each boundary of the journal in
//! turn.

use serde_json::json;

use super::script::{Call, Script, ScriptedOutcome, ScriptedToolCall, Turn};
use super::week::{BoundaryKiller, Fingerprints};
use super::*;
use crate::api::goal::{GoalEnd, ProgressSource};
use crate::api::status::LoopOutcome;
use crate::engine::GoalView;

/// Three steps, the first one with two attempts. Only tools that may be repeated: an unknown outcome is a failure, and may
/// make a step fail.
fn steps() -> Script {
    let turn = |tool, ends| Turn {
        calls: vec![Call {
            takes: 2,
            wants: vec![ScriptedToolCall { tool, takes: 1, ends }],
            ..Call::default()
        }],
    };
    let settings = script::settings_of(&json!({
        "model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"},
        "mode": "Goal",
        "goal": {
            "description": "Keep the lights on.",
            "acceptanceCriteria": [
                {"name": "tests", "command": {"run": "make test"}},
                {"name": "lint", "command": {"run": "make lint"}},
            ],
            "artifacts": [{"path": "NOTES.md"}, {"path": "dist/app"}],
            "maxSteps": 3,
            "timeoutSeconds": 2_592_000,
            "confidence": {"everySteps": 2},
        },
    }));
    Script {
        settings,
        turns: vec![
            turn("files__read", ScriptedOutcome::Error),
            turn("db__put", ScriptedOutcome::Ok),
            turn("files__read", ScriptedOutcome::Ok),
            turn("db__put", ScriptedOutcome::Ok),
        ],
        heartbeat: Turn::default(),
        happenings: Vec::new(),
        sensors: Vec::new(),
    }
}

fn compare_goals(plain: &RunResult, found: &RunResult, deaths: &[KillScope]) {
    compare(plain, found, deaths);
    // A call that has expired meanwhile fails its attempt, and the goal takes another course.
    if deaths.iter().any(|death| matches!(death, KillScope::Downtime(_))) {
        return;
    }
    // A restart takes a second, before the first turn too.
    let timeless = |view: &LoopView| {
        let goal = view.goal.clone().expect("a goal");
        assert!(
            goal.started_at
                .is_some_and(|start| goal.ended_at.is_some_and(|end| start < end))
        );
        GoalView {
            started_at: None,
            ended_at: None,
            ..goal
        }
    };
    if let (Some(view), Some(expected)) = (&found.view, &plain.view) {
        assert_eq!(timeless(view), timeless(expected), "its calls count once");
    }
    // A gate or a check that was open is taken up again, and not made a second time.
    let gates = |run: &RunResult| lines(run, "GateOpened", None).len();
    assert!(gates(found) <= gates(plain));
}

#[test]
fn a_worker_killed_at_any_boundary_of_a_goal_continues_as_if_nothing_had_happened() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&steps(), &mut looks);
    let view = plain.view.as_ref().expect("an end");
    let goal = view.goal.as_ref().expect("a goal");
    assert_eq!(
        (view.outcome, goal.end),
        (Some(LoopOutcome::Failed), Some(GoalEnd::StepLimit))
    );
    assert_eq!((goal.steps, goal.last_confidence, view.turn), (3, Some(20), 4));
    assert_eq!(lines(&plain, "GateOpened", None).len(), 1);
    assert_eq!(
        lines(&plain, "ToolIntent", None).len(),
        4 + 3 * 3,
        "three checks a step"
    );
    let exist: Vec<(&str, bool)> = goal.artifacts.iter().map(|one| (&*one.path, one.met)).collect();
    assert_eq!(exist, [("NOTES.md", true), ("dist/app", false)]);
    assert_eq!(goal.progress.source, Some(ProgressSource::Artifacts));
    let mut killer = BoundaryKiller::new(&plain, &looks, compare_goals);
    undisturbed(&steps(), &mut killer);
    let (boundaries, ways) = killer.count();
    assert!(boundaries > 20 && ways.len() >= 4, "{boundaries}: {ways:?}");
}
