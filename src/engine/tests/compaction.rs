//! Old turns are replaced by a summary: when one is requested, what it replaces, and what happens without one.

use proptest::prelude::*;

use super::super::context::compaction::{MAX_BYTES, MIN_REPLACED};
use super::super::context::prompt_size;
use super::*;
use agentloop_api::agent::LimitedResource;

/// Room for about 1,900 tokens of transcript.
fn narrow() -> EngineSettings {
    EngineSettings {
        max_consecutive_turns: 1000,
        context_tokens: 4096 + 2500,
        ..settings()
    }
}

/// A loop whose next call is for a summary.
fn full(settings: EngineSettings) -> Driver {
    let mut driver = Driver::started(settings);
    fill(&mut driver, 400);
    driver
}

fn fill(driver: &mut Driver, bytes: usize) {
    for _ in 0..200 {
        if driver.purpose == CallPurpose::Compaction && driver.in_flight.is_some() {
            return;
        }
        if driver.in_flight.is_some() {
            driver.answer(says(&"x".repeat(bytes)));
        }
        driver.pass(seconds(3));
    }
    panic!("no call for a summary: {:?}", driver.journal.last());
}

fn compacted(driver: &Driver) -> usize {
    driver.notes(RecordKind::Compacted).len()
}

fn trimmed(driver: &Driver) -> usize {
    driver.notes(RecordKind::Trimmed).len()
}

fn text(message: &Message) -> &str {
    let Message::User { text } = message else {
        panic!("not the runtime's word: {message:?}");
    };
    text
}

/// Estimated tokens of the prompt that the whole transcript would make.
fn estimate(driver: &Driver) -> u64 {
    prompt_size::messages_size(&driver.engine.transcript, driver.engine.cleared()) + driver.engine.fixed_tokens()
}

/// The largest prompt of many turns, and the smallest that was too large.
fn bounds(driver: &mut Driver) -> (u64, u64) {
    let (mut fits, mut too_large) = (0, u64::MAX);
    for _ in 0..300 {
        let now = estimate(driver);
        if driver.purpose == CallPurpose::Compaction {
            too_large = too_large.min(now);
            driver.answer(says("Nothing new so far."));
        } else {
            fits = fits.max(now);
            driver.answer(says("y"));
        }
        driver.pass(seconds(1));
    }
    assert!(compacted(driver) > 1 && trimmed(driver) == 0);
    (fits, too_large)
}

#[test]
fn a_summary_is_requested_above_80_percent_of_the_window_and_not_before() {
    let mut driver = Driver::started(EngineSettings {
        context_tokens: 5000,
        max_output_tokens: 100,
        ..narrow()
    });
    let (fits, too_large) = bounds(&mut driver);
    assert!((3900..=4000).contains(&fits), "{fits}");
    assert!((4001..4100).contains(&too_large), "{too_large}");
}

#[test]
fn a_summary_is_requested_above_40_percent_of_the_smallest_limit_and_not_before() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1000,
        ..settings()
    });
    let budget = BudgetState {
        revision: 1,
        tokens: Some(10_000),
        ..BudgetState::default()
    };
    driver.feed(EngineInput::BudgetChanged { budget });
    let (fits, too_large) = bounds(&mut driver);
    assert!((3900..=4000).contains(&fits), "{fits}");
    assert!((4001..4100).contains(&too_large), "{too_large}");
}

#[test]
fn the_summary_replaces_the_oldest_turns_and_the_turn_continues() {
    let mut driver = full(EngineSettings {
        max_calls_per_turn: 1,
        ..narrow()
    });
    let (before, asked) = (driver.transcript.clone(), driver.in_flight.unwrap());
    assert_eq!((asked.call, asked.attempt), (1, 1));
    assert!(text(driver.prompt.last().unwrap()).contains("Sum it up for yourself in at most "));
    assert!(
        !driver.offered.is_empty(),
        "servers refuse a history of tool calls without tools"
    );
    driver.answer(says("  The stars are quiet.\n"));
    assert_eq!(driver.acknowledged.last(), Some(&asked));
    let own = driver.in_flight.unwrap();
    assert_eq!((own.turn, own.call, own.attempt), (asked.turn, 2, 1));
    assert_eq!(driver.purpose, CallPurpose::Turn);
    let summary = text(&driver.prompt[1]);
    assert!(
        summary.starts_with("[From the runtime, not from a person: "),
        "{summary}"
    );
    assert!(
        summary.ends_with("your own summary of them.]\nThe stars are quiet."),
        "{summary}"
    );
    assert!(before.ends_with(&driver.transcript) && driver.transcript.len() < before.len());
    assert_eq!((compacted(&driver), trimmed(&driver)), (1, 0));
    // It does not count against the limits of the turn.
    driver.answer(calls("shell", "{}"));
    assert_eq!(
        driver.notes(RecordKind::TurnCompleted).len(),
        usize::try_from(own.turn).unwrap()
    );
    driver.pass(seconds(1));
    assert!(!driver.observed().contains("left the context"), "{}", driver.observed());
    let journal = format!(
        "{:?}",
        driver.journal.iter().map(|record| &record.note).collect::<Vec<_>>()
    );
    assert!(!journal.contains("stars"), "{journal}");
    assert!(driver.journal.iter().any(|record| {
        let mut messages = record.messages.iter();
        messages.any(|message| matches!(&**message, Message::Assistant { text: Some(text), .. } if text == "The stars are quiet."))
    }));
}

