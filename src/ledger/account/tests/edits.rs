//! Effects of edits of a budget on settled and outstanding amounts.

use pretty_assertions::assert_eq;

use super::*;
use agentloop_api::budget::CalendarPeriod;
use jiff::tz::TimeZone;

fn daily(zone: &str) -> WindowRule {
    WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::get(zone).unwrap())
}

/// 300 of 1,000 settled by a; b holds at least 100 more.
fn in_use(window: WindowRule) -> Account {
    let mut account = new(terms(limit(1_000), window));
    spend(&mut account, "a", 300, at(0));
    account.request_grant(&who("b"), &for_a_call(100), at(0)).unwrap();
    write(&mut account);
    account
}

#[test]
fn a_raised_limit_has_room_for_the_difference_at_once() {
    let mut account = new(terms(limit(100), hourly()));
    spend(&mut account, "a", 100, at(0));
    account.request_grant(&who("a"), &for_a_call(20), at(1)).unwrap_err();
    account.set_terms(terms(limit(119), hourly()), at(1));
    account.request_grant(&who("a"), &for_a_call(20), at(1)).unwrap_err();
    account.set_terms(terms(limit(120), hourly()), at(1));
    account.request_grant(&who("a"), &for_a_call(20), at(1)).unwrap();
    account.check();
}

#[test]
fn a_limit_lowered_below_use_grants_nothing_until_it_holds_and_calls_back_the_rest() {
    let mut account = in_use(hourly());
    let held = account.reserved().tokens;
    account.set_terms(terms(limit(310), hourly()), at(10));
    assert!(account.recalls());
    assert_eq!(
        account.reserved().tokens,
        held,
        "a gateway may spend what it was granted"
    );
    let refused = account.request_grant(&who("c"), &for_a_call(10), at(10)).unwrap_err();
    assert!(refused.contended);
    // b returns what its call in flight does not need, and then what that call left over.
    account.apply_statement(&who("b"), &says(2, 0, held - 100, false), at(11));
    account.request_grant(&who("c"), &for_a_call(10), at(11)).unwrap_err();
    account.apply_statement(&who("b"), &says(2, 0, held, true), at(12));
    assert!(!account.recalls() || account.used().tokens + account.reserved().tokens <= 310);
    account.request_grant(&who("c"), &for_a_call(10), at(12)).unwrap();
    account.check();
}

#[test]
fn a_planned_grant_is_withdrawn_when_its_limit_is_lowered() {
    let planned = |limit_now| {
        let mut account = new(terms(limit(1_000), hourly()));
        account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
        account.set_terms(terms(limit(limit_now), hourly()), at(1));
        account.check();
        account
    };
    assert_ne!(planned(1_000).reserved(), Amount::ZERO);
    let mut lowered = planned(999);
    assert_eq!(lowered.reserved(), Amount::ZERO);
    assert!(
        !lowered.must_wait("record of a", &for_a_call(100)),
        "a waiting gateway requests again"
    );
    lowered.request_grant(&who("a"), &for_a_call(999), at(1)).unwrap();
    write(&mut lowered);
    assert_eq!(
        lowered.durable_grants("record of a").len(),
        1,
        "an empty lease is not kept"
    );
}

#[test]
fn the_grants_of_a_record_in_progress_are_not_revoked() {
    let mut account = new(terms(limit(1_000), hourly()));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    let held = account.reserved();
    let record = account.compose();
    account.request_grant(&who("b"), &for_a_call(100), at(0)).unwrap();
    account.set_terms(terms(limit(50), hourly()), at(1));
    assert_eq!(account.reserved(), held, "the planned grant of b is withdrawn");
    account.request_grant(&who("b"), &for_a_call(1), at(1)).unwrap_err();
    account.confirm_record(&record);
    assert_eq!(account.durable_grants("record of a")[0].granted, held);
    account.check();
}

