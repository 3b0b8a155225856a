//! What leaves a prompt that grows too large, in which order, and that no action is forgotten.

use super::super::context::digest::MAX_CALLS;
use super::super::context::prompt_size::{self as sizes, MIN_CLEARED_BYTES};
use super::work::{tool, wants};
use super::*;

const MARK: &str = "The runtime left out";

/// A window of 12,000 tokens, with 1,000 for the answer.
fn middle() -> EngineSettings {
    EngineSettings {
        max_consecutive_turns: 10_000,
        max_calls_per_turn: 100,
        context_tokens: 12_000,
        max_output_tokens: 1_000,
        actions_per_minute: 600,
        ..settings()
    }
}

fn done(text: &str) -> ToolOutcome {
    ToolOutcome::Done { text: text.into() }
}

/// One call that runs these tools, each with a result of `bytes` bytes.
fn work(driver: &mut Driver, names: &[&str], bytes: usize) {
    driver.answer(wants(names));
    finish(driver, bytes);
}

fn finish(driver: &mut Driver, bytes: usize) {
    while let Some(run) = driver.running.keys().next().copied() {
        let text = format!("{run} {}", "r".repeat(bytes));
        driver.feed(EngineInput::ToolFinished {
            run,
            outcome: done(&text),
            artifacts: ResultArtifacts::default(),
        });
    }
    driver.pass(SignedDuration::from_millis(1));
}

/// The results in the prompt last sent.
fn shown(driver: &Driver) -> Vec<&str> {
    let text = |message: &'_ Arc<Message>| matches!(**message, Message::Tool { .. });
    driver
        .prompt
        .iter()
        .filter(|message| text(message))
        .map(|message| text_of(message))
        .collect()
}

fn text_of(message: &Message) -> &str {
    match message {
        Message::System { text } | Message::User { text } | Message::Tool { text, .. } => text,
        Message::Assistant { text, .. } => text.as_deref().unwrap_or_default(),
    }
}

fn all(driver: &Driver) -> String {
    driver
        .prompt
        .iter()
        .map(|message| text_of(message))
        .collect::<Vec<_>>()
        .join("\n")
}

fn failed_turns(driver: &Driver) -> usize {
    driver.notes(RecordKind::TurnFailed).len()
}

#[test]
fn a_turn_that_reads_more_than_the_window_continues_without_its_oldest_results() {
    let mut driver = Driver::with_tools(middle());
    for _ in 0..30 {
        work(&mut driver, &["files__read"], 4000);
        assert_eq!(failed_turns(&driver), 0);
        let newest = *shown(&driver).last().unwrap();
        assert!(
            newest.len() > 4000 && !newest.contains(MARK),
            "what is new is shown whole"
        );
    }
    let results = shown(&driver);
    assert!(
        results.len() > 5 && results[0].contains(MARK) && results[0].starts_with("t1c"),
        "{results:?}"
    );
    // Many leave at once, so that the prompt keeps its beginning in between.
    let cleared = driver.notes(RecordKind::ResultsCleared).len();
    assert!((1..12).contains(&cleared), "{cleared}");
    // Another process sends the same prompt.
    let before = driver.prompt.clone();
    driver.restart(1);
    assert_eq!(driver.prompt, before);
    driver.answer(says("done"));
    driver.pass(seconds(1));
    assert_eq!(driver.notes(RecordKind::TurnCompleted).len(), 1);
}

#[test]
fn a_turn_is_summed_up_in_its_middle_where_its_results_are_not_what_fills_it() {
    let mut driver = Driver::with_tools(middle());
    let opening = driver.observed().to_owned();
    let mut summaries = 0;
    for round in 0..40 {
        if driver.purpose == CallPurpose::Compaction {
            summaries += 1;
            driver.answer(says(&format!("Summary {summaries}.")));
        }
        assert_eq!(
            (failed_turns(&driver), driver.purpose),
            (0, CallPurpose::Turn),
            "round {round}"
        );
        driver.answer(ModelAnswer {
            text: Some("t".repeat(3000)),
            ..wants(&["files__read"])
        });
        finish(&mut driver, 10);
        if summaries == 2 {
            break;
        }
    }
    assert_eq!((summaries, driver.engine.view().counts.turns), (2, 0));
    let prompt = all(&driver);
    assert!(
        prompt.contains("Summary 2.") && !prompt.contains("Summary 1."),
        "{prompt}"
    );
    assert!(prompt.contains(&opening), "the turn still knows why it began");
    driver.answer(says("done"));
    driver.pass(seconds(1));
    assert_eq!(driver.engine.view().counts.turns, 1);
}

