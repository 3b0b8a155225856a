//! The tables of the journal.

use rusqlite::{Connection, TransactionBehavior};

/// Version of the tables, kept in SQLite's `user_version`.
pub(super) const VERSION: i64 = 1;

/// `journal`: one line per event, safe to read aloud. `messages`: the conversation; `live` rows are the transcript
/// that the engine still sends, the others are history. `kv`: the engine's snapshot and the journal's owner.
const TABLES: &str = "
CREATE TABLE journal (
    seq INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    turn INTEGER NOT NULL,
    call TEXT,
    note TEXT NOT NULL
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    turn INTEGER NOT NULL,
    live INTEGER NOT NULL,
    json TEXT NOT NULL
);
CREATE INDEX messages_live ON messages (id) WHERE live = 1;
CREATE INDEX messages_turn ON messages (turn);
CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
";

/// The version of the tables found; 0 for an empty file.
pub(super) fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Makes the tables in an empty file.
pub(super) fn create(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(TABLES)?;
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}
