//! Each limit that is reached is a line of the journal of its own, once, and what is no limit is none.

use super::*;

fn trips(driver: &Driver) -> Vec<&str> {
    driver.notes(RecordKind::GuardrailTriggered)
}

#[test]
fn a_limit_that_holds_the_loop_is_journalled_once_each_time_it_is_reached() {
    let mut driver = Driver::started(settings());
    for round in 1..=2 {
        while driver.state() != LoopState::Paused {
            assert_eq!(trips(&driver).len(), round - 1, "not before it is reached");
            driver.failed_turn();
            if driver.state() != LoopState::Paused {
                driver.next_timer();
            }
        }
        assert_eq!(trips(&driver), vec!["ConsecutiveErrors"; round]);
        driver.next_timer();
    }
}

#[test]
fn a_limit_that_ends_a_turn_or_the_loop_is_journalled_too() {
    let mut driver = Driver::started(Settings {
        max_calls_per_turn: 2,
        ..settings()
    });
    driver.answer(calls("shell", "{}"));
    assert!(trips(&driver).is_empty());
    driver.answer(calls("shell", "{}"));
    assert_eq!(trips(&driver).len(), 1);
    assert!(trips(&driver)[0].contains("maxCallsPerTurn (2)"));

    let mut driver = Driver::started(settings());
    driver.pass(seconds(601));
    driver.answer(says("hm"));
    assert_eq!(trips(&driver), ["Idle"]);
}

#[test]
fn a_suspension_and_a_lost_link_are_no_limits() {
    let mut driver = Driver::started(settings());
    driver.feed(Input::LinkLost);
    driver.feed(Input::Stop {
        cause: StopCause::Suspend,
    });
    assert!(trips(&driver).is_empty());
}