#[test]
fn actions_stay_as_text_when_no_summary_is_available() {
    let mut driver = Driver::with_tools(middle());
    work(&mut driver, &["mail__send"], 10);
    work(&mut driver, &["files__list"], 10);
    let mut refused = 0;
    for _ in 0..40 {
        if driver.purpose == CallPurpose::Compaction {
            refused += 1;
            driver.answer(ModelAnswer {
                finish: FinishReason::Refused,
                ..says("No.")
            });
        }
        driver.answer(ModelAnswer {
            text: Some("t".repeat(3000)),
            ..wants(&["files__read"])
        });
        finish(&mut driver, 10);
    }
    assert_eq!(
        (failed_turns(&driver), refused),
        (0, 1),
        "one that did not help is not repeated"
    );
    let prompt = all(&driver);
    assert!(prompt.contains("left your context without a summary"), "{prompt}");
    assert!(prompt.contains("mail__send {} -> t1c1r1 rrrr"), "{prompt}");
    assert!(!prompt.contains("files__list"), "reading has changed nothing");
    // The next summary covers it too.
    driver.answer(says("done"));
    for _ in 0..40 {
        driver.pass(seconds(1));
        if driver.purpose == CallPurpose::Compaction {
            assert!(all(&driver).contains("mail__send {} -> t1c1r1"));
            driver.answer(says("I sent the mail."));
            break;
        }
        driver.answer(says(&"t".repeat(3000)));
    }
    let prompt = all(&driver);
    assert!(
        prompt.contains("I sent the mail.") && !prompt.contains("without a summary"),
        "{prompt}"
    );
}

#[test]
fn the_newest_of_many_calls_without_a_summary_are_listed_and_the_others_counted() {
    let mut driver = Driver::with_tools(middle());
    let mut turns = 0;
    while !all(&driver).contains("calls, not listed") {
        if driver.purpose == CallPurpose::Compaction {
            driver.answer(ModelAnswer::default());
        }
        work(&mut driver, &["mail__send"; 4], 10);
        turns += 1;
        if turns % 5 == 0 {
            driver.answer(says(&"t".repeat(2000)));
            driver.pass(seconds(1));
        }
        assert!(turns < 400, "{}", all(&driver));
    }
    let listed = all(&driver).matches("\n- mail__send").count();
    assert!(listed > 5 && listed <= MAX_CALLS, "{listed}");
}

