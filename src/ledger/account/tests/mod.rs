//! Tests of an account: its guarantees, event by event, and under any order of events.

mod availability;
mod edits;
mod holders;
mod order;

use jiff::{SignedDuration, Timestamp};

use super::*;
use agentloop_api::NamespacedName;
use agentloop_api::budget::LedgerRecord;

pub(super) const START: i64 = 1_700_000_000;

/// This many seconds after the start, which is a Tuesday, 22:13:20 UTC.
pub(super) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(START + seconds).unwrap()
}

pub(super) fn tokens(tokens: i64) -> Amount {
    Amount { tokens, ..Amount::ZERO }
}

pub(super) fn limit(tokens: i64) -> LimitAmounts {
    LimitAmounts {
        tokens: Some(tokens),
        ..LimitAmounts::default()
    }
}

pub(super) fn hourly() -> WindowRule {
    WindowRule::Rolling(SignedDuration::from_hours(1))
}

pub(super) fn terms(limits: LimitAmounts, window: WindowRule) -> LedgerTerms {
    LedgerTerms {
        limits,
        per_agent: LimitAmounts::default(),
        window,
    }
}

/// The gateway of an Agent.
pub(super) fn who(name: &str) -> LeaseHolder {
    LeaseHolder {
        record: format!("record of {name}"),
        agent: NamespacedName::new("n", name),
        pod_uid: "p".into(),
        epoch: 1,
    }
}

pub(super) fn for_a_call(of: i64) -> GrantRequest {
    GrantRequest {
        lease: None,
        open: Amount::ZERO,
        least: tokens(of),
        full: tokens(of),
    }
}

pub(super) fn says(lease: LeaseId, spent: i64, returned: i64, closed: bool) -> LeaseStatement {
    LeaseStatement {
        lease,
        spent: tokens(spent),
        returned: tokens(returned),
        closed,
    }
}

pub(super) fn new(terms: LedgerTerms) -> Account {
    Account::restore(terms, &LedgerRecord::default(), at(0))
}

/// Writes the account as a leader does, and restores it as the next leader does: both are equal.
pub(super) fn write(account: &mut Account) {
    let record = account.record();
    assert_eq!(record.epoch, account.epoch() + 1);
    account.confirm_record(&record);
    let text = serde_json::to_string(&record).unwrap();
    let read: LedgerRecord = serde_json::from_str(&text).unwrap();
    assert_eq!(read, record);
    let next = Account::restore(account.terms().clone(), &read, account.time());
    assert_eq!(next.used(), account.used());
    assert_eq!(next.reserved(), account.reserved());
    assert_eq!(next.limits(), account.limits());
    assert_eq!(next.record().holders, record.holders);
    account.check();
}

/// Spends everything of a lease that is written and closed at once.
pub(super) fn spend(account: &mut Account, name: &str, amount: i64, now: Timestamp) {
    account.request_grant(&who(name), &for_a_call(amount), now).unwrap();
    write(account);
    for granted in account.durable_grants(&who(name).record) {
        let spent = amount.min(granted.granted.tokens);
        assert!(account.apply_statement(&who(name), &says(granted.lease, spent, 0, true), now));
    }
    write(account);
    assert_eq!(account.reserved(), Amount::ZERO);
}

impl Account {
    /// The sums match the leases, and nothing is overspent.
    pub(super) fn check(&self) {
        let outstanding = |of: &dyn Fn(&Lease) -> bool| {
            let leases = self.leases.iter().filter(|(_, lease)| of(lease));
            leases.fold(Amount::ZERO, |sum, (_, lease)| {
                sum.checked_add(&lease.outstanding()).unwrap()
            })
        };
        assert_eq!(self.leases.outstanding(), outstanding(&|_| true));
        for (_, lease) in self.leases.iter() {
            let agent = outstanding(&|other| other.who.agent == lease.who.agent);
            assert_eq!(self.leases.outstanding_of(&lease.who.agent), agent);
            let record = outstanding(&|other| other.who.record == lease.who.record);
            assert_eq!(self.leases.outstanding_at(&lease.who.record), record);
        }
        let settled = self.settled.buckets();
        let sum = settled
            .iter()
            .fold(Amount::ZERO, |sum, bucket| sum.checked_add(&bucket.amount).unwrap());
        assert_eq!(self.used(), sum);
        // Everything due was handled: doing it again changes nothing.
        let mut looked = self.clone();
        looked.refresh();
        assert!(looked.due >= self.due);
        looked.due = self.due;
        assert_eq!(looked, *self);
    }
}