#[test]
fn a_kind_that_becomes_limited_counts_what_was_settled_of_it() {
    let mut account = in_use(hourly());
    let b = says(2, 60, 0, false);
    let statement = LeaseStatement {
        spent: Amount { calls: 3, ..b.spent },
        ..b
    };
    account.apply_statement(&who("b"), &statement, at(1));
    let calls = |limit| LedgerTerms {
        limits: LimitAmounts {
            calls: Some(limit),
            tokens: Some(1_000),
            ..LimitAmounts::default()
        },
        ..terms(limit_of_nothing(), hourly())
    };
    let mut ask = for_a_call(10);
    (ask.least.calls, ask.full.calls, ask.lease) = (1, 1, Some(2));
    // One call of b is in flight, for which no calls were held: the request says so, and both are held then.
    ask.open = Amount { calls: 1, ..tokens(10) };
    let mut at_four = account.clone();
    at_four.set_terms(calls(4), at(2));
    at_four.request_grant(&who("b"), &ask, at(2)).unwrap_err();
    account.set_terms(calls(5), at(2));
    account.request_grant(&who("b"), &ask, at(2)).unwrap();
    assert_eq!((account.used().calls, account.reserved().calls), (3, 2));
    write(&mut account);
    assert_eq!(account.durable_grants("record of b")[0].granted.calls, 5);
    account.check();
}

fn limit_of_nothing() -> LimitAmounts {
    LimitAmounts::default()
}

#[test]
fn a_kind_that_is_no_longer_limited_blocks_no_call() {
    let mut account = new(terms(limit(100), hourly()));
    spend(&mut account, "a", 100, at(0));
    let calls = LimitAmounts {
        calls: Some(10),
        ..LimitAmounts::default()
    };
    account.set_terms(terms(calls, hourly()), at(1));
    account.request_grant(&who("a"), &for_a_call(1_000_000), at(1)).unwrap();
    assert_eq!(account.reserved(), Amount::ZERO);
}

#[test]
fn a_longer_window_begins_with_what_the_shorter_one_still_counts() {
    let mut account = new(terms(limit(100), hourly()));
    spend(&mut account, "a", 40, at(0));
    spend(&mut account, "a", 30, at(1_800));
    account.advance(at(3_700));
    assert_eq!(account.used(), tokens(30), "the first amount has expired");
    let twice = WindowRule::Rolling(SignedDuration::from_hours(2));
    account.set_terms(terms(limit(100), twice), at(3_700));
    assert_eq!(account.used(), tokens(30), "and does not count again");
    account.advance(at(1_800 + 7_199));
    assert_eq!(account.used(), tokens(30));
    account.advance(at(1_800 + 7_200 + 60 + 120));
    assert_eq!(account.used(), Amount::ZERO);
}

#[test]
fn a_calendar_window_becomes_a_rolling_one_as_if_all_had_been_settled_now() {
    let mut account = new(terms(limit(100), daily("UTC")));
    spend(&mut account, "a", 40, at(0));
    account.set_terms(terms(limit(100), hourly()), at(600));
    account.advance(at(600 + 3_599));
    assert_eq!(account.used(), tokens(40));
    account.advance(at(600 + 3_600 + 60));
    assert_eq!(account.used(), Amount::ZERO);
}

#[test]
fn leases_of_another_window_count_wherever_they_are_spent() {
    let mut account = in_use(daily("UTC"));
    let held = account.reserved().tokens;
    // Midnight UTC is 6,400 s after the start; in Tokyo it was long before.
    account.set_terms(terms(limit(1_000), daily("Asia/Tokyo")), at(10));
    assert_eq!((account.used().tokens, account.reserved().tokens), (300, held));
    assert_eq!(
        account.durable_grants("record of b")[0].ends,
        Some(at(10)),
        "it pays for no new call"
    );
    let tomorrow = at(70_000);
    account.advance(tomorrow);
    assert_eq!((account.used().tokens, account.reserved().tokens), (0, held));
    account.apply_statement(&who("b"), &says(2, 50, 0, true), tomorrow);
    assert_eq!((account.used().tokens, account.reserved().tokens), (50, 0));
    account.check();
}

