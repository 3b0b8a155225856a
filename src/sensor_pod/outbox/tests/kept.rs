//! Tests of ids, numbers and room: what an outbox keeps, for how long, and for whom.

use pretty_assertions::assert_eq;

use super::*;

#[test]
fn an_acknowledgement_of_unknown_numbers_changes_the_id_for_that_receiver_alone() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a"), receiver("b")], now()).unwrap();
    take(&mut outbox, &event(1, "x"));
    let id = outbox.id_for("uid-a").unwrap();
    assert_eq!(id.len(), 32);
    assert_eq!(
        outbox.acknowledge("uid-a", "another", i64::MAX).unwrap(),
        AckOutcome::Nothing
    );
    assert_eq!(outbox.acknowledge("uid-a", &id, i64::MAX).unwrap(), AckOutcome::Ahead);
    let next = outbox.id_for("uid-a").unwrap();
    assert_eq!(
        (next.as_str(), outbox.id_for("uid-b").unwrap()),
        (&*format!("{id}.1"), id.clone())
    );
    assert_eq!(
        texts(&outbox.next("uid-a", ALL).unwrap()),
        ["1"],
        "it gets the events that it skipped"
    );
    assert_eq!(
        outbox.acknowledge("uid-a", &id, START + 1).unwrap(),
        AckOutcome::Nothing,
        "a late acknowledgement under the old id"
    );
    assert_eq!(outbox.acknowledge("uid-a", &next, START + 1).unwrap(), AckOutcome::More);
    assert_eq!(
        outbox.acknowledge("uid-a", &next, START + 1).unwrap(),
        AckOutcome::Nothing
    );
    drop(outbox);
    assert_eq!(open(dir.path()).0.id_for("uid-a").unwrap(), next);
}

#[test]
fn a_restored_outbox_reuses_no_number_and_a_lost_one_has_another_id() {
    let (first, second) = (dir(), dir());
    let (mut outbox, _) = open(first.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    let before = volume(&files(first.path()));
    take(&mut outbox, &event(1, "x"));
    let later = Timestamp::from_millisecond(START + 1_000).unwrap();
    let (back, restored) = Outbox::open::<i64>(before.path(), SENSOR, later).unwrap();
    assert_eq!(restored.last, START + 1_000);
    assert_eq!(back.id_for("uid-a").unwrap(), outbox.id_for("uid-a").unwrap());
    let (lost, _) = open(second.path());
    assert_ne!(lost.id_for("uid-a").unwrap(), outbox.id_for("uid-a").unwrap());
}

#[test]
fn an_outbox_of_version_1_continues_without_an_id_so_that_nothing_is_delivered_twice() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    take(&mut outbox, &event(1, "x"));
    outbox
        .connection
        .execute_batch(
            "DROP TABLE ids; ALTER TABLE receivers DROP COLUMN epoch; ALTER TABLE receivers DROP COLUMN left;
             DELETE FROM kv WHERE key = 'outbox'; PRAGMA user_version = 1;",
        )
        .unwrap();
    drop(outbox);
    let (mut outbox, restored) = open(dir.path());
    assert_eq!(
        (restored.last, outbox.id_for("uid-a").unwrap()),
        (START + 1, String::new())
    );
    assert_eq!(texts(&outbox.next("uid-a", ALL).unwrap()), ["1"]);
    assert_eq!(outbox.acknowledge("uid-a", "", START + 1).unwrap(), AckOutcome::More);
    remember(&mut outbox, 7, START);
    assert!(outbox.knows(&key(7)).unwrap());
}

fn key(n: i64) -> RepeatKey {
    RepeatKey::of(b'i', &[&n.to_be_bytes()])
}

fn remember(outbox: &mut Outbox, n: i64, millisecond: i64) {
    let taking = ArrivalRecord {
        state: &n,
        cursor: None,
        event: None,
        ids: (&[key(n)], Timestamp::from_millisecond(millisecond).unwrap()),
    };
    outbox.record_arrival(&taking).unwrap();
}

#[test]
fn an_id_is_known_for_a_day_and_over_restarts() {
    let dir = dir();
    let day = 24 * 3_600_000;
    let (mut outbox, _) = open(dir.path());
    remember(&mut outbox, 1, START);
    drop(outbox);
    let (mut outbox, _) = open(dir.path());
    remember(&mut outbox, 2, START + day);
    assert!(outbox.knows(&key(1)).unwrap() && !outbox.knows(&key(3)).unwrap());
    remember(&mut outbox, 3, START + day + 1);
    assert!(!outbox.knows(&key(1)).unwrap() && outbox.knows(&key(2)).unwrap());
}

