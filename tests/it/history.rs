//! Tests of histories in Postgres: a real worker and gateway, the controller's link over TLS, and a real database.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::controller::history::{HistorySettings, delete_old_rows};
use agentloop::controller::runtime::WallClock;
use agentloop::history::HistoryStore;
use agentloop::link::client::LinkError;
use agentloop::link::history::{AuditRow, ExecutionRow, HistoryAck, HistoryBatch, MAX_EXECUTION_STEPS};
use agentloop::link::messages::{Directives, LoopTotals, RefusalCode};
use agentloop::telemetry::http::{self, HttpLimits, SCRAPE_WAIT};
use agentloop::telemetry::metrics::Metrics;
use jiff::{SignedDuration, Timestamp};
use pretty_assertions::assert_eq;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::events::harness::{EPOCH, EventsHarness, WAIT_TIMEOUT, agent_key, pod_of};
use crate::support::clusters::has;
use crate::support::dashboards::{BoardQuery, EVERYTHING, queries};
use crate::support::postgres::Postgres;
use crate::support::prometheus::Prometheus;

const EXECUTIONS: &str = "SELECT id, turn, total_steps, coalesce(final_status, 'open') FROM agent_execution_history";
const STEPS: &str = "SELECT id, execution_id, step_number, call FROM agent_execution_steps";

fn store(postgres: &Postgres) -> Arc<HistoryStore> {
    Arc::new(HistoryStore::new(postgres.connection_file(), None).unwrap())
}

