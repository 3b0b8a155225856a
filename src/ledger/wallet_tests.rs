//! Unit tests of the wallet.

use pretty_assertions::assert_eq;

use super::*;

/// The end of the leases that end by time.
const END: u64 = 1_000;

fn tokens(tokens: i64) -> Amount {
    Amount { tokens, ..Amount::ZERO }
}

fn draw(account: &str) -> AccountDraw<'_> {
    let limits = LimitAmounts {
        tokens: Some(1),
        ..LimitAmounts::default()
    };
    AccountDraw { account, limits }
}

fn grant(lease: LeaseId, granted: i64) -> (DurableGrant, Option<u64>) {
    let granted = DurableGrant {
        lease,
        granted: tokens(granted),
        spent: Amount::ZERO,
        returned: Amount::ZERO,
        ends: None,
    };
    (granted, None)
}

fn ending(lease: LeaseId, granted: i64) -> (DurableGrant, Option<u64>) {
    (grant(lease, granted).0, Some(END))
}

/// A wallet with lease 1 of each of these accounts, granted by record 1.
fn holding(accounts: &[(&str, i64)]) -> Wallet {
    let mut wallet = Wallet::default();
    for (account, granted) in accounts {
        wallet.apply_grants(account, 1, &[grant(1, *granted)], &[]);
    }
    wallet
}

fn reserve(wallet: &mut Wallet, account: &str, amount: i64) -> Reservation {
    wallet.reserve(&[draw(account)], &tokens(amount), 0).unwrap()
}

/// Granted, spent, returned and open of one lease.
fn held(wallet: &Wallet, account: &str, lease: LeaseId) -> (i64, i64, i64, i64) {
    let held = &wallet.purses[account].leases[&lease];
    let [granted, spent, returned, open] = [held.granted, held.spent, held.returned, held.open].map(|sum| sum.tokens);
    (granted, spent, returned, open)
}

fn is_closed(wallet: &Wallet, account: &str, lease: LeaseId) -> bool {
    wallet.purses[account].leases[&lease].closed
}

fn short(accounts: &[&str]) -> Result<Reservation, BTreeSet<AccountId>> {
    Err(accounts.iter().map(|account| (*account).to_owned()).collect())
}

#[test]
fn a_call_reserves_everything_or_nothing_and_accounts_that_fall_short_are_named() {
    let mut wallet = holding(&[("a", 10), ("b", 9), ("c", 9)]);
    let before = wallet.clone();
    let draws = ["a", "b", "c"].map(draw);
    assert_eq!(wallet.reserve(&draws, &tokens(10), 0), short(&["b", "c"]));
    assert_eq!(wallet, before);
    let reservation = wallet.reserve(&draws, &tokens(9), 0).unwrap();
    assert_eq!(reservation.leases.len(), 3);
    assert_eq!(held(&wallet, "a", 1), (10, 0, 0, 9));
    assert_eq!(wallet.reserve(&[draw("a")], &tokens(2), 0), short(&["a"]));
    assert!(wallet.reserve(&[draw("a")], &tokens(1), 0).is_ok());
    // An account without a lease is short; without accounts nothing is.
    assert_eq!(wallet.reserve(&[draw("x")], &tokens(0), 0), short(&["x"]));
    assert!(wallet.reserve(&[], &tokens(i64::MAX), 0).is_ok());
}

#[test]
fn only_the_kinds_that_an_account_limits_must_fit() {
    let mut wallet = holding(&[("a", 5)]);
    let dear = Amount {
        cost: 1_000,
        ..tokens(5)
    };
    assert!(wallet.reserve(&[draw("a")], &dear, 0).is_ok());
}

#[test]
fn a_call_uses_the_newest_lease_that_covers_it() {
    let mut wallet = holding(&[("a", 10)]);
    wallet.apply_grants("a", 2, &[grant(1, 10), grant(2, 5)], &[]);
    assert_eq!(reserve(&mut wallet, "a", 6).leases, [("a".to_owned(), 1)]);
    assert_eq!(reserve(&mut wallet, "a", 4).leases, [("a".to_owned(), 2)]);
    // 4 and 1 are left: a call is never paid from two leases.
    assert_eq!(wallet.reserve(&[draw("a")], &tokens(5), 0), short(&["a"]));
}

#[test]
fn a_lease_is_good_for_calls_before_its_end_and_not_at_it() {
    let mut wallet = Wallet::default();
    wallet.apply_grants("a", 1, &[ending(1, 10)], &[]);
    assert!(wallet.reserve(&[draw("a")], &tokens(1), END - 1).is_ok());
    assert_eq!(wallet.available("a", END - 1), tokens(9));
    assert_eq!(wallet.reserve(&[draw("a")], &tokens(1), END), short(&["a"]));
    assert_eq!(wallet.available("a", END), Amount::ZERO);
}

