//! The tables of the outbox.

use rusqlite::{Connection, TransactionBehavior};

/// Version of the tables, kept in SQLite's `user_version`.
pub(super) const VERSION: i64 = 2;

/// `kv`: the Sensor's uid, the outbox's id, the last number, the rules' state, the source and its cursor. `receivers`:
/// who gets the events; `epoch` counts how often a receiver acknowledged numbers that were never sent, `left` is when
/// it ceased to be a receiver, in milliseconds. `events`: events that some receiver has not acknowledged, without
/// values and notifications. `updates`: a field's newest value, at the event that set it. `ids` (see `IDS`): the repeat
/// keys of accepted arrivals.
const TABLES: &str = "
CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE receivers (
    uid TEXT PRIMARY KEY, name TEXT NOT NULL, through INTEGER NOT NULL, epoch INTEGER NOT NULL DEFAULT 0, left INTEGER
) WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE updates (field TEXT PRIMARY KEY, seq INTEGER NOT NULL, place INTEGER NOT NULL, json TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX updates_seq ON updates (seq);
CREATE TABLE notices (seq INTEGER NOT NULL, place INTEGER NOT NULL, json TEXT NOT NULL);
CREATE INDEX notices_seq ON notices (seq, place);
";

/// New in version 2.
const IDS: &str = "
CREATE TABLE ids (key BLOB PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX ids_at ON ids (at);
";
/// What version 1 lacks. Its outboxes keep an empty id: a receiver that has some of their events must not get them
/// again.
const FROM_1: &str = "
ALTER TABLE receivers ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE receivers ADD COLUMN left INTEGER;
INSERT INTO kv (key, value) VALUES ('outbox', '');
";

/// The version of the schema found; 0 for an empty file.
pub(super) fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Creates the schema for the Sensor with this uid, in one transaction.
pub(super) fn create(connection: &mut Connection, sensor: &str, outbox: &str, last: i64) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(TABLES)?;
    transaction.execute_batch(IDS)?;
    transaction.execute(
        "INSERT INTO kv (key, value) VALUES ('sensor', ?1), ('outbox', ?2), ('last', ?3)",
        [sensor, outbox, &last.to_string()],
    )?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}

/// Upgrades the schema of version 1, in one transaction.
pub(super) fn upgrade(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(FROM_1)?;
    transaction.execute_batch(IDS)?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}
