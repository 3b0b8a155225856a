//! Loop detection: each signal at its number and not before, the escalation step by step, and what ends it.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::super::notifications::{Notification, NotificationPriority};
use super::work::tool;
use super::*;
use agentloop_api::condition::LoopSign;
use agentloop_api::status::LoopOutcome;

fn watched(mode: DetectionMode) -> Driver {
    let settings = EngineSettings {
        loop_detection: LoopDetection {
            mode,
            exempt_tools: vec!["wait".into()],
        },
        actions_per_minute: 600,
        max_calls_per_turn: 1000,
        ..settings()
    };
    let mut driver = Driver::fresh(settings);
    let open = |spec: ToolSpec| ToolSpec {
        parameters: json!({"type": "object"}),
        ..spec
    };
    driver.offer(vec![
        open(tool("files__read", ToolEffect::Read)),
        open(tool("jobs__wait", ToolEffect::Read)),
        open(tool("shell__run", ToolEffect::Write)),
    ]);
    driver.start(1);
    driver
}

/// An answer that calls one tool once, `what` being its argument.
fn once(name: &str, what: &str) -> ModelAnswer {
    calls(name, &json!({"what": what}).to_string())
}

impl Driver {
    /// One call of a tool, and its result; a call that does not run is denied.
    fn call(&mut self, name: &str, what: &str, outcome: ToolOutcome) {
        self.ready();
        if self.stopped {
            return;
        }
        self.answer(once(name, what));
        if !self.running.is_empty() {
            self.end(1, outcome);
        }
    }

    /// Time passes until a model call is made.
    fn ready(&mut self) {
        while self.in_flight.is_none() && !self.stopped {
            self.next_timer();
        }
    }

    /// An answer without a tool.
    fn says(&mut self, text: &str) {
        self.ready();
        self.answer(says(text));
    }

    fn read(&mut self, what: &str, result: &str) {
        self.call("files__read", what, ToolOutcome::Done { text: result.into() });
    }

    fn run(&mut self, what: &str, result: &str) {
        self.call("shell__run", what, ToolOutcome::Done { text: result.into() });
    }

    fn fails(&mut self, what: &str, error: &str) {
        self.call("shell__run", what, ToolOutcome::Failed { text: error.into() });
    }

    /// The steps taken so far.
    fn steps(&self) -> Vec<&str> {
        let notes = self.notes(RecordKind::LoopDetected);
        notes.iter().map(|note| note.split_once(": ").unwrap().1).collect()
    }

    fn sign(&self) -> Option<LoopSign> {
        self.engine.view().detected.map(|detected| detected.sign)
    }

