//! Tests of the journal on a volume that is full or nearly so.

use super::*;

/// Adds turns whose messages are only history.
fn with_history(dir: &Path, turns: i64) -> Journal {
    let (mut journal, _) = open(dir, 1);
    for turn in 1..=turns {
        let mut read = record(RecordKind::CallAnswered, turn, vec![user(&"x".repeat(100_000))]);
        read.forget = 0..1;
        write(&mut journal, &[read]);
    }
    journal
}

/// Fills the volume, as the ballast sees it.
fn no_room_for_ballast(dir: &Path) {
    let ballast = dir.join("ballast");
    std::fs::remove_file(&ballast).unwrap();
    std::os::unix::fs::symlink("/dev/full", &ballast).unwrap();
}

const KEPT: &str = "SELECT count(*) FROM messages";

#[test]
fn a_full_volume_costs_history_before_it_stops_the_loop() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = with_history(dir.path(), 40);
    limit(&journal);
    for turn in 41..=60 {
        let large = record(RecordKind::CallAnswered, turn, vec![user(&"y".repeat(50_000))]);
        write(&mut journal, &[large]);
    }
    assert!(count(&journal, "SELECT count(*) FROM messages WHERE live = 0") < 40);
    assert_eq!(count(&journal, "SELECT count(*) FROM messages WHERE live = 1"), 20);
    assert!(dir.path().join("ballast").exists(), "it is kept for the end");
}

#[test]
fn a_start_on_a_full_volume_heals_while_there_is_history_to_drop() {
    let dir = tempfile::tempdir().unwrap();
    let journal = with_history(dir.path(), 40);
    journal.close(&owner(1)).unwrap();
    no_room_for_ballast(dir.path());
    let (journal, _) = open(dir.path(), 1);
    assert!(count(&journal, KEPT) < 40);
    drop(journal);
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), 1));
    no_room_for_ballast(dir.path());
    let (mut journal, _) = Journal::open(dir.path(), &owner(1)).unwrap();
    assert_eq!(journal.claim(&owner(1)).unwrap_err().kind(), "JournalFull");
}

#[test]
fn a_start_keeps_the_file_within_its_bounds_without_any_turn() {
    let dir = tempfile::tempdir().unwrap();
    let journal = with_history(dir.path(), 2);
    let lines = format!(
        "INSERT INTO journal (at, kind, turn, note)
         WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {})
         SELECT '2026-01-01T00:00:00Z', 'SensorUpdated', 2, '' FROM n",
        JOURNAL_LINES + 500
    );
    journal.connection.execute_batch(&lines).unwrap();
    drop(journal);
    let (journal, _) = open(dir.path(), 1);
    assert_eq!(count(&journal, "SELECT count(*) FROM journal"), JOURNAL_LINES);
}
