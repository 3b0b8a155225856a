//! Tests of the conditions and the status of mode `Goal`.

use serde_json::json;
use strum::IntoEnumIterator;

use super::events;
use super::intent::{Intent, RestReason};
use super::status_tests::{Case, agent, held, reported};
use crate::api::condition::{ConditionType, find};
use crate::api::goal::{ArtifactStatus, CriterionStatus, GoalEnd, GoalStatus, ProgressSource};
use crate::api::status::{LoopOutcome, LoopState, PauseReason};
use crate::api::{Agent, AgentStatus};
use crate::controller::pod_sessions::ReceivedReport;

pub(super) fn goal_agent() -> Agent {
    let mut object = serde_json::to_value(agent(false)).unwrap();
    object["spec"]["mode"] = json!("Goal");
    object["spec"]["goal"] = json!({"description": "Count.", "acceptanceCriteria": [{"name": "text", "regex": "x"}]});
    serde_json::from_value(object).unwrap()
}

fn goal(end: Option<GoalEnd>, confidence: Option<i32>) -> GoalStatus {
    let met = end == Some(GoalEnd::CriteriaMet);
    GoalStatus {
        progress_percent: if met { 100 } else { 0 },
        progress_source: Some(ProgressSource::Criteria),
        steps: 4,
        criteria: vec![CriterionStatus {
            name: "text".into(),
            met,
        }],
        artifacts: Vec::new(),
        last_confidence_percent: confidence,
        end,
        ..GoalStatus::default()
    }
}

fn ended(outcome: LoopOutcome, end: Option<GoalEnd>) -> ReceivedReport {
    let mut last_report = reported(LoopState::Stopped);
    let report = last_report.report.loop_.as_mut().unwrap();
    report.outcome = Some(outcome);
    report.goal = Some(goal(end, None));
    last_report
}

/// A loop that this has ended.
pub(super) fn ended_by(end: GoalEnd) -> Case {
    let outcome = match end {
        GoalEnd::CriteriaMet => LoopOutcome::Completed,
        GoalEnd::LoopDetected | GoalEnd::CallsDenied | GoalEnd::LowConfidence => LoopOutcome::Escalated,
        GoalEnd::Timeout | GoalEnd::CostLimit | GoalEnd::StepLimit => LoopOutcome::Failed,
    };
    Case {
        goal: true,
        last_report: Some(ended(outcome, Some(end))),
        intent: Intent::Rest(RestReason::Completed),
        ..Case::default()
    }
}

/// A loop whose confidence is this, which is too low.
pub(super) fn doubtful(percent: Option<i32>) -> Case {
    let mut last_report = held(LoopState::Paused, PauseReason::LowConfidence);
    last_report.report.loop_.as_mut().unwrap().goal = Some(goal(None, percent));
    Case {
        goal: true,
        last_report: Some(last_report),
        ..Case::default()
    }
}

fn condition(status: &AgentStatus, type_: ConditionType) -> Option<(&str, &str, &str)> {
    let found = find(&status.conditions, type_)?;
    Some((&found.status, &found.reason, &found.message))
}

#[test]
fn succeeded_is_absent_while_the_loop_runs_and_follows_from_its_outcome_afterwards() {
    let agent = goal_agent();
    let running = Case::default();
    assert_eq!(condition(&running.status_of(&agent), ConditionType::Succeeded), None);
    let met = Case {
        last_report: Some(ended(LoopOutcome::Completed, Some(GoalEnd::CriteriaMet))),
        intent: Intent::RecordOutcome,
        ..Case::default()
    };
    let recorded = met.status_of(&agent);
    let expected = Some(("True", "Completed", "all criteria were met after 4 steps"));
    assert_eq!(condition(&recorded, ConditionType::Succeeded), expected);
    assert_eq!(recorded.goal.as_ref().unwrap().progress_percent, 100);
    // The pod is gone, and with it the report.
    let resting = Case {
        old: recorded,
        intent: Intent::Rest(RestReason::Completed),
        pod: None,
        last_report: None,
        ..Case::default()
    };
    let status = resting.status_of(&agent);
    assert_eq!(condition(&status, ConditionType::Succeeded), expected);
    assert_eq!(status.goal.as_ref().unwrap().steps, 4);
    // It starts again.
    let again = Case {
        old: status,
        ..Case::default()
    };
    let inactive = Some(("False", "Inactive", ""));
    assert_eq!(condition(&again.status_of(&agent), ConditionType::Succeeded), inactive);
}

