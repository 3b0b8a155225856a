//! Mode Task without a task: the agent's own task is due again after its interval, or the pod is given back.

use pretty_assertions::assert_eq;

use super::tasks::{at_work, mode, with};
use super::*;
use crate::settings::TaskSettings;
use agentloop_api::status::LoopOutcome;
use agentloop_api::task::TaskOutcome;

/// A loop that keeps its pod for 60 s without a task, and has answered one.
fn scaling() -> Driver {
    let mut driver = at_work(TaskSettings {
        idle_pod: Some(seconds(60)),
        ..mode()
    });
    driver.answer(says("done"));
    driver
}

#[test]
fn a_loop_without_a_task_scales_to_zero_exactly_at_its_time() {
    let mut driver = scaling();
    let due = driver.now + seconds(60);
    assert_eq!(driver.engine.scale_down_due(), Some(due));
    driver.pass(seconds(59));
    driver.feed(EngineInput::ScaleDown);
    assert_eq!(driver.engine.view().outcome, None);
    driver.take("b");
    assert_eq!(driver.engine.scale_down_due(), None);
    driver.answer(says("done"));
    driver.pass(seconds(59));
    driver.feed(EngineInput::ScaleDown);
    assert_eq!(
        driver.engine.view().outcome,
        None,
        "the time begins with the end of the last task"
    );
    driver.pass(seconds(1));
    driver.feed(EngineInput::ScaleDown);
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::ScaledToZero));
    assert!(driver.stopped && !driver.engine.accepts_tasks_beyond());
    driver.take("c");
    assert_eq!(
        driver.tasks.waiting,
        [],
        "nothing is accepted by a pod that is about to go"
    );
    driver.restart(2);
    assert_eq!(
        (driver.state(), driver.engine.view().outcome),
        (LoopState::Sleeping, None)
    );
    driver.take("c");
    driver.answer(says("done"));
    assert_eq!(driver.tasks.responses.len(), 3);
}

#[test]
fn a_clock_that_was_set_back_does_not_delay_the_end_of_the_pod() {
    let mut driver = scaling();
    driver.pass(seconds(10));
    driver.feed(EngineInput::Timer);
    driver.now -= seconds(31_536_000);
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.engine.scale_down_due(), Some(driver.now + seconds(50)));
}

#[test]
fn a_paused_loop_and_one_without_the_setting_keep_their_pods() {
    let mut driver = scaling();
    driver.feed(EngineInput::LinkLost);
    driver.pass(seconds(600));
    driver.feed(EngineInput::ScaleDown);
    assert_eq!(driver.engine.view().outcome, None);
    let mut driver = at_work(mode());
    driver.answer(says("done"));
    driver.pass(seconds(100_000));
    driver.feed(EngineInput::ScaleDown);
    assert_eq!(driver.engine.view().outcome, None);
}

/// A loop whose own task is done, and due again after 900 s.
fn repeating() -> Driver {
    let mut driver = Driver::with_tools(with(TaskSettings {
        prompt: Some("count the stars".into()),
        min_interval: Some(seconds(900)),
        ..mode()
    }));
    driver.pass(seconds(10));
    driver.answer(says("9096"));
    driver
}

#[test]
fn the_task_of_the_spec_is_one_again_after_its_interval_and_not_before() {
    let mut driver = repeating();
    let due = driver.now + seconds(900);
    assert_eq!(
        (driver.state(), driver.engine.view().resumes_at),
        (LoopState::Sleeping, Some(due))
    );
    driver.pass(seconds(899));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.restart(1);
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.pass(seconds(1));
    driver.answer(says("9097"));
    assert_eq!(driver.tasks.responses.len(), 2);
    // After a failure as well.
    driver.pass(seconds(900));
    driver.fail(FailureKind::BadResponse);
    assert_eq!(driver.response().outcome, TaskOutcome::Failed);
    driver.pass(seconds(899));
    assert_eq!(driver.in_flight, None);
    driver.pass(seconds(1));
    assert!(driver.in_flight.is_some());
}

#[test]
fn other_tasks_come_before_the_task_of_the_spec() {
    let mut driver = repeating();
    driver.pass(seconds(890));
    driver.take("a");
    driver.take("b");
    driver.pass(seconds(20));
    driver.answer(says("first"));
    driver.answer(says("second"));
    assert!(driver.observed().contains("count the stars"), "{}", driver.observed());
    assert_eq!(driver.tasks.responses.len(), 3);
}

#[test]
fn a_pause_holds_at_most_one_repetition() {
    let mut driver = repeating();
    driver.feed(EngineInput::LinkLost);
    driver.pass(seconds(5000));
    assert_eq!(driver.engine.view().waiting_tasks, 1, "however long the pause is");
    driver.feed(EngineInput::LinkBack);
    driver.answer(says("9097"));
    driver.pass(seconds(899));
    assert_eq!(driver.tasks.responses.len(), 2);
    assert_eq!(driver.in_flight, None);
}

#[test]
fn a_clock_that_was_set_back_does_not_delay_the_task_of_the_spec() {
    let mut driver = repeating();
    driver.now -= seconds(5000);
    driver.feed(EngineInput::Timer);
    driver.pass(seconds(900));
    assert!(driver.in_flight.is_some());
}
