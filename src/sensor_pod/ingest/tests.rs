//! Tests of ingestion with the real rules and a real outbox.

use pretty_assertions::assert_eq;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::api::SensorSpec;
use crate::sensor_pod::deliverer::WatchedOutbox;
use crate::sensor_pod::outbox::{EventReceiver, Outbox};

fn rules(limits: &serde_json::Value) -> SensorRules {
    let spec: SensorSpec = serde_json::from_value(json!({
        "agentNames": ["x"], "source": {}, "limits": limits,
        "updates": [{"field": "n", "value": "payload.n"}], "notification": {"text": "string(payload.n)"},
    }))
    .unwrap();
    SensorRules::compile("s", &spec).unwrap()
}

fn keeper(dir: &TempDir, limits: &serde_json::Value) -> EventIngester {
    let (mut outbox, restored) = Outbox::open(dir.path(), "uid", Timestamp::from_second(1_000).unwrap()).unwrap();
    let receiver = EventReceiver {
        uid: "x-uid".into(),
        name: "x".into(),
    };
    outbox.set_receivers(&[receiver], at(0)).unwrap();
    let last = restored.last;
    EventIngester::new(WatchedOutbox::share(outbox, last), restored, rules(limits))
}

fn source_message(n: i64, cursor: &str) -> SourceMessage {
    SourceMessage {
        id: None,
        payload: json!({"n": n}).to_string().into_bytes(),
        cursor: SourceCursor {
            etag: Some(cursor.into()),
            ..SourceCursor::default()
        },
        repeat: RepeatRule::SameAsLast,
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn texts(keeper: &EventIngester) -> Vec<String> {
    let events = keeper.outbox.lock().next("x-uid", usize::MAX).unwrap();
    let notices = events.into_iter().flat_map(|event| event.notifications);
    notices.map(|notice| notice.text).collect()
}

#[test]
fn an_accepted_message_is_on_disk_and_recognized_as_a_repeat_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper_before = keeper(&dir, &json!({}));
    assert_eq!(
        keeper_before.ingest(&source_message(1, "a"), at(1)).unwrap(),
        ArrivalOutcome::OnDisk
    );
    assert_eq!(texts(&keeper_before), ["1"]);
    drop(keeper_before);
    let mut keeper = keeper(&dir, &json!({}));
    assert_eq!(keeper.cursor().etag.as_deref(), Some("a"));
    assert_eq!(
        keeper.ingest(&source_message(1, "a"), at(2)).unwrap(),
        ArrivalOutcome::Known
    );
    assert_eq!(
        keeper.ingest(&source_message(2, "b"), at(3)).unwrap(),
        ArrivalOutcome::OnDisk
    );
    assert_eq!(texts(&keeper), ["1", "2"]);
    let totals = keeper.state().totals;
    assert_eq!((totals.events, totals.filtered), (2, 1));
}

#[test]
fn numbers_continue_above_those_of_a_lost_outbox() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut keeper_before = keeper(&first, &json!({}));
    keeper_before.ingest(&source_message(1, "a"), at(1)).unwrap();
    let (mut outbox, restored) = Outbox::open(second.path(), "uid", at(1_001)).unwrap();
    outbox.set_receivers(&[], at(0)).unwrap();
    let keeper_after = EventIngester::new(WatchedOutbox::share(outbox, restored.last), restored, rules(&json!({})));
    assert!(keeper_after.state().seq > keeper_before.state().seq);
}

#[test]
fn a_dropped_message_does_not_move_the_cursor_and_is_accepted_when_there_is_room_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({"perMinute": 1}));
    assert_eq!(
        keeper.ingest(&source_message(1, "a"), at(0)).unwrap(),
        ArrivalOutcome::OnDisk
    );
    assert_eq!(
        keeper.ingest(&source_message(2, "b"), at(30)).unwrap(),
        ArrivalOutcome::Dropped
    );
    assert_eq!(keeper.cursor().etag.as_deref(), Some("a"));
    assert_eq!(
        keeper.ingest(&source_message(2, "b"), at(90)).unwrap(),
        ArrivalOutcome::OnDisk
    );
    assert_eq!(keeper.cursor().etag.as_deref(), Some("b"));
    assert_eq!(texts(&keeper), ["1", "2"]);
}

#[test]
fn an_event_that_waits_for_the_end_of_an_interval_is_delivered_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let limits = || json!({"minIntervalMilliseconds": 10_000});
    let mut keeper_before = keeper(&dir, &limits());
    for (n, second) in [(1, 0), (2, 1), (3, 2)] {
        assert_eq!(
            keeper_before.ingest(&source_message(n, "a"), at(second)).unwrap(),
            ArrivalOutcome::OnDisk
        );
    }
    drop(keeper_before);
    let mut keeper = keeper(&dir, &limits());
    assert_eq!(keeper.waits_until(), Some(at(10)));
    keeper.release_held(at(9)).unwrap();
    assert_eq!(texts(&keeper), ["1"]);
    keeper.release_held(at(10)).unwrap();
    assert_eq!(texts(&keeper), ["1", "3"]);
    assert_eq!(keeper.waits_until(), None);
}

#[test]
fn an_unparseable_message_is_counted_and_not_delivered_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({}));
    let odd = SourceMessage {
        payload: b"no json".to_vec(),
        ..source_message(0, "a")
    };
    assert_eq!(keeper.ingest(&odd, at(0)).unwrap(), ArrivalOutcome::OnDisk);
    assert_eq!(keeper.state().totals.errors, 1);
    assert_eq!(keeper.cursor().etag.as_deref(), Some("a"));
    assert!(texts(&keeper).is_empty());
}