    /// Ends the turn with a sleep that the agent chose.
    fn sleeps(&mut self) {
        self.answer(calls("yield", r#"{"sleep": 60}"#));
        self.pass(seconds(60));
    }

    /// Equal calls until this step was taken.
    fn reads_until(&mut self, step: &str) {
        for _ in 0..200 {
            if self.steps().last() == Some(&step) {
                return;
            }
            self.read("a", "same");
        }
        panic!("never {step}: {:?}", self.steps());
    }
}

/// Feeds a repetition call by call. Returns the first call with a note.
fn warned_at(feed: impl Fn(&mut Driver, usize)) -> (usize, LoopSign) {
    let mut driver = watched(DetectionMode::Warn);
    for at in 1..300 {
        feed(&mut driver, at);
        if let Some(sign) = driver.sign() {
            return (at, sign);
        }
    }
    panic!("never");
}

#[test]
fn test_loop_detection_detects_three_identical_errors_in_a_row_and_not_two() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.fails("a", "exit 1");
    driver.fails("b", "exit 1");
    assert_eq!(driver.sign(), None, "two");
    driver.run("c", "done");
    driver.fails("d", "exit 1");
    driver.fails("e", "exit 1");
    driver.fails("f", "no such file");
    driver.fails("g", "exit 1");
    assert_eq!(driver.sign(), None, "a success and another error lie between");
    driver.fails("h", "exit 1");
    assert_eq!(driver.sign(), None, "two again");
    driver.fails("i", "exit 1");
    assert_eq!(driver.sign(), Some(LoopSign::RepeatedError), "three");
}

#[test]
fn each_signal_warns_at_its_number_and_not_before() {
    let at = |sign, at| (at, sign);
    assert_eq!(
        warned_at(|driver, at| driver.fails("a", &format!("exit {at}"))),
        at(LoopSign::RepeatedError, 3),
        "equal errors, but for numbers"
    );
    assert_eq!(
        warned_at(|driver, _| driver.read("a", "same")),
        at(LoopSign::RepeatedCall, 3),
        "equal calls with equal results"
    );
    assert_eq!(
        warned_at(|driver, at| driver.read(&format!("page {at}"), "empty")),
        at(LoopSign::RepeatedCall, 5),
        "calls that differ only in numbers, with nothing new"
    );
    for length in 2..=4 {
        assert_eq!(
            warned_at(|driver, at| driver.read(&"x".repeat(at % length + 1), &"y".repeat(at % length + 1))),
            at(LoopSign::Cycle, 3 * length),
            "a cycle of {length}"
        );
    }
    assert_eq!(
        warned_at(|driver, at| driver.read(&"x".repeat(at), "no matches")),
        at(LoopSign::NoProgress, 9),
        "eight calls after the first with nothing new"
    );
    assert_eq!(
        warned_at(|driver, at| driver.run("send", &format!("sent {at}"))),
        at(LoopSign::RepeatedCall, 10),
        "equal actions, each with a number"
    );
    assert_eq!(
        warned_at(|driver, at| driver.read("job", &format!("{at} % done"))),
        at(LoopSign::RepeatedCall, 100),
        "a poll whose answer only counts"
    );
    assert_eq!(
        warned_at(|driver, _| driver.call("jobs__wait", "job", ToolOutcome::Done { text: "pending".into() })),
        at(LoopSign::RepeatedCall, 100),
        "a poll of an exempt tool"
    );
    assert_eq!(
        warned_at(|driver, _| driver.call("jobs__wait", "job", ToolOutcome::Failed { text: "gone".into() })),
        at(LoopSign::RepeatedError, 3),
        "an exempt tool that fails"
    );
    assert_eq!(
        warned_at(|driver, _| driver.turn()),
        at(LoopSign::NoProgress, 3),
        "turns that say the same"
    );
    assert_eq!(
        warned_at(|driver, at| driver.call("nothing", &at.to_string(), ToolOutcome::Done { text: String::new() })),
        at(LoopSign::RepeatedError, 3),
        "denials"
    );
}

#[rstest]
#[case::a_success_after_two_errors(|driver: &mut Driver, at: usize| match at % 3 {
    0 => driver.run(&"x".repeat(at), "done"),
    _ => driver.fails("a", "exit 1"),
})]
#[case::another_call_after_two(|driver: &mut Driver, at: usize| match at % 3 {
    0 => driver.read(&"x".repeat(at), &"y".repeat(at)),
    _ => driver.read("a", "same"),
})]
#[case::a_hit_after_seven(|driver: &mut Driver, at: usize| match at % 8 {
    0 => driver.read(&"x".repeat(at), &"y".repeat(at)),
    _ => driver.read(&"x".repeat(at), "no matches"),
})]
#[case::an_action_between(|driver: &mut Driver, at: usize| match at % 2 {
    0 => driver.run(&format!("edit {at}"), "done"),
    _ => driver.read("a", "same"),
})]
#[case::other_words_each_third_turn(|driver: &mut Driver, at: usize| match at % 3 {
    0 => driver.says(&"x".repeat(at)),
    _ => driver.says("nothing new"),
})]
#[case::a_sleep_after_two(|driver: &mut Driver, at: usize| match at % 3 {
    0 => driver.sleeps(),
    _ => driver.read("a", "same"),
})]
#[case::silent_turns_that_sleep(|driver: &mut Driver, _: usize| driver.sleeps())]
fn work_that_is_nearly_a_loop_is_none(#[case] feed: fn(&mut Driver, usize)) {
    let mut driver = watched(DetectionMode::Enforce);
    for at in 1..60 {
        feed(&mut driver, at);
    }
    assert_eq!(driver.steps(), Vec::<&str>::new());
    assert_eq!(driver.sign(), None);
}

