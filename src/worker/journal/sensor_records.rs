//! Records of Sensors: one row each, and one for each watched file, written together with the effect of an event.

use jiff::Timestamp;
use rusqlite::{Connection, params};

use crate::sensor_pipeline::watch::{FileFingerprint, FileStat};

/// Maximum number of Sensors with a record, including those whose events the loop no longer receives. The one whose
/// record is oldest is dropped first.
pub(super) const MAX_SENSORS: i64 = 512;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SensorRecord {
    /// Uid of the Sensor.
    pub sensor: String,
    /// Number of the last event that took effect.
    pub seq: i64,
    /// State of the worker's Sensor code as JSON, opaque to the journal.
    pub memory: String,
    /// Watched files by path. When read: all of them. When written: those that have changed; `None` removes one.
    pub files: Vec<(String, Option<FileFingerprint>)>,
}

/// Writes a record over the Sensor's earlier one.
pub(super) fn put(connection: &Connection, now: Timestamp, kept: &SensorRecord) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT INTO deliveries (sensor, at, seq, memory) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (sensor) DO UPDATE SET at = ?2, seq = ?3, memory = ?4",
        )?
        .execute(params![kept.sensor, now.to_string(), kept.seq, kept.memory])?;
    let forgotten = connection
        .prepare_cached(
            "DELETE FROM deliveries WHERE (SELECT count(*) FROM deliveries) > ?1
             AND sensor = (SELECT sensor FROM deliveries WHERE sensor <> ?2 ORDER BY at, sensor LIMIT 1)",
        )?
        .execute(params![MAX_SENSORS, kept.sensor])?;
    if forgotten > 0 {
        connection
            .prepare_cached("DELETE FROM watched_files WHERE sensor NOT IN (SELECT sensor FROM deliveries)")?
            .execute([])?;
    }
    kept.files
        .iter()
        .try_for_each(|(path, print)| put_file(connection, &kept.sensor, path, print.as_ref()))
}

fn put_file(
    connection: &Connection,
    sensor: &str,
    path: &str,
    print: Option<&FileFingerprint>,
) -> rusqlite::Result<()> {
    let Some(FileFingerprint { look, hash }) = print else {
        let mut forget = connection.prepare_cached("DELETE FROM watched_files WHERE sensor = ?1 AND path = ?2")?;
        return forget.execute(params![sensor, path]).map(|_| ());
    };
    let size = i64::try_from(look.size).unwrap_or(i64::MAX);
    connection
        .prepare_cached(
            "INSERT INTO watched_files (sensor, path, size, modified, hash) VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT (sensor, path) DO UPDATE SET size = ?3, modified = ?4, hash = ?5",
        )?
        .execute(params![sensor, path, size, look.modified, hash])?;
    Ok(())
}

pub(super) fn read_all(connection: &Connection) -> rusqlite::Result<Vec<SensorRecord>> {
    let mut all: Vec<SensorRecord> = connection
        .prepare("SELECT sensor, seq, memory FROM deliveries ORDER BY sensor")?
        .query_map([], |row| {
            Ok(SensorRecord {
                sensor: row.get(0)?,
                seq: row.get(1)?,
                memory: row.get(2)?,
                files: Vec::new(),
            })
        })?
        .collect::<Result<_, _>>()?;
    for kept in &mut all {
        kept.files = files(connection, &kept.sensor)?;
    }
    Ok(all)
}

fn files(connection: &Connection, sensor: &str) -> rusqlite::Result<Vec<(String, Option<FileFingerprint>)>> {
    connection
        .prepare_cached("SELECT path, size, modified, hash FROM watched_files WHERE sensor = ?1 ORDER BY path")?
        .query_map([sensor], |row| {
            let size: i64 = row.get(1)?;
            let print = FileFingerprint {
                look: FileStat {
                    size: u64::try_from(size).unwrap_or_default(),
                    modified: row.get(2)?,
                    ..FileStat::default()
                },
                hash: row.get(3)?,
            };
            Ok((row.get(0)?, Some(print)))
        })?
        .collect()
}
