//! What becomes of arrivals, with the real rules and a real outbox.

use pretty_assertions::assert_eq;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::api::SensorSpec;
use crate::sensor::deliverer::Shelf;
use crate::sensor::outbox::{Outbox, Receiver};

fn rules(limits: &serde_json::Value) -> Rules {
    let spec: SensorSpec = serde_json::from_value(json!({
        "agentNames": ["x"], "source": {}, "limits": limits,
        "updates": [{"field": "n", "value": "payload.n"}], "notification": {"text": "string(payload.n)"},
    }))
    .unwrap();
    Rules::compile("s", &spec).unwrap()
}

fn keeper(dir: &TempDir, limits: &serde_json::Value) -> Keeper {
    let (mut outbox, restored) = Outbox::open(dir.path(), "uid", Timestamp::from_second(1_000).unwrap()).unwrap();
    let receiver = Receiver {
        uid: "x-uid".into(),
        name: "x".into(),
    };
    outbox.receive(&[receiver]).unwrap();
    let last = restored.last;
    Keeper::new(Shelf::share(outbox, last), restored, rules(limits))
}

fn heard(n: i64, cursor: &str) -> Heard {
    Heard {
        id: None,
        payload: json!({"n": n}).to_string().into_bytes(),
        cursor: Cursor {
            etag: Some(cursor.into()),
            ..Cursor::default()
        },
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn texts(keeper: &Keeper) -> Vec<String> {
    let events = keeper.outbox.lock().next("x-uid", usize::MAX).unwrap();
    let notices = events.into_iter().flat_map(|event| event.notifications);
    notices.map(|notice| notice.text).collect()
}

#[test]
fn what_is_taken_is_on_disk_and_the_same_again_is_known_after_a_restart_too() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper_before = keeper(&dir, &json!({}));
    assert_eq!(keeper_before.hear(&heard(1, "a"), at(1)).unwrap(), Taken::OnDisk);
    assert_eq!(texts(&keeper_before), ["1"]);
    drop(keeper_before);
    let mut keeper = keeper(&dir, &json!({}));
    assert_eq!(keeper.cursor().etag.as_deref(), Some("a"));
    assert_eq!(keeper.hear(&heard(1, "a"), at(2)).unwrap(), Taken::Known);
    assert_eq!(keeper.hear(&heard(2, "b"), at(3)).unwrap(), Taken::OnDisk);
    assert_eq!(texts(&keeper), ["1", "2"]);
    let totals = keeper.state().totals;
    assert_eq!((totals.events, totals.filtered), (2, 1));
}

#[test]
fn numbers_go_on_above_those_of_an_outbox_that_was_lost() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut keeper_before = keeper(&first, &json!({}));
    keeper_before.hear(&heard(1, "a"), at(1)).unwrap();
    let (mut outbox, restored) = Outbox::open(second.path(), "uid", at(1_001)).unwrap();
    outbox.receive(&[]).unwrap();
    let keeper_after = Keeper::new(Shelf::share(outbox, restored.last), restored, rules(&json!({})));
    assert!(keeper_after.state().seq > keeper_before.state().seq);
}

#[test]
fn what_is_dropped_does_not_move_the_cursor_and_is_taken_when_there_is_room_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({"perMinute": 1}));
    assert_eq!(keeper.hear(&heard(1, "a"), at(0)).unwrap(), Taken::OnDisk);
    assert_eq!(keeper.hear(&heard(2, "b"), at(30)).unwrap(), Taken::Dropped);
    assert_eq!(keeper.cursor().etag.as_deref(), Some("a"));
    assert_eq!(keeper.hear(&heard(2, "b"), at(90)).unwrap(), Taken::OnDisk);
    assert_eq!(keeper.cursor().etag.as_deref(), Some("b"));
    assert_eq!(texts(&keeper), ["1", "2"]);
}

#[test]
fn what_waits_for_the_end_of_an_interval_survives_a_restart_and_comes_then() {
    let dir = tempfile::tempdir().unwrap();
    let limits = || json!({"minIntervalMilliseconds": 10_000});
    let mut keeper_before = keeper(&dir, &limits());
    for (n, second) in [(1, 0), (2, 1), (3, 2)] {
        assert_eq!(keeper_before.hear(&heard(n, "a"), at(second)).unwrap(), Taken::OnDisk);
    }
    drop(keeper_before);
    let mut keeper = keeper(&dir, &limits());
    assert_eq!(keeper.waits_until(), Some(at(10)));
    keeper.take_up(at(9)).unwrap();
    assert_eq!(texts(&keeper), ["1"]);
    keeper.take_up(at(10)).unwrap();
    assert_eq!(texts(&keeper), ["1", "3"]);
    assert_eq!(keeper.waits_until(), None);
}

#[test]
fn what_is_not_understood_is_counted_and_not_heard_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({}));
    let odd = Heard {
        payload: b"no json".to_vec(),
        ..heard(0, "a")
    };
    assert_eq!(keeper.hear(&odd, at(0)).unwrap(), Taken::OnDisk);
    assert_eq!(keeper.state().totals.errors, 1);
    assert_eq!(keeper.cursor().etag.as_deref(), Some("a"));
    assert!(texts(&keeper).is_empty());
}
