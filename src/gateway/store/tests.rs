//! Tests of the call store: what it keeps across crashes, and what it rejects.

use std::sync::Arc;

use pretty_assertions::assert_eq;
use tempfile::TempDir;

use super::*;
use crate::api::amount::LimitAmounts;
use crate::api::status::ModelUsage;
use crate::ledger::account::DurableGrant;
use crate::ledger::bound::{PreviousRequest, RequestPart};

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn id(text: &str) -> CallId {
    text.parse().unwrap()
}

fn open(directory: &TempDir) -> CallStore {
    CallStore::open(directory.path(), "m".into(), NOW).unwrap()
}

fn answered(call: &str, body: &str) -> CallSettlement {
    let bill = CallBill {
        input: 10,
        output: 5,
        cache_read: 2,
        reasoning: 1,
        ..CallBill::default()
    };
    CallSettlement {
        call: turn(id(call)),
        end: CallEnd::Answered {
            content_type: "application/json".into(),
            body: body.to_owned().into(),
            cost: Some(34),
        },
        metered: CallUsage::Billed(bill, "{}".into()),
        ..unlimited()
    }
}

/// A settlement of a call without limits.
fn unlimited() -> CallSettlement {
    CallSettlement {
        call: turn(id("t1c1a1")),
        end: CallEnd::Failed(CallFailure::new(FailureKind::Unreachable, "x")),
        metered: CallUsage::Unknown,
        reservation: Reservation::default(),
        charge: Amount::ZERO,
        violation: None,
        basis: None,
        scripted_turn: false,
        at: NOW,
    }
}

fn turn(id: CallId) -> StoredCallKey {
    StoredCallKey {
        id,
        purpose: CallPurpose::Turn,
    }
}

fn begin(store: &CallStore, call: CallId) -> Result<BeginOutcome, CallStoreError> {
    store.begin(turn(call), (&[], &Amount::ZERO), 0, NOW)
}

fn call(store: &CallStore, name: &str, body: &str) {
    begin(store, id(name)).unwrap();
    store.settle(answered(name, body)).unwrap();
}

#[test]
fn an_answer_is_kept_over_a_restart_until_it_is_acknowledged() {
    let directory = TempDir::new().unwrap();
    call(&open(&directory), "t1c1a1", "hello");
    let store = open(&directory);
    let kept = CallEnd::Answered {
        content_type: "application/json".into(),
        body: b"hello".as_slice().into(),
        cost: Some(34),
    };
    assert_eq!(store.find(id("t1c1a1")).unwrap(), Some(RecordedCall::Ended(kept)));
    store.acknowledge(id("t1c1a1")).unwrap();
    assert_eq!(store.find(id("t1c1a1")).unwrap(), Some(RecordedCall::Acknowledged));
    drop(store);
    let store = open(&directory);
    assert_eq!(store.find(id("t1c1a1")).unwrap(), Some(RecordedCall::Acknowledged));
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
    assert_eq!(store.find(id("t1c9a9")).unwrap(), Some(RecordedCall::Acknowledged));
    assert_eq!(store.find(id("t2c1a1")).unwrap(), Some(RecordedCall::Acknowledged));
    assert!(matches!(
        store.find(id("t2c1a2")).unwrap(),
        Some(RecordedCall::Ended(CallEnd::Answered { .. }))
    ));
}

