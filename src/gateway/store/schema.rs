//! The record's file: opening it, and its tables.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};

use super::CallStoreError;
use crate::support::disk;

/// Version of the tables, kept in `user_version`.
const VERSION: i64 = 6;

/// Version 1.
const TABLES_1: &str = "
CREATE TABLE calls (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    turn INTEGER NOT NULL,
    call INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('Open', 'Settled', 'Failed', 'Lost')),
    model TEXT NOT NULL,
    opened_at TEXT NOT NULL,
    ended_at TEXT,
    usage TEXT,                 -- as the server wrote it, so that a wrong reading can be made good
    failure TEXT,               -- JSON; no text of a prompt or an answer
    content_type TEXT,
    answer BLOB,                -- until it is acknowledged
    UNIQUE (turn, call, attempt)
);
CREATE TABLE totals (
    model TEXT PRIMARY KEY,     -- '' holds the sum of all models
    calls INTEGER NOT NULL,
    unknown_calls INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    cache_read_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
";

/// Added by version 2: what each call holds of which leases, and the leases. Amounts are JSON.
const TABLES_2: &str = "
ALTER TABLE calls ADD COLUMN reservation TEXT;
ALTER TABLE totals ADD COLUMN estimated_calls INTEGER NOT NULL DEFAULT 0;
ALTER TABLE totals ADD COLUMN cache_write_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE totals ADD COLUMN cost INTEGER NOT NULL DEFAULT 0;
CREATE TABLE leases (
    account TEXT NOT NULL,
    lease INTEGER NOT NULL,
    spent TEXT NOT NULL,
    returned TEXT NOT NULL,
    closed INTEGER NOT NULL,
    PRIMARY KEY (account, lease)
) WITHOUT ROWID;
CREATE TABLE accounts (
    account TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL      -- of the newest known ledger record
) WITHOUT ROWID;
CREATE TABLE previous (         -- the last request that was billed
    model TEXT PRIMARY KEY,
    billed_input INTEGER NOT NULL,
    parts BLOB NOT NULL
) WITHOUT ROWID;
";

/// Added by version 3: the purpose of each call.
const TABLES_3: &str = "
ALTER TABLE calls ADD COLUMN purpose TEXT NOT NULL DEFAULT 'Turn';
";

/// Added by version 4: the cost of each answer in micro-dollars, if known.
const TABLES_4: &str = "
ALTER TABLE calls ADD COLUMN cost INTEGER;
";

/// Added by version 5: the last request per server, and whether its bill can be trusted. The earlier basis is dropped,
/// so the next bound is based on bytes.
const TABLES_5: &str = "
DROP TABLE previous;
CREATE TABLE previous (         -- the last request
    server TEXT PRIMARY KEY,    -- wire format, address and name of its model
    answered TEXT NOT NULL,     -- the model that the answer named
    loose INTEGER NOT NULL,     -- bills are no measure here
    billed_input INTEGER,       -- NULL: no measure yet
    parts BLOB NOT NULL
) WITHOUT ROWID;
";

/// Added by version 6: the member of the Agent that made the call. SQLite cannot change the constraint of a table.
const TABLES_6: &str = "
CREATE TABLE calls_of_members (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    member INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    call INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('Open', 'Settled', 'Failed', 'Lost')),
    model TEXT NOT NULL,
    opened_at TEXT NOT NULL,
    ended_at TEXT,
    usage TEXT,
    failure TEXT,
    content_type TEXT,
    answer BLOB,
    reservation TEXT,
    purpose TEXT NOT NULL DEFAULT 'Turn',
    cost INTEGER,
    UNIQUE (member, turn, call, attempt)
);
INSERT INTO calls_of_members
    SELECT number, 0, turn, call, attempt, state, model, opened_at, ended_at, usage, failure, content_type, answer,
        reservation, purpose, cost
    FROM calls ORDER BY number;
DROP TABLE calls;
ALTER TABLE calls_of_members RENAME TO calls;
";

/// Step `n` upgrades version `n` to version `n + 1`; version 0 is an empty file.
pub(super) const STEPS: [&str; 6] = [TABLES_1, TABLES_2, TABLES_3, TABLES_4, TABLES_5, TABLES_6];

/// Opens the file exclusively, and creates or upgrades its tables.
pub(super) fn open(path: &Path) -> Result<Connection, CallStoreError> {
    let mut db = prepared(path).map_err(|source| cannot_open(path, source))?;
    match prepare_tables(&mut db).map_err(|source| cannot_open(path, source))? {
        VERSION => Ok(db),
        found => Err(CallStoreError::Version {
            path: path.into(),
            found,
            known: VERSION,
        }),
    }
}

/// The error for a file that cannot be opened, with the fix.
pub(in crate::gateway) fn cannot_open(path: &Path, source: rusqlite::Error) -> CallStoreError {
    let advice = match source.sqlite_error_code() {
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            "it is corrupted: move it away, then the totals continue from the Agent's status; answers not yet in the journal \
             are lost"
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            "another gateway has locked it; wait until that gateway has ended"
        }
        Some(ErrorCode::DiskFull) => "the volume is full: expand its PersistentVolumeClaim or free space on it",
        _ => "check the volume, its owner and its mode",
    };
    CallStoreError::Open {
        path: path.into(),
        advice,
        source,
    }
}

fn prepared(path: &Path) -> rusqlite::Result<Connection> {
    // The previous gateway may need a moment to exit.
    let db = disk::connect(path, Duration::from_secs(2))?;
    db.pragma_update(None, "cache_size", -512)?;
    db.pragma_update(None, "journal_size_limit", 4 * 1024 * 1024)?;
    let check: String = db.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if check == "ok" {
        return Ok(db);
    }
    let corrupt = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
    Err(rusqlite::Error::SqliteFailure(corrupt, Some(check)))
}

fn prepare_tables(db: &mut Connection) -> rusqlite::Result<i64> {
    let change = db.transaction()?;
    let found: i64 = change.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let Some(missing) = usize::try_from(found)
        .ok()
        .and_then(|done| STEPS.get(done..))
        .filter(|missing| !missing.is_empty())
    else {
        return Ok(found);
    };
    for tables in missing {
        change.execute_batch(tables)?;
    }
    change.pragma_update(None, "user_version", VERSION)?;
    change.commit()?;
    Ok(VERSION)
}
