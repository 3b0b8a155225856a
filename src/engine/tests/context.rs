//! The prompt stays within the context window.

use super::*;

/// Room for about `tokens` of transcript.
fn small(tokens: u32) -> EngineSettings {
    EngineSettings {
        // The system prompt takes about 450.
        context_tokens: 4096 + 850 + tokens,
        ..settings()
    }
}

#[test]
fn whole_oldest_turns_are_trimmed_and_the_model_is_notified() {
    let mut driver = Driver::started(small(3000));
    let mut trimmed = 0;
    for round in 0..80 {
        if driver.purpose == CallPurpose::Compaction {
            // No summary can be had.
            driver.answer(ModelAnswer::default());
        }
        driver.answer(if round % 2 == 0 {
            calls("shell", &"x".repeat(200))
        } else {
            says(&"y".repeat(200))
        });
        driver.pass(seconds(1));
        let now = driver.notes(RecordKind::Trimmed).len();
        if now == trimmed && trimmed > 0 && driver.transcript.len() > 1 {
            assert!(matches!(*driver.transcript[0], Message::User { .. }));
        }
        trimmed = now;
    }
    assert!(trimmed > 2, "{trimmed}");
    assert!(
        trimmed < 20,
        "the head of the prompt must not change every turn: {trimmed}"
    );
    let told =
        driver.journal.iter().flat_map(|record| &record.messages).filter(
            |message| matches!(&***message, Message::User { text } if text.contains("old turns left the context")),
        );
    assert!(told.count() > 2);
    assert_eq!(driver.engine.view().consecutive_errors, 0);
}

#[test]
fn nothing_leaves_a_prompt_that_fits() {
    let mut driver = Driver::started(settings());
    for _ in 0..40 {
        driver.turn();
    }
    assert_eq!(driver.notes(RecordKind::Trimmed).len(), 0);
    assert_eq!(driver.transcript.len(), 81);
}

#[test]
fn a_turn_that_cannot_fit_fails_and_names_the_field() {
    let mut driver = Driver::fresh(EngineSettings {
        context_tokens: 4096,
        ..settings()
    });
    driver.start(1);
    assert_eq!(driver.in_flight, None);
    let (_, failure) = driver.engine.view().last_error.unwrap();
    assert_eq!(failure.kind, FailureKind::ContextExceeded);
    assert!(
        failure.message.contains("spec.model.contextTokens"),
        "{}",
        failure.message
    );
    assert_eq!(driver.transcript, []);
    for _ in 0..4 {
        driver.next_timer();
    }
    assert_eq!(driver.reasons(), [PauseReason::ConsecutiveErrors]);
}

#[test]
fn a_turn_that_grows_too_large_fails_and_leaves_the_old_ones() {
    let mut driver = Driver::started(small(1000));
    driver.turn();
    let kept = driver.transcript.len() - 1;
    driver.answer(calls("shell", &"x".repeat(8000)));
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["ContextExceeded"]);
    assert_eq!(driver.notes(RecordKind::Trimmed).len(), 0);
    assert_eq!(driver.transcript.len(), kept + 3, "what was paid for stays");
    driver.next_timer();
    assert!(driver.in_flight.is_some());
    let told = serde_json::to_string(&driver.prompt).unwrap();
    assert!(
        told.contains("left your context without a summary") && told.contains("shell xxx"),
        "{told}"
    );
}

/// Estimated tokens of the prompt last sent.
fn size(driver: &Driver) -> usize {
    let text: usize = driver
        .prompt
        .iter()
        .map(|message| serde_json::to_string(&**message).unwrap().len())
        .sum();
    text / 4
}

/// The largest prompt of many turns.
fn largest(driver: &mut Driver) -> usize {
    let mut largest = 0;
    for _ in 0..60 {
        driver.answer(says(&"x".repeat(1000)));
        driver.pass(seconds(1));
        if let Some(now) = driver.in_flight.map(|_| size(driver)) {
            largest = largest.max(now);
        }
    }
    largest
}

fn limit(driver: &mut Driver, tokens: Option<u64>) {
    let revision = driver.budget.revision + 1;
    driver.feed(EngineInput::BudgetChanged {
        budget: BudgetState {
            revision,
            tokens,
            ..BudgetState::default()
        },
    });
}

#[test]
fn a_history_uses_at_most_40_percent_of_the_smallest_limit_and_more_once_that_is_raised() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1000,
        ..settings()
    });
    limit(&mut driver, Some(10_000));
    let small = largest(&mut driver);
    assert!((3000..4500).contains(&small), "{small}");
    limit(&mut driver, Some(20_000));
    let raised = largest(&mut driver);
    assert!((6000..9000).contains(&raised), "{raised}");
    assert_eq!(driver.engine.view().consecutive_errors, 0);
}

#[test]
fn a_history_uses_at_most_80_percent_of_the_window() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1000,
        context_tokens: 10_000,
        max_output_tokens: 100,
        ..settings()
    });
    let full = largest(&mut driver);
    assert!((6000..9000).contains(&full), "{full}");
}

/// Each request begins with the whole previous request, so that the server's cache covers everything except what is
/// new.
#[test]
fn each_prompt_begins_with_the_one_before_it() {
    let mut driver = Driver::started(settings());
    for round in 0..30 {
        let before = driver.prompt.clone();
        match round % 4 {
            0 => driver.answer(calls("shell", "{}")),
            1 => driver.answer(calls("yield", r#"{"sleep": 5}"#)),
            2 => driver.fail(FailureKind::Unreachable),
            _ => driver.answer(says("nothing new")),
        };
        driver.pass(seconds(10));
        assert_eq!(driver.prompt[..before.len()], before, "round {round}");
    }
    assert!(driver.prompt.len() > 50);
}
