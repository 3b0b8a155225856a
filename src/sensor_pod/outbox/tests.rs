//! Tests of the outbox on real files: contents, bounds, and kills at each moment of a write.

mod kept;

use std::collections::{BTreeMap, BTreeSet};

use pretty_assertions::assert_eq;
use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::api::sensor::SignalPriority;
use crate::sensor_pipeline::scored_effects::ScoredEffects;
use crate::sensor_pod::test_directory::dir;

const START: i64 = 1_700_000_000_000;
const SENSOR: &str = "sensor-uid";
const ALL: usize = usize::MAX;

fn open(dir: &Path) -> (Outbox, RestoredOutbox<i64>) {
    Outbox::open(dir, SENSOR, Timestamp::from_millisecond(START).unwrap()).unwrap()
}

#[test]
fn an_outbox_on_a_network_file_system_is_refused_before_it_is_locked() {
    let dir = dir();
    let refused = lock(dir.path(), Some("nfs4".into())).unwrap_err();
    assert!(matches!(refused, OutboxError::OnNetwork { kind, .. } if kind == "nfs4"));
    assert!(!dir.path().join(LOCK_FILE).exists());
    assert!(lock(dir.path(), None).is_ok());
}

fn now() -> Timestamp {
    Timestamp::from_millisecond(START).unwrap()
}

fn receiver(name: &str) -> EventReceiver {
    EventReceiver {
        uid: format!("uid-{name}"),
        name: name.into(),
    }
}

/// The event with this number: writes `field`, and notifies with its number.
fn event(n: i64, field: &str) -> SensorEvent {
    SensorEvent {
        seq: START + n,
        id: format!("id-{n}"),
        at: Timestamp::from_second(n).unwrap(),
        updates: vec![FieldValue {
            field: field.into(),
            value: json!(n),
        }],
        notifications: vec![SensorNotification {
            is_task: false,
            source: "sensor/s".into(),
            text: n.to_string(),
            priority: SignalPriority::Normal,
        }],
        wakes: vec!["sensor/s".into()],
        ..SensorEvent::default()
    }
}

fn cursor(n: i64) -> SourceCursor {
    SourceCursor {
        last_event_id: Some(n.to_string()),
        ..SourceCursor::default()
    }
}

fn take(outbox: &mut Outbox, event: &SensorEvent) -> i64 {
    let n = event.seq - START;
    let taking = ArrivalRecord {
        state: &n,
        cursor: Some(&cursor(n)),
        event: Some(event),
        ids: (&[], now()),
    };
    outbox.record_arrival(&taking).unwrap()
}

fn texts(events: &[SensorEvent]) -> Vec<&str> {
    let notices = events.iter().flat_map(|event| &event.notifications);
    notices.map(|notice| notice.text.as_str()).collect()
}

#[test]
fn an_accepted_event_survives_the_process() {
    let dir = dir();
    let (mut outbox, restored) = open(dir.path());
    assert_eq!(
        restored,
        RestoredOutbox {
            state: None,
            cursor: SourceCursor::default(),
            last: START
        }
    );
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    let first = event(1, "x");
    take(&mut outbox, &first);
    drop(outbox);
    let (outbox, restored) = open(dir.path());
    assert_eq!(
        restored,
        RestoredOutbox {
            state: Some(1),
            cursor: cursor(1),
            last: START + 1
        }
    );
    assert_eq!(outbox.next("uid-a", ALL).unwrap(), [first]);
}

#[test]
fn an_event_leaves_once_every_receiver_has_it() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a"), receiver("b")], now()).unwrap();
    take(&mut outbox, &event(1, "x"));
    take(&mut outbox, &event(2, "y"));
    outbox.acknowledge("uid-a", "", START + 2).unwrap();
    assert_eq!(outbox.next("uid-a", ALL).unwrap(), []);
    assert_eq!(texts(&outbox.next("uid-b", ALL).unwrap()), ["1", "2"]);
    outbox.acknowledge("uid-b", "", START + 1).unwrap();
    assert_eq!(texts(&outbox.next("uid-b", ALL).unwrap()), ["2"]);
    outbox.acknowledge("uid-b", "", START + 2).unwrap();
    for table in ["events", "updates", "notices"] {
        let rows: i64 = outbox
            .connection
            .query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0))
            .unwrap();
        assert_eq!((table, rows), (table, 0));
    }
}

