//! Calls that fail: what is tried again, after how long, and what a failed turn leaves behind.

use super::*;

#[test]
fn a_retryable_failure_gets_five_attempts_under_new_ids_and_then_the_turn_fails() {
    for kind in [FailureKind::Unreachable, FailureKind::Timeout, FailureKind::RateLimited] {
        let mut driver = Driver::started(settings());
        for (attempt, longest) in [(1, 1), (2, 2), (3, 4), (4, 8)] {
            assert_eq!(driver.in_flight.unwrap().to_string(), format!("t1c1a{attempt}"));
            driver.fail(kind);
            assert_eq!(driver.engine.view().consecutive_errors, 0);
            if driver.in_flight.is_none() {
                assert!(driver.next_timer() <= seconds(longest));
            }
        }
        driver.fail(kind);
        assert_eq!(driver.engine.view().consecutive_errors, 1);
        assert_eq!(driver.notes(RecordKind::TurnFailed), [kind.as_ref()]);
        assert_eq!(driver.notes(RecordKind::CallFailed).len(), 5);
    }
}

#[test]
fn an_attempt_waits_at_least_as_long_as_the_server_asked() {
    let mut driver = Driver::started(settings());
    driver.fail_with(Failure {
        retry_after_milliseconds: Some(20_000),
        ..failure(FailureKind::Unreachable)
    });
    assert_eq!(driver.next_timer(), seconds(20));
}

#[test]
fn each_call_of_a_turn_has_attempts_of_its_own() {
    let mut driver = Driver::started(settings());
    for _ in 0..4 {
        driver.fail(FailureKind::Interrupted);
    }
    driver.answer(calls("shell", "{}"));
    for attempt in 1..5 {
        assert_eq!(driver.in_flight.unwrap().to_string(), format!("t1c2a{attempt}"));
        driver.fail(FailureKind::Interrupted);
    }
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a5");
}

#[test]
fn a_turn_after_a_failed_one_also_waits_as_long_as_the_server_asked() {
    let mut driver = Driver::started(settings());
    driver.fail_with(Failure {
        retry_after_milliseconds: Some(20_000),
        ..failure(FailureKind::QuotaExceeded)
    });
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.next_timer(), seconds(20));
}

#[test]
fn what_a_failed_turn_would_have_told_the_next_one_is_told() {
    let mut driver = Driver::started(settings());
    driver.answer(Answer {
        finish: Finish::Length,
        ..calls("shell", "{")
    });
    driver.fail(FailureKind::BadResponse);
    driver.next_timer();
    assert!(
        driver.observed().contains("the loop starts"),
        "its cause is still to be told"
    );
    assert!(driver.observed().contains("cut at the output limit"));
}

#[test]
fn an_absurd_wait_is_clamped() {
    let mut driver = Driver::started(settings());
    driver.fail_with(Failure {
        retry_after_milliseconds: Some(u64::MAX),
        ..failure(FailureKind::RateLimited)
    });
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(900)));
}

#[test]
fn a_provider_that_still_asks_to_wait_at_the_last_attempt_is_not_called_before() {
    let mut driver = Driver::started(settings());
    let limited = Failure {
        retry_after_milliseconds: Some(60_000),
        ..failure(FailureKind::RateLimited)
    };
    for _ in 0..4 {
        driver.fail_with(limited.clone());
        driver.next_timer();
    }
    driver.fail_with(limited);
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["RateLimited"]);
    assert_eq!(driver.reasons(), [PauseReason::ProviderRateLimit]);
    assert_eq!(driver.next_timer(), seconds(60));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn failures_that_a_person_must_mend_end_the_turn_at_once() {
    for kind in [
        FailureKind::QuotaExceeded,
        FailureKind::AuthenticationFailed,
        FailureKind::BadResponse,
        FailureKind::RecordFailed,
    ] {
        let mut driver = Driver::started(settings());
        driver.fail(kind);
        assert_eq!(driver.notes(RecordKind::TurnFailed), [kind.as_ref()]);
        assert_eq!(driver.engine.view().last_error.unwrap().1.kind, kind);
        assert_eq!(driver.issued.len(), 1);
    }
}

#[test]
fn an_interrupted_call_is_tried_again_at_once_but_not_for_ever() {
    let mut driver = Driver::started(settings());
    for attempt in 1..5 {
        assert_eq!(driver.in_flight.unwrap().attempt, attempt);
        driver.fail(FailureKind::Interrupted);
    }
    driver.fail(FailureKind::Interrupted);
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["Interrupted"]);
}

#[test]
fn a_call_that_somebody_else_cancelled_is_tried_again() {
    let mut driver = Driver::started(settings());
    driver.fail(FailureKind::Cancelled);
    driver.pass(seconds(1));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a2");
}

#[test]
fn a_call_refused_for_want_of_the_link_waits_for_it_and_does_not_count() {
    let mut driver = Driver::started(settings());
    for _ in 0..20 {
        driver.fail(FailureKind::LinkLost);
        assert_eq!(driver.reasons(), [PauseReason::LinkLost]);
        driver.feed(Input::LinkBack);
    }
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a21");
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    driver.fail(FailureKind::LinkLost);
    assert_eq!(
        driver.next_timer(),
        seconds(10),
        "a link that came back unseen holds nothing for ever"
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a22");
    driver.fail(FailureKind::LinkLost);
    driver.feed(Input::LinkLost);
    driver.pass(seconds(100));
    assert_eq!(
        driver.in_flight, None,
        "once the worker knows, only the link's return counts"
    );
}

#[test]
fn a_failed_turn_leaves_no_message_and_passes_its_notes_on() {
    let mut driver = Driver::started(Settings {
        max_calls_per_turn: 2,
        ..settings()
    });
    driver.answer(calls("shell", "{}"));
    driver.answer(calls("shell", "{}"));
    let kept = driver.transcript.clone();
    driver.pass(seconds(1));
    assert!(driver.observed().contains("maxCallsPerTurn"));
    driver.answer(calls("shell", "{}"));
    assert_eq!(driver.transcript.len(), kept.len() + 3);
    driver.fail(FailureKind::BadResponse);
    assert_eq!(driver.transcript, kept);
    driver.pass(seconds(1));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t3c1a1");
    assert!(
        driver.observed().contains("maxCallsPerTurn"),
        "the model has not read it yet"
    );
}

#[test]
fn an_empty_answer_is_a_failed_turn_so_that_it_cannot_spin() {
    let mut driver = Driver::started(settings());
    for answer in [Answer::default(), says(" \n")] {
        driver.answer(answer);
        driver.next_timer();
    }
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["BadResponse", "BadResponse"]);
    assert_eq!(driver.engine.view().consecutive_errors, 2);
    assert_eq!(driver.acknowledged.len(), 2);
}

#[test]
fn a_cut_or_refused_answer_completes_the_turn_and_the_model_is_told() {
    for (finish, note) in [
        (Finish::Length, "cut at the output limit"),
        (Finish::Refused, "refused or filtered"),
    ] {
        let mut driver = Driver::started(settings());
        driver.answer(Answer {
            finish,
            ..Answer::default()
        });
        assert_eq!(driver.engine.view().turns_completed, 1);
        driver.pass(seconds(1));
        assert!(driver.observed().contains(note));
    }
}
