//! Results that wait for an earlier one are written again with each step: how many may wait, and what that costs.

use super::super::tools::batch::{MOST_AHEAD, MOST_READS};
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
    u32::try_from(MOST_AHEAD).unwrap() + 1
}

#[test]
fn results_wait_for_a_slow_call_up_to_a_bound_and_the_rest_runs_when_it_has_ended() {
    let mut driver = reading(MOST_AHEAD * 2);
    for index in 2..=last() {
        assert!(driver.running().contains(&index), "{index}: {:?}", driver.running());
        driver.done(index, "quick");
    }
    assert_eq!(driver.running(), [first()], "what comes next would be one too many");
    assert!(driver.results().is_empty());
    driver.done(first(), "slow");
    assert_eq!(driver.results().len(), MOST_AHEAD + 1);
    assert_eq!(driver.running().len(), MOST_READS, "four at a time again");
    while let Some(index) = driver.running().first().copied() {
        driver.done(index, "quick");
    }
    assert_eq!(driver.results().len(), MOST_AHEAD * 2);
    assert!(driver.in_flight.is_some());
}

/// A `yield` that stands first waits for all others, so all their results wait behind it: they run one by one in the end.
#[test]
fn a_yield_before_many_calls_holds_none_of_them_up() {
    let mut driver = Driver::with_tools(settings());
    let mut answer = calls("yield", r#"{"sleep": 60}"#);
    answer
        .tool_calls
        .extend(work::wants(&["files__read"; 3 * MOST_AHEAD]).tool_calls);
    driver.answer(answer);
    while let Some(index) = driver.running().first().copied() {
        driver.done(index, "read");
    }
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.results().len(), 3 * MOST_AHEAD + 1);
}

#[test]
fn a_restart_in_between_sends_what_was_under_way_and_no_more() {
    let mut driver = reading(MOST_AHEAD * 2);
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
