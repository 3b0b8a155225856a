//! Tool calls with side effects that were delayed by a pause, a suspension or an edit: they run only if requested
//! again.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::work::{unknown, wants};
use super::*;

/// The first of two writes has run; the second waits under a lost link.
fn held_in_mid_work() -> Driver {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send", "files__write", "files__read"]));
    driver.feed(EngineInput::LinkLost);
    driver.done(1, "sent");
    driver
}

#[test]
fn a_call_with_side_effects_that_a_pause_held_up_for_more_than_five_minutes_is_not_run() {
    for (held, sent) in [
        (300, vec!["mail__send", "files__write"]),
        (301, vec!["mail__send", "files__read"]),
    ] {
        let mut driver = held_in_mid_work();
        driver.pass(seconds(held));
        driver.feed(EngineInput::LinkBack);
        let names: Vec<&str> = driver.sent.iter().map(|run| run.name.as_str()).collect();
        assert_eq!(names, sent, "after {held} s");
    }
    let mut driver = held_in_mid_work();
    driver.pass(seconds(9 * 3600));
    driver.feed(EngineInput::LinkBack);
    driver.done(3, "read");
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["Outdated"]);
    let told = driver.results()[1].1;
    assert!(
        told.contains("more than 9 h ago") && told.contains("call it again if it is still right"),
        "{told}"
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
}

#[test]
fn a_run_that_is_to_be_repeated_is_not_after_a_pause_of_more_than_five_minutes() {
    for (held, sent) in [(300, 2), (301, 1)] {
        let mut driver = Driver::with_tools(settings());
        driver.answer(wants(&["job__start"]));
        driver.feed(EngineInput::LinkLost);
        driver.end(1, unknown());
        driver.pass(seconds(held));
        driver.feed(EngineInput::LinkBack);
        assert_eq!(driver.sent.len(), sent, "after {held} s");
        if sent == 1 {
            let told = driver.results()[0].1;
            assert!(
                told.contains("outcome") && told.contains("more than 5 min ago"),
                "{told}"
            );
            driver.next_timer();
            assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
        }
    }
}

#[test]
fn a_long_run_before_it_is_no_pause() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send", "files__write"]));
    driver.pass(seconds(3000));
    driver.done(1, "sent");
    assert_eq!(driver.running(), [2]);
}

#[rstest]
#[case(true, false)]
#[case(false, true)]
fn after_a_suspension_or_an_edit_of_the_spec_nothing_with_side_effects_is_sent_unasked(
    #[case] suspended: bool,
    #[case] edited: bool,
) {
    let stop = |driver: &mut Driver| {
        let cause = if suspended {
            StopCause::Suspend
        } else {
            StopCause::Drain
        };
        driver.feed(EngineInput::Stop { cause });
        driver.feed(EngineInput::DrainEnded);
        driver.settings.spec = u64::from(edited);
        driver.restart(2);
    };
    // A waiting call, and one that an earlier process sent and may repeat.
    let mut driver = Driver::with_tools(settings());
    let mut retried = Driver::with_tools(settings());
    retried.answer(wants(&["job__start"]));
    stop(&mut retried);
    assert_eq!((retried.running(), retried.outcomes()), (vec![], vec!["Unknown"]));
    driver.answer(wants(&["db__put", "mail__send", "files__read"]));
    stop(&mut driver);
    assert_eq!(driver.running(), [3]);
    driver.done(3, "read");
    assert_eq!(driver.outcomes(), ["Unknown", "Ok"]);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["Outdated"]);
    // An answer that the gateway kept in the meantime.
    let mut driver = Driver::with_tools(settings());
    stop(&mut driver);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
    driver.answer(wants(&["mail__send", "files__read"]));
    assert_eq!(driver.running(), [2]);
    driver.done(2, "read");
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    driver.answer(wants(&["mail__send"]));
    assert_eq!(driver.running(), [1], "requested again");
}

#[test]
fn a_new_pod_for_the_same_spec_continues_with_waiting_runs() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["files__read", "mail__send"]));
    driver.feed(EngineInput::Stop {
        cause: StopCause::Drain,
    });
    driver.restart(2);
    driver.done(1, "read");
    assert_eq!(driver.running(), [2]);
}
