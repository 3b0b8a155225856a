//! The receivers of events, and the number through which each has acknowledged them.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use rusqlite::params;

use super::{Outbox, OutboxError, drop_delivered};

/// How long the pending events of a former [`EventReceiver`] are kept: a flapping label, or an Agent that the
/// controller cannot parse for a while, loses nothing.
pub const GRACE: SignedDuration = SignedDuration::from_mins(10);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventReceiver {
    pub uid: String,
    pub name: String,
}

/// The result of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckOutcome {
    /// It acknowledged more than before.
    More,
    /// Nothing new, or about another [`Outbox`].
    Nothing,
    /// It acknowledged numbers that were never sent. From now on it gets events under another [`Outbox`] id, which it
    /// does not know.
    Ahead,
}

impl Outbox {
    /// Sets the receivers. A new receiver gets the events from now on; those pending for former receivers are kept for
    /// [`GRACE`].
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

    /// Deletes receivers that ceased to be one [`GRACE`] ago. Returns how many events did not reach one of them.
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
            // The clock was set back: the grace period counts from now.
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

    /// The [`EventReceiver`]s, sorted by uid, each with the number through which it has acknowledged events.
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

    /// The outbox id under which a receiver gets events.
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

    /// Records that an [`EventReceiver`] has all events of the outbox with this id through this number, and deletes the
    /// events that all receivers have. An empty id, from a receiver that knows no ids, means this outbox.
    pub fn acknowledge(&mut self, receiver: &str, outbox: &str, through: i64) -> Result<AckOutcome, OutboxError> {
        if !outbox.is_empty() && outbox != self.id_for(receiver)? {
            return Ok(AckOutcome::Nothing);
        }
        self.transact_on_ballast(|transaction| {
            // `last` is the highest number ever given. An acknowledgement beyond it means that the receiver knows
            // another history of this outbox, for example because the volume was restored from a snapshot. Accepting it
            // would skip all events up to that number, so the receiver gets a new outbox id instead, under which it
            // starts over.
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
            // A receiver without ids cannot be given another one.
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

    /// How many events each [`EventReceiver`] has not acknowledged, by uid.
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
