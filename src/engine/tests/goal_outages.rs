//! Mode `Goal` while the toolbox cannot be reached: a check waits for it for a while, and costs no step meanwhile.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::goal::{command, criterion, ended, finish, goal, shell};
use super::*;
use crate::mode_requests::MAX_CHECK_RETRIES;
use agentloop_api::goal::GoalEnd;

/// The command of the only criterion runs.
fn checked() -> Driver {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria = vec![criterion("tests", command("cargo test", None))];
    }));
    driver.answer(says("The code is written."));
    driver
}

/// The tool of the command cannot be reached this many times.
fn fail(driver: &mut Driver, times: u32) {
    for _ in 0..times {
        while driver.running().is_empty() {
            driver.next_timer();
        }
        let down = ToolOutcome::Unavailable { message: "down".into() };
        driver.end(driver.running()[0], down);
    }
}

#[test]
fn a_check_whose_tool_cannot_be_reached_is_tried_again_after_longer_and_longer_waits() {
    let mut driver = checked();
    for wait in [15, 30, 60, 120, 240] {
        fail(&mut driver, 1);
        assert_eq!((driver.running(), driver.goal_view().steps), (Vec::new(), 0));
        driver.pass(seconds(wait - 1));
        assert_eq!(driver.running(), Vec::<u32>::new(), "after {wait} s and not before");
        driver.pass(seconds(1));
        assert_eq!(driver.running().len(), 1);
    }
    driver.done(driver.running()[0], "exit code 0\nok");
    assert_eq!(ended(&driver).1, Some(GoalEnd::CriteriaMet));
    assert_eq!(driver.goal_view().steps, 1);
}

#[rstest]
#[case(MAX_CHECK_RETRIES, 0)]
#[case(MAX_CHECK_RETRIES + 1, 1)]
fn a_permanently_unavailable_tool_finally_costs_a_step(#[case] failures: u32, #[case] steps: u32) {
    let mut driver = checked();
    fail(&mut driver, failures);
    assert_eq!(driver.goal_view().steps, steps);
    if steps == 0 {
        return;
    }
    assert!(
        driver.observed().contains("Last check of tests: down"),
        "{}",
        driver.observed()
    );
    // The next check begins with all of its retries.
    driver.answer(says("The code is written."));
    fail(&mut driver, MAX_CHECK_RETRIES);
    assert_eq!(driver.goal_view().steps, steps);
}

#[test]
fn a_toolbox_that_has_not_answered_yet_is_waited_for() {
    let mut driver = Driver::fresh(goal(|goal| {
        goal.criteria = vec![criterion("tests", command("cargo test", None))];
    }));
    driver.feed(EngineInput::ToolsChanged {
        tools: Vec::new(),
        silent: vec!["toolbox".into()],
    });
    driver.start(1);
    driver.answer(finish("done"));
    assert_eq!((driver.running(), driver.goal_view().steps), (Vec::new(), 0));
    driver.offer(vec![shell()]);
    driver.pass(seconds(15));
    driver.done(driver.running()[0], "exit code 0\nok");
    assert_eq!(ended(&driver).1, Some(GoalEnd::CriteriaMet));
}

#[test]
fn a_request_is_answered_in_each_wait_and_the_check_starts_over() {
    let mut driver = checked();
    driver.ask("a");
    driver.ask("b");
    fail(&mut driver, 1);
    assert_eq!(driver.purpose, CallPurpose::Chat);
    driver.answer(says("well"));
    assert_eq!(driver.in_flight, None, "the other request waits for the next try");
    while driver.running().is_empty() {
        driver.next_timer();
    }
    driver.done(driver.running()[0], "exit code 0\nok");
    assert_eq!(ended(&driver).1, Some(GoalEnd::CriteriaMet));
}

/// Each has five retries of its own only if nothing failed before: 16 criteria would wait for two hours.
#[test]
fn criteria_of_one_check_share_its_retries_and_a_request_adds_none() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria = vec![
            criterion("tests", command("cargo test", None)),
            criterion("lints", command("cargo clippy", None)),
        ];
    }));
    driver.answer(says("The code is written."));
    fail(&mut driver, MAX_CHECK_RETRIES);
    driver.ask("a");
    fail(&mut driver, 1);
    assert_eq!(driver.running().len(), 1, "the other criterion is checked at once");
    let begun = driver.now;
    fail(&mut driver, 1);
    assert_eq!((driver.now, driver.goal_view().steps), (begun, 1));
}

#[test]
fn a_restart_keeps_the_wait_and_another_pod_begins_with_all_retries() {
    let mut driver = checked();
    fail(&mut driver, 1);
    driver.restart(1);
    assert_eq!(driver.running(), Vec::<u32>::new());
    driver.pass(seconds(15));
    assert_eq!(driver.running().len(), 1);
    fail(&mut driver, MAX_CHECK_RETRIES - 1);
    driver.restart(2);
    assert_eq!(driver.running().len(), 1, "its toolbox is another one");
    fail(&mut driver, MAX_CHECK_RETRIES);
    assert_eq!(driver.goal_view().steps, 0);
}
