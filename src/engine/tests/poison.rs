//! A notification that makes the provider refuse each prompt is dropped, and no other is.

use super::super::notifications::{MAX_FAILURES, Notification, NotificationPriority};
use super::*;

fn notify(driver: &mut Driver, text: &str) {
    driver.feed(notified(Notification {
        id: text.into(),
        source: "sensor/prices".into(),
        priority: NotificationPriority::Normal,
        text: text.into(),
        at: driver.now,
    }));
}

fn shows(driver: &Driver, text: &str) -> bool {
    driver.block.as_deref().is_some_and(|block| block.contains(text))
}

/// Time passes until a call is made.
fn until_called(driver: &mut Driver) {
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
}

/// A provider that fails like this on a prompt with `poison`, for `count` turns. Returns in how many that text was
/// shown.
fn turns(driver: &mut Driver, poison: &str, kind: FailureKind, count: usize) -> usize {
    let mut shown = 0;
    for _ in 0..count {
        if shows(driver, poison) {
            shown += 1;
            driver.fail(kind);
        } else {
            driver.answer(says("well"));
        }
        until_called(driver);
    }
    shown
}

fn loop_with(texts: &[&str]) -> Driver {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1000,
        ..settings()
    });
    for text in texts {
        notify(&mut driver, text);
    }
    driver.turn();
    driver
}

fn dropped(driver: &Driver) -> Vec<&str> {
    driver.notes(RecordKind::NotificationDropped)
}

#[test]
fn a_notification_that_each_prompt_is_refused_for_is_dropped_after_three_turns_and_not_after_two() {
    let mut driver = loop_with(&["poison"]);
    // Each of them is followed by one without it.
    assert_eq!(turns(&mut driver, "poison", FailureKind::BadResponse, 4), 2);
    assert_eq!(dropped(&driver), [""; 0]);
    assert!(shows(&driver, "poison"));
    let mut healed = driver.clone();
    healed.answer(says("well"));
    healed.next_timer();
    assert!(!shows(&healed, "poison") && dropped(&healed).is_empty(), "it was seen");
    driver.restart(2);
    driver.fail(FailureKind::BadResponse);
    assert_eq!(dropped(&driver), ["1 dropped: 3 turns that showed them were refused"]);
    until_called(&mut driver);
    assert!(shows(&driver, "(1 were dropped before you saw them"));
    assert_eq!(turns(&mut driver, "poison", FailureKind::BadResponse, 20), 0);
    assert_eq!(driver.block, None);
    notify(&mut driver, "poison");
    driver.turn();
    assert!(!shows(&driver, "poison"), "a redelivery has no effect");
}

#[test]
fn those_shown_beside_it_are_seen() {
    let texts = ["alpha", "poison", "beta"];
    let mut driver = loop_with(&texts);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..12 {
        if !shows(&driver, "poison") {
            seen.extend(texts.into_iter().filter(|text| shows(&driver, text)));
        }
        turns(&mut driver, "poison", FailureKind::BadResponse, 1);
        notify(&mut driver, "late");
        let errors = driver.engine.view().consecutive_errors;
        assert!(errors <= 1, "no two in a row: the loop never cools down");
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["alpha", "beta"]);
    assert_eq!(dropped(&driver).len(), 1);
    assert_eq!(driver.block, None, "the late one was seen too");
}

#[test]
fn failures_of_the_server_or_of_the_connection_drop_nothing() {
    let kinds = [
        FailureKind::AuthenticationFailed,
        FailureKind::QuotaExceeded,
        FailureKind::RecordFailed,
        FailureKind::Unreachable,
        FailureKind::RateLimited,
    ];
    for kind in kinds {
        let mut driver = loop_with(&["news"]);
        assert_eq!(turns(&mut driver, "news", kind, 20), 20, "{kind}");
        assert!(dropped(&driver).is_empty());
    }
}

#[test]
fn a_model_that_refuses_every_prompt_drops_nothing_and_what_waited_is_shown_when_it_is_mended() {
    let mut driver = loop_with(&["news"]);
    for _ in 0..3 * MAX_FAILURES {
        driver.fail(FailureKind::BadResponse);
        until_called(&mut driver);
    }
    assert!(dropped(&driver).is_empty());
    driver.turn();
    assert!(shows(&driver, "news"));
    driver.turn();
    assert_eq!(driver.block, None);
}
