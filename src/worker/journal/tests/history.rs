//! Tests of the history tables.

use rusqlite::types::Value as Column;
use serde_json::{Value, json};

use super::*;
use crate::engine::message::ToolCall;
use crate::engine::{CallPurpose, RecordedUsage};
use crate::worker::journal::history::{HistoryTotals, PRUNED_KEY};

pub(super) fn plain(kind: RecordKind, turn: i64, note: &str) -> JournalRecord {
    JournalRecord {
        call: None,
        note: note.into(),
        ..record(kind, turn, vec![])
    }
}

pub(super) fn useless(record: JournalRecord) -> JournalRecord {
    JournalRecord {
        detail: RecordDetail::UselessAnswer,
        ..record
    }
}

pub(super) fn answered(
    call: CallId,
    purpose: CallPurpose,
    tokens: Option<u64>,
    messages: Vec<Message>,
) -> JournalRecord {
    JournalRecord {
        call: Some(call),
        note: "Stop".into(),
        used: Some(RecordedUsage {
            purpose,
            tokens,
            input_and_output: None,
            cost: None,
        }),
        ..record(RecordKind::CallAnswered, call.turn, messages)
    }
}

pub(super) fn call(turn: i64, call: u32) -> CallId {
    CallId {
        member: 0,
        turn,
        call,
        attempt: 1,
    }
}

pub(super) fn says(text: &str, calls: &[(&str, &str)]) -> Message {
    let calls = calls.iter().enumerate().map(|(place, (name, arguments))| ToolCall {
        id: place.to_string(),
        name: (*name).into(),
        arguments: (*arguments).into(),
    });
    Message::Assistant {
        reasoning: None,
        text: Some(text.into()),
        tool_calls: calls.collect(),
    }
}

pub(super) fn result(text: &str) -> Message {
    Message::Tool {
        id: String::new(),
        text: text.into(),
        failed: false,
        reasoning: None,
        artifacts: crate::engine::tool::ResultArtifacts::default(),
    }
}

pub(super) fn run(kind: RecordKind, turn: i64, index: u32, outcome: Option<OutcomeKind>) -> JournalRecord {
    let mut record = tool_record();
    record.kind = kind;
    record.turn = turn;
    record.call = None;
    if let Some(tool) = &mut record.tool {
        tool.run = ToolRunId {
            member: 0,
            turn,
            call: 1,
            index,
        };
        tool.outcome = outcome;
    }
    record
}

/// Returns the only row of a query as JSON: text and numbers, and JSON where a column contains it.
fn row(journal: &Journal, sql: &str) -> Value {
    let mut rows = rows(journal, sql);
    assert_eq!(rows.len(), 1, "{rows:?}");
    rows.remove(0)
}

pub(super) fn rows(journal: &Journal, sql: &str) -> Vec<Value> {
    let mut select = journal.connection.prepare(sql).unwrap();
    let columns = select.column_count();
    let read = |row: &rusqlite::Row<'_>| {
        let value = |column| match row.get_unwrap::<_, Column>(column) {
            Column::Text(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
            Column::Integer(number) => number.into(),
            Column::Null | Column::Real(_) | Column::Blob(_) => Value::Null,
        };
        Ok((0..columns).map(value).collect::<Value>())
    };
    select.query_map([], read).unwrap().map(Result::unwrap).collect()
}

const EXECUTIONS: &str = "SELECT task_id, turn, total_steps, final_status, total_tokens, state_snapshot
                          FROM agent_execution_history ORDER BY rowid";
const STEPS: &str = "SELECT step_number, call, purpose, reasoning, action, result, success, tokens_used
                     FROM agent_execution_steps ORDER BY id";

