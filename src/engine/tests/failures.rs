//! Failed calls: what is retried, after how long, and what a failed turn leaves behind.

use super::*;

const OUTAGES: [(FailureKind, PauseReason); 5] = [
    (FailureKind::Unreachable, PauseReason::ModelUnreachable),
    (FailureKind::Timeout, PauseReason::ModelUnreachable),
    (FailureKind::RecordFailed, PauseReason::ModelUnreachable),
    (FailureKind::Interrupted, PauseReason::ModelUnreachable),
    (FailureKind::RateLimited, PauseReason::ProviderRateLimit),
];

#[test]
fn a_short_outage_is_bridged_by_five_attempts_under_new_ids_without_a_pause() {
    for (kind, reason) in OUTAGES {
        let mut driver = Driver::started(settings());
        for (attempt, longest) in [(1, 1), (2, 2), (3, 4), (4, 8)] {
            assert_eq!(driver.in_flight.unwrap().to_string(), format!("t1c1a{attempt}"));
            driver.fail(kind);
            assert_eq!(driver.state(), LoopState::Running);
            if driver.in_flight.is_none() {
                assert!(driver.next_timer() <= seconds(longest));
            }
        }
        driver.fail(kind);
        assert_eq!(driver.reasons(), [reason], "{kind}");
    }
}

/// Fails attempts until an outage of this length is over, and lets the next one through.
fn outage(driver: &mut Driver, kind: FailureKind, length: SignedDuration) {
    let end = driver.now + length;
    while driver.now < end {
        if driver.in_flight.is_some() {
            driver.fail(kind);
        } else {
            driver.next_timer();
        }
    }
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
}

#[test]
fn an_outage_of_minutes_pauses_the_open_turn_and_discards_nothing() {
    for (kind, reason) in OUTAGES {
        let mut driver = Driver::with_tools(settings());
        driver.answer(work::wants(&["files__read"]));
        driver.done(1, "read");
        let transcript = driver.transcript.clone();
        outage(&mut driver, kind, seconds(90));
        assert_eq!(driver.transcript, transcript, "{kind}");
        assert_eq!((driver.in_flight.unwrap().turn, driver.in_flight.unwrap().call), (1, 2));
        assert_eq!(driver.notes(RecordKind::TurnFailed), [""; 0]);
        assert_eq!(driver.engine.view().consecutive_errors, 0);
        let paused = format!("Running -> Paused ({reason})");
        assert!(driver.notes(RecordKind::Transition).contains(&paused.as_str()));
        driver.answer(says("done"));
        assert_eq!((driver.state(), driver.reasons()), (LoopState::Running, vec![]));
        assert_eq!(driver.engine.view().counts.turns, 1);
    }
}

#[test]
fn an_outage_is_probed_with_backoff_and_at_least_every_five_minutes() {
    let mut driver = Driver::started(settings());
    let mut waits = Vec::new();
    while waits.len() < 8 {
        driver.fail(FailureKind::Unreachable);
        let paused = driver.reasons() == [PauseReason::ModelUnreachable];
        assert_eq!(paused, driver.engine.view().resumes_at.is_some());
        let wait = driver.next_timer();
        if paused {
            waits.push(wait);
        }
    }
    for (wait, longest) in waits.iter().zip([15, 30, 60, 120, 240, 300, 300, 300]) {
        assert!(*wait >= seconds(longest) / 2 && *wait <= seconds(longest), "{waits:?}");
    }
    driver.restart(2);
    driver.fail(FailureKind::Unreachable);
    assert_eq!(
        driver.reasons(),
        [PauseReason::ModelUnreachable],
        "a restart does not forget"
    );
    try_everything_but(&mut driver, false);
    assert_eq!(driver.reasons(), [PauseReason::ModelUnreachable]);
    resume(&mut driver, "now");
    assert_eq!(driver.in_flight.unwrap().turn, 1);
    driver.answer(says("back"));
    driver.next_timer();
    driver.fail(FailureKind::Unreachable);
    assert_eq!(driver.state(), LoopState::Running, "a good call ends the outage");
}

#[test]
fn a_refused_key_and_an_empty_account_are_tried_once_a_minute_whatever_the_limit_of_errors() {
    for (kind, reason) in [
        (FailureKind::AuthenticationFailed, PauseReason::AuthenticationFailed),
        (FailureKind::QuotaExceeded, PauseReason::QuotaExceeded),
    ] {
        let mut driver = Driver::with_tools(EngineSettings {
            max_consecutive_errors: 50,
            ..settings()
        });
        driver.answer(work::wants(&["files__read"]));
        driver.done(1, "read");
        let before = driver.issued.len();
        outage(&mut driver, kind, seconds(600));
        assert_eq!(driver.issued.len() - before, 10, "{kind}");
        assert_eq!(driver.engine.view().consecutive_errors, 0);
        assert_eq!(driver.notes(RecordKind::TurnFailed), [""; 0]);
        driver.fail(kind);
        assert_eq!(driver.reasons(), [reason]);
        assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(60)));
        try_everything_but(&mut driver, false);
        assert_eq!(driver.in_flight, None);
        resume(&mut driver, "mended");
        driver.answer(says("done"));
        assert_eq!((driver.reasons(), driver.engine.view().counts.turns), (vec![], 1));
    }
}