#[test]
fn a_yield_beside_a_denied_repetition_waits_until_the_model_has_seen_the_denial() {
    let mut driver = watched(DetectionMode::Enforce);
    for _ in 0..4 {
        driver.read("a", "same");
    }
    assert_eq!(driver.steps(), ["Nudged", "Denied"]);
    driver.ready();
    let mut answer = once("files__read", "a");
    answer
        .tool_calls
        .extend(calls("yield", r#"{"mode": "shutdown", "reason": "done"}"#).tool_calls);
    driver.answer(answer);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["Repeated"]);
    assert_eq!((driver.stopped, driver.in_flight.is_some()), (false, true));
}

#[test]
fn detection_escalates_from_a_warning_to_a_denial_to_longer_sleeps_to_the_end() {
    let mut driver = watched(DetectionMode::Enforce);
    for _ in 0..3 {
        driver.read("a", "same");
    }
    assert!(
        driver
            .result()
            .starts_with("same\n[the runtime saw the same call with the same result 3 times")
    );
    assert_eq!((driver.steps(), driver.state()), (vec!["Nudged"], LoopState::Running));
    driver.read("a", "same");
    assert_eq!(driver.steps(), ["Nudged", "Denied"]);
    assert!(driver.result().contains("denied for the rest of this turn"));
    assert_eq!(driver.sent.len(), 4);

    driver.read("a", "same");
    assert_eq!(
        (driver.sent.len(), driver.notes(RecordKind::ToolDenied)),
        (4, vec!["Repeated"])
    );
    let denial: serde_json::Value = serde_json::from_str(driver.result()).unwrap();
    assert_eq!(denial["error"], "denied");
    assert_eq!(driver.state(), LoopState::Running, "the denial is an answer");

    for (pause, wait) in [60, 120, 240, 480].into_iter().enumerate() {
        driver.read("a", "same");
        assert_eq!(
            (driver.state(), driver.reasons()),
            (LoopState::Paused, vec![PauseReason::LoopDetected])
        );
        assert_eq!(
            driver.engine.view().resumes_at,
            Some(driver.now + seconds(wait)),
            "pause {pause}"
        );
        try_everything_but(&mut driver, false);
        driver.pass(seconds(wait - 1));
        assert_eq!(driver.state(), LoopState::Paused);
        driver.pass(seconds(1));
        assert_eq!(driver.state(), LoopState::Running);
    }
    driver.read("a", "same");
    let view = driver.engine.view();
    assert_eq!(
        (view.state, view.outcome),
        (LoopState::Stopped, Some(LoopOutcome::Failed))
    );
    assert!(view.detected.unwrap().message.contains("agentloop.dev/wake"));
    assert_eq!((driver.sent.len(), driver.stopped), (4, true));
}

#[test]
fn a_loop_ended_by_detection_starts_again_in_the_next_pod() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.reads_until("Failed");
    driver.restart(2);
    assert_eq!((driver.state(), driver.sign()), (LoopState::Running, None));
    driver.read("a", "same");
    driver.read("a", "same");
    assert_eq!(driver.sign(), None);
    driver.read("a", "same");
    assert_eq!(driver.steps().last(), Some(&"Nudged"));
}

#[test]
fn repeated_text_without_a_tool_leads_from_a_note_to_a_sleep() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.turn();
    driver.turn();
    assert!(!driver.observed().contains("the runtime saw"));
    driver.turn();
    assert!(
        driver
            .observed()
            .contains("Note: the runtime saw the same answer without a tool call 3 turns in a row")
    );
    driver.answer(says("Nothing  NEW"));
    assert_eq!(driver.reasons(), [PauseReason::LoopDetected]);
    driver.pass(seconds(60));
    driver.answer(says("Something else."));
    assert_eq!(
        (driver.state(), driver.sign()),
        (LoopState::Running, None),
        "other words end it"
    );
}

#[test]
fn something_new_ends_the_episode_and_a_turn_with_progress_the_count() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.reads_until("Paused");
    driver.pass(seconds(60));
    driver.read("b", "new");
    assert_eq!(driver.sign(), None);
    driver.reads_until("Nudged");
    driver.reads_until("Paused");
    assert_eq!(driver.sign(), Some(LoopSign::RepeatedCall));
    let wait = |driver: &Driver| driver.engine.view().resumes_at.map(|at| at.duration_since(driver.now));
    assert_eq!(wait(&driver), Some(seconds(120)), "the turn was not complete");
    driver.pass(seconds(120));
    driver.read("c", "newer");
    driver.turn();
    driver.reads_until("Nudged");
    driver.reads_until("Paused");
    assert_eq!(wait(&driver), Some(seconds(60)));
}

#[test]
fn a_person_ends_a_pause_and_neither_the_episode_nor_the_count() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.reads_until("Paused");
    resume(&mut driver, "r");
    assert_eq!(
        (driver.state(), driver.sign()),
        (LoopState::Running, Some(LoopSign::RepeatedCall))
    );
    driver.read("a", "same");
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(120)));
}

