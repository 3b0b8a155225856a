//! The gateway's record: every call from before it is sent until the worker's journal has its outcome, and the totals.
//!
//! One SQLite file, one transaction for each change, on disk before it counts (`synchronous=FULL`). A call is recorded
//! as open **before** it is sent, and settled together with its answer **before** the worker gets the end of it. What
//! was open when the gateway died is lost: it counts as sent, its use as unknown.
//!
//! What counts: `calls` are the requests sent, each attempt for itself; one that never left (no connection) is none. An
//! HTTP error bills nothing. Any other call whose server did not say what it used, in a believable way, counts in
//! `unknownCalls`, and its tokens in no other field.

mod schema;
mod totals;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use self::totals::Totals;
use super::failures::failure;
use crate::api::failure::{Failure, FailureKind};
use crate::api::status::Usage;
use crate::engine::CallId;
use crate::ledger::bound::Bill;

/// Name of the record's file in its directory.
pub const FILE_NAME: &str = "calls.db";
/// Ended calls that are kept, for people who ask what a call used.
const KEPT_CALLS: i64 = 1000;

const ACKED: &str = "acked";
const SCRIPTED: &str = "scripted";

/// Why the record cannot be used.
#[derive(thiserror::Error, Debug)]
pub enum StoreError {
    /// At the start.
    #[error("the gateway's record {path} cannot be opened: {source}; {advice}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What to do.
        advice: &'static str,
        /// What happened.
        source: rusqlite::Error,
    },
    /// A newer version wrote it.
    #[error("the gateway's record {path} is of version {found}, this gateway knows {known}: use the newer image again")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// Later.
    #[error("the gateway's record cannot be written: {0}")]
    Write(#[from] rusqlite::Error),
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// With an answer.
    Answered {
        /// Its `Content-Type`.
        content_type: String,
        /// Its bytes, as the server sent them.
        body: Vec<u8>,
    },
    /// Without.
    Failed(Failure),
}

/// What is known of what a call used.
#[derive(Clone, Debug, PartialEq)]
pub enum Metered {
    /// It never left.
    NotSent,
    /// It was sent and refused with an HTTP error.
    Free,
    /// It was sent; nobody said what it used.
    Unknown,
    /// The server said what it used: as read, and as said.
    Billed(Bill, String),
}

/// The outcome of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Settlement {
    /// Which call.
    pub id: CallId,
    /// How it ended.
    pub end: End,
    /// What it used.
    pub metered: Metered,
    /// Whether it took a turn of the script.
    pub scripted_turn: bool,
    /// When.
    pub at: Timestamp,
}

/// What the record holds of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// It is not over.
    Open,
    /// It ended, and the worker has not said that it has the outcome.
    Ended(End),
    /// The worker has the outcome; nothing is kept.
    Acknowledged,
}

/// The record.
pub struct Store {
    inner: Mutex<Inner>,
}

struct Inner {
    db: Connection,
    model: String,
    counts: Counts,
    /// Outcomes that could not be written yet: the disk was full. They go first as soon as it is not.
    unsettled: Vec<Settlement>,
}

/// What is kept in memory of what is on disk; both change together or not at all.
#[derive(Clone)]
struct Counts {
    totals: Totals,
    scripted_turns: u64,
    acked: Option<CallId>,
}

impl Store {
    /// Opens or makes the record. Calls that were open are lost from now on. `model` is `spec.model.name`.
    pub fn open(directory: &Path, model: &str, now: Timestamp) -> Result<Self, StoreError> {
        let path = directory.join(FILE_NAME);
        let mut db = schema::open(&path)?;
        let counts = Counts::restore(&mut db, now).map_err(|source| schema::cannot_open(&path, source))?;
        let inner = Inner {
            db,
            model: model.into(),
            counts,
            unsettled: Vec::new(),
        };
        Ok(Self {
            inner: Mutex::new(inner),
        })
    }

    /// Gives a new record the totals to go on from. A record that has them already keeps its own.
    pub fn adopt(&self, known: &Usage) -> Result<(), StoreError> {
        let mut inner = self.lock();
        if inner.counts.totals.has_base() {
            return Ok(());
        }
        inner.change(|change, counts| counts.totals.adopt(change, known))
    }

    /// What is recorded of a call.
    pub fn find(&self, id: CallId) -> Result<Option<Recorded>, StoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        if inner.counts.acked.is_some_and(|acked| id <= acked) {
            return Ok(Some(Recorded::Acknowledged));
        }
        let sql = "SELECT state, failure, content_type, answer FROM calls WHERE turn = ? AND call = ? AND attempt = ?";
        Ok(inner.db.query_row(sql, key(id), recorded).optional()?)
    }

    /// Records that a call is about to be sent.
    pub fn begin(&self, id: CallId, now: Timestamp) -> Result<(), StoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        let model = inner.model.clone();
        inner.change(|change, _| {
            change.execute(
                "INSERT INTO calls (turn, call, attempt, state, model, opened_at) VALUES (?, ?, ?, 'Open', ?, ?)",
                params![id.turn, id.call, id.attempt, model, now.to_string()],
            )?;
            Ok(())
        })
    }

    /// Records the outcome of a call, and counts it. When it cannot be written it is kept in memory, and goes first as
    /// soon as anything can be written again.
    pub fn settle(&self, settlement: Settlement) -> Result<(), StoreError> {
        let mut inner = self.lock();
        inner.unsettled.push(settlement);
        inner.settle_rest()
    }

    /// The worker has the outcomes of this call and of all before it: their answers leave.
    pub fn acknowledge(&self, id: CallId) -> Result<(), StoreError> {
        let mut inner = self.lock();
        inner.settle_rest()?;
        if inner.counts.acked.is_some_and(|acked| id <= acked) {
            return Ok(());
        }
        inner.change(|change, counts| {
            set_meta(change, ACKED, &id.to_string())?;
            change.execute(
                "UPDATE calls SET answer = NULL WHERE answer IS NOT NULL AND (turn, call, attempt) <= (?, ?, ?)",
                key(id),
            )?;
            change.execute(
                "DELETE FROM calls WHERE state <> 'Open' AND (turn, call, attempt) <= (?1, ?2, ?3)
                 AND number <= (SELECT max(number) FROM calls) - ?4",
                params![id.turn, id.call, id.attempt, KEPT_CALLS],
            )?;
            counts.acked = Some(id);
            Ok(())
        })
    }

    /// The totals. `turns` is not counted here.
    pub fn usage(&self) -> Usage {
        self.lock().counts.totals.usage()
    }

    /// Turns of the script that were taken.
    pub fn scripted_turns(&self) -> u64 {
        self.lock().counts.scripted_turns
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the file grow no further, as a full disk would; `None` lifts it.
    #[cfg(test)]
    fn fill_disk(&self, full: bool) {
        let pages = if full { 1 } else { 1_000_000 };
        self.lock().db.pragma_update(None, "max_page_count", pages).unwrap();
    }
}

