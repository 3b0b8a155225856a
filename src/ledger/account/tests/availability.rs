//! Who gets room, in which order, and when there will be room.

use jiff::tz::TimeZone;
use proptest::prelude::*;

use super::*;
use agentloop_api::NamespacedName;
use agentloop_api::budget::CalendarPeriod;

#[test]
fn the_prefetch_shrinks_with_the_available_amount() {
    let granted = |limited: i64| {
        let mut account = new(terms(limit(limited), WindowRule::Lifetime));
        account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
        account.reserved().tokens
    };
    assert_eq!(granted(1_000_000), 100 * PREFETCH_CALLS);
    assert_eq!(granted(1_000), 100 + 900 / 4);
    assert_eq!(granted(100), 100);
}

#[test]
fn the_prefetch_shrinks_with_the_number_of_leases() {
    let mut account = new(terms(limit(10_000), WindowRule::Lifetime));
    let mut left = 10_000;
    for (name, leases) in [("a", 1), ("b", 1), ("c", 2), ("d", 3)] {
        account.request_grant(&who(name), &for_a_call(100), at(0)).unwrap();
        left -= 100 + (left - 100) / (4 * leases);
        assert_eq!(account.reserved().tokens, 10_000 - left, "{name}");
    }
}

#[test]
fn a_lease_less_than_half_full_is_filled_ahead_but_never_with_the_last_room() {
    let ahead = GrantRequest {
        least: Amount::ZERO,
        ..for_a_call(100)
    };
    let full = 100 * PREFETCH_CALLS;
    let after = |limited: i64, spent: i64, waits: bool| {
        let mut account = new(terms(limit(limited), WindowRule::Lifetime));
        account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
        write(&mut account);
        account.apply_statement(&who("a"), &says(1, spent, 0, false), at(1));
        if waits {
            let refused = account
                .request_grant(&who("b"), &for_a_call(limited - 5_000), at(1))
                .unwrap_err();
            assert!(refused.contended);
        }
        let before = account.reserved().tokens;
        account.request_grant(&who("a"), &ahead, at(1)).unwrap();
        assert!(!account.must_wait("record of a", &ahead), "no call waits for it");
        account.check();
        (before, account.reserved().tokens)
    };
    assert_eq!(after(1_000_000, full / 2 + 1, false), (full / 2 - 1, full));
    assert_eq!(after(1_000_000, full / 2, false), (full / 2, full / 2));
    assert_eq!(after(30_000, full / 2 + 1, true).1, full / 2 - 1, "another one waits");
    // 1,000 of 4,000 are granted beyond the first call; then a quarter of what is left, if that is worth a call.
    assert_eq!(after(4_100, 1_000, false), (100, 100 + 3_000 / 4));
    assert_eq!(
        after(498, 0, false),
        (100 + 398 / 4, 100 + 398 / 4),
        "less than one call needs"
    );
}

#[test]
fn a_clipped_call_receives_what_is_left() {
    let mut account = new(terms(limit(100), WindowRule::Lifetime));
    let ask = GrantRequest {
        least: tokens(60),
        ..for_a_call(150)
    };
    account.request_grant(&who("a"), &ask, at(0)).unwrap();
    assert_eq!(account.reserved(), tokens(100));
    account.check();
}

#[test]
fn a_lease_that_lacks_one_kind_only_is_filled_ahead_with_that_kind() {
    let limits = LimitAmounts {
        calls: Some(1_000),
        ..limit(1_000_000)
    };
    let call = |tokens| Amount {
        tokens,
        calls: 1,
        ..Amount::ZERO
    };
    let ask = |least| GrantRequest {
        least,
        full: call(100),
        ..for_a_call(0)
    };
    let mut account = new(terms(limits, WindowRule::Lifetime));
    account.request_grant(&who("a"), &ask(call(100)), at(0)).unwrap();
    write(&mut account);
    let spent = LeaseStatement {
        spent: call(5_000),
        ..says(1, 0, 0, false)
    };
    account.apply_statement(&who("a"), &spent, at(1));
    account.request_grant(&who("a"), &ask(Amount::ZERO), at(1)).unwrap();
    let held = account.reserved();
    assert_eq!((held.tokens, held.calls), (100 * PREFETCH_CALLS, PREFETCH_CALLS - 1));
}

