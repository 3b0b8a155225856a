//! The outbox: accepted events that some receiver has not acknowledged. SQLite on the pod's own volume.
//!
//! The rules' state, the source's cursor and the event of an arrival are written in one transaction: after a crash
//! either all of it is there, or nothing, and then the source delivers it again. The outbox is bounded: it keeps only
//! the newest value of each field, the newest [`MAX_NOTIFICATIONS`] notifications, and of all that as much as there is
//! room for; what it drops is counted.
//!
//! Each outbox has an id, which is sent with its events: receivers compare numbers of one outbox only. Example: a
//! volume is lost, and because the clock was set back its successor begins at lower numbers. Its id differs, so no
//! event is skipped.

mod error;
mod receivers;
mod repeat_keys;
mod schema;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::link::deliveries::{MAX_DELIVERY_EVENTS, MAX_EVENTS, MAX_NOTIFICATIONS};
use crate::sensor_pipeline::delivery::{FieldValue, SensorEvent, SensorNotification};
use crate::sensor_pipeline::source::SourceCursor;
use crate::support::disk::{self, BallastFile, DatabaseError};
pub use error::OutboxError;
pub use receivers::{AckOutcome, EventReceiver, GRACE};
pub use repeat_keys::RepeatKey;

/// Maximum number of bytes on disk, unless the volume is smaller.
pub const MAX_BYTES: i64 = 256 * 1024 * 1024;
/// How many notifications and events are dropped at once when the bytes are too many.
const STEP: i64 = 64;

const FILE: &str = "outbox.sqlite";
const LOCK_FILE: &str = "outbox.lock";

pub struct Outbox {
    connection: Connection,
    file: PathBuf,
    max_notifications: i64,
    max_events: i64,
    max_bytes: i64,
    ballast: Option<BallastFile>,
    /// Arrivals until the [`RepeatKey`]s are counted again.
    uncounted: u32,
    /// The lock; the kernel releases it when the process ends.
    _lock: File,
}

/// The state of an [`Outbox`] when it was opened.
#[derive(Clone, Debug, PartialEq)]
pub struct RestoredOutbox<S> {
    /// The rules' state; `None`: a new [`Outbox`].
    pub state: Option<S>,
    /// Where the source resumes.
    pub cursor: SourceCursor,
    /// The next [`SensorEvent`] gets a number above this one.
    pub last: i64,
}

/// The effects of an arrival.
#[derive(Clone, Copy, Debug)]
pub struct ArrivalRecord<'a, S> {
    /// The rules' state after it.
    pub state: &'a S,
    /// Where the source resumes after it; `None`: unchanged.
    pub cursor: Option<&'a SourceCursor>,
    /// The [`SensorEvent`] that it became.
    pub event: Option<&'a SensorEvent>,
    /// The [`RepeatKey`]s by which a repeat of it is recognized, and when it arrived.
    pub ids: (&'a [RepeatKey], Timestamp),
}

impl Outbox {
    /// Opens or creates the outbox of the Sensor with this uid in `dir`.
    pub fn open<S: DeserializeOwned>(
        dir: &Path,
        sensor: &str,
        now: Timestamp,
    ) -> Result<(Self, RestoredOutbox<S>), OutboxError> {
        std::fs::create_dir_all(dir).map_err(|error| OutboxError::from_io(dir, &error))?;
        let lock = lock(dir, disk::network_file_system(dir))?;
        let file = dir.join(FILE);
        let connection =
            disk::connect(&file, Duration::ZERO).map_err(|error| OutboxError::from_database(&file, &error))?;
        let mut outbox = Self {
            connection,
            file,
            max_notifications: MAX_NOTIFICATIONS,
            max_events: MAX_EVENTS,
            max_bytes: MAX_BYTES,
            // If there is no room for the ballast, the volume is nearly full: continue without it.
            ballast: BallastFile::take(dir).ok(),
            uncounted: 0,
            _lock: lock,
        };
        let restored = outbox.restore(sensor, now)?;
        Ok((outbox, restored))
    }

    fn restore<S: DeserializeOwned>(&mut self, sensor: &str, now: Timestamp) -> Result<RestoredOutbox<S>, OutboxError> {
        let found = schema::version(&self.connection).map_err(|error| self.sqlite(&error))?;
        if found > schema::VERSION {
            return Err(OutboxError::Newer {
                file: self.file.clone(),
                found,
                known: schema::VERSION,
            });
        }
        if found == 0 {
            schema::create(
                &mut self.connection,
                sensor,
                &repeat_keys::random(),
                now.as_millisecond(),
            )
            .map_err(|error| self.sqlite(&error))?;
        } else if found < schema::VERSION {
            schema::upgrade(&mut self.connection).map_err(|error| self.sqlite(&error))?;
        }
        let owner = self.text("sensor")?.unwrap_or_default();
        if owner != sensor {
            return Err(OutboxError::Foreign {
                file: self.file.clone(),
                owner,
            });
        }
        let last = self.text("last")?.and_then(|last| last.parse::<i64>().ok());
        let last = last.ok_or_else(|| self.corrupted("the last number is missing"))?;
        Ok(RestoredOutbox {
            state: self.json("state")?,
            cursor: self.json("cursor")?.unwrap_or_default(),
            // A volume that was reset to an earlier state, as from a snapshot, must not reuse numbers that were given
            // after it.
            last: last.max(now.as_millisecond()),
        })
    }

