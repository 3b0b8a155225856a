//! Tests of the store with a real Postgres.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod migrations;
#[path = "../../../tests/it/support/ports.rs"]
mod ports;
#[path = "../../../tests/it/support/postgres.rs"]
mod postgres;
mod tls;

use agentloop_link::history::{AuditRow, ExecutionRow, HistoryAck, HistoryBatch, SentChanges, StepRow};
use jiff::{SignedDuration, Timestamp};
use pretty_assertions::assert_eq;
use serde_json::json;

use self::postgres::Postgres;
use super::{HistoryAgent, HistoryError, HistoryStore, RowCounts};

const WATCHER: HistoryAgent<'static> = HistoryAgent {
    uid: "uid-of-watcher",
    namespace: "team-a",
    name: "watcher",
};
const OTHER: HistoryAgent<'static> = HistoryAgent {
    uid: "uid-of-other",
    namespace: "team-b",
    name: "other",
};

fn store(postgres: &Postgres) -> HistoryStore {
    HistoryStore::new(postgres.connection_file(), None).unwrap()
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn uuid(number: u32) -> String {
    format!("00000000-0000-8000-8000-{number:012}")
}

fn execution(number: u32, started_at: Timestamp) -> ExecutionRow {
    ExecutionRow {
        id: uuid(number),
        task_id: "Turn".into(),
        turn: number.into(),
        member: 0,
        started_at,
        completed_at: Some(started_at + SignedDuration::from_millis(1500)),
        total_steps: 1,
        final_status: Some("success".into()),
        escalation_reason: None,
        total_cost_micro_usd: Some(i64::MAX),
        total_tokens: Some(5_000_000_000),
        state_snapshot: Some(json!({"end": "sleep"})),
    }
}

fn step(number: u32, execution: u32) -> StepRow {
    StepRow {
        id: uuid(1000 + number),
        execution_id: uuid(execution),
        step_number: number.into(),
        timestamp: at("2026-11-22T14:00:01Z"),
        call: format!("t{execution}c{number}a2"),
        purpose: "Turn".into(),
        member: 0,
        attempt: Some(2),
        duration_milliseconds: Some(900),
        reasoning: Some("thinking".into()),
        action: json!([{"tool": "a__b", "arguments": {"x": 1}}]),
        result: json!([{"outcome": "Ok", "text": "fine"}]),
        validation: None,
        success: Some(true),
        error: None,
        tokens_used: Some(7),
        cost_micro_usd: Some(1),
    }
}

fn line(seq: i64, at: Timestamp) -> AuditRow {
    AuditRow {
        seq,
        at,
        execution_id: Some(uuid(1)),
        turn: 1,
        member: 0,
        call: Some("t1c1".into()),
        run: Some("t1c1r1".into()),
        tool: Some("a__b".into()),
        effect: Some("Write".into()),
        decision: Some("Allowed".into()),
        gate: None,
        cause: None,
        decided_by: None,
        idempotency_key: None,
        arguments_hash: None,
        outcome: None,
        note: String::new(),
    }
}

/// Changes `after + 1` to `last`: an execution with a step and a line.
fn batch(after: i64, last: i64) -> HistoryBatch {
    HistoryBatch {
        epoch: 1,
        writer: "one".into(),
        after,
        last,
        sent_before: Vec::new(),
        executions: vec![execution(1, at("2026-11-22T14:00:00Z"))],
        steps: vec![step(1, 1)],
        audit: vec![line(3, at("2026-11-22T14:00:00.5Z"))],
    }
}

fn stored(stored: i64) -> HistoryAck {
    HistoryAck { stored, restart: false }
}

fn restart(stored: i64) -> HistoryAck {
    HistoryAck { stored, restart: true }
}

const ONE_OF_EACH: RowCounts = RowCounts {
    executions: 1,
    steps: 1,
    audit: 1,
};

async fn counts(postgres: &Postgres) -> [i64; 3] {
    [
        postgres.number("SELECT count(*) FROM agent_execution_history").await,
        postgres.number("SELECT count(*) FROM agent_execution_steps").await,
        postgres.number("SELECT count(*) FROM agent_execution_audit").await,
    ]
}

#[tokio::test]
async fn tables_are_created_once_by_the_first_client_and_store_what_a_worker_sends() {
    let postgres = Postgres::start();
    let (one, two) = (store(&postgres), store(&postgres));
    let (first, second) = (batch(0, 4), batch(0, 4));
    let both = tokio::join!(one.store(&WATCHER, &first), two.store(&OTHER, &second));
    assert_eq!(both.0.unwrap().rows, ONE_OF_EACH);
    assert_eq!(both.1.unwrap().ack, stored(4));
    let versions = "SELECT version, name FROM agentloop_migrations ORDER BY version";
    assert_eq!(
        postgres.rows(versions).await,
        ["1|history", "2|goal steps", "3|traces", "4|gate causes"]
    );
    let third = store(&postgres);
    assert_eq!(third.store(&WATCHER, &batch(4, 5)).await.unwrap().ack, stored(5));
    assert_eq!(
        postgres.rows(versions).await,
        ["1|history", "2|goal steps", "3|traces", "4|gate causes"]
    );
    let executions =
        "SELECT namespace, agent_name, task_id, project_id, turn, completed_at - started_at, duration_milliseconds,
        final_status, total_cost_usd, total_tokens, state_snapshot->>'end'
        FROM agent_execution_history WHERE agent_id = 'uid-of-watcher'";
    assert_eq!(
        postgres.rows(executions).await,
        ["team-a|watcher|Turn|-|1|00:00:01.5|1500|success|9223372036854.775807|5000000000|sleep"]
    );
    let steps =
        "SELECT call, attempt, duration_milliseconds, reasoning, action->0->>'tool', result->0->>'outcome', validation,
        success, error, cost_usd FROM agent_execution_steps WHERE agent_id = 'uid-of-watcher'";
    assert_eq!(
        postgres.rows(steps).await,
        ["t1c1a2|2|900|thinking|a__b|Ok|-|t|-|0.000001"]
    );
}

#[tokio::test]
async fn tables_of_version_1_are_migrated_with_their_rows_and_show_the_steps_of_goals() {
    let postgres = Postgres::start();
    store(&postgres).store(&WATCHER, &batch(0, 4)).await.unwrap();
    postgres
        .run(
            "DROP VIEW agent_goal_steps; ALTER TABLE agent_execution_history DROP COLUMN trace_id;
             ALTER TABLE agent_execution_audit DROP COLUMN trace_id, DROP COLUMN cause; DELETE FROM agentloop_migrations WHERE version > 1",
        )
        .await;
    let validation = |validation: serde_json::Value| HistoryBatch {
        executions: vec![ExecutionRow {
            state_snapshot: Some(json!({"end": "finish", "validation": validation})),
            ..execution(2, at("2026-11-22T15:00:00Z"))
        }],
        steps: vec![StepRow {
            validation: Some(validation),
            ..step(2, 2)
        }],
        ..HistoryBatch::default()
    };
    let good = json!({
        "step": 3, "attempt": 2, "durationMilliseconds": 1250, "progressPercent": 50, "progressSource": "Criteria",
        "criteria": [{"name": "tests", "verdict": "Met"}], "error": "Timeout",
    });
    let migrated = store(&postgres);
    let next = HistoryBatch {
        writer: "one".into(),
        after: 4,
        last: 8,
        ..validation(good)
    };
    assert_eq!(migrated.store(&WATCHER, &next).await.unwrap().ack, stored(8));
    let steps =
        "SELECT agent_name, goal_step, attempt_number, duration_milliseconds, progress_percent, progress_source,
        criteria->0->>'verdict', error FROM agent_goal_steps ORDER BY agent_name";
    assert_eq!(postgres.rows(steps).await, ["watcher|3|2|1250|50|Criteria|Met|Timeout"]);
    assert_eq!(
        counts(&postgres).await,
        [2, 2, 1],
        "the rows of version 1 are still there"
    );
    let traced =
        "SELECT turn, trace_id IS NOT NULL FROM agent_execution_history WHERE agent_name = 'watcher' ORDER BY turn";
    assert_eq!(
        postgres.rows(traced).await,
        ["1|f", "2|t"],
        "of the rows of version 1 none was rewritten"
    );
    let validated = "SELECT validation->>'step' FROM agent_execution_steps WHERE validation IS NOT NULL";
    assert_eq!(postgres.rows(validated).await, ["3"]);
    // A worker that another program has taken over cannot make the view unusable for others.
    let bad = HistoryBatch {
        writer: "two".into(),
        last: 1,
        ..validation(json!({"step": "three", "attempt": 1e30, "criteria": 7}))
    };
    migrated.store(&OTHER, &bad).await.unwrap();
    assert_eq!(postgres.rows(steps).await.len(), 2);
}

#[tokio::test]
async fn executions_and_decisions_have_the_trace_of_their_turn() {
    let postgres = Postgres::start();
    let agent = HistoryAgent { uid: "uid", ..WATCHER };
    let question = ExecutionRow {
        turn: 0,
        ..execution(13, at("2026-11-22T14:00:00Z"))
    };
    let batch = HistoryBatch {
        executions: vec![execution(12, at("2026-11-22T14:00:00Z")), question],
        steps: Vec::new(),
        audit: vec![AuditRow {
            turn: 12,
            ..line(3, at("2026-11-22T14:00:00.5Z"))
        }],
        ..batch(0, 4)
    };
    store(&postgres).store(&agent, &batch).await.unwrap();
    let traces = "SELECT turn, coalesce(trace_id, 'none') FROM agent_execution_history ORDER BY turn DESC";
    // The same as in the tests of the ids.
    let expected = "3c7ab538e73a5da7a77d1c071ec3c9ad";
    assert_eq!(postgres.rows(traces).await, [format!("12|{expected}"), "0|none".into()]);
    let decisions = "SELECT trace_id FROM agent_execution_audit";
    assert_eq!(postgres.rows(decisions).await, [expected]);
}

#[tokio::test]
async fn a_decision_has_the_rule_that_opened_its_gate() {
    let postgres = Postgres::start();
    let opened = AuditRow {
        decision: Some("Asked".into()),
        gate: Some("e1-t1c1r1".into()),
        cause: Some("UntrustedContent".into()),
        decided_by: None,
        note: "e1-t1c1r1 UntrustedContent".into(),
        ..line(2, at("2026-11-22T14:00:00Z"))
    };
    let closed = AuditRow {
        decision: Some("Approved".into()),
        gate: Some("e1-t1c1r1".into()),
        decided_by: Some("ann".into()),
        ..line(3, at("2026-11-22T14:00:01Z"))
    };
    let batch = HistoryBatch {
        audit: vec![opened, closed],
        ..batch(0, 4)
    };
    store(&postgres).store(&WATCHER, &batch).await.unwrap();
    let gates = "SELECT seq, gate, coalesce(cause, 'none'), coalesce(decided_by, 'none') FROM agent_execution_audit ORDER BY seq";
    let expected = ["2|e1-t1c1r1|UntrustedContent|none", "3|e1-t1c1r1|none|ann"];
    assert_eq!(postgres.rows(gates).await, expected);
}

#[tokio::test]
async fn a_newer_schema_is_refused_and_left_as_it_is_and_an_owner_of_rows_only_can_write() {
    let postgres = Postgres::start();
    store(&postgres).store(&WATCHER, &batch(0, 4)).await.unwrap();
    postgres
        .run("INSERT INTO agentloop_migrations (version, name) VALUES (5, 'later')")
        .await;
    let error = store(&postgres).store(&WATCHER, &batch(4, 8)).await.unwrap_err();
    assert!(
        matches!(error, HistoryError::NewerSchema { found: 5, known: 4 }),
        "{error}"
    );
    postgres
        .run(
            "DELETE FROM agentloop_migrations WHERE version = 5; CREATE ROLE writer LOGIN;
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO writer",
        )
        .await;
    let file = postgres.connection_file();
    let text = std::fs::read_to_string(&file)
        .unwrap()
        .replace("agentloop:canary", "writer");
    std::fs::write(&file, text).unwrap();
    let writer = HistoryStore::new(file, None).unwrap();
    assert_eq!(writer.store(&WATCHER, &batch(4, 8)).await.unwrap().ack, stored(8));
}

#[tokio::test]
async fn a_batch_is_stored_once_and_one_that_does_not_follow_is_not() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let send = async |batch: HistoryBatch| {
        let outcome = store.store(&WATCHER, &batch).await.unwrap();
        (outcome.ack, outcome.rows.executions)
    };
    let of = |writer: &str, batch: HistoryBatch| HistoryBatch {
        writer: writer.into(),
        ..batch
    };
    assert_eq!(send(batch(0, 4)).await, (stored(4), 1));
    // The answer was lost.
    assert_eq!(send(batch(0, 4)).await, (stored(4), 0));
    // Another process cannot know whether it sends the same, unless its journal has recorded it.
    assert_eq!(send(of("two", batch(0, 4))).await, (restart(4), 0));
    let earlier = |writer: &str, last| SentChanges {
        writer: writer.into(),
        last,
    };
    for (last_sent, ack) in [
        (earlier("one", 4), stored(4)),
        (earlier("one", 3), restart(4)),
        (earlier("zero", 4), restart(4)),
    ] {
        let batch = HistoryBatch {
            sent_before: vec![earlier("zero", 3), last_sent],
            ..of("two", batch(0, 5))
        };
        assert_eq!(send(batch).await, (ack, 0));
    }
    // A gap: the database is from a backup, or a journal that has acknowledged more was replaced.
    assert_eq!(send(batch(5, 9)).await, (restart(4), 0));
    // From there on it continues, with all rows and higher numbers.
    assert_eq!(send(of("two", batch(4, 20))).await, (stored(20), 1));
    // A late copy of the first process.
    assert_eq!(send(batch(4, 8)).await, (restart(20), 0));
    assert_eq!(send(of("two", batch(20, 19))).await, (restart(20), 0));
    assert_eq!(counts(&postgres).await, [1, 1, 1]);
    // A new database, and an old journal.
    assert_eq!(store.store(&OTHER, &batch(9, 10)).await.unwrap().ack, restart(0));
}

