//! A message for which the server rejects each prompt, or the model refuses each answer, leaves the conversation, wherever
//! it stands; a server that refuses everything costs no memory.

use super::super::modes::continuous::heartbeat::HeartbeatSettings;
use super::work::wants;
use super::*;

const POISON: &str = "poison";

/// A loop whose turns said and read these, and that has begun the next one. It reports that `mail` was sent.
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
    let matches =
        |message: &Arc<Message>| matches!(&**message, Message::Assistant { text: Some(found), .. } if found == text);
    driver.prompt.iter().any(matches)
}

/// What the server says to the call in flight; it rejects each prompt with the poison. False: it did.
fn ask(driver: &mut Driver) -> bool {
    ask_with(driver, Driver::failed_turn)
}

/// The same for a server that refuses in this way, and recognizes the poison in any message.
fn ask_with(driver: &mut Driver, refuse: fn(&mut Driver)) -> bool {
    let refused = driver
        .prompt
        .iter()
        .any(|message| format!("{message:?}").contains(POISON));
    if refused {
        refuse(driver);
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
fn refused_content_in_the_older_half_is_excluded_after_two_refused_turns() {
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
            last_error(&driver).contains("is tried without the older half "),
            "{}",
            last_error(&driver)
        );
        assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0], "on trial");
        assert!(ask(&mut driver), "{place}");
        assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0], "it may have been chance");
        assert!(shows(&driver, POISON));
        assert!(!ask(&mut driver));
        assert!(
            last_error(&driver).contains("accepted without a part of the history and refused with it again"),
            "{}",
            last_error(&driver)
        );
        assert_eq!(driver.notes(RecordKind::Trimmed).len(), 1);
        assert!(driver.observed().contains("old turns left the context"));
        for _ in 0..10 {
            assert!(ask(&mut driver));
        }
        assert_eq!((doubted(&driver), driver.notes(RecordKind::TurnFailed).len()), (1, 3));
        assert_eq!(driver.engine.view().consecutive_errors, 0);
    }
}

#[test]
fn calls_are_excluded_with_their_results_and_a_text_lists_their_actions() {
    for place in 0..4 {
        let mut texts = [POISON, "beta", "gamma", "delta"];
        texts[place] = if place == 0 { POISON } else { "mail" };
        let mut driver = with_history(&texts);
        while driver.notes(RecordKind::Trimmed).is_empty() {
            ask(&mut driver);
        }
        // The driver has checked each prompt for calls without a result, and the journal for the same.
        let told =
            |message: &Arc<Message>| matches!(&**message, Message::User { text } if text.contains("mail__send {} -> "));
        let kept = driver.results().len() == 2;
        let is_told = driver.prompt.iter().any(told);
        assert_eq!((kept, is_told), (place == 3, place == 1 || place == 2), "{place}");
    }
}

const WAYS: [fn(&mut Driver); 2] = [Driver::failed_turn, Driver::refused_turn];

#[test]
fn a_refused_message_in_the_newer_half_is_left_out_after_one_more_trial() {
    for refuse in WAYS {
        // The fourth turn may be in either half, by the sizes of the messages that begin turns.
        for place in 4..6 {
            let mut texts = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"];
            texts[place] = POISON;
            let mut driver = with_history(&texts);
            for trials in [0, 1, 2] {
                assert!(!ask_with(&mut driver, refuse), "{place}");
                assert_eq!(doubted(&driver), trials, "{place}");
            }
            assert!(last_error(&driver).contains("is tried without the newer half "));
            assert!(shows(&driver, "alpha") && !shows(&driver, POISON));
            assert!(ask_with(&mut driver, refuse), "{place}");
            assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0], "on trial");
            assert!(!ask_with(&mut driver, refuse), "{place}");
            for _ in 0..5 {
                assert!(ask_with(&mut driver, refuse), "{place}");
            }
            assert!(shows(&driver, "alpha"), "the older half stays");
            assert_eq!((doubted(&driver), driver.notes(RecordKind::Trimmed).len()), (2, 1));
            assert_eq!(driver.reasons(), []);
        }
    }
}

#[test]
fn the_whole_history_is_left_out_if_both_halves_are_refused() {
    for refuse in WAYS {
        let mut driver = with_history(&[POISON, "beta", "mail", POISON]);
        let refused = (0..10).filter(|_| !ask_with(&mut driver, refuse)).count();
        assert_eq!((refused, doubted(&driver)), (5, 3));
        assert!(!shows(&driver, "beta") && !shows(&driver, POISON));
        let told = format!("{:?}", driver.prompt[1]);
        assert!(
            told.contains("mail__send [arguments left out] -> [result left out]"),
            "{told}"
        );
    }
}