#[test]
fn a_turn_is_an_execution_and_each_answer_a_step_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    write(&mut journal, &[plain(RecordKind::TurnStarted, 7, "")]);
    assert_eq!(row(&journal, EXECUTIONS), json!(["Turn", 7, 0, null, null, null]));
    let wants = says("look", &[("files__write", r#"{"path": "a"}"#), ("mail", "{half")]);
    write(
        &mut journal,
        &[answered(call(7, 1), CallPurpose::Turn, Some(100), vec![wants])],
    );
    let actions = json!([
        {"tool": "files__write", "arguments": {"path": "a"}},
        {"tool": "mail", "arguments": "{half"},
    ]);
    let open_step = json!([1, "t7c1a1", "Turn", "look", actions, [], null, 100]);
    assert_eq!(row(&journal, STEPS), open_step);
    // The second run ends first; the text of the first one has joined the transcript.
    let denied = run(RecordKind::ToolDenied, 7, 2, None);
    let mut ended = run(RecordKind::ToolOutcome, 7, 1, Some(OutcomeKind::Ok));
    ended.messages = vec![result("done").into()];
    write(&mut journal, &[denied, ended]);
    assert_eq!(row(&journal, STEPS)[6], Value::Null);
    let mut joined = plain(RecordKind::CallStarted, 7, "");
    joined.messages = vec![result("no such tool").into()];
    write(&mut journal, &[joined]);
    let results = json!([{"outcome": "Ok", "text": "done"}, {"outcome": "Denied", "text": "no such tool"}]);
    assert_eq!(
        row(&journal, STEPS),
        json!([1, "t7c1a1", "Turn", "look", actions, results, 0, 100])
    );
    let last = answered(call(7, 2), CallPurpose::Turn, None, vec![says("all is well", &[])]);
    write(&mut journal, &[last, plain(RecordKind::TurnCompleted, 7, "continue")]);
    assert_eq!(
        row(&journal, EXECUTIONS),
        json!(["Turn", 7, 2, "success", 100, {"end": "continue"}])
    );
    assert_eq!(
        rows(&journal, STEPS)[1],
        json!([2, "t7c2a1", "Turn", "all is well", [], [], 1, null])
    );
}

#[test]
fn a_call_that_yields_ends_well_and_so_does_a_run_that_was_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let wants = says("", &[("job", "{}"), ("yield", r#"{"sleep": 9}"#)]);
    let mut repeated = run(RecordKind::ToolOutcome, 1, 1, Some(OutcomeKind::Unknown));
    repeated.note = "will be repeated".into();
    let mut ended = run(RecordKind::ToolOutcome, 1, 1, Some(OutcomeKind::Ok));
    ended.messages = vec![result("a").into(), result("b").into()];
    write(
        &mut journal,
        &[answered(call(1, 1), CallPurpose::Turn, Some(1), vec![wants])],
    );
    write(&mut journal, &[repeated]);
    assert_eq!(row(&journal, STEPS)[5], json!([{"outcome": "Unknown"}]));
    write(&mut journal, &[ended]);
    let step = row(&journal, STEPS);
    assert_eq!(step[5], json!([{"outcome": "Ok", "text": "a"}, {"text": "b"}]));
    assert_eq!(step[6], 1);
}

#[test]
fn heartbeats_and_pre_checks_are_executions_of_their_own_and_a_summary_is_a_step_of_its_turn() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let pre_check = |attempt| CallId {
        member: 0,
        turn: 2,
        call: 0,
        attempt,
    };
    let asked = |attempt| answered(pre_check(attempt), CallPurpose::Precheck, Some(5), vec![]);
    write(
        &mut journal,
        &[asked(1), plain(RecordKind::PrecheckSkipped, 1, "sleep extended")],
    );
    // This pre-check got no answer: it has no row, and the one before keeps its own.
    write(&mut journal, &[plain(RecordKind::PrecheckFailed, 1, "Timeout")]);
    write(
        &mut journal,
        &[asked(3), useless(plain(RecordKind::PrecheckFailed, 1, "Unreadable"))],
    );
    write(&mut journal, &[asked(4)]);
    write(&mut journal, &[plain(RecordKind::TurnStarted, 2, "")]);
    let summary = answered(
        call(2, 1),
        CallPurpose::Compaction,
        Some(50),
        vec![user("Sum it up"), says("quiet", &[])],
    );
    write(&mut journal, &[summary, plain(RecordKind::TurnFailed, 2, "Timeout")]);
    let heartbeat = JournalRecord {
        detail: RecordDetail::TurnStarted(CallPurpose::Heartbeat),
        ..plain(RecordKind::TurnStarted, 3, "")
    };
    write(&mut journal, &[heartbeat]);
    let expected = [
        json!(["Precheck", 2, 1, "success", 5, {"end": "skip"}]),
        json!(["Precheck", 2, 1, "failed", 5, {"failure": "Unreadable"}]),
        json!(["Precheck", 2, 1, "success", 5, {"end": "wake"}]),
        json!(["Turn", 2, 1, "failed", 50, {"failure": "Timeout"}]),
        json!(["Heartbeat", 3, 0, null, null, null]),
    ];
    assert_eq!(rows(&journal, EXECUTIONS), expected);
    assert_eq!(count(&journal, "SELECT count(*) FROM agent_execution_steps"), 4);
}

#[test]
fn the_same_row_written_again_is_one_row() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    for _ in 0..2 {
        let answer = answered(call(1, 1), CallPurpose::Turn, Some(10), vec![says("a", &[])]);
        write(&mut journal, &[plain(RecordKind::TurnStarted, 1, ""), answer]);
    }
    assert_eq!(row(&journal, EXECUTIONS), json!(["Turn", 1, 1, null, 10, null]));
    assert_eq!(rows(&journal, STEPS).len(), 1);
}

#[test]
fn long_texts_are_cut_and_short_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    for (turn, length, is_cut) in [(1, 4096, false), (2, 4097, true)] {
        let text = "x".repeat(length);
        let answer = says(&text, &[("write", &format!("\"{}\"", "y".repeat(length - 2)))]);
        let mut answer = answered(call(turn, 1), CallPurpose::Turn, None, vec![answer]);
        answer.messages.push(result(&text).into());
        write(&mut journal, &[answer]);
        let step = &rows(&journal, STEPS)[usize::try_from(turn).unwrap() - 1];
        for text in [&step[3], &step[4][0]["arguments"], &step[5][0]["text"]] {
            let text = text.as_str().unwrap();
            assert_eq!(text.contains("[cut: the first 4096 of 4097 bytes]"), is_cut);
            assert!(text.len() < 4200);
        }
    }
}

#[test]
fn the_cost_of_steps_is_summed_as_a_decimal_and_null_where_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let costs = [
        (1, [None, None]),
        (2, [Some(7), None]),
        (3, [Some(0), Some(12_000_345)]),
    ];
    for (turn, costs) in costs {
        write(&mut journal, &[plain(RecordKind::TurnStarted, turn, "")]);
        for (number, cost) in (1..).zip(costs) {
            let mut answer = answered(call(turn, number), CallPurpose::Turn, None, vec![]);
            answer.used.as_mut().unwrap().cost = cost;
            write(&mut journal, &[answer]);
        }
    }
    // As text, because `rows` parses what looks like a number.
    let texts = |column: &str| -> Vec<Option<String>> {
        let mut select = journal.connection.prepare(column).unwrap();
        let texts = select.query_map([], |row| row.get(0)).unwrap();
        texts.collect::<rusqlite::Result<_>>().unwrap()
    };
    let texts = |column| -> Vec<String> {
        texts(column)
            .into_iter()
            .map(|text| text.unwrap_or("NULL".into()))
            .collect()
    };
    assert_eq!(
        texts("SELECT cost_usd FROM agent_execution_steps ORDER BY id"),
        ["NULL", "NULL", "0.000007", "NULL", "0.000000", "12.000345"]
    );
    assert_eq!(
        texts("SELECT total_cost_usd FROM agent_execution_history ORDER BY id"),
        ["NULL", "0.000007", "12.000345"]
    );
}