#[test]
fn each_other_end_is_named_with_what_is_missing_and_needs_a_person() {
    for end in GoalEnd::iter().filter(|end| *end != GoalEnd::CriteriaMet) {
        let case = ended_by(end);
        let outcome = case
            .last_report
            .as_ref()
            .unwrap()
            .report
            .loop_
            .as_ref()
            .unwrap()
            .outcome
            .unwrap();
        let status = case.status_of(&goal_agent());
        let (is_true, reason, message) = condition(&status, ConditionType::Succeeded).unwrap();
        assert_eq!((is_true, reason), ("False", outcome.as_ref()), "{end}");
        assert!(
            message.contains("after 4 steps these criteria are not met: text."),
            "{message}"
        );
        let stalled = condition(&status, ConditionType::Stalled).unwrap();
        assert_eq!((stalled.1, stalled.2), (outcome.as_ref(), message), "{end}");
        let notices = events::from_status(&Case::default().status_of(&goal_agent()), &status);
        assert!(
            notices
                .iter()
                .any(|notice| notice.warning && notice.reason == outcome.as_ref()),
            "{end}"
        );
    }
}

#[test]
fn criteria_that_were_met_in_different_checks_are_no_success() {
    let mut case = ended_by(GoalEnd::StepLimit);
    let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
    report.goal.as_mut().unwrap().criteria[0].met = true;
    let status = case.status_of(&goal_agent());
    let (is_true, _, message) = condition(&status, ConditionType::Succeeded).unwrap();
    assert_eq!(is_true, "False");
    assert!(
        message.contains("after 4 steps each criterion was met, but not all of them in one check."),
        "{message}"
    );
}

#[test]
fn an_unsuccessful_end_without_a_report_of_the_goal_has_a_complete_message() {
    for outcome in [LoopOutcome::Failed, LoopOutcome::Escalated] {
        let mut last_report = ended(outcome, None);
        last_report.report.loop_.as_mut().unwrap().goal = None;
        let case = Case {
            goal: true,
            last_report: Some(last_report),
            intent: Intent::Rest(RestReason::Completed),
            ..Case::default()
        };
        let status = case.status_of(&goal_agent());
        let expected = "the goal was not reached. Change the spec or set the annotation agentloop.dev/wake to restart \
                        from the first step";
        let succeeded = condition(&status, ConditionType::Succeeded);
        assert_eq!(succeeded, Some(("False", outcome.as_ref(), expected)));
        let notices = events::from_status(&Case::default().status_of(&goal_agent()), &status);
        let end = notices.iter().find(|notice| notice.action == "End").expect("an Event");
        assert_eq!(end.note, expected);
    }
}

#[test]
fn a_message_has_the_singular_after_one_step() {
    let mut case = ended_by(GoalEnd::StepLimit);
    let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
    report.goal.as_mut().unwrap().steps = 1;
    let status = case.status_of(&goal_agent());
    let (.., message) = condition(&status, ConditionType::Succeeded).unwrap();
    assert!(
        message.contains("; after 1 step these criteria are not met: text. "),
        "{message}"
    );
}

#[test]
fn an_unsuccessful_end_without_a_condition_has_a_message() {
    for outcome in [LoopOutcome::Failed, LoopOutcome::Escalated] {
        let case = Case {
            last_report: Some(ended(outcome, None)),
            intent: Intent::Rest(RestReason::Completed),
            ..Case::default()
        };
        let status = case.status();
        let (_, reason, message) = condition(&status, ConditionType::Stalled).unwrap();
        assert_eq!(reason, outcome.as_ref());
        assert!(message.starts_with("the loop ended without success"), "{message}");
        let notices = events::from_status(&Case::default().status(), &status);
        let end = notices.iter().find(|notice| notice.action == "End").expect("an Event");
        assert_eq!(end.note, message);
    }
}

#[test]
fn missing_artifacts_are_named_up_to_five() {
    let message = |missing: usize, met: bool| {
        let mut case = ended_by(GoalEnd::StepLimit);
        let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
        let goal = report.goal.as_mut().unwrap();
        goal.criteria[0].met = met;
        let artifact = |number: usize| ArtifactStatus {
            path: format!("out/{number}"),
            met: number >= missing,
            bytes: None,
        };
        goal.artifacts = (0..8).map(artifact).collect();
        let status = case.status_of(&goal_agent());
        condition(&status, ConditionType::Succeeded).unwrap().2.to_owned()
    };
    for (missing, met, expected) in [
        (
            0,
            true,
            "after 4 steps each criterion was met, but not all of them in one check. ",
        ),
        (0, false, "after 4 steps these criteria are not met: text. "),
        (1, true, "after 4 steps these artifacts are missing: out/0. "),
        (
            5,
            false,
            "after 4 steps these criteria are not met: text, and these artifacts are missing: out/0, out/1, out/2, out/3, out/4. ",
        ),
        (
            6,
            true,
            "after 4 steps these artifacts are missing: out/0, out/1, out/2, out/3, out/4 and 1 more. ",
        ),
    ] {
        let message = message(missing, met);
        assert!(message.contains(expected), "{message}");
    }
}

