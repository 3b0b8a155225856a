//! Who holds leases, and what happens to those of a gateway that has stopped.

use pretty_assertions::assert_eq;

use super::*;
use agentloop_api::budget::CalendarPeriod;
use jiff::tz::TimeZone;

/// An account of which a holds lease 1.
fn held(window: WindowRule) -> Account {
    let mut account = new(terms(limit(1_000), window));
    account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
    write(&mut account);
    account
}

#[test]
fn a_record_with_leases_of_another_agent_indicates_a_copied_volume() {
    let account = held(hourly());
    assert!(!account.is_of_another(&who("a")));
    assert!(!account.is_of_another(&who("b")), "its record has no leases");
    let copy = LeaseHolder {
        agent: who("b").agent,
        ..who("a")
    };
    assert!(account.is_of_another(&copy));
}

#[test]
fn a_lease_is_held_by_the_pod_that_reported_it_last() {
    let mut account = held(hourly());
    let next = LeaseHolder {
        pod_uid: "q".into(),
        epoch: 2,
        ..who("a")
    };
    assert!(account.is_held_by(1, &who("a")) && !account.is_held_by(1, &next));
    assert!(!account.is_held_by(2, &who("a")), "there is no such lease");
    account.apply_statement(&next, &says(1, 0, 0, false), at(1));
    assert!(!account.is_held_by(1, &who("a")) && account.is_held_by(1, &next));
}

#[test]
fn a_gateway_is_a_holder_until_its_lease_is_closed() {
    let mut account = held(hourly());
    assert!(account.is_holder("record of a") && !account.is_holder("record of b"));
    account.apply_statement(&who("a"), &says(1, 0, 0, true), at(1));
    assert!(!account.is_holder("record of a"));
}

#[test]
fn known_total_usage_counts_unless_it_is_settled_or_held() {
    let mut account = new(terms(limit(1_000), WindowRule::Lifetime));
    let agent = who("a").agent;
    spend(&mut account, "a", 100, at(0));
    account.charge_at_least(&agent, &tokens(100), at(1));
    assert!(!account.is_changed());
    account.charge_at_least(&agent, &tokens(101), at(1));
    assert!(account.is_changed());
    assert_eq!((account.used(), account.share_of(&agent)), (tokens(101), tokens(101)));
    account.request_grant(&who("b"), &for_a_call(50), at(2)).unwrap();
    let held = account.reserved().tokens;
    account.charge_at_least(&agent, &tokens(101 + held), at(2));
    assert_eq!(account.used(), tokens(101));
    account.charge_at_least(&agent, &tokens(103 + held), at(2));
    assert_eq!((account.used(), account.share_of(&agent)), (tokens(103), tokens(103)));
    assert_eq!(account.share_of(&who("b").agent), Amount::ZERO);
}

#[test]
fn the_record_of_a_stopped_gateway_is_awaited_for_a_rolling_window_and_at_most_a_day() {
    let after = |window| held(window).forfeit_after("record of a");
    assert_eq!(after(hourly()), Some(SignedDuration::from_hours(1)));
    let rolling = |hours| WindowRule::Rolling(SignedDuration::from_hours(hours));
    assert_eq!(after(rolling(23)), Some(SignedDuration::from_hours(23)));
    assert_eq!(after(rolling(25)), Some(MAX_RECORD_WAIT));
    assert_eq!(after(WindowRule::Lifetime), None);
}

#[test]
fn a_lease_of_a_calendar_window_is_forfeited_once_its_window_is_over() {
    let mut account = held(WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::UTC));
    // Midnight is 6,400 s after the start.
    account.advance(at(6_399));
    assert_eq!(account.forfeit_after("record of a"), None);
    account.advance(at(6_400));
    assert_eq!(account.forfeit_after("record of a"), Some(SignedDuration::ZERO));
    account.apply_statement(&who("a"), &says(1, 0, 0, true), at(6_400));
    assert_eq!(account.forfeit_after("record of a"), None, "it is closed");
}

#[test]
fn the_grants_of_a_record_that_was_not_written_may_be_withdrawn() {
    for written in [false, true] {
        let mut account = new(terms(limit(1_000), hourly()));
        account.request_grant(&who("a"), &for_a_call(100), at(0)).unwrap();
        let record = account.compose();
        if written {
            account.confirm_record(&record);
        }
        account.discard_record();
        account.set_terms(terms(limit(50), hourly()), at(1));
        assert_eq!(account.reserved().is_zero(), !written);
        account.check();
    }
}

#[test]
fn usage_of_a_lease_of_a_past_calendar_window_counts_there_and_not_in_the_next_one() {
    let today = held(WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::UTC));
    // Midnight is 6,400 s after the start.
    for (second, used) in [(6_399, 30), (6_400, 0)] {
        let mut account = today.clone();
        assert!(account.apply_statement(&who("a"), &says(1, 30, 0, false), at(second)));
        assert_eq!(account.used(), tokens(used), "{second}");
        assert_eq!(account.share_of(&who("a").agent), tokens(used));
    }
}

#[test]
fn a_call_receives_another_lease_once_its_own_is_closed_or_of_a_past_window() {
    let grants = |mut account: Account, second: i64| {
        account.request_grant(&who("a"), &for_a_call(100), at(second)).unwrap();
        write(&mut account);
        let grants = account.durable_grants("record of a");
        grants.iter().map(|grant| grant.lease).collect::<Vec<_>>()
    };
    let open = held(WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::UTC));
    assert_eq!(grants(open.clone(), 1), [1]);
    assert_eq!(grants(open.clone(), 6_400), [1, 2]);
    let mut closed = open;
    closed.apply_statement(&who("a"), &says(1, 0, 0, true), at(1));
    assert_eq!(grants(closed, 1), [2]);
}

#[test]
fn all_that_is_charged_is_counted_in_whatever_window_and_never_less() {
    let mut account = new(terms(limit(1_000), hourly()));
    spend(&mut account, "a", 100, at(0));
    spend(&mut account, "b", 50, at(1));
    assert_eq!((account.charged(), account.used()), (tokens(150), tokens(150)));
    account.advance(at(2 * 3600));
    assert_eq!((account.charged(), account.used()), (tokens(150), Amount::ZERO));
    account.request_grant(&who("c"), &for_a_call(30), at(7200)).unwrap();
    write(&mut account);
    let lost = account.forfeit(&who("c").record, at(7201));
    assert_eq!(
        account.charged().tokens,
        150 + lost.tokens,
        "a forfeited amount is charged too"
    );
    let next = Account::restore(account.terms().clone(), &account.record(), at(7202));
    assert_eq!(next.charged(), Amount::ZERO, "the next leader begins again");
}