#[test]
fn an_answer_waits_for_a_write_only_if_what_is_written_is_not_enough_for_its_call() {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    let ahead = GrantRequest {
        least: Amount::ZERO,
        ..for_a_call(100)
    };
    account.request_grant(&who("a"), &ahead, at(0)).unwrap();
    assert!(account.reserved().tokens >= 100);
    assert!(!account.must_wait("record of a", &ahead), "no call waits for it");
    assert!(account.must_wait("record of a", &for_a_call(100)));
    write(&mut account);
    assert!(!account.must_wait("record of a", &for_a_call(100)));
    assert!(!account.must_wait("record of b", &for_a_call(100)), "it has no lease");
    let written = account.reserved().tokens;
    let second = GrantRequest {
        lease: Some(1),
        open: tokens(written - 50),
        ..for_a_call(51)
    };
    account.request_grant(&who("a"), &second, at(1)).unwrap();
    assert!(
        account.must_wait("record of a", &second),
        "one is lacking beside the open call"
    );
    let fits = GrantRequest {
        least: tokens(50),
        full: tokens(50),
        ..second
    };
    assert!(
        !account.must_wait("record of a", &fits),
        "more is planned, but not for this call"
    );
}

#[test]
fn a_sufficient_lease_is_not_extended() {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    account.request_grant(&who("a"), &for_a_call(50), at(0)).unwrap();
    write(&mut account);
    account.request_grant(&who("a"), &for_a_call(50), at(1)).unwrap();
    assert!(!account.is_changed());
    assert!(!account.must_wait("record of a", &for_a_call(50)));
}

#[test]
fn the_share_of_an_agent_is_enforced_across_its_gateways() {
    let own = LedgerTerms {
        per_agent: limit(50),
        ..terms(limit(1_000), hourly())
    };
    let mut account = new(own);
    spend(&mut account, "a", 20, at(0));
    account.request_grant(&who("a"), &for_a_call(30), at(1)).unwrap();
    let second = LeaseHolder {
        record: "second".into(),
        ..who("a")
    };
    let refused = account.request_grant(&second, &for_a_call(1), at(1)).unwrap_err();
    assert!(refused.per_agent && !refused.contended && !refused.never);
    account.request_grant(&who("b"), &for_a_call(50), at(1)).unwrap();
    account.check();
}

/// a and b hold 450 each of 1,000, in flight.
fn crowded() -> Account {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    let ask = for_a_call(450);
    account.request_grant(&who("a"), &ask, at(0)).unwrap();
    account.apply_statement(&who("a"), &says(1, 0, account.reserved().tokens - 450, false), at(0));
    account.request_grant(&who("b"), &ask, at(0)).unwrap();
    account.apply_statement(&who("b"), &says(2, 0, account.reserved().tokens - 900, false), at(0));
    assert_eq!(account.reserved(), tokens(900));
    write(&mut account);
    account
}

#[test]
fn the_longest_waiter_is_served_first() {
    let mut account = crowded();
    assert!(
        account
            .request_grant(&who("big"), &for_a_call(500), at(1))
            .unwrap_err()
            .contended
    );
    assert!(account.recalls());
    // There is room for this one, but it is kept for the one that came first.
    assert!(
        account
            .request_grant(&who("small"), &for_a_call(100), at(2))
            .unwrap_err()
            .contended
    );
    let back = account.durable_grants("record of a")[0].granted.tokens;
    account.apply_statement(&who("a"), &says(1, 0, back, true), at(3));
    assert!(account.has_room(&who("big"), &for_a_call(500)));
    assert!(!account.has_room(&who("small"), &for_a_call(100)));
    account
        .request_grant(&who("small"), &for_a_call(100), at(4))
        .unwrap_err();
    account.request_grant(&who("big"), &for_a_call(500), at(5)).unwrap();
    assert!(account.recalls(), "the small one still waits");
    account.request_grant(&who("small"), &for_a_call(50), at(6)).unwrap();
    assert!(!account.recalls());
    account.check();
}

/// Requests every second, as a gateway with a waiting call does, and is refused.
fn insist(account: &mut Account, name: &str, of: i64, seconds: std::ops::Range<i64>) {
    for second in seconds {
        account
            .request_grant(&who(name), &for_a_call(of), at(second))
            .unwrap_err();
    }
}

