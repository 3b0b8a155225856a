//! The lease protocol as a model that is checked exhaustively: two leaders, two gateways, a limit of two calls, the
//! real [`Account`] and [`Wallet`]. Messages and writes can be late, repeated, or never arrive; leaders are deposed and
//! do not know it; gateways crash with a call open. What happens is bounded in number, not in order.

use std::collections::BTreeMap;
use std::fmt::{Debug, Write};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use agentloop::api::NamespacedName;
use agentloop::api::amount::{Amount, LimitAmounts};
use agentloop::api::budget::LedgerRecord;
use agentloop::ledger::account::{
    Account, DurableGrant, GrantRequest, LeaseHolder, LeaseId, LeaseStatement, LedgerTerms,
};
use agentloop::ledger::wallet::{AccountDraw, Reservation, Wallet};
use agentloop::ledger::window::WindowRule;
use jiff::Timestamp;
use stateright::{Checker, Model, Property};

const LIMIT: i64 = 2;
const CALL: Amount = Amount {
    calls: 1,
    ..Amount::ZERO
};
/// What a gateway asks for: each alone could spend the limit.
const ALL: Amount = Amount {
    calls: LIMIT,
    ..Amount::ZERO
};
const LIMITS: LimitAmounts = LimitAmounts {
    calls: Some(LIMIT),
    tokens: None,
    input_tokens: None,
    output_tokens: None,
    cost: None,
};
const NOW: Timestamp = Timestamp::UNIX_EPOCH;

/// A part of a state, distinguished from others by all of its visible content.
#[derive(Clone, Debug)]
struct HashedState<T> {
    value: Arc<T>,
    digest: u64,
}

struct Digest(DefaultHasher);

impl Write for Digest {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

impl<T: Debug> HashedState<T> {
    fn new(value: T) -> Self {
        let mut digest = Digest(DefaultHasher::new());
        write!(digest, "{value:?}").unwrap();
        Self {
            digest: digest.0.finish(),
            value: Arc::new(value),
        }
    }
}

impl<T> PartialEq for HashedState<T> {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl<T> Hash for HashedState<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

#[derive(Clone, Debug)]
struct Gateway {
    wallet: Wallet,
    open: Vec<Reservation>,
    /// Of the calls that are open or over: the provider may have billed each.
    calls: i64,
}

#[derive(Clone, Debug)]
enum Message {
    Request(usize, usize, Vec<LeaseStatement>, Option<GrantRequest>),
    /// Of a leader, or of a process that has ended: its write can still take effect, but its outcome is not observed.
    Write(Option<usize>, LedgerRecord),
    Answer(usize, i64, Vec<DurableGrant>, Vec<LeaseId>),
}

/// How many events may still happen, so that the model is finite.
#[derive(Clone, Debug, PartialEq, Hash)]
struct RemainingSteps {
    take_overs: u8,
    requests: [u8; 2],
    closes: u8,
    crashes: u8,
    repeats: u8,
}

#[derive(Clone, Debug, PartialEq, Hash)]
struct State {
    record: HashedState<Option<LedgerRecord>>,
    leaders: [HashedState<Option<Account>>; 2],
    gateways: [HashedState<Gateway>; 2],
    net: Vec<HashedState<Message>>,
    left: RemainingSteps,
    refused: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    TakeOver(usize),
    Request(usize, usize),
    Deliver(usize),
    Repeat(usize),
    Compose(usize),
    Call(usize),
    Settle(usize),
    Crash(usize),
    Close(usize),
}

#[derive(Clone)]
struct Leases {
    /// A broken rule: a leader overwrites the record of another one.
    forced: bool,
    /// The first to ask takes all.
    greedy: bool,
}

fn terms() -> LedgerTerms {
    LedgerTerms {
        limits: LIMITS,
        per_agent: LimitAmounts::default(),
        window: WindowRule::Lifetime,
    }
}

fn who(gateway: usize) -> LeaseHolder {
    LeaseHolder {
        record: ["r0", "r1"][gateway].into(),
        agent: NamespacedName::new("n", ["a0", "a1"][gateway]),
        pod_uid: String::new(),
        epoch: 1,
    }
}

const DRAWS: [AccountDraw<'static>; 1] = [AccountDraw {
    account: "a",
    limits: LIMITS,
}];

impl State {
    fn send(&mut self, message: Message) {
        self.net.push(HashedState::new(message));
        self.net.sort_by_key(|message| message.digest);
    }

