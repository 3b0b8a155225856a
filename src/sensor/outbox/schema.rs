//! The tables of the outbox.

use rusqlite::{Connection, TransactionBehavior};

/// Version of the tables, kept in SQLite's `user_version`.
pub(super) const VERSION: i64 = 1;

/// `kv`: the Sensor's uid, the last number, the rules' memory, the source's place. `events`: what some receiver does not
/// have yet, without values and notifications. `updates`: a field's newest value, at the event that gave it.
const TABLES: &str = "
CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE receivers (uid TEXT PRIMARY KEY, name TEXT NOT NULL, through INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE updates (field TEXT PRIMARY KEY, seq INTEGER NOT NULL, place INTEGER NOT NULL, json TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX updates_seq ON updates (seq);
CREATE TABLE notices (seq INTEGER NOT NULL, place INTEGER NOT NULL, json TEXT NOT NULL);
CREATE INDEX notices_seq ON notices (seq, place);
";

/// The version of the tables found; 0 for an empty file.
pub(super) fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Makes the tables for the Sensor with this uid, all of it or nothing.
pub(super) fn create(connection: &mut Connection, sensor: &str, last: i64) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(TABLES)?;
    transaction.execute(
        "INSERT INTO kv (key, value) VALUES ('sensor', ?1), ('last', ?2)",
        [sensor, &last.to_string()],
    )?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}