#[test]
fn a_window_changed_without_a_leader_has_the_same_effect() {
    let rules = [
        hourly(),
        WindowRule::Rolling(SignedDuration::from_mins(5)),
        daily("UTC"),
        daily("Asia/Tokyo"),
        WindowRule::Calendar(CalendarPeriod::Monthly, TimeZone::UTC),
        WindowRule::Lifetime,
    ];
    for old in &rules {
        for new in &rules {
            let mut led = in_use(old.clone());
            let record = led.record();
            let changed = terms(limit(1_000), new.clone());
            led.set_terms(changed.clone(), at(20));
            let mut found = Account::restore(changed, &record, at(20));
            for moment in [20, 400, 4_000, 7_000, 90_000, 3_000_000] {
                led.advance(at(moment));
                found.advance(at(moment));
                assert_eq!(found.used(), led.used(), "{old:?} to {new:?} at {moment}");
                assert_eq!(found.shares(), led.shares());
                assert_eq!(found.reserved(), led.reserved());
                assert_eq!(found.durable_grants("record of b"), led.durable_grants("record of b"));
            }
            assert_eq!(led.used().is_zero(), *new != WindowRule::Lifetime);
        }
    }
}

#[test]
fn a_top_up_counts_once_in_the_window_it_lands_in() {
    let mut account = new(terms(limit(100), daily("UTC")));
    spend(&mut account, "a", 100, at(0));
    assert!(account.top_up("fire", tokens(50), at(1)));
    assert!(!account.top_up("fire", tokens(50), at(2)));
    assert!(account.is_urgent());
    assert_eq!(account.limits(), limit(150));
    account.request_grant(&who("b"), &for_a_call(51), at(2)).unwrap_err();
    account.request_grant(&who("b"), &for_a_call(50), at(2)).unwrap();
    write(&mut account);
    let tomorrow = at(6_400);
    account.advance(tomorrow);
    assert_eq!(account.limits(), limit(100));
    assert!(!account.top_up("fire", tokens(50), tomorrow), "the id is remembered");
    let mut next = Account::restore(account.terms().clone(), &account.record(), tomorrow);
    assert!(!next.top_up("fire", tokens(50), tomorrow));
}

#[test]
fn an_approval_expires_with_its_window() {
    let mut account = new(terms(limit(100), hourly()));
    assert!(account.top_up("gate/1", tokens(50), at(0)));
    account.advance(at(3_599));
    assert_eq!((account.limits(), account.top_ups().len()), (limit(150), 1));
    account.advance(at(3_600));
    assert_eq!((account.limits(), account.top_ups().len()), (limit(100), 0));
}

#[test]
fn a_top_up_that_does_not_fit_is_refused() {
    let mut account = new(terms(limit(100), hourly()));
    assert!(!account.top_up("much", tokens(i64::MAX), at(0)));
    assert_eq!(account.limits(), limit(100));
    for number in 0..MAX_TOP_UPS {
        assert!(account.top_up(&number.to_string(), tokens(1), at(0)));
    }
    assert!(!account.top_up("one more", tokens(1), at(0)));
}

#[test]
fn a_top_up_does_not_raise_the_part_of_one_agent() {
    let own = LedgerTerms {
        per_agent: limit(60),
        ..terms(limit(100), hourly())
    };
    let mut account = new(own);
    spend(&mut account, "a", 60, at(0));
    account.top_up("t", tokens(100), at(1));
    assert_eq!(account.per_agent(), limit(60));
    assert!(
        account
            .request_grant(&who("a"), &for_a_call(1), at(1))
            .unwrap_err()
            .per_agent
    );
    account.request_grant(&who("b"), &for_a_call(60), at(1)).unwrap();
}

#[test]
fn a_recreated_agent_continues_with_its_usage() {
    let own = LedgerTerms {
        per_agent: limit(60),
        ..terms(limit(1_000), hourly())
    };
    let mut account = new(own);
    spend(&mut account, "a", 50, at(0));
    let again = LeaseHolder {
        record: "another record".into(),
        pod_uid: "another pod".into(),
        ..who("a")
    };
    account.request_grant(&again, &for_a_call(11), at(1)).unwrap_err();
    account.request_grant(&again, &for_a_call(10), at(1)).unwrap();
}