#[test]
fn an_attempt_waits_at_least_for_the_retry_after_of_the_server() {
    let mut driver = Driver::started(settings());
    driver.fail_with(CallFailure {
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
fn a_turn_after_a_failed_one_also_waits_for_the_retry_after_of_the_server() {
    let mut driver = Driver::started(settings());
    driver.fail_with(CallFailure {
        retry_after_milliseconds: Some(20_000),
        ..failure(FailureKind::BadResponse)
    });
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.next_timer(), seconds(20));
}

#[test]
fn notifications_of_a_failed_turn_are_shown_in_the_next_one() {
    let mut driver = Driver::started(settings());
    driver.answer(ModelAnswer {
        finish: FinishReason::Length,
        ..says("and so on and")
    });
    for _ in 0..2 {
        driver.next_timer();
        assert!(
            driver.observed().contains("the loop continues"),
            "its cause was not told yet"
        );
        assert!(driver.observed().contains("cut at the output limit of 4096 tokens"));
        driver.fail(FailureKind::BadResponse);
    }
}

#[test]
fn an_absurd_wait_is_clamped() {
    let mut driver = Driver::started(settings());
    driver.fail_with(CallFailure {
        retry_after_milliseconds: Some(u64::MAX),
        ..failure(FailureKind::RateLimited)
    });
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(900)));
}

#[test]
fn a_provider_with_repeated_retry_after_is_never_called_earlier() {
    let mut driver = Driver::started(settings());
    for attempt in 1..10 {
        assert_eq!(driver.in_flight.unwrap().to_string(), format!("t1c1a{attempt}"));
        driver.fail_with(CallFailure {
            retry_after_milliseconds: Some(600_000),
            ..failure(FailureKind::RateLimited)
        });
        assert_eq!(driver.reasons(), [PauseReason::ProviderRateLimit]);
        assert_eq!(driver.next_timer(), seconds(600));
    }
}

#[test]
fn a_request_rejected_by_the_server_ends_the_turn_at_once() {
    let mut driver = Driver::started(settings());
    driver.fail(FailureKind::BadResponse);
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["BadResponse"]);
    assert_eq!(
        driver.engine.view().last_error.unwrap().1.kind,
        FailureKind::BadResponse
    );
    assert_eq!(driver.issued.len(), 1);
}

#[test]
fn an_interrupted_call_is_tried_again_at_once_four_times() {
    let mut driver = Driver::started(settings());
    for attempt in 1..5 {
        assert_eq!(driver.in_flight.unwrap().attempt, attempt);
        driver.fail(FailureKind::Interrupted);
    }
    driver.fail(FailureKind::Interrupted);
    assert_eq!(
        (driver.in_flight, driver.reasons()),
        (None, vec![PauseReason::ModelUnreachable])
    );
}

#[test]
fn a_call_cancelled_by_another_party_is_retried() {
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
        driver.feed(EngineInput::LinkBack);
    }
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a21");
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    driver.fail(FailureKind::LinkLost);
    assert_eq!(
        driver.next_timer(),
        seconds(10),
        "a link that was restored unnoticed holds nothing forever"
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a22");
    driver.fail(FailureKind::LinkLost);
    driver.feed(EngineInput::LinkLost);
    driver.pass(seconds(100));
    assert_eq!(
        driver.in_flight, None,
        "once the worker knows, only the link's return counts"
    );
}

#[test]
fn a_turn_that_fails_at_its_first_call_leaves_no_message_and_passes_its_notes_on() {
    let mut driver = Driver::started(EngineSettings {
        max_calls_per_turn: 2,
        ..settings()
    });
    driver.answer(calls("shell", "{}"));
    driver.answer(calls("shell", "{}"));
    let kept = driver.transcript.clone();
    for turn in 2..5 {
        driver.next_timer();
        assert_eq!(driver.in_flight.unwrap().to_string(), format!("t{turn}c1a1"));
        assert!(
            driver.observed().contains("maxCallsPerTurn"),
            "the model has not read it yet"
        );
        driver.fail(FailureKind::BadResponse);
        assert_eq!(driver.transcript, kept);
    }
}

#[test]
fn a_turn_that_fails_later_keeps_what_its_calls_brought_until_the_next_one_fails_as_well() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(says("well"));
    let before = driver.transcript.clone();
    driver.next_timer();
    driver.answer(work::wants(&["files__read"]));
    driver.done(1, "read");
    driver.fail(FailureKind::BadResponse);
    assert_eq!(driver.results(), [("0", "read")], "it was paid for");
    driver.next_timer();
    assert!(driver.observed().contains("its tool calls and their results stand"));
    let mut mended = driver.clone();
    mended.answer(says("I have read it"));
    mended.next_timer();
    mended.fail(FailureKind::BadResponse);
    assert_eq!(mended.results(), [("0", "read")], "a call succeeded with it");
    driver.restart(2);
    driver.fail(FailureKind::BadResponse);
    assert_eq!(driver.transcript, before, "it may be the cause");
    driver.next_timer();
    assert!(driver.observed().contains("was taken out of this conversation"));
}

