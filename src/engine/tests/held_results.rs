//! Results that wait for an earlier one are written again with each step: how many may wait, and what that costs.

use serde_json::{Value, json};

use super::super::tools::batch::{MAX_AHEAD, MAX_READS};
use super::memory::{remembering, replace, source, started, view, wants_all, write};
use super::*;

fn reading(calls: usize) -> Driver {
    let mut driver = Driver::with_tools(settings());
    driver.answer(work::wants(&vec!["files__read"; calls]));
    driver
}

fn first() -> u32 {
    1
}

fn last() -> u32 {
    u32::try_from(MAX_AHEAD).unwrap() + 1
}

#[test]
fn results_wait_for_a_slow_call_up_to_a_bound_and_the_rest_runs_when_it_has_ended() {
    let mut driver = reading(MAX_AHEAD * 2);
    for index in 2..=last() {
        assert!(driver.running().contains(&index), "{index}: {:?}", driver.running());
        driver.done(index, "quick");
    }
    assert_eq!(driver.running(), [first()], "what comes next would be one too many");
    assert!(driver.results().is_empty());
    driver.done(first(), "slow");
    assert_eq!(driver.results().len(), MAX_AHEAD + 1);
    assert_eq!(driver.running().len(), MAX_READS, "four at a time again");
    while let Some(index) = driver.running().first().copied() {
        driver.done(index, "quick");
    }
    assert_eq!(driver.results().len(), MAX_AHEAD * 2);
    assert!(driver.in_flight.is_some());
}

/// A `yield` that stands first waits for all others, so all their results wait behind it: they run one by one in the end.
#[test]
fn a_yield_before_many_calls_holds_none_of_them_up() {
    let mut driver = Driver::with_tools(settings());
    let mut answer = calls("yield", r#"{"sleep": 60}"#);
    answer
        .tool_calls
        .extend(work::wants(&["files__read"; 3 * MAX_AHEAD]).tool_calls);
    driver.answer(answer);
    while let Some(index) = driver.running().first().copied() {
        driver.done(index, "read");
    }
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.results().len(), 3 * MAX_AHEAD + 1);
}

#[test]
fn a_restart_in_between_sends_only_the_open_runs() {
    let mut driver = reading(MAX_AHEAD * 2);
    for index in 2..=last() {
        driver.done(index, "quick");
    }
    driver.restart(2);
    assert_eq!(driver.running(), [first()]);
}

/// Bytes of all snapshots while the results of an answer come in, the first of them last, and bytes of the results.
fn written(calls: usize) -> (usize, usize) {
    let mut driver = reading(calls);
    let mut bytes = 0;
    while let Some(index) = driver.running().last().copied() {
        driver.done(index, &"x".repeat(32 * 1024));
        bytes += serde_json::to_string(&driver.saved).unwrap().len();
    }
    let results = driver.results();
    assert_eq!(results.len(), calls);
    (bytes, results.iter().map(|(_, text)| text.len()).sum())
}

#[test]
fn the_snapshots_of_one_answer_are_a_few_times_as_large_as_its_results() {
    for calls in [4, 9, 128] {
        let (snapshots, results) = written(calls);
        eprintln!("{calls} calls: {snapshots} bytes of snapshots, {results} of results");
        assert!(snapshots < 12 * results, "{calls}: {snapshots} for {results}");
    }
}

/// A slow read, and calls of `memory` behind it.
fn behind_a_read(tool: &str, calls: impl IntoIterator<Item = Value>) -> ModelAnswer {
    let calls = calls.into_iter().map(|arguments| ("memory", arguments));
    wants_all(&std::iter::once((tool, json!({}))).chain(calls).collect::<Vec<_>>())
}

fn memory_calls(driver: &Driver) -> usize {
    let of_memory = |record: &&JournalRecord| {
        let tool = record.tool.as_ref().and_then(|line| line.tool.as_deref());
        record.kind == RecordKind::ToolOutcome && tool == Some("memory")
    };
    driver.journal.iter().filter(of_memory).count()
}

