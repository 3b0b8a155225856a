//! The limit of failed tool runs in a row: trips at N, not at N-1, and recovers only by its own rule.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::work::{unknown, wants};
use super::*;

const OUTPUT: &str = "text of the tool";

fn limited(limit: u32) -> Driver {
    Driver::with_tools(EngineSettings {
        max_consecutive_tool_failures: Some(limit),
        max_calls_per_turn: 1000,
        ..settings()
    })
}

fn failed() -> ToolOutcome {
    ToolOutcome::Failed { text: OUTPUT.into() }
}

fn run(driver: &mut Driver, outcome: ToolOutcome) {
    driver.answer(wants(&["files__read"]));
    driver.end(1, outcome);
}

fn fail(driver: &mut Driver, times: usize) {
    for _ in 0..times {
        assert_eq!(driver.reasons(), []);
        run(driver, failed());
    }
}

fn succeed(driver: &mut Driver) {
    run(driver, ToolOutcome::Done { text: OUTPUT.into() });
}

/// Asserts that the loop is paused by the limit. Returns for how long.
fn cooldown(driver: &Driver) -> i64 {
    assert_eq!(driver.reasons(), [PauseReason::ConsecutiveToolFailures]);
    assert_eq!((driver.state(), driver.in_flight), (LoopState::Paused, None));
    let resumes_at = driver.engine.view().resumes_at.unwrap();
    resumes_at.duration_since(driver.now).as_secs()
}

#[rstest]
#[case::error(failed(), "Error")]
#[case::unavailable(ToolOutcome::Unavailable { message: OUTPUT.into() }, "Unavailable")]
#[case::unknown(unknown(), "Unknown")]
fn the_loop_pauses_at_the_limit_and_not_before_it(#[case] outcome: ToolOutcome, #[case] named: &str) {
    let mut driver = limited(3);
    run(&mut driver, outcome.clone());
    run(&mut driver, outcome.clone());
    assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
    run(&mut driver, outcome);
    assert_eq!(cooldown(&driver), 60);
    let message = driver.engine.view().reasons.remove(0).message;
    assert!(
        message.contains("3 tool runs in a row failed and reached guardrails.maxConsecutiveToolFailures (3)"),
        "{message}"
    );
    assert!(
        message.contains(named) && message.contains("raise the limit"),
        "{message}"
    );
    assert!(!message.contains(OUTPUT), "{message}");
    let trips = driver.engine.view().counts.guardrail_trips;
    assert_eq!(
        (trips[0].guardrail.as_str(), trips[0].count),
        ("ConsecutiveToolFailures", 1)
    );
}

