//! Who gets the events, and how far each has them.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use rusqlite::params;

use super::{Outbox, OutboxError, drop_delivered};

/// How long what waits for a receiver is kept after it ceased to be one: a label that flaps, or an Agent that a controller
/// cannot read for a while, loses nothing.
pub const GRACE: SignedDuration = SignedDuration::from_mins(10);

/// Who gets the events.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventReceiver {
    /// Uid of the Agent.
    pub uid: String,
    /// Its name.
    pub name: String,
}

/// What the word of a receiver that it has events meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckOutcome {
    /// It has more than before.
    More,
    /// That was known, or is about another outbox.
    Nothing,
    /// It knows of numbers that were never given: from now on it gets events under another id of the outbox, of which it
    /// knows nothing.
    Ahead,
}

impl Outbox {
    /// Says who gets the events from now on. One that is new gets what comes from now on; what only those waited for that are
    /// gone is kept for [`GRACE`].
    pub fn set_receivers(&mut self, receivers: &[EventReceiver], now: Timestamp) -> Result<(), OutboxError> {
        let known = self.receivers()?;
        if known.iter().map(|(receiver, _)| receiver).eq(receivers) {
            return Ok(());
        }
        self.transact_on_ballast(|transaction| {
            for (old, _) in &known {
                if !receivers.iter().any(|receiver| receiver.uid == old.uid) {
                    transaction
                        .prepare_cached("UPDATE receivers SET left = ?2 WHERE uid = ?1")?
                        .execute(params![old.uid, now.as_millisecond()])?;
                }
            }
            for receiver in receivers {
                transaction
                    .prepare_cached(
                        "INSERT INTO receivers (uid, name, through)
                         VALUES (?1, ?2, (SELECT CAST(value AS INTEGER) FROM kv WHERE key = 'last'))
                         ON CONFLICT (uid) DO UPDATE SET name = ?2, left = NULL",
                    )?
                    .execute([&receiver.uid, &receiver.name])?;
            }
            Ok(())
        })
    }

    /// Forgets receivers that ceased to be some [`GRACE`] ago. How many events did not reach one of them.
    pub fn expire(&mut self, now: Timestamp) -> Result<i64, OutboxError> {
        let now = now.as_millisecond();
        let grace = i64::try_from(GRACE.as_millis()).unwrap_or(i64::MAX);
        let leaving: i64 = self
            .connection
            .prepare_cached("SELECT count(*) FROM receivers WHERE left IS NOT NULL")
            .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
            .map_err(|error| self.sqlite(&error))?;
        if leaving == 0 {
            return Ok(0);
        }
        self.transact_on_ballast(|transaction| {
            // The clock was set back: the time counts from now.
            transaction
                .prepare_cached("UPDATE receivers SET left = ?1 WHERE left > ?1")?
                .execute([now])?;
            let expired = "left IS NOT NULL AND left <= ?1";
            let lost: i64 = transaction
                .prepare_cached(&format!(
                    "SELECT count(*) FROM events JOIN receivers ON events.seq > receivers.through WHERE {expired}"
                ))?
                .query_row([now - grace], |row| row.get(0))?;
            let gone = transaction
                .prepare_cached(&format!("DELETE FROM receivers WHERE {expired}"))?
                .execute([now - grace])?;
            if gone > 0 {
                drop_delivered(transaction)?;
            }
            Ok(lost)
        })
    }

    /// Who gets the events, in the order of their uids, and through which number they have them.
    pub fn receivers(&self) -> Result<Vec<(EventReceiver, i64)>, OutboxError> {
        let read = || {
            let mut statement = self
                .connection
                .prepare_cached("SELECT uid, name, through FROM receivers WHERE left IS NULL ORDER BY uid")?;
            let rows = statement.query_map([], |row| {
                let receiver = EventReceiver {
                    uid: row.get(0)?,
                    name: row.get(1)?,
                };
                Ok((receiver, row.get(2)?))
            })?;
            rows.collect::<Result<_, _>>()
        };
        read().map_err(|error| self.sqlite(&error))
    }

    /// The id under which a receiver gets the events of this outbox.
    pub fn id_for(&self, receiver: &str) -> Result<String, OutboxError> {
        let id = self.text("outbox")?.unwrap_or_default();
        let epoch = self
            .connection
            .prepare_cached("SELECT coalesce(max(epoch), 0) FROM receivers WHERE uid = ?1")
            .and_then(|mut statement| statement.query_row([receiver], |row| row.get::<_, i64>(0)));
        match epoch.map_err(|error| self.sqlite(&error))? {
            0 => Ok(id),
            epoch => Ok(format!("{id}.{epoch}")),
        }
    }

    /// A receiver says that it has all events of the outbox with this id through this number; what all have is forgotten.
    /// An empty id, of a receiver that knows of no ids, means this outbox.
    pub fn acknowledge(&mut self, receiver: &str, outbox: &str, through: i64) -> Result<AckOutcome, OutboxError> {
        if !outbox.is_empty() && outbox != self.id_for(receiver)? {
            return Ok(AckOutcome::Nothing);
        }
        self.transact_on_ballast(|transaction| {
            let ahead = "?2 > (SELECT CAST(value AS INTEGER) FROM kv WHERE key = 'last')";
            let changed = transaction
                .prepare_cached(&format!(
                    "UPDATE receivers SET through = ?2 WHERE uid = ?1 AND through < ?2 AND NOT {ahead}"
                ))?
                .execute(params![receiver, through])?;
            if changed > 0 {
                drop_delivered(transaction)?;
                return Ok(AckOutcome::More);
            }
            if outbox.is_empty() {
                return Ok(AckOutcome::Nothing);
            }
            let renamed = transaction
                .prepare_cached(&format!(
                    "UPDATE receivers SET epoch = epoch + 1 WHERE uid = ?1 AND {ahead}"
                ))?
                .execute(params![receiver, through])?;
            Ok(if renamed > 0 {
                AckOutcome::Ahead
            } else {
                AckOutcome::Nothing
            })
        })
    }

    /// How many events each receiver still waits for, by its uid.
    pub fn pending(&self) -> Result<BTreeMap<String, i64>, OutboxError> {
        let read = || {
            let mut statement = self.connection.prepare_cached(
                "SELECT uid, (SELECT count(*) FROM events WHERE seq > through) FROM receivers WHERE left IS NULL",
            )?;
            let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect::<Result<_, _>>()
        };
        read().map_err(|error| self.sqlite(&error))
    }
}
