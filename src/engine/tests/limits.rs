//! Each limit trips at N, not at N-1, and recovers by its own rule and by no other.

use super::*;

/// Fails turns until the loop is paused, and returns how many it took.
fn fail_until_paused(driver: &mut Driver) -> u32 {
    for failed in 1..100 {
        driver.failed_turn();
        if driver.state() == LoopState::Paused {
            return failed;
        }
        driver.next_timer();
    }
    panic!("never paused");
}

#[test]
fn test_loop_error_backoff_doubles_the_delay_up_to_the_longest_and_a_success_resets_it() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_errors: 100,
        ..settings()
    });
    let mut delays = Vec::new();
    for _ in 0..9 {
        driver.failed_turn();
        delays.push(driver.next_timer().as_millis());
    }
    assert_eq!(delays, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000, 10_000]);
    assert_eq!(driver.engine.view().consecutive_errors, 9);
    driver.answer(says("well"));
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    assert_eq!(driver.next_timer().as_millis(), 100);
    driver.failed_turn();
    assert_eq!(driver.next_timer().as_millis(), 200);
}

#[test]
fn test_loop_error_limit_pauses_at_the_limit_and_not_before() {
    let mut driver = Driver::started(settings());
    assert_eq!(fail_until_paused(&mut driver), 5);
    assert_eq!(driver.reasons(), [PauseReason::ConsecutiveErrors]);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(60)));
    assert!(driver.engine.view().reasons[0].message.contains("agentloop.dev/resume"));
}

#[test]
fn the_error_limit_clears_by_its_cool_down_which_grows_until_a_success() {
    let mut driver = Driver::started(settings());
    let mut waits = Vec::new();
    for _ in 0..8 {
        assert_eq!(fail_until_paused(&mut driver), 5, "the streak starts at zero again");
        try_everything_but(&mut driver, false);
        waits.push(driver.next_timer().as_secs());
        assert_eq!(driver.state(), LoopState::Running);
    }
    assert_eq!(waits, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
    driver.turn();
    assert_eq!(fail_until_paused(&mut driver), 5);
    assert_eq!(driver.next_timer().as_secs(), 60);
}

#[test]
fn the_error_limit_clears_by_a_resume_request_once_per_token() {
    let mut driver = Driver::started(settings());
    fail_until_paused(&mut driver);
    driver.pass(seconds(20));
    resume(&mut driver, "1");
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    fail_until_paused(&mut driver);
    assert_eq!(
        driver.engine.view().resumes_at,
        Some(driver.now + seconds(60)),
        "a resume resets the cool-down"
    );
    resume(&mut driver, "1");
    assert_eq!(driver.state(), LoopState::Paused);
    resume(&mut driver, "2");
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.engine.view().handled.resume.as_deref(), Some("2"));
}

#[test]
fn a_resume_request_without_a_cool_down_leaves_the_streak_of_errors() {
    let mut driver = Driver::started(settings());
    driver.failed_turn();
    resume(&mut driver, "1");
    assert_eq!(driver.engine.view().consecutive_errors, 1);
}

#[test]
fn the_limit_of_turns_without_a_sleep_forces_one_at_the_limit_and_not_before() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 3,
        ..settings()
    });
    driver.turn();
    driver.turn();
    assert_eq!(driver.state(), LoopState::Running);
    driver.turn();
    assert_eq!(driver.state(), LoopState::Paused);
    assert_eq!(driver.reasons(), [PauseReason::MaxConsecutiveTurns]);
    assert_eq!(driver.engine.view().consecutive_turns, 3);
}