#[test]
fn executions_beyond_the_last_2000_turns_are_dropped_and_stay_in_the_totals() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    for (turn, end) in [
        (100, RecordKind::TurnCompleted),
        (101, RecordKind::TurnFailed),
        (200, RecordKind::TurnCompleted),
    ] {
        let mut answer = answered(call(turn, 1), CallPurpose::Turn, Some(10), vec![says("a", &[])]);
        answer.used.as_mut().unwrap().cost = Some(4);
        let records = [plain(RecordKind::TurnStarted, turn, ""), answer, plain(end, turn, "x")];
        write(&mut journal, &records);
    }
    let kept = |journal: &Journal| {
        (
            count(journal, "SELECT count(*) FROM agent_execution_history"),
            count(journal, "SELECT count(*) FROM agent_execution_steps"),
        )
    };
    assert_eq!(kept(&journal), (3, 3));
    write(&mut journal, &[plain(RecordKind::TurnStarted, 2_099, "")]);
    assert_eq!(kept(&journal), (4, 3), "pruned every 100 turns only");
    write(&mut journal, &[plain(RecordKind::TurnStarted, 2_100, "")]);
    assert_eq!(kept(&journal), (4, 2));
    write(&mut journal, &[plain(RecordKind::TurnStarted, 2_200, "")]);
    assert_eq!(kept(&journal), (3, 0));
    let totals: HistoryTotals = journal.get(PRUNED_KEY).unwrap().unwrap();
    let expected = HistoryTotals {
        executions: 3,
        succeeded: 2,
        failed: 1,
        steps: 3,
        tokens: 30,
        cost: 12,
    };
    assert_eq!(totals, expected);
}

