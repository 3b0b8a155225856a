//! What is remembered of Sensors: one row each, written with what an event of it did.

use jiff::Timestamp;
use rusqlite::{Connection, params};

/// Sensors that are remembered, those included that a loop does not hear any more; the longest silent one is forgotten.
pub(super) const MOST_SENSORS: i64 = 512;

/// What is remembered of a Sensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its uid.
    pub sensor: String,
    /// Number of the last event that took effect.
    pub seq: i64,
    /// What else its owner wants to know again; the journal does not read it.
    pub memory: String,
}

/// Remembers; what was remembered of the same Sensor goes.
pub(super) fn put(connection: &Connection, now: Timestamp, kept: &Kept) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT INTO deliveries (sensor, at, seq, memory) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (sensor) DO UPDATE SET at = ?2, seq = ?3, memory = ?4",
        )?
        .execute(params![kept.sensor, now.to_string(), kept.seq, kept.memory])?;
    connection
        .prepare_cached(
            "DELETE FROM deliveries WHERE (SELECT count(*) FROM deliveries) > ?1
             AND sensor = (SELECT sensor FROM deliveries WHERE sensor <> ?2 ORDER BY at, sensor LIMIT 1)",
        )?
        .execute(params![MOST_SENSORS, kept.sensor])?;
    Ok(())
}

/// All that is remembered.
pub(super) fn all(connection: &Connection) -> rusqlite::Result<Vec<Kept>> {
    connection
        .prepare("SELECT sensor, seq, memory FROM deliveries ORDER BY sensor")?
        .query_map([], |row| {
            Ok(Kept {
                sensor: row.get(0)?,
                seq: row.get(1)?,
                memory: row.get(2)?,
            })
        })?
        .collect()
}
