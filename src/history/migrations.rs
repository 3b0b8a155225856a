//! The versions of the tables: numbered files, each applied once, in order, under a lock.
//!
//! A version that has been released is never edited: a change is a further file. A file holds what takes no time on a large
//! table: its locks block all other users of the tables, and [`super::connection`] waits for it a few seconds only. An index of a
//! table with rows, or a column to fill, is left to docs/reference/history.md.

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::error::HistoryError;

/// Version, name and statements.
pub(crate) const MIGRATIONS: [(i32, &str, &str); 4] = [
    (1, "history", include_str!("migrations/0001_history.sql")),
    (2, "goal steps", include_str!("migrations/0002_goal_steps.sql")),
    (3, "traces", include_str!("migrations/0003_traces.sql")),
    (4, "gate causes", include_str!("migrations/0004_gate_causes.sql")),
];
/// Key of the advisory lock: "agentlop" in ASCII.
const LOCK: i64 = 0x6167_656e_746c_6f70;

/// Longest wait for a lock. Readers of a table queue behind a migration that waits for it.
const LOCK_TIMEOUT: &str = "2s";

const CREATE: &str = "CREATE TABLE IF NOT EXISTS agentloop_migrations (
    version integer PRIMARY KEY,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)";

/// The newest version that this agentloop knows.
pub(crate) fn known() -> i32 {
    MIGRATIONS.iter().map(|(version, ..)| *version).max().unwrap_or(0)
}

/// Brings the tables to the newest version, completely or not at all. Only reads if they have it.
pub(crate) async fn apply(client: &Client) -> Result<(), HistoryError> {
    if is_current(version(client).await?)? {
        return Ok(());
    }
    let migrated = migrate(client).await;
    if migrated.is_err() {
        // Fails if the connection is broken, which ends the transaction as well.
        let _ = client.batch_execute("ROLLBACK").await;
    }
    migrated
}

async fn migrate(client: &Client) -> Result<(), HistoryError> {
    let failed = |error| HistoryError::of_statement(&error);
    // The time limit is first: the client may be gone while the server waits.
    let begin =
        format!("BEGIN; SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'; SELECT pg_advisory_xact_lock({LOCK}); {CREATE}");
    client.batch_execute(&begin).await.map_err(failed)?;
    // Another replica may have been first.
    let found = version(client).await?;
    is_current(found)?;
    for (version, name, statements) in MIGRATIONS.iter().filter(|(version, ..)| *version > found) {
        client.batch_execute(statements).await.map_err(failed)?;
        let insert = "INSERT INTO agentloop_migrations (version, name) VALUES ($1, $2)";
        client
            .execute_typed(insert, &[(version, Type::INT4), (name, Type::TEXT)])
            .await
            .map_err(failed)?;
        tracing::info!(version, name, "migrated the tables of the history");
    }
    client.batch_execute("COMMIT").await.map_err(failed)
}

/// Whether the tables have the newest version; an error if they have a newer one.
fn is_current(found: i32) -> Result<bool, HistoryError> {
    let known = known();
    if found > known {
        return Err(HistoryError::NewerSchema { found, known });
    }
    Ok(found == known)
}

/// The version of the tables; 0: there are none.
async fn version(client: &Client) -> Result<i32, HistoryError> {
    let failed = |error| HistoryError::of_statement(&error);
    let exists = "SELECT to_regclass('agentloop_migrations') IS NOT NULL";
    let exists = client.query_typed(exists, &[]).await.map_err(failed)?;
    if !exists.first().is_some_and(|row| row.get(0)) {
        return Ok(0);
    }
    let newest = "SELECT coalesce(max(version), 0) FROM agentloop_migrations";
    let newest = client.query_typed(newest, &[]).await.map_err(failed)?;
    Ok(newest.first().map_or(0, |row| row.get(0)))
}