#[test]
fn a_waiter_that_stops_requesting_loses_its_place() {
    let silence = WAITER_TIMEOUT.as_secs();
    let mut account = crowded();
    account
        .request_grant(&who("gone"), &for_a_call(200), at(0))
        .unwrap_err();
    insist(&mut account, "small", 100, 1..silence);
    account
        .request_grant(&who("small"), &for_a_call(100), at(silence))
        .unwrap();
    // It requests again at the last moment and keeps its place.
    let mut account = crowded();
    insist(&mut account, "slow", 200, 0..1);
    insist(&mut account, "slow", 200, silence - 1..silence);
    insist(&mut account, "small", 100, silence..2 * silence - 1);
    account
        .request_grant(&who("small"), &for_a_call(100), at(2 * silence - 1))
        .unwrap();
}

#[test]
fn a_wait_ends_on_time_although_the_account_is_not_advanced() {
    let silence = WAITER_TIMEOUT.as_secs();
    let turn_ends = silence + silence * i64::from(BACKOFF_FACTOR);
    let goes_first_at = |second: i64| {
        let mut account = crowded();
        account.request_grant(&who("big"), &for_a_call(500), at(0)).unwrap_err();
        account
            .request_grant(&who("big"), &for_a_call(500), at(second))
            .unwrap_err();
        account.recalls()
    };
    assert!(!goes_first_at(silence), "others have priority");
    assert!(
        !goes_first_at(turn_ends - 1),
        "for as long as if it was advanced at {silence}"
    );
    assert!(goes_first_at(turn_ends));
    assert!(goes_first_at(3_600));
}

#[test]
fn amounts_held_by_dead_gateways_hold_others_back_only_for_a_while() {
    let mut account = crowded();
    let wait = CONTENTION_WAIT.as_secs();
    insist(&mut account, "big", 500, 0..wait);
    account
        .request_grant(&who("small"), &for_a_call(100), at(wait - 1))
        .unwrap_err();
    // Nothing was returned: big steps back, although it keeps requesting.
    account
        .request_grant(&who("big"), &for_a_call(500), at(wait))
        .unwrap_err();
    account
        .request_grant(&who("small"), &for_a_call(100), at(wait))
        .unwrap();
    account.apply_statement(&who("small"), &says(3, 0, 100, true), at(wait));
    let turn_ends = wait + wait * i64::from(BACKOFF_FACTOR);
    account
        .request_grant(&who("big"), &for_a_call(500), at(turn_ends - 1))
        .unwrap_err();
    account
        .request_grant(&who("other"), &for_a_call(100), at(turn_ends - 1))
        .unwrap();
    account.apply_statement(&who("other"), &says(4, 0, 100, true), at(turn_ends - 1));
    // Then it is its turn again.
    account
        .request_grant(&who("big"), &for_a_call(500), at(turn_ends))
        .unwrap_err();
    account
        .request_grant(&who("other"), &for_a_call(100), at(turn_ends))
        .unwrap_err();
    account.check();
}

#[test]
fn a_wait_continues_while_amounts_are_returned() {
    let mut account = crowded();
    let wait = CONTENTION_WAIT.as_secs();
    insist(&mut account, "big", 900, 0..wait - 1);
    account.apply_statement(
        &who("a"),
        &says(1, 0, account.durable_grants("record of a")[0].granted.tokens, true),
        at(wait - 1),
    );
    insist(&mut account, "big", 900, wait - 1..2 * wait - 2);
    account
        .request_grant(&who("small"), &for_a_call(100), at(2 * wait - 2))
        .unwrap_err();
    account
        .request_grant(&who("small"), &for_a_call(100), at(2 * wait - 1))
        .unwrap();
}

/// In each second `hog` requests all that is left, for a call that costs nothing in the end, and `small` a small
/// amount. Returns in how many of them `small` gets room.
fn served_beside(hog: &[&str], seconds: i64) -> i64 {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    let returns = |account: &mut Account, name: &str, second: i64| {
        for granted in account.durable_grants(&who(name).record) {
            account.apply_statement(
                &who(name),
                &says(granted.lease, 0, granted.granted.tokens, true),
                at(second),
            );
        }
    };
    let mut served = 0;
    for second in 0..seconds {
        // A call takes two seconds. After a recall, what no call needs is returned at once.
        for name in hog.iter().chain(&["small"]).filter(|_| second % 2 == 0) {
            returns(&mut account, name, second);
        }
        for name in hog {
            let _ = account.request_grant(&who(name), &for_a_call(1_000), at(second));
        }
        if account
            .request_grant(&who("small"), &for_a_call(10), at(second))
            .is_ok()
        {
            served += 1;
        }
        let _ = account.request_grant(&who("other"), &for_a_call(10), at(second));
        write(&mut account);
    }
    served
}

