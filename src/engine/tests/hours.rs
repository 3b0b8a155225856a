//! `guardrails.activeHours`: nothing begins outside of them, and everything continues in the next window.

use jiff::civil::time;

use super::*;

fn at(moment: &str, settings: EngineSettings) -> Driver {
    let mut driver = Driver::fresh(settings);
    driver.now = moment.parse().unwrap();
    driver.start(1);
    driver
}

fn by_day() -> EngineSettings {
    EngineSettings {
        active_hours: Some(hours("UTC", "08:00", "23:00")),
        ..settings()
    }
}

#[test]
fn a_call_in_flight_at_the_end_of_the_hours_is_finished_and_no_new_one_begins() {
    let mut driver = at("2026-05-04T22:59:59Z", by_day());
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.next_timer(), seconds(1));
    assert_eq!(driver.reasons(), [PauseReason::OutsideActiveHours]);
    assert_eq!(
        driver.engine.view().resumes_at,
        Some("2026-05-05T08:00:00Z".parse().unwrap())
    );
    assert_eq!(driver.cancelled, []);
    driver.answer(calls("shell", "{}"));
    assert_eq!(driver.acknowledged.len(), 1);
    assert_eq!(driver.in_flight, None, "the turn wants another call");
    try_everything_but(&mut driver, true);
    driver.restart(2);
    assert_eq!(driver.reasons(), [PauseReason::OutsideActiveHours]);
    assert_eq!(driver.in_flight, None);
    driver.pass(SignedDuration::from_hours(9) - SignedDuration::from_nanos(1));
    assert_eq!(driver.in_flight, None);
    driver.pass(SignedDuration::from_nanos(1));
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
}

#[test]
fn a_loop_that_starts_outside_its_hours_waits_and_reports_them() {
    let mut driver = at("2026-05-04T03:00:00Z", by_day());
    assert_eq!(driver.in_flight, None);
    let held = &driver.engine.view().reasons[0];
    assert!(
        held.message
            .contains("guardrails.activeHours (every day 08:00 to 23:00, UTC)")
    );
    assert_eq!(driver.next_timer(), SignedDuration::from_hours(5));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
}

#[test]
fn a_sleep_continues_through_the_beginning_of_the_hours() {
    let settings = EngineSettings {
        max_sleep: SignedDuration::from_hours(24),
        ..by_day()
    };
    let mut driver = at("2026-05-04T22:00:00Z", settings);
    driver.answer(calls("yield", r#"{"sleep": 43200}"#));
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.next_timer(), SignedDuration::from_hours(1));
    assert_eq!(driver.state(), LoopState::Paused);
    assert_eq!(driver.next_timer(), SignedDuration::from_hours(9));
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.next_timer(), SignedDuration::from_hours(2));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn a_sleep_that_ends_outside_the_hours_and_an_event_in_them_wait_for_the_next() {
    let mut driver = at("2026-05-04T22:59:00Z", by_day());
    driver.answer(calls("yield", r#"{"sleep": 600, "wake_early_if": ["chat"]}"#));
    driver.pass(seconds(120));
    driver.feed(happens("chat"));
    driver.pass(SignedDuration::from_hours(8));
    assert_eq!(driver.in_flight, None);
    driver.pass(SignedDuration::from_hours(1));
    assert!(driver.observed().contains("the event chat ended your sleep"));
    assert!(
        driver
            .observed()
            .contains("Note: a pause (OutsideActiveHours) is over.")
    );
}

#[test]
fn hours_removed_from_the_spec_hold_no_loop() {
    let mut driver = at("2026-05-04T03:00:00Z", by_day());
    assert_eq!(driver.state(), LoopState::Paused);
    driver.settings.active_hours = None;
    driver.restart(2);
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn a_clock_that_is_set_back_out_of_the_hours_holds_the_loop_and_into_them_frees_it() {
    let mut driver = at("2026-05-04T08:00:00Z", by_day());
    driver.now -= seconds(1);
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.reasons(), [PauseReason::OutsideActiveHours]);
    driver.now = "2026-05-03T12:00:00Z".parse().unwrap();
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.reasons(), []);
}

/// Weeks of a loop that naps between its turns: every call is within the hours by local time, and the first of each day
/// at their very beginning.
#[test]
fn weeks_over_both_changes_of_the_clocks_in_two_zones_keep_to_the_hours_on_the_wall() {
    for (zone, start) in [
        ("Europe/Berlin", "2026-03-22T23:00:00Z"),
        ("Europe/Berlin", "2026-10-18T22:00:00Z"),
        ("America/New_York", "2026-03-01T05:00:00Z"),
        ("America/New_York", "2026-10-25T04:00:00Z"),
    ] {
        let mut driver = at(
            start,
            EngineSettings {
                active_hours: Some(hours(zone, "08:00", "23:00")),
                ..settings()
            },
        );
        let tz = jiff::tz::TimeZone::get(zone).unwrap();
        let mut first = std::collections::BTreeMap::new();
        let end = driver.now + SignedDuration::from_hours(24 * 14);
        while driver.now < end {
            if driver.in_flight.is_some() {
                let wall = tz.to_datetime(driver.now);
                assert!((time(8, 0, 0, 0)..time(23, 0, 0, 0)).contains(&wall.time()), "{wall}");
                first.entry(wall.date()).or_insert(wall.time());
                driver.answer(calls("yield", r#"{"sleep": 1300}"#));
            }
            driver.next_timer();
        }
        assert!(first.len() >= 14, "{zone}: {first:?}");
        assert!(first.values().all(|begin| *begin == time(8, 0, 0, 0)), "{first:?}");
    }
}
