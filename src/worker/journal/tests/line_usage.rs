//! What an answered call used, in its line.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::history::call;
use super::*;
use crate::api::agent::ModelSpec;
use crate::engine::{CallPurpose, RecordedUsage};
use crate::worker::journal::export::export;
use crate::worker::journal::line_usage::tokens_of_calls;

const COLUMNS: [&str; 4] = ["model", "input_tokens", "output_tokens", "cost_micro_usd"];

fn model(name: &str) -> ModelSpec {
    serde_json::from_value(json!({"api": "OpenAIChat", "name": name, "baseURL": "http://m"})).unwrap()
}

fn answered(turn: i64, purpose: CallPurpose, cost: Option<i64>) -> JournalRecord {
    let used = RecordedUsage {
        purpose,
        tokens: Some(20),
        input_and_output: cost.map(|_| (100, 10)),
        cost,
    };
    JournalRecord {
        call: Some(call(turn, 1)),
        used: Some(used),
        ..record(RecordKind::CallAnswered, turn, vec![])
    }
}

fn usage(model: &str, cost: Option<i64>) -> LineUsage {
    LineUsage {
        model: Some(model.into()),
        input_tokens: cost.map(|_| 100),
        output_tokens: cost.map(|_| 10),
        cost,
    }
}

fn usages(lines: &[JournalLine]) -> Vec<LineUsage> {
    lines.iter().map(|line| line.usage.clone()).collect()
}

#[test]
fn lines_have_the_usage_of_their_calls_and_the_model_of_that_time_after_a_restart_too() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    journal.set_models(&model("large"), Some(&model("small")));
    let records = [
        record(RecordKind::TurnStarted, 1, vec![]),
        answered(1, CallPurpose::Turn, Some(7)),
        answered(2, CallPurpose::Precheck, Some(0)),
        answered(3, CallPurpose::Judge, None),
    ];
    let committed = journal
        .commit(Timestamp::UNIX_EPOCH, &records, &EngineSnapshot::default(), None)
        .unwrap();
    let expected = [
        LineUsage::default(),
        usage("large", Some(7)),
        usage("small", Some(0)),
        usage("large", None),
    ];
    assert_eq!(usages(&committed.lines), expected);
    assert_eq!(journal.lines_after(0, 10).unwrap().lines, committed.lines);
    drop(journal);

    // Killed: the lines of the last batch are logged again, and another model is asked from now on.
    let (mut journal, restored) = open(dir.path(), 2);
    assert_eq!(restored.unlogged_lines, committed.lines);
    journal.set_models(&model("other"), None);
    assert_eq!(journal.lines_after(0, 10).unwrap().lines, committed.lines);
    let committed = journal
        .commit(
            Timestamp::UNIX_EPOCH,
            &[answered(4, CallPurpose::Precheck, Some(1))],
            &EngineSnapshot::default(),
            None,
        )
        .unwrap();
    assert_eq!(usages(&committed.lines), [usage("other", Some(1))]);
}

#[test]
fn exported_steps_have_the_input_and_output_of_their_calls() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let records = [
        record(RecordKind::TurnStarted, 1, vec![]),
        answered(1, CallPurpose::Turn, Some(7)),
        record(RecordKind::TurnCompleted, 1, vec![]),
        record(RecordKind::TurnStarted, 2, vec![]),
        answered(2, CallPurpose::Turn, None),
    ];
    let committed = journal.commit(Timestamp::UNIX_EPOCH, &records, &EngineSnapshot::default(), None);
    assert_eq!(committed.unwrap().lines.len(), records.len());
    drop(journal);
    let mut bytes = Vec::new();
    export(&dir.path().join(FILE), &mut bytes).unwrap();
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let lines = lines.map(|line| serde_json::from_slice::<Value>(line).unwrap());
    let steps = lines.filter(|line| line["record"] == "step");
    let used: Vec<_> = steps
        .map(|step| json!([step["call"], step["input_tokens"], step["output_tokens"]]))
        .collect();
    assert_eq!(used, [json!(["t1c1a1", 100, 10]), json!(["t2c1a1", null, null])]);
}

#[test]
fn a_copy_of_a_journal_without_the_columns_has_no_tokens() {
    let connection = Connection::open_in_memory().unwrap();
    let table = "CREATE TABLE journal (seq INTEGER PRIMARY KEY, kind TEXT, call TEXT, member INTEGER)";
    connection.execute_batch(table).unwrap();
    assert_eq!(tokens_of_calls(&connection).unwrap().len(), 0);
}

#[test]
fn a_journal_of_an_earlier_release_gets_the_columns_and_that_release_opens_it_again() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection.execute_batch("DROP VIEW agent_execution_audit").unwrap();
    for column in COLUMNS {
        let drop_column = format!("ALTER TABLE journal DROP COLUMN {column}");
        connection.execute_batch(&drop_column).unwrap();
    }
    drop(connection);

    let (journal, _) = open(dir.path(), 2);
    let lines = journal.lines_after(0, 10).unwrap().lines;
    assert_eq!(usages(&lines), [LineUsage::default()]);
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
    // What an earlier release writes.
    let of_earlier = "INSERT INTO journal (at, kind, turn, call, note, member)
        VALUES ('2026-01-01T00:00:00Z', 'CallAnswered', 2, 't2c1a1', 'Stop', 0)";
    journal.connection.execute_batch(of_earlier).unwrap();
    let lines = journal.lines_after(1, 10).unwrap().lines;
    assert_eq!(usages(&lines), [LineUsage::default()]);
}
