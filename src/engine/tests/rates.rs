//! `guardrails.rateLimits`: a call without room waits for it, or its turn ends.

use super::work::wants;
use super::*;
use crate::resources::ResourceLimit;
use agentloop_api::agent::{LimitedResource, RateLimit};

pub(super) fn limit(resource: LimitedResource, amount: u64, window_seconds: u32) -> ResourceLimit {
    ResourceLimit::from(&RateLimit {
        resource,
        amount,
        window_seconds,
    })
}

fn limited(resource: LimitedResource, amount: u64, exhaustion_policy: ExhaustionPolicy) -> EngineSettings {
    EngineSettings {
        rate_limits: vec![limit(resource, amount, 60)],
        exhaustion_policy,
        ..settings()
    }
}

fn three_calls(policy: ExhaustionPolicy) -> EngineSettings {
    limited(LimitedResource::LLMCalls, 3, policy)
}

fn used(tokens: u64) -> ModelAnswer {
    ModelAnswer {
        tokens: Some(tokens),
        ..says("hm")
    }
}

#[test]
fn test_loop_pauses_no_resources_before_the_call_beyond_the_amount_and_for_its_window_only() {
    let mut driver = Driver::started(three_calls(ExhaustionPolicy::Skip));
    let start = driver.now;
    driver.turn();
    driver.turn();
    assert_eq!(driver.state(), LoopState::Running, "the third is within the amount");
    driver.turn();
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    let held = driver.engine.view();
    assert!(
        held.reasons[0]
            .message
            .contains("guardrails.rateLimits: 3 LLMCalls in 60 s")
    );
    assert_eq!(
        held.resumes_at,
        Some(start + seconds(60)),
        "when the first is a minute old"
    );
    assert_eq!(driver.in_flight, None);
    try_everything_but(&mut driver, true);
    driver.restart(1);
    driver.restart(2);
    assert_eq!(driver.engine.view().resumes_at, held.resumes_at);
    driver.next_timer();
    assert_eq!(driver.now, start + seconds(60));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t4c1a1");
    assert!(driver.observed().contains("a pause (RateWindow) is over"));
}

#[test]
fn each_attempt_is_a_call_and_one_that_a_budget_refused_is_none() {
    let mut driver = Driver::started(three_calls(ExhaustionPolicy::Skip));
    driver.fail(FailureKind::Interrupted);
    driver.fail(FailureKind::Interrupted);
    assert_eq!(driver.state(), LoopState::Running);
    driver.fail(FailureKind::Interrupted);
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    let mut driver = Driver::started(three_calls(ExhaustionPolicy::Skip));
    for _ in 0..10 {
        driver.fail(FailureKind::TokensPerHour);
        assert_eq!(driver.reasons(), [PauseReason::TokensPerHour]);
        driver.next_timer();
    }
    driver.answer(says("well"));
    driver.pass(seconds(1));
    driver.turn();
    assert_eq!(driver.reasons(), [], "one was answered, one is under way");
}

#[test]
fn skip_ends_a_turn_that_would_have_to_wait_and_the_next_one_begins_with_room() {
    let mut driver = Driver::started(three_calls(ExhaustionPolicy::Skip));
    for _ in 0..3 {
        driver.answer(calls("shell", "{}"));
    }
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    assert_eq!(driver.engine.view().counts.turns, 1);
    driver.next_timer();
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
    assert!(driver.observed().contains("guardrails.rateLimits left no room"));
}

#[test]
fn test_loop_resumes_resources_and_block_delays_a_turn_and_continues_it() {
    let mut driver = Driver::started(three_calls(ExhaustionPolicy::Block));
    for _ in 0..3 {
        driver.answer(calls("shell", "{}"));
    }
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    assert_eq!(driver.engine.view().counts.turns, 0);
    driver.next_timer();
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c4a1");
}