#[test]
fn a_late_repeated_or_unknown_acknowledgement_changes_nothing() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    for n in 1..=3 {
        take(&mut outbox, &event(n, "x"));
    }
    outbox.acknowledge("uid-a", "", START + 2).unwrap();
    for through in [START + 1, START + 2, START + 4, i64::MAX, -1] {
        outbox.acknowledge("uid-a", "", through).unwrap();
        outbox.acknowledge("uid-unknown", "", through).unwrap();
        assert_eq!(texts(&outbox.next("uid-a", ALL).unwrap()), ["3"]);
    }
}

#[test]
fn a_new_receiver_receives_later_events_only_and_a_removed_one_holds_nothing_back() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    take(&mut outbox, &event(1, "x"));
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    take(&mut outbox, &event(2, "x"));
    outbox.set_receivers(&[receiver("a"), receiver("b")], now()).unwrap();
    take(&mut outbox, &event(3, "y"));
    assert_eq!(texts(&outbox.next("uid-a", ALL).unwrap()), ["2", "3"]);
    assert_eq!(texts(&outbox.next("uid-b", ALL).unwrap()), ["3"]);
    outbox.acknowledge("uid-b", "", START + 3).unwrap();
    let pending = outbox.pending().unwrap();
    assert_eq!(pending, BTreeMap::from([("uid-a".into(), 2), ("uid-b".into(), 0)]));
    outbox.set_receivers(&[receiver("b")], now()).unwrap();
    assert_eq!(outbox.pending().unwrap(), BTreeMap::from([("uid-b".into(), 0)]));
    take(&mut outbox, &event(4, "x"));
    outbox.acknowledge("uid-b", "", START + 4).unwrap();
    let after = |seconds: i64| now() + jiff::SignedDuration::from_secs(seconds);
    assert_eq!(outbox.expire(after(599)).unwrap(), 0);
    // Back in time: nothing is lost.
    outbox
        .set_receivers(&[receiver("a"), receiver("b")], after(599))
        .unwrap();
    assert_eq!(outbox.expire(after(10_000)).unwrap(), 0);
    assert_eq!(texts(&outbox.next("uid-a", ALL).unwrap()), ["2", "3", "4"]);
    outbox.set_receivers(&[receiver("b")], after(10_000)).unwrap();
    // A clock that was set back does not shorten the grace period.
    assert_eq!(outbox.expire(after(5_000)).unwrap(), 0);
    assert_eq!(outbox.expire(after(5_599)).unwrap(), 0);
    assert_eq!(
        outbox.expire(after(5_600)).unwrap(),
        3,
        "its pending events are counted"
    );
    assert_eq!(outbox.next("uid-a", ALL).unwrap(), []);
    // Back too late: it gets only new events.
    outbox
        .set_receivers(&[receiver("a"), receiver("b")], after(6_000))
        .unwrap();
    take(&mut outbox, &event(5, "x"));
    assert_eq!(texts(&outbox.next("uid-a", ALL).unwrap()), ["5"]);
}

#[test]
fn the_newest_value_of_a_field_is_kept_for_every_receiver_that_is_behind() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    for (n, field) in [(1, "x"), (2, "y"), (3, "x")] {
        take(&mut outbox, &event(n, field));
    }
    let events = outbox.next("uid-a", ALL).unwrap();
    let values = |event: &SensorEvent| {
        event
            .updates
            .iter()
            .map(|update| update.value.clone())
            .collect::<Vec<_>>()
    };
    let values: Vec<_> = events.iter().map(values).collect();
    assert_eq!(values, [vec![], vec![json!(2)], vec![json!(3)]]);
    assert_eq!(texts(&events), ["1", "2", "3"]);
}

#[test]
fn above_their_bound_the_oldest_notifications_are_removed_and_counted() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    (outbox.max_notifications, outbox.max_events) = (3, 3);
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    for n in 1..=3 {
        assert_eq!(take(&mut outbox, &event(n, "x")), 0);
    }
    assert_eq!(take(&mut outbox, &event(4, "y")), 1);
    assert_eq!(take(&mut outbox, &event(5, "y")), 1);
    let events = outbox.next("uid-a", ALL).unwrap();
    assert_eq!(texts(&events), ["3", "4", "5"]);
    // The third event has the newest value of `x`.
    assert_eq!(events.first().unwrap().updates.len(), 1);
    outbox.acknowledge("uid-a", "", START + 5).unwrap();
    assert_eq!(take(&mut outbox, &event(6, "x")), 0);
}

