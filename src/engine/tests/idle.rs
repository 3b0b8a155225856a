//! `guardrails.idleTimeoutSeconds`: trips after that much time awake without an effective action, and what does not
//! count.

use super::*;
use agentloop_api::status::LoopOutcome;

fn ended(driver: &Driver) -> bool {
    let view = driver.engine.view();
    assert_eq!(
        view.outcome == Some(LoopOutcome::Idle),
        view.state == LoopState::Stopped
    );
    view.outcome == Some(LoopOutcome::Idle)
}

/// The limit is 30 s.
fn short() -> EngineSettings {
    EngineSettings {
        idle_timeout: seconds(30),
        longest_text_delay: seconds(60),
        ..settings()
    }
}

/// A loop that has been awake without an effective action for 29 s, its next call in flight.
fn nearly_idle() -> Driver {
    let mut driver = Driver::started(short());
    driver.pass(seconds(28));
    driver.answer(says("hm"));
    assert!(!ended(&driver));
    assert_eq!(driver.next_timer(), seconds(1));
    driver
}

/// It continues for 29 s more, and ends soon after.
fn ends_after_29_seconds(mut driver: Driver) {
    driver.pass(seconds(29));
    driver.answer(says("hm"));
    assert!(!ended(&driver));
    driver.next_timer();
    driver.answer(says("hm"));
    assert!(ended(&driver));
}

#[test]
fn it_ends_the_loop_at_the_limit_and_not_a_moment_before() {
    let rest = seconds(1);
    let mut driver = nearly_idle();
    driver.pass(rest - SignedDuration::from_nanos(1));
    driver.answer(says("hm"));
    assert!(!ended(&driver));
    let mut driver = nearly_idle();
    driver.pass(rest);
    driver.answer(says("hm"));
    assert!(ended(&driver) && driver.stopped);
    assert_eq!(driver.reasons(), []);
    let ends = driver.notes(RecordKind::Transition);
    assert_eq!(ends[ends.len() - 2..], ["Running -> Stopping", "Stopping -> Stopped"]);
}

#[test]
fn no_further_call_of_a_turn_begins_after_the_limit() {
    let mut driver = nearly_idle();
    driver.pass(seconds(10));
    driver.answer(calls("shell", "{}"));
    assert!(ended(&driver));
    assert_eq!(driver.in_flight, None);
    assert_eq!(driver.engine.view().counts.turns, 2);
}

#[test]
fn a_sleep_chosen_by_the_agent_resets_the_idle_time_and_does_not_count() {
    let mut driver = nearly_idle();
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.pass(seconds(3600));
    ends_after_29_seconds(driver);
}

#[test]
fn an_effective_action_resets_the_idle_time_however_long_it_was() {
    let mut driver = nearly_idle();
    driver.pass(seconds(5000));
    let now = driver.now;
    driver.engine.state.counters.idle.effective_action(now);
    ends_after_29_seconds(driver);
}

#[test]
fn neither_a_pause_nor_a_forced_sleep_nor_the_time_that_the_pod_is_down_counts() {
    let mut driver = Driver::started(short());
    driver.pass(seconds(20));
    driver.answer(says("hm"));
    driver.next_timer();
    driver.feed(EngineInput::LinkLost);
    driver.pass(seconds(10_000));
    driver.feed(EngineInput::LinkBack);
    driver.answer(says("hm"));
    assert!(!ended(&driver));
    driver.next_timer();
    driver.timer = None;
    driver.pass(seconds(10_000));
    driver.restart(2);
    driver.answer(says("hm"));
    assert!(!ended(&driver));
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1,
        ..short()
    });
    for _ in 0..100 {
        driver.answer(says("hm"));
        assert_eq!(driver.state(), LoopState::Paused);
        driver.next_timer();
    }
    assert!(!ended(&driver));
}

#[test]
fn a_provider_outage_of_days_ends_no_loop() {
    let mut driver = nearly_idle();
    let end = driver.now + SignedDuration::from_hours(100);
    while driver.now < end {
        if driver.in_flight.is_some() {
            driver.pass(seconds(30));
            driver.fail(FailureKind::Unreachable);
        } else {
            driver.next_timer();
        }
    }
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    driver.answer(says("hm"));
    assert!(!ended(&driver), "only answers count");
    driver.next_timer();
    driver.answer(says("hm"));
    assert!(ended(&driver));
}

#[test]
fn an_idle_loop_stays_ended_in_its_pod_and_starts_again_in_the_next() {
    let mut driver = nearly_idle();
    driver.pass(seconds(1));
    driver.answer(says("hm"));
    assert!(ended(&driver));
    try_everything_but(&mut driver, true);
    driver.restart(1);
    assert!(ended(&driver) && driver.stopped);
    driver.restart(2);
    assert_eq!(driver.state(), LoopState::Running);
    driver.pass(seconds(29));
    driver.answer(says("hm"));
    assert!(!ended(&driver));
}

#[test]
fn a_clock_that_was_set_back_counts_nothing() {
    let mut driver = nearly_idle();
    driver.now -= SignedDuration::from_hours(1);
    driver.feed(EngineInput::Timer);
    driver.answer(says("hm"));
    assert!(!ended(&driver));
    driver.next_timer();
    driver.answer(says("hm"));
    assert!(ended(&driver));
}

#[test]
fn an_outcome_of_a_tool_is_an_effective_action_when_it_is_new_and_none_when_it_was_seen() {
    let done = |text: &str| ToolOutcome::Done { text: text.into() };
    let failed = |text: &str| ToolOutcome::Failed { text: text.into() };
    for (first, second, ends) in [
        (done("the queue has 3 items"), done("the queue has 3 items"), true),
        (done("the queue has 3 items"), done("the queue has 2 items"), false),
        (failed("3 tests fail"), failed("3 tests fail"), true),
        (failed("3 tests fail"), failed("2 tests fail"), false),
    ] {
        let mut driver = Driver::with_tools(short());
        driver.answer(work::wants(&["files__read"]));
        driver.end(1, first);
        driver.pass(seconds(20));
        driver.answer(work::wants(&["files__read"]));
        driver.pass(seconds(3000));
        driver.end(1, second.clone());
        assert!(!ended(&driver), "a run is not idle time");
        driver.pass(seconds(10));
        driver.answer(says("hm"));
        assert_eq!(ended(&driver), ends, "{second:?}");
    }
}

#[test]
fn a_slow_call_counts_for_at_most_thirty_seconds() {
    let mut driver = Driver::started(EngineSettings {
        idle_timeout: seconds(62),
        longest_text_delay: seconds(60),
        ..settings()
    });
    for _ in 0..2 {
        driver.pass(seconds(3000));
        driver.answer(says("hm"));
        assert!(!ended(&driver));
        driver.next_timer();
    }
    driver.answer(says("hm"));
    assert!(ended(&driver), "twice 30 s, and 1 s and 2 s between");
}