#[test]
fn results_of_earlier_turns_leave_before_any_turn_is_summed_up() {
    let mut driver = Driver::with_tools(EngineSettings {
        history_tokens: 3000,
        ..middle()
    });
    let mut cleared = 0;
    for turn in 0..200 {
        if driver.purpose == CallPurpose::Compaction {
            assert!(turn > 10 && cleared > 1, "results first: {turn}");
            return;
        }
        work(&mut driver, &["files__read"], 2000);
        let before = driver.prompt.clone();
        driver.answer(calls("yield", r#"{"sleep": 600}"#));
        driver.pass(seconds(600));
        let now = driver.notes(RecordKind::ResultsCleared).len();
        if now == cleared && driver.purpose == CallPurpose::Turn {
            assert_eq!(
                driver.prompt[..before.len()],
                before,
                "between, the cache reads all of it"
            );
        }
        cleared = now;
        let old = driver.engine.cleared();
        let results = shown(&driver);
        assert!(old == 0 || results[0].contains(MARK), "the oldest go first");
    }
    panic!("the text alone never became too much");
}

#[test]
fn a_short_result_is_never_cleared() {
    let mut driver = Driver::with_tools(EngineSettings {
        history_tokens: 1000,
        ..middle()
    });
    for _ in 0..30 {
        if driver.purpose == CallPurpose::Compaction {
            break;
        }
        work(&mut driver, &["files__read"], MIN_CLEARED_BYTES - 20);
        driver.answer(calls("yield", r#"{"sleep": 600}"#));
        driver.pass(seconds(600));
    }
    assert_eq!(driver.purpose, CallPurpose::Compaction);
    assert!(!all(&driver).contains(MARK));
}

#[test]
fn a_window_that_was_too_small_for_a_while_costs_no_results() {
    let whole = EngineSettings {
        context_tokens: 100_000,
        ..middle()
    };
    let mut driver = Driver::with_tools(whole.clone());
    for _ in 0..8 {
        work(&mut driver, &["files__read"], 4000);
        driver.answer(calls("yield", r#"{"sleep": 60}"#));
        driver.pass(seconds(60));
    }
    let before = shown(&driver).concat();
    assert!(!before.contains(MARK));
    driver.settings = EngineSettings {
        context_tokens: 10_000,
        ..whole.clone()
    };
    driver.restart(2);
    driver.answer(calls("yield", r#"{"sleep": 60}"#));
    driver.pass(seconds(60));
    assert!(all(&driver).contains(MARK));
    driver.settings = whole;
    driver.restart(3);
    driver.answer(calls("yield", r#"{"sleep": 60}"#));
    driver.pass(seconds(60));
    let now = shown(&driver).concat();
    assert!(now.starts_with(&before) && !now.contains(MARK), "all is there again");
}

#[test]
fn a_budget_that_was_lowered_for_a_while_costs_no_results() {
    let mut driver = Driver::with_tools(EngineSettings {
        context_tokens: 100_000,
        ..middle()
    });
    let limit = |driver: &mut Driver, revision: u64, tokens: Option<u64>| {
        let budget = BudgetState {
            revision,
            tokens,
            ..BudgetState::default()
        };
        driver.feed(EngineInput::BudgetChanged { budget });
        driver.answer(calls("yield", r#"{"sleep": 60}"#));
        driver.pass(seconds(60));
    };
    for _ in 0..8 {
        work(&mut driver, &["files__read"], 4000);
        driver.answer(calls("yield", r#"{"sleep": 60}"#));
        driver.pass(seconds(60));
    }
    limit(&mut driver, 1, Some(15_000));
    assert!(all(&driver).contains(MARK));
    limit(&mut driver, 2, None);
    assert!(!all(&driver).contains(MARK));
}

#[test]
fn a_result_has_at_most_a_quarter_of_the_free_window_and_all_results_of_an_answer_fit() {
    let mut driver = Driver::with_tools(middle());
    work(&mut driver, &["files__read"], 30_000);
    let one = shown(&driver)[0].len();
    assert!((8_000..12_000).contains(&one), "{one}");
    let mut driver = Driver::with_tools(middle());
    work(&mut driver, &["files__read"; 16], 30_000);
    let results = shown(&driver);
    assert_eq!(results.len(), 16);
    assert!(
        results.iter().all(|text| text.len() > 1_500 && !text.contains(MARK)),
        "{results:?}"
    );
    // In a window with room the spec decides.
    let mut driver = Driver::with_tools(EngineSettings {
        context_tokens: 200_000,
        ..middle()
    });
    work(&mut driver, &["files__read"], 30_000);
    assert!(shown(&driver)[0].len() > 30_000);
}

#[test]
fn a_turn_that_nothing_can_shorten_fails_with_a_kind_of_its_own_and_blames_no_notification() {
    let mut driver = Driver::fresh(EngineSettings {
        context_tokens: 1300,
        ..middle()
    });
    driver.offer(vec![ToolSpec {
        description: "x".repeat(3000),
        ..tool("files__read", ToolEffect::Read)
    }]);
    driver.feed(notified(super::super::notifications::Notification {
        id: "n".into(),
        source: "sensor/prices".into(),
        priority: super::super::notifications::NotificationPriority::Normal,
        text: "ACME is up".into(),
        at: driver.now,
    }));
    driver.start(1);
    for _ in 0..3 {
        driver.next_timer();
    }
    assert!(
        driver
            .notes(RecordKind::TurnFailed)
            .iter()
            .all(|note| *note == "ContextExceeded")
    );
    let (_, failure) = driver.engine.view().last_error.unwrap();
    assert!(
        failure.message.contains("spec.model.contextTokens"),
        "{}",
        failure.message
    );
    assert_eq!(driver.notes(RecordKind::NotificationDropped), [""; 0]);
}

/// A server with a window and its own way to count.
struct Server {
    window: u64,
    bytes_per_token: u64,
    says_use: bool,
    refused: usize,
}

impl Server {
    fn tokens(&self, driver: &Driver) -> u64 {
        let bytes: usize = driver
            .prompt
            .iter()
            .map(|message| serde_json::to_string(&**message).unwrap().len())
            .sum();
        u64::try_from(bytes).unwrap() / self.bytes_per_token
    }

    /// Refuses prompts until one fits, which is answered like this.
    fn answer(&mut self, driver: &mut Driver, answer: &ModelAnswer) {
        for _ in 0..20 {
            let tokens = self.tokens(driver);
            if tokens <= self.window {
                let answer = if driver.purpose == CallPurpose::Compaction {
                    says("All is well so far.")
                } else {
                    answer.clone()
                };
                let own = driver.purpose != CallPurpose::Compaction;
                driver.answer(ModelAnswer {
                    input_tokens: self.says_use.then_some(tokens),
                    ..answer
                });
                if own {
                    return;
                }
            } else {
                self.refused += 1;
                driver.fail(FailureKind::ContextExceeded);
                assert_eq!(failed_turns(driver), 0, "{tokens}");
            }
            assert!(driver.in_flight.is_some(), "the same call again");
        }
        panic!("it never fits");
    }
}

#[test]
fn a_server_that_counts_two_bytes_a_token_refuses_once_and_never_again() {
    let mut driver = Driver::with_tools(middle());
    let mut server = Server {
        window: 11_000,
        bytes_per_token: 2,
        says_use: true,
        refused: 0,
    };
    for turn in 0..60 {
        for _ in 0..3 {
            server.answer(&mut driver, &wants(&["files__read"]));
            finish(&mut driver, 3000);
        }
        server.answer(&mut driver, &calls("yield", r#"{"sleep": 60}"#));
        driver.pass(seconds(60));
        assert_eq!(driver.engine.view().counts.turns, turn + 1);
    }
    // Its first answer calibrates the estimate: even the first prompt is not one too many.
    assert_eq!((server.refused, failed_turns(&driver)), (0, 0));
    assert!(driver.notes(RecordKind::Compacted).len() + driver.notes(RecordKind::ResultsCleared).len() > 2);
}

#[test]
fn a_window_smaller_than_specified_costs_refused_calls_and_no_turn() {
    for (window, bytes_per_token, says_use) in [(5000, 4, true), (5000, 4, false), (5500, 2, false), (4000, 3, true)] {
        let mut driver = Driver::with_tools(middle());
        let mut server = Server {
            window,
            bytes_per_token,
            says_use,
            refused: 0,
        };
        for turn in 0..60 {
            for _ in 0..3 {
                server.answer(&mut driver, &wants(&["files__read"]));
                finish(&mut driver, 1500);
            }
            server.answer(&mut driver, &calls("yield", r#"{"sleep": 60}"#));
            driver.pass(seconds(60));
            assert_eq!(driver.engine.view().counts.turns, turn + 1);
        }
        assert!((1..8).contains(&server.refused), "{} of {window}", server.refused);
        assert_eq!(driver.notes(RecordKind::NotificationDropped), [""; 0]);
    }
}

#[test]
fn a_call_that_the_server_refuses_as_too_long_at_any_size_fails_the_turn() {
    let mut driver = Driver::with_tools(middle());
    work(&mut driver, &["files__read"; 4], 4000);
    let mut refused = 0;
    while failed_turns(&driver) == 0 {
        driver.fail(FailureKind::ContextExceeded);
        refused += 1;
        assert!(refused < 30);
    }
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["ContextExceeded"]);
    assert!(refused > 2, "smaller ones were tried: {refused}");
}

#[test]
fn a_heartbeat_above_the_window_drops_only_its_own_oldest_results_and_continues() {
    let mut driver = Driver::with_tools(EngineSettings {
        heartbeat: Some(super::super::modes::continuous::heartbeat::HeartbeatSettings {
            every: seconds(600),
            prompt: "Is all well?".into(),
        }),
        ..middle()
    });
    work(&mut driver, &["files__read"], 4000);
    driver.answer(calls("yield", r#"{"sleep": 3600}"#));
    driver.pass(seconds(600));
    assert_eq!(driver.purpose, CallPurpose::Heartbeat);
    for _ in 0..20 {
        work(&mut driver, &["files__read"], 4000);
        assert_eq!(driver.purpose, CallPurpose::Heartbeat);
    }
    assert!(all(&driver).contains(MARK));
    driver.answer(says("All is well."));
    driver.feed(EngineInput::WakeRequested { token: "w".into() });
    assert_eq!((driver.purpose, failed_turns(&driver)), (CallPurpose::Turn, 0));
    assert!(!all(&driver).contains(MARK));
}

#[test]
fn earlier_turns_have_history_tokens_at_most_when_a_turn_begins_and_no_fewer() {
    let mut driver = Driver::started(EngineSettings {
        history_tokens: 3000,
        ..middle()
    });
    let (mut fits, mut too_large) = (0, u64::MAX);
    for _ in 0..400 {
        let own = driver.engine.state.turn.as_ref().unwrap().messages();
        let earlier = &driver.engine.transcript[..driver.engine.transcript.len() - own];
        let now = sizes::messages_size(earlier, 0);
        if driver.purpose == CallPurpose::Compaction {
            too_large = too_large.min(now);
            driver.answer(says("Nothing new so far."));
        } else {
            fits = fits.max(now);
            driver.answer(says("y"));
        }
        driver.pass(seconds(1));
    }
    assert!((2950..=3000).contains(&fits), "{fits}");
    assert!((3001..3050).contains(&too_large), "{too_large}");
    assert!(driver.notes(RecordKind::Compacted).len() > 2 && driver.notes(RecordKind::Trimmed).is_empty());
}

#[test]
fn results_before_the_cleared_place_count_as_they_are_shown_and_the_others_whole() {
    let result = |bytes: usize| {
        Arc::new(Message::Tool {
            id: "a".into(),
            text: "x".repeat(bytes),
            failed: false,
            reasoning: None,
            artifacts: ResultArtifacts::default(),
        })
    };
    let messages = [result(1000), result(2000)];
    let shown: Vec<Arc<Message>> = sizes::rendered(&messages, 1).collect();
    let Message::Tool { text, .. } = &*shown[0] else {
        panic!("not a result");
    };
    assert!(
        text.starts_with("xxx") && text.contains("left out 840 more bytes"),
        "{text}"
    );
    assert_eq!(shown[1], messages[1]);
    assert!(!text.contains("artifact"), "{text}");
    let mut stored = Message::clone(&messages[0]);
    if let Message::Tool { artifacts, .. } = &mut stored {
        artifacts.text = Some("0123456789abcdef.txt".into());
    }
    let shown_stored: Vec<Arc<Message>> = sizes::rendered(&[Arc::new(stored)], 1).collect();
    assert!(text_of(&shown_stored[0]).contains("All of it is artifact 0123456789abcdef.txt. Read them again"));
    let size = sizes::messages_size(&messages, 1);
    assert_eq!(size, sizes::messages_size(&shown, 0));
    assert_eq!(sizes::longest_prefix(&messages, 1, size), Some(2));
    assert_eq!(sizes::longest_prefix(&messages, 1, size - 1), None);
}

#[test]
fn the_ratio_is_that_of_the_last_bill_between_one_and_four() {
    let mut known = sizes::TokenEstimator::default();
    let settings = middle();
    for (billed, expected) in [(2000, 500), (500, 1000), (9000, 250), (3000, 333)] {
        known.calibrate(1000, billed, &settings);
        assert_eq!(known.estimated(1000), expected);
    }
    known.calibrate(249, 498, &settings);
    known.calibrate(1000, 0, &settings);
    assert_eq!(
        known.estimated(1000),
        333,
        "a small prompt without a report changes nothing"
    );
    known.calibrate(250, 500, &settings);
    assert_eq!(known.estimated(1000), 500);
}

#[test]
fn a_refusal_is_remembered_until_a_bill_explains_it_or_the_window_is_another() {
    let settings = middle();
    let available =
        |known: sizes::TokenEstimator, settings: &EngineSettings| sizes::available(settings, known, None, 0, 0).whole;
    let mut known = sizes::TokenEstimator::default();
    assert_eq!(available(known, &settings), 11_000);
    known.record_refusal(5000, &settings);
    known.record_refusal(6000, &settings);
    assert_eq!(available(known, &settings), 4000, "a fifth below the smallest");
    known.calibrate(4000, 4400, &settings);
    assert_eq!(
        available(known, &settings),
        4000,
        "it does not explain a refusal of 5,500"
    );
    let mut explained = known;
    explained.calibrate(4000, 12_000, &settings);
    assert_eq!(available(explained, &settings), 11_000 / 3);
    let larger = EngineSettings {
        context_tokens: 24_000,
        ..settings
    };
    assert!(available(known, &larger) > 20_000);
}