#[test]
fn a_call_open_at_a_restart_is_lost_and_counted_once_as_unknown() {
    let directory = TempDir::new().unwrap();
    begin(&open(&directory), id("t1c1a1")).unwrap();
    for _ in 0..2 {
        let store = open(&directory);
        let Some(RecordedCall::Ended(CallEnd::Failed(failure))) = store.find(id("t1c1a1")).unwrap() else {
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
    let ways = [CallUsage::NotSent, CallUsage::Free, CallUsage::Unknown];
    let mut counted = vec![];
    for (turn, metered) in (1..).zip(ways) {
        let id = CallId {
            member: 0,
            turn,
            call: 1,
            attempt: 1,
        };
        begin(&store, id).unwrap();
        store
            .settle(CallSettlement {
                call: StoredCallKey {
                    id,
                    purpose: CallPurpose::Turn,
                },
                metered,
                ..unlimited()
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
fn a_new_record_continues_from_the_known_totals_and_an_old_one_from_its_own() {
    let directory = TempDir::new().unwrap();
    let big = i64::from(u32::MAX) * 1000;
    let model = ModelUsage {
        model: "m".into(),
        calls: 7,
        input_tokens: big,
        ..ModelUsage::default()
    };
    let known = LoopUsage {
        calls: 9,
        input_tokens: big + 1,
        by_model: vec![model],
        ..LoopUsage::default()
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
fn a_restored_record_continues_from_the_totals_of_the_controller() {
    let (directory, earlier) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    for place in [&directory, &earlier] {
        let store = open(place);
        store.adopt(&LoopUsage::default()).unwrap();
        call(&store, "t1c1a1", "");
    }
    let store = open(&directory);
    for id in ["t2c1a1", "t3c1a1"] {
        call(&store, id, "");
    }
    let known = store.usage();
    assert_eq!(known.calls, 3);
    let store = open(&earlier);
    assert_eq!(store.usage().calls, 1);
    store.adopt(&known).unwrap();
    assert_eq!(store.usage(), known);
    call(&store, "t4c1a1", "");
    store.adopt(&known).unwrap();
    assert_eq!((store.usage().calls, store.usage().by_model[0].calls), (4, 4));
    drop(store);
    assert_eq!(open(&earlier).usage().calls, 4, "also after a restart");
}

#[test]
fn at_most_ten_models_are_reported_and_the_sum_holds_all() {
    let directory = TempDir::new().unwrap();
    for number in 0..12 {
        let store = CallStore::open(directory.path(), format!("m{number:02}").as_str().into(), NOW).unwrap();
        let call = CallId {
            member: 0,
            turn: number,
            call: 1,
            attempt: 1,
        };
        begin(&store, call).unwrap();
    }
    let usage = open(&directory).usage();
    assert_eq!((usage.calls, usage.by_model.len()), (12, 10));
}

#[test]
fn a_full_disk_makes_no_call_and_loses_no_outcome() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    begin(&store, id("t1c1a1")).unwrap();
    store.fill_disk(true);
    let long = "x".repeat(1_000_000);
    assert!(matches!(
        store.settle(answered("t1c1a1", &long)),
        Err(CallStoreError::Write(_))
    ));
    assert!(begin(&store, id("t2c1a1")).is_err());
    assert_eq!(store.usage().calls, 0);
    store.fill_disk(false);
    let Some(RecordedCall::Ended(CallEnd::Answered { body, .. })) = store.find(id("t1c1a1")).unwrap() else {
        panic!()
    };
    assert_eq!(body.len(), long.len());
    assert_eq!(store.usage().calls, 1);
    begin(&store, id("t2c1a1")).unwrap();
}

#[test]
fn a_second_gateway_is_refused_while_the_first_one_lives() {
    let directory = TempDir::new().unwrap();
    let _first = open(&directory);
    let error = CallStore::open(directory.path(), "m".into(), NOW)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("another gateway has locked it"), "{error}");
}

#[test]
fn a_damaged_record_is_refused_with_a_message() {
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join(FILE_NAME), "garbage, not a database at all").unwrap();
    let error = CallStore::open(directory.path(), "m".into(), NOW)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("it is corrupted: move it away"), "{error}");
    assert!(error.contains(FILE_NAME), "{error}");
}

#[test]
fn a_record_of_a_newer_version_is_refused() {
    let directory = TempDir::new().unwrap();
    open(&directory)
        .lock()
        .db
        .pragma_update(None, "user_version", 7)
        .unwrap();
    let error = CallStore::open(directory.path(), "m".into(), NOW)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("has version 7"), "{error}");
}

#[test]
fn old_calls_leave_and_the_totals_stay() {
    let directory = in_memory();
    let store = open(&directory);
    for turn in 1..=KEPT_CALLS + 5 {
        call(&store, &format!("t{turn}c1a1"), "x");
    }
    store
        .acknowledge(CallId {
            member: 0,
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

/// A directory in memory, where flushes are free, for tests with many calls.
fn in_memory() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap()
}

#[test]
fn every_change_is_flushed_but_an_acknowledgement() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    let flushed = || -> i64 {
        let inner = store.lock();
        inner.db.query_row("PRAGMA synchronous", [], |row| row.get(0)).unwrap()
    };
    let (normal, full) = (1, 2);
    for turn in 1..=2 {
        let id = CallId {
            member: 0,
            turn,
            call: 1,
            attempt: 1,
        };
        begin(&store, id).unwrap();
        assert_eq!(flushed(), full);
        store.settle(answered(&id.to_string(), "x")).unwrap();
        assert_eq!(flushed(), full);
        store.acknowledge(id).unwrap();
        assert_eq!(flushed(), normal);
    }
    grant(&store, 100);
    assert_eq!(flushed(), full);
}

#[test]
fn the_log_is_emptied_with_acknowledgements_and_not_in_a_call() {
    let directory = in_memory();
    let store = open(&directory);
    let log = directory.path().join(format!("{FILE_NAME}-wal"));
    let length = || std::fs::metadata(&log).unwrap().len();
    for turn in 1..=20 * i64::from(TIDY) {
        let name = format!("t{turn}c1a1");
        call(&store, &name, &"x".repeat(5_000));
        store.acknowledge(id(&name)).unwrap();
    }
    // SQLite itself would checkpoint at 1,000 pages of 4 KiB, during whichever change comes then.
    assert!(length() < 3_000_000, "{}", length());
}

#[test]
fn turns_of_the_script_are_counted_over_restarts() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    begin(&store, id("t1c1a1")).unwrap();
    store
        .settle(CallSettlement {
            scripted_turn: true,
            ..answered("t1c1a1", "")
        })
        .unwrap();
    call(&store, "t2c1a1", "");
    assert_eq!(store.scripted_turns(CallPurpose::Turn), 1);
    drop(store);
    assert_eq!(open(&directory).scripted_turns(CallPurpose::Turn), 1);
}

fn tokens(tokens: i64) -> Amount {
    Amount {
        tokens,
        calls: 1,
        ..Amount::ZERO
    }
}

fn team() -> [AccountDraw<'static>; 1] {
    let limits = LimitAmounts {
        tokens: Some(1),
        ..LimitAmounts::default()
    };
    [AccountDraw {
        account: "team",
        limits,
    }]
}

/// A grant of the leader: lease 1 with this total.
fn grant(store: &CallStore, amount: i64) {
    let granted = DurableGrant {
        lease: 1,
        granted: tokens(amount),
        spent: Amount::ZERO,
        returned: Amount::ZERO,
        ends: None,
    };
    store
        .change_wallet(|wallet| wallet.apply_grants("team", 7, &[(granted, None)], &[]))
        .unwrap();
}

fn statement(store: &CallStore) -> (i64, i64, bool) {
    store.with_wallet(|wallet| {
        let all: Vec<_> = wallet.statements().collect();
        let [(_, one)] = all.as_slice() else { panic!("{all:?}") };
        (one.spent.tokens, one.returned.tokens, one.closed)
    })
}

fn held(store: &CallStore, call: &str, amount: i64) -> Reservation {
    match store.begin(turn(id(call)), (&team(), &tokens(amount)), 0, NOW).unwrap() {
        BeginOutcome::Held(reservation) => reservation,
        BeginOutcome::Short(short) => panic!("{short:?}"),
    }
}

#[test]
fn a_record_has_one_permanent_and_unique_name() {
    let (one, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let name = open(&one).name().to_owned();
    assert!(
        name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "{name}"
    );
    assert_eq!(open(&one).name(), name);
    assert_ne!(open(&other).name(), name);
}

#[test]
fn a_call_begins_with_all_that_it_needs_or_not_at_all() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    grant(&store, 100);
    held(&store, "t1c1a1", 60);
    let short = store.begin(turn(id("t2c1a1")), (&team(), &tokens(41)), 0, NOW).unwrap();
    assert_eq!(short, BeginOutcome::Short(["team".to_owned()].into()));
    assert_eq!(store.find(id("t2c1a1")).unwrap(), None);
    held(&store, "t2c1a1", 40);
}

#[test]
fn spent_and_returned_amounts_survive_a_restart_and_grants_are_repeated_by_the_leader() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    grant(&store, 100);
    let reservation = held(&store, "t1c1a1", 60);
    let settlement = CallSettlement {
        reservation,
        charge: tokens(25),
        ..answered("t1c1a1", "")
    };
    store.settle(settlement).unwrap();
    store.change_wallet(|wallet| wallet.give_back(None)).unwrap();
    assert_eq!(statement(&store), (25, 75, false));
    drop(store);
    let store = open(&directory);
    assert_eq!(statement(&store), (25, 75, false));
    assert_eq!(
        store.with_wallet(|wallet| wallet.epochs().next().map(|(_, epoch)| epoch)),
        Some(7)
    );
    // Leases restored from disk may not be spent before the leader confirms them.
    assert_eq!(store.with_wallet(|wallet| wallet.available("team", 0).tokens), 0);
    grant(&store, 130);
    assert_eq!(store.with_wallet(|wallet| wallet.available("team", 0).tokens), 30);
}

#[test]
fn a_call_open_at_a_restart_counts_as_reserved_once_and_is_estimated() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    grant(&store, 100);
    held(&store, "t1c1a1", 60);
    drop(store);
    for _ in 0..2 {
        let store = open(&directory);
        assert_eq!(statement(&store), (60, 0, false));
        let usage = store.usage();
        assert_eq!((usage.calls, usage.unknown_calls, usage.estimated_calls), (1, 1, 1));
        assert_eq!(usage.input_tokens + usage.output_tokens, 0);
    }
}

#[test]
fn an_outcome_that_waits_for_the_disk_holds_its_reservation() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    grant(&store, 100);
    let settlement = CallSettlement {
        reservation: held(&store, "t1c1a1", 60),
        charge: tokens(25),
        ..answered("t1c1a1", &"x".repeat(1_000_000))
    };
    store.fill_disk(true);
    assert!(store.settle(settlement).is_err());
    assert_eq!(store.with_wallet(|wallet| wallet.available("team", 0).tokens), 40);
    store.fill_disk(false);
    store.find(id("t1c1a1")).unwrap();
    assert_eq!(store.with_wallet(|wallet| wallet.available("team", 0).tokens), 75);
}