#[test]
fn the_older_half_of_steps_above_32_mib_is_dropped_and_of_steps_at_32_mib_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let fill = "
        WITH RECURSIVE turns (turn) AS (SELECT 1 UNION ALL SELECT turn + 1 FROM turns WHERE turn < 64)
        INSERT INTO agent_execution_history (id, agent_id, task_id, turn, started_at, total_steps)
        SELECT printf('%08x-%04x', 0, turn), 'a', 'Turn', turn, '', 1 FROM turns;
        INSERT INTO agent_execution_steps
        (id, execution_id, step_number, timestamp, call, purpose, reasoning, action, result)
        SELECT id, id, 1, '', '', 'Turn', printf('%.*c', 524284, 'x'), '[]', '[]' FROM agent_execution_history;";
    journal.connection.execute_batch(fill).unwrap();
    let steps = "SELECT count(*) FROM agent_execution_steps";
    write(&mut journal, &[record(RecordKind::TurnStarted, 100, vec![])]);
    assert_eq!(count(&journal, steps), 64);
    let answer = answered(call(100, 1), CallPurpose::Turn, None, vec![]);
    write(&mut journal, &[answer]);
    write(&mut journal, &[record(RecordKind::TurnStarted, 100, vec![])]);
    // 50 is the middle of 1 and 100.
    assert_eq!(count(&journal, steps), 15);
    assert_eq!(count(&journal, "SELECT min(turn) FROM agent_execution_history"), 51);
}

#[test]
fn a_journal_of_version_2_is_migrated_and_its_open_turn_has_an_execution() {
    let dir = tempfile::tempdir().unwrap();
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection.execute_batch(OF_VERSION_1).unwrap();
    connection.execute_batch(schema::STEPS[1]).unwrap();
    connection.pragma_update(None, "user_version", 2).unwrap();
    drop(connection);
    let (mut journal, restored) = open(dir.path(), 2);
    assert_eq!(restored.transcript.len(), 3);
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
    // The result of a call that was answered before the tables existed.
    write(
        &mut journal,
        &[run(RecordKind::ToolOutcome, 7, 1, Some(OutcomeKind::Ok))],
    );
    assert_eq!(rows(&journal, STEPS), Vec::<Value>::new());
    let answer = answered(call(7, 2), CallPurpose::Turn, Some(9), vec![says("done", &[])]);
    write(&mut journal, &[answer, plain(RecordKind::TurnCompleted, 7, "sleep")]);
    assert_eq!(
        row(&journal, EXECUTIONS),
        json!(["Turn", 7, 1, "success", 9, {"end": "sleep"}])
    );
    journal.close(&owner(2)).unwrap();
    drop(open(dir.path(), 2));
}

#[test]
fn a_useless_answer_is_a_step_without_success() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let line = |number| answered(call(7, number), CallPurpose::Turn, Some(1), vec![says("no", &[])]);
    write(
        &mut journal,
        &[plain(RecordKind::TurnStarted, 7, ""), line(1), useless(line(2))],
    );
    let success = rows(
        &journal,
        "SELECT success FROM agent_execution_steps ORDER BY step_number",
    );
    assert_eq!(success, [json!([1]), json!([0])]);
}

#[test]
fn a_refused_answer_of_the_light_model_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    for (number, purpose) in [(0, CallPurpose::Precheck), (1, CallPurpose::Signal)] {
        let mut refused = useless(answered(call(7, number), purpose, Some(1), vec![]));
        refused.note = "Refused".into();
        write(&mut journal, &[refused]);
    }
    let expected = [
        json!(["Precheck", 7, 1, "failed", 1, {"failure": "Refused"}]),
        json!(["Signal", 7, 1, "failed", 1, {"failure": "Refused"}]),
    ];
    assert_eq!(rows(&journal, EXECUTIONS), expected);
    let success = rows(&journal, "SELECT success FROM agent_execution_steps ORDER BY id");
    assert_eq!(success, [json!([0]), json!([0])]);
}

#[test]
fn the_turns_of_two_members_are_executions_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let of = |member, record: JournalRecord| JournalRecord {
        member,
        call: record.call.map(|call| CallId { member, ..call }),
        ..record
    };
    for member in [0, 3] {
        write(&mut journal, &[of(member, plain(RecordKind::TurnStarted, 7, ""))]);
    }
    for (member, text) in [(3, "third"), (0, "main")] {
        let line = answered(call(7, 1), CallPurpose::Turn, Some(1), vec![says(text, &[])]);
        write(&mut journal, &[of(member, line)]);
    }
    write(&mut journal, &[of(3, plain(RecordKind::TurnFailed, 7, "Timeout"))]);
    let steps = "SELECT h.member, s.member, s.call, s.reasoning, h.final_status FROM agent_execution_steps s
        JOIN agent_execution_history h ON h.id = s.execution_id ORDER BY h.member";
    let expected = [
        json!([0, 0, "t7c1a1", "main", null]),
        json!([3, 3, "m3-t7c1a1", "third", "failed"]),
    ];
    assert_eq!(rows(&journal, steps), expected);
}