#[test]
fn calls_of_memory_wait_for_a_slow_call_up_to_the_same_bound() {
    for calls in [MAX_AHEAD - 1, MAX_AHEAD, MAX_AHEAD + 1, 3 * MAX_AHEAD] {
        let mut driver = started(remembering());
        driver.memory(&write("a", "1"));
        let before = memory_calls(&driver);
        driver.answer(behind_a_read("files__read", (0..calls).map(|_| view("a"))));
        assert_eq!(memory_calls(&driver) - before, calls.min(MAX_AHEAD));
        driver.done(first(), "slow");
        assert_eq!(memory_calls(&driver) - before, calls);
        let viewed = "[note \"a\", 1 bytes: 0 to 1, the end]\n1";
        let texts: Vec<&str> = driver.results().into_iter().map(|(_, text)| text).collect();
        assert_eq!(texts[1..], [&["slow"][..], &vec![viewed; calls]].concat());
        assert!(driver.in_flight.is_some());
    }
}

#[test]
fn calls_of_memory_beyond_the_bound_keep_their_order_also_over_a_restart() {
    for restart in [false, true] {
        let mut driver = started(remembering());
        driver.memory(&write("a", "0"));
        let changes = (0..MAX_AHEAD * 2).map(|number| replace("a", &number.to_string(), &(number + 1).to_string()));
        driver.answer(behind_a_read("files__read", changes.chain([view("a")])));
        if restart {
            driver.restart(2);
            driver.restart(2);
        }
        driver.done(first(), "slow");
        assert!(driver.result().ends_with("]\n16"), "{}", driver.result());
    }
}

#[test]
fn a_yield_before_many_calls_of_memory_holds_none_of_them_up() {
    let mut driver = started(remembering());
    driver.memory(&write("a", "1"));
    let mut answer = calls("yield", r#"{"sleep": 60}"#);
    let views = vec![("memory", view("a")); 3 * MAX_AHEAD];
    answer.tool_calls.extend(wants_all(&views).tool_calls);
    driver.answer(answer);
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.results().len(), 3 * MAX_AHEAD + 2);
}

/// All calls of an answer were requested before the model has seen what any of them brings.
#[test]
fn a_note_beyond_the_bound_is_not_written_after_the_untrusted_content_of_its_own_answer() {
    let mut driver = started(remembering());
    let writes = (0..=MAX_AHEAD).map(|number| write(&number.to_string(), "x"));
    driver.answer(behind_a_read("web__fetch", writes));
    driver.done(first(), "a page");
    assert_eq!(source(&driver).as_deref(), Some("server/web"));
    assert_eq!(driver.memory(&write("later", "x")), "Stored \"later\".");
    let notes = serde_json::to_value(&driver.saved.memory).unwrap();
    let untrusted = |title: &str| notes[title].get("untrusted").is_some();
    assert!(untrusted("later") && !untrusted(&MAX_AHEAD.to_string()), "{notes}");
}

#[test]
fn calls_of_a_disabled_memory_are_refused_and_the_turn_continues() {
    let mut driver = started(EngineSettings {
        max_result_bytes: 1024,
        ..remembering()
    });
    driver.memory(&write("a", "1"));
    driver.answer(behind_a_read("files__read", (0..2 * MAX_AHEAD).map(|_| view("a"))));
    driver.settings.memory_bytes = None;
    driver.restart(2);
    driver.done(first(), "slow");
    assert!(driver.result().contains("switched off"), "{}", driver.result());
    assert!(driver.in_flight.is_some());
}

#[test]
fn the_snapshots_of_an_answer_with_many_views_are_a_few_times_as_large_as_its_results() {
    let mut driver = started(remembering());
    driver.memory(&write("a", &"x".repeat(1000)));
    let mut answer = work::wants(&["files__read"; 16]);
    answer
        .tool_calls
        .extend(wants_all(&vec![("memory", view("a")); 112]).tool_calls);
    driver.answer(answer);
    let (mut bytes, notes) = (0, serde_json::to_string(&driver.saved.memory).unwrap().len());
    while let Some(index) = driver.running().last().copied() {
        bytes += serde_json::to_string(&driver.saved).unwrap().len() - notes;
        driver.done(index, &"x".repeat(1024));
    }
    let results: usize = driver.results().iter().map(|(_, text)| text.len()).sum();
    assert!(bytes < 4 * results, "{bytes} for {results}");
}