#[test]
fn a_violation_persists_over_a_restart_until_it_is_cleared() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    let violation = BoundViolation {
        failure: CallFailure::new(FailureKind::BoundViolated, "x"),
        resume: Some("before".into()),
    };
    begin(&store, id("t1c1a1")).unwrap();
    let settlement = CallSettlement {
        violation: Some(violation.clone()),
        ..answered("t1c1a1", "")
    };
    store.settle(settlement).unwrap();
    drop(store);
    let store = open(&directory);
    assert_eq!(store.violation(), Some(violation));
    store.clear_violation().unwrap();
    drop(store);
    assert_eq!(open(&directory).violation(), None);
}

#[test]
fn the_request_that_the_next_bound_rests_on_is_kept_for_its_model_only() {
    let directory = TempDir::new().unwrap();
    let part = |name: u8| RequestPart {
        hash: [name; 32],
        bytes: i64::from(name) * 1000,
        unsteady: true,
        is_message: name > 1,
    };
    let basis = BoundBasis {
        answered: "m-2026".into(),
        exceeded: false,
        previous: Some(Arc::new(PreviousRequest {
            parts: vec![part(1), part(2)],
            billed_input: 1234,
        })),
    };
    let store = open(&directory);
    for (turn, basis) in [("t1c1a1", basis.clone()), ("t2c1a1", BoundBasis::misled("m-2027"))] {
        begin(&store, id(turn)).unwrap();
        let settlement = CallSettlement {
            basis: Some(basis.clone()),
            ..answered(turn, "")
        };
        store.settle(settlement).unwrap();
        let other = TempDir::new().unwrap();
        std::fs::copy(directory.path().join(FILE_NAME), other.path().join(FILE_NAME)).unwrap();
        for log in ["-wal", "-shm"] {
            let name = format!("{FILE_NAME}{log}");
            let _ = std::fs::copy(directory.path().join(&name), other.path().join(&name));
        }
        assert_eq!(open(&other).basis(), basis);
    }
    drop(store);
    assert_eq!(
        CallStore::open(directory.path(), "other".into(), NOW).unwrap().basis(),
        BoundBasis::default()
    );
}