#[test]
fn the_next_summary_is_also_of_the_one_before_it() {
    let mut driver = full(narrow());
    driver.answer(says("First."));
    fill(&mut driver, 400);
    assert!(text(&driver.prompt[1]).ends_with("\nFirst."));
    driver.answer(says("Second."));
    assert!(text(&driver.prompt[1]).ends_with("\nSecond."));
    assert!(!serde_json::to_string(&driver.prompt).unwrap().contains("First."));
}

#[test]
fn a_summary_is_cut_at_its_bounds() {
    let mut driver = Driver::started(EngineSettings {
        max_consecutive_turns: 1000,
        ..settings()
    });
    fill(&mut driver, 4000);
    driver.answer(says(&"ä".repeat(20_000)));
    let summary = driver.engine.state.summary.clone().unwrap();
    assert_eq!(summary.len(), usize::try_from(MAX_BYTES).unwrap() + " [cut]".len());
    // For a small transcript it is at most half.
    let mut driver = full(narrow());
    driver.answer(says(&"x".repeat(20_000)));
    let summary = driver.engine.state.summary.clone().unwrap();
    assert!(summary.len() < 2000 * 4 / 2, "{}", summary.len());
    assert_eq!(driver.purpose, CallPurpose::Turn);
}

#[test]
fn without_text_the_turns_leave_at_once_and_nothing_is_run() {
    let tool = calls("files__write", "{}");
    let refused = ModelAnswer {
        finish: FinishReason::Refused,
        ..says("No.")
    };
    let length = ModelAnswer {
        finish: FinishReason::Length,
        ..ModelAnswer::default()
    };
    for useless in [ModelAnswer::default(), says(" \n"), tool, refused, length] {
        let mut driver = full(narrow());
        driver.offer(work::tools());
        driver.answer(useless.clone());
        assert_eq!((compacted(&driver), trimmed(&driver)), (0, 1), "{useless:?}");
        assert_eq!((driver.purpose, driver.sent.len()), (CallPurpose::Turn, 0));
        assert_eq!(driver.in_flight.unwrap().call, 2);
        driver.turn();
        driver.pass(seconds(1));
        assert!(driver.observed().contains("old turns left the context"));
        assert_eq!(driver.engine.view().consecutive_errors, 0);
    }
}

#[test]
fn a_summary_that_is_cut_at_the_output_limit_is_better_than_none() {
    let mut driver = full(narrow());
    driver.answer(ModelAnswer {
        finish: FinishReason::Length,
        ..says("The stars are")
    });
    assert_eq!(compacted(&driver), 1);
}

#[test]
fn a_failed_summary_is_retried_once_and_then_the_turns_are_dropped_without_one() {
    let mut driver = full(narrow());
    let first = driver.in_flight.unwrap();
    driver.fail(FailureKind::Timeout);
    assert_eq!((driver.in_flight, trimmed(&driver)), (None, 0));
    driver.pass(seconds(1));
    let second = driver.in_flight.unwrap();
    assert_eq!((second.call, second.attempt), (first.call, 2));
    let mut other = driver.clone();
    other.answer(says("Found it."));
    assert_eq!((compacted(&other), trimmed(&other)), (1, 0));
    driver.fail(FailureKind::BadResponse);
    driver.pass(seconds(1));
    assert_eq!((compacted(&driver), trimmed(&driver)), (0, 1));
    assert_eq!((driver.purpose, driver.in_flight.unwrap().call), (CallPurpose::Turn, 2));
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    // The next one is requested when there is too much again.
    fill(&mut driver, 400);
    driver.answer(says("Found it."));
    assert_eq!((compacted(&driver), trimmed(&driver)), (1, 1));
}

