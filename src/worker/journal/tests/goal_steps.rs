//! Tests of the attempts at steps of a goal, in the tables and in the export.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::deliveries::WITHOUT_UPLOADS;
use super::history::{answered, call, plain, rows, says};
use super::*;
use crate::engine::{CallPurpose, CheckedArtifacts, CheckedCriterion, StepValidation, Verdict};
use crate::worker::journal::export::export;

const GOAL_STEPS: &str =
    "SELECT turn, goal_step, attempt_number, duration_milliseconds, progress_percent, criteria, error
    FROM agent_goal_steps ORDER BY execution_id";

fn checked(turn: i64, change: impl FnOnce(&mut StepValidation)) -> JournalRecord {
    let mut validation = StepValidation {
        turn,
        step: 3,
        attempt: 2,
        duration_milliseconds: 1250,
        progress_percent: 50,
        progress_source: None,
        criteria: vec![
            CheckedCriterion {
                name: "tests".into(),
                verdict: Verdict::Met,
            },
            CheckedCriterion {
                name: "tone".into(),
                verdict: Verdict::Unknown,
            },
        ],
        artifacts: None,
        error: None,
    };
    change(&mut validation);
    JournalRecord {
        validation: Some(Box::new(validation)),
        ..plain(RecordKind::StepChecked, turn, "step 3")
    }
}

/// A step with two calls and a judge, whose check ends in another batch.
fn write_step(journal: &mut Journal, turn: i64) {
    let own = |number| answered(call(turn, number), CallPurpose::Turn, Some(1), vec![says("look", &[])]);
    write(journal, &[plain(RecordKind::TurnStarted, turn, ""), own(1), own(2)]);
    write(journal, &[plain(RecordKind::TurnCompleted, turn, "finish")]);
    let judged = answered(call(turn, 3), CallPurpose::Judge, Some(1), vec![says("yes", &[])]);
    write(journal, &[judged]);
    write(journal, &[checked(turn, |_| {})]);
}

#[test]
fn the_last_call_of_a_step_and_its_execution_have_the_verdicts_and_its_questions_have_not() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write_step(&mut journal, 7);
    let criteria = json!([{"name": "tests", "verdict": "Met"}, {"name": "tone", "verdict": "Unknown"}]);
    let validation = json!({
        "step": 3, "attempt": 2, "durationMilliseconds": 1250, "progressPercent": 50, "criteria": criteria,
    });
    assert_eq!(
        rows(
            &journal,
            "SELECT purpose, validation FROM agent_execution_steps ORDER BY call"
        ),
        [
            json!(["Turn", null]),
            json!(["Turn", validation]),
            json!(["Judge", null])
        ]
    );
    assert_eq!(
        rows(
            &journal,
            "SELECT state_snapshot FROM agent_execution_history ORDER BY rowid"
        ),
        [
            json!([{"end": "finish", "validation": validation}]),
            json!([{"end": "judged"}])
        ]
    );
    assert_eq!(rows(&journal, GOAL_STEPS), [json!([7, 3, 2, 1250, 50, criteria, null])]);
}

#[test]
fn a_step_of_a_goal_with_artifacts_records_how_many_exist() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(&mut journal, &[plain(RecordKind::TurnStarted, 1, "")]);
    let artifacts = CheckedArtifacts {
        verdict: Verdict::Unmet,
        met: 2,
        declared: 3,
    };
    let found = checked(1, |validation| validation.artifacts = Some(artifacts));
    write(&mut journal, &[plain(RecordKind::TurnCompleted, 1, "continue"), found]);
    let query = "SELECT json_extract(state_snapshot, '$.validation.artifacts') FROM agent_execution_history";
    assert_eq!(
        rows(&journal, query),
        [json!([{"verdict": "Unmet", "met": 2, "declared": 3}])]
    );
    assert_eq!(rows(&journal, GOAL_STEPS).len(), 1);
}

#[test]
fn a_failed_attempt_without_an_answer_is_a_goal_step_too() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(&mut journal, &[plain(RecordKind::TurnStarted, 1, "")]);
    let failed = checked(1, |validation| {
        validation.criteria.clear();
        validation.error = Some("Timeout".into());
    });
    write(&mut journal, &[plain(RecordKind::TurnFailed, 1, "Timeout"), failed]);
    assert_eq!(rows(&journal, GOAL_STEPS), [json!([1, 3, 2, 1250, 50, [], "Timeout"])]);
}

#[test]
fn a_turn_of_another_mode_is_no_goal_step() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(&mut journal, &[plain(RecordKind::TurnStarted, 1, "")]);
    write(&mut journal, &[plain(RecordKind::TurnCompleted, 1, "sleep")]);
    assert_eq!(count(&journal, "SELECT count(*) FROM agent_goal_steps"), 0);
}

#[test]
fn the_verdicts_are_uploaded_once_the_check_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write_step(&mut journal, 1);
    let batch = journal.history_batch().unwrap().unwrap().batch;
    let validation = batch.steps.iter().find_map(|step| step.validation.clone()).unwrap();
    assert_eq!(validation["criteria"][1]["verdict"], "Unknown");
    let snapshots = batch
        .executions
        .iter()
        .filter_map(|execution| execution.state_snapshot.clone());
    let found: Vec<Value> = snapshots
        .filter(|snapshot| snapshot["validation"] == validation)
        .collect();
    assert_eq!(found.len(), 1);
}

#[test]
fn the_export_has_a_line_for_each_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write_step(&mut journal, 1);
    let path = dir.path().join("copy.sqlite");
    journal
        .connection
        .execute("VACUUM INTO ?1", [path.to_str().unwrap()])
        .unwrap();
    let mut bytes = Vec::new();
    export(&path, &mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut steps: Vec<Value> = lines.filter(|line| line["record"] == "goalStep").collect();
    assert_eq!(steps.len(), 1);
    let step = steps.remove(0);
    assert_eq!(
        (&step["goal_step"], &step["attempt_number"], &step["criteria"][0]),
        (&json!(3), &json!(2), &json!({"name": "tests", "verdict": "Met"}))
    );
}

#[test]
fn a_journal_of_version_8_or_9_shows_the_attempts_from_now_on() {
    const TO_VERSION_9: &str = "DROP VIEW agent_goal_steps; PRAGMA user_version = 9";
    let to_version_8 = format!("{WITHOUT_UPLOADS} PRAGMA user_version = 8");
    for undo in [TO_VERSION_9, &to_version_8] {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = open(dir.path(), 1);
        write(&mut journal, &[plain(RecordKind::TurnStarted, 1, "")]);
        write(&mut journal, &[plain(RecordKind::TurnCompleted, 1, "continue")]);
        journal.close(&owner(1)).unwrap();
        set(dir.path(), undo);
        let (mut journal, _) = open(dir.path(), 2);
        assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
        assert_eq!(rows(&journal, GOAL_STEPS), [] as [Value; 0]);
        write_step(&mut journal, 2);
        assert_eq!(rows(&journal, GOAL_STEPS).len(), 1);
        assert_eq!(count(&journal, "SELECT count(*) FROM agent_execution_audit"), 0);
    }
}