#[test]
fn an_empty_first_answer_is_requested_once_more_and_then_the_turn_fails() {
    let mut driver = Driver::started(settings());
    for answer in [ModelAnswer::default(), says(" \n")] {
        assert_eq!(driver.notes(RecordKind::TurnFailed), [""; 0]);
        driver.answer(answer);
    }
    assert_eq!(driver.issued.last().unwrap().to_string(), "t1c2a1");
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["BadResponse"]);
    assert_eq!(driver.engine.view().consecutive_errors, 1);
    assert_eq!(driver.acknowledged.len(), 2);
    driver.next_timer();
    driver.answer(ModelAnswer::default());
    driver.answer(says("better"));
    assert_eq!(driver.engine.view().counts.turns, 1);
}

#[test]
fn an_empty_answer_after_results_of_tools_completes_the_turn() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(work::wants(&["files__read"]));
    driver.done(1, "read");
    driver.answer(ModelAnswer::default());
    assert_eq!(
        (
            driver.notes(RecordKind::TurnFailed).len(),
            driver.engine.view().counts.turns
        ),
        (0, 1)
    );
    assert_eq!(driver.results(), [("0", "read")]);
    driver.next_timer();
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn an_answer_cut_before_any_content_names_the_limit_to_raise() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(work::wants(&["files__read"]));
    driver.done(1, "read");
    driver.answer(ModelAnswer {
        finish: FinishReason::Length,
        ..ModelAnswer::default()
    });
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["BadResponse"]);
    let message = driver.engine.view().last_error.unwrap().1.message;
    assert!(message.contains("raise spec.model.maxOutputTokens"), "{message}");
    assert_eq!(driver.results(), [("0", "read")]);
}

#[test]
fn the_last_call_of_a_cut_answer_is_never_run_and_the_reason_is_reported_to_the_model() {
    for arguments in ["", "{}", r#"{"path": "a"}"#, r#"{"path": "#] {
        let mut driver = Driver::with_tools(settings());
        let mut answer = work::wants(&["files__read", "mail__send"]);
        answer.tool_calls[1].arguments = arguments.into();
        answer.finish = FinishReason::Length;
        driver.answer(answer);
        assert_eq!(driver.running(), [1], "{arguments}");
        driver.done(1, "read");
        assert_eq!(driver.sent.len(), 1);
        assert!(
            driver.result().contains("cut at its limit of 4096 tokens"),
            "{}",
            driver.result()
        );
        assert_eq!(driver.notes(RecordKind::ToolDenied), ["Cut"]);
        assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    }
    let mut driver = Driver::with_tools(settings());
    driver.answer(ModelAnswer {
        finish: FinishReason::Length,
        ..calls("yield", r#"{"mode": "shutdown"}"#)
    });
    assert_eq!(
        (driver.stopped, driver.in_flight.unwrap().to_string()),
        (false, "t1c2a1".into())
    );
}

#[test]
fn a_refused_answer_leaves_the_conversation_with_what_its_turn_has_read() {
    let mut driver = Driver::with_tools(settings());
    driver.turn();
    let before = driver.transcript.len() - 1;
    driver.answer(work::wants(&["files__read"]));
    driver.done(1, "poison");
    driver.answer(ModelAnswer {
        finish: FinishReason::Refused,
        ..work::wants(&["mail__send"])
    });
    assert_eq!((driver.sent.len(), driver.transcript.len()), (1, before));
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["Refused"]);
    assert_eq!(driver.state(), LoopState::Running);
    driver.next_timer();
    assert!(driver.observed().contains("refused or filtered your last answer"));
    driver.answer(work::wants(&["mail__send"]));
    driver.done(1, "sent");
    driver.refused_turn();
    assert_eq!(driver.results(), [("0", "sent")], "what was done stays");
    assert!(matches!(**driver.transcript.last().unwrap(), Message::Tool { .. }));
}

#[test]
fn two_refusals_in_a_row_pause_the_loop_and_one_does_not_and_a_good_turn_ends_the_row() {
    let mut driver = Driver::started(settings());
    let mut waits = Vec::new();
    driver.refused_turn();
    assert_eq!(driver.state(), LoopState::Running);
    driver.next_timer();
    for _ in 0..8 {
        driver.refused_turn();
        assert_eq!(driver.reasons(), [PauseReason::ModelRefused]);
        try_everything_but(&mut driver, false);
        waits.push(driver.next_timer().as_secs());
    }
    assert_eq!(waits, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
    assert_eq!(
        (driver.engine.view().outcome, driver.engine.view().consecutive_errors),
        (None, 0)
    );
    driver.refused_turn();
    resume(&mut driver, "1");
    assert_eq!(driver.state(), LoopState::Running);
    driver.next_timer();
    driver.refused_turn();
    assert_eq!(driver.state(), LoopState::Running, "a resume ends the row");
    driver.next_timer();
    driver.turn();
    driver.refused_turn();
    assert_eq!(driver.state(), LoopState::Running);
}