#[test]
fn calls_that_reserve_everything_and_cost_nothing_do_not_block_others() {
    for hogs in [&["h1"][..], &["h1", "h2", "h3", "h4", "h5", "h6"]] {
        let served = served_beside(hogs, 600);
        assert!(served >= 400, "{served} of 600 seconds beside {} hogs", hogs.len());
    }
}

#[test]
fn after_a_large_grant_others_have_priority_over_the_next_one_for_five_times_as_long() {
    let mut account = crowded();
    let large = |account: &mut Account, of: i64, second: i64| {
        account.request_grant(&who("big"), &for_a_call(of), at(second)).is_ok()
    };
    assert!(!large(&mut account, 520, 1) && account.recalls());
    let back = account.durable_grants("record of a")[0].granted.tokens;
    account.apply_statement(&who("a"), &says(1, 0, back, true), at(3));
    assert!(large(&mut account, 520, 4), "more than half of all");
    write(&mut account);
    account.apply_statement(&who("big"), &says(3, 0, 520, true), at(6));
    // It took from second 1 to second 6.
    let next = 6 + 5 * i64::from(BACKOFF_FACTOR);
    for second in [7, next - 1] {
        assert!(!large(&mut account, 560, second));
        assert!(!account.recalls(), "nothing is kept for it in second {second}");
    }
    let mut busy = account.clone();
    busy.request_grant(&who("c"), &for_a_call(450), at(next - 1)).unwrap();
    busy.request_grant(&who("mid"), &for_a_call(300), at(next - 1))
        .unwrap_err();
    assert!(busy.recalls(), "it wants no more than a third");
    account
        .request_grant(&who("small"), &for_a_call(100), at(next - 1))
        .unwrap();
    assert!(!large(&mut account, 560, next));
    assert!(account.recalls());
    account.check();
}

#[test]
fn a_large_grant_has_ended_once_its_gateway_holds_the_fair_part_of_all_that_hold_something() {
    let mut account = crowded();
    account.request_grant(&who("big"), &for_a_call(520), at(1)).unwrap_err();
    let back = account.durable_grants("record of a")[0].granted.tokens;
    account.apply_statement(&who("a"), &says(1, 0, back, true), at(3));
    account.request_grant(&who("big"), &for_a_call(520), at(4)).unwrap();
    account.request_grant(&who("c"), &for_a_call(30), at(5)).unwrap();
    write(&mut account);
    let waits = |returned: i64, second: i64| {
        let mut account = account.clone();
        account.apply_statement(&who("big"), &says(3, 0, returned, false), at(6));
        account
            .request_grant(&who("other"), &for_a_call(550), at(second))
            .unwrap_err();
        account.recalls()
    };
    // Of 1,000, a third is 333. If it has ended, it took from second 1 to second 6.
    let next = 6 + 5 * i64::from(BACKOFF_FACTOR);
    assert!(!waits(520 - 333, next - 1) && waits(520 - 333, next));
    let longest = 4 + CONTENTION_WAIT.as_secs();
    assert!(!waits(520 - 334, longest - 1) && waits(520 - 334, longest));
}

#[test]
fn a_request_above_what_others_could_return_does_not_wait_and_those_behind_it_do() {
    for more in [941, 1_001] {
        let mut account = crowded();
        account.request_grant(&who("spender"), &for_a_call(60), at(0)).unwrap();
        let spent = account.reserved().tokens - 900;
        account.apply_statement(&who("spender"), &says(3, 60, spent - 60, true), at(0));
        write(&mut account);
        for name in ["big", "next"] {
            let refused = account.request_grant(&who(name), &for_a_call(500), at(1)).unwrap_err();
            assert!(refused.contended);
        }
        let refused = account
            .request_grant(&who("big"), &for_a_call(more), at(2))
            .unwrap_err();
        assert_eq!((refused.contended, refused.never), (false, more > 1_000));
        let kept: Vec<&str> = account.waiting.iter().map(|waiter| waiter.record.as_str()).collect();
        assert_eq!(kept, ["record of next"]);
    }
}