#[test]
fn an_amount_held_by_an_agent_stays_outstanding_when_its_label_changes() {
    let mut account = in_use(hourly());
    let held = account.reserved().tokens;
    // Nothing is requested any more; the gateway closes its lease once its call is settled.
    account.advance(at(3_000));
    assert_eq!(account.reserved().tokens, held);
    account.apply_statement(&who("b"), &says(2, 70, 0, true), at(3_000));
    assert_eq!((account.used().tokens, account.reserved().tokens), (370, 0));
    assert_eq!(account.shares()[1], (who("b").agent, tokens(70)));
}

#[test]
fn a_budget_made_again_begins_empty() {
    let mut account = in_use(hourly());
    account.advance(at(1));
    let mut again = Account::restore(account.terms().clone(), &LedgerRecord::default(), at(1));
    assert_eq!(
        (again.used(), again.reserved(), again.epoch()),
        (Amount::ZERO, Amount::ZERO, 0)
    );
    assert!(
        !again.apply_statement(&who("b"), &says(2, 70, 0, true), at(1)),
        "leases of the old account cannot be spent here"
    );
    assert_eq!(again.used(), Amount::ZERO);
}

#[test]
fn a_ledger_ahead_of_the_clock_never_decreases_its_time_and_recovers() {
    let skew = 9 * 3_600;
    let mut wrong = new(terms(limit(100), hourly()));
    spend(&mut wrong, "a", 100, at(skew));
    let record = wrong.record();
    // The next leader's clock is right.
    let mut healed = Account::restore(wrong.terms().clone(), &record, at(0));
    assert_eq!(healed.time(), at(skew), "time never goes back");
    healed.advance(at(3_600));
    assert_eq!(healed.time(), at(skew + 1_800), "time runs at half speed");
    assert_eq!(healed.used(), tokens(100), "nothing leaves its window early");
    healed.advance(at(2 * skew - 2));
    assert_eq!(healed.time(), at(2 * skew - 1));
    healed.advance(at(2 * skew));
    assert_eq!(healed.time(), at(2 * skew), "time follows the clock again");
    healed.advance(at(2 * skew + 1));
    assert_eq!(healed.time(), at(2 * skew + 1));
    // A leader in between continues from there.
    let mut middle = Account::restore(wrong.terms().clone(), &record, at(0));
    middle.advance(at(skew));
    let mut last = Account::restore(wrong.terms().clone(), &middle.record(), at(skew));
    last.advance(at(2 * skew));
    assert_eq!(last.time(), at(2 * skew));
}

#[test]
fn a_limit_of_nothing_blocks_also_calls_that_cost_nothing_of_it() {
    let free = GrantRequest {
        least: tokens(5),
        ..for_a_call(5)
    };
    let zero = LimitAmounts {
        cost: Some(0),
        ..limit(100)
    };
    let mut account = new(terms(zero, hourly()));
    let refused = account.request_grant(&who("a"), &free, at(0)).unwrap_err();
    assert_eq!(
        (refused.kind, refused.never, refused.per_agent),
        (AmountKind::Cost, true, false)
    );
    assert!(!account.has_room(&who("a"), &free));
    let own = LedgerTerms {
        per_agent: zero,
        ..terms(limit(100), hourly())
    };
    let mut account = new(own);
    let refused = account.request_grant(&who("a"), &free, at(0)).unwrap_err();
    assert_eq!(
        (refused.kind, refused.never, refused.per_agent),
        (AmountKind::Cost, true, true)
    );
    // The smallest possible limit does not block what is free.
    let one = LimitAmounts { cost: Some(1), ..zero };
    new(terms(one, hourly()))
        .request_grant(&who("a"), &free, at(0))
        .unwrap();
}

#[test]
fn approvals_never_run_out_of_place() {
    let mut account = new(terms(limit(0), WindowRule::Lifetime));
    let spec = 64;
    for number in 0..spec {
        assert!(account.top_up(&format!("t{number}"), tokens(1), at(0)));
    }
    for number in 0..1_000 {
        assert!(account.top_up(&format!("{GATE_TOP_UP}{number}"), tokens(1), at(number)));
        assert!(account.top_ups().len() <= MAX_TOP_UPS);
    }
    assert_eq!(account.limits().tokens, Some(spec + 1_000));
    for number in 0..spec {
        assert!(
            !account.top_up(&format!("t{number}"), tokens(1), at(2_000)),
            "counted once"
        );
    }
    write(&mut account);
}
