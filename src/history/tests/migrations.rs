//! Tests of migrations of tables that others use at the same time.

use std::time::Duration;

use pretty_assertions::assert_eq;
use tokio::time::timeout;

use super::postgres::Postgres;
use super::{HistoryError, WATCHER, batch, store, stored};

/// Longest time for which a migration may keep readers waiting, with room for a busy machine.
const BLOCKED: Duration = Duration::from_millis(3_500);

/// Tables of version 2 with a row.
async fn tables_of_version_2() -> Postgres {
    let postgres = Postgres::start();
    store(&postgres).store(&WATCHER, &batch(0, 4)).await.unwrap();
    postgres
        .run(
            "ALTER TABLE agent_execution_history DROP COLUMN trace_id;
             ALTER TABLE agent_execution_audit DROP COLUMN trace_id, DROP COLUMN cause; DELETE FROM agentloop_migrations WHERE version > 2",
        )
        .await;
    postgres
}

#[tokio::test]
async fn a_migration_blocked_by_a_long_reader_does_not_block_others_and_is_retried_later() {
    let postgres = tables_of_version_2().await;
    let reader = postgres.client().await;
    let hold = "BEGIN; LOCK TABLE agent_execution_history IN ACCESS SHARE MODE";
    reader.batch_execute(hold).await.unwrap();
    let migrating = store(&postgres);
    let migrating = tokio::spawn(async move { migrating.store(&WATCHER, &batch(4, 5)).await });
    let waiting = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted";
    while postgres.number(waiting).await == 0 {
        assert!(!migrating.is_finished());
    }
    let read = timeout(BLOCKED, postgres.number("SELECT count(*) FROM agent_execution_history"));
    assert_eq!(read.await.expect("readers are blocked"), 1);
    let refused = migrating.await.unwrap();
    assert!(matches!(refused, Err(HistoryError::Unavailable(_))), "{refused:?}");
    reader.batch_execute("COMMIT").await.unwrap();
    assert_eq!(
        store(&postgres).store(&WATCHER, &batch(4, 5)).await.unwrap().ack,
        stored(5)
    );
    assert_eq!(
        postgres.number("SELECT max(version) FROM agentloop_migrations").await,
        4
    );
}

/// A column without a default is added without reading a row. An index would read all of them, in a time that has no bound.
#[tokio::test]
async fn the_column_of_the_trace_is_added_without_an_index_and_the_one_that_the_page_shows_can_be_made() {
    let postgres = tables_of_version_2().await;
    store(&postgres).store(&WATCHER, &batch(4, 5)).await.unwrap();
    let indexes = "SELECT indexname FROM pg_indexes WHERE indexname LIKE '%trace%'";
    assert!(postgres.rows(indexes).await.is_empty());
    let page = include_str!("../../../docs/reference/history.md");
    let statement = page
        .lines()
        .skip_while(|line| !line.starts_with("CREATE INDEX CONCURRENTLY"));
    let statement: Vec<_> = statement.take_while(|line| *line != "```").collect();
    postgres.run(&statement.join("\n")).await;
    assert_eq!(postgres.rows(indexes).await, ["agent_execution_history_trace"]);
}