#[tokio::test]
async fn a_later_change_of_a_row_replaces_it_and_a_line_of_another_time_is_another_line() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let mut first = batch(0, 4);
    first.executions[0].final_status = None;
    first.steps[0].success = None;
    store.store(&WATCHER, &first).await.unwrap();
    let mut second = batch(4, 9);
    second.steps.push(step(2, 1));
    second.audit.push(line(3, at("2026-11-22T15:00:00Z")));
    store.store(&WATCHER, &second).await.unwrap();
    assert_eq!(counts(&postgres).await, [1, 2, 2]);
    let status =
        "SELECT final_status, success FROM agent_execution_history JOIN agent_execution_steps s USING (agent_id)
        WHERE step_number = 1";
    assert_eq!(postgres.rows(status).await, ["success|t"]);
}

#[tokio::test]
async fn rows_of_another_agent_are_out_of_reach() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    store.store(&WATCHER, &batch(0, 4)).await.unwrap();
    // The same ids, of an Agent in another namespace.
    let mut theirs = batch(0, 4);
    theirs.executions[0].final_status = Some("failed".into());
    theirs.executions[0].turn = 9;
    store.store(&OTHER, &theirs).await.unwrap();
    let all = "SELECT namespace, agent_name, turn, final_status FROM agent_execution_history ORDER BY 1";
    assert_eq!(
        postgres.rows(all).await,
        ["team-a|watcher|1|success", "team-b|other|9|failed"]
    );
    assert_eq!(counts(&postgres).await, [2, 2, 2]);
    // A step of the other's execution, which this Agent does not have.
    let mut mine = batch(4, 5);
    mine.executions[0].id = uuid(77);
    store.store(&WATCHER, &mine).await.unwrap();
    let mut foreign = batch(4, 5);
    (foreign.executions, foreign.audit) = (vec![], vec![]);
    foreign.steps[0] = step(9, 77);
    let error = store.store(&OTHER, &foreign).await.unwrap_err();
    assert!(
        matches!(&error, HistoryError::Rejected(code) if code == "23503"),
        "{error}"
    );
    assert_eq!(counts(&postgres).await, [3, 2, 2]);
}