#[test]
fn a_forced_sleep_ends_by_time_only_and_grows_until_the_agent_sleeps_of_its_own_choice() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1,
        ..settings()
    });
    let mut waits = Vec::new();
    for _ in 0..8 {
        driver.answer(says("more"));
        assert_eq!(driver.state(), LoopState::Paused);
        try_everything_but(&mut driver, true);
        assert_eq!(driver.state(), LoopState::Paused);
        waits.push(driver.next_timer().as_secs());
        assert_eq!(driver.engine.view().consecutive_turns, 0);
        assert!(driver.observed().contains("a pause (MaxConsecutiveTurns) is over"));
    }
    assert_eq!(waits, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
    driver.answer(calls("yield", r#"{"sleep": 60}"#));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.pass(seconds(60));
    driver.answer(says("more"));
    assert_eq!(driver.next_timer().as_secs(), 60);
}

#[test]
fn failed_turns_do_not_count_as_turns_without_a_sleep() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 2,
        ..settings()
    });
    driver.failed_turn();
    driver.next_timer();
    driver.turn();
    assert_eq!(driver.engine.view().consecutive_turns, 1);
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn the_limit_of_calls_ends_the_turn_exactly_at_the_limit_and_the_model_is_notified() {
    let mut driver = Driver::started(EngineSettings {
        max_calls_per_turn: 3,
        ..settings()
    });
    driver.answer(calls("shell", "{}"));
    driver.answer(calls("shell", "{}"));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c3a1");
    driver.answer(calls("shell", "{}"));
    assert_eq!(driver.in_flight, None);
    assert_eq!(driver.engine.view().counts.turns, 1);
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    driver.pass(seconds(1));
    assert!(driver.observed().contains("maxCallsPerTurn (3)"));
    driver.answer(calls("shell", "{}"));
    assert_eq!(
        driver.in_flight.unwrap().to_string(),
        "t2c2a1",
        "the next turn counts from zero"
    );
    driver.answer(says("well"));
    driver.pass(seconds(1));
    assert!(!driver.observed().contains("maxCallsPerTurn"), "told once");
}

#[test]
fn a_turn_that_ends_the_worker_three_times_pauses_the_loop_and_two_times_does_not() {
    let mut driver = Driver::started(settings());
    driver.restart(1);
    driver.restart(1);
    assert_eq!(driver.state(), LoopState::Running);
    driver.restart(1);
    assert_eq!(driver.reasons(), [PauseReason::CrashLoop]);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(60)));
    assert_eq!(driver.in_flight, None);
    try_everything_but(&mut driver, false);
    driver.restart(1);
    assert_eq!(driver.reasons(), [PauseReason::CrashLoop], "a restart does not end it");
    driver.next_timer();
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
    driver.restart(1);
    driver.restart(1);
    assert_eq!(driver.state(), LoopState::Running);
    driver.restart(1);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(120)));
    resume(&mut driver, "1");
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
    crash_until_paused(&mut driver);
    assert_eq!(
        driver.engine.view().resumes_at,
        Some(driver.now + seconds(60)),
        "a resume resets the cool-down"
    );
}

fn crash_until_paused(driver: &mut Driver) {
    for _ in 0..3 {
        assert_eq!(driver.state(), LoopState::Running);
        driver.restart(1);
    }
    assert_eq!(driver.reasons(), [PauseReason::CrashLoop]);
}

#[test]
fn new_pods_are_no_crashes_and_do_not_reset_those_of_earlier_pods() {
    let mut driver = Driver::started(settings());
    for epoch in 2..=20 {
        driver.restart(epoch);
        assert_eq!(driver.state(), LoopState::Running, "{epoch}");
    }
    driver.restart(20);
    driver.restart(20);
    driver.restart(21);
    assert_eq!(driver.state(), LoopState::Running);
    driver.restart(21);
    assert_eq!(driver.reasons(), [PauseReason::CrashLoop]);
}

#[test]
fn a_completed_turn_resets_the_cool_down_after_crashes() {
    let mut driver = Driver::started(settings());
    crash_until_paused(&mut driver);
    driver.next_timer();
    driver.turn();
    crash_until_paused(&mut driver);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(60)));
}

#[test]
fn a_completed_turn_resets_the_crashes() {
    let mut driver = Driver::started(settings());
    driver.restart(1);
    driver.restart(1);
    driver.turn();
    driver.restart(1);
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn clean_stops_are_no_crashes() {
    let mut driver = Driver::started(settings());
    for epoch in 2..8 {
        driver.feed(EngineInput::Stop {
            cause: StopCause::Suspend,
        });
        driver.restart(epoch);
        assert_eq!(driver.state(), LoopState::Running);
    }
}

#[test]
fn a_long_wait_of_the_provider_pauses_the_loop_until_then_and_a_short_one_does_not() {
    let limited = |milliseconds| CallFailure {
        retry_after_milliseconds: Some(milliseconds),
        ..failure(FailureKind::RateLimited)
    };
    let mut driver = Driver::started(settings());
    driver.fail_with(limited(30_000));
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.next_timer(), seconds(30));
    driver.fail_with(limited(31_000));
    assert_eq!(driver.reasons(), [PauseReason::ProviderRateLimit]);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(31)));
    try_everything_but(&mut driver, true);
    assert_eq!(driver.state(), LoopState::Paused);
    driver.next_timer();
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a3");
}

