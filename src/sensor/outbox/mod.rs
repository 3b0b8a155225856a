//! The outbox: events that were accepted and that some receiver does not have yet. SQLite on the pod's own claim.
//!
//! What an arrival did to the rules' memory, where its source goes on, and its event are one transaction: after a crash
//! all of that is there, or nothing, and then it is heard again. Bounded: of each field only the newest value is kept, and
//! of notifications the newest [`MOST_NOTIFICATIONS`]; what goes is counted.

mod error;
mod schema;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::disk;
use crate::link::deliveries::MOST_DELIVERY_EVENTS;
use crate::sensing::delivery::{Event, FieldValue, Notice};
use crate::sensing::source::Cursor;
pub use error::OutboxError;

/// Notifications that are kept for receivers that are away.
pub const MOST_NOTIFICATIONS: i64 = 10_000;
/// Events that are kept: those beyond have lost their values and notifications before, or have none before they are scored.
pub const MOST_EVENTS: i64 = 10_000;

const FILE: &str = "outbox.sqlite";
const LOCK_FILE: &str = "outbox.lock";

/// An open outbox.
pub struct Outbox {
    connection: Connection,
    file: PathBuf,
    most_notifications: i64,
    most_events: i64,
    /// Held until the outbox is dropped; the system frees it when the process dies.
    _lock: File,
}

/// What an outbox remembered.
#[derive(Clone, Debug, PartialEq)]
pub struct Restored<S> {
    /// The rules' memory; `None`: a new outbox.
    pub state: Option<S>,
    /// Where the source goes on.
    pub cursor: Cursor,
    /// Number of the last event; of a new outbox a number above all that one before it, on another volume, gave.
    pub last: i64,
}

/// What an arrival did.
#[derive(Clone, Copy, Debug)]
pub struct Taking<'a, S> {
    /// The rules' memory after it.
    pub state: &'a S,
    /// Where the source goes on after it; `None`: where it was to go on before.
    pub cursor: Option<&'a Cursor>,
    /// The event that it became.
    pub event: Option<&'a Event>,
}

/// Who gets the events.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Receiver {
    /// Uid of the Agent.
    pub uid: String,
    /// Its name.
    pub name: String,
}

impl Outbox {
    /// Opens the outbox of the Sensor with this uid in `dir`, or makes it.
    pub fn open<S: DeserializeOwned>(
        dir: &Path,
        sensor: &str,
        now: Timestamp,
    ) -> Result<(Self, Restored<S>), OutboxError> {
        std::fs::create_dir_all(dir).map_err(|error| OutboxError::from_io(dir, &error))?;
        let lock = disk::lock(&dir.join(LOCK_FILE)).map_err(|error| OutboxError::from_io(dir, &error))?;
        let lock = lock.ok_or_else(|| OutboxError::Locked { dir: dir.into() })?;
        let file = dir.join(FILE);
        let connection = disk::connect(&file).map_err(|error| OutboxError::from_sqlite(&file, &error))?;
        let mut outbox = Self {
            connection,
            file,
            most_notifications: MOST_NOTIFICATIONS,
            most_events: MOST_EVENTS,
            _lock: lock,
        };
        let restored = outbox.restore(sensor, now)?;
        Ok((outbox, restored))
    }

    fn restore<S: DeserializeOwned>(&mut self, sensor: &str, now: Timestamp) -> Result<Restored<S>, OutboxError> {
        let found = schema::version(&self.connection).map_err(|error| self.sqlite(&error))?;
        if found > schema::VERSION {
            return Err(OutboxError::Newer {
                file: self.file.clone(),
                found,
                known: schema::VERSION,
            });
        }
        if found == 0 {
            // Receivers pass over numbers that they know: a lost outbox must not give them out again.
            let last = now.as_millisecond();
            schema::create(&mut self.connection, sensor, last).map_err(|error| self.sqlite(&error))?;
        }
        let owner = self.text("sensor")?.unwrap_or_default();
        if owner != sensor {
            return Err(OutboxError::Foreign {
                file: self.file.clone(),
                owner,
            });
        }
        let last = self.text("last")?.and_then(|last| last.parse().ok());
        Ok(Restored {
            state: self.json("state")?,
            cursor: self.json("cursor")?.unwrap_or_default(),
            last: last.ok_or_else(|| self.corrupted("its last number is missing"))?,
        })
    }

    /// Keeps what an arrival did. When it returns `Ok`, all of it survives a crash of the machine. The number of
    /// notifications that had to go for it.
    pub fn take<S: Serialize>(&mut self, taking: &Taking<'_, S>) -> Result<i64, OutboxError> {
        let state = serde_json::to_string(taking.state).map_err(|error| self.unwritten(&error))?;
        let cursor = taking.cursor.map(serde_json::to_string).transpose();
        let cursor = cursor.map_err(|error| self.unwritten(&error))?;
        let bounds = (self.most_notifications, self.most_events);
        let event = taking.event;
        self.transact(|transaction| {
            put(transaction, "state", &state)?;
            if let Some(cursor) = cursor {
                put(transaction, "cursor", &cursor)?;
            }
            let Some(event) = event else {
                return Ok(0);
            };
            put(transaction, "last", &event.seq.to_string())?;
            let receivers: i64 = transaction.query_row("SELECT count(*) FROM receivers", [], |row| row.get(0))?;
            if receivers == 0 {
                return Ok(0);
            }
            insert(transaction, event)?;
            bound(transaction, bounds)
        })
    }

