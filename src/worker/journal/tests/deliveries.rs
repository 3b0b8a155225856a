//! Tests of the records of Sensors.

use super::super::sensor_records::MAX_SENSORS;
use super::*;
use crate::sensor_pipeline::watch::{FileFingerprint, FileStat};

fn kept(sensor: &str, seq: i64) -> SensorRecord {
    SensorRecord {
        sensor: sensor.into(),
        seq,
        memory: format!("{{\"of\":{seq}}}"),
        files: Vec::new(),
    }
}

fn print(size: u64, hash: Option<&str>) -> FileFingerprint {
    let look = FileStat {
        size,
        modified: -5,
        ..FileStat::default()
    };
    let hash = hash.map(Into::into);
    FileFingerprint { look, hash }
}

fn keep(journal: &mut Journal, second: i64, records: &[JournalRecord], kept: &SensorRecord) {
    let now = Timestamp::from_second(second).unwrap();
    let committed = journal
        .commit(now, records, &EngineSnapshot::default(), Some(kept))
        .unwrap();
    assert_eq!(committed.lines.len(), records.len());
}

#[test]
fn the_newest_record_of_a_sensor_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, restored) = open(dir.path(), 1);
    assert_eq!(restored.sensor_records, []);
    keep(
        &mut journal,
        1,
        &[record(RecordKind::SensorUpdated, 1, Vec::new())],
        &kept("b", 1),
    );
    keep(&mut journal, 2, &[], &kept("a", 7));
    keep(&mut journal, 3, &[], &kept("b", 2));
    journal.close(&owner(1)).unwrap();
    let (_, restored) = open(dir.path(), 2);
    assert_eq!(restored.sensor_records, [kept("a", 7), kept("b", 2)]);
}

#[test]
fn the_longest_silent_of_513_sensors_is_evicted_and_none_of_512() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let max = MAX_SENSORS;
    for number in 0..max {
        keep(&mut journal, number, &[], &kept(&format!("{number:04}"), 1));
    }
    keep(&mut journal, max, &[], &kept("0000", 2));
    assert_eq!(count(&journal, "SELECT count(*) FROM deliveries"), max);
    keep(&mut journal, max + 1, &[], &kept("one more", 1));
    assert_eq!(count(&journal, "SELECT count(*) FROM deliveries"), max);
    assert_eq!(
        count(&journal, "SELECT count(*) FROM deliveries WHERE sensor = '0001'"),
        0
    );
    assert_eq!(count(&journal, "SELECT seq FROM deliveries WHERE sensor = '0000'"), 2);
}

/// Undoes versions 9 and 10.
pub(super) const WITHOUT_UPLOADS: &str = "
DROP VIEW agent_goal_steps;
DROP TRIGGER execution_added;
DROP TRIGGER execution_changed;
DROP TRIGGER execution_dropped;
DROP TRIGGER step_added;
DROP TRIGGER step_changed;
DROP TRIGGER step_dropped;
DROP TRIGGER line_added;
DROP TRIGGER line_dropped;
DROP TABLE history_changes;
ALTER TABLE agent_execution_steps DROP COLUMN attempt;
ALTER TABLE agent_execution_steps DROP COLUMN duration_milliseconds;
ALTER TABLE agent_execution_steps DROP COLUMN error;
";

/// Undoes versions 6 to 8, after version 9.
const WITHOUT_MEMBERS: &str = "
DROP TABLE tasks;
DROP VIEW agent_execution_audit;
DROP INDEX messages_live;
CREATE INDEX messages_live ON messages (id) WHERE live = 1;
ALTER TABLE journal DROP COLUMN member;
ALTER TABLE messages DROP COLUMN member;
ALTER TABLE agent_execution_history DROP COLUMN member;
ALTER TABLE agent_execution_steps DROP COLUMN member;
";

#[test]
fn a_journal_of_version_3_remembers_sensors_from_now_on() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection
        .execute_batch("DROP TABLE deliveries; DROP TABLE watched_files; PRAGMA user_version = 3")
        .and_then(|()| connection.execute_batch(WITHOUT_UPLOADS))
        .and_then(|()| connection.execute_batch(WITHOUT_MEMBERS))
        .unwrap();
    connection.close().unwrap();
    let (mut journal, restored) = open(dir.path(), 2);
    assert_eq!((restored.transcript.len(), restored.sensor_records.len()), (1, 0));
    keep(&mut journal, 1, &[], &kept("a", 1));
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
}

#[test]
fn files_of_a_sensor_are_restored_as_last_reported_and_removed_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let with = |sensor: &str, seq, files: &[(&str, Option<FileFingerprint>)]| SensorRecord {
        files: files
            .iter()
            .map(|(path, print)| ((*path).into(), print.clone()))
            .collect(),
        ..kept(sensor, seq)
    };
    let first = [("x", Some(print(1, Some("h")))), ("y", Some(print(2, None)))];
    keep(&mut journal, 1, &[], &with("a", 1, &first));
    keep(&mut journal, 2, &[], &with("b", 1, &[("x", Some(print(7, Some("g"))))]));
    let second = [("x", Some(print(3, Some("i")))), ("y", None), ("z", None)];
    keep(&mut journal, 3, &[], &with("a", 2, &second));
    journal.close(&owner(1)).unwrap();
    let (mut journal, restored) = open(dir.path(), 2);
    let expected = [
        with("a", 2, &[("x", Some(print(3, Some("i"))))]),
        with("b", 1, &[("x", Some(print(7, Some("g"))))]),
    ];
    assert_eq!(restored.sensor_records, expected);
    journal.claim(&owner(2)).unwrap();
    for number in 0..MAX_SENSORS {
        keep(&mut journal, 4 + number, &[], &kept(&format!("{number:04}"), 1));
    }
    assert_eq!(count(&journal, "SELECT count(*) FROM watched_files"), 0);
}

#[test]
fn a_journal_of_version_4_remembers_files_from_now_on() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    connection
        .execute_batch("DROP TABLE watched_files; PRAGMA user_version = 4")
        .and_then(|()| connection.execute_batch(WITHOUT_UPLOADS))
        .and_then(|()| connection.execute_batch(WITHOUT_MEMBERS))
        .unwrap();
    connection.close().unwrap();
    let (journal, restored) = open(dir.path(), 2);
    assert_eq!((restored.transcript.len(), restored.sensor_records.len()), (1, 0));
    assert_eq!(count(&journal, "SELECT count(*) FROM watched_files"), 0);
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
}