#[test]
fn an_unavailable_server_costs_no_history() {
    let mut driver = full(narrow());
    let call = driver.in_flight.unwrap();
    for _ in 0..8 {
        driver.fail(FailureKind::Unreachable);
        driver.pass(seconds(300));
    }
    assert_eq!(driver.notes(RecordKind::TurnFailed), [""; 0]);
    assert_eq!((compacted(&driver), trimmed(&driver)), (0, 0));
    assert_eq!(driver.purpose, CallPurpose::Compaction, "it is requested again");
    assert_eq!(
        (driver.in_flight.unwrap().turn, driver.in_flight.unwrap().call),
        (call.turn, call.call)
    );
    driver.answer(says("Found it."));
    assert_eq!((compacted(&driver), trimmed(&driver)), (1, 0));
}

#[test]
fn a_budget_without_room_holds_the_summary_and_one_that_is_too_small_for_it_costs_the_turns() {
    let mut driver = full(narrow());
    driver.fail(FailureKind::BudgetExhausted);
    assert_eq!(driver.reasons(), [PauseReason::BudgetExhausted]);
    driver.pass(seconds(20));
    assert_eq!(driver.purpose, CallPurpose::Compaction);
    let mut other = driver.clone();
    other.answer(says("Found it."));
    assert_eq!((compacted(&other), trimmed(&other)), (1, 0));
    driver.fail(FailureKind::CallExceedsLimit);
    assert_eq!(
        (driver.purpose, trimmed(&driver)),
        (CallPurpose::Compaction, 0),
        "of half as much"
    );
    driver.fail(FailureKind::CallExceedsLimit);
    assert_eq!((driver.purpose, compacted(&driver)), (CallPurpose::Turn, 0));
    // Its own call, which can never fit, waits for a person.
    driver.fail(FailureKind::CallExceedsLimit);
    assert_eq!(driver.reasons(), [PauseReason::CallExceedsLimit]);
}

/// Estimated tokens of the messages that the call in flight summarizes.
#[test]
fn a_summary_is_limited_to_half_of_the_replaced_bytes_and_the_prompt_states_the_limit() {
    let mut driver = full(EngineSettings {
        max_consecutive_turns: 1000,
        history_tokens: 2000,
        ..settings()
    });
    let replaced = summed_up(&driver);
    let (bytes, words) = (replaced * 4 / 2, replaced * 4 / 2 / 8);
    let asked = text(driver.prompt.last().unwrap()).to_owned();
    assert!(asked.contains(&format!("in at most {words} words")), "{bytes}: {asked}");
    driver.answer(says(&"x".repeat(20_000)));
    let summary = driver.engine.state.summary.clone().unwrap();
    assert_eq!(
        summary,
        format!("{} [cut]", "x".repeat(usize::try_from(bytes).unwrap()))
    );
}

#[test]
fn a_long_summary_counts_as_part_of_the_prompts_that_must_fit() {
    let mut driver = full(narrow());
    for _ in 0..60 {
        driver.answer(says(
            &"x".repeat(20_000 * usize::from(driver.purpose == CallPurpose::Compaction) + 400),
        ));
        driver.pass(seconds(3));
        let prompt = prompt_size::messages_size(&driver.prompt, 0);
        assert!(prompt <= 2500, "{prompt}");
    }
    assert!(compacted(&driver) > 3 && trimmed(&driver) == 0);
}

fn summed_up(driver: &Driver) -> u64 {
    assert_eq!(driver.purpose, CallPurpose::Compaction);
    let heads = usize::from(driver.engine.head().is_some());
    prompt_size::messages_size(&driver.prompt[1 + heads..driver.prompt.len() - 1], 0)
}

#[test]
fn a_summary_whose_call_exceeds_a_limit_is_of_half_as_much_until_it_is_worth_none() {
    let mut driver = full(EngineSettings {
        context_tokens: 4096 + 12_000,
        ..narrow()
    });
    let (mut before, turn) = (summed_up(&driver), driver.in_flight.unwrap().turn);
    assert!(before > 3000, "{before}");
    loop {
        let mut taken = driver.clone();
        taken.answer(says("Found it."));
        assert_eq!((compacted(&taken), trimmed(&taken)), (1, 0), "the rest needs another");
        driver.fail(FailureKind::CallExceedsLimit);
        assert_eq!(driver.in_flight.unwrap().turn, turn);
        if driver.purpose == CallPurpose::Turn {
            break;
        }
        let now = summed_up(&driver);
        assert!(now <= before / 2 && now >= MIN_REPLACED, "{now} after {before}");
        before = now;
    }
    assert!(before < 3 * MIN_REPLACED, "{before}");
    assert_eq!((driver.reasons(), compacted(&driver)), (vec![], 0));
    driver.turn();
    let told = driver.observed();
    assert!(told.contains("old turns left the context"), "{told}");
}