#[test]
fn a_withdrawn_agent_waits_for_nothing() {
    let mut account = crowded();
    account.request_grant(&who("big"), &for_a_call(500), at(0)).unwrap_err();
    account.withdraw(&who("big").agent);
    assert!(!account.recalls());
    account.request_grant(&who("small"), &for_a_call(100), at(1)).unwrap();
}

#[test]
fn a_forfeited_gateway_waits_for_nothing() {
    let mut account = crowded();
    account.request_grant(&who("big"), &for_a_call(500), at(0)).unwrap_err();
    account.forfeit("record of big", at(1));
    assert!(!account.recalls());
    account.request_grant(&who("small"), &for_a_call(100), at(1)).unwrap();
}

#[test]
fn more_gateways_than_a_record_may_name_wait() {
    let mut account = new(terms(limit(1_000_000), WindowRule::Lifetime));
    for number in 0..MAX_LEASES {
        account
            .request_grant(&who(&number.to_string()), &for_a_call(1), at(0))
            .unwrap();
    }
    write(&mut account);
    let refused = account
        .request_grant(&who("one more"), &for_a_call(1), at(0))
        .unwrap_err();
    assert!(refused.contended && !refused.never);
    let ahead = |account: &mut Account, name: &str| {
        let ask = GrantRequest {
            least: Amount::ZERO,
            ..for_a_call(10)
        };
        let before = account.reserved().tokens;
        account.request_grant(&who(name), &ask, at(0)).unwrap();
        account.reserved().tokens > before
    };
    assert!(!ahead(&mut account, "one more"), "it would need a lease");
    assert!(ahead(&mut account, "5"));
    account.request_grant(&who("7"), &for_a_call(100), at(0)).unwrap();
    account.apply_statement(&who("7"), &says(8, 1, 0, true), at(1));
    write(&mut account);
    assert!(account.has_room(&who("one more"), &for_a_call(1)));
    account.request_grant(&who("one more"), &for_a_call(1), at(1)).unwrap();
}

#[test]
fn the_longest_record_is_far_below_the_size_limit_of_the_api_server() {
    let huge = |number: i64| Amount::from_fn(|_| number);
    let max = 1_000_000_000_000;
    let everything = LimitAmounts::from_fn(|_| Some(i64::MAX / 2));
    let mut account = new(LedgerTerms {
        per_agent: everything,
        ..terms(everything, hourly())
    });
    let long = |number: usize| LeaseHolder {
        record: format!("{number:032x}"),
        agent: NamespacedName::new("n".repeat(63), format!("{number:0>253}")),
        pod_uid: "u".repeat(36),
        epoch: 1_000_000,
    };
    let ask = GrantRequest {
        least: huge(max),
        full: huge(max),
        ..for_a_call(0)
    };
    let length = |account: &Account| {
        let record = account.record();
        let leases = serde_json::to_string(&record.holders).unwrap().len();
        let shares = serde_json::to_string(&record.shares).unwrap().len();
        (leases + shares, serde_json::to_string(&record).unwrap().len())
    };
    let mut made = 0;
    while account.request_grant(&long(made), &ask, at(0)).is_ok() {
        made += 1;
        account.confirm_record(&account.record());
    }
    let refused = account.request_grant(&long(made), &ask, at(0)).unwrap_err();
    assert!(made > 300 && refused.contended, "{made}");
    assert!(length(&account).0 <= 700_000, "{:?}", length(&account));
    // Each spends in every bucket.
    for piece in 0..8_i64 {
        for number in 0..made {
            let spent = says(i64::try_from(number).unwrap() + 1, 0, 0, false);
            let spent = LeaseStatement {
                spent: huge(max / 100 * (piece + 1)),
                ..spent
            };
            account.apply_statement(&long(number), &spent, at(piece * 600));
        }
    }
    let (parts, whole) = length(&account);
    assert!(parts <= 700_000 && whole <= 800_000, "{parts} {whole}");
}