    /// Bounds the outbox to half of its volume; SQLite and the file system need the rest.
    pub fn fit_volume(&mut self, volume_bytes: i64) {
        self.max_bytes = (volume_bytes / 2).clamp(STEP * 1024, MAX_BYTES);
    }

    /// Sets the identity of the source. If it changed, its cursor and its [`RepeatKey`]s are meaningless and deleted.
    /// Returns whether it changed.
    pub fn set_source(&mut self, source: &str) -> Result<bool, OutboxError> {
        let before = self.text("source")?;
        if before.as_deref() == Some(source) {
            return Ok(false);
        }
        self.transact(|transaction| {
            put(transaction, "source", source)?;
            if before.is_some() {
                transaction.execute("DELETE FROM kv WHERE key = 'cursor'", [])?;
                transaction.execute("DELETE FROM ids", [])?;
            }
            Ok(before.is_some())
        })
    }

    /// Stores the effects of an arrival. After `Ok` all of them survive a crash of the machine. Returns the number of
    /// notifications that were dropped to make room.
    pub fn record_arrival<S: Serialize>(&mut self, taking: &ArrivalRecord<'_, S>) -> Result<i64, OutboxError> {
        let state = serde_json::to_string(taking.state).map_err(|error| self.unwritten(&error))?;
        let cursor = taking.cursor.map(serde_json::to_string).transpose();
        let cursor = cursor.map_err(|error| self.unwritten(&error))?;
        let bounds = OutboxBounds {
            notifications: self.max_notifications,
            events: self.max_events,
            bytes: self.max_bytes,
        };
        let event = taking.event;
        let counted = self.uncounted == 0;
        let gone = self.transact(|transaction| {
            put(transaction, "state", &state)?;
            if let Some(cursor) = cursor {
                put(transaction, "cursor", &cursor)?;
            }
            repeat_keys::remember(transaction, taking.ids, (bounds.bytes, counted))?;
            let Some(event) = event else {
                return Ok(0);
            };
            put(transaction, "last", &event.seq.to_string())?;
            let receivers: i64 = transaction.query_row("SELECT count(*) FROM receivers", [], |row| row.get(0))?;
            // Without receivers nothing can acknowledge the event, so it would stay forever.
            if receivers == 0 {
                return Ok(0);
            }
            insert(transaction, event)?;
            bounds.keep(transaction)
        })?;
        if !taking.ids.0.is_empty() {
            self.uncounted = self.uncounted.checked_sub(1).unwrap_or(repeat_keys::COUNTED_EVERY - 1);
        }
        Ok(gone)
    }

    /// The next events for a receiver, in order: as many as one delivery holds and as fit into `max` bytes, but at
    /// least one.
    pub fn next(&self, receiver: &str, max: usize) -> Result<Vec<SensorEvent>, OutboxError> {
        self.read_next(receiver, max).map_err(|error| self.sqlite(&error))
    }

    fn read_next(&self, receiver: &str, max: usize) -> rusqlite::Result<Vec<SensorEvent>> {
        let mut statement = self.connection.prepare_cached(
            "SELECT seq, json FROM events
             WHERE seq > (SELECT through FROM receivers WHERE uid = ?1) ORDER BY seq LIMIT ?2",
        )?;
        let mut rows = statement.query(params![receiver, index(MAX_DELIVERY_EVENTS)])?;
        let (mut events, mut bytes) = (Vec::new(), 0);
        while let Some(row) = rows.next()? {
            let event = self.event(row.get(0)?, &row.get::<_, String>(1)?)?;
            bytes += serde_json::to_string(&event).map_or(max, |json| json.len());
            if bytes > max && !events.is_empty() {
                break;
            }
            events.push(event);
        }
        Ok(events)
    }

    fn event(&self, seq: i64, json: &str) -> rusqlite::Result<SensorEvent> {
        let bare: SensorEvent = parse(json)?;
        let texts = |query| {
            let mut statement = self.connection.prepare_cached(query)?;
            let rows = statement.query_map([seq], |row| row.get::<_, String>(0))?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        };
        let updates = texts("SELECT json FROM updates WHERE seq = ?1 ORDER BY place")?;
        let notices = texts("SELECT json FROM notices WHERE seq = ?1 ORDER BY place")?;
        Ok(SensorEvent {
            updates: updates
                .iter()
                .map(|json| parse::<FieldValue>(json))
                .collect::<Result<_, _>>()?,
            notifications: notices
                .iter()
                .map(|json| parse::<SensorNotification>(json))
                .collect::<Result<_, _>>()?,
            ..bare
        })
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
        written.map_err(|error: rusqlite::Error| OutboxError::from_database(&self.file, &error))
    }