#[tokio::test]
async fn rows_that_the_database_does_not_accept_are_named_without_their_content() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let mut malformed = batch(0, 4);
    malformed.executions[0].id = "canary".into();
    let error = store.store(&WATCHER, &malformed).await.unwrap_err();
    assert!(
        matches!(&error, HistoryError::Rejected(code) if code == "22P02"),
        "{error}"
    );
    assert!(!format!("{error} {error:?}").contains("canary"));
    let mut twice = batch(0, 4);
    twice.steps.push(step(1, 1));
    let error = store.store(&WATCHER, &twice).await.unwrap_err();
    assert!(
        matches!(&error, HistoryError::Rejected(code) if code == "21000"),
        "{error}"
    );
    // What models write: no text of theirs is refused.
    let mut odd = batch(0, 4);
    odd.steps[0].reasoning = Some("a\0b\u{10ffff}".into());
    odd.steps[0].action = json!([{"tool": "\0", "arguments": {"\0k": ["\0", 1e308, u64::MAX]}}]);
    odd.audit[0].note = "\0".into();
    store.store(&WATCHER, &odd).await.unwrap();
    let texts = "SELECT reasoning, action->0->'arguments'->0, action->0->>'tool', note
        FROM agent_execution_steps JOIN agent_execution_audit USING (agent_id)";
    assert_eq!(postgres.rows(texts).await, ["a\u{fffd}b\u{10ffff}|-|\u{fffd}|\u{fffd}"]);
}