/// The note of the Event for the end of a goal with `artifacts` artifacts, of which the first ones are missing.
fn note_of_end(met: bool, missing: usize, artifacts: usize) -> String {
    let mut case = ended_by(GoalEnd::StepLimit);
    let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
    let goal = report.goal.as_mut().unwrap();
    goal.criteria[0].met = met;
    let artifact = |number: usize| ArtifactStatus {
        path: format!("customers/acme/{number}{}", "x".repeat(240)),
        met: number >= missing,
        bytes: None,
    };
    goal.artifacts = (0..artifacts).map(artifact).collect();
    let notices = events::from_status(
        &Case::default().status_of(&goal_agent()),
        &case.status_of(&goal_agent()),
    );
    let mut notices = notices.into_iter().filter(|notice| notice.action == "End");
    let ended = notices.next().expect("an Event");
    assert_eq!(notices.next(), None);
    ended.note
}

#[test]
fn an_event_has_the_number_of_missing_artifacts_and_no_path() {
    for (met, missing, artifacts, expected) in [
        (false, 0, 0, "; after 4 steps 1 of 1 criteria are not met. "),
        (true, 2, 3, "; after 4 steps 2 of 3 artifacts are missing. "),
        (
            false,
            32,
            32,
            "; after 4 steps 1 of 1 criteria are not met, and 32 of 32 artifacts are missing. ",
        ),
        (true, 0, 3, "all steps are used (spec.goal.maxSteps). Change"),
    ] {
        let note = note_of_end(met, missing, artifacts);
        assert!(note.contains(expected), "{note}");
        assert!(!note.contains("acme") && !note.contains("text"), "{note}");
    }
}

#[test]
fn success_mentions_artifacts_only_if_the_goal_has_some() {
    let mut case = ended_by(GoalEnd::CriteriaMet);
    let report = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
    report.goal.as_mut().unwrap().artifacts = vec![ArtifactStatus {
        path: "a".into(),
        met: true,
        bytes: Some(1),
    }];
    let status = case.status_of(&goal_agent());
    assert_eq!(
        condition(&status, ConditionType::Succeeded),
        Some((
            "True",
            "Completed",
            "all criteria were met and all artifacts existed after 4 steps"
        ))
    );
}

#[test]
fn an_agent_of_another_mode_never_succeeds() {
    let case = Case {
        last_report: Some(ended(LoopOutcome::Completed, None)),
        ..Case::default()
    };
    assert_eq!(condition(&case.status(), ConditionType::Succeeded), None);
}

#[test]
fn low_confidence_is_true_while_its_gate_is_open() {
    let agent = goal_agent();
    for (percent, reason) in [(Some(30), "BelowThreshold"), (None, "AnswerUnreadable")] {
        let mut last_report = held(LoopState::Paused, PauseReason::LowConfidence);
        last_report.report.loop_.as_mut().unwrap().goal = Some(goal(None, percent));
        let case = Case {
            last_report: Some(last_report),
            ..Case::default()
        };
        let status = case.status_of(&agent);
        assert_eq!(
            condition(&status, ConditionType::LowConfidence),
            Some(("True", reason, "why"))
        );
        let pending = condition(&status, ConditionType::ApprovalPending).unwrap();
        assert_eq!((pending.0, pending.1), ("True", "LowConfidence"));
        // Nothing needs attention before the gate is answered.
        assert_eq!(condition(&status, ConditionType::Ready).unwrap().1, "AwaitingApproval");
        let silent = Case {
            old: status.clone(),
            last_report: None,
            ..Case::default()
        };
        assert_eq!(
            condition(&silent.status_of(&agent), ConditionType::LowConfidence)
                .unwrap()
                .0,
            "True"
        );
        let answered = Case {
            old: status,
            ..Case::default()
        };
        let inactive = Some(("False", "Inactive", ""));
        assert_eq!(
            condition(&answered.status_of(&agent), ConditionType::LowConfidence),
            inactive
        );
    }
}