/// Waits until a query has a number that is large enough.
async fn until(postgres: &Postgres, sql: &str, at_least: i64) -> i64 {
    let deadline = Instant::now() + 2 * WAIT_TIMEOUT;
    loop {
        let number = postgres.number(sql).await;
        if number >= at_least {
            return number;
        }
        assert!(Instant::now() < deadline, "not in time: {sql}: {number} of {at_least}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Number of the last turn that the worker has reported.
fn turn(harness: &EventsHarness) -> i64 {
    let report = harness.loops.last_report(&agent_key("x"), &pod_of("x").uid);
    report.and_then(|last| last.report.loop_).map_or(0, |said| said.turn)
}

/// Rows of a query on the journal, each as its columns with `|` between them, sorted.
fn rows_of_journal(harness: &EventsHarness, sql: &str) -> Vec<String> {
    let journal = rusqlite::Connection::open(harness.path("journal").join("journal.sqlite")).unwrap();
    let mut select = journal.prepare(sql).unwrap();
    let columns = select.column_count();
    let rows = select.query_map([], |row| {
        let columns = (0..columns).map(|column| {
            let value = row.get_ref(column)?;
            let number = value.as_i64().map(|number| number.to_string());
            Ok(number.unwrap_or_else(|_| value.as_str().unwrap().to_owned()))
        });
        columns.collect::<rusqlite::Result<Vec<_>>>()
    });
    let mut rows: Vec<_> = rows.unwrap().map(|row| row.unwrap().join("|")).collect();
    rows.sort();
    rows
}

/// The rows of Agent `x` in the database, sorted.
async fn rows_of_x(postgres: &Postgres, sql: &str) -> Vec<String> {
    let mut rows = postgres.rows(&format!("{sql} WHERE agent_id = 'uid-of-x'")).await;
    rows.sort();
    rows
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
}

fn count(harness: &EventsHarness, series: &str) -> u64 {
    let text = harness.metrics.text();
    let line = text.lines().find_map(|line| line.strip_prefix(series));
    line.unwrap_or_else(|| panic!("{series}\n{text}"))
        .trim()
        .parse()
        .unwrap()
}

#[tokio::test]
async fn the_loop_continues_without_the_database_and_every_row_is_stored_once_afterwards() {
    outage(Duration::ZERO).await;
}

#[tokio::test]
#[ignore = "takes more than a minute: `make test` runs it, `make check` does not"]
async fn a_minute_without_the_database_is_made_up_for() {
    outage(Duration::from_mins(1)).await;
}

/// The database crashes in the middle of a run and stays unavailable for this long, and at least for 40 turns.
async fn outage(at_least: Duration) {
    let mut postgres = Postgres::start();
    let mut harness = EventsHarness::with_history(Some(store(&postgres))).await;
    harness.start_pod();
    assert!(harness.directives().history);
    // Tables come with the first batch.
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while count(&harness, r#"agentloop_history_batches_total{result="stored"}"#) == 0 {
        assert!(Instant::now() < deadline, "{}", harness.output("worker"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    postgres.crash();
    let (before, since) = (turn(&harness), Instant::now());
    let deadline = since + at_least + 2 * WAIT_TIMEOUT;
    let unavailable = r#"agentloop_history_batches_total{result="unavailable"}"#;
    while turn(&harness) < before + 40 || count(&harness, unavailable) < 2 || since.elapsed() < at_least {
        assert!(Instant::now() < deadline, "{} after {before}", turn(&harness));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    postgres.up();
    let after = turn(&harness);
    until(
        &postgres,
        "SELECT coalesce(max(turn), 0) FROM agent_execution_history",
        after,
    )
    .await;
    harness.terminate_worker().await;
    harness.worker_ended().await;
    assert_eq!(
        rows_of_x(&postgres, EXECUTIONS).await,
        rows_of_journal(&harness, EXECUTIONS)
    );
    assert_eq!(rows_of_x(&postgres, STEPS).await, rows_of_journal(&harness, STEPS));
    assert_eq!(
        postgres
            .number("SELECT count(DISTINCT agent_id) FROM agent_execution_history")
            .await,
        1
    );
    let timed = "SELECT count(*) FROM agent_execution_steps WHERE duration_milliseconds >= 20 AND attempt = 1";
    assert_eq!(
        postgres.number(timed).await,
        postgres.number("SELECT count(*) FROM agent_execution_steps").await
    );
    let told = harness.output("worker");
    assert_eq!(told.matches("failed to upload the history").count(), 1, "{told}");
}

#[tokio::test]
async fn a_pod_that_is_killed_and_a_volume_from_a_backup_lead_to_no_double_and_no_gap() {
    let postgres = Postgres::start();
    let mut harness = EventsHarness::with_history(Some(store(&postgres))).await;
    harness.start_pod();
    let stored = r#"agentloop_history_batches_total{result="stored"}"#;
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while count(&harness, stored) == 0 {
        assert!(Instant::now() < deadline, "{}", harness.output("worker"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    harness.kill_pod().await;
    for folder in ["journal", "record"] {
        copy(&harness.path(folder), &harness.path(&format!("{folder}-backup")));
    }
    harness.start_pod();
    let newest = "SELECT max(turn) FROM agent_execution_history";
    let lost = until(&postgres, newest, postgres.number(newest).await + 20).await;
    let lines = postgres.number("SELECT count(*) FROM agent_execution_audit").await;
    harness.kill_pod().await;
    for folder in ["journal", "record"] {
        copy(&harness.path(&format!("{folder}-backup")), &harness.path(folder));
    }
    harness.start_pod();
    until(&postgres, newest, lost + 20).await;
    harness.terminate_worker().await;
    harness.worker_ended().await;
    assert!(count(&harness, r#"agentloop_history_batches_total{result="restarted"}"#) > 0);
    // Each row of the journal as it is there, and of the lost time what is not in it.
    let executions = rows_of_x(&postgres, EXECUTIONS).await;
    for row in rows_of_journal(&harness, EXECUTIONS) {
        assert!(executions.contains(&row), "{row}");
    }
    let turns =
        "SELECT count(*) FROM (SELECT turn FROM agent_execution_history GROUP BY turn HAVING count(*) > 1) AS doubles";
    assert_eq!(postgres.number(turns).await, 0);
    let steps = rows_of_x(&postgres, STEPS).await;
    for row in rows_of_journal(&harness, STEPS) {
        assert!(steps.contains(&row), "{row}");
    }
    let in_journal = rows_of_journal(&harness, "SELECT seq FROM agent_execution_audit").len();
    let all = postgres.number("SELECT count(*) FROM agent_execution_audit").await;
    assert!(all >= lines.max(i64::try_from(in_journal).unwrap()), "{all}");
}

fn row(id: u32, turn: i64, began: Timestamp) -> ExecutionRow {
    serde_json::from_value(json!({
        "id": format!("00000000-0000-8000-8000-{id:012}"), "taskId": "Turn", "turn": turn, "member": 0,
        "startedAt": began.to_string(), "totalSteps": 0,
    }))
    .unwrap()
}

fn line(seq: i64, at: Timestamp) -> AuditRow {
    let line = json!({"seq": seq, "at": at.to_string(), "turn": 1, "member": 0, "note": ""});
    serde_json::from_value(line).unwrap()
}

fn batch(executions: Vec<ExecutionRow>) -> HistoryBatch {
    HistoryBatch {
        epoch: EPOCH,
        writer: "w".into(),
        last: 1,
        executions,
        ..HistoryBatch::default()
    }
}

fn refused(answer: Result<HistoryAck, LinkError>) -> (RefusalCode, String) {
    let error = answer.unwrap_err();
    let LinkError::Refused(refusal) = error else {
        panic!("{error}")
    };
    (refusal.code, refusal.message)
}

#[tokio::test]
async fn a_pod_writes_rows_of_its_own_agent_and_of_no_other() {
    let postgres = Postgres::start();
    let harness = EventsHarness::with_history(Some(store(&postgres))).await;
    let now = Timestamp::now();
    let (x, z) = (harness.link_client(), harness.link_client_in("b", "z"));
    x.history(&batch(vec![row(1, 1, now)])).await.unwrap();
    // The same ids, as another tenant's worker may send them.
    let ack = z.history(&batch(vec![row(1, 2, now)])).await.unwrap();
    assert_eq!(
        ack,
        HistoryAck {
            stored: 1,
            restart: false
        }
    );
    let rows = "SELECT agent_id, namespace, agent_name, turn FROM agent_execution_history ORDER BY 1";
    let mut all = vec!["uid-of-x|a|x|1", "uid-of-z|b|z|2"];
    assert_eq!(postgres.rows(rows).await, all);
    // Another pod than the expected one, an Agent without a pod, and none.
    let older = HistoryBatch {
        epoch: EPOCH - 1,
        ..batch(vec![row(2, 2, now)])
    };
    assert_eq!(refused(x.history(&older).await).0, RefusalCode::Fenced);
    let y = harness.link_client_of("y");
    assert_eq!(refused(y.history(&older).await).0, RefusalCode::NotLeading);
    // The pod of an earlier Agent of the same name, which the reconciler has not looked at yet.
    harness.loops.expect_pod(
        (&agent_key("y"), "uid-of-earlier-y"),
        pod_of("y"),
        LoopTotals::default(),
        Directives::default(),
    );
    y.history(&batch(vec![row(1, 3, now)])).await.unwrap();
    let earlier = postgres.rows("SELECT agent_id FROM agent_execution_history WHERE turn = 3");
    assert_eq!(earlier.await, ["uid-of-earlier-y"]);
    let nobody = harness.link_client_in("b", "x");
    assert_eq!(refused(nobody.history(&older).await).0, RefusalCode::Unknown);
    // Rows that no database accepts are named by their code.
    let mut malformed = row(3, 3, now);
    malformed.id = "canary".into();
    let next = HistoryBatch {
        after: 1,
        last: 2,
        ..batch(vec![malformed])
    };
    let (code, message) = refused(x.history(&next).await);
    assert_eq!(
        (code, message.contains("22P02"), message.contains("canary")),
        (RefusalCode::Malformed, true, false)
    );
    assert_eq!(
        count(&harness, r#"agentloop_history_batches_total{result="refused"}"#),
        1
    );
    assert_eq!(
        count(&harness, r#"agentloop_history_rows_total{record="execution"}"#),
        3
    );
    all.insert(0, "uid-of-earlier-y|a|y|3");
    assert_eq!(postgres.rows(rows).await, all);
}

#[tokio::test]
async fn an_execution_has_no_more_steps_than_one_can_have() {
    let postgres = Postgres::start();
    let harness = EventsHarness::with_history(Some(store(&postgres))).await;
    let client = harness.link_client();
    let of = |total_steps| {
        let row = row(1, 1, Timestamp::now());
        batch(vec![ExecutionRow { total_steps, ..row }])
    };
    for wrong in [-1, MAX_EXECUTION_STEPS + 1, i64::MAX] {
        let (code, message) = refused(client.history(&of(wrong)).await);
        assert_eq!(code, RefusalCode::Malformed, "{wrong}: {message}");
    }
    assert_eq!(client.history(&of(MAX_EXECUTION_STEPS)).await.unwrap().stored, 1);
}

#[tokio::test]
async fn without_a_database_nothing_is_uploaded() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    assert!(!harness.directives().history);
    let answer = harness.link_client().history(&batch(vec![])).await;
    assert_eq!(
        refused(answer),
        (RefusalCode::Away, "this controller stores no histories".into())
    );
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while turn(&harness) < 20 {
        assert!(Instant::now() < deadline, "{}", harness.output("worker"));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(
        !harness.output("worker").contains("history"),
        "{}",
        harness.output("worker")
    );
}

#[tokio::test]
async fn rows_are_deleted_when_they_are_as_old_as_their_retention_and_not_a_day_earlier() {
    let postgres = Postgres::start();
    let harness = EventsHarness::with_history(Some(store(&postgres))).await;
    let now: Timestamp = "2026-11-22T14:00:00Z".parse().unwrap();
    let ago = |days: i64| now - SignedDuration::from_hours(24 * days);
    let second = SignedDuration::from_secs(1);
    let mut old = batch(vec![
        row(1, 1, ago(30) - second),
        row(2, 2, ago(30)),
        row(3, 3, ago(29)),
    ]);
    old.audit = vec![line(1, ago(30) - second), line(2, ago(29))];
    harness.link_client().history(&old).await.unwrap();
    let clock: WallClock = Arc::new(move || now);
    let metrics = Arc::new(Metrics::new().unwrap());
    let run = async |retention_days: u32| {
        let settings = HistorySettings {
            store: store(&postgres),
            retention_days,
        };
        let (every, stop) = (Duration::from_millis(5), CancellationToken::new());
        let task = tokio::spawn(delete_old_rows(
            settings,
            (every, clock.clone()),
            metrics.clone(),
            stop.clone(),
        ));
        (task, stop)
    };
    let (task, stop) = run(0).await;
    stop.cancel();
    task.await.unwrap();
    let turns = "SELECT turn FROM agent_execution_history ORDER BY 1";
    assert_eq!(postgres.rows(turns).await, ["1", "2", "3"]);
    let (task, stop) = run(30).await;
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while postgres.rows(turns).await != ["2", "3"] {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.cancel();
    task.await.unwrap();
    assert_eq!(postgres.rows("SELECT seq FROM agent_execution_audit").await, ["2"]);
    let deleted = r#"agentloop_history_deleted_rows_total{record="execution"} 1"#;
    assert!(metrics.text().contains(deleted));
}

/// The panel of the dashboards that needs a database; the others have data in the day of the alerts.
#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_shows_when_the_database_last_answered() {
    if !has("prometheus") {
        return;
    }
    let postgres = Postgres::start();
    let mut harness = EventsHarness::with_history(Some(store(&postgres))).await;
    let began = Timestamp::now();
    harness.start_pod();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let router = http::metrics(harness.metrics.clone(), SCRAPE_WAIT);
    let endpoint = tokio::spawn(http::serve(listener, router, HttpLimits::default()));
    tokio::task::block_in_place(|| {
        let scrapes = json!([{"job_name": "agentloop", "static_configs": [{"targets": [address]}]}]);
        let prometheus = Prometheus::start(&scrapes);
        let panel = |query: &BoardQuery| query.place == "agentloop / Operator: Database last answered A";
        let query = queries(&EVERYTHING).into_iter().find(panel).unwrap().query;
        prometheus.until_some("the panel", &query);
        let shown: f64 = prometheus.until_value(&query).parse().unwrap();
        // The metric has seconds, the panel milliseconds.
        #[allow(clippy::cast_possible_truncation)]
        let answered = Timestamp::from_millisecond(shown as i64).unwrap();
        let earliest = began - SignedDuration::from_secs(1);
        assert!(
            (earliest..=Timestamp::now()).contains(&answered),
            "{answered}, but the pod started at {began}"
        );
    });
    endpoint.abort();
    harness.terminate_worker().await;
    harness.worker_ended().await;
}
