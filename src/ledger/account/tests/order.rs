//! Any order of events: nothing is overspent, nothing leaks, nothing counts twice, and the sums are right.

use jiff::tz::TimeZone;
use proptest::prelude::*;

use super::*;
use agentloop_api::budget::CalendarPeriod;

const GATEWAYS: usize = 4;

#[derive(Clone, Debug)]
enum Event {
    /// A gateway requests a call of this amount and spends this share of it, in percent.
    Call(usize, i64, i64),
    GiveBack(usize),
    Close(usize),
    Die(usize),
    /// A gateway's statements are repeated, followed by an older one.
    Repeat(usize),
    Write,
    /// A record is composed now and written only later.
    WriteLate,
    /// Another leader takes over from what is written.
    Failover,
    Wait(i64),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => (0..GATEWAYS, 1..300_i64, 0..=100_i64).prop_map(|(gateway, of, spent)| Event::Call(gateway, of, spent)),
        2 => (0..GATEWAYS).prop_map(Event::GiveBack),
        2 => (0..GATEWAYS).prop_map(Event::Close),
        1 => (0..GATEWAYS).prop_map(Event::Die),
        2 => (0..GATEWAYS).prop_map(Event::Repeat),
        4 => Just(Event::Write),
        2 => Just(Event::WriteLate),
        2 => Just(Event::Failover),
        3 => (1..3_000_i64).prop_map(Event::Wait),
    ]
}

/// A gateway's view of its leases: granted, spent, returned, closed.
#[derive(Clone, Debug, Default)]
struct Gateway {
    made: u32,
    leases: std::collections::BTreeMap<LeaseId, (i64, i64, i64, bool)>,
    statements: Vec<LeaseStatement>,
}

struct OrderHarness {
    account: Account,
    stored: LedgerRecord,
    late: Option<LedgerRecord>,
    gateways: Vec<Gateway>,
    now: i64,
    /// Actual spending: when, by whom, how much.
    spent: Vec<(i64, usize, i64)>,
    /// What was lost with its gateway: it counts, spent or not.
    lost: i64,
}

impl OrderHarness {
    fn who(&self, gateway: usize) -> LeaseHolder {
        LeaseHolder {
            record: format!("{gateway}-{}", self.gateways[gateway].made),
            ..who(["a", "b", "c", "d"][gateway])
        }
    }

    fn write(&mut self, record: &LedgerRecord) {
        if record.epoch == self.stored.epoch + 1 {
            self.stored = record.clone();
            self.account.confirm_record(record);
        }
    }

    fn say(&mut self, gateway: usize) {
        let who = self.who(gateway);
        let leases = self.gateways[gateway].leases.clone();
        for (lease, (_, spent, returned, closed)) in leases {
            let statement = says(lease, spent, returned, closed);
            self.gateways[gateway].statements.push(statement.clone());
            if !self.account.apply_statement(&who, &statement, at(self.now)) {
                self.gateways[gateway].leases.remove(&lease);
            }
        }
    }

    fn listen(&mut self, gateway: usize) {
        let granted = self.account.durable_grants(&self.who(gateway).record);
        for grant in granted {
            let ended = grant.ends.is_some_and(|end| end <= at(self.now));
            let lease = self.gateways[gateway].leases.entry(grant.lease).or_default();
            lease.0 = lease.0.max(grant.granted.tokens);
            if ended && !lease.3 {
                lease.3 = true;
            }
        }
    }