#[test]
fn a_history_too_large_for_one_call_is_summarized_part_by_part() {
    let mut driver = Driver::started(EngineSettings {
        context_tokens: 4096 + 12_000,
        ..narrow()
    });
    for _ in 0..60 {
        driver.answer(says(&"x".repeat(400)));
        driver.pass(seconds(3));
    }
    assert_eq!((compacted(&driver), trimmed(&driver)), (0, 0));
    driver.feed(EngineInput::BudgetChanged {
        budget: BudgetState {
            revision: 1,
            tokens: Some(3500),
            ..BudgetState::default()
        },
    });
    driver.turn();
    let turn = driver.in_flight.unwrap().turn;
    let mut parts = 0;
    while driver.purpose == CallPurpose::Compaction {
        let tokens = summed_up(&driver);
        let whole = tokens + driver.engine.fixed_tokens();
        assert!(whole <= 3500 && tokens > 500, "{tokens} of {whole}");
        driver.answer(says("Found it."));
        parts += 1;
    }
    assert!((2..=4).contains(&parts), "{parts}");
    assert_eq!((compacted(&driver), trimmed(&driver)), (parts, 0));
    assert_eq!(driver.in_flight.unwrap().turn, turn);
}

#[test]
fn a_first_turn_too_large_for_a_summary_is_the_only_one_dropped_without_one() {
    let mut driver = Driver::started(EngineSettings {
        context_tokens: 4096 + 12_000,
        ..narrow()
    });
    driver.answer(says(&"x".repeat(14_000)));
    driver.pass(seconds(3));
    for _ in 0..30 {
        driver.answer(says(&"x".repeat(400)));
        driver.pass(seconds(3));
    }
    assert_eq!((compacted(&driver), trimmed(&driver)), (0, 0));
    driver.feed(EngineInput::BudgetChanged {
        budget: BudgetState {
            revision: 1,
            tokens: Some(3500),
            ..BudgetState::default()
        },
    });
    driver.turn();
    while driver.purpose == CallPurpose::Compaction {
        driver.answer(says("Found it."));
    }
    let mut trimmed = driver.journal.iter().filter(|line| line.kind == RecordKind::Trimmed);
    assert_eq!(trimmed.next().map(|line| line.forget.clone()), Some(0..2));
    assert_eq!(trimmed.next().map(|line| line.forget.clone()), None);
    assert!(compacted(&driver) >= 1);
}

#[test]
fn a_rate_limit_does_not_end_a_turn_that_has_only_summed_up() {
    let mut driver = full(EngineSettings {
        rate_limits: vec![rates::limit(LimitedResource::LLMCalls, 1, 3)],
        ..narrow()
    });
    let turn = driver.in_flight.unwrap().turn;
    driver.answer(says("Found it."));
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    driver.pass(seconds(4));
    let call = driver.in_flight.unwrap();
    assert_eq!((call.turn, call.call), (turn, 2));
}

#[test]
fn a_restart_requests_the_same_summary_and_keeps_a_received_one() {
    let mut driver = full(narrow());
    let (call, prompt) = (driver.in_flight.unwrap(), driver.prompt.clone());
    driver.restart(1);
    assert_eq!(
        (driver.in_flight, driver.purpose),
        (Some(call), CallPurpose::Compaction)
    );
    assert_eq!(driver.prompt, prompt);
    driver.answer(says("The stars are quiet."));
    let prompt = driver.prompt.clone();
    driver.restart(2);
    assert_eq!(driver.prompt, prompt);
    assert!(text(&driver.prompt[1]).ends_with("The stars are quiet."));
    driver.turn();
    assert_eq!(driver.engine.view().consecutive_errors, 0);
}

#[test]
fn a_summary_outlives_a_turn_that_does_not_fit_beside_it() {
    let mut driver = full(narrow());
    driver.answer(says(&"x".repeat(3000)));
    driver.turn();
    driver.pass(seconds(1));
    driver.answer(calls("shell", &"y".repeat(8000)));
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["ContextExceeded"]);
    assert!(driver.engine.state.summary.is_some());
}

#[test]
fn a_text_beside_a_tool_call_is_a_summary_unless_it_only_announces_the_call() {
    for (text, counts) in [
        ("What I found out. ".repeat(20), true),
        ("Let me look.".to_owned(), false),
    ] {
        let mut driver = full(narrow());
        driver.offer(work::tools());
        driver.answer(ModelAnswer {
            text: Some(text),
            ..work::wants(&["files__write", "yield"])
        });
        assert_eq!(compacted(&driver), usize::from(counts));
        assert_eq!(
            (driver.purpose, driver.sent.len()),
            (CallPurpose::Turn, 0),
            "it is not run"
        );
    }
}

