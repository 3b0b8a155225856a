//! Mode `Goal`: the loop of the end-to-end test of gates, with its spec and its script: a failed attempt, a low confidence, a
//! denied call, and repeated steps.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::work::tool;
use super::*;
use agentloop_api::AgentSpec;
use agentloop_api::goal::{GoalEnd, ProgressSource};
use agentloop_api::status::{GateKind, LoopOutcome};

fn story() -> Value {
    serde_json::from_str(include_str!("../../../tests/e2e/goal_gates.json")).unwrap()
}

fn story_settings(story: &Value) -> EngineSettings {
    let mut spec = story["spec"].clone();
    spec["instructions"] = "Count.".into();
    spec["model"] = json!({"api": "OpenAIChat", "baseURL": "http://model", "name": "m"});
    spec["tools"]["toolbox"]["image"] = "tools:1".into();
    let spec: AgentSpec = serde_json::from_value(spec).unwrap();
    EngineSettings::try_from(&spec).unwrap()
}

/// The tools that it calls, with the rules of its spec.
fn story_tools() -> Vec<ToolSpec> {
    let offered = |name: &str, effect| ToolSpec {
        parameters: json!({"type": "object"}),
        needs_approval: effect == ToolEffect::Destructive,
        ..tool(name, effect)
    };
    vec![
        offered("toolbox__read_file", ToolEffect::Read),
        offered("toolbox__write_file", ToolEffect::Write),
        offered("toolbox__shell", ToolEffect::Destructive),
    ]
}

fn answer_of(turn: &Value) -> ModelAnswer {
    let wanted = turn["toolCalls"].as_array().cloned().unwrap_or_default();
    let call = |(place, call): (usize, &Value)| ToolCall {
        id: place.to_string(),
        name: call["name"].as_str().unwrap().into(),
        arguments: call["arguments"].to_string(),
    };
    ModelAnswer {
        text: turn["text"].as_str().map(str::to_owned),
        tool_calls: wanted.iter().enumerate().map(call).collect(),
        finish: if wanted.is_empty() {
            FinishReason::Stop
        } else {
            FinishReason::ToolCalls
        },
        ..ModelAnswer::default()
    }
}

#[test]
fn a_loop_with_a_retry_a_low_confidence_a_denied_call_and_repeated_steps_escalates() {
    let story = story();
    let mut driver = Driver::fresh(story_settings(&story));
    driver.offer(story_tools());
    driver.start(1);
    let mut turns = story["script"]["turns"].as_array().unwrap().iter();
    let (mut gates, mut purposes) = (Vec::new(), Vec::new());
    while !driver.stopped {
        if driver.in_flight.is_some() {
            purposes.push(driver.purpose);
            driver.answer(answer_of(turns.next().expect("the script has an answer")));
        } else if let Some(run) = driver.running.values().next() {
            let (run, fails) = (run.id, run.name == "toolbox__read_file");
            let outcome = if fails {
                ToolOutcome::Failed {
                    text: "no such file".into(),
                }
            } else {
                ToolOutcome::Done { text: "written".into() }
            };
            driver.feed(EngineInput::ToolFinished {
                run,
                outcome,
                artifacts: ResultArtifacts::default(),
            });
        } else if let [open] = &*driver.engine.view().gates {
            let goal = driver.goal_view();
            gates.push((open.gate.kind, goal.steps, driver.reasons()));
            driver.answer_gate(&open.gate.id, open.gate.kind == GateKind::LowConfidence);
        } else {
            driver.next_timer();
        }
    }
    assert_eq!(turns.next(), None, "every answer was asked for");
    assert_eq!(
        gates,
        [
            (GateKind::LowConfidence, 1, vec![PauseReason::LowConfidence]),
            (
                GateKind::ToolCallNeedsApproval,
                1,
                vec![PauseReason::ToolCallNeedsApproval]
            ),
            (GateKind::Escalated, 6, vec![PauseReason::Escalated]),
        ]
    );
    let questions = (0..)
        .zip(&purposes)
        .filter(|(_, purpose)| **purpose != CallPurpose::Turn);
    assert_eq!(questions.collect::<Vec<_>>(), [(4, &CallPurpose::Confidence)]);
    let runs: Vec<&str> = driver.sent.iter().map(|run| &*run.name).collect();
    assert_eq!(
        runs,
        ["toolbox__read_file", "toolbox__write_file", "toolbox__write_file"],
        "the denied call did not run, and another tool did"
    );
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["NotApproved"]);
    assert_eq!(
        driver.notes(RecordKind::LoopDetected),
        ["NoProgress: Nudged", "NoProgress: Paused"]
    );
    let attempts = driver.journal.iter().filter_map(|record| record.validation.as_ref());
    let attempts: Vec<_> = attempts
        .map(|one| (one.step, one.attempt, one.error.is_some()))
        .collect();
    assert_eq!(
        attempts,
        [
            (1, 1, true),
            (1, 2, false),
            (2, 1, false),
            (3, 1, false),
            (4, 1, false),
            (5, 1, false),
            (6, 1, false)
        ]
    );
    let (view, goal) = (driver.engine.view(), driver.goal_view());
    assert_eq!(
        (view.outcome, goal.end, goal.steps, goal.last_confidence),
        (Some(LoopOutcome::Escalated), Some(GoalEnd::LoopDetected), 6, Some(10))
    );
    assert_eq!(
        (goal.progress.percent, goal.progress.source, goal.criteria),
        (20, Some(ProgressSource::Estimate), vec![("number".to_owned(), false)])
    );
}