impl Inner {
    fn change(
        &mut self,
        act: impl FnOnce(&Transaction<'_>, &mut Counts) -> rusqlite::Result<()>,
    ) -> Result<(), StoreError> {
        let mut counts = self.counts.clone();
        let change = self.db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        act(&change, &mut counts)?;
        change.commit()?;
        self.counts = counts;
        Ok(())
    }

    fn settle_rest(&mut self) -> Result<(), StoreError> {
        while let Some(settlement) = self.unsettled.first().cloned() {
            self.change(|change, counts| counts.settle(change, &settlement))?;
            self.unsettled.remove(0);
        }
        Ok(())
    }
}

impl Counts {
    /// Reads them, and loses the calls that were open when the last gateway ended.
    fn restore(db: &mut Connection, now: Timestamp) -> rusqlite::Result<Self> {
        let change = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut totals = Totals::load(&change)?;
        let mut open = change.prepare("SELECT model FROM calls WHERE state = 'Open'")?;
        let models: Vec<String> = open.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
        drop(open);
        for model in models {
            totals.count(&change, &model, &Metered::Unknown)?;
        }
        change.execute(
            "UPDATE calls SET state = 'Lost', ended_at = ? WHERE state = 'Open'",
            [now.to_string()],
        )?;
        let counts = Self {
            totals,
            scripted_turns: meta(&change, SCRIPTED)?.unwrap_or(0),
            acked: meta(&change, ACKED)?,
        };
        change.commit()?;
        Ok(counts)
    }

    fn settle(&mut self, change: &Transaction<'_>, settlement: &Settlement) -> rusqlite::Result<()> {
        let id = settlement.id;
        let usage = match &settlement.metered {
            Metered::Billed(_, raw) => Some(raw),
            Metered::NotSent | Metered::Free | Metered::Unknown => None,
        };
        let (state, failure, content_type, body) = match &settlement.end {
            End::Answered { content_type, body } => ("Settled", None, Some(content_type), Some(body)),
            End::Failed(failure) => ("Failed", Some(to_json(failure)?), None, None),
        };
        let model: String = change.query_row(
            "UPDATE calls SET state = ?4, ended_at = ?5, usage = ?6, failure = ?7, content_type = ?8, answer = ?9
             WHERE turn = ?1 AND call = ?2 AND attempt = ?3 RETURNING model",
            params![
                id.turn,
                id.call,
                id.attempt,
                state,
                settlement.at.to_string(),
                usage,
                failure,
                content_type,
                body
            ],
            |row| row.get(0),
        )?;
        self.totals.count(change, &model, &settlement.metered)?;
        if settlement.scripted_turn {
            self.scripted_turns += 1;
            set_meta(change, SCRIPTED, &self.scripted_turns.to_string())?;
        }
        Ok(())
    }
}

fn key(id: CallId) -> (i64, u32, u32) {
    (id.turn, id.call, id.attempt)
}

fn recorded(row: &Row<'_>) -> rusqlite::Result<Recorded> {
    let state: String = row.get("state")?;
    Ok(match state.as_str() {
        "Open" => Recorded::Open,
        "Settled" => Recorded::Ended(End::Answered {
            content_type: row.get("content_type")?,
            body: row.get("answer")?,
        }),
        "Lost" => Recorded::Ended(End::Failed(failure(
            FailureKind::Interrupted,
            "the gateway ended in the middle of this call; what the call used is unknown, no answer was kept",
        ))),
        _ => Recorded::Ended(End::Failed(from_json(&row.get::<_, String>("failure")?)?)),
    })
}

fn meta<T: FromStr>(change: &Transaction<'_>, name: &str) -> rusqlite::Result<Option<T>> {
    let value: Option<String> = change
        .query_row("SELECT value FROM meta WHERE name = ?", [name], |row| row.get(0))
        .optional()?;
    value
        .map(|value| value.parse().map_err(|_| rusqlite::Error::InvalidQuery))
        .transpose()
}

fn set_meta(change: &Transaction<'_>, name: &str, value: &str) -> rusqlite::Result<()> {
    change.execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", [name, value])?;
    Ok(())
}

fn to_json(failure: &Failure) -> rusqlite::Result<String> {
    serde_json::to_string(failure).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
}

fn from_json(text: &str) -> rusqlite::Result<Failure> {
    serde_json::from_str(text)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, error.into()))
}

#[cfg(test)]
mod tests;