    fn event(&mut self, event: &Event) {
        match event {
            Event::Call(gateway, of, percent) => {
                self.say(*gateway);
                let who = self.who(*gateway);
                let _ = self.account.request_grant(&who, &for_a_call(*of), at(self.now));
                self.listen(*gateway);
                let free = |lease: &&mut (i64, i64, i64, bool)| !lease.3 && lease.0 - lease.1 - lease.2 >= *of;
                if let Some(lease) = self.gateways[*gateway].leases.values_mut().find(free) {
                    lease.1 += of * percent / 100;
                    self.spent.push((self.now, *gateway, of * percent / 100));
                }
            }
            Event::GiveBack(gateway) | Event::Close(gateway) => {
                for lease in self.gateways[*gateway].leases.values_mut().filter(|lease| !lease.3) {
                    lease.2 = lease.0 - lease.1;
                    lease.3 = matches!(event, Event::Close(_));
                }
                self.say(*gateway);
            }
            Event::Die(gateway) => {
                self.lost += self.account.forfeit(&self.who(*gateway).record, at(self.now)).tokens;
                self.gateways[*gateway] = Gateway {
                    made: self.gateways[*gateway].made + 1,
                    ..Gateway::default()
                };
            }
            Event::Repeat(gateway) => {
                let who = self.who(*gateway);
                for statement in self.gateways[*gateway].statements.clone() {
                    self.account.apply_statement(&who, &statement, at(self.now));
                }
            }
            Event::Write => {
                let record = self.account.record();
                self.write(&record);
            }
            Event::WriteLate => match self.late.take() {
                Some(record) => self.write(&record),
                None => self.late = Some(self.account.record()),
            },
            Event::Failover => {
                self.late = None;
                self.account = Account::restore(self.account.terms().clone(), &self.stored, at(self.now));
            }
            Event::Wait(seconds) => {
                self.now += seconds;
                self.account.advance(at(self.now));
            }
        }
    }

    fn spent_since(&self, from: i64) -> i64 {
        self.spent
            .iter()
            .filter(|(when, _, _)| *when > from)
            .map(|(_, _, amount)| amount)
            .sum()
    }

    fn check(&self) {
        self.account.check();
        let taken = self.account.used().tokens + self.account.reserved().tokens;
        assert!(taken <= 1_000, "{taken}");
        // Actual spending by the times of the calls.
        match &self.account.terms().window {
            WindowRule::Rolling(length) => {
                for (end, _, _) in &self.spent {
                    let since = end - length.as_secs();
                    let within = self.spent.iter().filter(|(when, _, _)| *when > since && when <= end);
                    assert!(within.map(|(_, _, amount)| amount).sum::<i64>() <= 1_000);
                }
            }
            WindowRule::Calendar(..) => {
                let window = |when: i64| self.account.terms().window.start(at(when));
                for (when, _, _) in &self.spent {
                    let same = self
                        .spent
                        .iter()
                        .filter(|(other, _, _)| window(*other) == window(*when));
                    assert!(same.map(|(_, _, amount)| amount).sum::<i64>() <= 1_000);
                }
            }
            WindowRule::Lifetime => assert!(self.spent_since(-1) <= 1_000),
        }
    }

    /// All gateways close, and everything is written: nothing is outstanding, and what counts is what was spent.
    fn quiet(&mut self) {
        for gateway in 0..GATEWAYS {
            self.listen(gateway);
            self.event(&Event::Close(gateway));
        }
        // Leases forgotten in a failover are closed, too: their holders are known.
        self.event(&Event::Write);
        for gateway in 0..GATEWAYS {
            self.listen(gateway);
            self.event(&Event::Close(gateway));
        }
        let forgotten: Vec<String> = self.account.holders().map(|who| who.record.clone()).collect();
        for record in forgotten {
            // A gateway that was lost between terms.
            self.lost += self.account.forfeit(&record, at(self.now)).tokens;
        }
        self.event(&Event::Write);
        assert_eq!(self.account.reserved(), Amount::ZERO);
        assert_eq!(self.account.holders().count(), 0);
        if self.account.terms().window == WindowRule::Lifetime {
            let used = self.account.used().tokens;
            let spent = self.spent_since(-1);
            assert!(
                (spent..=spent + self.lost).contains(&used),
                "{spent} {used} {}",
                self.lost
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn nothing_is_overspent_and_nothing_leaks(
        rule in prop_oneof![
            Just(hourly()),
            Just(WindowRule::Rolling(SignedDuration::from_secs(700))),
            Just(WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::get("Europe/Berlin").unwrap())),
            Just(WindowRule::Lifetime),
        ],
        events in proptest::collection::vec(any_event(), 1..80),
    ) {
        let mut harness = OrderHarness {
            account: new(terms(limit(1_000), rule)),
            stored: LedgerRecord::default(),
            late: None,
            gateways: vec![Gateway::default(); GATEWAYS],
            now: 0,
            spent: Vec::new(),
            lost: 0,
        };
        for event in &events {
            harness.event(event);
            harness.check();
        }
        harness.quiet();
        harness.check();
    }
}