#[tokio::test]
async fn a_crash_of_the_database_is_an_answer_at_once_and_nothing_is_lost_or_doubled() {
    let mut postgres = Postgres::start();
    let store = store(&postgres);
    store.store(&WATCHER, &batch(0, 4)).await.unwrap();
    postgres.crash();
    let since = std::time::Instant::now();
    for _ in 0..50 {
        let error = store.store(&WATCHER, &batch(4, 8)).await.unwrap_err();
        assert!(matches!(error, HistoryError::Unavailable(_)), "{error}");
    }
    assert!(since.elapsed().as_secs() < 5, "{:?}", since.elapsed());
    postgres.up();
    // The same batch, again and again, as a worker sends it.
    let answer = loop {
        match store.store(&WATCHER, &batch(4, 8)).await {
            Ok(answer) => break answer,
            Err(HistoryError::Unavailable(_)) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(answer.ack, stored(8));
    assert_eq!(counts(&postgres).await, [1, 1, 1]);
}

#[tokio::test]
async fn what_is_older_than_the_cutoff_leaves_in_portions_and_nothing_else() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let cutoff = at("2026-11-22T00:00:00Z");
    let day = SignedDuration::from_hours(24);
    let mut old = batch(0, 4);
    old.executions.clear();
    old.steps.clear();
    old.audit.clear();
    for number in 1..=5 {
        // 1 to 3 are older.
        let began = cutoff + day * (i32::try_from(number).unwrap() - 4);
        let began = if number == 3 {
            cutoff - SignedDuration::from_micros(1)
        } else {
            began
        };
        old.executions.push(execution(number, began));
        old.steps.push(step(number, number));
        old.audit.push(line(number.into(), began));
    }
    store.store(&WATCHER, &old).await.unwrap();
    let deleted = |executions, steps, audit| RowCounts {
        executions,
        steps,
        audit,
    };
    assert_eq!(store.delete_before(cutoff, 2).await.unwrap(), deleted(2, 2, 2));
    assert_eq!(store.delete_before(cutoff, 2).await.unwrap(), deleted(1, 1, 1));
    assert_eq!(store.delete_before(cutoff, 2).await.unwrap(), RowCounts::default());
    assert_eq!(counts(&postgres).await, [2, 2, 2]);
    // The Agent continues: its position is newer than the cutoff.
    assert_eq!(store.store(&WATCHER, &batch(4, 8)).await.unwrap().ack, stored(8));
    store.delete_before(Timestamp::now() + day, 100).await.unwrap();
    assert_eq!(counts(&postgres).await, [0, 0, 0]);
    // It was unavailable for as long as rows are kept: it sends all that it has again.
    assert_eq!(store.store(&WATCHER, &batch(8, 9)).await.unwrap().ack, restart(0));
}

#[tokio::test]
async fn a_time_in_the_future_does_not_outlast_retention() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let hours = SignedDuration::from_hours;
    let before = Timestamp::now();
    let mut ahead = batch(0, 4);
    // By less than a clock may be ahead, by more, and as far as a message can state.
    let minute = SignedDuration::from_mins(1);
    let starts = [hours(1) - minute, hours(1) + minute, hours(24 * 365)].map(|ahead| before + ahead);
    (ahead.executions, ahead.steps, ahead.audit) = (vec![], vec![], vec![]);
    for (number, start) in (1..).zip(starts.into_iter().chain([Timestamp::MAX])) {
        ahead
            .executions
            .push(execution(number, start.min(Timestamp::MAX - hours(1))));
        ahead.steps.push(step(number, number));
        ahead.audit.push(line(number.into(), start));
    }
    // The same line again is one line, whatever it states.
    ahead.audit.push(line(4, Timestamp::MAX));
    store.store(&WATCHER, &ahead).await.unwrap();
    assert_eq!(counts(&postgres).await, [4, 4, 4]);
    // Sent again later, as after the loss of what the database has stored.
    let again = HistoryBatch {
        after: 4,
        last: 8,
        executions: vec![],
        steps: vec![],
        ..ahead.clone()
    };
    store.store(&WATCHER, &again).await.unwrap();
    assert_eq!(counts(&postgres).await, [4, 4, 4]);
    let lengths = "SELECT DISTINCT duration_milliseconds FROM agent_execution_history";
    assert_eq!(postgres.rows(lengths).await, ["1500"]);
    let as_stated = format!(
        "SELECT id FROM agent_execution_history WHERE started_at = '{}'",
        starts[0]
    );
    assert_eq!(postgres.rows(&as_stated).await, [uuid(1)]);
    // The first one is kept by what it states, the others by their receipt.
    let same = |rows| RowCounts {
        executions: rows,
        steps: rows,
        audit: rows,
    };
    assert_eq!(store.delete_before(starts[0], 100).await.unwrap(), same(0));
    assert_eq!(store.delete_before(before + hours(1), 100).await.unwrap(), same(1));
    let received = Timestamp::now() + hours(1);
    assert_eq!(store.delete_before(received, 100).await.unwrap(), same(3));
}