#[test]
fn a_settlement_frees_the_reservation_and_spends_the_bill() {
    let mut wallet = holding(&[("a", 10)]);
    let first = reserve(&mut wallet, "a", 6);
    let second = reserve(&mut wallet, "a", 4);
    wallet.settle(&first, &tokens(2));
    assert_eq!(held(&wallet, "a", 1), (10, 2, 0, 4));
    wallet.settle(&second, &Amount::ZERO);
    assert_eq!(held(&wallet, "a", 1), (10, 2, 0, 0));
    assert_eq!(wallet.available("a", 0), tokens(8));
}

#[test]
fn a_bill_above_its_reservation_is_spent_as_it_is() {
    let mut wallet = holding(&[("a", 10)]);
    let reservation = reserve(&mut wallet, "a", 6);
    wallet.settle(&reservation, &tokens(25));
    assert_eq!(held(&wallet, "a", 1), (10, 25, 0, 0));
    assert_eq!(wallet.available("a", 0), Amount::ZERO, "never negative");
    assert_eq!(wallet.reserve(&[draw("a")], &tokens(1), 0), short(&["a"]));
    wallet.apply_grants("a", 2, &[grant(1, 26)], &[]);
    assert!(wallet.reserve(&[draw("a")], &tokens(1), 0).is_ok());
}

#[test]
fn a_bill_above_its_reservation_uses_nothing_reserved_by_another_call() {
    let mut wallet = holding(&[("a", 10)]);
    let statement = |wallet: &Wallet| {
        wallet
            .statements()
            .map(|(_, statement)| statement.spent.tokens)
            .sum::<i64>()
    };
    let first = reserve(&mut wallet, "a", 8);
    let second = reserve(&mut wallet, "a", 1);
    wallet.settle(&second, &tokens(8));
    // 8 of the 10 are still held for the first call: only 1 of the bill can have come out of this lease.
    assert_eq!((statement(&wallet), wallet.available("a", 0)), (1, Amount::ZERO));
    wallet.settle(&first, &tokens(5));
    assert_eq!(statement(&wallet), 13, "everything is reported once nothing is open");
    assert_eq!(
        wallet.reserve(&[draw("a")], &tokens(1), 0),
        short(&["a"]),
        "the lease is overdrawn"
    );
}

#[test]
fn after_a_restart_the_open_call_is_restored_and_nothing_is_spendable_until_the_leader_answers() {
    let mut wallet = holding(&[("a", 10)]);
    let settled = reserve(&mut wallet, "a", 3);
    wallet.settle(&settled, &tokens(3));
    let open = reserve(&mut wallet, "a", 5);
    let epochs: Vec<_> = wallet.epochs().map(|(id, epoch)| (id.to_owned(), epoch)).collect();
    let mut again = Wallet::restore(epochs, wallet.rows());
    again.reopen(&open);
    assert_eq!(held(&again, "a", 1), (0, 3, 0, 5));
    assert_eq!(again.reserve(&[draw("a")], &tokens(1), 0), short(&["a"]));
    assert!(
        !again.apply_grants("a", 1, &[grant(1, 10)], &[]).changed,
        "what is granted need not be on disk"
    );
    assert_eq!(again, wallet);
    again.settle(&open, &open.amount);
    assert_eq!(held(&again, "a", 1), (10, 8, 0, 0));
}

#[test]
fn a_restored_wallet_has_the_rows_that_were_written() {
    let row = |lease, closed| LeaseRow {
        account: "a".into(),
        lease,
        spent: tokens(3),
        returned: tokens(2),
        closed,
    };
    let rows = [row(1, false), row(2, true)];
    let wallet = Wallet::restore([("a".to_owned(), 7)], rows.clone());
    assert_eq!(wallet.rows().collect::<Vec<_>>(), rows);
    assert_eq!(wallet.epochs().collect::<Vec<_>>(), [("a", 7)]);
}

#[test]
fn a_call_of_a_lease_that_is_not_on_disk_is_opened_and_settled_all_the_same() {
    let mut wallet = Wallet::default();
    let open = reserve(&mut holding(&[("a", 10)]), "a", 5);
    wallet.reopen(&open);
    wallet.settle(&open, &open.amount);
    assert_eq!(held(&wallet, "a", 1), (0, 5, 0, 0));
}

