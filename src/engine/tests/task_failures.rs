//! Tasks that end without an answer, or whose call a limit refuses: what the limits count, and what the loop does then.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::budget::revision;
use super::tasks::{at_work, mode, one_call, with};
use super::*;
use crate::pauses::budget::PROBE_DELAY;
use crate::settings::TaskSettings;
use agentloop_api::task::{TaskLimit, TaskOutcome};

#[test]
fn tasks_without_an_answer_are_failures_in_a_row() {
    let mut driver = Driver::with_tools(with(mode()));
    for (place, id) in ["1", "2", "3", "4", "5"].into_iter().enumerate() {
        assert_eq!(driver.reasons(), [], "before {id}");
        driver.take(id);
        assert_eq!(driver.in_flight.is_none(), place > 0, "the next task waits after {id}");
        while driver.in_flight.is_none() {
            driver.next_timer();
        }
        one_call(&mut driver, place, 1);
        driver.answer(says(" "));
        assert_eq!(driver.response().outcome, TaskOutcome::Failed);
    }
    assert_eq!(driver.reasons(), [PauseReason::ConsecutiveErrors]);
    assert!(driver.engine.view().last_error.is_some());
}

#[rstest]
#[case(1, false)]
#[case(2, true)]
fn an_empty_first_answer_counts_as_an_iteration(#[case] max: u32, #[case] again: bool) {
    let mut driver = at_work(TaskSettings {
        max_iterations: max,
        ..mode()
    });
    driver.answer(says(" "));
    assert_eq!(driver.in_flight.is_some(), again);
    if again {
        driver.answer(calls("files__read", "{}"));
        driver.done(1, "a file");
    }
    let response = driver.response();
    assert_eq!(
        (response.reason, response.iterations),
        (Some(TaskLimit::MaxIterations), max)
    );
}

#[rstest]
#[case(99, None)]
#[case(100, Some(TaskLimit::MaxTokens))]
fn the_tokens_of_an_empty_first_answer_count(#[case] tokens: u64, #[case] limit: Option<TaskLimit>) {
    let mut driver = at_work(TaskSettings {
        max_tokens: 100,
        ..mode()
    });
    driver.answer(ModelAnswer {
        tokens: Some(tokens),
        ..says(" ")
    });
    if limit.is_none() {
        driver.answer(says("done"));
    }
    assert_eq!(driver.response().reason, limit);
}

#[rstest]
#[case(1, false)]
#[case(2, true)]
fn an_empty_first_answer_counts_as_a_call_of_its_turn(#[case] max: u32, #[case] again: bool) {
    let mut driver = Driver::started(EngineSettings {
        max_calls_per_turn: max,
        ..settings()
    });
    driver.answer(says(" "));
    assert_eq!(driver.in_flight.is_some(), again);
    if !again {
        assert_eq!(driver.notes(RecordKind::TurnFailed), ["BadResponse"]);
        let last_error = driver.engine.view().last_error.expect("an error");
        assert!(last_error.1.message.contains("allow no other call"), "{last_error:?}");
    }
}

#[test]
fn a_task_that_a_limit_refuses_which_was_changed_meanwhile_is_tried_once_more() {
    let mut driver = at_work(mode());
    driver.feed(EngineInput::BudgetChanged { budget: revision(1) });
    driver.fail(FailureKind::CallExceedsLimit);
    assert_eq!(driver.reasons(), [PauseReason::CallExceedsLimit]);
    assert!(driver.tasks.responses.is_empty());
    driver.pass(PROBE_DELAY);
    let mut still = driver.clone();
    driver.answer(says("it fits now"));
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Completed)]);
    still.fail(FailureKind::CallExceedsLimit);
    assert_eq!(still.answered_tasks(), [("a", TaskOutcome::Failed)]);
    assert_eq!(still.reasons(), []);
}