#[tokio::test]
async fn numbers_that_a_worker_chooses_hold_up_no_deletion() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let cutoff = at("2026-11-22T00:00:00Z");
    let old = |number, total_steps| ExecutionRow {
        total_steps,
        ..execution(number, cutoff - SignedDuration::from_hours(1))
    };
    let mut hostile = batch(0, 4);
    hostile.executions = vec![old(1, i64::MAX), old(2, i64::MAX), old(3, i64::MIN)];
    hostile.audit.clear();
    store.store(&WATCHER, &hostile).await.unwrap();
    let deleted = |executions, steps| RowCounts {
        executions,
        steps,
        audit: 0,
    };
    assert_eq!(store.delete_before(cutoff, 3).await.unwrap(), deleted(3, 1));
    // As many steps as one deletion has for an execution, and one less.
    for (after, steps, expected) in [
        (4, 20, vec![deleted(0, 20), deleted(1, 0)]),
        (5, 19, vec![deleted(1, 19)]),
    ] {
        let mut many = batch(after, after + 1);
        many.executions = vec![old(1, 1)];
        many.steps = (0..steps).map(|number| step(number, 1)).collect();
        many.audit.clear();
        store.store(&WATCHER, &many).await.unwrap();
        for deleted in expected {
            assert_eq!(store.delete_before(cutoff, 1).await.unwrap(), deleted, "{steps} steps");
        }
        assert_eq!(store.delete_before(cutoff, 1).await.unwrap(), RowCounts::default());
    }
}

