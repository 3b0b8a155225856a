//! The record's file: how it is opened, and its tables.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};

use super::CallStoreError;
use crate::disk;

/// Version of the tables, kept in `user_version`.
const VERSION: i64 = 5;

/// Version 1.
pub(super) const TABLES_1: &str = "
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

/// What version 2 has beyond version 1: what a call holds of which leases, and the leases themselves. Amounts are JSON.
pub(super) const TABLES_2: &str = "
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
    epoch INTEGER NOT NULL      -- of the newest ledger record heard of
) WITHOUT ROWID;
CREATE TABLE previous (         -- the last request that was billed
    model TEXT PRIMARY KEY,
    billed_input INTEGER NOT NULL,
    parts BLOB NOT NULL
) WITHOUT ROWID;
";

/// What version 3 has beyond version 2: what each call was for.
const TABLES_3: &str = "
ALTER TABLE calls ADD COLUMN purpose TEXT NOT NULL DEFAULT 'Turn';
";

/// What version 4 has beyond version 3: what each answer cost in micro-dollars, where that is known.
const TABLES_4: &str = "
ALTER TABLE calls ADD COLUMN cost INTEGER;
";

/// What version 5 has beyond version 4: the last request by its server, and how far its bill may be relied on. That of
/// before is dropped: the next bound rests on bytes.
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

/// Opens the file, makes its tables when it is new, and takes it for this process alone.
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

/// The error of a file that cannot be opened, with what to do about it.
pub(super) fn cannot_open(path: &Path, source: rusqlite::Error) -> CallStoreError {
    let advice = match source.sqlite_error_code() {
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            "it is damaged: move it away, and the totals go on from the Agent's status; answers not yet in the journal are lost"
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => "another gateway has it open: only one may",
        Some(ErrorCode::DiskFull) => "the volume is full: raise spec.storage.size or make room",
        _ => "check the volume, its owner and mode",
    };
    CallStoreError::Open {
        path: path.into(),
        advice,
        source,
    }
}

fn prepared(path: &Path) -> rusqlite::Result<Connection> {
    // The gateway before this one may need a moment to be gone.
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
    let tables = [TABLES_1, TABLES_2, TABLES_3, TABLES_4, TABLES_5];
    let Some(missing) = usize::try_from(found)
        .ok()
        .and_then(|done| tables.get(done..))
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