    /// Says who gets the events from now on. One that is new gets what comes from now on; what only those that are gone
    /// waited for is forgotten.
    pub fn receive(&mut self, receivers: &[Receiver]) -> Result<(), OutboxError> {
        let known = self.receivers()?;
        if known.iter().map(|(receiver, _)| receiver).eq(receivers) {
            return Ok(());
        }
        self.transact(|transaction| {
            for (old, _) in &known {
                if !receivers.iter().any(|receiver| receiver.uid == old.uid) {
                    transaction.execute("DELETE FROM receivers WHERE uid = ?1", [&old.uid])?;
                }
            }
            for receiver in receivers {
                transaction
                    .prepare_cached(
                        "INSERT INTO receivers (uid, name, through)
                         VALUES (?1, ?2, (SELECT CAST(value AS INTEGER) FROM kv WHERE key = 'last'))
                         ON CONFLICT (uid) DO UPDATE SET name = ?2",
                    )?
                    .execute([&receiver.uid, &receiver.name])?;
            }
            forget(transaction)
        })
    }

    /// Who gets the events, in the order of their uids, and through which number they have them.
    pub fn receivers(&self) -> Result<Vec<(Receiver, i64)>, OutboxError> {
        let read = || {
            let mut statement = self
                .connection
                .prepare_cached("SELECT uid, name, through FROM receivers ORDER BY uid")?;
            let rows = statement.query_map([], |row| {
                let receiver = Receiver {
                    uid: row.get(0)?,
                    name: row.get(1)?,
                };
                Ok((receiver, row.get(2)?))
            })?;
            rows.collect::<Result<_, _>>()
        };
        read().map_err(|error| self.sqlite(&error))
    }

    /// The next events for a receiver, in order: as many as it takes at once and as have `most` bytes in all, but one at
    /// least.
    pub fn next(&self, receiver: &str, most: usize) -> Result<Vec<Event>, OutboxError> {
        self.read_next(receiver, most).map_err(|error| self.sqlite(&error))
    }

    fn read_next(&self, receiver: &str, most: usize) -> rusqlite::Result<Vec<Event>> {
        let mut statement = self.connection.prepare_cached(
            "SELECT seq, json FROM events
             WHERE seq > (SELECT through FROM receivers WHERE uid = ?1) ORDER BY seq LIMIT ?2",
        )?;
        let mut rows = statement.query(params![receiver, index(MOST_DELIVERY_EVENTS)])?;
        let (mut events, mut bytes) = (Vec::new(), 0);
        while let Some(row) = rows.next()? {
            let event = self.event(row.get(0)?, &row.get::<_, String>(1)?)?;
            bytes += serde_json::to_string(&event).map_or(most, |json| json.len());
            if bytes > most && !events.is_empty() {
                break;
            }
            events.push(event);
        }
        Ok(events)
    }

    fn event(&self, seq: i64, json: &str) -> rusqlite::Result<Event> {
        let bare: Event = parse(json)?;
        let texts = |query| {
            let mut statement = self.connection.prepare_cached(query)?;
            let rows = statement.query_map([seq], |row| row.get::<_, String>(0))?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        };
        let updates = texts("SELECT json FROM updates WHERE seq = ?1 ORDER BY place")?;
        let notices = texts("SELECT json FROM notices WHERE seq = ?1 ORDER BY place")?;
        Ok(Event {
            updates: updates
                .iter()
                .map(|json| parse::<FieldValue>(json))
                .collect::<Result<_, _>>()?,
            notifications: notices
                .iter()
                .map(|json| parse::<Notice>(json))
                .collect::<Result<_, _>>()?,
            ..bare
        })
    }

    /// A receiver has all events through this number; what all have is forgotten. A repeat, or what a receiver cannot
    /// have, changes nothing.
    pub fn acknowledge(&mut self, receiver: &str, through: i64) -> Result<(), OutboxError> {
        self.transact(|transaction| {
            let changed = transaction
                .prepare_cached(
                    "UPDATE receivers SET through = ?2
                     WHERE uid = ?1 AND through < ?2
                     AND ?2 <= (SELECT CAST(value AS INTEGER) FROM kv WHERE key = 'last')",
                )?
                .execute(params![receiver, through])?;
            if changed > 0 { forget(transaction) } else { Ok(()) }
        })
    }