/// The turn that acted stays in the conversation when it fails, and with it what its tool has read.
#[test]
fn a_refusal_caused_by_a_turn_that_acted_ends_and_its_actions_stay_as_text() {
    for refuse in WAYS {
        for history in [&["alpha", "beta"][..], &[]] {
            let mut driver = with_history(history);
            driver.answer(work::wants(&["mail__send"]));
            driver.done(1, &format!("sent, and the answer is {POISON}"));
            let refused = (0..10).filter(|_| !ask_with(&mut driver, refuse)).count();
            assert!(refused <= 5, "{refused}");
            let told = format!("{:?}", driver.prompt[1]);
            assert!(told.contains("mail__send"), "{told}");
            assert_eq!(driver.reasons(), [], "the loop is not held");
            driver.restart(2);
            assert!(ask_with(&mut driver, refuse), "a restart keeps it left out");
        }
    }
}

/// Each turn reads the poison, and changes nothing: the turns take it with them, and the history is innocent.
#[test]
fn a_history_with_which_calls_are_accepted_is_not_doubted() {
    for refuse in WAYS {
        let mut driver = with_history(&["alpha", "beta", "gamma", "delta"]);
        for _ in 0..8 {
            driver.answer(work::wants(&["files__read"]));
            driver.done(1, POISON);
            refuse(&mut driver);
            while driver.in_flight.is_none() {
                driver.next_timer();
            }
            assert!(shows(&driver, "alpha"));
        }
        assert_eq!(doubted(&driver), 0);
    }
}

#[test]
fn a_server_that_refuses_everything_costs_no_memory_and_the_parts_are_tried_ever_more_rarely() {
    for refuse in WAYS {
        let mut driver = with_history(&["alpha", "beta", "gamma", "delta"]);
        let before = driver.prompt.clone();
        for turn in 1..12 {
            refuse(&mut driver);
            let trials = [0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 6];
            assert_eq!(doubted(&driver), trials[turn - 1], "{turn}");
            let error = last_error(&driver);
            assert_eq!(
                error.contains("did not help, so the history was restored: check spec.model and the instructions"),
                matches!(turn, 5..8 | 11),
                "{error}"
            );
            while driver.in_flight.is_none() {
                driver.next_timer();
            }
            let shown = (shows(&driver, "alpha"), shows(&driver, "delta"));
            let expected = match turn {
                2 | 8 => (false, true),
                3 | 9 => (true, false),
                4 | 10 => (false, false),
                _ => (true, true),
            };
            assert_eq!(shown, expected, "{turn}");
        }
        assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0]);
        assert_eq!(driver.prompt[..before.len() - 1], before[..before.len() - 1]);
        driver.turn();
        assert!(shows(&driver, "alpha"));
        for _ in 0..2 {
            refuse(&mut driver);
            driver.next_timer();
        }
        assert_eq!(doubted(&driver), 7, "another series");
    }
}

#[test]
fn parts_are_tried_again_after_a_time_in_which_everything_was_refused() {
    for refuse in WAYS {
        let mut driver = with_history(&["alpha", POISON, "gamma", "delta"]);
        for _ in 0..5 {
            refuse(&mut driver);
            while driver.in_flight.is_none() {
                driver.next_timer();
            }
        }
        assert_eq!(doubted(&driver), 3, "every part was tried in vain");
        let refused = (0..20).filter(|_| !ask_with(&mut driver, refuse)).count();
        assert_eq!(
            (refused, doubted(&driver)),
            (4, 4),
            "the sixth, seventh and eighth, and once more"
        );
        assert!(!shows(&driver, POISON) && shows(&driver, "delta"));
    }
}

/// A loop whose turn is tried without the older half.
fn on_trial(texts: &[&str]) -> Driver {
    let mut driver = with_history(texts);
    for _ in 0..2 {
        driver.failed_turn();
        driver.next_timer();
    }
    assert!(!shows(&driver, "alpha"), "on trial");
    driver
}

/// The same after that turn was accepted: the next one has the older half again.
fn verifying(texts: &[&str]) -> Driver {
    let mut driver = on_trial(texts);
    driver.turn();
    assert!(shows(&driver, "alpha"), "back");
    driver
}

#[test]
fn a_cause_elsewhere_that_ends_during_a_trial_costs_no_memory() {
    let mut driver = verifying(&["alpha", "beta", "gamma", "delta"]);
    driver.turn();
    for text in ["alpha", "beta", "gamma", "delta"] {
        assert!(shows(&driver, text), "{text}");
    }
    assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0]);
    driver.failed_turn();
    driver.next_timer();
    assert!(shows(&driver, "alpha"), "acquitted");
    assert_eq!((doubted(&driver), driver.notes(RecordKind::Trimmed).len()), (1, 0));
}

#[test]
fn a_trial_turn_refused_for_its_own_reads_is_followed_by_one_with_the_whole_history() {
    for refuse in WAYS {
        let mut driver = with_history(&[POISON, "beta", "gamma", "delta"]);
        assert!(!ask_with(&mut driver, refuse) && !ask_with(&mut driver, refuse));
        driver.answer(wants(&["files__read"]));
        driver.done(1, POISON);
        assert!(!shows(&driver, POISON), "the turn continues without the older half");
        assert!(!ask_with(&mut driver, refuse));
        assert!(shows(&driver, POISON) && doubted(&driver) == 1);
        // A rejected turn keeps what it has read until the next one fails as well, which shows nothing of the older half.
        let refused = (0..10).filter(|_| !ask_with(&mut driver, refuse)).count();
        assert!(refused <= 3, "{refused}");
        assert_eq!(driver.notes(RecordKind::Trimmed).len(), 1);
        assert!(!shows(&driver, POISON));
    }
}