    /// Like [`Self::transact`], for work that makes room: on a full volume it releases the ballast.
    fn transact_on_ballast<T>(
        &mut self,
        work: impl Fn(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, OutboxError> {
        match self.transact(&work) {
            Err(OutboxError::Full { .. }) if self.ballast.take().is_some_and(|ballast| ballast.release()) => {
                self.transact(&work)
            }
            result => result,
        }
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
            .map_err(|_| self.corrupted(&format!("{key} cannot be parsed")))
    }

    fn sqlite(&self, error: &rusqlite::Error) -> OutboxError {
        OutboxError::from_database(&self.file, error)
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

fn insert(transaction: &Transaction<'_>, event: &SensorEvent) -> rusqlite::Result<()> {
    let bare = SensorEvent {
        updates: Vec::new(),
        notifications: Vec::new(),
        ..event.clone()
    };
    transaction
        .prepare_cached("INSERT INTO events (seq, json) VALUES (?1, ?2)")?
        .execute(params![event.seq, text(&bare)?])?;
    for (place, update) in event.updates.iter().enumerate() {
        // Only the newest value of a field matters.
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

/// Excludes a second writer. `network`: the type of the network file system that the volume is, where no lock can.
fn lock(dir: &Path, network: Option<String>) -> Result<File, OutboxError> {
    if let Some(kind) = network {
        return Err(OutboxError::OnNetwork { dir: dir.into(), kind });
    }
    let lock = disk::lock(&dir.join(LOCK_FILE)).map_err(|error| OutboxError::from_io(dir, &error))?;
    lock.ok_or_else(|| OutboxError::Locked { dir: dir.into() })
}

/// Bounds of the [`Outbox`].
#[derive(Clone, Copy)]
struct OutboxBounds {
    notifications: i64,
    events: i64,
    bytes: i64,
}

impl OutboxBounds {
    /// Drops what exceeds the bounds, oldest first. Returns the number of dropped notifications and of events to be
    /// scored.
    fn keep(self, transaction: &Transaction<'_>) -> rusqlite::Result<i64> {
        let mut dropped = drop_notices(transaction, self.notifications)?;
        dropped += drop_events(transaction, self.events)?;
        while used(transaction)? > self.bytes {
            let before = (count(transaction, "notices")?, count(transaction, "events")?);
            dropped += drop_notices(transaction, (before.0 - STEP).max(0))?;
            dropped += drop_events(transaction, (before.1 - STEP).max(0))?;
            if before == (count(transaction, "notices")?, count(transaction, "events")?) {
                break;
            }
        }
        Ok(dropped)
    }
}

/// Bytes of the file's pages in use.
fn used(transaction: &Transaction<'_>) -> rusqlite::Result<i64> {
    let number = |name| transaction.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    Ok((number("page_count")? - number("freelist_count")?) * number("page_size")?)
}

fn count(transaction: &Transaction<'_>, table: &str) -> rusqlite::Result<i64> {
    transaction
        .prepare_cached(&format!("SELECT count(*) FROM {table}"))?
        .query_row([], |row| row.get(0))
}

fn drop_notices(transaction: &Transaction<'_>, max: i64) -> rusqlite::Result<i64> {
    let dropped = transaction
        .prepare_cached(
            "DELETE FROM notices WHERE rowid IN (SELECT rowid FROM notices ORDER BY seq DESC, place DESC LIMIT -1 OFFSET ?1)",
        )?
        .execute([max])?;
    Ok(i64::try_from(dropped).unwrap_or(i64::MAX))
}

fn drop_events(transaction: &Transaction<'_>, max: i64) -> rusqlite::Result<i64> {
    // An event that still has a field's newest value stays; there are few fields.
    let beyond = "seq IN (SELECT seq FROM events ORDER BY seq DESC LIMIT -1 OFFSET ?1)
        AND seq NOT IN (SELECT seq FROM updates) AND seq NOT IN (SELECT seq FROM notices)";
    let untried: i64 = transaction
        .prepare_cached(&format!(
            "SELECT count(*) FROM events WHERE {beyond} AND json_type(json, '$.trial') IS NOT NULL"
        ))?
        .query_row([max], |row| row.get(0))?;
    transaction
        .prepare_cached(&format!("DELETE FROM events WHERE {beyond}"))?
        .execute([max])?;
    Ok(untried)
}

/// Deletes what every [`EventReceiver`] has acknowledged.
fn drop_delivered(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
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