#[tokio::test]
async fn texts_and_times_that_the_database_does_not_have_are_refused_to_their_sender_only() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let mut early = batch(0, 4);
    early.executions[0].started_at = Timestamp::MIN;
    let mut earlier_line = batch(0, 4);
    earlier_line.audit[0].at = Timestamp::MIN;
    let writer = HistoryBatch {
        writer: "a\0b".into(),
        ..batch(0, 4)
    };
    for refused in [early, earlier_line, writer] {
        let error = store.store(&WATCHER, &refused).await.unwrap_err();
        assert!(matches!(&error, HistoryError::Rejected(_)), "{error}");
        assert_eq!(store.store(&OTHER, &batch(0, 4)).await.unwrap().ack, stored(4));
    }
    let mut late = batch(0, 4);
    late.executions[0].completed_at = Some(Timestamp::MAX);
    late.steps[0].timestamp = Timestamp::MAX;
    assert_eq!(store.store(&WATCHER, &late).await.unwrap().ack, stored(4));
}

/// A figure, not a test: `cargo test -p agentloop-history --release rows_per_second -- --ignored --nocapture`.
#[tokio::test]
#[ignore = "a figure"]
async fn rows_per_second() {
    let postgres = Postgres::start();
    let store = store(&postgres);
    let since = std::time::Instant::now();
    let mut rows = 0;
    for number in 0..100_i64 {
        let mut batch = batch(number, number + 1);
        let first = u32::try_from(number).unwrap() * 100;
        let began = at("2026-11-22T14:00:00Z");
        batch.executions = (first..first + 40).map(|number| execution(number, began)).collect();
        batch.steps = (0..120)
            .map(|place| step(first * 10 + place, first + place / 3))
            .collect();
        batch.audit = (0..40).map(|place| line(number * 40 + place, began)).collect();
        rows += batch.rows();
        store.store(&WATCHER, &batch).await.unwrap();
    }
    let seconds = since.elapsed().as_secs_f64();
    eprintln!("{rows} rows in {seconds:.2} s");
}