#[test]
fn a_summary_is_requested_under_fixed_headings() {
    let driver = full(narrow());
    let request = text(driver.prompt.last().unwrap());
    let headings = ["Task:", "Done:", "Open:", "Facts:", "Promises:", "Failed:"];
    let places: Vec<_> = headings.iter().map(|heading| request.find(heading)).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{request}");
}

#[test]
fn notifications_are_not_seen_in_a_call_for_a_summary() {
    let mut driver = full(narrow());
    driver.feed(notified(super::super::notifications::Notification {
        id: "n".into(),
        source: "sensor/prices".into(),
        priority: super::super::notifications::NotificationPriority::Normal,
        text: "ACME is up".into(),
        at: driver.now,
    }));
    assert_eq!(driver.block, None);
    driver.answer(says("Found it."));
    assert!(driver.block.clone().unwrap().contains("ACME is up"));
}

fn turns() -> impl Strategy<Value = Vec<Arc<Message>>> {
    let results = prop::collection::vec(0..600_usize, 0..4);
    let calls = prop::collection::vec((0..600_usize, results), 1..4);
    prop::collection::vec((0..400_usize, calls), 1..12).prop_map(|turns| {
        let mut all = Vec::new();
        for (turn, (length, calls)) in turns.into_iter().enumerate() {
            all.push(Message::User {
                text: "u".repeat(length),
            });
            for (call, (length, results)) in calls.into_iter().enumerate() {
                let id = |place: usize| format!("{turn}-{call}-{place}");
                let tool_calls = (0..results.len()).map(|place| ToolCall {
                    id: id(place),
                    name: "look".into(),
                    arguments: "{}".into(),
                });
                all.push(Message::Assistant {
                    reasoning: None,
                    text: Some("a".repeat(length)),
                    tool_calls: tool_calls.collect(),
                });
                all.extend(results.iter().enumerate().map(|(place, length)| Message::Tool {
                    id: id(place),
                    text: "r".repeat(*length),
                    failed: false,
                    reasoning: None,
                    artifacts: ResultArtifacts::default(),
                }));
            }
        }
        all.into_iter().map(Arc::new).collect()
    })
}

/// Ids of tool calls, or of results.
fn ids(messages: &[Arc<Message>], results: bool) -> Vec<String> {
    let of = |message: &Arc<Message>| match &**message {
        Message::Assistant { tool_calls, .. } if !results => tool_calls.iter().map(|call| call.id.clone()).collect(),
        Message::Tool { id, .. } if results => vec![id.clone()],
        Message::System { .. } | Message::User { .. } | Message::Assistant { .. } | Message::Tool { .. } => Vec::new(),
    };
    messages.iter().flat_map(of).collect()
}

proptest! {
    #[test]
    fn no_call_is_parted_from_its_result_and_sizes_add_up(
        transcript in turns(),
        cleared in 0..60_usize,
        goal in 0_u64..6000,
    ) {
        let all = prompt_size::messages_size(&transcript, cleared);
        let rendered: Vec<_> = prompt_size::rendered(&transcript, cleared).collect();
        prop_assert_eq!(prompt_size::messages_size(&rendered, 0), all);
        prop_assert_eq!(ids(&rendered, true), ids(&transcript, true));
        let oldest = prompt_size::oldest_to_drop(&transcript, cleared, transcript.len(), goal);
        let first = prompt_size::longest_prefix(&transcript, cleared, goal);
        for cut in [Some(oldest), first].into_iter().flatten() {
            let (gone, left) = transcript.split_at(cut);
            for part in [gone, left] {
                prop_assert_eq!(ids(part, false), ids(part, true));
            }
            prop_assert_eq!(prompt_size::messages_size(gone, cleared) + prompt_size::messages_size(left, cleared.saturating_sub(cut)), all);
        }
        if let Some(first) = first {
            prop_assert!(prompt_size::messages_size(&transcript[..first], cleared) <= goal);
        }
        let begins_turn = transcript.get(oldest).is_none_or(|message| matches!(**message, Message::User { .. }));
        prop_assert!(begins_turn, "whole turns");
        if let Some(more) = prompt_size::clear_until(&transcript, cleared, transcript.len(), goal) {
            prop_assert!(more > cleared && prompt_size::messages_size(&transcript, more) < all);
        }
    }
}