#[test]
fn a_record_of_version_1_keeps_its_totals_and_its_calls() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join(FILE_NAME);
    let db = Connection::open(&path).unwrap();
    db.execute_batch(schema::STEPS[0]).unwrap();
    db.execute_batch(
        "INSERT INTO totals VALUES ('', 7, 1, 100, 50, 20, 5), ('m', 7, 1, 100, 50, 20, 5);
         INSERT INTO calls (turn, call, attempt, state, model, opened_at) VALUES (1, 1, 1, 'Open', 'm', 'x');
         INSERT INTO meta VALUES ('base', '1'), ('scripted', '4');
         PRAGMA user_version = 1;",
    )
    .unwrap();
    drop(db);
    let store = open(&directory);
    let usage = store.usage();
    assert_eq!((usage.calls, usage.unknown_calls, usage.estimated_calls), (8, 2, 0));
    assert_eq!((usage.input_tokens, usage.cache_write_tokens, usage.cost), (100, 0, 0));
    assert_eq!(
        (usage.by_model[0].calls, store.scripted_turns(CallPurpose::Turn)),
        (8, 4)
    );
    call(&store, "t2c1a1", "");
    drop(store);
    assert_eq!(open(&directory).usage().calls, 9);
}

#[test]
fn the_record_contains_the_purpose_of_each_call() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join(FILE_NAME);
    let db = Connection::open(&path).unwrap();
    db.execute_batch(schema::STEPS[0]).unwrap();
    db.execute_batch(schema::STEPS[1]).unwrap();
    db.execute_batch(
        "INSERT INTO calls (turn, call, attempt, state, model, opened_at) VALUES (1, 1, 1, 'Settled', 'm', 'x');
         PRAGMA user_version = 2;",
    )
    .unwrap();
    drop(db);
    let store = open(&directory);
    call(&store, "t2c1a1", "");
    let inner = store.lock();
    let mut select = inner.db.prepare("SELECT purpose FROM calls ORDER BY turn").unwrap();
    let purposes: Result<Vec<String>, _> = select.query_map([], |row| row.get(0)).unwrap().collect();
    assert_eq!(
        purposes.unwrap(),
        ["Turn", "Turn"],
        "a call of version 2, and a new one"
    );
}