#[test]
fn tokens_wait_once_the_amount_is_reached_and_not_one_before() {
    let settings = || limited(LimitedResource::LLMTokens, 100, ExhaustionPolicy::Skip);
    let mut driver = Driver::started(settings());
    driver.answer(used(60));
    driver.pass(seconds(1));
    driver.answer(used(39));
    driver.pass(seconds(1));
    assert_eq!(driver.state(), LoopState::Running);
    driver.answer(used(1));
    driver.pass(seconds(1));
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    let mut driver = Driver::started(settings());
    driver.answer(says("a server that does not say what it used"));
    driver.pass(seconds(1));
    assert_eq!(driver.reasons(), [PauseReason::RateWindow], "estimated high");
}

#[test]
fn a_raised_amount_resumes_the_loop_and_a_removed_limit_is_dropped() {
    let mut driver = Driver::started(three_calls(ExhaustionPolicy::Skip));
    (0..3).for_each(|_| driver.turn());
    assert_eq!(driver.state(), LoopState::Paused);
    driver.settings = limited(LimitedResource::LLMCalls, 4, ExhaustionPolicy::Skip);
    driver.restart(2);
    assert_eq!(driver.state(), LoopState::Running);
    driver.turn();
    assert_eq!(driver.state(), LoopState::Paused, "what was used still counts");
    driver.settings = settings();
    driver.restart(3);
    driver.settings = three_calls(ExhaustionPolicy::Skip);
    driver.restart(4);
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn a_clock_that_is_set_back_makes_no_wait_longer_than_the_window() {
    let mut driver = Driver::started(three_calls(ExhaustionPolicy::Skip));
    (0..3).for_each(|_| driver.turn());
    driver.now -= SignedDuration::from_hours(1);
    driver.feed(EngineInput::Timer);
    let resumes_at = driver.engine.view().resumes_at.unwrap();
    assert!(resumes_at.duration_since(driver.now) <= seconds(60));
}

/// A loop that may send three mails per hour.
fn three_actions(policy: ExhaustionPolicy) -> Driver {
    Driver::with_tools(EngineSettings {
        rate_limits: vec![limit(LimitedResource::Actions, 3, 3600)],
        exhaustion_policy: policy,
        max_calls_per_turn: 1000,
        ..settings()
    })
}

fn mail(driver: &mut Driver) {
    driver.answer(wants(&["mail__send"]));
    if !driver.running.is_empty() {
        driver.done(1, "sent");
    }
    driver.pass(seconds(1));
}

#[test]
fn an_action_above_the_amount_waits_in_its_turn_and_read_only_runs_do_not() {
    for policy in [ExhaustionPolicy::Skip, ExhaustionPolicy::Block] {
        let mut driver = three_actions(policy);
        let first = driver.now;
        mail(&mut driver);
        mail(&mut driver);
        assert_eq!(driver.reasons(), [], "the third is within the amount");
        mail(&mut driver);
        assert_eq!(driver.reasons(), [], "nothing is held without a request");
        driver.answer(wants(&["files__read", "mail__send"]));
        driver.done(1, "read");
        assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
        let held = driver.engine.view();
        let message = &held.reasons[0].message;
        assert!(
            message.contains("guardrails.rateLimits: 3 Actions in 3600 s"),
            "{message}"
        );
        assert_eq!((held.counts.turns, held.counts.actions), (0, 3));
        assert_eq!(held.resumes_at, Some(first + seconds(3600)));
        let transitions = driver.notes(RecordKind::Transition).len();
        try_everything_but(&mut driver, true);
        assert_eq!(
            driver.notes(RecordKind::Transition).len(),
            transitions,
            "it holds all the time"
        );
        driver.restart(1);
        driver.restart(2);
        assert_eq!(driver.engine.view().resumes_at, held.resumes_at);
        assert_eq!(driver.running(), [0_u32; 0]);
        driver.next_timer();
        assert_eq!((driver.now, driver.running()), (first + seconds(3600), vec![]));
        assert!(driver.result().contains("call it again if it is still right"));
        mail(&mut driver);
        assert_eq!(driver.state(), LoopState::Running);
    }
}

#[test]
fn a_run_that_is_sent_again_after_a_restart_is_no_new_action() {
    let mut driver = three_actions(ExhaustionPolicy::Skip);
    driver.answer(wants(&["db__put"]));
    driver.restart(1);
    driver.restart(1);
    assert_eq!(
        (driver.running(), driver.sent.len()),
        (vec![1], 3),
        "the same run, three times"
    );
    driver.done(1, "written");
    mail(&mut driver);
    mail(&mut driver);
    assert_eq!(driver.reasons(), []);
    mail(&mut driver);
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
}

#[test]
fn a_raised_amount_of_actions_frees_the_run_that_waits() {
    let mut driver = three_actions(ExhaustionPolicy::Skip);
    (0..4).for_each(|_| mail(&mut driver));
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    driver.settings.rate_limits = vec![limit(LimitedResource::Actions, 4, 3600)];
    driver.restart(2);
    assert_eq!((driver.reasons(), driver.running()), (vec![], vec![1]));
}

#[test]
fn calls_and_actions_are_apart_and_both_limits_of_actions_hold() {
    let mut driver = three_actions(ExhaustionPolicy::Skip);
    driver.settings.actions_per_minute = 2;
    driver.restart(2);
    let first = driver.now;
    mail(&mut driver);
    mail(&mut driver);
    mail(&mut driver);
    assert_eq!(driver.reasons(), [PauseReason::ActionsPerMinute], "two in a minute");
    assert_eq!(driver.engine.view().resumes_at, Some(first + seconds(60)));
    driver.pass(seconds(60));
    driver.done(1, "sent");
    driver.answer(wants(&["mail__send"]));
    assert_eq!(driver.reasons(), [PauseReason::RateWindow], "three in an hour");
    assert!(
        driver.engine.trip_before_attempt(driver.now).is_none(),
        "a loop without actions continues"
    );
}

#[test]
fn a_sleep_may_wait_for_room_for_actions() {
    let mut driver = three_actions(ExhaustionPolicy::Skip);
    let first = driver.now;
    (0..3).for_each(|_| mail(&mut driver));
    driver.answer(calls(
        "yield",
        r#"{"sleep": 86400, "wake_early_if": ["resource/Actions/2"]}"#,
    ));
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(
        driver.engine.view().resumes_at,
        Some(first + seconds(3601)),
        "when two have left"
    );
}

/// A mail that uses `amount` bytes.
fn heavy_mail(driver: &mut Driver, resource: LimitedResource, amount: u64) {
    driver.answer(wants(&["mail__send"]));
    if !driver.running.is_empty() {
        driver.feed(EngineInput::ResourceUsed { resource, amount });
        driver.done(1, "sent");
    }
    driver.pass(seconds(1));
}

#[test]
fn bytes_that_tools_used_hold_the_next_action_from_the_amount_on_and_for_the_window_only() {
    let other = |resource| {
        let both = [LimitedResource::DiskWriteBytes, LimitedResource::BandwidthBytes];
        both[usize::from(resource == both[0])]
    };
    for resource in [LimitedResource::DiskWriteBytes, LimitedResource::BandwidthBytes] {
        let mut driver = Driver::with_tools(EngineSettings {
            rate_limits: vec![limit(resource, 1000, 60)],
            max_calls_per_turn: 1000,
            ..settings()
        });
        let first = driver.now;
        heavy_mail(&mut driver, resource, 999);
        heavy_mail(&mut driver, other(resource), 5000);
        driver.answer(wants(&["mail__send"]));
        assert_eq!(
            (driver.reasons(), driver.running()),
            (vec![], vec![1]),
            "one byte is left"
        );
        driver.feed(EngineInput::ResourceUsed { resource, amount: 1 });
        driver.done(1, "sent");
        driver.answer(wants(&["mail__send"]));
        assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
        let held = driver.engine.view();
        let message = &held.reasons[0].message;
        assert!(
            message.contains(&format!("guardrails.rateLimits: 1000 {resource} in 60 s"))
                && message.contains("instruct the agent to"),
            "{message}"
        );
        try_everything_but(&mut driver, true);
        driver.restart(1);
        assert_eq!(driver.running(), [0_u32; 0], "a restart does not forget it");
        driver.next_timer();
        let waited = driver.now.duration_since(first);
        assert!(waited >= seconds(60) && waited <= seconds(62), "{waited:?}");
        assert_eq!(driver.reasons(), []);
        assert!(
            driver.engine.trip_before_attempt(driver.now).is_none(),
            "calls are not limited by what tools use"
        );
    }
}