#[test]
fn a_denial_ends_with_its_turn_and_the_episode_does_not() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.reads_until("Denied");
    driver.turn();
    driver.read("a", "same");
    assert_eq!(driver.sent.len(), 5, "it runs again");
    assert_eq!(driver.steps().last(), Some(&"Paused"));
}

#[test]
fn a_sleep_of_the_agents_own_choice_ends_the_episode() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.reads_until("Denied");
    driver.sleeps();
    assert_eq!(driver.sign(), None);
    driver.read("a", "same");
    driver.read("a", "same");
    assert_eq!((driver.sign(), driver.sent.len()), (None, 6));
    driver.read("a", "same");
    assert_eq!(driver.steps().last(), Some(&"Nudged"));
}

#[test]
fn other_calls_than_the_denied_one_run() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.reads_until("Denied");
    driver.read("b", "same");
    driver.run("a", "done");
    assert_eq!((driver.sent.len(), driver.sign()), (6, None));
}

#[test]
fn an_answer_leads_to_one_step_however_many_calls_it_contains() {
    let mut driver = watched(DetectionMode::Enforce);
    let many = |count: usize| ModelAnswer {
        tool_calls: (0..count)
            .map(|id| ToolCall {
                id: id.to_string(),
                ..once("shell__run", "a").tool_calls[0].clone()
            })
            .collect(),
        ..once("shell__run", "a")
    };
    let all_fail = |driver: &mut Driver| {
        while let Some(index) = driver.running.keys().next().map(|run| run.index) {
            driver.end(index, ToolOutcome::Failed { text: "down".into() });
        }
    };
    driver.answer(many(8));
    all_fail(&mut driver);
    assert_eq!((driver.steps(), driver.sent.len()), (vec!["Nudged"], 8));
    driver.answer(many(8));
    all_fail(&mut driver);
    assert_eq!(driver.steps(), ["Nudged", "Denied"]);
    assert_eq!(driver.sent.len(), 9, "what waits is denied at once");
    driver.answer(many(3));
    assert_eq!((driver.steps().len(), driver.sent.len()), (2, 9));
    driver.answer(many(3));
    assert_eq!(driver.steps(), ["Nudged", "Denied", "Paused"]);
}

#[test]
fn weak_signs_double_the_distance_to_the_next_step() {
    let mut driver = watched(DetectionMode::Enforce);
    let page = |driver: &mut Driver, pages: std::ops::Range<usize>| {
        for page in pages {
            driver.read(&format!("page {page}"), "empty");
        }
    };
    page(&mut driver, 0..9);
    assert_eq!(driver.steps(), ["Nudged"]);
    page(&mut driver, 9..10);
    assert_eq!(driver.steps(), ["Nudged", "Denied"]);
    page(&mut driver, 10..11);
    assert_eq!(driver.sent.len(), 10, "the next page is denied like those before it");
}

