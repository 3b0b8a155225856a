//! The keys of accepted arrivals: a repeat is recognized for a day.

use std::hash::{BuildHasher, RandomState};

use jiff::{SignedDuration, Timestamp};
use ring::digest::{Context, SHA256};
use rusqlite::{OptionalExtension, Transaction, params};

use super::{Outbox, OutboxError};

/// How long [`RepeatKey`]s are kept: senders of webhooks retry for hours.
pub const KEY_LIFETIME: SignedDuration = SignedDuration::from_hours(24);
/// Maximum number of [`RepeatKey`]s that are kept, in at most a quarter of the room. At the default limit of 60 events a minute a
/// day has 86,400.
pub const MAX_IDS: i64 = 250_000;
/// The keys are counted once in this many arrivals. A surplus of that many, or twice that for a source with two keys,
/// is harmless.
pub(super) const COUNTED_EVERY: u32 = 64;
/// Approximate size of one [`RepeatKey`] on disk, including its index entry.
const ID_BYTES: i64 = 80;

/// Identifies a repeated arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepeatKey([u8; 16]);

impl RepeatKey {
    /// The key of these parts; `kind` separates keys of different meaning.
    #[must_use]
    pub fn of(kind: u8, parts: &[&[u8]]) -> Self {
        let mut hash = Context::new(&SHA256);
        hash.update(&[kind]);
        for part in parts {
            // With its length, so that no two lists of parts hash the same bytes.
            hash.update(&part.len().to_be_bytes());
            hash.update(part);
        }
        Self(hash.finish().as_ref().first_chunk().copied().unwrap_or_default())
    }
}

impl Outbox {
    /// Whether an arrival with this [`RepeatKey`] was accepted.
    pub fn knows(&self, key: &RepeatKey) -> Result<bool, OutboxError> {
        let found = self
            .connection
            .prepare_cached("SELECT 1 FROM ids WHERE key = ?1")
            .and_then(|mut statement| statement.query_row([&key.0[..]], |_| Ok(())).optional());
        found.map(|found| found.is_some()).map_err(|error| self.sqlite(&error))
    }
}

/// Stores [`RepeatKey`]s and deletes expired ones. With `counted`, also deletes the oldest beyond a quarter of the
/// room: counting scans all keys, so it is not done each time.
pub(super) fn remember(
    transaction: &Transaction<'_>,
    (keys, at): (&[RepeatKey], Timestamp),
    (available, counted): (i64, bool),
) -> rusqlite::Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    let now = at.as_millisecond();
    for key in keys {
        transaction
            .prepare_cached("INSERT INTO ids (key, at) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET at = ?2")?
            .execute(params![&key.0[..], now])?;
    }
    let kept = i64::try_from(KEY_LIFETIME.as_millis()).unwrap_or(i64::MAX);
    transaction
        .prepare_cached("DELETE FROM ids WHERE at < ?1")?
        .execute([now.saturating_sub(kept)])?;
    if !counted {
        return Ok(());
    }
    let max = MAX_IDS.min(available / 4 / ID_BYTES);
    let count: i64 = transaction
        .prepare_cached("SELECT count(*) FROM ids")?
        .query_row([], |row| row.get(0))?;
    if count > max {
        transaction
            .prepare_cached("DELETE FROM ids WHERE key IN (SELECT key FROM ids ORDER BY at LIMIT ?1)")?
            .execute([count - max])?;
    }
    Ok(())
}

/// A random id for an [`Outbox`].
pub(super) fn random() -> String {
    let half = || RandomState::new().hash_one(0_u8);
    format!("{:016x}{:016x}", half(), half())
}