#[test]
fn no_agent_of_very_many_exceeds_its_share() {
    let own = LedgerTerms {
        per_agent: limit(10_000),
        ..terms(limit(i64::MAX), WindowRule::Lifetime)
    };
    let mut account = new(own);
    let many = i64::try_from(MAX_SHARES).unwrap() + 20;
    for number in 1..=many {
        let name = who(&number.to_string());
        account.request_grant(&name, &for_a_call(number), at(0)).unwrap();
        account.apply_statement(&name, &says(number, number, 0, true), at(0));
        account.confirm_record(&account.record());
    }
    assert_eq!(account.shares().len(), MAX_SHARES);
    assert_eq!(account.used(), tokens(many * (many + 1) / 2));
    // The 20 with the least usage, 1 to 20, count as if each had used 20.
    let again = Account::restore(account.terms().clone(), &account.record(), at(1));
    for mut account in [account, again] {
        account.request_grant(&who("3"), &for_a_call(9_981), at(1)).unwrap_err();
        account.request_grant(&who("3"), &for_a_call(9_980), at(1)).unwrap();
        account
            .request_grant(&who("1000"), &for_a_call(9_001), at(1))
            .unwrap_err();
        account.request_grant(&who("1000"), &for_a_call(9_000), at(1)).unwrap();
    }
}

#[test]
fn a_full_lifetime_never_resets() {
    let mut account = new(terms(limit(100), WindowRule::Lifetime));
    spend(&mut account, "a", 100, at(0));
    assert_eq!(
        account
            .request_grant(&who("a"), &for_a_call(1), at(1))
            .unwrap_err()
            .resets_at,
        None
    );
}

#[test]
fn a_calendar_window_resets_at_its_end_unless_the_call_needs_a_top_up() {
    let daily = WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::UTC);
    let mut account = new(terms(limit(100), daily));
    account.top_up("t", tokens(50), at(0));
    spend(&mut account, "a", 150, at(0));
    let refused = account.request_grant(&who("a"), &for_a_call(100), at(1)).unwrap_err();
    assert_eq!(refused.resets_at, Some(at(6_400)));
    let refused = account.request_grant(&who("a"), &for_a_call(101), at(1)).unwrap_err();
    assert_eq!((refused.resets_at, refused.never), (None, false));
}

proptest! {
    /// At the predicted time the request fits, and a millisecond earlier it does not, if nothing else happens.
    #[test]
    fn resets_are_exact(
        rule in prop_oneof![
            (1..100_000_i64).prop_map(|seconds| WindowRule::Rolling(SignedDuration::from_secs(seconds))),
            Just(WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::get("America/New_York").unwrap())),
            Just(WindowRule::Lifetime),
        ],
        spent in proptest::collection::vec((0..3_usize, 1..60_i64, 0..20_000_i64), 1..20),
        top_ups in proptest::collection::vec((1..80_i64, 0..20_000_i64), 0..4),
        per_agent in proptest::option::of(50..120_i64),
        holds in 0..40_i64,
        call in 1..120_i64,
    ) {
        let mut account = new(LedgerTerms {
            limits: limit(100),
            per_agent: per_agent.map_or_else(LimitAmounts::default, limit),
            window: rule,
        });
        let mut now = 0;
        for (number, (more, wait)) in top_ups.iter().enumerate() {
            now += wait;
            account.top_up(&number.to_string(), tokens(*more), at(now));
        }
        for (agent, amount, wait) in &spent {
            now += wait;
            let name = ["a", "b", "c"][*agent];
            if account.request_grant(&who(name), &for_a_call(*amount), at(now)).is_ok() {
                write(&mut account);
                for granted in account.durable_grants(&who(name).record) {
                    account.apply_statement(&who(name), &says(granted.lease, *amount, 0, true), at(now));
                }
                write(&mut account);
            }
        }
        let _ = account.request_grant(&who("holder"), &for_a_call(holds), at(now));
        write(&mut account);
        let before = account.clone();
        let ask = for_a_call(call);
        if let Err(refused) = account.request_grant(&who("a"), &ask, at(now)) {
            match refused.resets_at {
                Some(reset) => {
                    let early = reset - SignedDuration::from_millis(1);
                    prop_assert!(early >= at(now) || reset == at(now));
                    if early >= at(now) {
                        prop_assert!(before.clone().request_grant(&who("a"), &ask, early).is_err());
                    }
                    prop_assert_eq!(before.clone().request_grant(&who("a"), &ask, reset), Ok(()));
                }
                None => {
                    for years in [1, 10] {
                        let later = at(now + years * 366 * 86_400);
                        prop_assert!(before.clone().request_grant(&who("a"), &ask, later).is_err());
                    }
                }
            }
        }
    }
}