#[test]
fn events_that_wait_for_a_score_keep_their_values_apart_and_are_counted_when_removed() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.max_events = 3;
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    let tried = |n| SensorEvent {
        trial: Some(ScoredEffects {
            updates: event(n, "x").updates,
            ..ScoredEffects::default()
        }),
        updates: Vec::new(),
        notifications: Vec::new(),
        ..event(n, "x")
    };
    for n in 1..=3 {
        assert_eq!(take(&mut outbox, &tried(n)), 0);
    }
    assert_eq!(outbox.next("uid-a", ALL).unwrap(), [tried(1), tried(2), tried(3)]);
    assert_eq!(take(&mut outbox, &tried(4)), 1);
    assert_eq!(outbox.next("uid-a", ALL).unwrap(), [tried(2), tried(3), tried(4)]);
    // An event without any effect left is not counted.
    let silent = |n| SensorEvent {
        trial: None,
        ..tried(n)
    };
    assert_eq!([5, 6, 7, 8].map(|n| take(&mut outbox, &silent(n))), [1, 1, 1, 0]);
}

#[test]
fn a_value_outlives_the_notifications_of_its_event() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    (outbox.max_notifications, outbox.max_events) = (2, 2);
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    take(&mut outbox, &event(1, "old"));
    for n in 2..=9 {
        take(&mut outbox, &event(n, "x"));
    }
    let events = outbox.next("uid-a", ALL).unwrap();
    assert_eq!(texts(&events), ["8", "9"]);
    assert_eq!(events.len(), 3);
    assert_eq!(events.first().unwrap().updates, event(1, "old").updates);
}

#[test]
fn as_many_events_are_sent_at_once_as_fit_and_one_at_least() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    let events: Vec<_> = (1..=3).map(|n| event(n, &format!("f{n}"))).collect();
    for event in &events {
        take(&mut outbox, event);
    }
    let two: usize = events[..2]
        .iter()
        .map(|event| serde_json::to_string(event).unwrap().len())
        .sum();
    assert_eq!(outbox.next("uid-a", two).unwrap().len(), 2);
    assert_eq!(outbox.next("uid-a", two - 1).unwrap().len(), 1);
    assert_eq!(outbox.next("uid-a", 1).unwrap().len(), 1);
}

#[test]
fn at_most_as_many_events_are_sent_at_once_as_a_receiver_accepts() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a")], now()).unwrap();
    let max = index(MAX_DELIVERY_EVENTS);
    for n in 1..=max + 2 {
        take(&mut outbox, &event(n, "x"));
        let offered = outbox.next("uid-a", ALL).unwrap();
        assert_eq!(index(offered.len()), n.min(max), "of {n}");
    }
    for (through, left) in [(1, max), (2, max), (3, max - 1)] {
        outbox.acknowledge("uid-a", "", START + through).unwrap();
        let offered = outbox.next("uid-a", ALL).unwrap();
        assert_eq!((offered[0].seq, index(offered.len())), (START + through + 1, left));
    }
}

#[test]
fn an_arrival_without_an_event_still_stores_the_cursor() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    let filtered = ArrivalRecord {
        state: &7,
        cursor: Some(&cursor(7)),
        event: None,
        ids: (&[], now()),
    };
    outbox.record_arrival(&filtered).unwrap();
    let dropped = ArrivalRecord {
        state: &8,
        cursor: None,
        event: None,
        ids: (&[], now()),
    };
    outbox.record_arrival(&dropped).unwrap();
    drop(outbox);
    let (_, restored) = open(dir.path());
    assert_eq!((restored.state, restored.cursor), (Some(8), cursor(7)));
}

#[test]
fn an_outbox_of_another_sensor_a_newer_version_or_another_process_is_left_as_it_is() {
    let dir = dir();
    let (outbox, _) = open(dir.path());
    let again = |sensor| Outbox::open::<i64>(dir.path(), sensor, Timestamp::UNIX_EPOCH).map(|_| ());
    assert!(matches!(again(SENSOR), Err(OutboxError::Locked { .. })));
    drop(outbox);
    assert!(matches!(again("another"), Err(OutboxError::Foreign { .. })));
    let (outbox, _) = open(dir.path());
    outbox.connection.pragma_update(None, "user_version", 3).unwrap();
    drop(outbox);
    assert!(matches!(again(SENSOR), Err(OutboxError::Newer { found: 3, .. })));
    std::fs::write(dir.path().join(FILE), "no database at all").unwrap();
    std::fs::remove_file(dir.path().join("outbox.sqlite-wal")).ok();
    assert!(matches!(again(SENSOR), Err(OutboxError::Corrupted { .. })));
}