#[test]
fn trips_of_limits_are_counted_across_restarts() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    store.count(|budget| budget.refused_calls += 2);
    call(&store, "t1c1a1", "");
    drop(store);
    assert_eq!(open(&directory).budget().refused_calls, 2);
}

#[test]
fn acknowledgements_of_two_members_do_not_touch_each_other() {
    let directory = TempDir::new().unwrap();
    let store = open(&directory);
    for name in ["t1c1a1", "m3-t1c1a1", "m3-t2c1a1", "m12-t1c1a1"] {
        call(&store, name, name);
    }
    let kept = |store: &CallStore| {
        let names = ["t1c1a1", "m3-t1c1a1", "m3-t2c1a1", "m12-t1c1a1"];
        names.map(|name| store.find(id(name)).unwrap() != Some(RecordedCall::Acknowledged))
    };
    assert_eq!(kept(&store), [true; 4]);
    // A later turn of another member than those that stay.
    store.acknowledge(id("m3-t1c1a1")).unwrap();
    assert_eq!(kept(&store), [true, false, true, true]);
    store.acknowledge(id("t1c1a1")).unwrap();
    assert_eq!(kept(&store), [false, false, true, true]);
    let answers = |store: &CallStore| -> i64 {
        let sql = "SELECT count(*) FROM calls WHERE answer IS NOT NULL";
        store.lock().db.query_row(sql, [], |row| row.get(0)).unwrap()
    };
    assert_eq!(answers(&store), 2);
    drop(store);
    let store = open(&directory);
    assert_eq!(
        kept(&store),
        [false, false, true, true],
        "a new gateway knows the last one of each"
    );
    store.acknowledge(id("m12-t1c1a1")).unwrap();
    assert_eq!((kept(&store), answers(&store)), ([false, false, true, false], 1));
}

#[test]
fn a_record_of_version_5_keeps_its_calls_and_its_last_acknowledgement() {
    let directory = TempDir::new().unwrap();
    let db = Connection::open(directory.path().join(FILE_NAME)).unwrap();
    for tables in &schema::STEPS[..5] {
        db.execute_batch(tables).unwrap();
    }
    db.execute_batch(
        "INSERT INTO calls (number, turn, call, attempt, state, model, opened_at, content_type, answer, purpose, cost)
             VALUES (41, 7, 1, 1, 'Settled', 'm', 'x', 'text/plain', X'6F6C64', 'Heartbeat', 9);
         INSERT INTO meta VALUES ('acked', 't6c2a1');
         PRAGMA user_version = 5;",
    )
    .unwrap();
    drop(db);
    let store = open(&directory);
    assert_eq!(store.find(id("t6c2a1")).unwrap(), Some(RecordedCall::Acknowledged));
    let Some(RecordedCall::Ended(CallEnd::Answered { body, cost, .. })) = store.find(id("t7c1a1")).unwrap() else {
        panic!("the answer is lost")
    };
    assert_eq!((&body[..], cost), (&b"old"[..], Some(9)));
    begin(&store, id("t7c1a2")).unwrap();
    let newest = |sql: &str| -> i64 { store.lock().db.query_row(sql, [], |row| row.get(0)).unwrap() };
    assert_eq!(newest("SELECT max(number) FROM calls"), 42, "numbers go on");
    assert!(begin(&store, id("t7c1a2")).is_err(), "each call is recorded once");
}