#[test]
fn a_call_that_fits_is_granted_once_it_is_written_and_not_earlier() {
    let mut account = new(terms(limit(100), WindowRule::Lifetime));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    assert_eq!(account.reserved(), tokens(100));
    assert!(account.is_urgent());
    assert!(
        account
            .durable_grants("record of a")
            .iter()
            .all(|lease| lease.granted.is_zero())
    );
    write(&mut account);
    assert!(!account.is_urgent() && !account.is_changed());
    let granted = DurableGrant {
        lease: 1,
        granted: tokens(100),
        spent: Amount::ZERO,
        returned: Amount::ZERO,
        ends: None,
    };
    assert_eq!(account.durable_grants("record of a"), [granted]);
}

#[test]
fn a_limit_trips_at_the_first_token_above_it() {
    let mut account = new(terms(limit(100), WindowRule::Lifetime));
    spend(&mut account, "a", 60, at(0));
    assert_eq!(account.request_grant(&who("b"), &for_a_call(40), at(1)), Ok(()));
    assert_eq!(account.used().tokens + account.reserved().tokens, 100);
    let refused = account.request_grant(&who("c"), &for_a_call(1), at(1)).unwrap_err();
    assert_eq!(
        (refused.kind, refused.never, refused.resets_at),
        (AmountKind::Tokens, false, None)
    );
    assert!(refused.contended, "b holds 40 unspent");
}

#[test]
fn zero_blocks_everything() {
    let mut account = new(terms(limit(0), hourly()));
    let refused = account.request_grant(&who("a"), &for_a_call(1), at(0)).unwrap_err();
    assert!(refused.never);
}

#[test]
fn a_call_above_the_whole_limit_never_fits() {
    let mut account = new(terms(limit(100), hourly()));
    assert!(
        account
            .request_grant(&who("a"), &for_a_call(101), at(0))
            .unwrap_err()
            .never
    );
    let mut own = new(LedgerTerms {
        per_agent: limit(30),
        ..terms(limit(100), hourly())
    });
    let refused = own.request_grant(&who("a"), &for_a_call(31), at(0)).unwrap_err();
    assert!(refused.never && refused.per_agent);
    assert_eq!(own.request_grant(&who("a"), &for_a_call(30), at(0)), Ok(()));
}

#[test]
fn repeated_or_late_totals_count_once() {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    write(&mut account);
    for (spent, returned) in [(10, 0), (30, 5), (10, 0), (30, 5), (20, 5)] {
        assert!(account.apply_statement(&who("a"), &says(1, spent, returned, false), at(1)));
        account.check();
    }
    assert_eq!(account.used(), tokens(30));
    let granted = account.durable_grants("record of a")[0].granted.tokens;
    assert_eq!(account.reserved(), tokens(granted - 35));
    write(&mut account);
    assert!(account.apply_statement(&who("a"), &says(1, 30, 5, false), at(2)));
    assert!(!account.is_changed(), "a repeated statement causes no write");
}

#[test]
fn a_statement_of_another_gateway_changes_nothing() {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    write(&mut account);
    let before = account.clone();
    assert!(!account.apply_statement(&who("b"), &says(1, 50, 0, true), at(0)));
    assert!(!account.apply_statement(&who("a"), &says(2, 50, 0, true), at(0)));
    assert_eq!(account, before);
}

#[test]
fn implausible_numbers_of_a_gateway_free_no_budget() {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    write(&mut account);
    assert!(account.apply_statement(&who("a"), &says(1, i64::MAX, i64::MAX, false), at(0)));
    assert!(account.apply_statement(&who("a"), &says(1, -1, -1, false), at(0)));
    account.request_grant(&who("b"), &for_a_call(1), at(0)).unwrap_err();
    account
        .request_grant(&who("b"), &for_a_call(i64::MAX), at(0))
        .unwrap_err();
    let record = account.record();
    let mut next = Account::restore(account.terms().clone(), &record, at(1));
    next.request_grant(&who("b"), &for_a_call(1), at(1)).unwrap_err();
}

