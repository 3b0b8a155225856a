//! Mode `Goal`: questions that the light model answers.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::goal::{criterion, ended, finish, goal};
use super::*;
use crate::modes::goal::{CriterionCheck, GoalSettings, JudgeCheck};
use agentloop_api::goal::{GoalEnd, QuestionModel};
use agentloop_api::status::LoopOutcome;

fn judged_by(model: QuestionModel) -> impl FnOnce(&mut GoalSettings) {
    move |goal| {
        goal.criteria = vec![criterion(
            "sense",
            CriterionCheck::Judge(JudgeCheck {
                question: "is it complete?".into(),
                model,
            }),
        )];
    }
}

fn light(change: impl FnOnce(&mut GoalSettings)) -> EngineSettings {
    EngineSettings {
        light_output_tokens: Some(64),
        ..goal(change)
    }
}

#[rstest]
#[case::main(QuestionModel::Main, CallPurpose::Judge)]
#[case::light(QuestionModel::Light, CallPurpose::LightJudge)]
fn a_criterion_chooses_the_model_that_judges_it(#[case] model: QuestionModel, #[case] purpose: CallPurpose) {
    let mut driver = Driver::with_goal(light(judged_by(model)));
    driver.answer(finish("done"));
    assert_eq!((driver.purpose, driver.offered.len()), (purpose, 0));
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(
        ended(&driver),
        (Some(LoopOutcome::Completed), Some(GoalEnd::CriteriaMet))
    );
    let mut used = driver.journal.iter().filter_map(|record| record.used);
    assert_eq!(
        used.next_back().unwrap().purpose,
        purpose,
        "it is accounted for as what it is"
    );
}

#[rstest]
#[case::main(QuestionModel::Main, CallPurpose::Confidence)]
#[case::light(QuestionModel::Light, CallPurpose::LightConfidence)]
fn the_confidence_check_calls_the_chosen_model(#[case] model: QuestionModel, #[case] purpose: CallPurpose) {
    let mut driver = Driver::with_goal(light(|goal| {
        goal.confidence_every = 1;
        goal.confidence_model = model;
    }));
    driver.answer(says("Not yet."));
    assert_eq!(driver.purpose, purpose);
    driver.answer(says(r#"{"confidence": 20}"#));
    assert_eq!(driver.goal_view().last_confidence, Some(20));
    assert_eq!(driver.reasons(), [PauseReason::LowConfidence]);
}

#[rstest]
#[case::needs_a_user(FailureKind::AuthenticationFailed)]
#[case::retried(FailureKind::Unreachable)]
fn a_failing_light_model_is_retried_and_never_replaced_by_the_main_model(#[case] kind: FailureKind) {
    let mut driver = Driver::with_goal(light(judged_by(QuestionModel::Light)));
    driver.answer(finish("done"));
    for _ in 0..3 {
        driver.fail(kind);
        assert_eq!(
            driver.engine.view().light_model.is_some(),
            kind == FailureKind::AuthenticationFailed,
            "it is reported as the light model's"
        );
        driver.next_timer();
        assert_eq!(driver.purpose, CallPurpose::LightJudge);
    }
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(ended(&driver).1, Some(GoalEnd::CriteriaMet));
    assert_eq!(driver.engine.view().light_model, None);
    let started = driver.notes(RecordKind::CallStarted);
    assert!(!started.contains(&"Judge"), "{started:?}");
}

#[test]
fn a_result_that_the_light_model_has_no_room_for_is_cut() {
    let mut settings = light(judged_by(QuestionModel::Light));
    settings.light_context_tokens = 1_000;
    let mut driver = Driver::with_goal(settings);
    driver.answer(finish(&"x".repeat(8_000)));
    let asked = driver.observed();
    assert!(asked.len() < 2_000 && asked.ends_with("[cut]"), "{}", asked.len());
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(
        ended(&driver).1,
        Some(GoalEnd::CriteriaMet),
        "its answer is to this question"
    );
}