#[test]
fn a_turn_that_fails_for_another_reason_neither_acquits_nor_convicts_a_part() {
    let mut driver = verifying(&["alpha", "beta", "gamma", "delta"]);
    while driver.notes(RecordKind::TurnFailed).len() < 3 {
        if driver.in_flight.is_some() {
            driver.fail(FailureKind::ContextExceeded);
        } else {
            driver.next_timer();
        }
    }
    assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0]);
    driver.next_timer();
    assert!(shows(&driver, "alpha"));
    driver.failed_turn();
    assert_eq!(driver.notes(RecordKind::Trimmed).len(), 1);
}

#[test]
fn a_trial_that_was_journalled_before_trials_had_stages_has_just_begun() {
    let mut driver = on_trial(&["alpha", "beta", "gamma", "delta"]);
    let mut saved = serde_json::to_value(driver.engine.state.doubt).unwrap();
    assert!(saved.as_object_mut().unwrap().remove("stage").is_some());
    driver.engine.state.doubt = serde_json::from_value(saved).unwrap();
    assert!(!driver.engine.left_out().is_empty());
    driver.turn();
    assert!(shows(&driver, "alpha") && driver.notes(RecordKind::Trimmed).is_empty());
}

#[test]
fn a_refused_turn_or_two_with_a_good_one_between_leave_everything_as_it_is() {
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
fn the_excluded_part_is_the_first_to_leave_when_there_is_no_room() {
    let long = "x".repeat(4000);
    let mut driver = with_history(&["alpha", &long, "gamma", &long]);
    driver.fail(FailureKind::BadResponse);
    driver.next_timer();
    driver.fail(FailureKind::BadResponse);
    let left_out = driver.engine.left_out().len();
    driver.settings.history_tokens = 1000;
    driver.restart(2);
    driver.next_timer();
    assert!(left_out > 0 && driver.in_flight.is_some());
    assert_eq!(
        (driver.engine.left_out().len(), driver.notes(RecordKind::Trimmed).len()),
        (0, 1)
    );
    assert_eq!(driver.purpose, CallPurpose::Compaction, "half of it is still too much");
}

#[test]
fn the_suspected_part_is_the_first_to_leave_after_its_return_too() {
    let long = "x".repeat(4000);
    let mut driver = on_trial(&["alpha", &long, "gamma", &long]);
    driver.answer(says("well"));
    assert!(driver.engine.left_out().is_empty(), "back");
    driver.settings.history_tokens = 1000;
    driver.restart(2);
    driver.next_timer();
    assert_eq!(driver.notes(RecordKind::Trimmed).len(), 1);
    assert!(!shows(&driver, "alpha"));
}

#[test]
fn a_heartbeat_without_room_removes_nothing_of_the_history() {
    let mut driver = Driver::with_tools(EngineSettings {
        heartbeat: Some(HeartbeatSettings {
            every: seconds(3600),
            prompt: "Is all well?".into(),
        }),
        context_tokens: 12_000,
        ..settings()
    });
    for text in ["alpha", "beta", "gamma", "delta"] {
        driver.answer(says(text));
        driver.next_timer();
    }
    driver.fail(FailureKind::BadResponse);
    driver.next_timer();
    driver.fail(FailureKind::BadResponse);
    let (history, left_out) = (driver.transcript.clone(), driver.engine.left_out());
    assert!(!left_out.is_empty(), "on trial");
    driver.now += seconds(3600);
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.purpose, CallPurpose::Heartbeat);
    for _ in 0..6 {
        driver.answer(wants(&["files__read"]));
        driver.done(1, &"x".repeat(6000));
    }
    assert!(
        !driver.notes(RecordKind::ResultsCleared).is_empty(),
        "there was no room"
    );
    assert_eq!(driver.engine.left_out(), left_out);
    driver.answer(says("All is well."));
    assert_eq!(driver.purpose, CallPurpose::Turn);
    assert!(driver.transcript.starts_with(&history));
    assert!(
        !shows(&driver, "alpha") && shows(&driver, "delta"),
        "the trial continues"
    );
    assert_eq!(driver.notes(RecordKind::Trimmed), [""; 0]);
}

#[test]
fn a_turn_that_is_too_large_alone_removes_nothing_of_the_history() {
    let mut driver = with_history(&["alpha", "beta", "gamma", "delta"]);
    driver.fail(FailureKind::BadResponse);
    driver.next_timer();
    driver.fail(FailureKind::BadResponse);
    assert!(!driver.engine.left_out().is_empty(), "on trial");
    let history = driver.transcript.clone();
    driver.settings.context_tokens = 4096;
    driver.restart(2);
    driver.next_timer();
    let failed = driver.notes(RecordKind::TurnFailed);
    assert_eq!(failed.last(), Some(&"ContextExceeded"));
    assert_eq!(driver.transcript, history);
}