#[test]
fn a_closed_lease_is_known_until_that_is_written() {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    write(&mut account);
    let before = account.record();
    assert!(account.apply_statement(&who("a"), &says(1, 40, 0, true), at(1)));
    assert_eq!((account.used(), account.reserved()), (tokens(40), Amount::ZERO));
    assert!(account.durable_grants("record of a").is_empty());
    assert_eq!(account.holders().count(), 0);
    // A record composed before still has it: the gateway must report it again to the next leader.
    account.confirm_record(&before);
    assert!(account.apply_statement(&who("a"), &says(1, 40, 0, true), at(1)));
    write(&mut account);
    assert!(!account.apply_statement(&who("a"), &says(1, 40, 0, true), at(1)));
    assert_eq!(account.used(), tokens(40));
}

#[test]
fn an_amount_held_by_a_dead_gateway_is_spent() {
    let mut account = new(terms(limit(100), WindowRule::Lifetime));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    write(&mut account);
    account.apply_statement(&who("a"), &says(1, 30, 10, false), at(1));
    assert_eq!(account.forfeit("record of a", at(2)), tokens(60));
    assert_eq!(account.forfeit("record of a", at(2)), Amount::ZERO, "once");
    assert_eq!((account.used(), account.reserved()), (tokens(90), Amount::ZERO));
    // It was not lost after all, and reports what it spent since: that was counted.
    account.apply_statement(&who("a"), &says(1, 90, 10, true), at(3));
    assert_eq!(account.used(), tokens(90));
    write(&mut account);
    account.request_grant(&who("b"), &for_a_call(10), at(4)).unwrap();
    account.request_grant(&who("c"), &for_a_call(1), at(4)).unwrap_err();
}

#[test]
fn a_bill_above_its_bound_is_charged_and_nothing_more_is_granted() {
    let mut account = new(terms(limit(100), hourly()));
    account.request_grant(&who("a"), &for_a_call(50), at(0)).unwrap();
    write(&mut account);
    account.apply_statement(&who("a"), &says(1, 130, 0, false), at(1));
    assert_eq!((account.used(), account.reserved()), (tokens(130), Amount::ZERO));
    let refused = account.request_grant(&who("b"), &for_a_call(1), at(2)).unwrap_err();
    assert!(!refused.contended);
    assert!(account.recalls(), "more is outstanding than the limit allows");
    write(&mut account);
    account.request_grant(&who("b"), &for_a_call(1), at(3_800)).unwrap();
}

#[test]
fn a_leader_continues_from_the_time_and_the_amounts_of_its_predecessor() {
    let mut account = new(terms(limit(100), hourly()));
    spend(&mut account, "a", 30, at(1_000));
    account.request_grant(&who("b"), &for_a_call(50), at(1_000)).unwrap();
    write(&mut account);
    let record = {
        let mut ahead = account.clone();
        ahead.advance(at(1_000));
        ahead.record()
    };
    // Its clock is slow by a quarter of an hour.
    let mut next = Account::restore(account.terms().clone(), &record, at(100));
    assert_eq!(next.time(), at(1_000));
    assert_eq!((next.used(), next.reserved()), (tokens(30), account.reserved()));
    next.apply_statement(&who("b"), &says(2, 20, 0, true), at(100));
    assert_eq!(next.time(), at(1_000));
    assert_eq!((next.used(), next.reserved()), (tokens(50), Amount::ZERO));
}

#[test]
fn each_kind_has_its_own_limit() {
    let limits = LimitAmounts {
        calls: Some(2),
        cost: Some(1_000),
        ..LimitAmounts::default()
    };
    let mut account = new(terms(limits, WindowRule::Lifetime));
    let call = |cost| GrantRequest {
        least: Amount {
            tokens: 1_000_000,
            calls: 1,
            cost,
            ..Amount::ZERO
        },
        full: Amount {
            tokens: 1_000_000,
            calls: 1,
            cost,
            ..Amount::ZERO
        },
        ..for_a_call(0)
    };
    account.request_grant(&who("a"), &call(600), at(0)).unwrap();
    assert_eq!(
        account.request_grant(&who("b"), &call(500), at(0)).unwrap_err().kind,
        AmountKind::Cost
    );
    account.request_grant(&who("b"), &call(300), at(0)).unwrap();
    assert_eq!(
        account.request_grant(&who("c"), &call(0), at(0)).unwrap_err().kind,
        AmountKind::Calls
    );
    assert_eq!(account.reserved().tokens, 0, "tokens are not limited");
}