#[test]
fn unused_amounts_of_the_named_account_are_returned_once() {
    let mut wallet = holding(&[("a", 10), ("b", 10)]);
    let reservation = reserve(&mut wallet, "a", 4);
    assert!(wallet.give_back(Some("a")));
    assert_eq!(held(&wallet, "a", 1), (10, 0, 6, 4));
    assert_eq!(held(&wallet, "b", 1), (10, 0, 0, 0));
    assert!(!wallet.give_back(Some("a")));
    wallet.settle(&reservation, &tokens(1));
    assert!(wallet.give_back(None));
    assert_eq!(
        (held(&wallet, "a", 1), held(&wallet, "b", 1)),
        ((10, 1, 9, 0), (10, 0, 10, 0))
    );
    assert!(!is_closed(&wallet, "a", 1), "it may be refilled");
    wallet.apply_grants("a", 2, &[grant(1, 12)], &[]);
    assert_eq!(wallet.available("a", 0), tokens(2));
}

#[test]
fn unusable_leases_are_closed_and_the_others_stay() {
    let mut wallet = Wallet::default();
    wallet.apply_grants("a", 1, &[ending(1, 10), grant(2, 10)], &[]);
    wallet.apply_grants("b", 1, &[grant(1, 10)], &[]);
    let all = ["a", "b"].map(draw);
    assert!(!wallet.close_idle(&all, END - 1));
    // Its window has ended.
    assert!(wallet.close_idle(&all, END));
    assert!(is_closed(&wallet, "a", 1) && !is_closed(&wallet, "a", 2) && !is_closed(&wallet, "b", 1));
    // Its account no longer applies.
    assert!(wallet.close_idle(&all[..1], 0));
    assert!(is_closed(&wallet, "b", 1) && !is_closed(&wallet, "a", 2));
    assert!(!wallet.close_idle(&all[..1], END), "nothing is closed twice");
    assert_eq!(wallet.reserve(&[draw("b")], &tokens(1), 0), short(&["b"]));
}

#[test]
fn a_lease_with_an_open_call_returns_the_rest_and_is_closed_after_it() {
    let mut wallet = holding(&[("a", 10)]);
    let reservation = reserve(&mut wallet, "a", 4);
    assert!(wallet.close_all());
    assert!(!is_closed(&wallet, "a", 1));
    assert_eq!(held(&wallet, "a", 1), (10, 0, 6, 4));
    assert!(!wallet.close_all());
    wallet.settle(&reservation, &tokens(3));
    assert!(wallet.close_all());
    assert!(is_closed(&wallet, "a", 1));
    let (_, statement) = wallet.statements().next().unwrap();
    // The unbilled 1 needs no return: a closed lease holds nothing.
    assert_eq!(
        (statement.spent, statement.returned, statement.closed),
        (tokens(3), tokens(6), true)
    );
}

#[test]
fn an_older_record_of_a_deposed_leader_changes_nothing() {
    let mut wallet = holding(&[("a", 10)]);
    assert!(
        wallet.apply_grants("a", 5, &[grant(1, 20)], &[]).changed,
        "a newer epoch must be on disk"
    );
    let before = wallet.clone();
    assert!(!wallet.apply_grants("a", 4, &[grant(1, 90), grant(2, 90)], &[1]).changed);
    assert_eq!(wallet, before);
    // The same record again, late: totals do not decrease.
    assert!(!wallet.apply_grants("a", 5, &[grant(1, 15)], &[]).changed);
    assert_eq!(wallet, before);
    assert!(
        wallet.apply_grants("a", 5, &[grant(2, 1)], &[]).changed,
        "a new lease must be on disk"
    );
    assert_eq!(wallet.epochs().collect::<Vec<_>>(), [("a", 5)]);
}

#[test]
fn a_forgotten_lease_is_removed_and_one_with_an_open_call_is_only_closed() {
    let mut wallet = holding(&[("a", 10)]);
    wallet.apply_grants("a", 1, &[grant(2, 10)], &[]);
    let reservation = reserve(&mut wallet, "a", 4);
    assert_eq!(reservation.leases, [("a".to_owned(), 2)]);
    assert!(wallet.apply_grants("a", 1, &[], &[1, 2]).changed);
    assert_eq!(
        wallet
            .statements()
            .map(|(_, statement)| statement.lease)
            .collect::<Vec<_>>(),
        [2]
    );
    assert!(is_closed(&wallet, "a", 2));
    wallet.settle(&reservation, &tokens(4));
    assert!(wallet.apply_grants("a", 1, &[], &[2]).changed);
    assert_eq!(wallet.rows().count(), 0);
    assert!(!wallet.apply_grants("a", 1, &[], &[2]).changed, "the lease is unknown");
}