#[test]
fn test_loop_pauses_without_the_link_starts_nothing_and_keeps_the_answer_of_the_call_in_flight() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::LinkLost);
    assert_eq!(driver.reasons(), [PauseReason::LinkLost]);
    driver.answer(calls("shell", "{}"));
    driver.pass(seconds(10_000));
    resume(&mut driver, "1");
    assert_eq!(driver.in_flight, None);
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
}

#[test]
fn test_loop_resumes_only_when_all_reasons_have_ended() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1,
        ..settings()
    });
    driver.feed(EngineInput::LinkLost);
    driver.answer(says("more"));
    assert_eq!(
        driver.reasons(),
        [PauseReason::MaxConsecutiveTurns, PauseReason::LinkLost]
    );
    driver.pass(seconds(60));
    assert_eq!(driver.reasons(), [PauseReason::LinkLost]);
    assert_eq!(driver.in_flight, None);
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

/// Turns that contain only text slow down.
fn talkative() -> EngineSettings {
    EngineSettings {
        longest_text_delay: seconds(60),
        ..settings()
    }
}

#[test]
fn turns_without_a_tool_call_slow_down_and_the_model_is_notified_once() {
    let mut driver = Driver::with_tools(talkative());
    let mut delays = Vec::new();
    let mut told = Vec::new();
    for _ in 0..9 {
        driver.answer(says("thinking"));
        delays.push(driver.next_timer().as_secs());
        told.push(driver.observed().contains("called no tool"));
    }
    assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    assert_eq!(told.iter().position(|told| *told), Some(0));
    assert_eq!(told.iter().filter(|told| **told).count(), 1);
    driver.answer(work::wants(&["files__read"]));
    driver.done(1, "read");
    driver.answer(says("read it"));
    assert_eq!(driver.next_timer().as_millis(), 100, "a tool call ends the row");
    driver.answer(says("thinking"));
    assert_eq!(driver.next_timer(), seconds(1));
}

#[test]
fn half_of_the_turns_without_a_sleep_may_be_quick_before_text_turns_slow_down() {
    let mut driver = Driver::with_tools(EngineSettings {
        quick_text_turns: 3,
        ..talkative()
    });
    let delays: Vec<_> = (0..5)
        .map(|_| {
            driver.answer(says("thinking"));
            driver.next_timer().as_millis()
        })
        .collect();
    assert_eq!(delays, [100, 100, 100, 1000, 2000]);
}

#[test]
fn a_loop_delayed_by_text_turns_receives_a_notification_at_once() {
    let mut driver = Driver::with_tools(talkative());
    for _ in 0..8 {
        driver.answer(says("thinking"));
        driver.next_timer();
    }
    driver.answer(says("thinking"));
    driver.feed(happens("news"));
    driver.feed(events::notified(super::super::notifications::Notification {
        id: "1".into(),
        source: "sensor/prices".into(),
        priority: super::super::notifications::NotificationPriority::Normal,
        text: "news".into(),
        at: driver.now,
    }));
    assert_eq!(driver.next_timer().as_millis(), 100);
}

/// Polls with sleeps of `nap` seconds. Returns after how many turns a sleep is forced.
fn polls(nap: i64, turns: usize) -> Option<usize> {
    let mut driver = Driver::started(settings());
    for turn in 1..=turns {
        driver.answer(calls("yield", &format!(r#"{{"sleep": {nap}}}"#)));
        if driver.reasons() == [PauseReason::MaxConsecutiveTurns] {
            return Some(turn);
        }
        while driver.in_flight.is_none() {
            driver.next_timer();
        }
    }
    None
}

#[test]
fn naps_of_less_than_a_minute_do_not_circumvent_the_limit_of_turns() {
    assert_eq!(polls(60, 200), None);
    assert_eq!(polls(1, 200), Some(50));
    assert_eq!(polls(5, 200), Some(54), "a minute of naps takes one turn off");
    assert_eq!(polls(30, 200), Some(99));
}
