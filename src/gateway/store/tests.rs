//! Tests of the gateway's record: what it keeps through crashes, and what it refuses.

use pretty_assertions::assert_eq;
use tempfile::TempDir;

use super::*;
use crate::api::status::ModelUsage;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn id(text: &str) -> CallId {
    text.parse().unwrap()
}

fn open(directory: &TempDir) -> Store {
    Store::open(directory.path(), "m", NOW).unwrap()
}

fn answered(call: &str, body: &str) -> Settlement {
    let bill = Bill {
        input: 10,
        output: 5,
        cache_read: 2,
        reasoning: 1,
        ..Bill::default()
    };
    Settlement {
        id: id(call),
        end: End::Answered {
            content_type: "application/json".into(),
            body: body.into(),
        },
        metered: Metered::Billed(bill, "{}".into()),
        scripted_turn: false,
        at: NOW,
    }
}

fn call(store: &Store, name: &str, body: &str) {
    store.begin(id(name), NOW).unwrap();
    store.settle(answered(name, body)).unwrap();
}

#[test]
fn an_answer_is_kept_over_a_restart_until_it_is_acknowledged() {
    let directory = TempDir::new().unwrap();
    call(&open(&directory), "t1c1a1", "hello");
    let store = open(&directory);
    let kept = End::Answered {
        content_type: "application/json".into(),
        body: b"hello".to_vec(),
    };
    assert_eq!(store.find(id("t1c1a1")).unwrap(), Some(Recorded::Ended(kept)));
    store.acknowledge(id("t1c1a1")).unwrap();
    assert_eq!(store.find(id("t1c1a1")).unwrap(), Some(Recorded::Acknowledged));
    drop(store);
    let store = open(&directory);
    assert_eq!(store.find(id("t1c1a1")).unwrap(), Some(Recorded::Acknowledged));
    assert_eq!(store.find(id("t1c1a2")).unwrap(), None);
    assert_eq!(store.usage().calls, 1);
}

#[test]
fn acknowledging_one_call_covers_all_before_it_and_none_after() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    for name in ["t1c1a1", "t2c1a1", "t2c1a2"] {
        call(&store, name, name);
    }
    store.acknowledge(id("t2c1a1")).unwrap();
    store.acknowledge(id("t1c1a1")).unwrap();
    assert_eq!(store.find(id("t1c9a9")).unwrap(), Some(Recorded::Acknowledged));
    assert_eq!(store.find(id("t2c1a1")).unwrap(), Some(Recorded::Acknowledged));
    assert!(matches!(
        store.find(id("t2c1a2")).unwrap(),
        Some(Recorded::Ended(End::Answered { .. }))
    ));
}

#[test]
fn a_call_open_at_a_restart_is_lost_and_counted_once_as_unknown() {
    let directory = TempDir::new().unwrap();
    open(&directory).begin(id("t1c1a1"), NOW).unwrap();
    for _ in 0..2 {
        let store = open(&directory);
        let Some(Recorded::Ended(End::Failed(failure))) = store.find(id("t1c1a1")).unwrap() else {
            panic!()
        };
        assert_eq!(failure.kind, FailureKind::Interrupted);
        let usage = store.usage();
        assert_eq!((usage.calls, usage.unknown_calls, usage.input_tokens), (1, 1, 0));
        assert_eq!(usage.by_model[0].unknown_calls, 1);
    }
}

#[test]
fn each_way_to_end_counts_by_its_own_rule() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    let failed = || End::Failed(failure(FailureKind::Unreachable, "x"));
    let ways = [Metered::NotSent, Metered::Free, Metered::Unknown];
    let mut counted = vec![];
    for (turn, metered) in (1..).zip(ways) {
        let id = CallId {
            turn,
            call: 1,
            attempt: 1,
        };
        store.begin(id, NOW).unwrap();
        store
            .settle(Settlement {
                id,
                end: failed(),
                metered,
                scripted_turn: false,
                at: NOW,
            })
            .unwrap();
        counted.push((store.usage().calls, store.usage().unknown_calls));
    }
    assert_eq!(counted, [(0, 0), (1, 0), (2, 1)]);
    call(&store, "t9c1a1", "");
    let usage = store.usage();
    let tokens = (
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.reasoning_tokens,
    );
    assert_eq!((usage.calls, usage.unknown_calls, tokens), (3, 1, (10, 5, 2, 1)));
    drop(store);
    assert_eq!(open(&directory).usage(), usage);
}