#[test]
fn more_is_requested_on_the_newest_usable_lease() {
    let mut wallet = Wallet::default();
    let ask = |wallet: &Wallet, now| wallet.grant_request("a", tokens(5), tokens(50), now);
    let fresh = ask(&wallet, 0);
    assert_eq!((fresh.lease, fresh.open), (None, Amount::ZERO));
    assert_eq!((fresh.least, fresh.full), (tokens(5), tokens(50)));
    wallet.apply_grants("a", 1, &[grant(1, 10), ending(2, 10)], &[]);
    reserve(&mut wallet, "a", 4);
    let asked = ask(&wallet, END - 1);
    assert_eq!((asked.lease, asked.open), (Some(2), tokens(4)));
    let asked = ask(&wallet, END);
    assert_eq!((asked.lease, asked.open), (Some(1), Amount::ZERO));
}

#[test]
fn the_lacking_kind_is_the_first_limited_one_that_has_too_little() {
    let mut wallet = Wallet::default();
    let granted = DurableGrant {
        lease: 1,
        granted: Amount { calls: 1, ..tokens(10) },
        spent: Amount::ZERO,
        returned: Amount::ZERO,
        ends: None,
    };
    wallet.apply_grants("a", 1, &[(granted, None)], &[]);
    let both = LimitAmounts {
        tokens: Some(100),
        calls: Some(100),
        ..LimitAmounts::default()
    };
    let draw = AccountDraw {
        account: "a",
        limits: both,
    };
    let call = |calls, amount| Amount {
        calls,
        ..tokens(amount)
    };
    let dear = Amount { cost: 1, ..call(1, 10) };
    assert_eq!(wallet.lacking(&draw, &dear, 0), None, "cost is not limited");
    assert_eq!(wallet.lacking(&draw, &call(1, 11), 0), Some(AmountKind::Tokens));
    assert_eq!(wallet.lacking(&draw, &call(2, 10), 0), Some(AmountKind::Calls));
    assert_eq!(
        wallet.lacking(&AccountDraw { account: "b", ..draw }, &call(0, 1), 0),
        Some(AmountKind::Tokens)
    );
}

/// A lease as the leader knows it.
fn known(lease: LeaseId, granted: i64, spent: i64, returned: i64) -> (DurableGrant, Option<u64>) {
    let granted = DurableGrant {
        spent: tokens(spent),
        returned: tokens(returned),
        ..grant(lease, granted).0
    };
    (granted, None)
}

#[test]
fn a_restored_disk_makes_no_amount_spendable_again() {
    let row = |spent, returned| LeaseRow {
        account: "a".into(),
        lease: 7,
        spent: tokens(spent),
        returned: tokens(returned),
        closed: false,
    };
    // The leader knows 900 of 1,000 as spent; 100 are on disk.
    let mut wallet = Wallet::restore([("a".to_owned(), 3)], [row(100, 0)]);
    let news = wallet.apply_grants("a", 9, &[known(7, 1_000, 900, 0)], &[]);
    assert_eq!((news.changed, news.lost), (true, vec![7]));
    assert_eq!(wallet.available("a", 0), Amount::ZERO);
    let statement = |wallet: &Wallet| wallet.statements().next().unwrap().1;
    assert_eq!(
        (statement(&wallet).spent, statement(&wallet).closed),
        (tokens(1_000), true)
    );
    let again = wallet.apply_grants("a", 9, &[known(7, 1_000, 1_000, 0)], &[]);
    assert_eq!(again, GrantUpdate::default(), "the loss is known now");
    // What was returned is not spent.
    let mut wallet = Wallet::restore([], [row(100, 0)]);
    assert_eq!(wallet.apply_grants("a", 9, &[known(7, 1_000, 100, 600)], &[]).lost, [7]);
    assert_eq!(
        (statement(&wallet).spent, statement(&wallet).returned),
        (tokens(400), tokens(600))
    );
    // A lease with spending that the disk has never seen is lost, too.
    let mut wallet = Wallet::default();
    assert_eq!(wallet.apply_grants("a", 9, &[known(8, 50, 1, 0)], &[]).lost, [8]);
    assert_eq!(wallet.available("a", 0), Amount::ZERO);
    // A lease that knows at least as much as the leader has lost nothing.
    for spent in [900, 901] {
        let mut wallet = Wallet::restore([], [row(spent, 0)]);
        assert_eq!(
            wallet.apply_grants("a", 9, &[known(7, 1_000, 900, 0)], &[]).lost,
            [0; 0]
        );
        assert_eq!(wallet.available("a", 0), tokens(1_000 - spent));
    }
}