#[test]
fn mode_warn_adds_a_note_and_nothing_else() {
    let mut driver = watched(DetectionMode::Warn);
    for _ in 0..50 {
        driver.read("a", "same");
    }
    assert_eq!((driver.steps(), driver.sent.len()), (vec!["Nudged"], 50));
    assert_eq!(driver.sign(), Some(LoopSign::RepeatedCall));
    for _ in 0..20 {
        driver.turn();
    }
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn disabled_detection_observes_and_reports_nothing() {
    let mut driver = watched(DetectionMode::Disabled);
    for _ in 0..50 {
        driver.read("a", "same");
    }
    assert_eq!((driver.steps(), driver.sign(), driver.sent.len()), (vec![], None, 50));
    assert_eq!(
        driver.engine.state.watch,
        crate::loop_detection::LoopDetector::default()
    );
}

#[test]
fn a_mode_that_was_edited_ends_the_pause_with_the_next_pod() {
    for (mode, stays) in [
        (DetectionMode::Enforce, true),
        (DetectionMode::Warn, false),
        (DetectionMode::Disabled, false),
    ] {
        let mut driver = watched(DetectionMode::Enforce);
        driver.reads_until("Paused");
        driver.settings.loop_detection.mode = mode;
        driver.feed(EngineInput::Stop {
            cause: StopCause::Drain,
        });
        driver.restart(2);
        assert_eq!(driver.reasons().contains(&PauseReason::LoopDetected), stays, "{mode:?}");
    }
}

#[test]
fn a_restart_in_the_middle_changes_nothing() {
    let steps = |restart_at: usize| {
        let mut driver = watched(DetectionMode::Enforce);
        for at in 0..12 {
            if at == restart_at {
                driver.restart(1);
            }
            driver.read("a", "same");
        }
        let sent = driver.sent.len();
        (driver.steps().join(" "), sent)
    };
    let whole = steps(100);
    assert_eq!(whole.0, "Nudged Denied Paused Paused Paused Paused Failed");
    for at in 1..9 {
        assert_eq!(steps(at), whole, "a restart before call {at}");
    }
}

#[test]
fn a_turn_that_is_tried_again_repeats_nothing() {
    let mut driver = watched(DetectionMode::Enforce);
    for _ in 0..4 {
        driver.read("a", "same");
        driver.read("b", "the same");
        driver.failed_turn();
        driver.pass(seconds(60));
    }
    assert_eq!(driver.steps(), Vec::<&str>::new());
}

#[test]
fn equal_answers_to_new_notifications_are_no_loop() {
    let mut driver = watched(DetectionMode::Enforce);
    for id in 0..8 {
        driver.feed(notified(Notification {
            id: id.to_string(),
            source: "sensor/prices".into(),
            priority: NotificationPriority::Normal,
            text: "The price has changed.".into(),
            at: driver.now,
        }));
        driver.read("price", "same");
        driver.says("Noted.");
        driver.ready();
    }
    assert_eq!(driver.steps(), Vec::<&str>::new());
}

#[test]
fn a_result_seen_before_the_context_lost_it_is_new_again() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.read("a", "same");
    driver.read("a", "same");
    driver.engine.state.watch.forget_calls();
    driver.read("a", "same");
    driver.read("a", "same");
    assert_eq!(driver.sign(), None);
    driver.read("a", "same");
    assert_eq!(driver.sign(), Some(LoopSign::RepeatedCall));
}

#[test]
fn a_clock_that_was_set_back_keeps_no_pause_longer_than_the_longest_sleep() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.reads_until("Paused");
    driver.now = "2025-01-01T00:00:00Z".parse().unwrap();
    driver.feed(EngineInput::Timer);
    driver.pass(driver.settings.max_sleep);
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn the_forced_sleep_is_at_most_the_longest_sleep() {
    let mut driver = watched(DetectionMode::Enforce);
    driver.settings.max_sleep = seconds(100);
    driver.restart(2);
    driver.reads_until("Paused");
    driver.pass(seconds(60));
    driver.read("a", "same");
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(100)));
}

#[test]
fn the_evidence_contains_no_text_of_a_model_or_a_tool() {
    let mut driver = watched(DetectionMode::Enforce);
    let mut seen = Vec::new();
    for _ in 0..3 {
        driver.read("canary", "canary");
        driver.call("canary", "canary", ToolOutcome::Done { text: String::new() });
        driver.says("canary");
        seen.extend(driver.engine.view().detected.map(|detected| detected.message));
        seen.extend(driver.engine.view().reasons.into_iter().map(|held| held.message));
    }
    assert!(!seen.is_empty());
    seen.extend(driver.notes(RecordKind::LoopDetected).into_iter().map(str::to_owned));
    seen.push(serde_json::to_string(&driver.engine.state.watch).unwrap());
    assert!(!seen.iter().any(|text| text.contains("canary")), "{seen:#?}");
    assert!(seen.iter().all(|text| text.len() < 3000), "{seen:#?}");
}

/// Polls with sleeps of `nap` seconds. Returns whether that is a loop.
fn is_loop_of_naps(nap: i64) -> bool {
    let mut driver = watched(DetectionMode::Enforce);
    for _ in 0..20 {
        driver.answer(work::wants(&["files__read"]));
        driver.done(1, "running");
        driver.answer(calls("yield", &format!(r#"{{"sleep": {nap}}}"#)));
        while driver.in_flight.is_none() {
            if driver.engine.view().detected.is_some() {
                return true;
            }
            driver.next_timer();
        }
    }
    driver.engine.view().detected.is_some()
}

#[test]
fn polling_each_second_is_a_loop_and_polling_with_sleeps_is_not() {
    assert!(is_loop_of_naps(1) && is_loop_of_naps(3));
    assert!(!is_loop_of_naps(5) && !is_loop_of_naps(10) && !is_loop_of_naps(3600));
}