#[test]
fn ids_use_a_quarter_of_the_volume_and_the_oldest_are_removed() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    // A quarter of it has room for 204 ids.
    outbox.fit_volume(2 * 64 * 1024);
    // They are counted at the first arrival and at each 64th after it.
    for n in 1..=256 {
        assert!(outbox.knows(&key(1)).unwrap() || n == 1);
        remember(&mut outbox, n, START + n);
    }
    remember(&mut outbox, 257, START + 257);
    assert!(!outbox.knows(&key(53)).unwrap());
    assert!(outbox.knows(&key(54)).unwrap() && outbox.knows(&key(257)).unwrap());
    remember(&mut outbox, 258, START + 258);
    assert!(outbox.knows(&key(54)).unwrap());
    drop(outbox);
    let (mut outbox, _) = open(dir.path());
    outbox.fit_volume(2 * 64 * 1024);
    remember(&mut outbox, 259, START + 259);
    assert!(!outbox.knows(&key(55)).unwrap() && outbox.knows(&key(56)).unwrap());
}

#[test]
fn ids_and_cursor_of_another_source_are_unknown() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    take(&mut outbox, &event(1, "x"));
    remember(&mut outbox, 1, START);
    // An outbox from before sources were recorded is taken to have the same source.
    assert!(!outbox.set_source("page-a").unwrap());
    assert!(!outbox.set_source("page-a").unwrap());
    drop(outbox);
    let (mut outbox, restored) = open(dir.path());
    assert_eq!(restored.cursor, cursor(1));
    assert!(outbox.knows(&key(1)).unwrap());
    assert!(outbox.set_source("page-b").unwrap());
    assert!(!outbox.knows(&key(1)).unwrap());
    assert_eq!(
        texts(&outbox.next("uid-a", ALL).unwrap()),
        ["1"],
        "stored events are delivered"
    );
    drop(outbox);
    assert_eq!(open(dir.path()).1.cursor, SourceCursor::default());
}

#[test]
fn waiting_events_are_bounded_by_bytes_and_the_newest_stays() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.fit_volume(4 * 1024 * 1024);
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    let large = |n: i64| SensorEvent {
        trial: Some(ScoredEffects {
            data: "x".repeat(8_000),
            ..ScoredEffects::default()
        }),
        notifications: vec![SensorNotification {
            text: "y".repeat(2_000),
            ..event(n, "x").notifications[0].clone()
        }],
        ..event(n, "x")
    };
    let dropped: i64 = (1..=600).map(|n| take(&mut outbox, &large(n))).sum();
    assert!(dropped > 0);
    let size = std::fs::metadata(dir.path().join(FILE)).unwrap().len();
    assert!(size < 3 * 1024 * 1024, "{size}");
    let mut newest = 0;
    loop {
        let events = outbox.next("uid-a", ALL).unwrap();
        let Some(last) = events.last() else { break };
        newest = last.seq;
        outbox.acknowledge("uid-a", "", newest).unwrap();
    }
    assert_eq!(newest, START + 600);
    // Acknowledged events made room.
    assert_eq!(take(&mut outbox, &large(601)), 0);
}

#[test]
fn a_full_volume_releases_the_ballast_for_what_makes_room() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    take(&mut outbox, &event(1, "x"));
    let ballast = dir.path().join("ballast");
    assert!(ballast.exists());
    // A volume that is full until the ballast is released.
    let full = std::cell::Cell::new(true);
    let written = outbox.transact_on_ballast(|transaction| {
        if full.replace(false) {
            assert!(ballast.exists());
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
            return Err(rusqlite::Error::SqliteFailure(code, None));
        }
        assert!(!ballast.exists());
        put(transaction, "again", "1")
    });
    written.unwrap();
    full.set(true);
    let full_for_good = outbox.transact_on_ballast(|_| {
        let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
        Err::<(), _>(rusqlite::Error::SqliteFailure(code, None))
    });
    let error = full_for_good.unwrap_err();
    assert!(matches!(error, OutboxError::Full { .. }));
    assert!(error.to_string().contains("PersistentVolumeClaim"), "{error}");
}