/// A message with this id and this text.
fn sent(repeat: RepeatRule, id: Option<&str>, n: i64) -> SourceMessage {
    SourceMessage {
        id: id.map(str::to_owned),
        repeat,
        ..source_message(n, "a")
    }
}

#[test]
fn an_id_is_known_after_more_than_256_others_and_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let limits = || json!({"perMinute": 60_000});
    let mut keeper_before = keeper(&dir, &limits());
    for n in 0..300 {
        let message = sent(RepeatRule::Id, Some(&n.to_string()), n);
        assert_eq!(keeper_before.ingest(&message, at(n)).unwrap(), ArrivalOutcome::OnDisk);
    }
    drop(keeper_before);
    let mut keeper = keeper(&dir, &limits());
    // The sender did not get the answer and retries hours later; only a repeated id counts, whatever its text.
    for again in [sent(RepeatRule::Id, Some("0"), 0), sent(RepeatRule::Id, Some("0"), 7)] {
        assert_eq!(keeper.ingest(&again, at(20_000)).unwrap(), ArrivalOutcome::Known);
    }
    assert_eq!(keeper.state().totals.filtered, 2);
    assert_eq!(texts(&keeper).len(), 64);
}

#[test]
fn a_stream_that_restarts_its_ids_and_one_without_ids_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({}));
    let mut hear = |message: &SourceMessage| keeper.ingest(message, at(0)).unwrap();
    assert_eq!(hear(&sent(RepeatRule::IdAndText, Some("1"), 1)), ArrivalOutcome::OnDisk);
    assert_eq!(hear(&sent(RepeatRule::IdAndText, Some("1"), 1)), ArrivalOutcome::Known);
    assert_eq!(hear(&sent(RepeatRule::IdAndText, Some("1"), 2)), ArrivalOutcome::OnDisk);
    for _ in 0..2 {
        assert_eq!(hear(&sent(RepeatRule::Never, None, 3)), ArrivalOutcome::OnDisk);
    }
    assert_eq!(texts(&keeper), ["1", "2", "3", "3"]);
}

#[test]
fn a_signed_text_under_another_id_is_a_replay_and_an_id_is_not_reserved_by_its_first_sender() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({}));
    let mut hear = |id: Option<&str>, n: i64| keeper.ingest(&sent(RepeatRule::SignedText, id, n), at(0)).unwrap();
    assert_eq!(hear(Some("a"), 1), ArrivalOutcome::OnDisk);
    assert_eq!(hear(Some("a"), 1), ArrivalOutcome::Known, "retried by its sender");
    assert_eq!(hear(Some("b"), 1), ArrivalOutcome::Replayed);
    assert_eq!(hear(None, 1), ArrivalOutcome::Known);
    // A replayed text came under the id that the next message will have.
    assert_eq!(hear(Some("a"), 2), ArrivalOutcome::OnDisk);
    assert_eq!(hear(None, 3), ArrivalOutcome::OnDisk);
    assert_eq!(hear(None, 3), ArrivalOutcome::Known);
    assert_eq!(texts(&keeper), ["1", "2", "3"]);
}

#[test]
fn a_dropped_event_may_be_sent_again_and_a_held_one_may_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({"perMinute": 2, "minIntervalMilliseconds": 10_000}));
    let mut hear =
        |id: &str, n: i64, second: i64| keeper.ingest(&sent(RepeatRule::Id, Some(id), n), at(second)).unwrap();
    assert_eq!(hear("a", 1, 0), ArrivalOutcome::OnDisk);
    assert_eq!(hear("b", 2, 1), ArrivalOutcome::OnDisk, "held");
    assert_eq!(hear("b", 2, 2), ArrivalOutcome::Known);
    assert_eq!(hear("c", 3, 12), ArrivalOutcome::OnDisk, "held in turn");
    assert_eq!(hear("d", 4, 30), ArrivalOutcome::Dropped);
    assert_eq!(hear("d", 4, 100), ArrivalOutcome::OnDisk);
    // The second event was due when the third came.
    assert_eq!(texts(&keeper), ["1", "2", "4"]);
}

#[test]
fn another_source_has_no_known_cursor() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper_before = keeper(&dir, &json!({}));
    keeper_before.set_source("page-a").unwrap();
    keeper_before.ingest(&source_message(1, "etag"), at(0)).unwrap();
    drop(keeper_before);
    let mut keeper_after = keeper(&dir, &json!({}));
    keeper_after.set_source("page-a").unwrap();
    assert_eq!(keeper_after.cursor().etag.as_deref(), Some("etag"));
    keeper_after.set_source("page-b").unwrap();
    assert_eq!(*keeper_after.cursor(), SourceCursor::default());
}

#[test]
fn a_message_that_is_too_deep_is_reported_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&dir, &json!({}));
    let nested = |levels: usize| SourceMessage {
        payload: format!("{}{}", "[".repeat(levels), "]".repeat(levels)).into_bytes(),
        ..sent(RepeatRule::Id, Some("a"), 0)
    };
    for levels in [34, 200] {
        assert_eq!(keeper.ingest(&nested(levels), at(0)).unwrap(), ArrivalOutcome::TooDeep);
    }
    assert_eq!(
        keeper.ingest(&nested(32), at(0)).unwrap(),
        ArrivalOutcome::OnDisk,
        "rejected by the rules, but stored"
    );
}