#[test]
fn a_new_record_goes_on_from_the_known_totals_and_an_old_one_from_its_own() {
    let directory = TempDir::new().unwrap();
    let big = i64::from(u32::MAX) * 1000;
    let model = ModelUsage {
        model: "m".into(),
        calls: 7,
        input_tokens: big,
        ..ModelUsage::default()
    };
    let known = Usage {
        calls: 9,
        input_tokens: big + 1,
        by_model: vec![model],
        ..Usage::default()
    };
    let store = open(&directory);
    store.adopt(&known).unwrap();
    store.adopt(&known).unwrap();
    assert_eq!(store.usage(), known);
    call(&store, "t1c1a1", "");
    drop(store);
    let store = open(&directory);
    store.adopt(&known).unwrap();
    assert_eq!(store.usage().calls, 10);
    assert_eq!(store.usage().input_tokens, big + 11);
    assert_eq!(store.usage().by_model[0].calls, 8);
}

#[test]
fn at_most_ten_models_are_reported_and_the_sum_holds_all() {
    let directory = TempDir::new().unwrap();
    for number in 0..12 {
        let store = Store::open(directory.path(), &format!("m{number:02}"), NOW).unwrap();
        store
            .begin(
                CallId {
                    turn: number,
                    call: 1,
                    attempt: 1,
                },
                NOW,
            )
            .unwrap();
    }
    let usage = open(&directory).usage();
    assert_eq!((usage.calls, usage.by_model.len()), (12, totals::MAX_MODELS));
}

#[test]
fn a_full_disk_makes_no_call_and_loses_no_outcome() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    store.begin(id("t1c1a1"), NOW).unwrap();
    store.fill_disk(true);
    let long = "x".repeat(1_000_000);
    assert!(matches!(
        store.settle(answered("t1c1a1", &long)),
        Err(StoreError::Write(_))
    ));
    assert!(store.begin(id("t2c1a1"), NOW).is_err());
    assert_eq!(store.usage().calls, 0);
    store.fill_disk(false);
    let Some(Recorded::Ended(End::Answered { body, .. })) = store.find(id("t1c1a1")).unwrap() else {
        panic!()
    };
    assert_eq!(body.len(), long.len());
    assert_eq!(store.usage().calls, 1);
    store.begin(id("t2c1a1"), NOW).unwrap();
}

#[test]
fn a_second_gateway_is_refused_while_the_first_one_lives() {
    let directory = TempDir::new().unwrap();
    let _first = open(&directory);
    let error = Store::open(directory.path(), "m", NOW).err().unwrap().to_string();
    assert!(error.contains("another gateway has it open"), "{error}");
}

#[test]
fn a_damaged_record_is_refused_in_words() {
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join(FILE_NAME), "garbage, not a database at all").unwrap();
    let error = Store::open(directory.path(), "m", NOW).err().unwrap().to_string();
    assert!(error.contains("it is damaged: move it away"), "{error}");
    assert!(error.contains(FILE_NAME), "{error}");
}

#[test]
fn a_record_of_a_newer_version_is_refused() {
    let directory = TempDir::new().unwrap();
    open(&directory)
        .lock()
        .db
        .pragma_update(None, "user_version", 3)
        .unwrap();
    let error = Store::open(directory.path(), "m", NOW).err().unwrap().to_string();
    assert!(error.contains("is of version 3"), "{error}");
}

#[test]
fn old_calls_leave_and_the_totals_stay() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    store.lock().db.pragma_update(None, "synchronous", "OFF").unwrap();
    for turn in 1..=KEPT_CALLS + 5 {
        call(&store, &format!("t{turn}c1a1"), "x");
    }
    store
        .acknowledge(CallId {
            turn: KEPT_CALLS + 5,
            call: 1,
            attempt: 1,
        })
        .unwrap();
    let count = |sql: &str| -> i64 { store.lock().db.query_row(sql, [], |row| row.get(0)).unwrap() };
    assert_eq!(count("SELECT count(*) FROM calls"), KEPT_CALLS);
    assert_eq!(count("SELECT min(turn) FROM calls"), 6);
    assert_eq!(count("SELECT count(*) FROM calls WHERE answer IS NOT NULL"), 0);
    assert_eq!(store.usage().calls, KEPT_CALLS + 5);
}

#[test]
fn turns_of_the_script_are_counted_over_restarts() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    store.begin(id("t1c1a1"), NOW).unwrap();
    store
        .settle(Settlement {
            scripted_turn: true,
            ..answered("t1c1a1", "")
        })
        .unwrap();
    call(&store, "t2c1a1", "");
    assert_eq!(store.scripted_turns(), 1);
    drop(store);
    assert_eq!(open(&directory).scripted_turns(), 1);
}
