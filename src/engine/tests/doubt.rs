//! A message that the server refuses each prompt for leaves the conversation, wherever it stands in its older half; a
//! server that refuses everything costs no memory.

use super::work::wants;
use super::*;

const POISON: &str = "poison";

/// A loop whose turns said and read these, and that has begun the next one. `mail` is told to have been sent.
fn with_history(texts: &[&str]) -> Driver {
    let mut driver = Driver::with_tools(settings());
    for text in texts {
        if *text == "mail" {
            driver.answer(wants(&["mail__send", "files__read"]));
            driver.done(1, "sent");
            driver.done(2, "read");
        }
        driver.answer(says(text));
        driver.next_timer();
    }
    driver
}

fn shows(driver: &Driver, text: &str) -> bool {
    let said =
        |message: &Arc<Message>| matches!(&**message, Message::Assistant { text: Some(said), .. } if said == text);
    driver.prompt.iter().any(said)
}

/// What the server says to the call in flight; it refuses each prompt with the poison.
fn ask(driver: &mut Driver) -> bool {
    let refused = shows(driver, POISON);
    if refused {
        driver.fail(FailureKind::BadResponse);
    } else {
        driver.answer(says("well"));
    }
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    !refused
}

fn last_error(driver: &Driver) -> String {
    driver.engine.view().last_error.unwrap().1.message
}

fn doubted(driver: &Driver) -> usize {
    driver.notes(RecordKind::HistoryDoubted).len()
}

#[test]
fn what_is_refused_in_the_older_half_leaves_after_two_refused_turns_and_the_loop_goes_on() {
    for place in 0..3 {
        let mut texts = ["alpha", "beta", "gamma", "mail", "delta", "epsilon"];
        texts[place] = POISON;
        let mut driver = with_history(&texts);
        assert!(!ask(&mut driver) && doubted(&driver) == 0, "one may be chance");
        assert!(shows(&driver, POISON));
        assert!(!ask(&mut driver));
        assert_eq!(doubted(&driver), 1);
        assert!(!shows(&driver, POISON) && shows(&driver, "epsilon"));
        assert!(
            last_error(&driver).contains("is tried without the "),
            "{}",
            last_error(&driver)
        );
        assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0], "on trial");
        assert!(ask(&mut driver), "{place}");
        assert_eq!(driver.notes(RecordKind::Trimmed).len(), 1);
        assert!(driver.observed().contains("old turns left the context"));
        for _ in 0..10 {
            assert!(ask(&mut driver));
        }
        assert_eq!((doubted(&driver), driver.notes(RecordKind::TurnFailed).len()), (1, 2));
        assert_eq!(driver.engine.view().consecutive_errors, 0);
    }
}

#[test]
fn calls_leave_with_their_results_and_what_they_did_stays_in_words() {
    for place in 0..4 {
        let mut texts = [POISON, "beta", "gamma", "delta"];
        texts[place] = if place == 0 { POISON } else { "mail" };
        let mut driver = with_history(&texts);
        while !ask(&mut driver) {}
        // The driver has checked each prompt for calls without a result, and the journal for the same.
        let told =
            |message: &Arc<Message>| matches!(&**message, Message::User { text } if text.contains("mail__send {} -> "));
        let kept = driver.results().len() == 2;
        let is_told = driver.prompt.iter().any(told);
        assert_eq!((kept, is_told), (place == 3, place == 1 || place == 2), "{place}");
    }
}

#[test]
fn a_server_that_refuses_everything_costs_no_memory_and_is_tried_once_in_a_row() {
    let mut driver = with_history(&["alpha", "beta", "gamma", "delta"]);
    let before = driver.prompt.clone();
    for turn in 1..12 {
        driver.fail(FailureKind::BadResponse);
        assert_eq!(doubted(&driver), usize::from(turn > 1), "{turn}");
        let said = last_error(&driver);
        assert_eq!(
            said.contains("did not help, and it is back: look at spec.model"),
            turn == 3,
            "{said}"
        );
        while driver.in_flight.is_none() {
            driver.next_timer();
        }
        assert_eq!(shows(&driver, "alpha"), turn != 2, "{turn}");
    }
    assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0]);
    assert_eq!(driver.prompt[..before.len() - 1], before[..before.len() - 1]);
    driver.turn();
    assert!(shows(&driver, "alpha"));
    for _ in 0..2 {
        driver.fail(FailureKind::BadResponse);
        driver.next_timer();
    }
    assert_eq!(doubted(&driver), 2, "another row");
}

#[test]
fn one_refused_turn_or_two_with_a_good_one_between_leave_everything_as_it_is() {
    let mut driver = with_history(&["alpha", "beta", "gamma", "delta"]);
    for _ in 0..5 {
        driver.fail(FailureKind::BadResponse);
        driver.next_timer();
        assert!(shows(&driver, "alpha"));
        driver.turn();
    }
    assert_eq!(doubted(&driver), 0);
}

#[test]
fn without_a_history_there_is_nothing_to_leave_out() {
    let mut driver = Driver::started(settings());
    for _ in 0..4 {
        driver.fail(FailureKind::BadResponse);
        driver.next_timer();
    }
    assert_eq!(doubted(&driver), 0);
}

#[test]
fn a_process_that_ends_at_any_point_leaves_the_same_conversation() {
    let whole = |kill: usize| {
        let mut driver = with_history(&["alpha", POISON, "gamma", "mail", "delta"]);
        let mut epoch = 1;
        for turn in 0..5 {
            if turn == kill {
                epoch += 1;
                driver.restart(epoch);
            }
            ask(&mut driver);
        }
        (
            driver.prompt.clone(),
            driver.transcript.clone(),
            driver.notes(RecordKind::HistoryDoubted).len(),
        )
    };
    let without = whole(usize::MAX);
    assert_eq!(without.2, 1);
    for kill in 0..5 {
        assert_eq!(whole(kill), without, "{kill}");
    }
}

#[test]
fn what_is_left_out_is_the_first_to_leave_when_there_is_no_room() {
    let long = "x".repeat(4000);
    let mut driver = with_history(&["alpha", &long, "gamma", &long]);
    driver.fail(FailureKind::BadResponse);
    driver.next_timer();
    driver.fail(FailureKind::BadResponse);
    let left_out = driver.engine.left_out();
    driver.settings.history_tokens = 1000;
    driver.restart(2);
    driver.next_timer();
    assert!(left_out > 0 && driver.in_flight.is_some());
    assert_eq!(
        (driver.engine.left_out(), driver.notes(RecordKind::Trimmed).len()),
        (0, 1)
    );
    assert_eq!(driver.purpose, CallPurpose::Compaction, "half of it is still too much");
}