    fn deliver(&mut self, message: &Message, forced: bool) {
        match message {
            Message::Request(gateway, leader, statements, ask) => {
                let Some(mut account) = self.leaders[*leader].value.as_ref().clone() else {
                    return;
                };
                let who = who(*gateway);
                let unknown = statements
                    .iter()
                    .filter(|statement| !account.apply_statement(&who, statement, NOW))
                    .map(|statement| statement.lease)
                    .collect();
                if let Some(ask) = ask {
                    let _ = account.request_grant(&who, ask, NOW);
                }
                let answer = Message::Answer(*gateway, account.epoch(), account.durable_grants(&who.record), unknown);
                self.leaders[*leader] = HashedState::new(Some(account));
                self.send(answer);
            }
            Message::Write(leader, record) => {
                let over = self.record.value.as_ref().as_ref().map_or(0, |record| record.epoch);
                if record.epoch != over + 1 && !forced {
                    self.refused = true;
                    if let Some(leader) = leader {
                        self.leaders[*leader] = HashedState::new(None);
                    }
                    return;
                }
                self.record = HashedState::new(Some(record.clone()));
                let Some(leader) = leader else { return };
                if let Some(mut account) = self.leaders[*leader].value.as_ref().clone() {
                    account.confirm_record(record);
                    // Those who wait get an answer.
                    for gateway in 0..2 {
                        let leases = account.durable_grants(&who(gateway).record);
                        if !leases.is_empty() {
                            self.send(Message::Answer(gateway, account.epoch(), leases, Vec::new()));
                        }
                    }
                    self.leaders[*leader] = HashedState::new(Some(account));
                }
            }
            Message::Answer(gateway, epoch, leases, unknown) => {
                let mut of = self.gateways[*gateway].value.as_ref().clone();
                let leases: Vec<_> = leases.iter().map(|granted| (granted.clone(), None)).collect();
                of.wallet.apply_grants("a", *epoch, &leases, unknown);
                self.gateways[*gateway] = HashedState::new(of);
            }
        }
    }

