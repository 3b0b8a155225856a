//! Mode `Goal`: what is recorded of each attempt at a step.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::goal::{command, criterion, finish, goal, judge};
use super::*;
use crate::modes::goal::{CriterionCheck, StepValidation};
use agentloop_api::failure::{CallFailure, FailureKind};

impl Driver {
    /// What was recorded of the attempts, with the numbers of their turns.
    pub(super) fn validations(&self) -> Vec<(i64, StepValidation)> {
        let records = self.journal.iter();
        let found = records.filter_map(|record| Some((record.turn, (**record.validation.as_ref()?).clone())));
        found.collect()
    }

    fn last_validation(&self) -> Value {
        json!(self.validations().pop().unwrap().1)
    }
}

#[test]
fn an_attempt_is_recorded_with_its_number_its_time_its_verdicts_and_the_progress() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria
            .push(criterion("digits", CriterionCheck::Regex("[0-9]".into())));
        goal.criteria.push(criterion("tests", command("cargo test", None)));
    }));
    driver.pass(seconds(3));
    driver.answer(finish("done: many stars"));
    assert_eq!(driver.validations(), [], "a command is still to be checked");
    driver.pass(seconds(4));
    driver.done(1, "exit code 0\nok");
    assert_eq!(
        driver.last_validation(),
        json!({
            "step": 1, "attempt": 1, "durationMilliseconds": 7000, "progressPercent": 66,
            "progressSource": "Criteria",
            "criteria": [
                {"name": "text", "verdict": "Met"},
                {"name": "digits", "verdict": "Unmet"},
                {"name": "tests", "verdict": "Met"},
            ],
        })
    );
    assert_eq!(
        driver.notes(RecordKind::StepChecked),
        ["step 1, attempt 1, 7000 ms, progress 66 % by Criteria, text=Met, digits=Unmet, tests=Met"]
    );
}

#[test]
fn only_what_was_checked_after_the_step_has_a_verdict() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria.push(criterion("sense", judge()));
    }));
    driver.answer(says("I have looked around."));
    assert_eq!(driver.last_validation()["criteria"], json!([]));
    driver.next_timer();
    driver.answer(finish("not yet"));
    let checked = json!([{"name": "text", "verdict": "Unmet"}]);
    assert_eq!(
        driver.last_validation()["criteria"],
        checked,
        "a judge could not decide"
    );
    assert_eq!(driver.last_validation()["step"], 2);
}

#[test]
fn a_check_without_an_answer_is_unknown_and_not_met() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria = vec![
            criterion("tests", command("cargo test", None)),
            criterion("sense", judge()),
        ];
    }));
    driver.answer(finish("done"));
    driver.end(
        1,
        ToolOutcome::Failed {
            text: "no toolbox".into(),
        },
    );
    let unknown = json!([{"name": "tests", "verdict": "Unknown"}]);
    assert_eq!(driver.last_validation()["criteria"], unknown);
    driver.next_timer();
    driver.answer(finish("done"));
    driver.done(1, "exit code 0\nok");
    driver.answer(says("I cannot tell."));
    assert_eq!(
        driver.last_validation()["criteria"],
        json!([{"name": "tests", "verdict": "Met"}, {"name": "sense", "verdict": "Unknown"}])
    );
    assert!(!driver.stopped);
}

#[test]
fn a_failed_attempt_is_recorded_with_the_kind_of_its_failure_and_without_its_text() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.failed_attempt("a", "no such file: the secret plan");
    driver.next_timer();
    driver.fail_with(CallFailure {
        message: "the secret reason".into(),
        ..failure(FailureKind::BadResponse)
    });
    driver.next_timer();
    driver.answer(says("Better."));
    let records = driver.validations();
    let told: Vec<Value> = records
        .iter()
        .map(|(_, record)| json!([record.step, record.attempt, record.error]))
        .collect();
    assert_eq!(
        told,
        [
            json!([1, 1, "ToolCallsFailed"]),
            json!([1, 2, "BadResponse"]),
            json!([1, 3, null])
        ]
    );
    let turns: Vec<i64> = records.iter().map(|(turn, _)| *turn).collect();
    assert_eq!(turns, [1, 2, 3]);
    let notes = driver.notes(RecordKind::StepChecked).concat();
    assert!(
        notes.contains("failed: ToolCallsFailed") && !notes.contains("secret"),
        "{notes}"
    );
}

#[test]
fn the_time_of_an_attempt_is_not_negative_if_the_clock_is_set_back() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.pass(seconds(5));
    driver.feed(EngineInput::Timer);
    driver.now -= seconds(3600);
    driver.feed(EngineInput::Timer);
    driver.pass(seconds(2));
    driver.answer(says("Not yet."));
    assert_eq!(driver.last_validation()["durationMilliseconds"], 7000);
}