/// The files of an outbox, as a killed process leaves them.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let names = [FILE, "outbox.sqlite-wal"].map(str::to_owned);
    names
        .map(|name| (name.clone(), std::fs::read(dir.join(&name)).unwrap_or_default()))
        .into()
}

fn volume(files: &[(String, Vec<u8>)]) -> TempDir {
    let dir = dir();
    for (name, bytes) in files {
        if !bytes.is_empty() {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
    }
    dir
}

#[test]
fn killed_in_the_middle_of_a_write_it_has_all_of_it_or_nothing() {
    let dir = dir();
    let (mut outbox, _) = open(dir.path());
    outbox.set_receivers(&[receiver("a"), receiver("b")], now()).unwrap();
    let mut seen = BTreeSet::new();
    for n in 1..=12 {
        let before = files(dir.path());
        match n % 3 {
            0 => drop(outbox.acknowledge("uid-a", "", START + n - 1).unwrap()),
            _ => drop(take(&mut outbox, &event(n, "x"))),
        }
        let after = files(dir.path());
        let (old, new) = (before[1].1.clone(), after[1].1.clone());
        for percent in (0..=100).step_by(5) {
            // SQLite appends to its log: a killed process leaves a prefix of its write.
            let cut = old.len() + (new.len() - old.len()) * percent / 100;
            let torn = [after[0].clone(), (after[1].0.clone(), new[..cut].to_vec())];
            let torn = volume(&torn);
            let (outbox, restored) = open(torn.path());
            let (expected, _) = open_copy(if cut == new.len() { &after } else { &before });
            assert_eq!(restored.state, expected.state, "write {n}, {percent} %");
            assert_eq!(restored.last, expected.last);
            assert_eq!(restored.cursor, expected.cursor);
            seen.insert((n, outbox.next("uid-b", ALL).unwrap().len()));
        }
    }
    // The state before and after writes was seen.
    assert!(seen.len() > 16, "{seen:?}");
}

fn open_copy(files: &[(String, Vec<u8>)]) -> (RestoredOutbox<i64>, Vec<SensorEvent>) {
    let copy = volume(files);
    let (outbox, restored) = open(copy.path());
    let events = outbox.next("uid-b", ALL).unwrap();
    (restored, events)
}

#[derive(Clone, Debug)]
enum Step {
    Take(u8),
    Acknowledge(u8, u8),
    Crash,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u8..3).prop_map(Step::Take),
        3 => (0_u8..2, 0_u8..40).prop_map(|(who, through)| Step::Acknowledge(who, through)),
        1 => Just(Step::Crash),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn each_receiver_is_offered_exactly_what_it_does_not_have(steps in proptest::collection::vec(step(), 1..60)) {
        let dir = dir();
        let (mut outbox, _) = open(dir.path());
        let names = ["uid-a", "uid-b"];
        outbox.set_receivers(&[receiver("a"), receiver("b")], now()).unwrap();
        let (mut last, mut has) = (0, [0, 0]);
        for step in steps {
            match step {
                Step::Take(field) => {
                    last += 1;
                    take(&mut outbox, &event(last, &field.to_string()));
                }
                Step::Acknowledge(who, through) => {
                    let (who, through) = (usize::from(who), i64::from(through));
                    outbox.acknowledge(names[who], "", START + through).unwrap();
                    if through <= last {
                        has[who] = through.max(has[who]);
                    }
                }
                Step::Crash => {
                    let left = volume(&files(dir.path()));
                    drop(outbox);
                    for (name, bytes) in files(left.path()) {
                        std::fs::write(dir.path().join(name), bytes).unwrap();
                    }
                    outbox = open(dir.path()).0;
                }
            }
            for (who, has) in names.iter().zip(has) {
                let offered = outbox.next(who, ALL).unwrap();
                let expected: Vec<_> = (has + 1..=last).map(|n| n.to_string()).collect();
                prop_assert_eq!(texts(&offered), expected);
            }
        }
    }
}