    fn calls(&self) -> i64 {
        self.gateways.iter().map(|gateway| gateway.value.calls).sum()
    }
}

impl Model for Leases {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let gateway = || {
            HashedState::new(Gateway {
                wallet: Wallet::default(),
                open: Vec::new(),
                calls: 0,
            })
        };
        let empty = LedgerRecord::default();
        let leader = || HashedState::new(Some(Account::restore(terms(), &empty, NOW)));
        vec![State {
            record: HashedState::new(None),
            leaders: [leader(), leader()],
            gateways: [gateway(), gateway()],
            net: Vec::new(),
            left: RemainingSteps {
                take_overs: 1,
                requests: [1, 1],
                closes: 1,
                crashes: 0,
                repeats: 0,
            },
            refused: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for leader in 0..2 {
            if state.left.take_overs > 0 {
                actions.push(Action::TakeOver(leader));
            }
            let changed = |account: &Account| account.is_changed();
            let writing = |message: &HashedState<Message>| matches!(&*message.value, Message::Write(of, _) if *of == Some(leader));
            if state.leaders[leader].value.as_ref().as_ref().is_some_and(changed) && !state.net.iter().any(writing) {
                actions.push(Action::Compose(leader));
            }
        }
        for gateway in 0..2 {
            let of = &state.gateways[gateway].value;
            if state.left.requests[gateway] > 0 {
                actions.extend((0..2).map(|leader| Action::Request(gateway, leader)));
            }
            actions.push(Action::Call(gateway));
            if !of.open.is_empty() {
                actions.push(Action::Settle(gateway));
            }
            if state.left.crashes > 0 {
                actions.push(Action::Crash(gateway));
            }
            if state.left.closes > 0 {
                actions.push(Action::Close(gateway));
            }
        }
        for message in 0..state.net.len() {
            actions.push(Action::Deliver(message));
            if state.left.repeats > 0 {
                actions.push(Action::Repeat(message));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::TakeOver(leader) => {
                state.left.take_overs -= 1;
                for message in &mut state.net {
                    if let Message::Write(of, record) = &*message.value
                        && *of == Some(leader)
                    {
                        *message = HashedState::new(Message::Write(None, record.clone()));
                    }
                }
                let record = state.record.value.as_ref().clone().unwrap_or_default();
                state.leaders[leader] = HashedState::new(Some(Account::restore(terms(), &record, NOW)));
            }
            Action::Request(gateway, leader) => {
                state.left.requests[gateway] -= 1;
                let of = &state.gateways[gateway].value;
                let statements = of.wallet.statements().map(|(_, statement)| statement).collect();
                let full = if self.greedy { ALL } else { CALL };
                let ask = of.wallet.grant_request("a", CALL, full, 0);
                state.send(Message::Request(gateway, leader, statements, Some(ask)));
            }
            Action::Deliver(place) => {
                let message = state.net.remove(place);
                state.deliver(&message.value, self.forced);
            }
            Action::Repeat(place) => {
                state.left.repeats -= 1;
                let message = state.net[place].clone();
                state.deliver(&message.value, self.forced);
            }
            Action::Compose(leader) => {
                let mut account = state.leaders[leader].value.as_ref().clone()?;
                let record = account.compose();
                state.leaders[leader] = HashedState::new(Some(account));
                state.send(Message::Write(Some(leader), record));
            }
            Action::Call(gateway) => {
                let mut of = state.gateways[gateway].value.as_ref().clone();
                let reservation = of.wallet.reserve(&DRAWS, &CALL, 0).ok()?;
                of.open.push(reservation);
                of.calls += 1;
                state.gateways[gateway] = HashedState::new(of);
            }
            Action::Settle(gateway) => {
                let mut of = state.gateways[gateway].value.as_ref().clone();
                let reservation = of.open.pop()?;
                of.wallet.settle(&reservation, &CALL);
                state.gateways[gateway] = HashedState::new(of);
            }
            Action::Crash(gateway) => {
                state.left.crashes -= 1;
                let of = state.gateways[gateway].value.as_ref();
                let epochs: BTreeMap<_, _> = of.wallet.epochs().map(|(id, epoch)| (id.to_owned(), epoch)).collect();
                let mut wallet = Wallet::restore(epochs, of.wallet.rows());
                for reservation in &of.open {
                    wallet.reopen(reservation);
                    wallet.settle(reservation, &reservation.amount);
                }
                state.gateways[gateway] = HashedState::new(Gateway {
                    wallet,
                    open: Vec::new(),
                    calls: of.calls,
                });
            }
            Action::Close(gateway) => {
                state.left.closes -= 1;
                let mut of = state.gateways[gateway].value.as_ref().clone();
                if !of.wallet.close_all() {
                    return None;
                }
                state.gateways[gateway] = HashedState::new(of);
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("never over the limit", |_, state: &State| state.calls() <= LIMIT),
            Property::always("nothing is counted that was not spent", |_, state: &State| {
                let record = state.record.value.as_ref();
                let settled: i64 = record
                    .iter()
                    .flat_map(|record| &record.buckets)
                    .map(|bucket| bucket.amount.calls)
                    .sum();
                settled <= state.calls()
            }),
            Property::always("settled and outstanding stay within the limit", |_, state: &State| {
                state.record.value.as_ref().as_ref().is_none_or(|record| {
                    let settled: i64 = record.buckets.iter().map(|bucket| bucket.amount.calls).sum();
                    let held: i64 = record.holders.iter().map(|holder| holder.amount.calls).sum();
                    settled + held <= LIMIT
                })
            }),
            Property::sometimes("both spend something", |model: &Self, state: &State| {
                model.greedy || state.gateways.iter().all(|gateway| gateway.value.calls > 0)
            }),
            Property::sometimes("all of the limit is spent", |_, state: &State| state.calls() == LIMIT),
            Property::sometimes("a deposed leader is refused", |_, state: &State| state.refused),
        ]
    }
}

#[test]
fn every_order_of_events_keeps_the_limit() {
    let start = std::time::Instant::now();
    let modest = Leases {
        forced: false,
        greedy: false,
    };
    let checked = modest.checker().threads(2).spawn_bfs().join();
    let greedy = Leases {
        forced: false,
        greedy: true,
    };
    let all_taken = greedy.checker().threads(2).spawn_bfs().join();
    super::figure(&format!(
        "ledger_model {} states of two leaders, two gateways and a limit of {LIMIT} calls, all checked, in {:.1} s",
        checked.unique_state_count() + all_taken.unique_state_count(),
        start.elapsed().as_secs_f64()
    ));
    checked.assert_properties();
    all_taken.assert_properties();
}

#[test]
fn the_model_detects_that_a_forced_write_breaks_it() {
    let forced = Leases {
        forced: true,
        greedy: true,
    };
    let checked = forced.checker().threads(2).spawn_bfs().join();
    assert!(
        checked.discovery("never over the limit").is_some()
            || checked
                .discovery("settled and outstanding stay within the limit")
                .is_some()
    );
}
