//! Sleeps that the agent chose: how they begin, what ends them, and what does not.

use super::super::notifications::{Notification, NotificationPriority};
use super::super::sensor_events::SensedEvent;
use super::*;
use agentloop_api::agent::LimitedResource;
use agentloop_api::status::WakeType;

fn asleep(arguments: &str) -> Driver {
    let mut driver = Driver::started(settings());
    driver.answer(calls("yield", arguments));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver
}

#[test]
fn test_loop_sleeps_until_the_moment_it_chose() {
    let driver = asleep(r#"{"sleep": 30, "reason": "night"}"#);
    let view = driver.engine.view();
    assert_eq!(view.resumes_at, Some(driver.now + seconds(30)));
    let wake = view.wake.unwrap();
    assert_eq!(
        (wake.r#type, wake.value.as_str()),
        (WakeType::Time, "2026-01-01T00:00:30Z")
    );
    assert_eq!(
        driver.notes(RecordKind::Transition).last().unwrap(),
        &"Running -> Sleeping"
    );
}

#[test]
fn test_loop_wakes_time_and_not_a_moment_before() {
    let mut driver = asleep(r#"{"sleep": 30, "reason": "night"}"#);
    driver.pass(SignedDuration::from_millis(29_999));
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.pass(SignedDuration::from_millis(1));
    assert_eq!(driver.state(), LoopState::Running);
    assert!(driver.observed().contains("the sleep that you chose is over"));
    assert!(driver.observed().contains("you slept because: night"));
}

#[test]
fn test_loop_wakes_event_that_it_named_and_no_other() {
    let mut driver = asleep(r#"{"sleep": 30, "wake_early_if": ["chat", "spike"]}"#);
    let wake = driver.engine.view().wake.unwrap();
    assert_eq!((wake.r#type, wake.value.as_str()), (WakeType::Event, "chat,spike"));
    driver.pass(seconds(1));
    driver.feed(happens("notification"));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.feed(happens("signal/prices/spike"));
    assert_eq!(driver.state(), LoopState::Running);
    assert!(
        driver
            .observed()
            .contains("the event signal/prices/spike ended your sleep")
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn a_wake_request_ends_a_sleep_once_per_token() {
    let mut driver = asleep(r#"{"sleep": 30}"#);
    driver.pass(seconds(1));
    driver.feed(EngineInput::WakeRequested { token: "1".into() });
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.engine.view().handled.wake.as_deref(), Some("1"));
    driver.answer(calls("yield", r#"{"sleep": 30}"#));
    assert_eq!(driver.feed(EngineInput::WakeRequested { token: "1".into() }), []);
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.notes(RecordKind::RequestHandled), ["wake"]);
}

#[test]
fn a_wake_request_to_a_loop_that_does_not_sleep_is_handled_and_does_nothing() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::WakeRequested { token: "1".into() });
    assert_eq!(driver.engine.view().handled.wake.as_deref(), Some("1"));
    driver.answer(calls("yield", r#"{"sleep": 30}"#));
    driver.feed(EngineInput::WakeRequested { token: "1".into() });
    assert_eq!(driver.state(), LoopState::Sleeping);
}

#[test]
fn a_sleeping_loop_that_loses_the_link_is_paused_and_sleeps_on_when_it_is_back() {
    let mut driver = asleep(r#"{"sleep": 600}"#);
    let until = driver.engine.view().resumes_at;
    driver.feed(EngineInput::LinkLost);
    assert_eq!(driver.state(), LoopState::Paused);
    driver.feed(EngineInput::WakeRequested { token: "1".into() });
    driver.pass(seconds(10));
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.engine.view().resumes_at, until);
}

#[test]
fn an_event_under_a_pause_is_not_lost_by_a_crash() {
    let mut driver = asleep(r#"{"sleep": 600, "wake_early_if": ["chat"]}"#);
    driver.feed(EngineInput::LinkLost);
    driver.feed(happens("chat"));
    assert_eq!(driver.state(), LoopState::Paused);
    driver.pass(seconds(1));
    driver.restart(1);
    assert_eq!(driver.state(), LoopState::Running);
    assert!(driver.observed().contains("the event chat ended your sleep"));
}

#[test]
fn a_sleep_survives_a_restart_with_its_deadline() {
    let mut driver = asleep(r#"{"sleep": 600}"#);
    let until = driver.engine.view().resumes_at;
    driver.pass(seconds(10));
    driver.restart(2);
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.engine.view().resumes_at, until);
    assert_eq!(driver.timer, until);
}

#[test]
fn a_deadline_that_passed_while_the_worker_was_down_fires_once() {
    let mut driver = asleep(r#"{"sleep": 600}"#);
    driver.timer = None;
    driver.pass(seconds(10_000));
    driver.restart(2);
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.issued.len(), 2);
}

#[test]
fn a_sleep_above_the_maximum_is_shortened_and_the_model_is_notified() {
    let driver = asleep(r#"{"sleep": 1e300}"#);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(3600)));
    assert!(driver.result().contains("Shortened to the longest sleep, 3600 s."));
    let driver = asleep(r#"{"mode": "sleep"}"#);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(3600)));
    assert!(!driver.result().contains("Shortened"));
}

#[test]
fn a_clock_set_back_by_a_year_does_not_make_a_sleep_longer_than_the_longest() {
    let mut driver = asleep(r#"{"sleep": 600}"#);
    driver.now = "2025-01-01T00:00:00Z".parse().unwrap();
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(3600)));
    let mut driver = asleep(r#"{"sleep": 600}"#);
    let until = driver.engine.view().resumes_at;
    driver.now -= seconds(60);
    driver.feed(EngineInput::Timer);
    assert_eq!(
        driver.engine.view().resumes_at,
        until,
        "a deadline is a wall-clock moment"
    );
}

#[test]
fn a_moment_is_as_good_as_a_number_of_seconds() {
    let driver = asleep(r#"{"until": "2026-01-01T02:10:00+02:00", "wake_early_if": ["chat"]}"#);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(600)));
    let mut driver = Driver::started(settings());
    driver.answer(calls("yield", r#"{"until": "2025-12-31T23:00:00Z"}"#));
    assert_eq!(driver.state(), LoopState::Running, "it has passed");
}

/// Four calls in a minute, three of them used.
fn short_of_calls() -> Driver {
    let mut driver = Driver::started(EngineSettings {
        rate_limits: vec![rates::limit(LimitedResource::LLMCalls, 4, 60)],
        ..settings()
    });
    driver.turn();
    driver.turn();
    driver
}

#[test]
fn test_loop_wakes_resource_once_there_is_the_room_it_waits_for_and_not_before() {
    let mut driver = short_of_calls();
    let last = driver.now;
    driver.answer(calls(
        "yield",
        r#"{"sleep": 600, "wake_early_if": ["resource/LLMCalls/4"]}"#,
    ));
    let view = driver.engine.view();
    assert_eq!(
        view.resumes_at,
        Some(last + seconds(60)),
        "when the last is a minute old"
    );
    let wake = view.wake.unwrap();
    assert_eq!(
        (wake.r#type, wake.value.as_str()),
        (WakeType::Resource, "resource/LLMCalls/4")
    );
    driver.restart(2);
    driver.next_timer();
    assert_eq!(driver.now, last + seconds(60));
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn the_room_that_a_sleep_waits_for_wakes_it_with_the_reason() {
    let mut driver = short_of_calls();
    driver.answer(calls(
        "yield",
        r#"{"sleep": 600, "wake_early_if": ["resource/LLMCalls/4", "chat"]}"#,
    ));
    let wake = driver.engine.view().wake.unwrap();
    assert_eq!(
        (wake.r#type, wake.value.as_str()),
        (WakeType::Event, "resource/LLMCalls/4,chat")
    );
    driver.pass(SignedDuration::from_millis(59_999));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.pass(SignedDuration::from_millis(1));
    assert!(
        driver
            .observed()
            .contains("the room that you waited for is available again")
    );
}

#[test]
fn room_that_is_there_already_makes_no_shorter_sleep_than_the_shortest() {
    let mut driver = short_of_calls();
    driver.answer(calls(
        "yield",
        r#"{"sleep": 600, "wake_early_if": ["resource/LLMCalls/1"]}"#,
    ));
    assert_eq!(driver.next_timer(), seconds(1));
    assert_eq!(driver.state(), LoopState::Running);
}

#[rstest::rstest]
#[case("resource/LLMCalls/5", "the rate limit allows at most 4 LLMCalls")]
#[case("resource/LLMTokens/5", "no rate limit is set for LLMTokens")]
#[case("resource/Luck/5", "resource/LLMCalls/<n>")]
#[case("resource/LLMCalls/0", "with n of 1 or more")]
#[case("resource/LLMCalls", "resource/LLMCalls/<n>")]
fn a_wait_for_room_that_can_never_exist_is_refused_with_the_fix(#[case] name: &str, #[case] fix: &str) {
    let mut driver = short_of_calls();
    driver.answer(calls(
        "yield",
        &format!(r#"{{"sleep": 600, "wake_early_if": ["{name}"]}}"#),
    ));
    assert_eq!(driver.state(), LoopState::Running);
    assert!(driver.result().contains(fix), "{}", driver.result());
}

#[test]
fn a_sleep_that_was_chosen_before_its_event_was_seen_ends_at_once_also_after_a_crash() {
    for crash in [false, true] {
        let mut driver = Driver::started(settings());
        driver.feed(event_of("prices"));
        if crash {
            driver.restart(1);
        }
        driver.answer(calls("yield", r#"{"sleep": 600, "wake_early_if": ["sensor/prices"]}"#));
        assert_eq!(driver.state(), LoopState::Running, "{crash}");
        driver.pass(settings().min_delay);
        assert_eq!(driver.in_flight.unwrap().turn, 2, "{crash}");
        let cause = "the event sensor/prices came while you chose to sleep";
        assert!(driver.observed().contains(cause), "{}", driver.observed());
    }
}

#[test]
fn an_event_already_shown_or_not_awaited_ends_no_sleep() {
    let sleep = || calls("yield", r#"{"sleep": 600, "wake_early_if": ["sensor/prices"]}"#);
    let mut seen = Driver::started(settings());
    seen.feed(event_of("prices"));
    seen.answer(calls("yield", "nonsense"));
    seen.answer(sleep());
    assert_eq!(
        seen.state(),
        LoopState::Sleeping,
        "the second call of the turn showed it"
    );
    let mut other = Driver::started(settings());
    other.feed(event_of("rates"));
    other.answer(sleep());
    assert_eq!(other.state(), LoopState::Sleeping);
    other.feed(EngineInput::Timer);
    assert_eq!(other.state(), LoopState::Sleeping);
}

#[test]
fn a_notification_of_high_priority_that_no_prompt_showed_ends_a_sleep_and_a_normal_one_does_not() {
    for (priority, state) in [
        (NotificationPriority::High, LoopState::Running),
        (NotificationPriority::Normal, LoopState::Sleeping),
    ] {
        let mut driver = Driver::started(settings());
        driver.feed(notified(Notification {
            id: "n".into(),
            source: "sensor/prices".into(),
            priority,
            text: "news".into(),
            at: driver.now,
        }));
        driver.answer(calls("yield", r#"{"sleep": 600}"#));
        assert_eq!(driver.state(), state, "{priority}");
    }
}

/// An event of a Sensor with nothing but its name.
fn event_of(sensor: &str) -> EngineInput {
    EngineInput::Sensed(SensedEvent {
        id: format!("{sensor}/1"),
        sensor: sensor.into(),
        at: "2026-01-01T00:00:00Z".parse().unwrap(),
        updates: Vec::new(),
        notices: Vec::new(),
        wakes: vec![format!("sensor/{sensor}")],
    })
}