#[test]
fn without_a_limit_failures_never_pause_the_loop() {
    let mut driver = Driver::with_tools(EngineSettings {
        max_calls_per_turn: 1000,
        ..settings()
    });
    fail(&mut driver, 200);
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn a_successful_run_ends_the_streak() {
    let mut driver = limited(3);
    fail(&mut driver, 2);
    succeed(&mut driver);
    fail(&mut driver, 2);
    assert_eq!(driver.reasons(), []);
    fail(&mut driver, 1);
    cooldown(&driver);
}

#[test]
fn failures_and_successes_in_turn_never_trip() {
    let mut driver = limited(2);
    for _ in 0..100 {
        fail(&mut driver, 1);
        succeed(&mut driver);
    }
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn only_its_end_ends_the_pause_and_then_it_counts_from_zero() {
    let mut driver = limited(3);
    fail(&mut driver, 3);
    driver.pass(seconds(10));
    try_everything_but(&mut driver, false);
    assert_eq!(cooldown(&driver), 50);
    driver.settings.max_calls_per_turn = 999;
    driver.settings.max_consecutive_tool_failures = Some(100);
    driver.settings.spec = 1;
    driver.restart(2);
    assert_eq!(cooldown(&driver), 50, "an edit is not its end");
    driver.settings.max_consecutive_tool_failures = Some(3);
    driver.restart(3);
    driver.pass(seconds(49));
    assert_eq!(cooldown(&driver), 1);
    driver.pass(seconds(1));
    assert_eq!((driver.state(), driver.in_flight.is_some()), (LoopState::Running, true));
    fail(&mut driver, 2);
    assert_eq!(driver.reasons(), []);
    fail(&mut driver, 1);
    cooldown(&driver);
}

#[test]
fn each_cool_down_is_twice_as_long_up_to_an_hour_until_a_run_succeeds() {
    let mut driver = limited(2);
    for expected in [60, 120, 240, 480, 960, 1920, 3600, 3600] {
        fail(&mut driver, 2);
        assert_eq!(cooldown(&driver), expected);
        driver.pass(seconds(expected));
    }
    succeed(&mut driver);
    fail(&mut driver, 2);
    assert_eq!(cooldown(&driver), 60);
}

#[test]
fn a_completed_turn_does_not_end_the_streak_and_a_failed_call_is_no_tool_run() {
    let mut driver = limited(2);
    fail(&mut driver, 1);
    driver.turn();
    driver.failed_turn();
    driver.next_timer();
    fail(&mut driver, 1);
    cooldown(&driver);
}

#[test]
fn a_resume_request_ends_the_pause_once_and_the_next_one_is_as_short_as_the_first() {
    let mut driver = limited(2);
    fail(&mut driver, 2);
    driver.pass(seconds(60));
    fail(&mut driver, 2);
    assert_eq!(cooldown(&driver), 120);
    resume(&mut driver, "a");
    fail(&mut driver, 2);
    resume(&mut driver, "a");
    assert_eq!(cooldown(&driver), 60, "each token counts once");
}

#[test]
fn the_count_the_pause_and_the_doubling_survive_a_restart() {
    let mut driver = limited(3);
    fail(&mut driver, 2);
    driver.restart(1);
    fail(&mut driver, 1);
    driver.pass(seconds(20));
    driver.restart(2);
    assert_eq!(cooldown(&driver), 40);
    driver.pass(seconds(40));
    driver.restart(3);
    fail(&mut driver, 3);
    assert_eq!(cooldown(&driver), 120);
}

#[test]
fn calls_that_are_denied_and_tools_of_the_mode_neither_count_nor_end_the_streak() {
    let mut driver = limited(2);
    fail(&mut driver, 1);
    for _ in 0..3 {
        driver.answer(wants(&["invented"]));
    }
    assert_eq!(driver.reasons(), []);
    driver.answer(calls("yield", r#"{"sleep": 60, "reason": "to wait"}"#));
    driver.pass(seconds(60));
    assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
    fail(&mut driver, 1);
    cooldown(&driver);
}

#[test]
fn a_repeated_run_counts_as_one_failure_once_its_retries_are_exhausted() {
    let mut driver = limited(1);
    driver.answer(wants(&["job__start"]));
    driver.end(1, unknown());
    driver.end(1, unknown());
    assert_eq!(driver.reasons(), []);
    driver.end(1, unknown());
    cooldown(&driver);
}

#[test]
fn runs_that_fail_together_trip_once_and_the_next_streak_begins_after_the_pause() {
    let mut driver = limited(3);
    driver.answer(wants(&["files__read", "files__list", "files__read", "files__list"]));
    assert_eq!(driver.running(), [1, 2, 3, 4]);
    for index in [4, 1, 3, 2] {
        driver.end(index, failed());
    }
    assert_eq!(cooldown(&driver), 60);
    assert_eq!(
        driver.notes(RecordKind::GuardrailTriggered),
        ["ConsecutiveToolFailures"]
    );
    driver.pass(seconds(60));
    fail(&mut driver, 2);
    assert_eq!(driver.reasons(), []);
    fail(&mut driver, 1);
    assert_eq!(cooldown(&driver), 120);
}

#[test]
fn a_run_that_succeeds_beside_those_that_trip_shortens_the_next_pause_and_not_this_one() {
    let mut driver = limited(3);
    driver.answer(wants(&["files__read", "files__list", "files__read", "files__list"]));
    for index in 1..=3 {
        driver.end(index, failed());
    }
    driver.pass(seconds(10));
    driver.done(4, OUTPUT);
    assert_eq!(cooldown(&driver), 50);
    driver.pass(seconds(50));
    fail(&mut driver, 3);
    assert_eq!(cooldown(&driver), 60);
}
