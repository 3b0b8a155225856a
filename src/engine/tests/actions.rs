//! The limit on actions: trips at N, not at N-1, and recovers only by its own rule.

use pretty_assertions::assert_eq;

use super::work::wants;
use super::*;

/// Performs `count` actions, a second apart.
fn act(driver: &mut Driver, count: usize) {
    for _ in 0..count {
        driver.answer(wants(&["files__write"]));
        driver.done(1, "written");
        driver.pass(seconds(1));
    }
}

#[test]
fn the_limit_of_actions_pauses_before_the_one_above_it_and_not_before() {
    let mut driver = Driver::with_tools(EngineSettings {
        actions_per_minute: 3,
        ..settings()
    });
    let first = driver.now;
    act(&mut driver, 2);
    driver.answer(wants(&["files__read", "files__write"]));
    driver.done(1, "read");
    assert_eq!((driver.state(), driver.running()), (LoopState::Running, vec![2]));
    driver.done(2, "written");
    driver.answer(wants(&["files__read", "files__write", "files__read"]));
    driver.done(1, "read");
    assert_eq!(driver.reasons(), [PauseReason::ActionsPerMinute]);
    assert_eq!(driver.engine.view().resumes_at, Some(first + seconds(60)));
    assert!(
        driver.engine.view().reasons[0]
            .message
            .contains("guardrails.actionsPerMinute")
    );
    assert_eq!(driver.running(), [0_u32; 0]);
}

#[test]
fn the_limit_of_actions_clears_by_its_moment_only_and_for_one_action() {
    let mut driver = Driver::with_tools(EngineSettings {
        actions_per_minute: 2,
        ..settings()
    });
    act(&mut driver, 2);
    driver.answer(wants(&["mail__send", "mail__send"]));
    for input in [
        EngineInput::WakeRequested { token: "w".into() },
        EngineInput::ResumeRequested { token: "r".into() },
        EngineInput::LinkBack,
        EngineInput::Timer,
        happens("chat"),
    ] {
        driver.feed(input);
        assert_eq!(driver.reasons(), [PauseReason::ActionsPerMinute]);
    }
    driver.restart(1);
    assert_eq!(
        driver.reasons(),
        [PauseReason::ActionsPerMinute],
        "a restart does not end it"
    );
    assert_eq!(driver.next_timer(), seconds(58));
    assert_eq!(driver.running(), [1]);
    driver.done(1, "sent");
    assert_eq!(driver.next_timer(), seconds(1), "the second one is a second younger");
    assert_eq!(driver.running(), [2]);
}

#[test]
fn actions_of_a_clock_that_is_set_back_age_as_before() {
    let mut driver = Driver::with_tools(EngineSettings {
        actions_per_minute: 1,
        ..settings()
    });
    act(&mut driver, 1);
    driver.now = "2025-01-01T00:00:00Z".parse().unwrap();
    driver.feed(EngineInput::Timer);
    driver.answer(wants(&["mail__send"]));
    assert!(driver.next_timer() <= seconds(60));
    assert_eq!(driver.running(), [1]);
}

#[test]
fn a_lowered_limit_of_actions_waits_until_enough_have_left_the_window() {
    let mut driver = Driver::with_tools(settings());
    let first = driver.now;
    act(&mut driver, 5);
    driver.settings.actions_per_minute = 2;
    driver.restart(2);
    driver.answer(wants(&["mail__send"]));
    assert_eq!(driver.engine.view().resumes_at, Some(first + seconds(63)));
}
