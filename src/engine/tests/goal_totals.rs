//! Mode `Goal`: from when to when a run lasts, and what its calls have used.

use pretty_assertions::assert_eq;
use serde_json::json;

use super::goal::{finish, goal, tests_and_sense};
use super::*;
use agentloop_api::goal::{GoalEnd, GoalUsage};
use agentloop_api::status::LoopOutcome;

fn priced(answer: ModelAnswer, tokens: u64, cost: i64) -> ModelAnswer {
    ModelAnswer {
        tokens: Some(tokens),
        cost: Some(cost),
        ..answer
    }
}

fn usage(calls: i64, tokens: i64, cost: i64) -> GoalUsage {
    GoalUsage { calls, tokens, cost }
}

impl Driver {
    fn used(&self) -> Option<GoalUsage> {
        self.goal_view().usage
    }
}

#[test]
fn a_run_lasts_from_its_first_turn_to_its_end_and_counts_the_calls_of_turns_and_checks() {
    let mut driver = Driver::with_goal(goal(tests_and_sense));
    let start = driver.now;
    assert_eq!(driver.goal_view().started_at, Some(start));
    assert_eq!(driver.used(), Some(usage(0, 0, 0)));
    driver.pass(seconds(5));
    driver.answer(priced(says("Not yet."), 10, 100));
    driver.done(1, "exit code 1\nno");
    driver.next_timer();
    assert_eq!(driver.used(), Some(usage(1, 10, 100)), "the next call is under way");
    driver.answer(priced(finish("done"), 20, 200));
    driver.done(1, "exit code 0\nok");
    assert_eq!(driver.purpose, CallPurpose::Judge);
    assert_eq!(driver.goal_view().ended_at, None);
    driver.pass(seconds(7));
    driver.answer(priced(says(r#"{"met": true}"#), 3, 30));
    let view = driver.goal_view();
    assert_eq!(view.end, Some(GoalEnd::CriteriaMet));
    assert_eq!((view.started_at, view.ended_at), (Some(start), Some(driver.now)));
    assert_eq!(view.usage, Some(usage(3, 33, 330)));
}

#[test]
fn nothing_is_known_before_the_first_turn() {
    let mut driver = Driver::fresh(EngineSettings {
        active_hours: Some(builders::hours("UTC", "00:10", "10:00")),
        ..goal(|_| {})
    });
    driver.start(1);
    let view = driver.goal_view();
    assert_eq!((view.started_at, view.usage), (None, None));
    driver.next_timer();
    assert_eq!(driver.goal_view().started_at, Some(driver.now));
    assert_eq!(driver.used(), Some(usage(0, 0, 0)));
}

#[test]
fn calls_that_were_refused_do_not_count_and_those_that_failed_do() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.fail(FailureKind::LinkLost);
    driver.next_timer();
    driver.fail(FailureKind::Unreachable);
    driver.next_timer();
    driver.answer(says("Not yet."));
    assert_eq!(
        driver.used(),
        Some(usage(2, 0, 0)),
        "usage that is not reported is not known"
    );
}

#[test]
fn the_totals_outlast_restarts_and_are_new_with_the_next_run() {
    let mut driver = Driver::with_goal(goal(|goal| goal.max_steps = 2));
    let start = driver.now;
    driver.answer(priced(says("Not yet."), 10, 100));
    driver.pass(seconds(30));
    driver.restart(2);
    assert_eq!(driver.goal_view().started_at, Some(start));
    driver.answer(priced(says("Not yet."), 10, 100));
    let ended = driver.goal_view();
    assert_eq!(ended.end, Some(GoalEnd::StepLimit));
    assert_eq!(
        (ended.ended_at, ended.usage),
        (Some(driver.now), Some(usage(2, 20, 200)))
    );
    driver.pass(seconds(60));
    driver.restart(3);
    let view = driver.goal_view();
    assert_eq!((view.started_at, view.ended_at), (Some(driver.now), None));
    assert_eq!(view.usage, Some(usage(0, 0, 0)));
}

#[test]
fn an_edit_of_the_goal_is_part_of_the_run_as_its_steps_are() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    let start = driver.now;
    driver.answer(priced(says("Not yet."), 10, 100));
    driver.pass(seconds(30));
    driver.settings = EngineSettings {
        spec: 1,
        ..goal(|goal| goal.description = "Count the moons.".into())
    };
    driver.restart(2);
    let view = driver.goal_view();
    assert_eq!((view.steps, view.started_at), (1, Some(start)));
    assert_eq!(view.usage, Some(usage(1, 10, 100)));
}

#[test]
fn a_run_that_a_version_without_totals_has_begun_has_none() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.answer(priced(says("Not yet."), 10, 100));
    let mut saved = serde_json::to_value(&driver.saved).unwrap();
    let removed = saved["goal"].as_object_mut().unwrap().remove("totals");
    assert!(removed.is_some_and(|totals| totals != json!(null)));
    driver.saved = serde_json::from_value(saved).unwrap();
    driver.restart(2);
    driver.next_timer();
    driver.answer(priced(says("Not yet."), 10, 100));
    let view = driver.goal_view();
    assert_eq!((view.steps, view.started_at, view.usage), (2, None, None));
}

#[test]
fn a_loop_that_a_user_has_stopped_has_an_end_too() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.feed(EngineInput::StopRequested { token: "1".into() });
    driver.answer(says("Not yet."));
    let view = driver.engine.view();
    assert_eq!(view.outcome, Some(LoopOutcome::Cancelled));
    let goal = view.goal.unwrap();
    assert_eq!((goal.ended_at.is_some(), goal.end), (true, None));
}

#[test]
fn a_clock_that_was_set_back_moves_the_start() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    let start = driver.now;
    driver.now -= seconds(1000);
    driver.answer(says("Not yet."));
    assert_eq!(driver.goal_view().started_at, Some(start - seconds(1000)));
}

#[test]
fn the_usage_changes_only_together_with_something_else_that_is_seen() {
    let mut driver = Driver::with_goal(goal(tests_and_sense));
    let mut last = driver.engine.view();
    for answer in [
        calls("files__read", "{}"),
        says("Not yet."),
        calls("files__read", "{}"),
        finish("done"),
        says(r#"{"met": true}"#),
    ] {
        if driver.in_flight.is_none() {
            driver.next_timer();
        }
        driver.answer(priced(answer, 10, 100));
        for _ in 0..2 {
            let view = driver.engine.view();
            let mut same = view.clone();
            same.goal.as_mut().unwrap().usage = last.goal.as_ref().unwrap().usage;
            assert!(view == last || same != last, "{view:?}");
            last = view;
            if let Some(run) = driver.running.keys().next().copied() {
                driver.end(
                    run.index,
                    ToolOutcome::Done {
                        text: "exit code 0".into(),
                    },
                );
            }
        }
    }
    assert_eq!(driver.used(), Some(usage(5, 50, 500)));
}