    /// How many events each receiver still waits for, by its uid.
    pub fn pending(&self) -> Result<BTreeMap<String, i64>, OutboxError> {
        let read = || {
            let mut statement = self
                .connection
                .prepare_cached("SELECT uid, (SELECT count(*) FROM events WHERE seq > through) FROM receivers")?;
            let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect::<Result<_, _>>()
        };
        read().map_err(|error| self.sqlite(&error))
    }

    fn transact<T>(&mut self, work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>) -> Result<T, OutboxError> {
        let write = || {
            let transaction = self
                .connection
                .transaction_with_behavior(TransactionBehavior::Immediate)?;
            let done = work(&transaction)?;
            transaction.commit()?;
            Ok(done)
        };
        let written = write();
        written.map_err(|error: rusqlite::Error| OutboxError::from_sqlite(&self.file, &error))
    }

    fn text(&self, key: &str) -> Result<Option<String>, OutboxError> {
        self.connection
            .query_row("SELECT value FROM kv WHERE key = ?1", [key], |row| row.get(0))
            .optional()
            .map_err(|error| self.sqlite(&error))
    }

    fn json<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, OutboxError> {
        let Some(text) = self.text(key)? else {
            return Ok(None);
        };
        let value = serde_json::from_str(&text);
        value
            .map(Some)
            .map_err(|_| self.corrupted(&format!("its {key} cannot be read")))
    }

    fn sqlite(&self, error: &rusqlite::Error) -> OutboxError {
        OutboxError::from_sqlite(&self.file, error)
    }

    fn corrupted(&self, detail: &str) -> OutboxError {
        OutboxError::Corrupted {
            file: self.file.clone(),
            detail: detail.into(),
        }
    }

    fn unwritten(&self, error: &serde_json::Error) -> OutboxError {
        OutboxError::Failed {
            dir: self.file.parent().unwrap_or(&self.file).into(),
            detail: format!("{:?}", error.classify()),
        }
    }
}

fn put(transaction: &Transaction<'_>, key: &str, value: &str) -> rusqlite::Result<()> {
    transaction
        .prepare_cached("INSERT INTO kv (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2")?
        .execute([key, value])?;
    Ok(())
}

fn insert(transaction: &Transaction<'_>, event: &Event) -> rusqlite::Result<()> {
    let bare = Event {
        updates: Vec::new(),
        notifications: Vec::new(),
        ..event.clone()
    };
    transaction
        .prepare_cached("INSERT INTO events (seq, json) VALUES (?1, ?2)")?
        .execute(params![event.seq, text(&bare)?])?;
    for (place, update) in event.updates.iter().enumerate() {
        // The newest value is all that a field is.
        transaction
            .prepare_cached("INSERT OR REPLACE INTO updates (field, seq, place, json) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![update.field, event.seq, index(place), text(update)?])?;
    }
    for (place, notice) in event.notifications.iter().enumerate() {
        transaction
            .prepare_cached("INSERT INTO notices (seq, place, json) VALUES (?1, ?2, ?3)")?
            .execute(params![event.seq, index(place), text(notice)?])?;
    }
    Ok(())
}

/// Drops what is beyond the bounds, oldest first. How many notifications that were.
fn bound(transaction: &Transaction<'_>, (notifications, events): (i64, i64)) -> rusqlite::Result<i64> {
    let dropped = transaction
        .prepare_cached(
            "DELETE FROM notices WHERE rowid IN (SELECT rowid FROM notices ORDER BY seq DESC, place DESC LIMIT -1 OFFSET ?1)",
        )?
        .execute([notifications])?;
    // An event that still has a field's newest value stays; there are few fields.
    let beyond = "seq IN (SELECT seq FROM events ORDER BY seq DESC LIMIT -1 OFFSET ?1)
        AND seq NOT IN (SELECT seq FROM updates) AND seq NOT IN (SELECT seq FROM notices)";
    let untried: i64 = transaction
        .prepare_cached(&format!(
            "SELECT count(*) FROM events WHERE {beyond} AND json_type(json, '$.trial') IS NOT NULL"
        ))?
        .query_row([events], |row| row.get(0))?;
    transaction
        .prepare_cached(&format!("DELETE FROM events WHERE {beyond}"))?
        .execute([events])?;
    Ok(untried.saturating_add(i64::try_from(dropped).unwrap_or(i64::MAX)))
}

/// Drops what every receiver has.
fn forget(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    for table in ["events", "updates", "notices"] {
        transaction
            .prepare_cached(&format!(
                "DELETE FROM {table} WHERE NOT EXISTS (SELECT 1 FROM receivers WHERE through < {table}.seq)"
            ))?
            .execute([])?;
    }
    Ok(())
}

fn index(place: usize) -> i64 {
    i64::try_from(place).unwrap_or(i64::MAX)
}

fn text(value: &impl Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

fn parse<T: DeserializeOwned>(json: &str) -> rusqlite::Result<T> {
    serde_json::from_str(json)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error)))
}

#[cfg(test)]
mod tests;
